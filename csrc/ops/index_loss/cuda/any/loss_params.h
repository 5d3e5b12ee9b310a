// What the kernels of index_loss are given. docs/semantics/index_loss.md §9.3. No torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/tree/cuda/any/geometry.h"

namespace htree::index_loss {

using tree_attention::View;

// A position of a batch; they ascend.
struct LossRow {
  int32_t token;    // in its sequence, or -1 where the position is left out
  int32_t start;    // the first token of its document
  int32_t units;    // columns that it counts; 0 where it is left out
  int32_t run_end;  // behind the last row of its batch with the same start
};

struct LossRowParams {
  const int64_t* positions = nullptr;   // [batch, rows], ascending
  const int32_t* cu_seqlens = nullptr;  // [num_documents + 1], or null for sequences of `tokens` tokens
  int32_t num_documents = 0;
  int32_t batch = 0, rows = 0, tokens = 0;
  int32_t block_size = 16, unit = 16;
  LossRow* table = nullptr;    // [batch, rows]
  int32_t* counted = nullptr;  // zero before; the number of rows that are not left out
};
cudaError_t launch_loss_rows(const LossRowParams& params, cudaStream_t stream);

// Batches [first_batch, first_batch + num_batches) and columns [first_column, first_column + num_columns) of a call.
struct LossSpan {
  const LossRow* table = nullptr;  // [all batches, rows]
  int32_t rows = 0;
  int32_t first_batch = 0, num_batches = 0;
  int32_t block_size = 16, unit = 16;
  int32_t first_column = 0, num_columns = 0;
  int32_t split_columns = 0;  // of a thread block
};

// [num_batches * rows, kv_heads * parts, num_columns] masses, sums over the heads of a part.
template <typename T>
struct MassParams {
  LossSpan span;
  View<const T> query, key;
  int32_t heads = 0, kv_heads = 0, key_dim = 0;
  int32_t part_heads = 1, part_shift = 0, parts = 1;  // part_heads is 2^part_shift
  float scale = 1.0f;                                 // times log2(e)
  float2* partials = nullptr;  // [splits, num_batches * rows, heads]: maximum and sum of powers of 2 above it
  const float* lse = nullptr;  // [all batches, rows, heads]
  float* masses = nullptr;
};
// T is float, __half or __nv_bfloat16; kMasses: the masses, else the statistics in `partials`.
template <typename T, bool kMasses>
cudaError_t launch_general_masses(const MassParams<T>& params, cudaStream_t stream);
// T is __half or __nv_bfloat16; units have 16 tokens, key_dim is a multiple of 16; rows are aligned to 16 bytes.
template <typename T, bool kMasses>
cudaError_t launch_tensor_masses(const MassParams<T>& params, cudaStream_t stream);

// lse of rows [first, first + num_rows), from the statistics of `splits` shares.
struct CombineParams {
  const float2* partials = nullptr;  // [splits, num_rows]
  int64_t num_rows = 0;
  int32_t splits = 0;
  float* lse = nullptr;  // [num_rows]
};
cudaError_t launch_combine_statistics(const CombineParams& params, cudaStream_t stream);

// The largest product of each column, NaN where one is, and the place in the column that has it first.
template <typename T>
struct ScoreParams {
  LossSpan span;
  View<const T> query, key;  // of the index
  int32_t heads = 0, d = 0;
  float* scores = nullptr;    // [num_batches * rows, heads, num_columns]
  int32_t* places = nullptr;  // the same
};
template <typename T>
cudaError_t launch_index_scores(const ScoreParams<T>& params, cudaStream_t stream);

// What is held of a range of blocks, for the kernels that take blocks.
struct HeldColumns {
  float* masses = nullptr;  // [num_batches * rows, index_heads * parts, num_columns]
  const float* scores = nullptr;
  const int32_t* places = nullptr;
  int32_t index_heads = 1;
  int32_t parts = 1;        // of an index head
  float share = 1.0f;       // of a head in the masses
  int32_t first_block = 0;  // of the range; those before it are held for its keys alone
  bool is_first = true;     // of the ranges of these batches
};

struct LossState;  // any/loss_state.cuh: 4 floats

struct RowLossParams {
  LossSpan span;
  HeldColumns held;
  LossState* states = nullptr;  // [all batches, rows, index_heads]
};
cudaError_t launch_row_losses(const RowLossParams& params, cudaStream_t stream);

struct MeanParams {
  const LossState* states = nullptr;
  const LossRow* table = nullptr;
  const int32_t* counted = nullptr;
  int64_t num_rows = 0;  // of all batches
  int32_t index_heads = 1;
  float* index_lse = nullptr;  // [num_rows, index_heads]
  float* loss = nullptr;
};
cudaError_t launch_mean_loss(const MeanParams& params, cudaStream_t stream);

template <typename T>
struct GradientParams {
  LossSpan span;
  HeldColumns held;  // masses become gradients of scores, at the column that has the maximum of a block
  View<const T> query, key;
  const float* index_lse = nullptr;  // [all batches, rows, index_heads]
  const float* dloss = nullptr;
  const int32_t* counted = nullptr;
  float* row_sums = nullptr;  // [all batches, rows, index_heads, d]
  int32_t d = 0;
};
// The gradients of scores, and what they add to row_sums.
template <typename T>
cudaError_t launch_row_gradients(const GradientParams<T>& params, cudaStream_t stream);

// Of tokens [first_token, last_token), which the held columns have all maxima of.
template <typename T>
struct KeyGradientParams {
  GradientParams<T> of;
  int32_t first_token = 0, last_token = 0;
  View<T> gradient;  // of index_key
};
template <typename T>
cudaError_t launch_key_gradient(const KeyGradientParams<T>& params, cudaStream_t stream);

// Adds up the row_sums of equal positions; `gradient` is zero before.
template <typename T>
struct QueryGradientParams {
  const LossRow* table = nullptr;
  const float* row_sums = nullptr;
  int32_t batch = 0, rows = 0, index_heads = 1, d = 0;
  View<T> gradient;  // of index_query
};
template <typename T>
cudaError_t launch_query_gradient(const QueryGradientParams<T>& params, cudaStream_t stream);

}  // namespace htree::index_loss
