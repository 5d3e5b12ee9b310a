// CUDA entry points of the gated_mlp room: operands, choice of kernel, launch.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "host/aligned.h"
#include "host/device_type.h"
#include "host/dispatch.h"
#include "host/hopper.h"
#include "host/launch.h"
#include "ops/gated_mlp/gated_mlp.h"
#include "ops/gated_mlp/gated_mlp_launch.h"

namespace htree::gated_mlp {
namespace {

using at::Tensor;

// The library's products must see the dtypes they are given.
using WithoutAutocast = c10::impl::ExcludeDispatchKeyGuard;

bool is_half(const Tensor& x) {
  return x.scalar_type() != at::kFloat;
}

// a b in fp32: the half types without a rounding between, fp32 by the library's own rules (allow_tf32).
Tensor product(const Tensor& a, const Tensor& b) {
  return is_half(a) ? at::mm(a, b, at::kFloat) : at::mm(a, b);
}

template <typename T>
const T* data_of(const Tensor& x) {
  return x.defined() ? static_cast<const T*>(x.const_data_ptr()) : nullptr;
}
template <typename T>
T* mutable_data_of(const Tensor& x) {
  return x.defined() ? static_cast<T*>(x.mutable_data_ptr()) : nullptr;
}

// x [n, hidden] as tensor copies can read it: unit stride, rows and start aligned to 16 bytes. Otherwise a
// copy with padded rows.
Tensor with_aligned_rows(const Tensor& x) {
  constexpr int64_t kPack = 8;
  const bool aligned = x.stride(1) == 1 && (x.stride(0) % kPack == 0 || x.size(0) == 1) && x.stride(0) > 0 &&
                       reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  if (aligned) {
    return x;
  }
  const int64_t pitch = (x.size(1) + kPack - 1) / kPack * kPack;
  Tensor copy = at::empty({x.size(0), pitch}, x.options()).narrow(1, 0, x.size(1));
  copy.copy_(x);
  return copy;
}

template <typename T>
Operand<T> operand_of(const Tensor& x) {
  // a single row may have any stride; the descriptor wants a multiple of 16 bytes
  return {data_of<T>(x), x.size(0) == 1 ? (x.size(1) + 7) / 8 * 8 : x.stride(0)};
}

void check_launch(cudaError_t error, const KernelConfig& config) {
  TORCH_CHECK_NOT_IMPLEMENTED(error != cudaErrorNotSupported, "gated_mlp: no kernel for ", describe(config));
  C10_CUDA_CHECK(error);
}

template <typename T>
void launch_fused(const Operands& o, const KernelConfig& config, const Results& results,
                  cudaStream_t stream) {
  const Tensor x = with_aligned_rows(o.x);
  const Tensor linear = with_aligned_rows(o.linear);
  const Tensor acted = with_aligned_rows(o.acted);
  const ForwardParams<T> params{
      .sizes = o.sizes,
      .activation = o.activation,
      .x = operand_of<T>(x),
      .gate_weight = operand_of<T>(linear),
      .up_weight = operand_of<T>(acted),
      .out = mutable_data_of<T>(results.out),
      .gate = mutable_data_of<T>(results.linear),
      .up = mutable_data_of<T>(results.acted),
  };
  check_launch(config.kernel == Kernel::kStream ? launch_stream<T>(params, config, stream)
                                                : launch_tile<T>(params, config, stream),
               config);
}

template <typename T>
void launch_composed(const Operands& o, const Results& results, cudaStream_t stream) {
  const Tensor linear = product(o.x, o.linear.t());
  const Tensor acted = product(o.x, o.acted.t());
  C10_CUDA_CHECK(launch_gate<T>(o.activation, results.out.numel(), data_of<float>(linear),
                                data_of<float>(acted), mutable_data_of<T>(results.out), stream));
  if (results.linear.defined()) {
    results.linear.copy_(linear);
    results.acted.copy_(acted);
  }
}

}  // namespace

void forward_cuda(const Operands& o, at::IntArrayRef config, const Results& results) {
  const LaunchScope scope(o.x);
  const WithoutAutocast guard(c10::autocast_dispatch_keyset);
  const Facts facts{o.sizes.rows,
                    o.sizes.inner,
                    o.sizes.hidden,
                    is_half(o.x) && has_hopper_kernels(),
                    results.linear.defined(),
                    at::cuda::getCurrentDeviceProperties()->multiProcessorCount};
  KernelConfig choice = choose_config(facts);
  if (!config.empty()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        choice.kernel != Kernel::kComposed,
        "gated_mlp: config chooses among the kernels for fp16 and bf16 on sm_90; got ", o.x.scalar_type(),
        " on sm_", at::cuda::getCurrentDeviceProperties()->major,
        at::cuda::getCurrentDeviceProperties()->minor);
    choice = config_of({config[0], config[1], config[2], config[3], config[4]});
  }
  dispatch_dtype("gated_mlp", o.x.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = DeviceType<typename decltype(tag)::type>;
    if constexpr (sizeof(T) == 2) {
      if (choice.kernel != Kernel::kComposed) {
        return launch_fused<T>(o, choice, results, scope.stream());
      }
    }
    launch_composed<T>(o, results, scope.stream());
  });
}

// The products by the library, the elementwise part in one kernel. Without saved products they are computed
// again, in fp32; dgate and dup are rounded to the dtype of x, because they are operands of products.
void backward_cuda(const Operands& o, const BackwardOperands& b) {
  const LaunchScope scope(o.x);
  const WithoutAutocast guard(c10::autocast_dispatch_keyset);
  const bool saved = b.linear_product.defined();
  const Tensor linear = saved ? aligned_contiguous(b.linear_product) : product(o.x, o.linear.t());
  const Tensor acted = saved ? aligned_contiguous(b.acted_product) : product(o.x, o.acted.t());
  const Tensor dy = aligned_contiguous(b.dy);
  Tensor dlinear_product = at::empty_like(dy);
  Tensor dacted_product = at::empty_like(dy);
  dispatch_dtype("gated_mlp_backward", o.x.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = DeviceType<typename decltype(tag)::type>;
    const auto launch = [&](auto product_tag) {
      using P = decltype(product_tag);
      C10_CUDA_CHECK((launch_gate_backward<T, P>(o.activation, dy.numel(), data_of<T>(dy), data_of<P>(linear),
                                                 data_of<P>(acted), mutable_data_of<T>(dlinear_product),
                                                 mutable_data_of<T>(dacted_product), scope.stream())));
    };
    if (saved) {
      launch(T{});
    } else {
      launch(float{});
    }
  });
  if (b.dx.defined()) {
    // both terms are summed in fp32 and rounded once
    if (is_half(o.x)) {
      Tensor sum = product(dlinear_product, o.linear);
      at::addmm_out(sum, sum, dacted_product, o.acted, at::kFloat);
      b.dx.copy_(sum);
    } else {
      Tensor dx = b.dx;
      at::mm_out(dx, dlinear_product, o.linear);
      dx.addmm_(dacted_product, o.acted);
    }
  }
  if (b.dlinear.defined()) {
    Tensor dlinear = b.dlinear;
    at::mm_out(dlinear, dlinear_product.t(), o.x);
  }
  if (b.dacted.defined()) {
    Tensor dacted = b.dacted;
    at::mm_out(dacted, dacted_product.t(), o.x);
  }
}

}  // namespace htree::gated_mlp
