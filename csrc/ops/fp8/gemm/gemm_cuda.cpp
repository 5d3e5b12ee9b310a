// CUDA entry points of fp8_gemm: operands, choice of kernel and launch.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "host/cuda/device_type.h"
#include "host/cuda/hopper.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/fp8/gemm/cuda/gemm_launch.h"
#include "ops/fp8/gemm/gemm_choice.h"
#include "ops/fp8/gemm/gemm_cublas.h"
#include "ops/fp8/gemm/gemm_exact.h"

namespace htree::fp8 {
namespace {

using at::Tensor;

constexpr int64_t kAlignment = 16;  // bytes, which are also codes

bool is_aligned(const Tensor& x) {
  return x.stride(1) == 1 && x.stride(0) % kAlignment == 0 && x.stride(0) > 0 &&
         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kAlignment == 0;
}

// Codes [rows, k] in a form that tensor copies can read. Otherwise a copy with padded rows; among others a
// row-major b is transposed here.
Tensor with_aligned_codes(const Tensor& x) {
  if (is_aligned(x)) {
    return x;
  }
  const int64_t pitch = (x.size(1) + kAlignment - 1) / kAlignment * kAlignment;
  Tensor copy = at::empty({x.size(0), pitch}, x.options()).narrow(1, 0, x.size(1));
  copy.view(at::kByte).copy_(x.view(at::kByte));
  return copy;
}

GemmOperand operand_of(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(0)};
}

// The scale is [] or a vector in two dims.
GemmScale scale_of(const Tensor& scale) {
  const int64_t dim = scale.dim() == 2 && scale.size(0) == 1 ? 1 : 0;
  return {scale.const_data_ptr<float>(), scale.dim() == 0 ? 0 : scale.stride(dim)};
}

// Whether torch's scaled product takes the operands as they are: both scales are single, or there is one per
// row and column and the result is bf16.
bool cublas_takes(const GemmArguments& g) {
  const bool single = g.a_scale.numel() == 1 && g.b_scale.numel() == 1;
  const bool vectors = g.output_dtype == at::kBFloat16;
  const cudaDeviceProp* p = at::cuda::getCurrentDeviceProperties();
  const bool has_fp8 = p->major > 8 || (p->major == 8 && p->minor == 9);
  return has_fp8 && (single || vectors) && g.a.size(1) % kAlignment == 0 && g.b.size(1) % kAlignment == 0 &&
         is_aligned(g.a) && is_aligned(g.b.t());
}

// fp16 holds every e4m3 value.
void run_half(const GemmArguments& g, const Tensor& c) {
  const Tensor sums = at::mm(g.a.to(at::kHalf), g.b.to(at::kHalf), at::kFloat);
  store_quotients(sums.to(at::kDouble), g.a_scale, g.b_scale, c);
}

void run_hopper(const GemmArguments& g, const GemmConfig& config, const Tensor& c, cudaStream_t stream) {
  const Tensor a = with_aligned_codes(g.a);
  const Tensor b = with_aligned_codes(g.b.t());
  dispatch_dtype("fp8_gemm", g.output_dtype, FloatTypes{}, [&](auto tag) {
    using Out = DeviceType<typename decltype(tag)::type>;
    const GemmParams<Out> params{
        .sizes = {a.size(0), b.size(0), a.size(1)},
        .a = operand_of(a),
        .b = operand_of(b),
        .a_scale = scale_of(g.a_scale),
        .b_scale = scale_of(g.b_scale),
        .c = static_cast<Out*>(c.mutable_data_ptr()),
    };
    const cudaError_t error = config.kernel == GemmKernel::kStream
                                  ? launch_gemm_stream(params, config, stream)
                                  : launch_gemm_tile(params, config, stream);
    TORCH_CHECK_NOT_IMPLEMENTED(error != cudaErrorNotSupported, "fp8_gemm: no kernel for ", describe(config));
    C10_CUDA_CHECK(error);
  });
}

}  // namespace

// This does not use fp16 tensor cores: they cut off what lies below the last bit of an fp32 sum instead
// of rounding it, so a long sum of products of one sign comes out too small (Fasi et al., PeerJ
// Computer Science 7, 2021).
void exact_gemm_cuda(const GemmArguments& g, const Tensor& c) {
  constexpr int64_t kBlockBytes = 1 << 28;
  const LaunchScope scope(g.a);
  multiply_in_double(g, kBlockBytes, c, [](const Tensor& codes) { return codes.to(at::kDouble); });
}

void gemm_cuda(const GemmArguments& g, at::IntArrayRef config, const Tensor& c) {
  const LaunchScope scope(g.a);
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  constexpr int64_t kMost = int64_t{1} << 30;  // tile numbers and coordinates are 32-bit
  TORCH_CHECK_VALUE(g.a.size(0) <= kMost && g.a.size(1) <= kMost && g.b.size(1) <= kMost,
                    "fp8_gemm: M, K and N must be at most 2^30, got ", g.a.sizes(), " and ", g.b.sizes());
  const GemmFacts facts{.m = g.a.size(0),
                        .n = g.b.size(1),
                        .k = g.a.size(1),
                        .multiprocessors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount,
                        .hopper = has_hopper_kernels(),
                        .cublas = cublas_takes(g)};
  GemmConfig choice = choose_gemm_config(facts);
  if (!config.empty()) {
    TORCH_CHECK_NOT_IMPLEMENTED(facts.hopper, "fp8_gemm: config chooses among the kernels for sm_90");
    choice = config_of({config[0], config[1], config[2], config[3], config[4], config[5]});
  }
  switch (choice.kernel) {
    case GemmKernel::kHalf:
      return run_half(g, c);
    case GemmKernel::kCublas:
      return cublas_gemm(g, scale_of(g.a_scale), scale_of(g.b_scale), c, facts.hopper, scope.stream());
    case GemmKernel::kStream:
    case GemmKernel::kTile:
      return run_hopper(g, choice, c, scope.stream());
  }
}

}  // namespace htree::fp8
