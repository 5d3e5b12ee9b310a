// CPU kernels of the compressed_kv family, parallel over rows. Arithmetic is in float.
#include <ATen/Parallel.h>
#include <ATen/ops/lt.h>

#include "host/dispatch.h"
#include "ops/compressed_kv/compressed_kv.h"
#include "ops/compressed_kv/cpu_kernels.h"

namespace htree::compressed_kv {
namespace {

constexpr int64_t kRowGrain = 64;

void check_weight_sign(const char* op, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(!weight.defined() || !weight.lt(0).any().item<bool>(), op,
                    ": weight must not be negative, got ", weight.min().item<double>());
}

// Calls row(index, the row of x, its weights) in parallel over the rows of x [B, H_kv, S, D].
template <typename Storage, typename Row>
void for_rows(const at::Tensor& x, const at::Tensor& weight, Row&& row) {
  const int64_t num_heads = x.size(1);
  const int64_t length = x.size(2);
  const int64_t head_dim = x.size(3);
  const auto* data = static_cast<const Storage*>(x.const_data_ptr());
  const float* weights = weight.defined() ? weight.const_data_ptr<float>() : nullptr;
  const int64_t strides[] = {x.stride(0), x.stride(1), x.stride(2)};
  at::parallel_for(0, x.size(0) * num_heads * length, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / length;
      const int64_t offset =
          head / num_heads * strides[0] + head % num_heads * strides[1] + i % length * strides[2];
      row(i, data + offset, weights == nullptr ? nullptr : weights + head * head_dim);
    }
  });
}

}  // namespace

void prune_cpu(const RowFormat& format, const at::Tensor& x, const at::Tensor& weight,
               const at::Tensor& pruned, const at::Tensor& bitmap) {
  check_weight_sign("kv_prune", weight);
  dispatch_dtype("kv_prune", x.scalar_type(), FloatTypes{}, [&](auto tag) {
    using Storage = htree::Storage<typename decltype(tag)::type>;
    const auto& kernels = loops_of<Storage>(row_kernels());
    auto* out = static_cast<Storage*>(pruned.mutable_data_ptr());
    auto* words = reinterpret_cast<uint64_t*>(bitmap.mutable_data_ptr<int64_t>());
    for_rows<Storage>(x, weight, [&](int64_t i, const Storage* row, const float* w) {
      kernels.prune(row, w, format, out + i * format.head_dim, words + i * format.words());
    });
  });
}

void compress_cpu(const at::Tensor& x, const at::Tensor& weight, const Compressed& to) {
  check_weight_sign("kv_compress", weight);
  const RowFormat& format = to.format;
  dispatch_dtype("kv_compress", x.scalar_type(), FloatTypes{}, [&](auto tag) {
    using Storage = htree::Storage<typename decltype(tag)::type>;
    const auto& kernels = loops_of<Storage>(row_kernels());
    auto* words = reinterpret_cast<uint64_t*>(to.bitmap.mutable_data_ptr<int64_t>());
    auto* values = to.values.mutable_data_ptr<uint8_t>();
    auto* scales = static_cast<uint16_t*>(to.scales.mutable_data_ptr());
    for_rows<Storage>(x, weight, [&](int64_t i, const Storage* row, const float* w) {
      kernels.compress(row, w, format, words + i * format.words(), values + i * format.row_bytes(),
                       format.quantised() ? scales + i : nullptr);
    });
  });
}

void decompress_cpu(const Compressed& from, const at::Tensor& out) {
  const RowFormat& format = from.format;
  const CompressedRows rows(from);
  dispatch_dtype("kv_decompress", out.scalar_type(), FloatTypes{}, [&](auto tag) {
    using Storage = htree::Storage<typename decltype(tag)::type>;
    const auto& kernels = loops_of<Storage>(row_kernels());
    auto* data = static_cast<Storage*>(out.mutable_data_ptr());
    at::parallel_for(0, out.numel() / format.head_dim, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kernels.decompress(rows.bitmap(i), rows.values(i), rows.scale(i), format, data + i * format.head_dim);
      }
    });
  });
}

}  // namespace htree::compressed_kv
