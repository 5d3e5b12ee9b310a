// CUDA entry points of causal_softmax: parameters, configuration and launch.
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "host/cuda/device_type.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/causal_softmax/causal_softmax.h"
#include "ops/causal_softmax/causal_softmax_launch.h"

namespace htree::causal_softmax {
namespace {

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

// Whether rows can move in 16-byte packs: unit column stride, and every row start is aligned.
template <typename T>
bool aligned(const Matrix<T>& m) {
  const int64_t size = sizeof(T);
  return m.col_stride == 1 && reinterpret_cast<uintptr_t>(m.data) % kPackBytes == 0 &&
         m.row_stride * size % kPackBytes == 0 && m.batch_stride * size % kPackBytes == 0;
}

// A launch numbers its rows with 31 bits, so a larger batch goes in slices: calls launch(first
// batch, shape) for each.
template <typename Launch>
void for_each_slice(const Problem& p, const KernelConfig& config, Launch&& launch) {
  TORCH_CHECK(p.rows <= INT32_MAX, "causal_softmax: h of x must be at most 2^31 - 1 on CUDA, got ", p.rows);
  const int64_t slice = INT32_MAX / p.rows;
  for (int64_t first = 0; first < p.batch; first += slice) {
    const cudaError_t error = launch(first, Shape{std::min(slice, p.batch - first), p.rows, p.cols});
    TORCH_CHECK_NOT_IMPLEMENTED(error != cudaErrorNotSupported, "causal_softmax: no kernel is compiled for ",
                                describe(config));
    C10_CUDA_CHECK(error);
  }
}

template <typename T>
Matrix<T> from_batch(Matrix<T> m, int64_t first) {
  m.data += first * m.batch_stride;
  return m;
}

}  // namespace

void forward_cuda(const at::Tensor& x, int64_t block_size, const at::Tensor& out) {
  const LaunchScope scope(x);
  if (x.numel() == 0) {
    return;
  }
  const Problem p = problem_of(x, block_size);
  dispatch_dtype("causal_softmax", x.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = DeviceType<typename decltype(tag)::type>;
    const Matrix<const T> in = input<T>(x);
    const Matrix<T> result = output<T>(out);
    const KernelConfig config = choose_config({.cols = p.cols,
                                               .element_size = sizeof(T),
                                               .vectorised = aligned(in) && aligned(result),
                                               .backward = false,
                                               .block_size = static_cast<int>(p.block_size),
                                               .shared_bytes = scope.shared_bytes()});
    for_each_slice(p, config, [&](int64_t first, const Shape& shape) {
      return launch_forward(config, ForwardParams<T>{from_batch(in, first), from_batch(result, first), shape},
                            scope.stream());
    });
  });
}

void backward_cuda(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& dx) {
  const LaunchScope scope(y);
  if (y.numel() == 0) {
    return;
  }
  const Problem p = problem_of(y, /*block_size=*/0);
  dispatch_dtype("causal_softmax_backward", y.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = DeviceType<typename decltype(tag)::type>;
    const Matrix<const T> upstream = input<T>(dy);
    const Matrix<const T> softmax = input<T>(y);
    const Matrix<T> result = output<T>(dx);
    const KernelConfig config =
        choose_config({.cols = p.cols,
                       .element_size = sizeof(T),
                       .vectorised = aligned(upstream) && aligned(softmax) && aligned(result),
                       .backward = true,
                       .block_size = 0,
                       .shared_bytes = scope.shared_bytes()});
    for_each_slice(p, config, [&](int64_t first, const Shape& shape) {
      const BackwardParams<T> params{from_batch(upstream, first), from_batch(softmax, first),
                                     from_batch(result, first), shape};
      return launch_backward(config, params, scope.stream());
    });
  });
}

}  // namespace htree::causal_softmax
