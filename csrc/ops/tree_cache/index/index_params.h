// What the CUDA kernels take that choose by an index: raw pointers and sizes, no torch.
#pragma once

#include <type_traits>

#include "ops/selection/cuda/any/block_params.h"
#include "ops/tree_cache/index/sm90/choice_plan.h"
#include "ops/tree_cache/tree_cache_params.h"

namespace htree::tree_cache {

constexpr int kMostIndexDim = 128;

// An index key as the pages hold it: numbers of type T, or E4M3 codes, beside which queries are bf16.
using IndexCode = uint8_t;
template <typename Key>
using IndexNumber = std::conditional_t<std::is_same_v<Key, IndexCode>, __nv_bfloat16, Key>;

// Index queries of a call, and the index keys of all pages.
template <typename Key>
struct IndexRows {
  const IndexNumber<Key>* query = nullptr;  // [N_q, H_i, d]
  int64_t query_row = 0;
  int64_t query_head = 0;
  const Key* keys = nullptr;        // [num_pages, H_i, P, d], aligned to 16 bytes
  const uint8_t* scales = nullptr;  // [num_pages, H_i, P] of codes, else null
  int heads = 1;                    // H_i
  int d = 0;
};

// Scores of the blocks of r tokens before the diagonal one, for each leader among the rows of a chunk.
template <typename Key>
struct IndexScoreParams {
  PageLayout layout;                     // of the tree
  const int32_t* block_table = nullptr;  // [B, max_pages]
  const QueryRow* rows = nullptr;        // [total]
  int64_t first = 0;                     // rows of the chunk
  int64_t num = 0;
  IndexRows<Key> index;
  float* scores = nullptr;  // [H_i, num, row]
  int64_t row = 0;
};
template <typename Key>
cudaError_t launch_index_scores(const IndexScoreParams<Key>& params, cudaStream_t stream);

// The lists of all leaders of a chunk by one launch (sm_90), from the top upwards too; needs no description of rows.
template <typename Key>
struct IndexChoiceParams {
  AttendParams<__nv_bfloat16> call;  // layout, sequences, options and chunk
  IndexRows<Key> index;
  ChoicePlan plan;
};
template <typename Key>
cudaError_t launch_index_choice(const IndexChoiceParams<Key>& params, cudaStream_t stream);

// The rows [first, first + num) of a call as sequences of select_blocks: row i of the chunk is document i and slot i, with one
// leader if it leads. `layers` rows of lists lie between two of them.
cudaError_t launch_index_documents(const QueryRow* rows, int64_t first, int64_t num, int layers,
                                   tree_attention::BlockDocument* documents, cudaStream_t stream);

// Writes new rows as codes and their scales: `rows.layout` is that of index_layout(), `rows.k` are the rows.
cudaError_t launch_append_codes(const AppendParams<__nv_bfloat16>& rows, IndexCode* codes, uint8_t* scales,
                                cudaStream_t stream);

}  // namespace htree::tree_cache
