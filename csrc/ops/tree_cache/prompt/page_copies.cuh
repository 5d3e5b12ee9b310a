// The kernel that is declared in page_copies.h, for each layout that rows are copied to. Its arithmetic is that of the
// copies of a contiguous tree (ops/tree/cuda), so that both have the same bytes.
//
// A block takes 32 rows of a unit or of neighbouring ones of the same (sequence, K/V head). A thread takes 8 dims of the
// lower half of a row, their partners in the upper half, and as much of the values.
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/tree/cuda/sm80/packed_layer.cuh"
#include "ops/tree/cuda/sm80/query_row.cuh"
#include "ops/tree/cuda/sm90/dense_layer.cuh"
#include "ops/tree/cuda/sm90/span_copies.cuh"
#include "ops/tree_cache/prompt/page_copies.h"

namespace htree::tree_cache {

// Rows of a block: those that share a flag of a tile.
constexpr int kCopyRows = tree_attention::kDenseTileNodes / tree_attention::kTileParts;

// Where a row comes from and where it goes. A row of a node has values, one of a span mean has none.
struct RowCopy {
  uint32_t node = 0;      // of the layer; what is copied of one that is not finished is zeros
  uint32_t mean = 0;      // index among all span means of the sequence
  uint32_t position = 0;  // that the key is rotated to
  char* keys = nullptr;   // the unit that the row is in
  char* values = nullptr;
  float* scale = nullptr;
  int row = 0;  // of the unit
};

// ---- layouts. rows_of() says how many rows a unit has, place() where row `row` of unit `unit` belongs, offset() where 16
// bytes of it stand, and flag() which byte says that it is not plain, if any does.

template <int kDim>
struct ParentLayout {
  using Target = ParentTarget;
  using Block = tree_attention::PackedParent<kDim, kDim>;
  static constexpr bool kMeans = false;

  __host__ __device__ static uint32_t rows_of(const Target&) { return tree_attention::kParentRows; }
  __device__ static RowCopy place(const Target& to, uint32_t head_index, uint32_t unit, int row) {
    char* block = to.packed + (int64_t{head_index} * to.num_parents + unit) * Block::kBytes;
    RowCopy copy;
    copy.node = unit * tree_attention::kParentRows + row;
    copy.position = row;
    copy.keys = block;
    copy.values = block + Block::kValueOffset;
    copy.scale = reinterpret_cast<float*>(block + Block::kScaleOffset) + row;
    copy.row = row;
    return copy;
  }
  __device__ static int offset(int row, int chunk) { return tree_attention::chunk_offset<kDim>(row, chunk); }
  __device__ static uint8_t* flag(const Target&, uint32_t, uint32_t, int) { return nullptr; }
};

// The place of row `row` of a tile, among the rows of all tiles.
__device__ __forceinline__ int64_t tile_row(int num_tiles, uint32_t head_index, uint32_t tile, int row) {
  return (int64_t{head_index} * num_tiles + tile) * tree_attention::kDenseTileNodes + row;
}
// The flag of the part of a tile that a row is in.
__device__ __forceinline__ uint8_t* tile_flag(int32_t* flags, int num_tiles, uint32_t head_index,
                                              uint32_t tile, int row) {
  return reinterpret_cast<uint8_t*>(flags) + tile_row(num_tiles, head_index, tile, row) / kCopyRows;
}
static_assert(tree_attention::kTileParts == sizeof(int32_t));

template <int kDim>
struct TileLayout {
  using Target = TileTarget;
  static constexpr bool kMeans = false;

  __host__ __device__ static uint32_t rows_of(const Target&) { return tree_attention::kDenseTileNodes; }
  __device__ static RowCopy place(const Target& to, uint32_t head_index, uint32_t unit, int row) {
    const int64_t at = tile_row(to.tiles.num_tiles, head_index, unit, row);
    const int64_t tile = at / tree_attention::kDenseTileNodes * tree_attention::kTopTileBytes<kDim>;
    RowCopy copy;
    copy.node = copy.position = unit * tree_attention::kDenseTileNodes + row;
    copy.keys = to.tiles.keys + tile;
    copy.values = to.tiles.values + tile;
    copy.scale = to.tiles.scales + at;
    copy.row = row;
    return copy;
  }
  __device__ static int offset(int row, int chunk) {
    return tree_attention::panel_offset(tree_attention::kDenseTileNodes, row, chunk);
  }
  __device__ static uint8_t* flag(const Target& to, uint32_t head_index, uint32_t unit, int row) {
    return tile_flag(to.tiles.flags, to.tiles.num_tiles, head_index, unit, row);
  }
};

// A unit is the blocks of a parent, of which block j has span mean j of each child.
template <int kDim>
struct ParentSpanLayout {
  using Target = ParentSpanTarget;
  static constexpr bool kMeans = true;
  static constexpr int kBlockBytes = static_cast<int>(tree_attention::packed_span_bytes(kDim));

  __host__ __device__ static uint32_t rows_of(const Target& to) {
    return static_cast<uint32_t>(to.spans.rows) * tree_attention::kParentRows;
  }
  __device__ static RowCopy place(const Target& to, uint32_t head_index, uint32_t unit, int row) {
    const auto means = static_cast<uint32_t>(to.spans.rows);
    const uint32_t mean = row / tree_attention::kParentRows;
    const int child = row % tree_attention::kParentRows;
    char* block =
        to.spans.blocks + ((int64_t{head_index} * to.spans.num_parents + unit) * means + mean) * kBlockBytes;
    RowCopy copy;
    copy.node = unit * tree_attention::kParentRows + child;
    copy.mean = copy.node * means + mean;
    copy.position = child;
    copy.keys = block;
    copy.scale = reinterpret_cast<float*>(block + tree_attention::kParentKeyBytes<kDim>) + child;
    copy.row = child;
    return copy;
  }
  __device__ static int offset(int row, int chunk) { return tree_attention::chunk_offset<kDim>(row, chunk); }
  __device__ static uint8_t* flag(const Target&, uint32_t, uint32_t, int) { return nullptr; }
};

template <int kDim>
struct TileSpanLayout {
  using Target = TileSpanTarget;
  static constexpr bool kMeans = true;

  __host__ __device__ static uint32_t rows_of(const Target&) { return tree_attention::kDenseTileNodes; }
  __device__ static RowCopy place(const Target& to, uint32_t head_index, uint32_t unit, int row) {
    const tree_attention::SpanTiling& tiling = to.tiles.tiling;
    const int64_t at = tile_row(to.tiles.num_tiles, head_index, unit, row);
    const tree_attention::SpanPlace place = tree_attention::span_place(row, tiling.rows_log2);
    const uint32_t first_mean = (unit & ((1u << tiling.tiles_log2) - 1)) << tiling.rows_log2;
    RowCopy copy;
    copy.node = copy.position = ((unit >> tiling.tiles_log2) << tiling.nodes_log2) + place.node;
    copy.mean = (copy.node << (tiling.rows_log2 + tiling.tiles_log2)) + first_mean + place.mean;
    copy.keys = to.tiles.keys + at / tree_attention::kDenseTileNodes * tree_attention::kTopTileBytes<kDim>;
    copy.scale = to.tiles.scales + at;
    copy.row = row;
    return copy;
  }
  __device__ static int offset(int row, int chunk) {
    return tree_attention::panel_offset(tree_attention::kDenseTileNodes, row, chunk);
  }
  __device__ static uint8_t* flag(const Target& to, uint32_t head_index, uint32_t unit, int row) {
    return tile_flag(to.tiles.scaled, to.tiles.num_tiles, head_index, unit, row);
  }
};

// Row `place` of a head in a pool, or null where the block table has no page of the pool.
template <typename T, int kDim>
__device__ __forceinline__ const T* page_row(const PagedSequences& sequences, const void* pool,
                                             int64_t page_rows, uint32_t head_index, const Place& place) {
  const PageLayout& layout = sequences.layout;
  const uint32_t sequence = head_index / layout.num_kv_heads, head = head_index % layout.num_kv_heads;
  const auto page =
      static_cast<uint32_t>(sequences.block_table[int64_t{sequence} * layout.max_pages + place.page]);
  return page < layout.num_pages
             ? static_cast<const T*>(pool) +
                   ((int64_t{page} * layout.num_kv_heads + head) * page_rows + place.row) * kDim
             : nullptr;
}

template <typename T, int kDim, typename Layout>
__global__ void __launch_bounds__(kCopyRows*(kDim / 16))
    page_copy_kernel(PageCopy<typename Layout::Target> p, unsigned head_blocks) {
  constexpr int kTasks = kDim / 16;  // of a row
  constexpr int kHalf = kDim / 2;
  const PagedSequences& sequences = p.sequences;
  const unsigned head_index = blockIdx.x / head_blocks;
  const uint32_t unit_rows = Layout::rows_of(p.target);
  const uint32_t index = (blockIdx.x - head_index * head_blocks) * kCopyRows + threadIdx.x / kTasks;
  const auto unit = static_cast<uint32_t>(p.range.first) + index / unit_rows;
  const int chunk = threadIdx.x % kTasks;
  const bool active = unit < p.range.last;  // for all threads of a row
  const RowCopy copy = Layout::place(p.target, head_index, unit, static_cast<int>(index % unit_rows));
  const uint32_t tokens = sequences.layout.tokens[p.layer];
  const bool exists = active && copy.node < sequences.tokens / tokens;
  uint4 key[2] = {}, value[2] = {};
  if (exists) {
    const Place place =
        Layout::kMeans ? sequences.layout.span_mean(copy.mean) : sequences.layout.node(p.layer, copy.node);
    const T* row =
        page_row<T, kDim>(sequences, sequences.keys, sequences.layout.key_rows(), head_index, place);
    const T* values = Layout::kMeans ? nullptr
                                     : page_row<T, kDim>(sequences, sequences.values,
                                                         sequences.layout.value_rows(), head_index, place);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row != nullptr) {
        key[i] = tree_attention::load_eight(row + i * kHalf + chunk * 8, sequences.aligned);
      }
      if (values != nullptr) {
        value[i] = tree_attention::load_eight(values + i * kHalf + chunk * 8, sequences.aligned);
      }
    }
  }
  float low[8], high[8];
  tree_attention::widen_eight<T>(key[0], low);
  tree_attention::widen_eight<T>(key[1], high);
  const tree_attention::PowerOfTwo power =
      tree_attention::key_row_scale(tree_attention::row_magnitude<kTasks>(low, high));
  if (active) {
    float4 rotations[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The table may end before the rows of the last tile do.
      rotations[i] =
          exists && p.rope
              ? reinterpret_cast<const float4*>(p.rope + int64_t{copy.position} * kHalf + chunk * 8)[i]
              : make_float4(1.f, 0.f, 1.f, 0.f);
    }
    uint4 rotated[2];
    tree_attention::rotate_eight(low, high, power.scale, rotations, rotated[0], rotated[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = Layout::offset(copy.row, i * kTasks + chunk);
      *reinterpret_cast<uint4*>(copy.keys + at) = rotated[i];
      if constexpr (!Layout::kMeans) {
        *reinterpret_cast<uint4*>(copy.values + at) = value[i];
      }
    }
    if (chunk == 0) {
      *copy.scale = power.inverse;
    }
  }
  if (uint8_t* flag = Layout::flag(p.target, head_index, unit, copy.row); flag != nullptr) {
    // Units are tiles here, and the rows of a block are one part of one tile.
    const bool scaled = __syncthreads_or(power.scale != 1.f);
    const bool infinite = __syncthreads_or(tree_attention::any_infinite_or_nan<T>(value[0]) ||
                                           tree_attention::any_infinite_or_nan<T>(value[1]));
    if (threadIdx.x == 0) {
      *flag = static_cast<uint8_t>((scaled ? tree_attention::kScaledKeys : 0) |
                                   (infinite ? tree_attention::kInfiniteValues : 0));
    }
  }
}

template <int kDim, typename Target>
struct LayoutOf;
template <int kDim>
struct LayoutOf<kDim, ParentTarget> {
  using Type = ParentLayout<kDim>;
};
template <int kDim>
struct LayoutOf<kDim, TileTarget> {
  using Type = TileLayout<kDim>;
};
template <int kDim>
struct LayoutOf<kDim, ParentSpanTarget> {
  using Type = ParentSpanLayout<kDim>;
};
template <int kDim>
struct LayoutOf<kDim, TileSpanTarget> {
  using Type = TileSpanLayout<kDim>;
};

template <typename T, int kDim, typename Target>
cudaError_t launch_page_copy(const PageCopy<Target>& params, cudaStream_t stream) {
  using Layout = typename LayoutOf<kDim, Target>::Type;
  const int64_t units = params.range.last - params.range.first;
  const int64_t heads = params.sequences.num_sequences * params.sequences.layout.num_kv_heads;
  if (units <= 0 || heads == 0) {
    return cudaSuccess;
  }
  const int64_t head_blocks = ceil_div(units * Layout::rows_of(params.target), kCopyRows);
  return launch_kernel(
      page_copy_kernel<T, kDim, Layout>,
      {.grid = static_cast<unsigned>(heads * head_blocks), .threads = kCopyRows * (kDim / 16)}, stream,
      params, static_cast<unsigned>(head_blocks));
}

}  // namespace htree::tree_cache
