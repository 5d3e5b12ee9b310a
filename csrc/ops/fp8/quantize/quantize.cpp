// Schemas, Meta, Autograd and registrations of quantisation. docs/semantics/fp8.md §3.3
#include "ops/fp8/quantize/quantize.h"

#include <torch/library.h>

#include "host/autograd.h"
#include "host/no_gradient.h"
#include "host/op_handle.h"
#include "host/registration.h"

namespace htree::fp8 {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// ---- the ops, called through the dispatcher

Tensor call_scale(const Tensor& x, const Grouping& g) {
  static const auto op =
      op_handle<Tensor(const Tensor&, std::string_view, int64_t, int64_t)>("htree::fp8_compute_scale");
  return op.call(x, g.granularity, g.dim, g.block);
}

Tensor call_fake(const Tensor& x, const OptionalTensor& scale, const Grouping& g) {
  static const auto op =
      op_handle<Tensor(const Tensor&, const OptionalTensor&, std::string_view, int64_t, int64_t)>(
          "htree::fp8_fake_quant");
  return op.call(x, scale, g.granularity, g.dim, g.block);
}

Tensor call_fake_backward(const Tensor& dy, const Tensor& x, const Tensor& scale, const Grouping& g) {
  static const auto op =
      op_handle<Tensor(const Tensor&, const Tensor&, const Tensor&, std::string_view, int64_t, int64_t)>(
          "htree::_fp8_fake_quant_backward");
  return op.call(dy, x, scale, g.granularity, g.dim, g.block);
}

// ---- CPU, CUDA and Meta: one body, with the device's entry points as template arguments (null for Meta)

using Quantize = void(const MatrixInput&, const Tensor&, bool, const QuantizeOutputs&);
using Dequantize = void(const MatrixInput&, const Tensor&, const Tensor&);
using FakeBackward = void(const Tensor&, const MatrixInput&, const Tensor&, const Tensor&);

// Without an element nothing is launched. A group without elements has the scale 1.
template <Quantize* kQuantize>
void run(const Tensor& x, const Grouping& grouping, const Tensor& scale, bool given,
         const QuantizeOutputs& out) {
  if constexpr (kQuantize != nullptr) {
    if (x.numel() > 0) {
      kQuantize(matrix_of(x, grouping), scale, given, out);
      return;
    }
    if (!given) scale.fill_(1.0);
    if (out.num_overflow.defined()) out.num_overflow.zero_();
  }
}

// amax = x.float().abs().where(x.isfinite(), 0).amax(dim, keepdim=True)
// scale = torch.where(amax == 0, 1, 448 / amax).clamp(2.0**-126, 2.0**127)
template <Quantize* kQuantize>
Tensor compute_scale(const Tensor& x, std::string_view granularity, int64_t dim, int64_t block) {
  const Grouping grouping{granularity, dim, block};
  Tensor scale = prepare_scale(x, grouping);
  run<kQuantize>(x, grouping, scale, /*given=*/false, {});
  return scale;
}

// y = x.float() * scale
// q = y.clamp(-448, 448).to(torch.float8_e4m3fn); n_overflow = (y.abs() > 464).sum(dtype=torch.int32)
template <Quantize* kQuantize>
Quantized quantize(const Tensor& x, const OptionalTensor& scale, std::string_view granularity, int64_t dim,
                   int64_t block) {
  const Grouping grouping{granularity, dim, block};
  Quantized result = prepare_quantize(x, scale, grouping);
  const auto& [codes, used, num_overflow] = result;
  if (scale.has_value()) {
    used.copy_(*scale);
  }
  run<kQuantize>(x, grouping, used, scale.has_value(), {codes, {}, num_overflow});
  return result;
}

// q, s, _ = fp8_quantize(x, scale); (q.float() / s).to(x.dtype)
template <Quantize* kQuantize>
Tensor fake_quant(const Tensor& x, const OptionalTensor& scale, std::string_view granularity, int64_t dim,
                  int64_t block) {
  const Grouping grouping{granularity, dim, block};
  Tensor y = prepare_fake(x, scale, grouping);
  const Tensor used = scale.has_value() ? scale->contiguous() : prepare_scale(x, grouping);
  run<kQuantize>(x, grouping, used, scale.has_value(), {{}, y, {}});
  return y;
}

// dx = torch.where((x.float() * scale).abs() <= 448, dy, 0)
template <FakeBackward* kFakeBackward>
Tensor fake_quant_backward(const Tensor& dy, const Tensor& x, const Tensor& scale,
                           std::string_view granularity, int64_t dim, int64_t block) {
  const Grouping grouping{granularity, dim, block};
  Tensor dx = prepare_fake_backward(dy, x, scale, grouping);
  if constexpr (kFakeBackward != nullptr) {
    if (x.numel() > 0) kFakeBackward(dy.contiguous(), matrix_of(x, grouping), scale.contiguous(), dx);
  }
  return dx;
}

// (q.float() / scale).to(dtype)
template <Dequantize* kDequantize>
Tensor dequantize(const Tensor& codes, const Tensor& scale, at::ScalarType dtype, int64_t block) {
  Tensor out = prepare_dequantize(codes, scale, dtype, block);
  if constexpr (kDequantize != nullptr) {
    if (codes.numel() > 0) {
      kDequantize(matrix_of(codes, grouping_of(codes, scale, block)), scale.contiguous(), out);
    }
  }
  return out;
}

// ---- Autograd: fp8_fake_quant alone has a gradient, straight through the rounding

struct FakeNode : Function<FakeNode> {
  static constexpr bool is_traceable = true;

  // The backward needs the scale, so a scale that is not given is computed first.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& scale,
                        const Grouping& g) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor used = scale.has_value() ? *scale : call_scale(x, g);
    ctx->save_for_backward({x, used});
    ctx->saved_data["granularity"] = std::string(g.granularity);
    ctx->saved_data["dim"] = g.dim;
    ctx->saved_data["block"] = g.block;
    return call_fake(x, used, g);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(3);
    if (grads[0].defined()) {
      const variable_list saved = ctx->get_saved_variables();
      const std::string granularity = ctx->saved_data["granularity"].toStringRef();
      const Grouping g{granularity, ctx->saved_data["dim"].toInt(), ctx->saved_data["block"].toInt()};
      result[0] = call_fake_backward(grads[0], saved[0], saved[1], g);
    }
    return result;
  }
};

Tensor fake_quant_autograd(const Tensor& x, const OptionalTensor& scale, std::string_view granularity,
                           int64_t dim, int64_t block) {
  const Grouping grouping{granularity, dim, block};
  if (scale.has_value()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!needs_grad({*scale}),
                                "fp8_fake_quant: scale has no gradient; pass scale.detach()");
  }
  if (needs_grad({x})) {
    return FakeNode::apply(x, scale, grouping);
  }
  at::AutoDispatchBelowAutograd guard;
  return call_fake(x, scale, grouping);
}

Tensor fake_quant_backward_autograd(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                    std::string_view granularity, int64_t dim, int64_t block) {
  const Grouping grouping{granularity, dim, block};
  return std::get<0>(once_differentiable("fp8_fake_quant_backward", {dy, x, scale}, std::array{true}, [&] {
    return std::tuple(call_fake_backward(dy, x, scale, grouping));
  }));
}

template <Quantize* kQuantize, Dequantize* kDequantize, FakeBackward* kFakeBackward>
void register_device(const OpKernels& kernels) {
  kernels.impl("fp8_compute_scale", TORCH_FN((compute_scale<kQuantize>)));
  kernels.impl("fp8_quantize", TORCH_FN((quantize<kQuantize>)));
  kernels.impl("fp8_dequantize", TORCH_FN((dequantize<kDequantize>)));
  kernels.impl("fp8_fake_quant", TORCH_FN((fake_quant<kQuantize>)));
  kernels.impl("_fp8_fake_quant_backward", TORCH_FN((fake_quant_backward<kFakeBackward>)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(
      library,
      {
          "fp8_compute_scale(Tensor x, str granularity=\"tensor\", int dim=-1, int block=128) -> Tensor",
          "fp8_quantize(Tensor x, Tensor? scale=None, str granularity=\"tensor\", int dim=-1, int block=128) "
          "-> (Tensor q, Tensor scale, Tensor n_overflow)",
          "fp8_dequantize(Tensor q, Tensor scale, ScalarType dtype=half, int block=128) -> Tensor",
          "fp8_fake_quant(Tensor x, Tensor? scale=None, str granularity=\"tensor\", int dim=-1, "
          "int block=128) -> Tensor",
          "_fp8_fake_quant_backward(Tensor dy, Tensor x, Tensor scale, str granularity=\"tensor\", "
          "int dim=-1, int block=128) -> Tensor",
      });
  register_device<quantize_cpu, dequantize_cpu, fake_backward_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_device<quantize_cuda, dequantize_cuda, fake_backward_cuda>({library, DispatchKey::CUDA});
#endif
  register_device<nullptr, nullptr, nullptr>({library, DispatchKey::Meta});
  const OpKernels autograd(library, DispatchKey::Autograd);
  register_no_gradient(library, {"fp8_compute_scale", "fp8_quantize", "fp8_dequantize"});
  autograd.impl("fp8_fake_quant", TORCH_FN(fake_quant_autograd));
  autograd.impl("_fp8_fake_quant_backward", TORCH_FN(fake_quant_backward_autograd));
}

}  // namespace htree::fp8
