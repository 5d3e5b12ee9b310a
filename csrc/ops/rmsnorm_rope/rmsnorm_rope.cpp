// Schemas, Meta, Autograd and registrations of the rmsnorm_rope family. docs/semantics/rmsnorm_rope.md §3.1
#include "ops/rmsnorm_rope/rmsnorm_rope.h"

#include <torch/library.h>

#include "host/autograd.h"
#include "host/op_handle.h"
#include "host/registration.h"

namespace htree::rmsnorm_rope {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Mask = std::array<bool, 2>;

// ---- the ops, called through the dispatcher

Tensor call_forward(const Arguments& a, at::OptionalIntArrayRef config) {
  if (a.norm == Norm::kHidden) {
    static const auto op =
        op_handle<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                         std::optional<int64_t>, at::OptionalIntArrayRef)>("htree::rmsnorm_rope");
    return op.call(a.x, a.weight, a.cos, a.sin, a.eps, a.num_heads, config);
  }
  static const auto op =
      op_handle<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double)>(
          "htree::head_rmsnorm_rope");
  return op.call(a.x, a.weight, a.cos, a.sin, a.eps);
}

Gradients call_backward(const Arguments& a, const Tensor& dy, Mask wanted) {
  if (a.norm == Norm::kHidden) {
    static const auto op =
        op_handle<Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                            std::optional<int64_t>, Mask)>("htree::rmsnorm_rope_backward");
    return op.call(dy, a.x, a.weight, a.cos, a.sin, a.eps, a.num_heads, wanted);
  }
  static const auto op =
      op_handle<Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                          Mask)>("htree::head_rmsnorm_rope_backward");
  return op.call(dy, a.x, a.weight, a.cos, a.sin, a.eps, wanted);
}

// ---- CPU, CUDA and Meta: one body, with the device's entry points as template arguments

using Forward = void (*)(const Operands&, at::IntArrayRef, const Tensor&);
using Backward = void (*)(const Operands&, const Tensor&, const Gradients&);

// n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
// n = n.unflatten(-1, (num_heads, hd))
// y = n * cos[:, None] + torch.cat((-n[..., hd // 2 :], n[..., : hd // 2]), -1)
// * sin[:, None] y.flatten(-2).to(x.dtype)
template <Forward kForward>
Tensor forward(const Arguments& arguments, at::OptionalIntArrayRef config) {
  Tensor out = prepare(arguments, config);
  kForward(operands_of(arguments), config.value_or(at::IntArrayRef()), as_rows(arguments.norm, out));
  return out;
}

// dn = dy cos - rotate_half(dy sin), dweight = (dn x r).sum((0, 1)),
// dx = r w dn - x r**3 / Hd * (dn w x).sum(-1, keepdim=True), with r = rsqrt(mean(x**2) + eps)
template <Backward kBackward>
Gradients backward(const Arguments& arguments, const Tensor& dy, Mask wanted) {
  Gradients gradients = prepare_backward(arguments, dy, wanted);
  const auto& [dx, dweight] = gradients;
  kBackward(operands_of(arguments), as_rows(arguments.norm, dy),
            {dx.defined() ? as_rows(arguments.norm, dx) : Tensor(), dweight});
  return gradients;
}

// ---- Autograd

// x, weight, cos and sin as they were saved, with what else a call needs.
Arguments saved_arguments(AutogradContext* ctx, const variable_list& tensors) {
  return {static_cast<Norm>(ctx->saved_data["norm"].toInt()),
          tensors[0],
          tensors[1],
          tensors[2],
          tensors[3],
          ctx->saved_data["eps"].toDouble(),
          ctx->saved_data["num_heads"].toOptional<int64_t>()};
}

struct ForwardNode : Function<ForwardNode> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& cos,
                        const Tensor& sin, const Arguments& a, at::OptionalIntArrayRef config) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, cos, sin});
    ctx->saved_data["norm"] = static_cast<int64_t>(a.norm);
    ctx->saved_data["eps"] = a.eps;
    ctx->saved_data["num_heads"] = a.num_heads;
    return call_forward(a, config);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(6);
    if (grads[0].defined()) {
      const variable_list saved = ctx->get_saved_variables();
      const Mask wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
      std::tie(result[0], result[1]) = call_backward(saved_arguments(ctx, saved), grads[0], wanted);
    }
    return result;
  }
};

Tensor forward_autograd(const Arguments& a, at::OptionalIntArrayRef config) {
  TORCH_CHECK_NOT_IMPLEMENTED(!needs_grad({a.cos, a.sin}), op_name(a.norm),
                              ": cos and sin are not differentiated; detach them");
  if (needs_grad({a.x, a.weight})) {
    return ForwardNode::apply(a.x, a.weight, a.cos, a.sin, a, config);
  }
  at::AutoDispatchBelowAutograd guard;
  return call_forward(a, config);
}

Gradients backward_autograd(const Arguments& a, const Tensor& dy, Mask mask) {
  return once_differentiable(backward_name(a.norm), {dy, a.x, a.weight, a.cos, a.sin}, mask,
                             [&] { return call_backward(a, dy, mask); });
}

// ---- from schema arguments to Arguments, one adapter per op

template <Tensor (*kBody)(const Arguments&, at::OptionalIntArrayRef)>
Tensor hidden_forward(const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin, double eps,
                      std::optional<int64_t> num_heads, at::OptionalIntArrayRef config) {
  return kBody({Norm::kHidden, x, weight, cos, sin, eps, num_heads}, config);
}

template <Tensor (*kBody)(const Arguments&, at::OptionalIntArrayRef)>
Tensor head_forward(const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin, double eps) {
  return kBody({Norm::kHead, x, weight, cos, sin, eps, std::nullopt}, std::nullopt);
}

template <Gradients (*kBody)(const Arguments&, const Tensor&, Mask)>
Gradients hidden_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& cos,
                          const Tensor& sin, double eps, std::optional<int64_t> num_heads, Mask mask) {
  return kBody({Norm::kHidden, x, weight, cos, sin, eps, num_heads}, dy, mask);
}

template <Gradients (*kBody)(const Arguments&, const Tensor&, Mask)>
Gradients head_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& cos,
                        const Tensor& sin, double eps, Mask mask) {
  return kBody({Norm::kHead, x, weight, cos, sin, eps, std::nullopt}, dy, mask);
}

template <Tensor (*kForward)(const Arguments&, at::OptionalIntArrayRef),
          Gradients (*kBackward)(const Arguments&, const Tensor&, Mask)>
void register_kernels(const OpKernels& kernels) {
  kernels.impl("rmsnorm_rope", TORCH_FN((hidden_forward<kForward>)));
  kernels.impl("rmsnorm_rope_backward", TORCH_FN((hidden_backward<kBackward>)));
  kernels.impl("head_rmsnorm_rope", TORCH_FN((head_forward<kForward>)));
  kernels.impl("head_rmsnorm_rope_backward", TORCH_FN((head_backward<kBackward>)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(
      library,
      {"rmsnorm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps=1e-06, int? num_heads=None, "
       "int[]? config=None) -> Tensor",
       "rmsnorm_rope_backward(Tensor dy, Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps=1e-06, "
       "int? num_heads=None, bool[2] output_mask=[True, True]) -> (Tensor dx, Tensor dweight)",
       "head_rmsnorm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps=1e-06) -> Tensor",
       "head_rmsnorm_rope_backward(Tensor dy, Tensor x, Tensor weight, Tensor cos, Tensor sin, "
       "float eps=1e-06, bool[2] output_mask=[True, True]) -> (Tensor dx, Tensor dweight)"});
  register_kernels<forward<forward_cpu>, backward<backward_cpu>>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_kernels<forward<forward_cuda>, backward<backward_cuda>>({library, DispatchKey::CUDA});
#endif
  register_kernels<prepare, prepare_backward>({library, DispatchKey::Meta});
  register_kernels<forward_autograd, backward_autograd>({library, DispatchKey::Autograd});
}

}  // namespace htree::rmsnorm_rope
