// Copies of the span means, by which nodes are scored instead of their stored means (selection_span, see
// docs/semantics/tree_attention.md §1.15). A span mean is summed in fp32 and rounded once to the input's
// type, as the tree rounds its nodes. Then it is rotated to the position of its node and stored in fp16,
// scaled by a power of two of its own as in packed_layer.cuh.
//
//   packed spans  of a gathered layer: for each parent, block j holds span mean j of each of the 16 children,
//                 laid out as the keys and scales of a packed parent
//   span tiles    of the top layer: tiles of 128 rows as in dense_layer.cuh, without values. span_place()
//                 says which row holds which mean: a thread of the product gets all rows of its nodes.
#pragma once

#include <algorithm>

#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/sm90/dense_layer.cuh"

namespace htree::tree_attention {

struct SpanPlace {
  int node;  // index among the nodes of the group of tiles
  int mean;  // index among the node's means in this tile
};

// The span mean in column `column` of a product with a tile. A wgmma accumulator gives a thread the columns
// 8 i + 2 q + e of each row, with q = lane % 4: those are 2^rows_log2 means of each of the thread's nodes.
// Neighbouring threads have neighbouring runs of up to four nodes, so that they store 64 bytes together.
__host__ __device__ constexpr SpanPlace span_place(int column, int rows_log2) {
  const int quad = column % 8 / 2;
  const int own = column / 8 * 2 + column % 2;  // among the 32 columns of a thread
  const int diagonal_block = own >> rows_log2;
  const int run_log2 = kSpanRowsLog2 - rows_log2 < 2 ? kSpanRowsLog2 - rows_log2 : 2;
  return {((diagonal_block >> run_log2) << (run_log2 + 2)) + (quad << run_log2) +
              (diagonal_block & ((1 << run_log2) - 1)),
          own & ((1 << rows_log2) - 1)};
}

// Which tokens a span mean sums, and the position that it is rotated to.
struct SpanMean {
  int64_t batch, head;
  int64_t first_token;
  int64_t position;
};

// Computes, rotates and scales one span mean. store(dim, x, y) stores the elements `dim` and `dim` + 1
// of the rotated row. Returns the row's power of two and its inverse. Rows without a token are zero.
// Whole warps must call.
template <typename T, int kDim, typename Store>
__device__ __forceinline__ PowerOfTwo copy_span_mean(const SpanCopyParams& p, const SpanMean& mean,
                                                     Store store) {
  constexpr int kHalf = kDim / 2;
  const int dim = 2 * (threadIdx.x % 32);
  const int64_t left = p.num_tokens - mean.first_token;
  const int count = left < p.span ? static_cast<int>(max(left, int64_t{0})) : p.span;
  const bool active = count > 0 && dim < kHalf;
  float low[2] = {}, high[2] = {};
  const T* token = static_cast<const T*>(p.tokens.data) + mean.batch * p.tokens.batch +
                   mean.first_token * p.tokens.row + mean.head * p.tokens.head;
  for (int i = 0; active && i < count; ++i, token += p.tokens.row) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      low[e] += device::to_acc(token[dim + e]);
      high[e] += device::to_acc(token[kHalf + dim + e]);
    }
  }
#pragma unroll
  for (int e = 0; active && e < 2; ++e) {
    low[e] = device::to_acc(device::from_acc<T>(low[e] / static_cast<float>(count)));
    high[e] = device::to_acc(device::from_acc<T>(high[e] / static_cast<float>(count)));
  }
  float largest = 0.f;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    largest = fmaxf(largest, fmaxf(finite_magnitude(low[e]), finite_magnitude(high[e])));
  }
  largest = device::warp_reduce<device::Max>(largest);
  const PowerOfTwo power = key_row_scale(largest);
  if (dim < kHalf) {
    float first[2], second[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float2 rotation = active ? p.rope[mean.position * kHalf + dim + e] : make_float2(1.f, 0.f);
      const float x = low[e] * power.scale, y = high[e] * power.scale;
      first[e] = x * rotation.x - y * rotation.y;
      second[e] = x * rotation.y + y * rotation.x;
    }
    store(dim, first[0], first[1]);
    store(kHalf + dim, second[0], second[1]);
  }
  return power;
}

constexpr int kSpanCopyWarps = 8;

// One warp copies one row (batch, kv head, parent, mean of a child, child).
template <typename T, int kDim>
__global__ void __launch_bounds__(kSpanCopyWarps * 32) pack_spans_kernel(SpanCopyParams p) {
  const int64_t row = int64_t{blockIdx.x} * kSpanCopyWarps + threadIdx.x / 32;
  const int child = static_cast<int>(row % kParentRows);
  const int64_t block_idx = row / kParentRows;
  const int64_t mean = block_idx % p.packed.rows;
  const int64_t parent = block_idx / p.packed.rows % p.packed.num_parents;
  const int64_t head_index = block_idx / p.packed.rows / p.packed.num_parents;
  if (head_index >= p.num_batches * p.num_kv_heads) {
    return;
  }
  char* block = p.packed.blocks + block_idx * packed_span_bytes(kDim);
  const SpanMean from{head_index / p.num_kv_heads, head_index % p.num_kv_heads,
                      (parent * kParentRows + child) * p.node_span + mean * p.span, child};
  const PowerOfTwo power = copy_span_mean<T, kDim>(p, from, [&](int at, float x, float y) {
    *reinterpret_cast<uint32_t*>(block + chunk_offset<kDim>(child, at / 8) + at % 8 * 2) =
        device::pack_pair<__half>(x, y);
  });
  if (threadIdx.x % 32 == 0) {
    *reinterpret_cast<float*>(block + kParentKeyBytes<kDim> + child * 4) = power.inverse;
  }
}

// A thread block fills one tile of a (batch, kv head), a warp one row at a time.
template <typename T, int kDim>
__global__ void __launch_bounds__(kSpanCopyWarps * 32) tile_spans_kernel(SpanCopyParams p) {
  const int64_t tile_index = blockIdx.x;
  const int64_t head_index = tile_index / p.tiles.num_tiles;
  const int64_t tile = tile_index % p.tiles.num_tiles;
  const SpanTiling& tiling = p.tiles.tiling;
  const int64_t first_node = (tile >> tiling.tiles_log2) << tiling.nodes_log2;
  const int64_t first_mean = (tile & ((1 << tiling.tiles_log2) - 1)) << tiling.rows_log2;
  char* keys = p.tiles.keys + tile_index * kTopTileBytes<kDim>;
  bool scaled = false;
  for (int row = threadIdx.x / 32; row < kDenseTileNodes; row += kSpanCopyWarps) {
    const SpanPlace place = span_place(row, tiling.rows_log2);
    const int64_t node = first_node + place.node;
    const SpanMean from{head_index / p.num_kv_heads, head_index % p.num_kv_heads,
                        node * p.node_span + (first_mean + place.mean) * p.span, node};
    const PowerOfTwo power = copy_span_mean<T, kDim>(p, from, [&](int at, float x, float y) {
      *reinterpret_cast<uint32_t*>(keys + panel_offset(kDenseTileNodes, row, at / 8) + at % 8 * 2) =
          device::pack_pair<__half>(x, y);
    });
    scaled |= power.scale != 1.f;
    if (threadIdx.x % 32 == 0) {
      p.tiles.scales[tile_index * kDenseTileNodes + row] = power.inverse;
    }
  }
  scaled = __syncthreads_or(scaled);
  if (threadIdx.x == 0) {
    p.tiles.scaled[tile_index] = scaled;
  }
}

template <typename T, int kDim>
cudaError_t launch_pack_spans(const SpanCopyParams& params, cudaStream_t stream) {
  const int64_t rows =
      params.num_batches * params.num_kv_heads * params.packed.num_parents * params.packed.rows * kParentRows;
  return launch_kernel(pack_spans_kernel<T, kDim>,
                       {.grid = num_blocks(rows, kSpanCopyWarps), .threads = kSpanCopyWarps * 32}, stream,
                       params);
}

template <typename T, int kDim>
cudaError_t launch_tile_spans(const SpanCopyParams& params, cudaStream_t stream) {
  const int64_t tiles = params.num_batches * params.num_kv_heads * params.tiles.num_tiles;
  return launch_kernel(tile_spans_kernel<T, kDim>,
                       {.grid = static_cast<unsigned>(tiles), .threads = kSpanCopyWarps * 32}, stream,
                       params);
}

}  // namespace htree::tree_attention
