// The top layer laid out for the matrix products of warpgroups, as tiles of 128 consecutive nodes
// of one kv head:
//
//   keys    R_p K_p in fp16 times a power of two per node, p = the node
//           (docs/semantics/tree_attention.md §1.4)
//   values  in the input's dtype
//   scales  per node a float that undoes the power of two
//   flags   per tile: some scale is not 1; some value is infinite or NaN
//
// A tile is cut into panels of 64 dims: 128 rows of 128 bytes in the 128-byte swizzle, so that one bulk copy
// of a tile is an operand. Heads of 32 dims leave half of every row unused. Rows past the last node are zero.
//
// The powers of two are those of the packed parents, 1 for most nodes (packed_layer.cuh). A factor of 1
// changes no bit, so the scales of a tile without the flag are not applied.
#pragma once

#include <cstdint>

#include "device/sm90/pdl.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/sm80/packed_layer.cuh"
#include "ops/tree/cuda/sm80/query_row.cuh"

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

// Whether element `index` of a pair is infinite or NaN.
template <typename T>
__device__ __forceinline__ bool infinite_or_nan(uint32_t pair, int index) {
  constexpr uint32_t kExponent = __is_same(T, __nv_bfloat16) ? 0x7f80u : 0x7c00u;
  return (pair >> (16 * index) & kExponent) == kExponent;
}
template <typename T>
__device__ __forceinline__ bool any_infinite_or_nan(const uint4& eight) {
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  bool any = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    any |= infinite_or_nan<T>(words[i / 2], i % 2);
  }
  return any;
}

constexpr int kLayerThreads = 256;
constexpr int kLayerRows = kDenseTileNodes / kTileParts;

// Copies the top layer into tiles: keys rotated to their positions, values as they are. A block takes a part of a tile
// of a (batch, kv head). A thread takes 8 key dims of the lower half of a row and their partners in the upper half, and
// as much of the values, so that all it reads is on the way at once.
template <typename T, int kDim>
__global__ void __launch_bounds__(kLayerThreads) dense_layer_kernel(DenseLayerParams p) {
  constexpr int kHalf = kDim / 2;
  constexpr int kTasks = kDim / 16;  // of a row
  static_assert(kLayerRows * kTasks <= kLayerThreads && kLayerRows * kTasks % 32 == 0);
  // In 32 bits, because divisions of 64 take longer than the loads.
  const unsigned tile = blockIdx.x / kTileParts, part = blockIdx.x % kTileParts;
  const unsigned num_tiles = p.tiles.num_tiles, num_heads = static_cast<unsigned>(p.num_kv_heads);
  const unsigned head_index = tile / num_tiles;
  const int64_t batch = head_index / num_heads, head = head_index % num_heads;
  const int64_t tile_index = tile;
  const bool active = threadIdx.x < kLayerRows * kTasks;  // for whole warps
  const int row = static_cast<int>(part * kLayerRows + threadIdx.x / kTasks);
  const int chunk = threadIdx.x % kTasks;
  const int64_t node = int64_t{tile - head_index * num_tiles} * kDenseTileNodes + row;
  const bool exists = active && node < p.num_nodes;
  uint4 key[2] = {}, value[2] = {};
  if (exists) {
    const auto row_of = [&](const TensorView& view) {
      return static_cast<const T*>(view.data) + batch * view.batch + node * view.row + head * view.head +
             chunk * 8;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      key[i] = load_eight(row_of(p.keys) + i * kHalf, p.keys.aligned);
      value[i] = load_eight(row_of(p.values) + i * kHalf, p.values.aligned);
    }
  }
  // Keys and values are older than the kernel before this one, the rotations may be its.
  device::pdl_wait();
  if (threadIdx.x == 0) {
    device::pdl_launch_dependents();
  }
  bool scaled = false;
  if (active) {
    float4 rotations[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rotations[i] = exists && p.rope ? reinterpret_cast<const float4*>(p.rope + node * kHalf + chunk * 8)[i]
                                      : make_float4(1.f, 0.f, 1.f, 0.f);
    }
    float low[8], high[8];
    widen_eight<T>(key[0], low);
    widen_eight<T>(key[1], high);
    const PowerOfTwo power = key_row_scale(row_magnitude<kTasks>(low, high));
    scaled = power.scale != 1.f;
    uint4 rotated[2];
    rotate_eight(low, high, power.scale, rotations, rotated[0], rotated[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t at =
          tile_index * kTopTileBytes<kDim> + panel_offset(kDenseTileNodes, row, i * kTasks + chunk);
      *reinterpret_cast<uint4*>(p.tiles.keys + at) = rotated[i];
      *reinterpret_cast<uint4*>(p.tiles.values + at) = value[i];
    }
    if (chunk == 0) {
      p.tiles.scales[tile_index * kDenseTileNodes + row] = power.inverse;
    }
  }
  scaled = __syncthreads_or(scaled);
  const bool infinite =
      __syncthreads_or(any_infinite_or_nan<T>(value[0]) || any_infinite_or_nan<T>(value[1]));
  if (threadIdx.x == 0) {
    reinterpret_cast<uint8_t*>(p.tiles.flags + tile_index)[part] =
        static_cast<uint8_t>((scaled ? kScaledKeys : 0) | (infinite ? kInfiniteValues : 0));
  }
}

// Between the kernel that wrote keys or values and this one must lie one that is launched without `pdl`, as
// that of the table of rotations is, see dense_layer_kernel. Blocks share multiprocessors, but those that begin early
// do so when every block of the kernel before has begun, so they spread like any others.
template <typename T, int kDim>
cudaError_t launch_dense_layer(const DenseLayerParams& params, cudaStream_t stream) {
  const int64_t tiles = params.num_batches * params.num_kv_heads * params.tiles.num_tiles;
  return launch_kernel(
      dense_layer_kernel<T, kDim>,
      {.grid = static_cast<unsigned>(tiles * kTileParts), .threads = kLayerThreads, .pdl = true}, stream,
      params);
}

}  // namespace htree::tree_attention
