// CUDA entry points of causal_softmax: parameters, configuration, launch.
#include <ATen/core/Tensor.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "host/dispatch.h"
#include "host/launch.h"
#include "ops/causal_softmax/causal_softmax.h"
#include "ops/causal_softmax/causal_softmax_launch.h"

namespace htree::causal_softmax {
namespace {

template <typename T>
struct DeviceType {
  using type = T;
};
template <>
struct DeviceType<c10::Half> {
  using type = __half;
};
template <>
struct DeviceType<c10::BFloat16> {
  using type = __nv_bfloat16;
};

constexpr int kPackBytes = 16;

template <typename T>
Matrix<const T> input(const at::Tensor& t) {
  const Strides s = strides_of(t);
  return {static_cast<const T*>(t.const_data_ptr()), s.batch, s.row, s.col};
}

template <typename T>
Matrix<T> output(const at::Tensor& t) {
  const Strides s = strides_of(t);
  return {static_cast<T*>(t.mutable_data_ptr()), s.batch, s.row, s.col};
}

// Rows that can move in 16-byte packs: unit column stride, every row start aligned.
template <typename T>
bool aligned(const Matrix<T>& m) {
  const int64_t size = sizeof(T);
  return m.col_stride == 1 && reinterpret_cast<uintptr_t>(m.data) % kPackBytes == 0 &&
         m.row_stride * size % kPackBytes == 0 && m.batch_stride * size % kPackBytes == 0;
}

Shape shape_of(const Problem& p) {
  // Long rows cannot come in such numbers; short ones share a block of kRowsPerBlock.
  const int64_t num_rows = p.batch * p.rows;
  TORCH_CHECK(num_rows / kRowsPerBlock < INT32_MAX, "causal_softmax: batch * rows must be below ",
              kRowsPerBlock, " * (2^31 - 1) on CUDA, got ", num_rows);
  return {num_rows, p.rows, p.cols};
}

}  // namespace

void forward_cuda(const at::Tensor& x, int64_t block_size, const at::Tensor& out) {
  const LaunchScope scope(x);
  if (x.numel() == 0) {
    return;
  }
  const Problem p = problem_of(x, block_size);
  dispatch_dtype("causal_softmax", x.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    const ForwardParams<T> params{input<T>(x), output<T>(out), shape_of(p)};
    const KernelConfig config = choose_config(p.cols, aligned(params.x) && aligned(params.y), p.block_size);
    TORCH_CHECK_NOT_IMPLEMENTED(launch_forward(config, params, scope.stream()),
                                "causal_softmax: no kernel is compiled for ", describe(config));
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void backward_cuda(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& dx) {
  const LaunchScope scope(y);
  if (y.numel() == 0) {
    return;
  }
  const Problem p = problem_of(y, /*block_size=*/0);
  dispatch_dtype("causal_softmax_backward", y.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    const BackwardParams<T> params{input<T>(dy), input<T>(y), output<T>(dx), shape_of(p)};
    const bool vectorised = aligned(params.dy) && aligned(params.y) && aligned(params.dx);
    const KernelConfig config = choose_config(p.cols, vectorised, /*block_size=*/0);
    TORCH_CHECK_NOT_IMPLEMENTED(launch_backward(config, params, scope.stream()),
                                "causal_softmax_backward: no kernel is compiled for ", describe(config));
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace htree::causal_softmax
