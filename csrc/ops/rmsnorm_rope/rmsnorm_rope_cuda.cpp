// CUDA entry points of rmsnorm_rope: parameters, configuration and launch.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <initializer_list>

#include "host/cuda/device_type.h"
#include "host/cuda/hopper.h"
#include "host/cuda/kernel_launch.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/rmsnorm_rope/rmsnorm_rope.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_launch.h"

namespace htree::rmsnorm_rope {
namespace {

constexpr int kPackBytes = 16;

Dtype dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat;
    case at::kHalf:
      return Dtype::kHalf;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kDouble:
      return Dtype::kDouble;
    default:
      TORCH_CHECK_TYPE(false, "rmsnorm_rope: dtype = ", t.scalar_type(), " has no kernel");
  }
}

template <typename T>
Rows<const T> input(const at::Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}

template <typename T>
Rows<T> output(const at::Tensor& t) {
  return t.defined() ? Rows<T>{static_cast<T*>(t.mutable_data_ptr()), t.stride(0), t.stride(1), t.stride(2)}
                     : Rows<T>{};
}

Weight weight_of(const at::Tensor& t) {
  return {t.const_data_ptr(), dtype_of(t)};
}

Table table_of(const at::Tensor& t, const Problem& p) {
  const int upper = static_cast<int>(p.half_tables ? 0 : p.head_dim / 2);
  return {t.const_data_ptr(), table_batch_stride(t), t.stride(-2), upper, dtype_of(t)};
}

Shape shape_of(const Problem& p) {
  return {p.batch,          p.positions, p.heads, static_cast<int>(p.width), static_cast<int>(p.head_dim),
          p.batched_tables, p.eps};
}

// Whether every row of every operand starts at a multiple of 16 bytes.
bool aligned(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
  for (const at::Tensor& t : tensors) {
    bool starts = !t.defined() || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kPackBytes == 0;
    for (int64_t dim = 0; t.defined() && dim + 1 < t.dim(); ++dim) {
      starts &= t.size(dim) == 1 || t.stride(dim) * t.element_size() % kPackBytes == 0;
    }
    if (!starts) {
      return false;
    }
  }
  return true;
}

void check_sizes(const Problem& p) {
  TORCH_CHECK(p.num_rows() <= INT32_MAX, "rmsnorm_rope: x must have at most 2^31 - 1 rows on CUDA, got ",
              p.num_rows());
  TORCH_CHECK(p.width <= INT32_MAX / 4,
              "rmsnorm_rope: x must have at most 2^29 - 1 elements per row on CUDA, got ", p.width);
}

int attribute_of_device(cudaDeviceAttr attribute) {
  int value = 0;
  C10_CUDA_CHECK(device_attribute(attribute, value));
  return value;
}

void check_launch(const char* op, const KernelConfig& config, cudaError_t error) {
  TORCH_CHECK_NOT_IMPLEMENTED(error != cudaErrorNotSupported, op, ": no kernel is compiled for ",
                              describe(config));
  C10_CUDA_CHECK(error);
}

KernelConfig config_of(const Problem& p, int element_size, bool vectorised, int num_multiprocessors,
                       at::IntArrayRef forced) {
  if (forced.empty()) {
    const KernelConfig config =
        choose_config(p.width, p.head_dim, element_size, vectorised, /*backward=*/false);
    return spread_few_rows(config, p.num_rows(), packs_per_half(p.head_dim, element_size),
                           num_multiprocessors);
  }
  const KernelConfig config =
      choose_forced_config(p.width, p.head_dim, element_size, vectorised, {forced[0], forced[1], forced[2]});
  TORCH_CHECK_NOT_IMPLEMENTED(config.found(), "rmsnorm_rope: no kernel with BLOCK_SIZE = ", forced[0],
                              ", num_warps = ", forced[1], ", num_stages = ", forced[2], " holds rows of ",
                              p.width, " elements of ", element_size, " bytes");
  return config;
}

}  // namespace

void forward_cuda(const Operands& o, at::IntArrayRef config_tuple, const at::Tensor& out) {
  const LaunchScope scope(o.x);
  const Problem& p = o.problem;
  if (out.numel() == 0) {
    return;
  }
  check_sizes(p);
  dispatch_dtype("rmsnorm_rope", out.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = DeviceType<typename decltype(tag)::type>;
    const bool vectorised = aligned({o.x, o.weight, o.cos, o.sin, out});
    const int multiprocessors = attribute_of_device(cudaDevAttrMultiProcessorCount);
    KernelConfig config = config_of(p, sizeof(T), vectorised, multiprocessors, config_tuple);
    config = fit_stages(config, 1,
                        attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticSharedBytes);
    const int blocks = num_blocks(config, p.num_rows(), multiprocessors, /*backward=*/false);
    const ForwardParams<T> params{input<T>(o.x),      output<T>(out),     weight_of(o.weight),
                                  table_of(o.cos, p), table_of(o.sin, p), shape_of(p)};
    check_launch("rmsnorm_rope", config,
                 launch_forward(config, params, blocks, blocks <= most_pdl_blocks(), scope.stream()));
  });
}

void backward_cuda(const Operands& o, const at::Tensor& dy, const Gradients& gradients) {
  const LaunchScope scope(o.x);
  const auto& [dx, dweight] = gradients;
  const Problem& p = o.problem;
  if (o.x.numel() == 0) {
    if (dweight.defined()) {
      dweight.zero_();
    }
    return;
  }
  if (!dx.defined() && !dweight.defined()) {
    return;
  }
  check_sizes(p);
  dispatch_dtype("rmsnorm_rope_backward", dy.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = DeviceType<typename decltype(tag)::type>;
    using A = ArithmeticOf<T>;
    const bool vectorised = aligned({dy, o.x, o.weight, o.cos, o.sin, dx});
    KernelConfig config = choose_config(p.width, p.head_dim, sizeof(T), vectorised, /*backward=*/true);
    config = fit_stages(config, 2,
                        attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticSharedBytes);
    const int blocks = num_blocks(config, p.num_rows(), attribute_of_device(cudaDevAttrMultiProcessorCount),
                                  /*backward=*/true);
    at::Tensor dw_blocks;
    if (dweight.defined()) {
      const at::ScalarType sum_type = std::is_same_v<A, double> ? at::kDouble : at::kFloat;
      dw_blocks = at::empty({blocks, p.width}, o.x.options().dtype(sum_type));
    }
    A* sums = dweight.defined() ? static_cast<A*>(dw_blocks.mutable_data_ptr()) : nullptr;
    const BackwardParams<T> params{input<T>(dy),        input<T>(o.x),      output<T>(dx),      sums,
                                   weight_of(o.weight), table_of(o.cos, p), table_of(o.sin, p), shape_of(p)};
    check_launch("rmsnorm_rope_backward", config, launch_backward(config, params, blocks, scope.stream()));
    if (dweight.defined()) {
      C10_CUDA_CHECK(launch_sum<A>(
          {sums, dweight.mutable_data_ptr(), dtype_of(dweight), blocks, static_cast<int>(p.width)},
          scope.stream()));
    }
  });
}

}  // namespace htree::rmsnorm_rope
