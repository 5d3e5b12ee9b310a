// Contract of attention over the blocks of a caller's lists: sizes, checks, outputs, and what CPU and CUDA have to provide.
// docs/semantics/sparse_attention.md §8
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "ops/tree/documents.h"
#include "ops/tree/tree_checks.h"

namespace htree::tree_attention {

using OptionalTensor = std::optional<Tensor>;

struct SparseOptions {
  int64_t block_size = 16;
  int64_t selection_stride = 1;
  std::optional<double> scale;
  bool packed = false;  // the sequence holds several documents
};

// The tensors of a call. sinks [H] or undefined.
struct SparseInputs {
  Tensor query;   // [B, T_q, H, K], packed [N_q, H, K]
  Tensor key;     // [B, T, H_kv, K], packed [N_k, H_kv, K]
  Tensor value;   // [B, T, H_kv, V], packed [N_k, H_kv, V]
  Tensor blocks;  // int32 [B, ceil(T_q / s), H_kv or 1, n], packed [N_q, H_kv or 1, n]
  Tensor sinks;
};

using SparseResults =
    std::tuple<Tensor, Tensor>;  // out like query with V, lse without the last dim in the state dtype
using SparseGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // of query, key, value and sinks
using SparseMask = std::array<bool, 4>;

// Check the arguments and return uninitialised outputs, contiguous.
SparseResults prepare_sparse_attention(const char* op, const SparseInputs& x, const SparseOptions& options);
SparseResults prepare_sparse_varlen(const char* op, const SparseInputs& x, const Documents& documents,
                                    const SparseOptions& options);
// The gradients that `mask` wants; the others are undefined. Checks what a forward gave and its gradients too.
SparseGradients prepare_sparse_backward(const char* op, const SparseInputs& x, const SparseResults& results,
                                        const OptionalTensor& dout, const OptionalTensor& dlse,
                                        const SparseMask& mask);

// A call as the kernels take it: sizes are real and not 0, all tensors have a unit last stride, K is even, and
// sinks are in the state dtype.
struct SparseCall {
  SparseInputs x;
  int64_t block_size;        // at most T
  int64_t given_block_size;  // which may be more
  int64_t stride;
  double scale;
  bool packed;  // a row's place is not that in its document

  int64_t batch() const { return x.query.size(0); }
  int64_t num_queries() const { return x.query.size(1); }
  int64_t heads() const { return x.query.size(2); }
  int64_t num_keys() const { return x.key.size(1); }
  int64_t kv_heads() const { return x.key.size(2); }
  int64_t group() const { return heads() / kv_heads(); }
  int64_t value_dim() const { return x.value.size(3); }
  int64_t first_token() const { return num_keys() - num_queries(); }  // of query 0
  int64_t num_blocks() const { return ceil_div(num_keys(), block_size); }
};

// Each writes every element of its results. `dout` has a unit last stride; `dlse` is contiguous, or undefined. Gradients
// that are not wanted are undefined.
using SparseForward = void(const SparseCall& call, const Tensor& out, const Tensor& lse);
using SparseBackward = void(const SparseCall& call, const SparseResults& results, const Tensor& dout,
                            const Tensor& dlse, const SparseGradients& gradients);
struct SparseKernels {
  SparseForward* forward;
  SparseBackward* backward;
  bool on_host;  // documents are on the host: a broken one is an error
};
SparseForward sparse_forward_cpu, sparse_forward_cuda;
SparseBackward sparse_backward_cpu, sparse_backward_cuda;
constexpr SparseKernels kSparseCpu = {sparse_forward_cpu, sparse_backward_cpu, true};
constexpr SparseKernels kSparseCuda = {sparse_forward_cuda, sparse_backward_cuda, false};

// Run checked calls over batches and over documents; the results were prepared.
void run_sparse_forward(const SparseKernels& kernels, const SparseInputs& x, const SparseOptions& options,
                        const SparseResults& results);
void run_sparse_backward(const SparseKernels& kernels, const SparseInputs& x, const SparseOptions& options,
                         const SparseResults& results, const OptionalTensor& dout, const OptionalTensor& dlse,
                         const SparseGradients& gradients);
void run_sparse_varlen(const SparseKernels& kernels, const char* op, const SparseInputs& x,
                       const Documents& documents, const SparseOptions& options,
                       const SparseResults& results);
void run_sparse_varlen_backward(const SparseKernels& kernels, const char* op, const SparseInputs& x,
                                const Documents& documents, const SparseOptions& options,
                                const SparseResults& results, const OptionalTensor& dout,
                                const OptionalTensor& dlse, const SparseGradients& gradients);

}  // namespace htree::tree_attention
