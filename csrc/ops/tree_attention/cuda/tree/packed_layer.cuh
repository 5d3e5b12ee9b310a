// Copies a layer into packed parents: keys rotated by their place under the parent, values as they are.
#pragma once

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/cuda/tree/packed_layer.h"
#include "ops/tree_attention/cuda/tree/packed_parent.cuh"

namespace htree::tree_attention {

constexpr int kPackWarps = 8;

// One warp per row (batch, kv head, node slot); lane i handles the key dims 2i, 2i + 1 of both halves. Rows
// past the last node are zero.
template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kPackWarps * 32) pack_layer_kernel(PackParams p) {
  using Block = PackedParent<kKeyDim, kValueDim>;
  const int lane = threadIdx.x % 32;
  const int64_t row_idx = int64_t{blockIdx.x} * kPackWarps + threadIdx.x / 32;
  const int64_t rows_per_head = p.num_parents * kParentRows;
  if (row_idx >= p.num_batches * p.num_kv_heads * rows_per_head) {
    return;
  }
  const int64_t node = row_idx % rows_per_head;
  const int64_t head = row_idx / rows_per_head % p.num_kv_heads;
  const int64_t batch = row_idx / rows_per_head / p.num_kv_heads;
  const int row = static_cast<int>(node % kParentRows);
  char* block =
      p.packed + ((batch * p.num_kv_heads + head) * p.num_parents + node / kParentRows) * Block::kBytes;
  const bool exists = node < p.num_nodes;

  const T* key =
      static_cast<const T*>(p.keys.data) + batch * p.keys.batch + node * p.keys.row + head * p.keys.head;
  constexpr int kHalf = kKeyDim / 2;
  const int dim = 2 * lane;
  const bool active = exists && dim < kHalf;
  float low[2] = {}, high[2] = {};
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    low[i] = active ? device::to_acc(key[dim + i]) : 0.f;
    high[i] = active ? device::to_acc(key[kHalf + dim + i]) : 0.f;
    largest = fmaxf(largest, fmaxf(finite_magnitude(low[i]), finite_magnitude(high[i])));
  }
  largest = device::warp_reduce<device::Max>(largest);
  const PowerOfTwo power = key_row_scale(largest);
  if (dim < kHalf) {
    float first[2], second[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 rotation = p.rope[row * kHalf + dim + i];
      const float x = low[i] * power.scale, y = high[i] * power.scale;
      first[i] = x * rotation.x - y * rotation.y;
      second[i] = x * rotation.y + y * rotation.x;
    }
    auto store = [&](int at, float a, float b) {
      *reinterpret_cast<uint32_t*>(block + chunk_offset<kKeyDim>(row, at / 8) + at % 8 * 2) =
          device::pack_pair<__half>(a, b);
    };
    store(dim, first[0], first[1]);
    store(kHalf + dim, second[0], second[1]);
  }
  if (lane == 0) {
    *reinterpret_cast<float*>(block + Block::kScaleOffset + row * 4) = power.inverse;
  }

  const uint16_t* value = static_cast<const uint16_t*>(p.values.data) + batch * p.values.batch +
                          node * p.values.row + head * p.values.head;
#pragma unroll
  for (int at = 2 * lane; at < kValueDim; at += 64) {
    const uint32_t pair = exists ? value[at] | static_cast<uint32_t>(value[at + 1]) << 16 : 0u;
    *reinterpret_cast<uint32_t*>(block + Block::kValueOffset + chunk_offset<kValueDim>(row, at / 8) +
                                 at % 8 * 2) = pair;
  }
}

template <typename T, int kDim>
cudaError_t launch_pack_layer(const PackParams& params, cudaStream_t stream) {
  const int64_t rows = params.num_batches * params.num_kv_heads * params.num_parents * kParentRows;
  return launch_kernel(pack_layer_kernel<T, kDim, kDim>,
                       {.grid = num_blocks(rows, kPackWarps), .threads = kPackWarps * 32}, stream, params);
}

}  // namespace htree::tree_attention
