// How the queries of a task come into shared memory: docs/semantics/tree_attention.md §1.4. sm_90a.
//
// They come to the places of the rotated ones as they are, with all rows of a task on the way at once, and each thread
// rotates what it copied. The warps that do so while another task is multiplied must be done before it is, and a task may
// be a single tile: about 2000 cycles of products. So a row costs few instructions beside its arithmetic and waits for
// nothing: a thread's rows are heads of one token where the group allows, which share their angles, and angles and rows
// are on the way before they are needed.
#pragma once

#include "ops/tree_attention/cuda/forward/dense_rows/task.cuh"

namespace htree::tree_attention {

// Warp `warp` of the kWarps that share a task. All lanes call. Masked rows are scaled and rounded here and not rotated.
template <typename T, int kDim, bool kMasked, int kWarps>
class QueryRotator {
 public:
  __device__ __forceinline__ QueryRotator(const DenseRowsParams& params, int warp)
      : params_(params),
        p_(params.dense.attend.gather),
        first_(kUnits * warp / kWarps * kUnitRows),
        end_(kUnits * (warp + 1) / kWarps * kUnitRows),
        row_(threadIdx.x % 32 / kTasks * kRun),
        chunk_(threadIdx.x % kTasks) {}

  // Begins the copies. It reads nothing but queries.
  __device__ __forceinline__ void fetch(const RowsTask& task, char* tile) const {
    const auto begin = [](uint4* to, const T* from) {
      device::copy_async_16(device::shared_address(to), from);
    };
    const auto copy = [](uint4* to, const T* from) { *to = load_eight(from, false); };
    if (!p_.queries.aligned) {
      copy_rows<false>(task, tile, copy);
    } else if (same_token()) {
      copy_rows<true>(task, tile, begin);
    } else {
      copy_rows<false>(task, tile, begin);
    }
    device::commit_copies();
  }

  // Returns whether a factor of this thread's rows is not 1. After a barrier the rows are visible to wgmma.
  __device__ __forceinline__ bool rotate(const RowsTask& task, char* tile, float* factors) const {
    const bool scaled =
        same_token() ? rotate_rows<kRun>(task, tile, factors) : rotate_rows<1>(task, tile, factors);
    device::fence_async_shared();
    return scaled;
  }

  // Brings the queries of a later task to the L2, where the heads of a token lie side by side. One warp calls.
  __device__ __forceinline__ void prefetch(const RowsTask& task) const {
    constexpr int kLine = 128 / sizeof(T);                      // elements
    const int at = static_cast<int>(threadIdx.x % 32) * kLine;  // 32 lines are the most, 16 heads of 128
    if (p_.queries.head != kDim || at >= p_.group * kDim) {
      return;
    }
    const T* line = queries_of(task) + task.first * p_.queries.row + at;
#pragma unroll 1
    for (int token = task.first; token <= task.last; ++token) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
      line += p_.queries.row;
    }
  }

 private:
  static constexpr int kTasks = kDim / 16;  // of a row: 8 dims of the lower half and their partners
  // A warp takes a unit of neighbouring rows at a time, and a thread kRun neighbours of them one after the other.
  static constexpr int kUnitRows = 16;
  static constexpr int kRun = kUnitRows * kTasks / 32;
  static constexpr int kUnits = kRunRows / kUnitRows;
  static_assert(kRun * 32 == kUnitRows * kTasks && kUnits >= kWarps);

  // Whether the rows of a thread's run are heads of one token.
  __device__ __forceinline__ bool same_token() const {
    return p_.group % kRun == 0;
  }

  // Of token 0 of the text and the first head of the task.
  __device__ __forceinline__ const T* queries_of(const RowsTask& task) const {
    return static_cast<const T*>(p_.queries.data) + task.batch * p_.queries.batch +
           int64_t{task.kv_head} * p_.group * p_.queries.head - p_.t0 * p_.queries.row;
  }
  // copy(to, from) for 8 elements each.
  template <bool kSameToken, typename Copy>
  __device__ __forceinline__ void copy_rows(const RowsTask& task, char* tile, Copy copy) const {
    const T* queries = queries_of(task) + chunk_ * 8;
    int unit = first_;
    do {
      const T* from = queries;
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        if (j == 0 || !kSameToken) {
          const BlockRow at(params_, unit + row_ + j);
          from = queries + task.token(at.token) * p_.queries.row + at.head * p_.queries.head;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          copy(place(tile, unit, j, half), from + half * (kDim / 2));
        }
        from += p_.queries.head;
      }
      unit += kUnitRows;
    } while (unit < end_);
  }

  // Takes kRows of a run at a time, heads of one token. Their largest elements come first, side by side, while the angles
  // are on the way: the comparisons and shuffles of one row wait for one another.
  template <int kRows>
  __device__ __forceinline__ bool rotate_rows(const RowsTask& task, char* tile, float* factors) const {
    bool scaled = false;
    int unit = first_, run = 0;
    do {
      float4 rotations[4];
      load_rotations(rotations, task, unit + row_ + run);
      device::wait_copies<0>();
      float largest[kRows];
      row_magnitudes<T, kTasks>(largest, [&](int j, uint4& low, uint4& high) {
        low = *place(tile, unit, run + j, 0);
        high = *place(tile, unit, run + j, 1);
      });
      QueryScale scales[kRows];
      bool plain = true;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        scales[j] = {p_.score_scale, 1.f};
        plain &= fits_half(largest[j], p_.score_scale);
      }
      if (!__all_sync(device::kFullMask, plain)) {
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          scales[j] = query_scale(largest[j], p_.score_scale);
          scaled |= scales[j].factor != 1.f;
        }
      }
      // The rows are read again, so that they need no registers until then.
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        uint4 &low = *place(tile, unit, run + j, 0), &high = *place(tile, unit, run + j, 1);
        const uint4 raw[2] = {low, high};
        uint4 rotated[2];
        rotate_eight<T>(raw[0], raw[1], scales[j].scale, rotations, rotated[0], rotated[1]);
        low = rotated[0];
        high = rotated[1];
        if (chunk_ == 0) {
          factors[unit + row_ + run + j] = scales[j].factor;
        }
      }
      run += kRows;
      if (run == kRun) {
        run = 0;
        unit += kUnitRows;
      }
    } while (unit < end_);
    return scaled;
  }

  __device__ __forceinline__ void load_rotations(float4 (&rotations)[4], const RowsTask& task,
                                                 int row) const {
    const float4* from = reinterpret_cast<const float4*>(
        p_.rope + task.token(BlockRow(params_, row).token) * (kDim / 2) + chunk_ * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kMasked) {
        rotations[i] = make_float4(1.f, 0.f, 1.f, 0.f);
      } else {
        // As __ldg() does, but here: the compiler would put the load off until it is used, behind the wait for rows.
        float4& to = rotations[i];
        asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(to.x), "=f"(to.y), "=f"(to.z), "=f"(to.w)
                     : "l"(from + i));
      }
    }
  }
  // Where this thread's part of row j of its run in a unit lies: panel_offset() with what differs from row to row apart.
  __device__ __forceinline__ uint4* place(char* tile, int unit, int j, int half) const {
    static_assert(kUnitRows % 8 == 0 && (kRun & (kRun - 1)) == 0 && (kTasks & (kTasks - 1)) == 0);
    constexpr int kChunks = kPanelDims / 8;
    const int chunk = (chunk_ ^ row_) % kChunks ^ j ^ half * kTasks % kChunks;
    return reinterpret_cast<uint4*>(tile + half * kTasks / kChunks * kRunRows * kPanelRowBytes +
                                    (unit + row_ + j) * kPanelRowBytes + chunk * 16);
  }

  const DenseRowsParams& params_;
  const GatherParams& p_;
  const int first_, end_;  // the first rows of its first unit and of the one behind its last
  const int row_, chunk_;  // of this thread: its first row in a unit, and its part of each row
};

}  // namespace htree::tree_attention
