// Copies of rows of pages in the layouts of the kernels of attention, which are those of
// ops/tree/cuda/copies.h. No torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "ops/tree/cuda/copies.h"
#include "ops/tree/plan/growing_tree.h"
#include "ops/tree_cache/page_layout.h"

namespace htree::tree_cache {

// The first `tokens` tokens of sequences in pages.
struct PagedSequences {
  PageLayout layout;
  const void* keys = nullptr;            // [num_pages, H_kv, key rows, K]
  const void* values = nullptr;          // [num_pages, H_kv, value rows, V]
  const int32_t* block_table = nullptr;  // [B, max_pages]
  int64_t num_sequences = 0;
  uint32_t tokens = 0;
  bool aligned = false;  // both pools begin at a multiple of 16 bytes
};

// Units [range.first, range.last) of a copy of one layer. Nodes that are not finished are zeros, and so are those in a
// page that the pool does not have.
template <typename Target>
struct PageCopy {
  PagedSequences sequences;
  Target target;
  const float2* rope = nullptr;  // of every position that rows are rotated to; null: no rotation
  uint32_t layer = 0;
  tree_attention::UnitRange range;
};

struct ParentTarget {
  char* packed = nullptr;  // [B, H_kv, num_parents] packed parents
  int64_t num_parents = 0;
};
struct TileTarget {
  tree_attention::DenseTiles tiles;
};
struct ParentSpanTarget {
  tree_attention::PackedSpans spans;
};
struct TileSpanTarget {
  tree_attention::SpanTiles tiles;
};

template <typename T, int kDim, typename Target>
cudaError_t launch_page_copy(const PageCopy<Target>& params, cudaStream_t stream);

}  // namespace htree::tree_cache
