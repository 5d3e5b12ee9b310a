// Tree attention over packed documents whose nodes an index chooses: schemas, CPU, CUDA and Meta kernels, Autograd and
// Autocast. docs/semantics/tree_attention.md §1.17. The lists are chosen again for the gradients.
#include <ATen/autocast_mode.h>
#include <ATen/ops/ones_like.h>

#include "host/autograd.h"
#include "host/no_gradient.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree_attention/packed_options.h"
#include "ops/tree_attention/varlen/varlen.h"

namespace htree::tree_attention {
namespace {

using OutLse = std::tuple<Tensor, Tensor>;

// ---- kernels

// for every document: out[its queries] = tree_attention(..., index=(index_query[its queries], index_key[its keys]))
template <const VarlenKernels* kKernels>
OutLse indexed_varlen(const TreeOptions& options, const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor& index_query, const Tensor& index_key, const Tensor& cu_seq_q,
                      const Tensor& cu_seq_k, SymInt max_q, SymInt max_k, std::string_view grouping) {
  const auto [out, gmax, gsum] =
      varlen_forward(kKernels, "tree_attention_varlen", {query, key, value, index_query, index_key},
                     {cu_seq_q, cu_seq_k, max_q, max_k}, options, grouping);
  return {out, log_sum_exp(gmax, gsum)};
}

// for every document: the gradients of the call above
template <const VarlenKernels* kKernels>
Gradients indexed_varlen_backward(const TreeOptions& options, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const Tensor& index_query, const Tensor& index_key,
                                  const Tensor& cu_seq_q, const Tensor& cu_seq_k, SymInt max_q, SymInt max_k,
                                  const Tensor& out, const Tensor& lse, const OptionalTensor& dout,
                                  const OptionalTensor& dlse, std::string_view grouping,
                                  std::array<bool, 3> output_mask) {
  return varlen_backward(kKernels, dout, dlse, {query, key, value, index_query, index_key},
                         {cu_seq_q, cu_seq_k, max_q, max_k}, {out, lse, at::ones_like(lse)}, options,
                         grouping, output_mask);
}

template <const VarlenKernels* kKernels>
void register_indexed_kernels(torch::Library& library) {
  library.impl("_indexed_attention_varlen", TORCH_FN(kPacked<indexed_varlen<kKernels>>));
  library.impl("_indexed_attention_varlen_backward", TORCH_FN(kPacked<indexed_varlen_backward<kKernels>>));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string inputs =
      "(Tensor query, Tensor key, Tensor value, Tensor index_query, Tensor index_key, Tensor cu_seq_q, "
      "Tensor "
      "cu_seq_k, SymInt max_q, SymInt max_k, ";
  const std::string options = kPackedSchema;
  const std::string forward =
      "_indexed_attention_varlen" + inputs + "str grouping, " + options + ") -> (Tensor out, Tensor lse)";
  const std::string backward =
      "_indexed_attention_varlen_backward" + inputs +
      "Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, str grouping, bool[3] output_mask, " + options +
      ") -> (Tensor dq, Tensor dk, Tensor dv)";
  define_ops(library, {forward.c_str(), backward.c_str()});
}

TORCH_LIBRARY_IMPL(HTREE_NAMESPACE, CPU, library) {
  register_indexed_kernels<&kVarlenCpu>(library);
}

#if defined(HTREE_WITH_CUDA)
TORCH_LIBRARY_IMPL(HTREE_NAMESPACE, CUDA, library) {
  register_indexed_kernels<&kVarlenCuda>(library);
}
#endif

TORCH_LIBRARY_IMPL(HTREE_NAMESPACE, Meta, library) {
  register_indexed_kernels<nullptr>(library);
}

// ---- Autograd and Autocast

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// The index, the documents and how they run, as autograd passes and keeps them.
struct IndexedArguments {
  Tensor index_query, index_key, cu_seq_q, cu_seq_k;
  SymInt max_q, max_k;
  TreeOptions options;
  std::string grouping;
};

using IndexedOp =
    PackedOp<OutLse(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& index_query,
                    const Tensor& index_key, const Tensor& cu_seq_q, const Tensor& cu_seq_k, SymInt max_q,
                    SymInt max_k, std::string_view grouping)>;
using IndexedBackwardOp = PackedOp<Gradients(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& index_query,
    const Tensor& index_key, const Tensor& cu_seq_q, const Tensor& cu_seq_k, SymInt max_q, SymInt max_k,
    const Tensor& out, const Tensor& lse, const OptionalTensor& dout, const OptionalTensor& dlse,
    std::string_view grouping, std::array<bool, 3> output_mask)>;

OutLse call_indexed(const Tensor& query, const Tensor& key, const Tensor& value, const IndexedArguments& a) {
  static const IndexedOp op("htree::_indexed_attention_varlen");
  return op(a.options, query, key, value, a.index_query, a.index_key, a.cu_seq_q, a.cu_seq_k, a.max_q,
            a.max_k, a.grouping);
}

Gradients call_indexed_backward(const variable_list& inputs, const IndexedArguments& a, const Tensor& out,
                                const Tensor& lse, const OptionalTensor& dout, const OptionalTensor& dlse,
                                std::array<bool, 3> output_mask) {
  static const IndexedBackwardOp op("htree::_indexed_attention_varlen_backward");
  return op(a.options, inputs[0], inputs[1], inputs[2], a.index_query, a.index_key, a.cu_seq_q, a.cu_seq_k,
            a.max_q, a.max_k, out, lse, dout, dlse, a.grouping, output_mask);
}

struct IndexedNode : Function<IndexedNode> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const Tensor& value, const IndexedArguments& a) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    const auto [out, lse] = call_indexed(query, key, value, a);
    ctx->save_for_backward({query, key, value, a.index_query, a.index_key, a.cu_seq_q, a.cu_seq_k, out, lse});
    save_options(ctx->saved_data, a.options);
    ctx->saved_data["max_q"] = a.max_q;
    ctx->saved_data["max_k"] = a.max_k;
    ctx->saved_data["grouping"] = a.grouping;
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OptionalTensor dout = if_defined(grads[0]), dlse = if_defined(grads[1]);
    if (!dout.has_value() && !dlse.has_value()) {
      return variable_list(4);
    }
    const variable_list saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const IndexedArguments a = {saved[3],
                                saved[4],
                                saved[5],
                                saved[6],
                                data["max_q"].toSymInt(),
                                data["max_k"].toSymInt(),
                                load_options(data),
                                data["grouping"].toStringRef()};
    const std::array<bool, 3> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2)};
    auto [dq, dk, dv] = call_indexed_backward(saved, a, saved[7], saved[8], dout, dlse, wanted);
    return {dq, dk, dv, Tensor()};
  }
};

OutLse indexed_autograd(const TreeOptions& options, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& index_query, const Tensor& index_key,
                        const Tensor& cu_seq_q, const Tensor& cu_seq_k, SymInt max_q, SymInt max_k,
                        std::string_view grouping) {
  const IndexedArguments a = {
      index_query.detach(), index_key.detach(), cu_seq_q, cu_seq_k, max_q, max_k, options,
      std::string(grouping)};
  if (needs_grad({query, key, value})) {
    check_varlen("tree_attention_varlen", {query, key, value, index_query, index_key},
                 {cu_seq_q, cu_seq_k, max_q, max_k}, options, grouping);
    const variable_list results = IndexedNode::apply(query, key, value, a);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowAutograd guard;
  return call_indexed(query, key, value, a);
}

Gradients indexed_backward_autograd(const TreeOptions& options, const Tensor& query, const Tensor& key,
                                    const Tensor& value, const Tensor& index_query, const Tensor& index_key,
                                    const Tensor& cu_seq_q, const Tensor& cu_seq_k, SymInt max_q,
                                    SymInt max_k, const Tensor& out, const Tensor& lse,
                                    const OptionalTensor& dout, const OptionalTensor& dlse,
                                    std::string_view grouping, std::array<bool, 3> output_mask) {
  const IndexedArguments a = {index_query,      index_key,        cu_seq_q, cu_seq_k,
                              std::move(max_q), std::move(max_k), options,  std::string(grouping)};
  const Tensor of_out = dout.value_or(Tensor()), of_lse = dlse.value_or(Tensor());
  return once_differentiable(
      "attention_varlen_backward", {of_out, of_lse, query, key, value, out, lse}, output_mask, [&] {
        return call_indexed_backward({query, key, value}, a, out, lse, dout, dlse, output_mask);
      });
}

template <at::DeviceType kDevice>
OutLse indexed_autocast(const TreeOptions& options, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& index_query, const Tensor& index_key,
                        const Tensor& cu_seq_q, const Tensor& cu_seq_k, SymInt max_q, SymInt max_k,
                        std::string_view grouping) {
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const Tensor& x) { return at::autocast::cached_cast(dtype, x, kDevice); };
  return call_indexed(cast(query), cast(key), cast(value),
                      {index_query, index_key, cu_seq_q, cu_seq_k, std::move(max_q), std::move(max_k),
                       options, std::string(grouping)});
}

}  // namespace

TORCH_LIBRARY_IMPL(HTREE_NAMESPACE, Autograd, library) {
  library.impl("_indexed_attention_varlen", TORCH_FN(kPacked<indexed_autograd>));
  library.impl("_indexed_attention_varlen_backward", TORCH_FN(kPacked<indexed_backward_autograd>));
}

TORCH_LIBRARY_IMPL(HTREE_NAMESPACE, AutocastCPU, library) {
  library.impl("_indexed_attention_varlen", TORCH_FN(kPacked<indexed_autocast<at::kCPU>>));
}

TORCH_LIBRARY_IMPL(HTREE_NAMESPACE, AutocastCUDA, library) {
  library.impl("_indexed_attention_varlen", TORCH_FN(kPacked<indexed_autocast<at::kCUDA>>));
}

}  // namespace htree::tree_attention
