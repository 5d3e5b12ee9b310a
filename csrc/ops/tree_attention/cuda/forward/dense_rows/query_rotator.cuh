// How the queries of a task come into shared memory: docs/semantics/tree_attention.md §1.4. sm_90a.
#pragma once

#include "ops/tree_attention/cuda/forward/dense_rows/task.cuh"

namespace htree::tree_attention {

// ---- queries: they come to the places of the rotated ones as they are, with all rows of a task on the way at once,
// and each thread rotates what it copied

// Warp `warp` of the kWarps that share a task. All lanes call. Masked rows are scaled and rounded here and not rotated.
template <typename T, int kDim, bool kMasked, int kWarps>
class QueryRotator {
 public:
  __device__ __forceinline__ QueryRotator(const DenseRowsParams& params, int warp)
      : params_(params), p_(params.dense.attend.gather), warp_(warp), lane_(threadIdx.x % 32) {}

  // Begins the copies. It reads nothing but queries.
  __device__ __forceinline__ void fetch(const RowsTask& task, char* tile) const {
#pragma unroll kUnroll
    for (int step = 0; step < num_steps(); ++step) {
      const int row = row_of(step);
      const BlockRow at(params_, row);
      const int token = task.token(at.token);
      const QueryRow source = query_row<T>(p_, task.batch, task.kv_head, token - p_.t0, at.head, token);
      const T* from = static_cast<const T*>(source.data) + chunk() * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4* to = place(tile, row, half);
        if (p_.queries.aligned) {
          device::copy_async_16(device::shared_address(to), from + half * (kDim / 2));
        } else {
          *to = load_eight(from + half * (kDim / 2), false);
        }
      }
    }
    device::commit_copies();
  }

  // Returns whether a factor of this thread's rows is not 1. After a barrier the rows are visible to wgmma.
  __device__ __forceinline__ bool rotate(const RowsTask& task, char* tile, float* factors) const {
    device::wait_copies<0>();
    bool scaled = false;
    float4 next[4];
    load_rotations(next, task, 0);
#pragma unroll kUnroll
    for (int step = 0; step < num_steps(); ++step) {
      const int row = row_of(step);
      const float4 rotations[4] = {next[0], next[1], next[2], next[3]};
      if (step + 1 < num_steps()) {
        load_rotations(next, task, step + 1);
      }
      uint4 low = *place(tile, row, 0), high = *place(tile, row, 1);
      const float factor = rotate_query_chunks<T, kTasks>(low, high, rotations, p_.score_scale);
      *place(tile, row, 0) = low;
      *place(tile, row, 1) = high;
      if (chunk() == 0) {
        factors[row] = factor;
      }
      scaled |= factor != 1.f;
    }
    device::fence_async_shared();
    return scaled;
  }

 private:
  static constexpr int kTasks = kDim / 16;  // of a row: 8 dims of the lower half and their partners
  static constexpr int kWarpRows = 32 / kTasks;
  static constexpr int kSteps = kRunRows / kWarpRows;
  static constexpr bool kEqual = kSteps % kWarps == 0;
  static constexpr int kUnroll = kEqual ? kSteps / kWarps : 1;

  __device__ __forceinline__ int first_step() const {
    return kEqual ? kSteps / kWarps * warp_ : kSteps * warp_ / kWarps;
  }
  __device__ __forceinline__ int num_steps() const {
    return kEqual ? kSteps / kWarps : kSteps * (warp_ + 1) / kWarps - first_step();
  }
  __device__ __forceinline__ int row_of(int step) const {
    return (first_step() + step) * kWarpRows + lane_ / kTasks;
  }
  __device__ __forceinline__ int chunk() const {
    return lane_ % kTasks;
  }
  __device__ __forceinline__ void load_rotations(float4 (&rotations)[4], const RowsTask& task,
                                                 int step) const {
    const float4* from = reinterpret_cast<const float4*>(
        p_.rope + task.token(BlockRow(params_, row_of(step)).token) * (kDim / 2) + chunk() * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rotations[i] = kMasked ? make_float4(1.f, 0.f, 1.f, 0.f) : __ldg(from + i);
    }
  }
  __device__ __forceinline__ uint4* place(char* tile, int row, int half) const {
    return reinterpret_cast<uint4*>(tile + panel_offset(kRunRows, row, half * kTasks + chunk()));
  }

  const DenseRowsParams& params_;
  const GatherParams& p_;
  const int warp_, lane_;
};

}  // namespace htree::tree_attention
