// The top layer laid out for the matrix products of warpgroups, as tiles of 128 consecutive nodes
// of one kv head:
//
//   keys    R_p K_p in fp16 times a power of two per node, p = the node
//           (docs/semantics/tree_attention.md §1.4)
//   values  in the input's dtype
//   scales  per node a float that undoes the power of two; per tile a flag: some scale is not 1
//
// A tile is cut into panels of 64 dims: 128 rows of 128 bytes in the 128-byte swizzle, so that one bulk copy
// of a tile is an operand. Heads of 32 dims leave half of every row unused. Rows past the last node are zero.
//
// The powers of two are those of the packed parents, 1 for most nodes (packed_layer.cuh). A factor of 1
// changes no bit, so the scales of a tile whose flag is 0 are not applied.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/cuda/tree/copies.h"
#include "ops/tree_attention/cuda/tree/packed_layer.cuh"

namespace htree::tree_attention {

constexpr int kPanelDims = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kTopPanelBytes = kDenseTileNodes * kPanelRowBytes;

template <int kDim>
constexpr int kPanels = (kDim + kPanelDims - 1) / kPanelDims;
template <int kDim>
constexpr int kTopTileBytes = kPanels<kDim>* kTopPanelBytes;

// Byte offset of the 16-byte chunk `chunk` (8 dims) of row `row`, in a tile whose panels have `rows` rows.
__host__ __device__ constexpr int panel_offset(int rows, int row, int chunk) {
  return chunk / 8 * rows * kPanelRowBytes + row * kPanelRowBytes + (((chunk ^ row) & 7) << 4);
}

constexpr int kDenseLayerWarps = 8;

// Copies the top layer into tiles: keys rotated to their positions, values as they are. A block takes a tile
// of a (batch, kv head), a warp a row of it; lane i handles the key dims 2i, 2i + 1 of both halves.
template <typename T, int kDim>
__global__ void __launch_bounds__(kDenseLayerWarps * 32) dense_layer_kernel(DenseLayerParams p) {
  constexpr int kHalf = kDim / 2;
  const int lane = threadIdx.x % 32;
  const int64_t tile_index = blockIdx.x;
  const int64_t head_index = tile_index / p.tiles.num_tiles;
  const int64_t batch = head_index / p.num_kv_heads, head = head_index % p.num_kv_heads;
  char* keys = p.tiles.keys + tile_index * kTopTileBytes<kDim>;
  char* values = p.tiles.values + tile_index * kTopTileBytes<kDim>;
  bool scaled = false;
  for (int row = threadIdx.x / 32; row < kDenseTileNodes; row += kDenseLayerWarps) {
    const int64_t node = tile_index % p.tiles.num_tiles * kDenseTileNodes + row;
    const bool exists = node < p.num_nodes;
    const T* key =
        static_cast<const T*>(p.keys.data) + batch * p.keys.batch + node * p.keys.row + head * p.keys.head;
    const uint16_t* value = static_cast<const uint16_t*>(p.values.data) + batch * p.values.batch +
                            node * p.values.row + head * p.values.head;
    const int dim = 2 * lane;
    const bool active = dim < kHalf;
    float low[2] = {}, high[2] = {};
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low[i] = active && exists ? device::to_acc(key[dim + i]) : 0.f;
      high[i] = active && exists ? device::to_acc(key[kHalf + dim + i]) : 0.f;
      largest = fmaxf(largest, fmaxf(finite_magnitude(low[i]), finite_magnitude(high[i])));
    }
    largest = device::warp_reduce<device::Max>(largest);
    const PowerOfTwo power = key_row_scale(largest);
    scaled |= power.scale != 1.f;
    if (active) {
      float first[2], second[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 rotation = exists ? p.rope[node * kHalf + dim + i] : make_float2(1.f, 0.f);
        const float x = low[i] * power.scale, y = high[i] * power.scale;
        first[i] = x * rotation.x - y * rotation.y;
        second[i] = x * rotation.y + y * rotation.x;
      }
      const auto store = [&](int at, float a, float b) {
        *reinterpret_cast<uint32_t*>(keys + panel_offset(kDenseTileNodes, row, at / 8) + at % 8 * 2) =
            device::pack_pair<__half>(a, b);
      };
      store(dim, first[0], first[1]);
      store(kHalf + dim, second[0], second[1]);
    }
    if (lane == 0) {
      p.tiles.scales[tile_index * kDenseTileNodes + row] = power.inverse;
    }
#pragma unroll
    for (int at = 2 * lane; at < kDim; at += 64) {
      *reinterpret_cast<uint32_t*>(values + panel_offset(kDenseTileNodes, row, at / 8) + at % 8 * 2) =
          exists ? value[at] | static_cast<uint32_t>(value[at + 1]) << 16 : 0u;
    }
  }
  scaled = __syncthreads_or(scaled);
  if (threadIdx.x == 0) {
    p.tiles.scaled[tile_index] = scaled;
  }
}

template <typename T, int kDim>
cudaError_t launch_dense_layer(const DenseLayerParams& params, cudaStream_t stream) {
  const int64_t tiles = params.num_batches * params.num_kv_heads * params.tiles.num_tiles;
  return launch_kernel(dense_layer_kernel<T, kDim>,
                       {.grid = static_cast<unsigned>(tiles), .threads = kDenseLayerWarps * 32}, stream,
                       params);
}

}  // namespace htree::tree_attention
