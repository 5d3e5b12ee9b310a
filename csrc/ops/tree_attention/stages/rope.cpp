// Schemas, checks, Meta, Autograd and registrations of the rotation and of its cache.
// docs/semantics/tree_attention.md §1.4, §1.8
#include <ATen/ops/arange.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include "host/autograd.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree_attention/attention.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {

inline void check_rope_cache(const SymInt& size, int64_t dim, double base, at::ScalarType dtype,
                             const std::optional<at::ArrayRef<double>>& inv_freq) {
  constexpr const char* kOp = "rope_cache";
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, kOp, ": dtype must be ",
                   dtype_names({at::kFloat, at::kDouble}), ", got ", dtype_name(dtype));
  TORCH_CHECK_VALUE(holds(size.sym_ge(0)) && holds(size.sym_lt(kIndexLimit)), kOp,
                    ": size must be between 0 and ", kIndexLimit - 1, ", got ", size);
  TORCH_CHECK_VALUE(dim >= 0 && dim < kIndexLimit, kOp, ": dim must be between 0 and ", kIndexLimit - 1,
                    ", got ", dim);
  TORCH_CHECK_VALUE(dim >= 2 && dim % 2 == 0, kOp, ": dim must be even and at least 2, got ", dim);
  TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(base)) && base > 0, kOp,
                    ": base must be positive and finite in float32, got ", base);
  if (inv_freq.has_value()) {
    TreeOptions options;
    TORCH_CHECK_VALUE(base == *options.rope_base, kOp, ": base must keep its default ", *options.rope_base,
                      " where inv_freq is given, got ", base);
    options.inv_freq = inv_freq->vec();
    check_options(kOp, options);
    check_frequencies(kOp, options, dim);
  }
}

// x [B, T, H, K], cos and sin [size, K/2], positions int32 or int64, [T] or [B, T]. Returns an uninitialised
// tensor of x's shape and dtype. Positions are left to the kernels: one outside the table is an error on the
// CPU and is clamped on CUDA.
inline Tensor prepare_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                           [[maybe_unused]] bool inverse) {
  constexpr const char* kOp = "rope";
  check_rank(kOp, "x", x, 4, "[B, T, H, K]");
  check_floating(kOp, "x", x, /*double_on_cuda=*/true);
  const SymInt key_dim = x.sym_size(3);
  TORCH_CHECK_VALUE(holds(key_dim.sym_ge(2)) && same_size(key_dim % 2, 0), kOp,
                    ": K, the last size of x, must be even and at least 2, got ", x.sym_sizes());
  check_cache(kOp, cos, sin, "x", x, /*min_size=*/1);
  check_dtype(kOp, "positions", positions, {at::kInt, at::kLong});
  check_same_device(kOp, "positions", positions, "x", x);
  if (positions.dim() == 1) {
    check_size(kOp, "positions", positions, 0, x.sym_size(1), "T of x");
  } else {
    TORCH_CHECK_VALUE(positions.dim() == 2, kOp, ": positions must be 1-D [T] or 2-D [B, T], got ",
                      positions.dim(), "-D ", positions.sym_sizes());
    check_size(kOp, "positions", positions, 0, x.sym_size(0), "B of x");
    check_size(kOp, "positions", positions, 1, x.sym_size(1), "T of x");
  }
  return new_tensor(x.sym_sizes(), x.scalar_type(), x);
}

// ---- the ops

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

Tensor call_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                 bool inverse) {
  static const auto op =
      op_handle<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)>("htree::rope");
  return op.call(x, cos, sin, positions, inverse);
}

// ---- factory

// frequencies = base ** (-torch.arange(0, dim, 2).double() / dim) if inv_freq is None else inv_freq
// angle = torch.outer(torch.arange(size).double(), frequencies)
// torch.stack((angle.cos(), angle.sin())).to(dtype)
// In double until the end: fp32 angles are off by up to 5e-4 rad at position 9000.
Tensor rope_cache(SymInt size, int64_t dim, double base, at::ScalarType dtype,
                  std::optional<at::Device> device, std::optional<at::ArrayRef<double>> inv_freq) {
  check_rope_cache(size, dim, base, dtype, inv_freq);
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device.value_or(at::kCPU));
  Tensor frequencies;
  if (inv_freq.has_value()) {
    frequencies = at::tensor(*inv_freq, at::TensorOptions().dtype(at::kDouble)).to(options.device());
  } else {
    frequencies = at::pow(base, at::arange(0, dim, 2, options).div(-static_cast<double>(dim)));
  }
  const Tensor angle = at::outer(at::arange(size, options), frequencies);
  return at::stack({angle.cos(), angle.sin()}).to(dtype);
}

// ---- CPU and CUDA

// c, s = (table[positions].unsqueeze(-2) for table in (cos, sin)); s = -s if inverse else s
// lo, hi = x.to(cos.dtype).chunk(2, -1)
// torch.cat((lo * c - hi * s, lo * s + hi * c), -1).to(x.dtype)
template <Rope* kKernel>
Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse) {
  Tensor out = prepare_rope(x, cos, sin, positions, inverse);
  if (out.numel() > 0) {
    kKernel(unit_last(x), unit_last(cos), unit_last(sin), unit_last(positions), inverse, out);
  }
  return out;
}

// ---- Autograd: the gradient of a rotation is the inverse rotation, which is an op as well

struct RopeNode : Function<RopeNode> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin,
                        const Tensor& positions, bool inverse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({cos, sin, positions});
    ctx->saved_data["inverse"] = inverse;
    return call_rope(x, cos, sin, positions, inverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    Tensor dx;
    if (grads[0].defined()) {
      dx = call_rope(grads[0], saved[0], saved[1], saved[2], !ctx->saved_data["inverse"].toBool());
    }
    return {dx, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor rope_autograd(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                     bool inverse) {
  TORCH_CHECK_NOT_IMPLEMENTED(!needs_grad({cos, sin}), "rope: cos and sin have no gradient; detach them");
  if (needs_grad({x})) {
    return RopeNode::apply(x, cos, sin, positions, inverse);
  }
  at::AutoDispatchBelowAutograd guard;
  return call_rope(x, cos, sin, positions, inverse);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(library,
             {
                 "rope_cache(SymInt size, int dim, float base=10000., *, ScalarType dtype=float, Device? "
                 "device=None, float[]? inv_freq=None) -> Tensor",
                 "rope(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool inverse=False) -> Tensor",
             });
  OpKernels(library, DispatchKey::CompositeExplicitAutograd).impl("rope_cache", TORCH_FN(rope_cache));
  OpKernels(library, DispatchKey::CPU).impl("rope", TORCH_FN(rope<rope_cpu>));
#if defined(HTREE_WITH_CUDA)
  OpKernels(library, DispatchKey::CUDA).impl("rope", TORCH_FN(rope<rope_cuda>));
#endif
  OpKernels(library, DispatchKey::Meta).impl("rope", TORCH_FN(prepare_rope));
  OpKernels(library, DispatchKey::Autograd).impl("rope", TORCH_FN(rope_autograd));
}

}  // namespace htree::tree_attention
