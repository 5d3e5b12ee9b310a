// Schemas, CPU, CUDA and Meta kernels, Autograd and Autocast of sparse_attention.
// docs/semantics/sparse_attention.md §8; docs/semantics/conventions.md §0.5
#include "ops/sparse_attention/sparse_attention.h"

#include "host/autograd.h"
#include "host/op_handle.h"
#include "host/registration.h"

namespace htree::tree_attention {
namespace {

constexpr const char* kOp = "sparse_attention";
constexpr const char* kVarlenOp = "sparse_attention_varlen";

Tensor or_undefined(const OptionalTensor& x) {
  return x.value_or(Tensor());
}

// ---- kernels. Without any (Meta) they end after checks and allocations.

// seen[b, t, h, j] = j <= t and j // block_size in the list of query t and K/V head h; s = scale * q k^T, -inf where not seen
// lse = s.logsumexp(-1); out = (s - lse.logaddexp(sinks)).exp() @ v; where nothing is seen out is 0
template <const SparseKernels* kKernels>
SparseResults forward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& blocks,
                      const OptionalTensor& sinks, int64_t block_size, int64_t selection_stride,
                      std::optional<double> scale) {
  const SparseInputs x = {query, key, value, blocks, or_undefined(sinks)};
  const SparseOptions options = {block_size, selection_stride, scale};
  const SparseResults results = prepare_sparse_attention(kOp, x, options);
  if constexpr (kKernels != nullptr) run_sparse_forward(*kKernels, x, options, results);
  return results;
}

// P' = (s - lse).exp(), w = sigmoid(lse - sinks), D = (dout * out).sum(-1): dS = P' * (w * (dout @ v^T - D) + dlse)
// dq = scale * dS @ k; dk = scale * dS^T @ q; dv = P'^T @ (w * dout); dsinks = -((1 - w) * D).sum((0, 1))
template <const SparseKernels* kKernels>
SparseGradients backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& blocks,
                         const Tensor& out, const Tensor& lse, const OptionalTensor& sinks,
                         const OptionalTensor& dout, const OptionalTensor& dlse, int64_t block_size,
                         int64_t selection_stride, std::optional<double> scale, SparseMask output_mask) {
  constexpr const char* kName = "sparse_attention_backward";
  const SparseInputs x = {query, key, value, blocks, or_undefined(sinks)};
  const SparseOptions options = {block_size, selection_stride, scale};
  prepare_sparse_attention(kName, x, options);
  const SparseGradients gradients = prepare_sparse_backward(kName, x, {out, lse}, dout, dlse, output_mask);
  if constexpr (kKernels != nullptr) {
    run_sparse_backward(*kKernels, x, options, {out, lse}, dout, dlse, gradients);
  }
  return gradients;
}

// for every document: out[its queries] = sparse_attention(query[its queries], key[its keys], value[its keys], its lists)
template <const SparseKernels* kKernels>
SparseResults varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& blocks,
                     const Tensor& cu_seq_q, const Tensor& cu_seq_k, const OptionalTensor& sinks,
                     SymInt max_q, SymInt max_k, int64_t block_size, int64_t selection_stride,
                     std::optional<double> scale) {
  const SparseInputs x = {query, key, value, blocks, or_undefined(sinks)};
  const SparseOptions options = {block_size, selection_stride, scale};
  const Documents documents = {cu_seq_q, cu_seq_k, std::move(max_q), std::move(max_k)};
  const SparseResults results = prepare_sparse_varlen(kVarlenOp, x, documents, options);
  if constexpr (kKernels != nullptr) run_sparse_varlen(*kKernels, kVarlenOp, x, documents, options, results);
  return results;
}

// for every document: the gradients of the call above
template <const SparseKernels* kKernels>
SparseGradients varlen_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                                const Tensor& blocks, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                                const Tensor& out, const Tensor& lse, const OptionalTensor& sinks,
                                const OptionalTensor& dout, const OptionalTensor& dlse, SymInt max_q,
                                SymInt max_k, int64_t block_size, int64_t selection_stride,
                                std::optional<double> scale, SparseMask output_mask) {
  constexpr const char* kName = "sparse_attention_varlen_backward";
  const SparseInputs x = {query, key, value, blocks, or_undefined(sinks)};
  const SparseOptions options = {block_size, selection_stride, scale};
  const Documents documents = {cu_seq_q, cu_seq_k, std::move(max_q), std::move(max_k)};
  prepare_sparse_varlen(kName, x, documents, options);
  const SparseGradients gradients = prepare_sparse_backward(kName, x, {out, lse}, dout, dlse, output_mask);
  if constexpr (kKernels != nullptr) {
    run_sparse_varlen_backward(*kKernels, kName, x, documents, options, {out, lse}, dout, dlse, gradients);
  }
  return gradients;
}

template <const SparseKernels* kKernels>
void register_kernels(const OpKernels& kernels) {
  kernels.impl("sparse_attention", TORCH_FN(forward<kKernels>));
  kernels.impl("_sparse_attention_backward", TORCH_FN(backward<kKernels>));
  kernels.impl("sparse_attention_varlen", TORCH_FN(varlen<kKernels>));
  kernels.impl("_sparse_attention_varlen_backward", TORCH_FN(varlen_backward<kKernels>));
}

}  // namespace

// ---- Autograd and Autocast

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

SparseResults call_forward(const SparseInputs& x, const SparseOptions& o) {
  static const auto op = op_handle<decltype(forward<nullptr>)>("htree::sparse_attention");
  return op.call(x.query, x.key, x.value, x.blocks, if_defined(x.sinks), o.block_size, o.selection_stride,
                 o.scale);
}

SparseGradients call_backward(const SparseInputs& x, const SparseOptions& o, const SparseResults& results,
                              const OptionalTensor& dout, const OptionalTensor& dlse, SparseMask mask) {
  static const auto op = op_handle<decltype(backward<nullptr>)>("htree::_sparse_attention_backward");
  return op.call(x.query, x.key, x.value, x.blocks, std::get<0>(results), std::get<1>(results),
                 if_defined(x.sinks), dout, dlse, o.block_size, o.selection_stride, o.scale, mask);
}

SparseResults call_varlen(const SparseInputs& x, const Documents& d, const SparseOptions& o) {
  static const auto op = op_handle<decltype(varlen<nullptr>)>("htree::sparse_attention_varlen");
  return op.call(x.query, x.key, x.value, x.blocks, d.cu_seq_q, d.cu_seq_k, if_defined(x.sinks), d.max_q,
                 d.max_k, o.block_size, o.selection_stride, o.scale);
}

SparseGradients call_varlen_backward(const SparseInputs& x, const Documents& d, const SparseOptions& o,
                                     const SparseResults& results, const OptionalTensor& dout,
                                     const OptionalTensor& dlse, SparseMask mask) {
  static const auto op =
      op_handle<decltype(varlen_backward<nullptr>)>("htree::_sparse_attention_varlen_backward");
  return op.call(x.query, x.key, x.value, x.blocks, d.cu_seq_q, d.cu_seq_k, std::get<0>(results),
                 std::get<1>(results), if_defined(x.sinks), dout, dlse, d.max_q, d.max_k, o.block_size,
                 o.selection_stride, o.scale, mask);
}

// What a node keeps beside its tensors. Of an undefined tensor it could not keep what a gradient's zeros look like, so that
// sinks reach it as an optional.
void save(AutogradContext* ctx, const SparseOptions& options) {
  ctx->saved_data["block_size"] = options.block_size;
  ctx->saved_data["selection_stride"] = options.selection_stride;
  ctx->saved_data["scale"] = options.scale;
}
SparseOptions load_options(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  return {data["block_size"].toInt(), data["selection_stride"].toInt(), data["scale"].toOptional<double>()};
}

SparseMask wanted(AutogradContext* ctx) {
  return {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
          ctx->needs_input_grad(3)};
}

// `documents` of a packed call.
struct SparseNode : Function<SparseNode> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const Tensor& value, const OptionalTensor& sinks, const Tensor& blocks,
                               const SparseOptions& options, const std::optional<Documents>& documents) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    const SparseInputs x = {query, key, value, blocks, or_undefined(sinks)};
    const auto [out, lse] =
        documents.has_value() ? call_varlen(x, *documents, options) : call_forward(x, options);
    variable_list saved = {query, key, value, blocks, x.sinks, out, lse};
    if (documents.has_value()) {
      saved.insert(saved.end(), {documents->cu_seq_q, documents->cu_seq_k});
      ctx->saved_data["max_q"] = documents->max_q;
      ctx->saved_data["max_k"] = documents->max_k;
    }
    ctx->save_for_backward(saved);
    save(ctx, options);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OptionalTensor dout = if_defined(grads[0]), dlse = if_defined(grads[1]);
    if (!dout.has_value() && !dlse.has_value()) return variable_list(7);
    const variable_list saved = ctx->get_saved_variables();
    const SparseInputs x = {saved[0], saved[1], saved[2], saved[3], saved[4]};
    const SparseResults results = {saved[5], saved[6]};
    const SparseOptions options = load_options(ctx);
    auto [dq, dk, dv, dsinks] = [&] {
      if (saved.size() == 7) return call_backward(x, options, results, dout, dlse, wanted(ctx));
      auto& data = ctx->saved_data;
      const Documents documents = {saved[7], saved[8], data["max_q"].toSymInt(), data["max_k"].toSymInt()};
      return call_varlen_backward(x, documents, options, results, dout, dlse, wanted(ctx));
    }();
    return {dq, dk, dv, dsinks, Tensor(), Tensor(), Tensor()};
  }
};

SparseResults forward_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& blocks, const OptionalTensor& sinks, int64_t block_size,
                               int64_t selection_stride, std::optional<double> scale) {
  const SparseInputs x = {query, key, value, blocks, or_undefined(sinks)};
  const SparseOptions options = {block_size, selection_stride, scale};
  if (needs_grad({query, key, value, x.sinks})) {
    const variable_list results = SparseNode::apply(query, key, value, if_defined(x.sinks), blocks, options,
                                                    std::optional<Documents>());
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowAutograd guard;
  return call_forward(x, options);
}

SparseResults varlen_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& blocks, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                              const OptionalTensor& sinks, SymInt max_q, SymInt max_k, int64_t block_size,
                              int64_t selection_stride, std::optional<double> scale) {
  const SparseInputs x = {query, key, value, blocks, or_undefined(sinks)};
  const SparseOptions options = {block_size, selection_stride, scale};
  const Documents documents = {cu_seq_q, cu_seq_k, std::move(max_q), std::move(max_k)};
  if (needs_grad({query, key, value, x.sinks})) {
    const variable_list results =
        SparseNode::apply(query, key, value, if_defined(x.sinks), blocks, options, std::optional(documents));
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowAutograd guard;
  return call_varlen(x, documents, options);
}

SparseGradients backward_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const Tensor& blocks, const Tensor& out, const Tensor& lse,
                                  const OptionalTensor& sinks, const OptionalTensor& dout,
                                  const OptionalTensor& dlse, int64_t block_size, int64_t selection_stride,
                                  std::optional<double> scale, SparseMask output_mask) {
  const SparseInputs x = {query, key, value, blocks, or_undefined(sinks)};
  const Tensor of_out = or_undefined(dout), of_lse = or_undefined(dlse);
  return once_differentiable(
      "sparse_attention", {query, key, value, out, lse, x.sinks, of_out, of_lse}, output_mask, [&] {
        return call_backward(x, {block_size, selection_stride, scale}, {out, lse}, dout, dlse, output_mask);
      });
}

SparseGradients varlen_backward_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Tensor& blocks, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                                         const Tensor& out, const Tensor& lse, const OptionalTensor& sinks,
                                         const OptionalTensor& dout, const OptionalTensor& dlse, SymInt max_q,
                                         SymInt max_k, int64_t block_size, int64_t selection_stride,
                                         std::optional<double> scale, SparseMask output_mask) {
  const SparseInputs x = {query, key, value, blocks, or_undefined(sinks)};
  const Documents documents = {cu_seq_q, cu_seq_k, std::move(max_q), std::move(max_k)};
  const Tensor of_out = or_undefined(dout), of_lse = or_undefined(dlse);
  return once_differentiable(
      "sparse_attention_varlen", {query, key, value, out, lse, x.sinks, of_out, of_lse}, output_mask, [&] {
        return call_varlen_backward(x, documents, {block_size, selection_stride, scale}, {out, lse}, dout,
                                    dlse, output_mask);
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string tensors = "(Tensor query, Tensor key, Tensor value, Tensor blocks, ";
  const std::string offsets = "Tensor cu_seq_q, Tensor cu_seq_k, ";
  const std::string bounds = "SymInt max_q, SymInt max_k, ";
  const std::string options = "int block_size=16, int selection_stride=1, float? scale=None";
  const std::string results = ") -> (Tensor out, Tensor lse)";
  // DTensor finds the mesh of a call by its first argument, which is therefore none that may be missing.
  const std::string of_results = "Tensor out, Tensor lse, Tensor? sinks, Tensor? dout, Tensor? dlse, ";
  const std::string gradients =
      ", bool[4] output_mask=[True, True, True, True]) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)";
  define_ops(
      library,
      {"sparse_attention" + tensors + "Tensor? sinks=None, *, " + options + results,
       "_sparse_attention_backward" + tensors + of_results + options + gradients,
       "sparse_attention_varlen" + tensors + offsets + "Tensor? sinks, " + bounds + "*, " + options + results,
       "_sparse_attention_varlen_backward" + tensors + offsets + of_results + bounds + options + gradients});
  register_kernels<&kSparseCpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_kernels<&kSparseCuda>({library, DispatchKey::CUDA});
#endif
  register_kernels<nullptr>({library, DispatchKey::Meta});
  const OpKernels autograd(library, DispatchKey::Autograd);
  autograd.impl("sparse_attention", TORCH_FN(forward_autograd));
  autograd.impl("_sparse_attention_backward", TORCH_FN(backward_autograd));
  autograd.impl("sparse_attention_varlen", TORCH_FN(varlen_autograd));
  autograd.impl("_sparse_attention_varlen_backward", TORCH_FN(varlen_backward_autograd));
  register_autocast(library, {"sparse_attention", "sparse_attention_varlen"});
}

}  // namespace htree::tree_attention
