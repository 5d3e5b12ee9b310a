// What the CUDA kernels of the tree cache take: raw pointers and sizes, no torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "ops/tree_cache/decode/decode_plan.h"
#include "ops/tree_cache/lengths.h"
#include "ops/tree_cache/page_layout.h"

namespace htree::tree_cache {

// ---- append

// New rows [N_new, H_kv, width]; the last stride is 1.
template <typename T>
struct NewRows {
  const T* data = nullptr;
  int64_t row = 0;
  int64_t head = 0;
  int width = 0;
};

template <typename T>
struct AppendParams {
  PageLayout layout;
  T* keys = nullptr;    // [num_pages, H_kv, key rows, K]
  T* values = nullptr;  // [num_pages, H_kv, value rows, V]
  NewRows<T> k;
  NewRows<T> v;
  const int32_t* block_table = nullptr;  // [B, max_pages]
  const int32_t* lengths = nullptr;      // [B], before the call
  const int32_t* cu_new = nullptr;       // [B + 1]
  const int32_t* new_lengths = nullptr;  // [B] or null
  int num_sequences = 0;
  int64_t num_rows = 0;  // N_new
  int64_t max_new = 0;   // most new tokens of a sequence
};

template <typename T>
cudaError_t launch_append(const AppendParams<T>& params, cudaStream_t stream);

// ---- packed tokens

// The tokens of all pages in one pool, keys or values: codes [num_pages, H_kv, P, row_bytes], aligned to 16 bytes, and
// an fp16 scale for each row.
struct LeafPool {
  uint8_t* codes = nullptr;
  uint16_t* scales = nullptr;
  int row_bytes = 0;
};

struct LeafPools {
  LeafPool keys;
  LeafPool values;
  int bits = 0;  // 8 or 4; 0: tokens are not packed
};

template <typename T>
struct AppendPackedParams {
  AppendParams<T> append;  // its pools hold nodes and span means
  LeafPools leaves;
  T* key_tail = nullptr;     // [B, H_kv, S, K]
  T* value_tail = nullptr;   // [B, H_kv, S, V]
  uint32_t tail_tokens = 0;  // S
};

template <typename T>
cudaError_t launch_append_packed(const AppendPackedParams<T>& params, cudaStream_t stream);

// ---- attention

// One query, as the first kernel of a call describes it.
struct QueryRow {
  int32_t sequence = 0;
  int32_t token = -1;   // -1: the row is ignored
  int32_t leader = -1;  // the row of the call that has the lists; kFromRing + entry of the ring; kNoLists
  int32_t top = 0;      // top layer of a sequence that ends at the token
};
constexpr int32_t kNoLists = -2;
constexpr int32_t kFromRing = 1 << 30;  // the rows of a call are fewer

// The sequences of a call, and the lists that earlier calls left.
struct CacheSequences {
  const int32_t* block_table = nullptr;  // [B, max_pages]
  const int32_t* lengths = nullptr;      // [B]
  const int32_t* cu_q = nullptr;         // [B + 1]
  const int32_t* q_lengths = nullptr;    // [B] or null
  const int32_t* lists = nullptr;        // [B, ring, L, H_kv, k] or null
  const int32_t* list_pos = nullptr;     // [B, ring] or null
  int32_t* new_lists = nullptr;          // as lists
  int32_t* new_list_pos = nullptr;       // as list_pos
  int num_sequences = 0;
  int ring = 0;
};

struct CacheOptions {
  int top_k = 0;
  int parents = 0;  // the most that a row's candidates have in a layer, see row_tree.h
  int64_t max_top_nodes = 0;
  bool open_top = false;  // no list says what a row's top has: parent i is node i, see row_tree.h
  int stride = 1;
  float scale = 1.0f;
  tree_attention::SelectionOptions selection;
  const float* cos = nullptr;  // [>= the most candidates, K/2], null: no rotation
  const float* sin = nullptr;
  bool lists_given = false;  // the lists of all leaders are in the chunk: an index has chosen
  // The kernel before this one writes them, which may still run (PDL): wait before the first is read. What came before
  // that kernel has completed.
  bool lists_follow = false;
};

// Rows [first, first + num) of a call of `total` rows, and their scratch. The lists of the previous chunk are
// kept, because the leader of a chunk's first rows may be in it.
struct RowChunk {
  int64_t first = 0;
  int64_t num = 0;
  int64_t total = 0;
  int64_t previous = 0;               // first row of the previous chunk
  QueryRow* rows = nullptr;           // [total], or null where nobody asks for them
  int32_t* lists = nullptr;           // [num, L, H_kv, k], filled for leaders alone; null where none are kept
  int32_t* previous_lists = nullptr;  // the lists of the previous chunk
  float* scores = nullptr;            // [num, H_kv, most candidates, G]
  // The same of the span means of a candidate together; null without a span. The decode kernel keeps those of the
  // first layer that chooses here, of eight heads.
  float* span_scores = nullptr;
  uint32_t* keys = nullptr;   // [num, H_kv, most candidates], null where shared memory holds them
  float* part_max = nullptr;  // [num, H_kv, L, splits, G]
  float* part_sum = nullptr;  // the same
  float* part_out = nullptr;  // [num, H_kv, L, splits, G, V]
};

template <typename T>
struct AttendParams {
  PageLayout layout;
  CacheSequences sequences;
  CacheOptions options;
  RowChunk chunk;
  const T* q = nullptr;  // [N_q, H, K]
  int64_t q_row = 0;
  int64_t q_head = 0;
  int group = 1;
  int key_dim = 0;
  int value_dim = 0;
  const T* keys = nullptr;
  const T* values = nullptr;
  LeafPools leaves;      // where tokens are packed: then pools and table of rotations are aligned to 16 bytes
  T* out = nullptr;      // [N_q, H, V]
  float* lse = nullptr;  // [N_q, H]
};

// The most candidates of a row in a layer.
HTREE_HOST_DEVICE int64_t most_candidates(const PageLayout& layout, const CacheOptions& options) {
  return int64_t{layout.rate} * options.parents;
}

// The candidates whose values one block adds. The number is fixed, so that a row's bits follow from
// its own list alone.
constexpr int kSplit = 512;
inline int num_splits(int64_t capacity) {
  return static_cast<int>(ceil_div(capacity, kSplit));
}

// Decides which leaders the ring holds after the call, and describes each row of the whole call.
template <typename T>
cudaError_t launch_rows(const AttendParams<T>& params, cudaStream_t stream);
// Writes the lists of the chunk's leaders from their top upwards, which open every node or say nothing.
template <typename T>
cudaError_t launch_top_lists(const AttendParams<T>& params, cudaStream_t stream);
// Copies the lists of the chunk's leaders to the ring.
template <typename T>
cudaError_t launch_store_ring(const AttendParams<T>& params, cudaStream_t stream);
// Takes the chunk's rows through all layers, where lists are not given with those two around it.
template <typename T>
cudaError_t launch_attend(const AttendParams<T>& params, cudaStream_t stream);
// The same on Hopper in one launch, in two with a stride where lists are not given, twice as many where the last rows are
// apart; with span means launch_top_spans comes first. K = V = kDim; `plans` take the call. Rows need no description. kSpans
// says whether the pages have span means.
template <typename T, int kDim, bool kSpans>
cudaError_t launch_decode(const AttendParams<T>& params, const DecodePlans& plans, cudaStream_t stream);
// The same where tokens are packed. Their scales are aligned to 16 bytes as well.
template <typename T, int kDim, bool kSpans>
cudaError_t launch_decode_packed(const AttendParams<T>& params, const DecodePlans& plans,
                                 cudaStream_t stream);
// Rows whose lists are given, without rotations, span means or packed tokens, in `parts` parts each, and the merge of these.
// Rows need no description. K = V = kDim. `pdl`: the merge may begin early; not in code that would not wait, hopper.h.
template <typename T, int kDim>
cudaError_t launch_listed(const AttendParams<T>& params, int64_t parts, bool pdl, cudaStream_t stream);
// Scores of span means in the layer where a leader first chooses, in chunk.span_scores.
// `blocks` share a row and K/V head.
template <typename T, int kDim>
cudaError_t launch_top_spans(const AttendParams<T>& params, int blocks, cudaStream_t stream);
// The most shared memory that the selection of one row takes for its keys. Where they need more, they
// are in device memory.
constexpr int64_t kMaxKeyBytes = 96 * 1024;

// ---- lengths and pages

cudaError_t launch_lengths(const SequenceLengths& all, const LengthStep& step, bool truncates,
                           cudaStream_t stream);

// pages [2, n]; bytes of a page of each pool.
cudaError_t launch_copy_pages(void* keys, int64_t key_bytes, void* values, int64_t value_bytes,
                              const int32_t* pages, int64_t num, int64_t num_pages, cudaStream_t stream);

}  // namespace htree::tree_cache
