// Schemas, checks, Meta, Autograd and registrations of tree_build, its backward and span_means.
// docs/semantics/tree_attention.md §1.2, §1.8, §1.15.
#include "host/autograd.h"
#include "host/no_gradient.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree/tree_checks.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {

// k [B, N, H, K], v [B, N, H, V]. double has CUDA kernels because gradcheck of tree_build needs them.
inline void check_level(const char* op, const char* k_name, const Tensor& k, const char* v_name,
                        const Tensor& v, int64_t compression_rate) {
  check_rate(op, compression_rate);
  check_rank(op, k_name, k, 4, "[B, N, H, K]");
  check_floating(op, k_name, k, /*double_on_cuda=*/true);
  check_values(op, k_name, k, v_name, v);
  TORCH_CHECK_VALUE(holds(k.sym_size(3).sym_ge(1)), op, ": K, the last size of ", k_name,
                    ", must be at least 1, got ", k.sym_sizes());
}

// Returns (pk [B, ceil(N/r), H, K], pv [B, ceil(N/r), H, V]) in the dtype of k, uninitialised.
inline std::tuple<Tensor, Tensor> prepare_tree_build(const Tensor& k, const Tensor& v,
                                                     int64_t compression_rate) {
  check_level("tree_build", "k", k, "v", v, compression_rate);
  const SymInt parents = (k.sym_size(1) + (compression_rate - 1)) / compression_rate;
  return {new_tensor({k.sym_size(0), parents, k.sym_size(2), k.sym_size(3)}, k.scalar_type(), k),
          new_tensor({v.sym_size(0), parents, v.sym_size(2), v.sym_size(3)}, v.scalar_type(), v)};
}

// Returns (dk [B, n_child, H, K], dv [B, n_child, H, V]), uninitialised.
inline std::tuple<Tensor, Tensor> prepare_tree_build_backward(const Tensor& dpk, const Tensor& dpv,
                                                              const SymInt& n_child,
                                                              int64_t compression_rate) {
  constexpr const char* kOp = "tree_build_backward";
  check_level(kOp, "dpk", dpk, "dpv", dpv, compression_rate);
  TORCH_CHECK_VALUE(holds(n_child.sym_ge(0)) &&
                        same_size((n_child + (compression_rate - 1)) / compression_rate, dpk.sym_size(1)),
                    kOp, ": n_child must have ceil(n_child / compression_rate) = ", dpk.sym_size(1),
                    " parents, the length of dpk, ", "got n_child = ", n_child,
                    " and compression_rate = ", compression_rate);
  return {new_tensor({dpk.sym_size(0), n_child, dpk.sym_size(2), dpk.sym_size(3)}, dpk.scalar_type(), dpk),
          new_tensor({dpv.sym_size(0), n_child, dpv.sym_size(2), dpv.sym_size(3)}, dpv.scalar_type(), dpv)};
}

// Returns means [B, ceil(T/span), H, K] in the dtype of k, uninitialised.
inline Tensor prepare_span_means(const Tensor& k, int64_t span) {
  constexpr const char* kOp = "span_means";
  TORCH_CHECK_VALUE(span >= 1 && span < kIndexLimit, kOp, ": span must be between 1 and ", kIndexLimit - 1,
                    ", got ", span);
  check_rank(kOp, "k", k, 4, "[B, T, H, K]");
  check_floating(kOp, "k", k, /*double_on_cuda=*/true);
  TORCH_CHECK_VALUE(holds(k.sym_size(3).sym_ge(1)), kOp, ": K, the last size of k, must be at least 1, got ",
                    k.sym_sizes());
  return new_tensor({k.sym_size(0), (k.sym_size(1) + (span - 1)) / span, k.sym_size(2), k.sym_size(3)},
                    k.scalar_type(), k);
}

// ---- the ops

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Pair = std::tuple<Tensor, Tensor>;

Pair call_tree_build(const Tensor& k, const Tensor& v, int64_t r) {
  static const auto op = op_handle<Pair(const Tensor&, const Tensor&, int64_t)>("htree::tree_build");
  return op.call(k, v, r);
}

Pair call_tree_build_backward(const Tensor& dpk, const Tensor& dpv, const SymInt& n_child, int64_t r) {
  static const auto op =
      op_handle<Pair(const Tensor&, const Tensor&, SymInt, int64_t)>("htree::tree_build_backward");
  return op.call(dpk, dpv, n_child, r);
}

// ---- CPU and CUDA

// parts = torch.split(x.float(), r, dim=1)
// torch.stack([part.mean(1) for part in parts], 1).to(x.dtype)  # for x in (k, v); a ragged part is shorter
template <TreeBuild* kKernel>
Pair tree_build(const Tensor& k, const Tensor& v, int64_t r) {
  auto [pk, pv] = prepare_tree_build(k, v, r);
  if (pk.numel() > 0) {
    kKernel(unit_last(k), unit_last(v), r, pk, pv);
  }
  return {pk, pv};
}

// count = torch.bincount(torch.arange(n_child) // r)
// (dp / count[:, None, None]).repeat_interleave(r, dim=1)[:, :n_child]    for dp in (dpk, dpv)
template <TreeBuildBackward* kKernel>
Pair tree_build_backward(const Tensor& dpk, const Tensor& dpv, SymInt n_child, int64_t r) {
  auto [dk, dv] = prepare_tree_build_backward(dpk, dpv, n_child, r);
  if (dk.numel() > 0) {
    kKernel(unit_last(dpk), unit_last(dpv), r, dk, dv);
  }
  return {dk, dv};
}

// torch.stack([part.mean(1) for part in torch.split(k.float(), span, dim=1)], 1).to(k.dtype)
template <SpanMeans* kKernel>
Tensor span_means(const Tensor& k, int64_t span) {
  Tensor means = prepare_span_means(k, span);
  if (means.numel() > 0) {
    kKernel(unit_last(k), span, means);
  }
  return means;
}

Pair tree_build_backward_meta(const Tensor& dpk, const Tensor& dpv, SymInt n_child, int64_t r) {
  return prepare_tree_build_backward(dpk, dpv, n_child, r);
}

// ---- Autograd

struct BuildNode : Function<BuildNode> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& k, const Tensor& v, int64_t r) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["n_child"] = k.sym_size(1);
    ctx->saved_data["r"] = r;
    auto [pk, pv] = call_tree_build(k, v, r);
    return {pk, pv};
  }

  // Where an output was not used, torch passes zeros as its gradient.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto [dk, dv] = call_tree_build_backward(grads[0], grads[1], ctx->saved_data["n_child"].toSymInt(),
                                             ctx->saved_data["r"].toInt());
    return {dk, dv, Tensor()};
  }
};

Pair tree_build_autograd(const Tensor& k, const Tensor& v, int64_t r) {
  if (needs_grad({k, v})) {
    const variable_list outputs = BuildNode::apply(k, v, r);
    return {outputs[0], outputs[1]};
  }
  at::AutoDispatchBelowAutograd guard;
  return call_tree_build(k, v, r);
}

Pair tree_build_backward_autograd(const Tensor& dpk, const Tensor& dpv, SymInt n_child, int64_t r) {
  return once_differentiable("tree_build_backward", {dpk, dpv}, std::array{true, true},
                             [&] { return call_tree_build_backward(dpk, dpv, n_child, r); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(library, {
                          "tree_build(Tensor k, Tensor v, int compression_rate=16) -> (Tensor pk, Tensor pv)",
                          "tree_build_backward(Tensor dpk, Tensor dpv, SymInt n_child, int "
                          "compression_rate=16) -> (Tensor, Tensor)",
                          "span_means(Tensor k, int span) -> Tensor",
                      });
  const OpKernels cpu(library, DispatchKey::CPU);
  cpu.impl("tree_build", TORCH_FN(tree_build<tree_build_cpu>));
  cpu.impl("tree_build_backward", TORCH_FN(tree_build_backward<tree_build_backward_cpu>));
  cpu.impl("span_means", TORCH_FN(span_means<span_means_cpu>));
#if defined(HTREE_WITH_CUDA)
  const OpKernels cuda(library, DispatchKey::CUDA);
  cuda.impl("tree_build", TORCH_FN(tree_build<tree_build_cuda>));
  cuda.impl("tree_build_backward", TORCH_FN(tree_build_backward<tree_build_backward_cuda>));
  cuda.impl("span_means", TORCH_FN(span_means<span_means_cuda>));
#endif
  const OpKernels meta(library, DispatchKey::Meta);
  meta.impl("tree_build", TORCH_FN(prepare_tree_build));
  meta.impl("tree_build_backward", TORCH_FN(tree_build_backward_meta));
  meta.impl("span_means", TORCH_FN(prepare_span_means));
  const OpKernels autograd(library, DispatchKey::Autograd);
  autograd.impl("tree_build", TORCH_FN(tree_build_autograd));
  autograd.impl("tree_build_backward", TORCH_FN(tree_build_backward_autograd));
  register_no_gradient(library, {"span_means"});
}

}  // namespace htree::tree_attention
