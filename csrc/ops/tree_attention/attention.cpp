// Schemas, CPU, CUDA and Meta kernels, Autograd and Autocast of the whole operator.
// docs/semantics/tree_attention.md §1.5, §1.10, §1.13; docs/semantics/conventions.md §0.5.

#include <algorithm>

#include "host/autograd.h"
#include "host/no_gradient.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree/plan/problem.h"
#include "ops/tree_attention/attention.h"
#include "ops/tree_attention/kernels.h"
#include "ops/tree_attention/packed_options.h"
#include "ops/tree_attention/segments.h"

namespace htree::tree_attention {

namespace {

// T, at least 1024 and a multiple of the stride, so that few lengths have sizes of their own.
SymInt longest_of(const SymInt& tokens, const TreeOptions& options) {
  const int64_t stride = options.selection_stride;
  return (tokens.max(1024) + (stride - 1)) / stride * stride;
}

}  // namespace

SymInt list_width(const SymInt& tokens, const TreeOptions& options) {
  constexpr int64_t kTooManyForTensorCores = kMaxSelectWidth / kTensorCoreRate + 1;
  if (options.top_k <= kTooManyForTensorCores) return options.top_k;  // one graph for all lengths
  const SymInt longest = longest_of(tokens, options), rate = longest.min(options.compression_rate);
  return ((longest + (rate - 1)) / rate).max(kTooManyForTensorCores).min(options.top_k);
}

AttentionArgs resolve_options(const char* op, const TreeOptions& options, const Tensor& k,
                              c10::SymIntArrayRef starts, at::TensorList parents) {
  TORCH_CHECK_VALUE(k.size(1) < kIndexLimit, op, ": T of k must be below 2^31, got ", k.size(1));
  AttentionArgs args = resolve(options, k.size(3));
  args.starts.clear();
  for (const SymInt& start : starts) {
    args.starts.push_back(start.expect_int());
  }
  const int64_t longest = longest_of(k.size(1), options).expect_int();
  args.compression_rate = std::min(options.compression_rate, longest);
  args.top_k = parents.empty() ? list_width(k.size(1), options).expect_int() : parents.front().size(3);
  // With r cut down, every query has one candidate at the one layer above the tokens, so nothing is scored.
  if (args.compression_rate < options.compression_rate) {
    args.selection_span = 0;
  }
  return args;
}

std::vector<Tensor> lists_of_layers(const Tensor& lists, const Tensor& q, const Tensor& k,
                                    const TreeOptions& options) {
  std::vector<Tensor> layers;
  if (lists.size(1) > 0) {
    const int64_t rows = ceil_div(q.size(1), options.selection_stride);
    const int64_t depth = symbolic_depth(k.sym_size(1), options).expect_int();
    for (int64_t layer = 0; layer < depth; ++layer) {
      layers.push_back(lists.narrow(1, layer * rows, rows));
    }
  }
  return layers;
}

namespace {

// The lists of a layer as the kernels read them: entries, heads and rows lie one behind the other, batches any number of
// entries apart.
Tensor packed_rows(const Tensor& list) {
  const auto packed = [&](int64_t dim, int64_t stride) {
    return list.size(dim) == 1 || list.stride(dim) == stride;
  };
  const bool whole = packed(3, 1) && packed(2, list.size(3)) && packed(1, list.size(2) * list.size(3));
  return whole ? list : list.contiguous();
}

// The body for CPU, CUDA and Meta. Without a kernel it ends after the checks and allocations.

// layers = [(k, v)]; while the last has more than M nodes: layers.append(tree_build(*layers[-1], r))
// state = (-inf, 0, 0); parents[L - 1] = top_parents(B, T_q, H_kv, top_k, L, r, starts[0], s)
// for l = L-1 ... 1: *layer, parents[l - 1] = select_accumulate(q, *layers[l], parents[l], cos, sin, l, ...)
//                    merge_to_global_(*state, *layer)
// merge_to_global_(*state, *bottom_accumulate(q, k, v, parents[0], cos, sin, ...))
// out = final_normalize(state out, state sum, q.dtype)
template <AttentionForward* kKernel>
void run_forward(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                 c10::SymIntArrayRef starts, const TreeOptions& options, const Tensor& out,
                 const Tensor& gmax, const Tensor& gsum, const std::vector<Tensor>& parents) {
  if constexpr (kKernel != nullptr) {
    const AttentionArgs args = resolve_options(op, options, k, starts, parents);
    if (out.numel() > 0) {
      forward_by_depth(kKernel, options, args, unit_last(q), unit_last(k), unit_last(v), out, gmax, gsum,
                       parents);
    }
  }
}

template <AttentionForward* kKernel>
AttentionState run_suffix(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                          const TreeOptions& options, bool store_parents) {
  AttentionState result = prepare_attention_forward(op, q, k, v, options, store_parents);
  const auto& [out, gmax, gsum, parents] = result;
  run_forward<kKernel>(op, q, k, v, {suffix_start(q, k)}, options, out, gmax, gsum, parents);
  return result;
}

template <AttentionForward* kKernel>
AttentionState attention_forward(const TreeOptions& options, const Tensor& q, const Tensor& k,
                                 const Tensor& v, bool store_parents) {
  return run_suffix<kKernel>("attention_forward", q, k, v, options, store_parents);
}

// attention_forward(...)[0]. This kernel runs without grad, where nobody reads the lists, so
// it never stores them.
template <AttentionForward* kKernel>
Tensor attention(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& v,
                 bool /*store_parents*/) {
  return std::get<0>(run_suffix<kKernel>("tree_attention", q, k, v, options, /*store_parents=*/false));
}

// (attention(...), gmax + log(gsum))
template <AttentionForward* kKernel>
AttentionLse attention_lse(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& v,
                           bool /*store_parents*/) {
  const AttentionState state =
      run_suffix<kKernel>("tree_attention", q, k, v, options, /*store_parents=*/false);
  const auto& [out, gmax, gsum, parents] = state;
  return {out, log_sum_exp(gmax, gsum)};
}

// attention_forward for queries in pieces, with its lists as torch.cat(parents, 1): what Autograd calls. The tree is
// built once for all pieces.
template <AttentionForward* kKernel>
AttentionRows attention_rows(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& v,
                             c10::SymIntArrayRef starts, bool store_parents) {
  AttentionRows result = prepare_attention_rows(q, k, v, starts, options, store_parents);
  if constexpr (kKernel != nullptr) {
    const auto& [out, gmax, gsum, lists] = result;
    const std::vector<Tensor> parents = lists_of_layers(lists, q, k, options);
    run_forward<kKernel>("attention_rows", q, k, v, starts, options, out, gmax, gsum, parents);
    if (const auto used =
            static_cast<int64_t>(parents.size()) * ceil_div(q.size(1), options.selection_stride);
        used < lists.size(1)) {
      lists.slice(1, used).fill_(-1);
    }
  }
  return result;
}

// The gradient of the loop above with `parents` held fixed:
// torch.autograd.grad(attention of the given cut, (q, k, v), dout); P = (s - gmax).exp() / gsum per merged
// candidate, D = (dout * out).sum(-1) - dlse, dS = P * (dout @ V^T - D); each layer's dK, dV go down through
// tree_build_backward
template <AttentionBackward* kKernel>
void run_backward(const char* op, const OptionalTensor& dout, const OptionalTensor& dlse, const Tensor& q,
                  const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                  at::TensorList parents, c10::SymIntArrayRef starts, const TreeOptions& options,
                  const Gradients& gradients) {
  if constexpr (kKernel != nullptr) {
    const AttentionArgs args = resolve_options(op, options, k, starts, parents);
    const auto& [dq, dk, dv] = gradients;
    if (out.numel() == 0) {
      fill_zeros({dq, dk, dv});  // without a query no key has a gradient
    } else if (dq.defined() || dk.defined() || dv.defined()) {
      std::vector<Tensor> lists;
      for (const Tensor& list : parents) {
        lists.push_back(packed_rows(list));
      }
      backward_by_depth(kKernel, options, args, unit_last(given_or_zeros(dout, out)),
                        dlse.has_value() ? dlse->contiguous() : Tensor(), unit_last(q), unit_last(k),
                        unit_last(v), unit_last(out), unit_last(gmax), unit_last(gsum), lists, dq, dk, dv);
    }
  }
}

template <AttentionBackward* kKernel>
Gradients attention_backward(const TreeOptions& options, const Tensor& dout, const Tensor& q, const Tensor& k,
                             const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                             at::TensorList parents, std::array<bool, 3> output_mask) {
  Gradients gradients =
      prepare_attention_backward(dout, q, k, v, out, gmax, gsum, parents, options, output_mask);
  run_backward<kKernel>("attention_backward", dout, /*dlse=*/std::nullopt, q, k, v, out, gmax, gsum, parents,
                        {suffix_start(q, k)}, options, gradients);
  return gradients;
}

template <AttentionBackward* kKernel>
Gradients attention_rows_backward(const TreeOptions& options, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                                  const Tensor& lists, const OptionalTensor& dout, const OptionalTensor& dlse,
                                  c10::SymIntArrayRef starts, std::array<bool, 3> output_mask) {
  Gradients gradients = prepare_attention_rows_backward(dout, dlse, q, k, v, out, gmax, gsum, lists, starts,
                                                        options, output_mask);
  if constexpr (kKernel != nullptr) {
    run_backward<kKernel>("attention_rows_backward", dout, dlse, q, k, v, out, gmax, gsum,
                          lists_of_layers(lists, q, k, options), starts, options, gradients);
  }
  return gradients;
}

// attention_rows_backward with dk and dv as the sums that it rounds, fp32 (fp64 for fp64).
template <AttentionBackward* kKernel>
Gradients attention_rows_backward_sums(const TreeOptions& options, const Tensor& q, const Tensor& k,
                                       const Tensor& v, const Tensor& out, const Tensor& gmax,
                                       const Tensor& gsum, const Tensor& lists, const OptionalTensor& dout,
                                       const OptionalTensor& dlse, c10::SymIntArrayRef starts,
                                       std::array<bool, 3> output_mask) {
  Gradients gradients = prepare_attention_rows_backward(dout, dlse, q, k, v, out, gmax, gsum, lists, starts,
                                                        options, {output_mask[0], false, false});
  auto& [dq, dk, dv] = gradients;
  if (output_mask[1]) {
    dk = new_tensor(k.sym_sizes(), state_dtype(k), k);
  }
  if (output_mask[2]) {
    dv = new_tensor(v.sym_sizes(), state_dtype(v), v);
  }
  if constexpr (kKernel != nullptr) {
    run_backward<kKernel>("attention_rows_backward", dout, dlse, q, k, v, out, gmax, gsum,
                          lists_of_layers(lists, q, k, options), starts, options, gradients);
  }
  return gradients;
}

template <AttentionForward* kForward, AttentionBackward* kBackward>
void register_kernels(const OpKernels& kernels) {
  kernels.impl("_attention_forward", TORCH_FN(kPacked<attention_forward<kForward>>));
  kernels.impl("_attention", TORCH_FN(kPacked<attention<kForward>>));
  kernels.impl("_attention_lse", TORCH_FN(kPacked<attention_lse<kForward>>));
  kernels.impl("_attention_rows", TORCH_FN(kPacked<attention_rows<kForward>>));
  kernels.impl("_attention_backward", TORCH_FN(kPacked<attention_backward<kBackward>>));
  kernels.impl("_attention_rows_backward", TORCH_FN(kPacked<attention_rows_backward<kBackward>>));
  kernels.impl("_attention_rows_backward_sums", TORCH_FN(kPacked<attention_rows_backward_sums<kBackward>>));
}

}  // namespace

// ---- Autograd and Autocast

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using RowsOp = PackedOp<AttentionRows(const Tensor& q, const Tensor& k, const Tensor& v,
                                      c10::SymIntArrayRef starts, bool store_parents)>;
using BackwardOp = PackedOp<Gradients(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                                      at::TensorList parents, std::array<bool, 3> output_mask)>;
template <typename Result>
using AttentionOp = PackedOp<Result(const Tensor& q, const Tensor& k, const Tensor& v, bool store_parents)>;

const RowsBackwardOp& attention_rows_backward_sums_op() {
  static const RowsBackwardOp op("htree::_attention_rows_backward_sums");
  return op;
}

// It calls ops with a fixed number of plain tensors: a DTensor has no metadata for the elements of a Tensor[].
struct AttentionNode : Function<AttentionNode> {
  static constexpr bool is_traceable = true;

  // Gives out, and with `returns_lse` the log-sum-exps too.
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const TreeOptions& options, bool store_parents, bool returns_lse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    static const RowsOp op("htree::_attention_rows");
    const auto [out, gmax, gsum, lists] = op(options, q, k, v, {suffix_start(q, k)}, store_parents);
    ctx->save_for_backward({q, k, v, out, gmax, gsum, lists});
    save_options(ctx->saved_data, options);
    return returns_lse ? variable_list{out, log_sum_exp(gmax, gsum)} : variable_list{out};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OptionalTensor dout = if_defined(grads[0]);
    const OptionalTensor dlse = grads.size() > 1 ? if_defined(grads[1]) : std::nullopt;
    if (!dout.has_value() && !dlse.has_value()) {
      return variable_list(6);
    }
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const std::array<bool, 3> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2)};
    auto [dq, dk, dv] =
        attention_rows_backward_op()(load_options(ctx->saved_data), q, k, v, saved[3], saved[4], saved[5],
                                     saved[6], dout, dlse, {suffix_start(q, k)}, wanted);
    return {dq, dk, dv, Tensor(), Tensor(), Tensor()};
  }
};

Tensor attention_autograd(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& v,
                          bool store_parents) {
  if (needs_grad({q, k, v})) {
    check_attention("tree_attention", q, k, v, options);  // attention_rows would name itself
    return AttentionNode::apply(q, k, v, options, store_parents, /*returns_lse=*/false)[0];
  }
  static const AttentionOp<Tensor> op("htree::_attention");
  at::AutoDispatchBelowAutograd guard;
  return op(options, q, k, v, store_parents);
}

AttentionLse attention_lse_autograd(const TreeOptions& options, const Tensor& q, const Tensor& k,
                                    const Tensor& v, bool store_parents) {
  if (needs_grad({q, k, v})) {
    check_attention("tree_attention", q, k, v, options);
    const variable_list results = AttentionNode::apply(q, k, v, options, store_parents, /*returns_lse=*/true);
    return {results[0], results[1]};
  }
  static const AttentionOp<AttentionLse> op("htree::_attention_lse");
  at::AutoDispatchBelowAutograd guard;
  return op(options, q, k, v, store_parents);
}

Gradients attention_backward_autograd(const TreeOptions& options, const Tensor& dout, const Tensor& q,
                                      const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& gmax,
                                      const Tensor& gsum, at::TensorList parents,
                                      std::array<bool, 3> output_mask) {
  static const BackwardOp op("htree::_attention_backward");
  return once_differentiable("attention_backward", {dout, q, k, v, out}, output_mask, [&] {
    return op(options, dout, q, k, v, out, gmax, gsum, parents, output_mask);
  });
}

template <const RowsBackwardOp& (*kOp)()>
Gradients attention_rows_backward_autograd(const TreeOptions& options, const Tensor& q, const Tensor& k,
                                           const Tensor& v, const Tensor& out, const Tensor& gmax,
                                           const Tensor& gsum, const Tensor& lists,
                                           const OptionalTensor& dout, const OptionalTensor& dlse,
                                           c10::SymIntArrayRef starts, std::array<bool, 3> output_mask) {
  const Tensor of_out = dout.value_or(Tensor()), of_lse = dlse.value_or(Tensor());
  return once_differentiable("attention_backward", {of_out, of_lse, q, k, v, out}, output_mask, [&] {
    return kOp()(options, q, k, v, out, gmax, gsum, lists, dout, dlse, starts, output_mask);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string qkv = "(Tensor q, Tensor k, Tensor v, ";
  const std::string results = "Tensor q, Tensor k, Tensor v, Tensor out, Tensor gmax, Tensor gsum, ";
  const std::string of_dout = "(Tensor dout, " + results;
  const std::string state = ") -> (Tensor out, Tensor gmax, Tensor gsum, Tensor[] parents)";
  const std::string gradients = ") -> (Tensor dq, Tensor dk, Tensor dv)";

  const std::string packed = kPackedSchema;
  const std::string forward = "_attention_forward" + qkv + "bool store_parents, " + packed + state;
  const std::string attention = "_attention" + qkv + "bool store_parents, " + packed + ") -> Tensor";
  const std::string lse =
      "_attention_lse" + qkv + "bool store_parents, " + packed + ") -> (Tensor out, Tensor lse)";
  const std::string rows = "_attention_rows" + qkv + "SymInt[] starts, bool store_parents, " + packed +
                           ") -> (Tensor out, Tensor gmax, Tensor gsum, Tensor lists)";
  const std::string backward =
      "_attention_backward" + of_dout + "Tensor[] parents, bool[3] output_mask, " + packed + gradients;
  // DTensor finds the mesh of a call by its first argument, which is therefore none that may be missing.
  const std::string of_rows = "(" + results +
                              "Tensor lists, Tensor? dout, Tensor? dlse, SymInt[] starts, "
                              "bool[3] output_mask, " +
                              packed + gradients;
  const std::string rows_backward = "_attention_rows_backward" + of_rows;
  const std::string rows_backward_sums = "_attention_rows_backward_sums" + of_rows;
  define_ops(library, {forward, attention, lse, rows, backward, rows_backward, rows_backward_sums});

  // The ops of the design documents, and `attention` by the name of the function too.
  const std::string options = documented_schema(), later = later_schema();
  const std::string forward_options = options + ", bool store_parents=True, " + later;
  const std::string backward_options = options + ", bool[3] output_mask=[True, True, True], " + later;
  define_ops(library, {"attention_forward" + qkv + forward_options + state,
                       "attention" + qkv + forward_options + ") -> Tensor",
                       "tree_attention" + qkv + forward_options + ") -> Tensor",
                       "attention_backward" + of_dout + "Tensor[] parents, " + backward_options + gradients});
  register_by_name(library, "attention_forward", "htree::_attention_forward", "attention_forward");
  register_by_name(library, "attention", "htree::_attention", "tree_attention");
  register_by_name(library, "tree_attention", "htree::_attention", "tree_attention");
  register_by_name(library, "attention_backward", "htree::_attention_backward", "attention_backward");
  register_kernels<attention_forward_cpu, attention_backward_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_kernels<attention_forward_cuda, attention_backward_cuda>({library, DispatchKey::CUDA});
#endif
  register_kernels<nullptr, nullptr>({library, DispatchKey::Meta});
  const OpKernels autograd(library, DispatchKey::Autograd);
  register_no_gradient(library, {"_attention_forward", "_attention_rows"});
  autograd.impl("_attention", TORCH_FN(kPacked<attention_autograd>));
  autograd.impl("_attention_lse", TORCH_FN(kPacked<attention_lse_autograd>));
  autograd.impl("_attention_backward", TORCH_FN(kPacked<attention_backward_autograd>));
  autograd.impl("_attention_rows_backward",
                TORCH_FN(kPacked<attention_rows_backward_autograd<attention_rows_backward_op>>));
  autograd.impl("_attention_rows_backward_sums",
                TORCH_FN(kPacked<attention_rows_backward_autograd<attention_rows_backward_sums_op>>));
  register_autocast(library, {"_attention", "_attention_lse", "_attention_forward", "_attention_rows"});
}

}  // namespace htree::tree_attention
