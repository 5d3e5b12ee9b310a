// Parameters of the CUDA decode kernels: raw pointers and sizes. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/compressed_kv/format.h"

namespace htree::compressed_kv {

// Query heads that share one pass over the rows of their kv head.
constexpr int kHeadsPerBlock = 8;
// Tokens of a tile: the rows of one tensor-core product.
constexpr int kTileRows = 16;
// The tensor-core kernel exists for keys and values of one size, up to this: with more, a warp's accumulators
// and query do not fit its registers.
constexpr int kMostTileHeadDim = 256;
// Its grid has the K/V heads along y and the chunks of their query heads along z, of which CUDA allows so many.
constexpr int64_t kMostTileGrid = 65535;

// One compressed tensor, contiguous. Its first bytes are aligned to 16.
struct RowsView {
  const uint8_t* bitmap;   // [rows, D/8]
  const uint8_t* values;   // [rows, row_bytes]
  const uint16_t* scales;  // [rows], fp16; null with 16 bits
  int keep;
  int row_bytes;
};

enum class QueryType { kHalf, kBfloat16, kFloat };

// The dense window of the tensor-core kernel, in half or bfloat16. Its first bytes are aligned to 4. Its
// tokens are dealt to the splits in order, `per_split` to each; 0 means that there is none.
struct WindowView {
  const void* k;  // [B, H_kv, capacity, D]
  const void* v;
  const int32_t* len;  // [B] or null
  int capacity;        // tokens of a sequence
  int per_split;       // at most kMostWindowTokens
  bool bfloat16;
};
// The most tokens of the window that one block may have.
constexpr int kMostWindowTokens = 256;

// What becomes of the sums of a split.
enum class Ending {
  kParts,    // they go to PartsView, for the merge kernel
  kCluster,  // the splits of a kv head are a cluster (sm_90), whose blocks merge them
  kResult    // this is the only split: they become out and lse
};

struct QueryView {
  const void* data;  // [slots, B, H, D of keys]; a slot per kv head of a group for expanded queries, else one
  QueryType type;
};

// Facts that stand in device memory; null where they are not given.
struct SequenceTables {
  const int32_t* comp_len;     // [B]: tokens of a sequence that count
  const int32_t* block_table;  // [B, max_pages]
};

// Sums of the splits for the merge kernel.
struct PartsView {
  float* acc;  // [B, H, num_parts, D of values], not normalised
  float* max;  // [B, H, num_parts], in units of log2
  float* sum;  // [B, H, num_parts]
};

struct HeadCounts {
  int query;  // the queries of a head lie side by side and count as heads of their own
  int kv;
  int chunks;   // blocks for the query heads of one kv head
  int queries;  // of a head

  __host__ __device__ constexpr int per_kv() const { return query / kv; }
  // The newest tokens of the window that head `head`, counted over the batch, does not see.
  __host__ __device__ constexpr int hidden_from(int head) const { return queries - 1 - head % queries; }
};

struct PageCounts {
  int tokens;  // tokens of a page
  int per_sequence;
  int all;
};

struct SplitCounts {
  int launched;    // splits of this launch
  int parts;       // splits of the compressed part, then those of the window
  int first_part;  // the part that split 0 of this launch writes
};

struct OutputView {
  Ending ending;
  void* out;       // [B, H, D of values]
  float* lse;      // [B, H]
  QueryType type;  // type of out
};

struct DecodeParams {
  QueryView q;
  RowsView k;
  RowsView v;
  int64_t num_rows;     // rows of each compressed tensor
  int64_t num_queries;  // B * H
  SequenceTables tables;
  PartsView parts;
  int64_t capacity;    // most tokens of a sequence
  int64_t split_size;  // tokens, a multiple of 16
  HeadCounts heads;
  PageCounts pages;
  SplitCounts splits;
  int num_slots;      // kv heads of a group
  float score_scale;  // scale * log2(e)
  WindowView window;  // for the tensor-core kernel
  OutputView output;
  int most_pdl_blocks;  // of a launch of the tensor-core kernel with LaunchShape::pdl
};

}  // namespace htree::compressed_kv
