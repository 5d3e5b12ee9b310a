// Rotation kernel: a thread has one pack of elements of the lower half and the pack of their partners
// in the upper half.
#pragma once

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/rotary.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree/cuda/any/geometry.h"
#include "ops/tree/cuda/any/rope_params.h"

namespace htree::tree_attention {

template <typename T, typename TableT, int kPack>
__global__ void __launch_bounds__(kElementThreads)
    rope_kernel(const RopeParams<T, TableT> params, int64_t num_items) {
  const int64_t half = params.width / 2;
  const int64_t packs = half / kPack;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kElementThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x; item < num_items;
       item += step) {
    const int64_t pair = item % packs * kPack;
    const int64_t vector = item / packs;
    const int64_t head = vector % params.num_heads;
    const int64_t row = vector / params.num_heads % params.num_rows;
    const int64_t batch = vector / params.num_heads / params.num_rows;

    const int64_t position_idx = batch * params.position_batch + row * params.position_row;
    int64_t position = params.wide_positions ? static_cast<const int64_t*>(params.positions)[position_idx]
                                             : static_cast<const int32_t*>(params.positions)[position_idx];
    position = position < 0 ? 0 : position >= params.table_size ? params.table_size - 1 : position;
    const TableT* cos = params.table.cos + position * params.table.cos_row + pair;
    const TableT* sin = params.table.sin + position * params.table.sin_row + pair;

    const T* x = params.x.data + batch * params.x.batch + row * params.x.row + head * params.x.head + pair;
    auto low = device::load_pack<kPack>(x);
    auto high = device::load_pack<kPack>(x + half);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      TableT a = device::to_acc(low[e]);
      TableT b = device::to_acc(high[e]);
      device::rotate_pair(a, b, cos[e], params.inverse ? -sin[e] : sin[e]);
      low[e] = device::from_acc<T>(a);
      high[e] = device::from_acc<T>(b);
    }
    T* out = params.out + vector * params.width + pair;
    device::store_pack(out, low);
    device::store_pack(out + half, high);
  }
}

template <typename T, typename TableT>
cudaError_t launch_rope(const RopeParams<T, TableT>& params, cudaStream_t stream) {
  constexpr int kWide = device::kPackOf<T>;
  const int64_t half = params.width / 2;
  const int64_t pairs = params.num_batches * params.num_rows * params.num_heads * half;
  if (pairs == 0) {
    return cudaSuccess;
  }
  const auto run = [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const int64_t items = pairs / kPack;
    return launch_kernel(rope_kernel<T, TableT, kPack>,
                         {.grid = blocks_for(items), .threads = kElementThreads}, stream, params, items);
  };
  return half % kWide == 0 && rows_aligned(params.x) ? run(std::integral_constant<int, kWide>{})
                                                     : run(std::integral_constant<int, 1>{});
}

}  // namespace htree::tree_attention
