// Parameters of the CUDA decode kernels: raw pointers and sizes. Torch-free.
#pragma once

#include <cstdint>

#include "ops/compressed_kv/format.h"

namespace htree::compressed_kv {

// Query heads that share one pass over the rows of their kv head.
constexpr int kHeadsPerBlock = 8;
// Tokens of a tile: the rows of one tensor-core product.
constexpr int kTileRows = 16;

// One compressed tensor, contiguous, first bytes aligned to 16.
struct RowsView {
  const uint8_t* bitmap;   // [rows, D/8]
  const uint8_t* values;   // [rows, row_bytes]
  const uint16_t* scales;  // [rows], fp16; null with 16 bits
  int keep;
  int row_bytes;
};

enum class QueryType { kHalf, kBfloat16, kFloat };

// The dense window of the tensor-core kernel, in half or bfloat16, first bytes aligned to 4. Its tokens are
// dealt to the splits in order, `per_split` to each; 0: none.
struct WindowView {
  const void* k;  // [B, H_kv, capacity, D]
  const void* v;
  const int32_t* len;  // [B] or null
  int capacity;        // tokens of a sequence
  int per_split;       // at most kMostWindowTokens
  bool bfloat16;
};
// Tokens of the window that one block may have.
constexpr int kMostWindowTokens = 256;

// What becomes of the sums of a split.
enum class Ending {
  kParts,    // to part_acc, part_max and part_sum, for the merge kernel
  kCluster,  // the splits of a kv head are a cluster (sm_90), whose blocks merge them
  kResult    // the only split: out and lse
};
constexpr int kMostClusterSplits = 8;  // blocks of a portable cluster

struct DecodeParams {
  const void* q;  // [slots, B, H, D]; more than one slot for expanded queries of a group of kv heads
  QueryType q_type;
  RowsView k;
  RowsView v;
  int64_t num_rows;            // of each compressed tensor
  int64_t num_queries;         // B * H
  const int32_t* comp_len;     // [B] or null
  const int32_t* block_table;  // [B, max_pages] or null
  float* part_acc;             // [B, H, num_parts, D], not normalised
  float* part_max;             // [B, H, num_parts], in units of log2
  float* part_sum;             // [B, H, num_parts]
  int64_t capacity;            // tokens of a sequence
  int64_t split_size;          // tokens, a multiple of 16
  int num_heads;
  int num_kv_heads;
  int head_chunks;  // blocks for the query heads of one kv head
  int page;
  int max_pages;
  int num_pages;
  int num_splits;     // of this launch
  int num_parts;      // splits of the compressed part, then those of the window
  int first_part;     // the part that split 0 of this launch writes
  int num_slots;      // kv heads of a group
  float score_scale;  // scale * log2(e)
  WindowView window;  // of the tensor-core kernel
  Ending ending;
  void* out;           // [B, H, D]
  float* lse;          // [B, H]
  QueryType out_type;  // of out

  constexpr int heads_per_kv() const { return num_heads / num_kv_heads; }
};

}  // namespace htree::compressed_kv
