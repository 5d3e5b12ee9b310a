// Kernels of one level of the tree: a thread has one pack of dims of one node.
#pragma once

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree/cuda/any/geometry.h"
#include "ops/tree/cuda/any/tree_build.h"

namespace htree::tree_attention {

// Sums the children in order and divides by their number, which is smaller than r for a ragged last parent.
template <typename T, int kPack>
__global__ void __launch_bounds__(kElementThreads)
    tree_build_kernel(const TreeBuildParams<T> params, int64_t num_parents, int64_t num_items) {
  const int64_t packs = params.width / kPack;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kElementThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x; item < num_items;
       item += step) {
    const int64_t pack_idx = item % packs;
    int64_t rest = item / packs;
    const int64_t head = rest % params.num_heads;
    rest /= params.num_heads;
    const int64_t parent = rest % num_parents;
    const int64_t batch = rest / num_parents;

    const int64_t first = parent * params.rate;
    const int64_t left = params.num_children - first;
    const int64_t count = left < params.rate ? left : params.rate;
    const T* child = params.in.data + batch * params.in.batch + first * params.in.row +
                     head * params.in.head + pack_idx * kPack;
    device::Acc<T> sum[kPack] = {};
#pragma unroll 4
    for (int64_t i = 0; i < count; ++i) {
      const auto values = device::load_pack<kPack>(child + i * params.in.row);
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        sum[e] += device::to_acc(values[e]);
      }
    }
    device::Pack<T, kPack> mean;
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      mean[e] = device::from_acc<T>(sum[e] / static_cast<device::Acc<T>>(count));
    }
    device::store_pack(params.out + item * kPack, mean);
  }
}

template <typename T, int kPack>
__global__ void __launch_bounds__(kElementThreads)
    tree_build_backward_kernel(const TreeBuildParams<T> params, int64_t num_items) {
  const int64_t packs = params.width / kPack;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kElementThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x; item < num_items;
       item += step) {
    const int64_t pack_idx = item % packs;
    int64_t rest = item / packs;
    const int64_t head = rest % params.num_heads;
    rest /= params.num_heads;
    const int64_t child = rest % params.num_children;
    const int64_t batch = rest / params.num_children;

    const int64_t parent = child / params.rate;
    const int64_t left = params.num_children - parent * params.rate;
    const auto count = static_cast<device::Acc<T>>(left < params.rate ? left : params.rate);
    const auto values =
        device::load_pack<kPack>(params.in.data + batch * params.in.batch + parent * params.in.row +
                                 head * params.in.head + pack_idx * kPack);
    device::Pack<T, kPack> share;
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      share[e] = device::from_acc<T>(device::to_acc(values[e]) / count);
    }
    device::store_pack(params.out + item * kPack, share);
  }
}

// True when every row of the input starts at a multiple of 16 bytes and holds whole packs.
template <typename T>
bool whole_packs(const TreeBuildParams<T>& params) {
  constexpr int kPack = device::kPackOf<T>;
  return params.width % kPack == 0 && rows_aligned(params.in);
}

template <typename T>
cudaError_t launch_tree_build(const TreeBuildParams<T>& params, cudaStream_t stream) {
  const int64_t num_parents = (params.num_children + params.rate - 1) / params.rate;
  const int64_t elements = params.num_batches * num_parents * params.num_heads * params.width;
  if (elements == 0) {
    return cudaSuccess;
  }
  const auto run = [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const int64_t items = elements / kPack;
    return launch_kernel(tree_build_kernel<T, kPack>, {.grid = blocks_for(items), .threads = kElementThreads},
                         stream, params, num_parents, items);
  };
  return whole_packs(params) ? run(std::integral_constant<int, device::kPackOf<T>>{})
                             : run(std::integral_constant<int, 1>{});
}

template <typename T>
cudaError_t launch_tree_build_backward(const TreeBuildParams<T>& params, cudaStream_t stream) {
  const int64_t elements = params.num_batches * params.num_children * params.num_heads * params.width;
  if (elements == 0) {
    return cudaSuccess;
  }
  const auto run = [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const int64_t items = elements / kPack;
    return launch_kernel(tree_build_backward_kernel<T, kPack>,
                         {.grid = blocks_for(items), .threads = kElementThreads}, stream, params, items);
  };
  return whole_packs(params) ? run(std::integral_constant<int, device::kPackOf<T>>{})
                             : run(std::integral_constant<int, 1>{});
}

}  // namespace htree::tree_attention
