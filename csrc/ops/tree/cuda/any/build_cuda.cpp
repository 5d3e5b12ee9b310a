// CUDA entry points of the build stage.
#include "ops/tree/cuda/any/cuda_tensors.h"
#include "ops/tree/cuda/any/tree_build.h"
#include "ops/tree/tree_kernels.h"

namespace htree::tree_attention {
namespace {

// `children` is the tensor that has the N children: the input of the forward, the output of the backward.
template <typename T>
TreeBuildParams<T> build_params(const Tensor& in, const Tensor& out, const Tensor& children, int64_t r) {
  return {input_view<T>(in),
          output<T>(out),
          children.size(0),
          children.size(1),
          children.size(2),
          children.size(3),
          r};
}

}  // namespace

void tree_build_cuda(const Tensor& k, const Tensor& v, int64_t r, const Tensor& pk, const Tensor& pv) {
  const LaunchScope scope(k);
  dispatch_device_dtype("tree_build", k.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    C10_CUDA_CHECK(launch_tree_build(build_params<T>(k, pk, k, r), scope.stream()));
    C10_CUDA_CHECK(launch_tree_build(build_params<T>(v, pv, v, r), scope.stream()));
  });
}

void span_means_cuda(const Tensor& k, int64_t span, const Tensor& means) {
  const LaunchScope scope(k);
  dispatch_device_dtype("span_means", k.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    C10_CUDA_CHECK(launch_tree_build(build_params<T>(k, means, k, span), scope.stream()));
  });
}

void tree_build_backward_cuda(const Tensor& dpk, const Tensor& dpv, int64_t r, const Tensor& dk,
                              const Tensor& dv) {
  const LaunchScope scope(dk);
  dispatch_device_dtype("tree_build_backward", dk.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    C10_CUDA_CHECK(launch_tree_build_backward(build_params<T>(dpk, dk, dk, r), scope.stream()));
    C10_CUDA_CHECK(launch_tree_build_backward(build_params<T>(dpv, dv, dv, r), scope.stream()));
  });
}

}  // namespace htree::tree_attention
