// Schemas, Meta, Autograd, Autocast and registrations of the gated_mlp family. docs/semantics/gated_mlp.md §3.2
#include "ops/gated_mlp/gated_mlp.h"

#include <torch/library.h>

#include <string>

#include "host/autograd.h"
#include "host/no_gradient.h"
#include "host/op_handle.h"
#include "host/outputs.h"
#include "host/registration.h"

namespace htree::gated_mlp {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Text = c10::string_view;
using Config = at::OptionalIntArrayRef;

// ---- the ops, called through the dispatcher

Tensor call_mlp(const Arguments& a, Config config) {
  static const auto op =
      op_handle<Tensor(const Tensor&, const Tensor&, const Tensor&, Text, Text, Config)>("htree::gated_mlp");
  return op.call(a.x, a.gate_weight, a.up_weight, a.activation, a.act_on, config);
}

Products call_forward(const Arguments& a) {
  static const auto op = op_handle<Products(const Tensor&, const Tensor&, const Tensor&, Text, Text)>(
      "htree::_gated_mlp_forward");
  return op.call(a.x, a.gate_weight, a.up_weight, a.activation, a.act_on);
}

Gradients call_backward(const Arguments& a, const Tensor& dy, Mask mask) {
  static const auto op =
      op_handle<Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, Text, Text, Mask)>(
          "htree::gated_mlp_backward");
  return op.call(dy, a.x, a.gate_weight, a.up_weight, a.activation, a.act_on, mask);
}

Gradients call_saved_backward(const Arguments& a, const Tensor& dy, const Tensor& gate, const Tensor& up,
                              Mask mask) {
  static const auto op =
      op_handle<Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor&, Text, Text, Mask)>("htree::_gated_mlp_saved_backward");
  return op.call(dy, gate, up, a.x, a.gate_weight, a.up_weight, a.activation, a.act_on, mask);
}

// ---- CPU and CUDA: one body, with the device's entry points as template arguments

using Forward = void (*)(const Operands&, at::IntArrayRef, const Results&);
using Backward = void (*)(const Operands&, const BackwardOperands&);

Tensor as_rows(const Tensor& x) {
  return x.defined() ? x.reshape({-1, x.size(-1)}) : x;
}

// Where there is nothing to sum the products are zeros, and so is 0 * act(0).
template <Forward kForward>
void run_forward(const Arguments& a, Config config, const Tensor& out, const Tensor& gate, const Tensor& up) {
  if (out.numel() == 0) {
    return;
  }
  if (a.x.size(-1) == 0) {
    return fill_zeros({out, gate, up});
  }
  const Operands operands = operands_of(a);
  kForward(operands, config.value_or(at::IntArrayRef()),
           {as_rows(out), as_rows(operands.swapped ? up : gate), as_rows(operands.swapped ? gate : up)});
}

// g = x.float() @ gate_weight.float().T
// u = x.float() @ up_weight.float().T
// (g * act(u)).to(x.dtype)                            with act_on = "up"; act(g) * u with "gate"
template <Forward kForward>
Tensor mlp(const Arguments& a, Config config) {
  Tensor out = prepare(a, config);
  run_forward<kForward>(a, config, out, {}, {});
  return out;
}

// The same, and g and u, rounded to the dtype of x.
template <Forward kForward>
Products forward(const Arguments& a) {
  Products results = prepare_forward(a);
  const auto& [out, gate, up] = results;
  run_forward<kForward>(a, std::nullopt, out, gate, up);
  return results;
}

template <Backward kBackward>
void run_backward(const Arguments& a, const Tensor& dy, const Tensor& gate, const Tensor& up,
                  const Gradients& gradients) {
  const auto& [dx, dgate_weight, dup_weight] = gradients;
  if (a.x.numel() == 0 || dy.numel() == 0) {
    return fill_zeros({dx, dgate_weight, dup_weight});
  }
  const Operands operands = operands_of(a);
  const bool swapped = operands.swapped;
  kBackward(operands, {as_rows(dy), as_rows(swapped ? up : gate), as_rows(swapped ? gate : up), as_rows(dx),
                       swapped ? dup_weight : dgate_weight, swapped ? dgate_weight : dup_weight});
}

// dg = dy * act(u), du = dy * g * act'(u)                                    [rows, I]
// dx = dg @ gate_weight + du @ up_weight, dgate_weight = dg.T @ x, dup_weight = du.T @ x
template <Backward kBackward>
Gradients backward(const Arguments& a, const Tensor& dy, Mask wanted) {
  Gradients gradients = prepare_backward(a, dy, wanted);
  run_backward<kBackward>(a, dy, {}, {}, gradients);
  return gradients;
}

// The same, with g and u as gated_mlp_forward returned them.
template <Backward kBackward>
Gradients saved_backward(const Arguments& a, const Tensor& dy, const Tensor& gate, const Tensor& up,
                         Mask wanted) {
  Gradients gradients = prepare_saved_backward(a, dy, gate, up, wanted);
  run_backward<kBackward>(a, dy, gate, up, gradients);
  return gradients;
}

// ---- Autograd

struct MlpNode : Function<MlpNode> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& gate_weight,
                        const Tensor& up_weight, const Arguments& a) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    const auto [out, gate, up] = call_forward(a);
    ctx->save_for_backward({x, gate_weight, up_weight, gate, up});
    ctx->saved_data["activation"] = std::string(a.activation);
    ctx->saved_data["act_on"] = std::string(a.act_on);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(4);
    if (grads[0].defined()) {
      const variable_list saved = ctx->get_saved_variables();
      const std::string activation = ctx->saved_data["activation"].toStringRef();
      const std::string act_on = ctx->saved_data["act_on"].toStringRef();
      const Mask wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
      std::tie(result[0], result[1], result[2]) = call_saved_backward(
          {saved[0], saved[1], saved[2], activation, act_on}, grads[0], saved[3], saved[4], wanted);
    }
    return result;
  }
};

Tensor mlp_autograd(const Arguments& a, Config config) {
  if (needs_grad({a.x, a.gate_weight, a.up_weight})) {
    check_config(config);  // the training form has one configuration
    return MlpNode::apply(a.x, a.gate_weight, a.up_weight, a);
  }
  at::AutoDispatchBelowAutograd guard;
  return call_mlp(a, config);
}

Gradients backward_autograd(const Arguments& a, const Tensor& dy, Mask mask) {
  return once_differentiable("gated_mlp_backward", {dy, a.x, a.gate_weight, a.up_weight}, mask,
                             [&] { return call_backward(a, dy, mask); });
}

Gradients saved_backward_autograd(const Arguments& a, const Tensor& dy, const Tensor& gate, const Tensor& up,
                                  Mask mask) {
  return once_differentiable("gated_mlp_backward", {dy, gate, up, a.x, a.gate_weight, a.up_weight}, mask,
                             [&] { return call_saved_backward(a, dy, gate, up, mask); });
}

// ---- from schema arguments to Arguments, one adapter per op

template <Tensor (*kBody)(const Arguments&, Config)>
Tensor mlp_op(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, Text activation,
              Text act_on, Config config) {
  return kBody({x, gate_weight, up_weight, activation, act_on}, config);
}

template <Products (*kBody)(const Arguments&)>
Products forward_op(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, Text activation,
                    Text act_on) {
  return kBody({x, gate_weight, up_weight, activation, act_on});
}

template <Gradients (*kBody)(const Arguments&, const Tensor&, Mask)>
Gradients backward_op(const Tensor& dy, const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                      Text activation, Text act_on, Mask mask) {
  return kBody({x, gate_weight, up_weight, activation, act_on}, dy, mask);
}

template <Gradients (*kBody)(const Arguments&, const Tensor&, const Tensor&, const Tensor&, Mask)>
Gradients saved_backward_op(const Tensor& dy, const Tensor& gate, const Tensor& up, const Tensor& x,
                            const Tensor& gate_weight, const Tensor& up_weight, Text activation, Text act_on,
                            Mask mask) {
  return kBody({x, gate_weight, up_weight, activation, act_on}, dy, gate, up, mask);
}

template <Forward kForward, Backward kBackward>
void register_device(const OpKernels& kernels) {
  kernels.impl("gated_mlp", TORCH_FN((mlp_op<mlp<kForward>>)));
  kernels.impl("_gated_mlp_forward", TORCH_FN((forward_op<forward<kForward>>)));
  kernels.impl("gated_mlp_backward", TORCH_FN((backward_op<backward<kBackward>>)));
  kernels.impl("_gated_mlp_saved_backward", TORCH_FN((saved_backward_op<saved_backward<kBackward>>)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(
      library,
      {"gated_mlp(Tensor x, Tensor gate_weight, Tensor up_weight, str activation=\"silu\", "
       "str act_on=\"up\", int[]? config=None) -> Tensor",
       "_gated_mlp_forward(Tensor x, Tensor gate_weight, Tensor up_weight, str activation=\"silu\", "
       "str act_on=\"up\") -> (Tensor out, Tensor gate, Tensor up)",
       "gated_mlp_backward(Tensor dy, Tensor x, Tensor gate_weight, Tensor up_weight, "
       "str activation=\"silu\", str act_on=\"up\", bool[3] output_mask=[True, True, True]) -> "
       "(Tensor dx, Tensor dgate_weight, Tensor dup_weight)",
       "_gated_mlp_saved_backward(Tensor dy, Tensor gate, Tensor up, Tensor x, Tensor gate_weight, "
       "Tensor up_weight, str activation=\"silu\", str act_on=\"up\", "
       "bool[3] output_mask=[True, True, True]) -> (Tensor dx, Tensor dgate_weight, Tensor dup_weight)"});
  register_device<forward_cpu, backward_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_device<forward_cuda, backward_cuda>({library, DispatchKey::CUDA});
#endif
  const OpKernels meta(library, DispatchKey::Meta);
  meta.impl("gated_mlp", TORCH_FN((mlp_op<prepare>)));
  meta.impl("_gated_mlp_forward", TORCH_FN((forward_op<prepare_forward>)));
  meta.impl("gated_mlp_backward", TORCH_FN((backward_op<prepare_backward>)));
  meta.impl("_gated_mlp_saved_backward", TORCH_FN((saved_backward_op<prepare_saved_backward>)));
  const OpKernels autograd(library, DispatchKey::Autograd);
  autograd.impl("gated_mlp", TORCH_FN((mlp_op<mlp_autograd>)));
  autograd.impl("gated_mlp_backward", TORCH_FN((backward_op<backward_autograd>)));
  autograd.impl("_gated_mlp_saved_backward", TORCH_FN((saved_backward_op<saved_backward_autograd>)));
  register_no_gradient(library, {"_gated_mlp_forward"});
  register_autocast(library, {"gated_mlp", "_gated_mlp_forward"});
}

}  // namespace htree::gated_mlp
