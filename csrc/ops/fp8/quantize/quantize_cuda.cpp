// CUDA entry points of quantisation: parameters, alignment, workspace and launch.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>

#include "host/cuda/device_type.h"
#include "host/cuda/hopper.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/fp8/quantize/quantize.h"
#include "ops/fp8/quantize/quantize_launch.h"

namespace htree::fp8 {
namespace {

template <typename F>
void dispatch(const char* op, at::ScalarType dtype, F&& f) {
  dispatch_dtype(op, dtype, FloatTypes{},
                 [&](auto tag) { f(Type<DeviceType<typename decltype(tag)::type>>{}); });
}

template <typename T>
const T* input(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
// Null where a tensor is not wanted.
template <typename T>
T* output(const at::Tensor& t) {
  return t.defined() ? static_cast<T*>(t.mutable_data_ptr()) : nullptr;
}

bool is_aligned(const void* data, int64_t num_bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(num_bytes) == 0;
}

int num_processors() {
  return at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
}

void check_launch(const char* op, cudaError_t error) {
  TORCH_CHECK_NOT_IMPLEMENTED(error != cudaErrorNotSupported, op,
                              ": a row of x has more groups than one launch can number (2^30)");
  C10_CUDA_CHECK(error);
}

}  // namespace

void quantize_cuda(const MatrixInput& x, const at::Tensor& scale, bool given, const QuantizeOutputs& out) {
  constexpr const char* kOp = "fp8_quantize";
  const LaunchScope scope(x.data);
  dispatch(kOp, x.data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* data = input<T>(x.data);
    const int pack = choose_pack(x.shape, x.row_stride, sizeof(T), is_aligned(data, 16));
    const int64_t num_partials =
        given ? 0 : choose_largest_config(x.shape, pack, num_processors()).num_partials;
    const at::Tensor partial = at::empty({num_partials}, x.data.options().dtype(at::kInt));
    const QuantizeArgs<T> args{
        .x = data,
        .row_stride = x.row_stride,
        .shape = x.shape,
        .pack = pack,
        .scale = given ? const_cast<float*>(input<float>(scale)) : output<float>(scale),
        .is_scale_given = given,
        .codes = output<uint8_t>(out.codes),
        .values = output<T>(out.values),
        .num_overflow = output<int>(out.num_overflow),
        .partial = reinterpret_cast<uint32_t*>(partial.mutable_data_ptr<int>()),
        .num_processors = num_processors(),
        .most_pdl_blocks = most_pdl_blocks()};
    check_launch(kOp, launch_quantize(args, scope.stream()));
  });
}

void dequantize_cuda(const MatrixInput& codes, const at::Tensor& scale, const at::Tensor& out) {
  constexpr const char* kOp = "fp8_dequantize";
  const LaunchScope scope(codes.data);
  dispatch(kOp, out.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const uint8_t* data = input<uint8_t>(codes.data);
    const ApplyArgs<uint8_t, T> args{
        .x = data,
        .dy = nullptr,
        .out = output<T>(out),
        .scale = input<float>(scale),
        .row_stride = codes.row_stride,
        .shape = codes.shape,
        .pack = choose_pack(codes.shape, codes.row_stride, sizeof(T), is_aligned(data, 16 / sizeof(T))),
        .num_processors = num_processors(),
        .most_pdl_blocks = most_pdl_blocks()};
    check_launch(kOp, launch_dequantize(args, scope.stream()));
  });
}

void fake_backward_cuda(const at::Tensor& dy, const MatrixInput& x, const at::Tensor& scale,
                        const at::Tensor& dx) {
  constexpr const char* kOp = "fp8_fake_quant_backward";
  const LaunchScope scope(x.data);
  dispatch(kOp, dx.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* data = input<T>(x.data);
    const T* upstream = input<T>(dy);
    const bool aligned = is_aligned(data, 16) && is_aligned(upstream, 16);
    const ApplyArgs<T, T> args{.x = data,
                               .dy = upstream,
                               .out = output<T>(dx),
                               .scale = input<float>(scale),
                               .row_stride = x.row_stride,
                               .shape = x.shape,
                               .pack = choose_pack(x.shape, x.row_stride, sizeof(T), aligned),
                               .num_processors = num_processors(),
                               .most_pdl_blocks = most_pdl_blocks()};
    check_launch(kOp, launch_fake_backward(args, scope.stream()));
  });
}

}  // namespace htree::fp8
