// Schemas, Meta, Autograd and registrations of the hadamard family. docs/semantics/hadamard.md §4.1
#include "ops/hadamard/hadamard.h"

#include <torch/library.h>

#include "host/autograd.h"
#include "host/op_handle.h"
#include "host/registration.h"

namespace htree::hadamard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Scale = std::optional<double>;

// ---- the ops, called through the dispatcher

at::Tensor call_transform(const at::Tensor& x, Scale scale) {
  static const auto op = op_handle<at::Tensor(const at::Tensor&, Scale)>("htree::hadamard_transform");
  return op.call(x, scale);
}

at::Tensor call_grouped(const at::Tensor& x, int64_t group, Scale scale) {
  static const auto op = op_handle<at::Tensor(const at::Tensor&, int64_t, Scale)>("htree::grouped_hadamard");
  return op.call(x, group, scale);
}

// ---- CPU, CUDA and Meta: one body, with the device's entry point as a template argument

using Transform = void (*)(const Problem&, const Rows&, const at::Tensor&, const at::Tensor&);
using RowsOf = std::optional<Rows> (*)(const Problem&, const at::Tensor&, const at::Tensor&);

// y is contiguous, so where x is contiguous too it has rows.
template <Transform kTransform, RowsOf kRowsOf>
void run(const Problem& problem, const at::Tensor& x, const at::Tensor& y) {
  if (x.numel() == 0) {
    return;
  }
  if (const auto rows = kRowsOf(problem, x, y)) {
    kTransform(problem, *rows, x, y);
    return;
  }
  const at::Tensor copy = x.contiguous();
  kTransform(problem, kRowsOf(problem, copy, y).value(), copy, y);
}

// y = scale * x @ H  with H [n, n] = [[1, 1], [1, -1]] (x) ... (x) [[1, 1], [1, -1]],
// scale = n ** -0.5 by default
template <Transform kTransform>
at::Tensor transform(const at::Tensor& x, Scale scale) {
  at::Tensor y = prepare(x, scale);
  run<kTransform, rows_of>(problem_of(x, scale), x, y);
  return y;
}

template <Transform kTransform>
void transform_inplace(const at::Tensor& x, Scale scale) {
  prepare_inplace(x, scale);
  if (x.numel() == 0) {
    return;
  }
  const Problem problem = problem_of(x, scale);
  if (const auto rows = rows_of(problem, x, x)) {
    kTransform(problem, *rows, x, x);
    return;
  }
  const at::Tensor copy = x.contiguous();
  run<kTransform, rows_of>(problem, copy, copy);
  x.copy_(copy);
}

// rows = x.unflatten(1, (H // G, G)).transpose(2, 3).flatten(-2)       [B, H/G, S, G*D]
// y = hadamard_transform(rows, scale).unflatten(-1, (G, D)).transpose(2, 3).flatten(1, 2)
template <Transform kTransform>
at::Tensor grouped(const at::Tensor& x, int64_t group, Scale scale) {
  at::Tensor y = prepare_grouped(x, group, scale);
  run<kTransform, grouped_rows_of>(grouped_problem_of(x, group, scale), x, y);
  return y;
}

// ---- Autograd: H is symmetric, so the gradient is the same op with the same scale

struct TransformNode : Function<TransformNode> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, Scale scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["scale"] = scale;
    return call_transform(x, scale);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto scale = ctx->saved_data["scale"].toOptional<double>();
    return {grads[0].defined() ? call_transform(grads[0], scale) : at::Tensor(), at::Tensor()};
  }
};

struct GroupedNode : Function<GroupedNode> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, int64_t group, Scale scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["group"] = group;
    ctx->saved_data["scale"] = scale;
    return call_grouped(x, group, scale);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto scale = ctx->saved_data["scale"].toOptional<double>();
    return {
        grads[0].defined() ? call_grouped(grads[0], ctx->saved_data["group"].toInt(), scale) : at::Tensor(),
        at::Tensor(), at::Tensor()};
  }
};

at::Tensor transform_autograd(const at::Tensor& x, Scale scale) {
  if (needs_grad({x})) {
    return TransformNode::apply(x, scale);
  }
  at::AutoDispatchBelowAutograd guard;
  return call_transform(x, scale);
}

at::Tensor grouped_autograd(const at::Tensor& x, int64_t group, Scale scale) {
  if (needs_grad({x})) {
    return GroupedNode::apply(x, group, scale);
  }
  at::AutoDispatchBelowAutograd guard;
  return call_grouped(x, group, scale);
}

template <Transform kTransform>
void register_device(const OpKernels& kernels) {
  kernels.impl("hadamard_transform", TORCH_FN((transform<kTransform>)));
  kernels.impl("hadamard_transform_", TORCH_FN((transform_inplace<kTransform>)));
  kernels.impl("grouped_hadamard", TORCH_FN((grouped<kTransform>)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(library, {
                          "hadamard_transform(Tensor x, float? scale=None) -> Tensor",
                          "hadamard_transform_(Tensor(a!) x, float? scale=None) -> ()",
                          "grouped_hadamard(Tensor x, int group, float? scale=None) -> Tensor",
                      });
  register_device<transform_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_device<transform_cuda>({library, DispatchKey::CUDA});
#endif
  const OpKernels meta(library, DispatchKey::Meta);
  meta.impl("hadamard_transform", TORCH_FN(prepare));
  meta.impl("hadamard_transform_", TORCH_FN(prepare_inplace));
  meta.impl("grouped_hadamard", TORCH_FN(prepare_grouped));
  const OpKernels autograd(library, DispatchKey::Autograd);
  autograd.impl("hadamard_transform", TORCH_FN(transform_autograd));
  autograd.impl("grouped_hadamard", TORCH_FN(grouped_autograd));
}

}  // namespace htree::hadamard
