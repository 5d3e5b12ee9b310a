// CUDA entry points that prune, compress and decompress: parameters and launch.
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "host/cuda/device_type.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/compressed_kv/compress/compress_launch.h"
#include "ops/compressed_kv/compressed_kv.h"

namespace htree::compressed_kv {
namespace {

constexpr int64_t kPackBytes = 16;

// x in a form that loads of 16 bytes can read.
at::Tensor with_aligned_rows(const at::Tensor& x) {
  const auto aligned = [&](int64_t elements) { return elements * x.element_size() % kPackBytes == 0; };
  const bool loads = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kPackBytes == 0 &&
                     aligned(x.stride(0)) && aligned(x.stride(1)) && aligned(x.stride(2));
  return loads ? x : x.clone(at::MemoryFormat::Contiguous);
}

CompressParams params_of(const RowFormat& format, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bitmap) {
  return {.format = format,
          .x = x.const_data_ptr(),
          .strides = {x.stride(0), x.stride(1), x.stride(2)},
          .weight = weight.defined() ? weight.const_data_ptr<float>() : nullptr,
          .num_rows = x.numel() / format.head_dim,
          .length = x.size(2),
          .num_heads = static_cast<int>(x.size(1)),
          .bitmap = reinterpret_cast<uint32_t*>(bitmap.mutable_data_ptr<int64_t>()),
          .values = nullptr,
          .scales = nullptr,
          .pruned = nullptr};
}

void launch(const char* op, at::ScalarType dtype, const CompressParams& p, cudaStream_t stream) {
  dispatch_dtype(op, dtype, FloatTypes{}, [&](auto tag) {
    C10_CUDA_CHECK(launch_compress<DeviceType<typename decltype(tag)::type>>(p, stream));
  });
}

}  // namespace

void prune_cuda(const RowFormat& format, const at::Tensor& x, const at::Tensor& weight,
                const at::Tensor& pruned, const at::Tensor& bitmap) {
  const LaunchScope scope(x);
  const at::Tensor rows = with_aligned_rows(x);
  CompressParams p = params_of(format, rows, weight, bitmap);
  p.pruned = pruned.mutable_data_ptr();
  launch("kv_prune", x.scalar_type(), p, scope.stream());
}

void compress_cuda(const at::Tensor& x, const at::Tensor& weight, const Compressed& to) {
  const LaunchScope scope(x);
  const at::Tensor rows = with_aligned_rows(x);
  CompressParams p = params_of(to.format, rows, weight, to.bitmap);
  p.values = reinterpret_cast<uint32_t*>(to.values.mutable_data_ptr<uint8_t>());
  p.scales = to.format.quantised() ? static_cast<uint16_t*>(to.scales.mutable_data_ptr()) : nullptr;
  launch("kv_compress", x.scalar_type(), p, scope.stream());
}

void decompress_cuda(const Compressed& from, const at::Tensor& out) {
  const LaunchScope scope(out);
  const DecompressParams p{.format = from.format,
                           .bitmap = reinterpret_cast<const uint32_t*>(from.bitmap.const_data_ptr<int64_t>()),
                           .values = from.values.const_data_ptr<uint8_t>(),
                           .scales = from.format.quantised()
                                         ? static_cast<const uint16_t*>(from.scales.const_data_ptr())
                                         : nullptr,
                           .out = out.mutable_data_ptr(),
                           .num_rows = out.numel() / from.format.head_dim};
  dispatch_dtype("kv_decompress", out.scalar_type(), FloatTypes{}, [&](auto tag) {
    C10_CUDA_CHECK(launch_decompress<DeviceType<typename decltype(tag)::type>>(p, scope.stream()));
  });
}

}  // namespace htree::compressed_kv
