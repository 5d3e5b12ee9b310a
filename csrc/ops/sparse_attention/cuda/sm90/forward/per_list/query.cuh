// The query rows of a list in shared memory, as the A operand of S = Q K'^T, and a tile of packed parents as
// an operand of wgmma.
#pragma once

#include "device/shared_memory.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/per_list/task.cuh"
#include "ops/tree/cuda/sm80/query_row.cuh"

namespace htree::tree_attention {

// Loads rows [first_row, first_row + kCount) of the block, rotated to position n - 1 of their query, in fp16
// with a power of two per row. 128 threads call, `thread` in 0 ... 127. The sign of the scale goes with the
// queries, its size into shared.unscale.
template <typename T, typename Tile, int kCount>
__device__ __forceinline__ void load_query_rows(const GatherParams& p, const ListTask& task,
                                                PerListShared<Tile>& shared, int first_row, int thread) {
  constexpr int kHalf = Tile::kKeyDim / 2;
  constexpr int kLanes = kHalf / 8;  // lanes on one row: each has 8 dims of the lower half and their partners
  constexpr int kRowsPerPass = 128 / kLanes;
  const int batch = task.head_index / p.num_kv_heads, kv_head = task.head_index % p.num_kv_heads;
  const T* head_rows = static_cast<const T*>(p.queries.data) + batch * p.queries.batch +
                       static_cast<int64_t>(kv_head) * p.group * p.queries.head;
  const int dim = thread % kLanes * 8;
  const float sign = p.score_scale < 0.f ? -1.f : 1.f;
  constexpr int kPasses = (kCount + kRowsPerPass - 1) / kRowsPerPass;
  // All rows are asked for before any is used: one round trip to memory.
  uint4 raw_low[kPasses], raw_high[kPasses];
  int position[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row_idx = pass * kRowsPerPass + thread / kLanes;
    const ListRow at = ListRow::of<Tile>(p, task, first_row + row_idx);
    raw_low[pass] = raw_high[pass] = uint4{0, 0, 0, 0};
    position[pass] = 0;
    if ((kCount % kRowsPerPass == 0 || row_idx < kCount) && at.exists) {
      const T* from = head_rows + at.query * p.queries.row + at.head * p.queries.head + dim;
      raw_low[pass] = load_eight(from, p.queries.aligned);
      raw_high[pass] = load_eight(from + kHalf, p.queries.aligned);
      position[pass] = max(task.num_slots - 1, 0) * kParentRows +
                       static_cast<int>(node_of(p, p.t0 + at.query) % kParentRows);
    }
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row_idx = pass * kRowsPerPass + thread / kLanes;
    const int row = first_row + row_idx;
    float low[8], high[8];
    widen_eight<T>(raw_low[pass], low);
    widen_eight<T>(raw_high[pass], high);
    const PowerOfTwo power = half_range_scale(row_magnitude<kLanes>(low, high));
    const float4* rotation =
        reinterpret_cast<const float4*>(p.rope + static_cast<int64_t>(position[pass]) * kHalf + dim);
    const float4 rotations[4] = {__ldg(rotation), __ldg(rotation + 1), __ldg(rotation + 2),
                                 __ldg(rotation + 3)};
    uint4 rotated_low, rotated_high;
    rotate_eight(low, high, power.scale * sign, rotations, rotated_low, rotated_high);
    if (kCount % kRowsPerPass != 0 && row_idx >= kCount) {
      continue;
    }
    const uint32_t rows = device::shared_address(shared.query);
    device::store_shared_16(rows + chunk_offset<Tile::kKeyDim>(row, dim / 8), rotated_low);
    device::store_shared_16(rows + chunk_offset<Tile::kKeyDim>(row, dim / 8 + kLanes), rotated_high);
    if (thread % kLanes == 0) {
      // Never 0: a score of -inf stands for a key that takes no part and must stay -inf.
      shared.unscale[row] = fmaxf(power.inverse * fabsf(p.score_scale), 0x1p-126f);
    }
  }
  device::fence_async_shared();
}

// Descriptors of a tile of packed parents. Groups of 8 rows lie 8 rows apart whatever the head dim.
template <int kDim>
struct TileOperand {
  static constexpr device::Swizzle kSwizzle = kDim == 32 ? device::Swizzle::k64 : device::Swizzle::k128;
  static constexpr uint32_t kGroupBytes = 8 * kDim * 2;

  // Rows are the dimension m or n, dims the dimension k.
  __device__ __forceinline__ static uint64_t rows(const void* tile) {
    return device::wgmma_descriptor<kSwizzle>(device::shared_address(tile), 16, kGroupBytes);
  }
  // The 16 dims from 16 * step on.
  __device__ __forceinline__ static uint64_t dims(uint64_t rows, int step) {
    return device::advance(rows, dims_offset(step));
  }
  __device__ __forceinline__ static constexpr uint32_t dims_offset(int step) {
    return step / 4 * 1024 + step % 4 * 32;
  }
  // The descriptor `bytes` further on, a multiple of 16, as device::advance(). Only the lower half
  // changes: the upper one stays a constant, which spares half of the instructions that bring
  // descriptors into uniform registers.
  __device__ __forceinline__ static uint64_t further(uint64_t descriptor, uint32_t bytes) {
    return (descriptor & 0xffffffff00000000ull) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
  }
  // Rows are the dimension k, dims the dimension n. With head dim 128 the upper 64 dims stand
  // 1024 bytes further on.
  __device__ __forceinline__ static uint64_t transposed(const void* tile) {
    return device::wgmma_descriptor<kSwizzle>(device::shared_address(tile), 1024, kGroupBytes);
  }
};

}  // namespace htree::tree_attention
