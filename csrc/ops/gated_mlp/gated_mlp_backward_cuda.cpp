// CUDA entry point of the backward: the elementwise part in one kernel, the products by the kernels of
// cuda/sm90/gated_mlp_gradient.cuh or by cuBLAS.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include "host/aligned.h"
#include "host/cuda/device_type.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/gated_mlp/gated_mlp_cuda.h"

namespace htree::gated_mlp {
namespace {

using at::Tensor;

// Gradients of the two products, by role, contiguous. They are rounded to the dtype of x,
// because they are operands.
struct ProductGradients {
  Tensor linear;
  Tensor acted;
};

// Products that were not saved are computed again, in fp32.
ProductGradients differentiate_products(const Operands& o, const BackwardOperands& b, cudaStream_t stream) {
  const bool saved = b.linear_product.defined();
  const Tensor linear = saved ? aligned_contiguous(b.linear_product) : product(o.x, o.linear.t());
  const Tensor acted = saved ? aligned_contiguous(b.acted_product) : product(o.x, o.acted.t());
  const Tensor dy = aligned_contiguous(b.dy);
  const ProductGradients d{at::empty_like(dy), at::empty_like(dy)};
  dispatch_dtype("gated_mlp_backward", o.x.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = DeviceType<typename decltype(tag)::type>;
    const auto launch = [&](auto product_tag) {
      using P = decltype(product_tag);
      C10_CUDA_CHECK((launch_gate_backward<T, P>(o.activation, dy.numel(), data_of<T>(dy), data_of<P>(linear),
                                                 data_of<P>(acted), mutable_data_of<T>(d.linear),
                                                 mutable_data_of<T>(d.acted), stream)));
    };
    if (saved) {
      launch(T{});
    } else {
      launch(float{});
    }
  });
  return d;
}

using HalfTypes = TypeList<c10::Half, c10::BFloat16>;

// dx = dlinear linear + dacted acted. For half types both terms are summed in fp32 and rounded once.
void write_input_gradient(const Operands& o, const ProductGradients& d, const Facts& facts, Tensor dx,
                          cudaStream_t stream) {
  if (fuses_input_gradient(facts)) {
    const Tensor linear = with_aligned_rows(o.linear);
    const Tensor acted = with_aligned_rows(o.acted);
    dispatch_dtype("gated_mlp_backward", o.x.scalar_type(), HalfTypes{}, [&](auto tag) {
      using T = DeviceType<typename decltype(tag)::type>;
      C10_CUDA_CHECK(launch_input_gradient<T>({o.sizes,
                                               {operand_of<T>(d.linear), operand_of<T>(d.acted)},
                                               {operand_of<T>(linear), operand_of<T>(acted)},
                                               mutable_data_of<T>(dx)},
                                              stream));
    });
  } else if (is_half(o.x)) {
    Tensor sum = product(d.linear, o.linear);
    at::addmm_out(sum, sum, d.acted, o.acted, at::kFloat);
    dx.copy_(sum);
  } else {
    at::mm_out(dx, d.linear, o.linear);
    dx.addmm_(d.acted, o.acted);
  }
}

// dlinear_weight = dlinear^T x, dacted_weight = dacted^T x. One that is not wanted is undefined.
void write_weight_gradients(const Operands& o, const ProductGradients& d, const Facts& facts,
                            Tensor dlinear_weight, Tensor dacted_weight, cudaStream_t stream) {
  if (fuses_weight_gradients(facts)) {
    const Tensor x = with_aligned_rows(o.x);
    dispatch_dtype("gated_mlp_backward", o.x.scalar_type(), HalfTypes{}, [&](auto tag) {
      using T = DeviceType<typename decltype(tag)::type>;
      C10_CUDA_CHECK(launch_weight_gradients<T>(
          {o.sizes,
           {operand_of<T>(d.linear), operand_of<T>(d.acted)},
           operand_of<T>(x),
           {mutable_data_of<T>(dlinear_weight), mutable_data_of<T>(dacted_weight)}},
          stream));
    });
    return;
  }
  if (dlinear_weight.defined()) {
    at::mm_out(dlinear_weight, d.linear.t(), o.x);
  }
  if (dacted_weight.defined()) {
    at::mm_out(dacted_weight, d.acted.t(), o.x);
  }
}

}  // namespace

void backward_cuda(const Operands& o, const BackwardOperands& b) {
  const LaunchScope scope(o.x);
  const WithoutAutocast guard(c10::autocast_dispatch_keyset);
  const ProductGradients d = differentiate_products(o, b, scope.stream());
  const Facts facts = facts_of(o, /*keeps_products=*/true);
  if (b.dx.defined()) {
    write_input_gradient(o, d, facts, b.dx, scope.stream());
  }
  if (b.dlinear.defined() || b.dacted.defined()) {
    write_weight_gradients(o, d, facts, b.dlinear, b.dacted, scope.stream());
  }
}

}  // namespace htree::gated_mlp
