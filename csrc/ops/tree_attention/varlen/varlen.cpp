// Schemas, checks, CPU, CUDA and Meta kernels, Autograd and Autocast of tree attention over packed documents.
// docs/semantics/tree_attention.md §1.16; docs/semantics/conventions.md §0.5.
#include "ops/tree_attention/varlen/varlen.h"

#include "host/autograd.h"
#include "host/no_gradient.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree_attention/listed_attention.h"
#include "ops/tree_attention/packed_options.h"

namespace htree::tree_attention {

// ---- checks

namespace {

void check_packed_index(const char* op, const PackedInputs& inputs, const Documents& documents,
                        const TreeOptions& options) {
  const auto& [query, key, value, index_query, index_key] = inputs;
  check_index_options(op, options);
  check_rank(op, "index_query", index_query, 3, "[N, H_i, d]");
  check_rank(op, "index_key", index_key, 3, "[N_k, H_i, d]");
  check_same_device(op, "index_query", index_query, "query", query);
  check_size(op, "index_query", index_query, 0, query.sym_size(0), "N of query");
  check_size(op, "index_key", index_key, 0, key.sym_size(0), "N_k of key");
  check_index_heads(op, "index_query", index_query, index_query.sym_size(1), key.sym_size(1));
  check_blocks_varlen(op, index_query, index_key, documents, blocks_of_nodes(options));
}

}  // namespace

void check_varlen(const char* op, const PackedInputs& inputs, const Documents& documents,
                  const TreeOptions& options, std::string_view grouping) {
  const Tensor &query = inputs.query, &key = inputs.key, &value = inputs.value;
  check_options(op, options);
  check_rank(op, "query", query, 3, "[N, H, K]");
  check_rank(op, "key", key, 3, "[N_k, H_kv, K]");
  check_rank(op, "value", value, 3, "[N_k, H_kv, V]");
  check_floating(op, "query", query, /*double_on_cuda=*/false);
  for (const auto& [name, x] : {std::pair("key", key), std::pair("value", value)}) {
    check_same_dtype(op, name, x, "query", query);
    check_same_device(op, name, x, "query", query);
  }
  const SymInt key_dim = query.sym_size(2), heads = query.sym_size(1), kv_heads = key.sym_size(1);
  check_size(op, "key", key, 2, key_dim, "K of query");
  TORCH_CHECK_VALUE(holds(key_dim.sym_ge(2)) && same_size(key_dim % 2, 0), op,
                    ": K, the last size of query, must be even and at least 2, got ", key_dim, " in ",
                    query.sym_sizes());
  check_frequencies(op, options, key_dim);
  TORCH_CHECK_VALUE(holds(kv_heads.sym_ge(1)) && holds(heads.sym_ge(1)) && same_size(heads % kv_heads, 0), op,
                    ": H of query must be a positive multiple of H_kv of key, got H = ", heads,
                    " and H_kv = ", kv_heads, " in ", query.sym_sizes(), " and ", key.sym_sizes());
  check_size(op, "value", value, 0, key.sym_size(0), "N_k of key");
  check_size(op, "value", value, 1, kv_heads, "H_kv of key");
  TORCH_CHECK_VALUE(holds(value.sym_size(2).sym_ge(1)), op,
                    ": V, the last size of value, must be at least 1, got ", value.sym_sizes());
  for (const auto& [name, rows] :
       {std::pair("query", query.sym_size(0)), std::pair("key", key.sym_size(0))}) {
    TORCH_CHECK_VALUE(holds(rows.sym_lt(kIndexLimit)), op, ": ", name, " must have less than 2^31 rows, got ",
                      rows);
  }
  check_documents(op, documents, "query", query);
  TORCH_CHECK_VALUE(inputs.index_query.defined() == inputs.index_key.defined(), op,
                    ": index_query and index_key must be given together, got None for one of them");
  if (inputs.index_query.defined()) check_packed_index(op, inputs, documents, options);
  TORCH_CHECK_VALUE(
      grouping == "auto" || grouping == "document" || grouping == "length" || grouping == "rank", op,
      ": grouping must be one of auto, document, length, rank, got '", grouping, "'");
}

namespace {

using OutLse = std::tuple<Tensor, Tensor>;

PackedInputs inputs_of(const Tensor& query, const Tensor& key, const Tensor& value,
                       const OptionalTensor& index_query, const OptionalTensor& index_key) {
  return {query, key, value, index_query.value_or(Tensor()), index_key.value_or(Tensor())};
}

// ---- kernels

// for every document: out[its queries] = attention(query[its queries], key[its keys], value[its keys]), with an index
// attention(..., index=(index_query[its queries], index_key[its keys]))
template <const VarlenKernels* kKernels>
VarlenState forward(const TreeOptions& options, const Tensor& query, const Tensor& key, const Tensor& value,
                    const OptionalTensor& index_query, const OptionalTensor& index_key,
                    const Tensor& cu_seq_q, const Tensor& cu_seq_k, SymInt max_q, SymInt max_k,
                    std::string_view grouping) {
  return varlen_forward(kKernels, "attention_varlen_forward",
                        inputs_of(query, key, value, index_query, index_key),
                        {cu_seq_q, cu_seq_k, max_q, max_k}, options, grouping);
}

// (attention_varlen_forward(...)[0], gmax + log(gsum))
template <const VarlenKernels* kKernels>
OutLse attention_varlen(const TreeOptions& options, const Tensor& query, const Tensor& key,
                        const Tensor& value, const OptionalTensor& index_query,
                        const OptionalTensor& index_key, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                        SymInt max_q, SymInt max_k, std::string_view grouping) {
  const auto [out, gmax, gsum] =
      varlen_forward(kKernels, "tree_attention_varlen", inputs_of(query, key, value, index_query, index_key),
                     {cu_seq_q, cu_seq_k, max_q, max_k}, options, grouping);
  return {out, log_sum_exp(gmax, gsum)};
}

// for every document: the gradients of the call above, for which an index chooses again
template <const VarlenKernels* kKernels>
Gradients backward(const TreeOptions& options, const Tensor& query, const Tensor& key, const Tensor& value,
                   const OptionalTensor& index_query, const OptionalTensor& index_key, const Tensor& cu_seq_q,
                   const Tensor& cu_seq_k, SymInt max_q, SymInt max_k, const Tensor& out, const Tensor& gmax,
                   const Tensor& gsum, const OptionalTensor& dout, const OptionalTensor& dlse,
                   std::string_view grouping, std::array<bool, 3> output_mask) {
  return varlen_backward(kKernels, dout, dlse, inputs_of(query, key, value, index_query, index_key),
                         {cu_seq_q, cu_seq_k, max_q, max_k}, {out, gmax, gsum}, options, grouping,
                         output_mask);
}

template <const VarlenKernels* kKernels>
void register_kernels(const OpKernels& kernels) {
  kernels.impl("_attention_varlen_forward", TORCH_FN(kPacked<forward<kKernels>>));
  kernels.impl("_attention_varlen", TORCH_FN(kPacked<attention_varlen<kKernels>>));
  kernels.impl("_attention_varlen_backward", TORCH_FN(kPacked<backward<kKernels>>));
}

}  // namespace

// ---- Autograd and Autocast

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// The documents and how they run, as autograd passes and keeps them.
struct VarlenArguments {
  Documents documents;
  TreeOptions options;
  std::string grouping;
};

template <typename Result>
using VarlenOp = PackedOp<Result(const Tensor& query, const Tensor& key, const Tensor& value,
                                 const OptionalTensor& index_query, const OptionalTensor& index_key,
                                 const Tensor& cu_seq_q, const Tensor& cu_seq_k, SymInt max_q, SymInt max_k,
                                 std::string_view grouping)>;
using BackwardOp = PackedOp<Gradients(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& index_query,
    const OptionalTensor& index_key, const Tensor& cu_seq_q, const Tensor& cu_seq_k, SymInt max_q,
    SymInt max_k, const Tensor& out, const Tensor& gmax, const Tensor& gsum, const OptionalTensor& dout,
    const OptionalTensor& dlse, std::string_view grouping, std::array<bool, 3> output_mask)>;

template <typename Result>
Result call(const VarlenOp<Result>& op, const PackedInputs& x, const VarlenArguments& a) {
  const auto& [cu_seq_q, cu_seq_k, max_q, max_k] = a.documents;
  return op(a.options, x.query, x.key, x.value, if_defined(x.index_query), if_defined(x.index_key), cu_seq_q,
            cu_seq_k, max_q, max_k, a.grouping);
}

OutLse call_varlen(const PackedInputs& x, const VarlenArguments& a) {
  static const VarlenOp<OutLse> op("htree::_attention_varlen");
  return call(op, x, a);
}

VarlenState call_varlen_forward(const PackedInputs& x, const VarlenArguments& a) {
  static const VarlenOp<VarlenState> op("htree::_attention_varlen_forward");
  return call(op, x, a);
}

Gradients call_varlen_backward(const OptionalTensor& dout, const OptionalTensor& dlse, const PackedInputs& x,
                               const VarlenState& state, const VarlenArguments& a,
                               std::array<bool, 3> output_mask) {
  static const BackwardOp op("htree::_attention_varlen_backward");
  const auto& [out, gmax, gsum] = state;
  const auto& [cu_seq_q, cu_seq_k, max_q, max_k] = a.documents;
  return op(a.options, x.query, x.key, x.value, if_defined(x.index_query), if_defined(x.index_key), cu_seq_q,
            cu_seq_k, max_q, max_k, out, gmax, gsum, dout, dlse, a.grouping, output_mask);
}

struct VarlenNode : Function<VarlenNode> {
  static constexpr bool is_traceable = true;

  // Gives out and the log-sum-exps. An index gets no gradient.
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const Tensor& value, const PackedInputs& inputs, const VarlenArguments& a) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    const PackedInputs x = {query, key, value, inputs.index_query, inputs.index_key};
    const auto [out, gmax, gsum] = call_varlen_forward(x, a);
    ctx->save_for_backward({query, key, value, x.index_query, x.index_key, a.documents.cu_seq_q,
                            a.documents.cu_seq_k, out, gmax, gsum});
    save_options(ctx->saved_data, a.options);
    ctx->saved_data["max_q"] = a.documents.max_q;
    ctx->saved_data["max_k"] = a.documents.max_k;
    ctx->saved_data["grouping"] = a.grouping;
    return {out, log_sum_exp(gmax, gsum)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OptionalTensor dout = if_defined(grads[0]), dlse = if_defined(grads[1]);
    if (!dout.has_value() && !dlse.has_value()) {
      return variable_list(5);
    }
    const variable_list saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const VarlenArguments a = {{saved[5], saved[6], data["max_q"].toSymInt(), data["max_k"].toSymInt()},
                               load_options(data),
                               data["grouping"].toStringRef()};
    const std::array<bool, 3> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2)};
    auto [dq, dk, dv] = call_varlen_backward(dout, dlse, {saved[0], saved[1], saved[2], saved[3], saved[4]},
                                             {saved[7], saved[8], saved[9]}, a, wanted);
    return {dq, dk, dv, Tensor(), Tensor()};
  }
};

Tensor detached(const OptionalTensor& x) {
  return x.has_value() ? x->detach() : Tensor();
}

OutLse varlen_autograd(const TreeOptions& options, const Tensor& query, const Tensor& key,
                       const Tensor& value, const OptionalTensor& index_query,
                       const OptionalTensor& index_key, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                       SymInt max_q, SymInt max_k, std::string_view grouping) {
  const PackedInputs x = {query, key, value, detached(index_query), detached(index_key)};
  const VarlenArguments a = {{cu_seq_q, cu_seq_k, max_q, max_k}, options, std::string(grouping)};
  if (needs_grad({query, key, value})) {
    check_varlen("tree_attention_varlen", x, a.documents, options, grouping);
    const variable_list results = VarlenNode::apply(query, key, value, x, a);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowAutograd guard;
  return call_varlen(x, a);
}

Gradients varlen_backward_autograd(const TreeOptions& options, const Tensor& query, const Tensor& key,
                                   const Tensor& value, const OptionalTensor& index_query,
                                   const OptionalTensor& index_key, const Tensor& cu_seq_q,
                                   const Tensor& cu_seq_k, SymInt max_q, SymInt max_k, const Tensor& out,
                                   const Tensor& gmax, const Tensor& gsum, const OptionalTensor& dout,
                                   const OptionalTensor& dlse, std::string_view grouping,
                                   std::array<bool, 3> output_mask) {
  const PackedInputs x = inputs_of(query, key, value, index_query, index_key);
  const VarlenArguments a = {{cu_seq_q, cu_seq_k, max_q, max_k}, options, std::string(grouping)};
  const VarlenState state = {out, gmax, gsum};
  const Tensor of_out = dout.value_or(Tensor()), of_lse = dlse.value_or(Tensor());
  return once_differentiable("attention_varlen_backward", {of_out, of_lse, query, key, value, out},
                             output_mask,
                             [&] { return call_varlen_backward(dout, dlse, x, state, a, output_mask); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string inputs =
      "Tensor query, Tensor key, Tensor value, Tensor? index_query, Tensor? index_key, Tensor cu_seq_q, "
      "Tensor cu_seq_k, SymInt max_q, SymInt max_k, ";
  const std::string options = kPackedSchema;
  const std::string arguments = "(" + inputs + "str grouping, " + options + ") -> ";
  const std::string attention_varlen = "_attention_varlen" + arguments + "(Tensor out, Tensor lse)";
  const std::string forward =
      "_attention_varlen_forward" + arguments + "(Tensor out, Tensor gmax, Tensor gsum)";
  // DTensor finds the mesh of a call by its first argument, which is therefore none that may be missing.
  const std::string backward =
      "_attention_varlen_backward(" + inputs +
      "Tensor out, Tensor gmax, Tensor gsum, Tensor? dout, Tensor? dlse, str grouping, "
      "bool[3] output_mask, " +
      options + ") -> (Tensor dq, Tensor dk, Tensor dv)";
  define_ops(library, {attention_varlen, forward, backward});
  register_kernels<&kVarlenCpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_kernels<&kVarlenCuda>({library, DispatchKey::CUDA});
#endif
  register_kernels<nullptr>({library, DispatchKey::Meta});
  const OpKernels autograd(library, DispatchKey::Autograd);
  register_no_gradient(library, {"_attention_varlen_forward"});
  autograd.impl("_attention_varlen", TORCH_FN(kPacked<varlen_autograd>));
  autograd.impl("_attention_varlen_backward", TORCH_FN(kPacked<varlen_backward_autograd>));
  register_autocast(library, {"_attention_varlen", "_attention_varlen_forward"});
}

}  // namespace htree::tree_attention
