// All checks, the outputs' allocation and the layout of scales, shared by the CPU, CUDA and Meta kernels.
#include <ATen/WrapDimUtils.h>

#include <algorithm>

#include "host/check.h"
#include "host/outputs.h"
#include "ops/fp8/quantize/quantize.h"

namespace htree::fp8 {
namespace {

constexpr const char* kScaleOp = "fp8_compute_scale";
constexpr const char* kQuantizeOp = "fp8_quantize";
constexpr const char* kDequantizeOp = "fp8_dequantize";
constexpr const char* kFakeOp = "fp8_fake_quant";
constexpr const char* kFakeBackwardOp = "fp8_fake_quant_backward";

enum class Granularity { kTensor, kChannel, kBlock };

Granularity parse(const char* op, std::string_view name) {
  TORCH_CHECK_VALUE(name == "tensor" || name == "channel" || name == "block", op,
                    ": granularity must be 'tensor', 'channel' or 'block', got '", name, "'");
  return name == "tensor"    ? Granularity::kTensor
         : name == "channel" ? Granularity::kChannel
                             : Granularity::kBlock;
}

// Whether there is one scale. A scalar has one channel.
bool is_one_scale(const at::Tensor& x, Granularity granularity) {
  return granularity == Granularity::kTensor || x.dim() == 0;
}

void check_input(const char* op, const at::Tensor& x, const Grouping& grouping) {
  check_dtype(op, "x", x, {at::kFloat, at::kHalf, at::kBFloat16});
  const Granularity granularity = parse(op, grouping.granularity);
  if (granularity != Granularity::kTensor) {
    const int64_t rank = std::max<int64_t>(x.dim(), 1);  // a scalar has one channel
    TORCH_CHECK_INDEX(grouping.dim >= -rank && grouping.dim < rank, op, ": dim must be between ", -rank,
                      " and ", rank - 1, ", got ", grouping.dim);
  }
  check_at_least(op, "block", grouping.block, 1);
}

// ceil(n / block). The block is cut down to a number that no size exceeds, so that the sum cannot overflow.
c10::SymInt num_blocks(const c10::SymInt& n, int64_t block) {
  block = std::min(block, int64_t{1} << 62);
  return (n + (block - 1)) / block;
}

c10::SymDimVector scale_sizes(const at::Tensor& x, const Grouping& grouping) {
  const Granularity granularity = parse(kScaleOp, grouping.granularity);
  if (is_one_scale(x, granularity)) {
    return {};
  }
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  c10::SymInt& size = sizes[at::maybe_wrap_dim(grouping.dim, x.dim())];
  // With n = 0 there is no block, but one channel.
  size = granularity == Granularity::kChannel ? c10::SymInt(1) : num_blocks(size, grouping.block);
  return sizes;
}

void check_scale(const char* op, const at::Tensor& x, const at::Tensor& scale, const Grouping& grouping) {
  check_same_device(op, "scale", scale, "x", x);
  check_dtype(op, "scale", scale, {at::kFloat});
  check_shape(op, "scale", scale, scale_sizes(x, grouping), "what granularity, dim and block imply");
}

bool is_equal(const c10::SymInt& a, const c10::SymInt& b) {
  return a.sym_eq(b).guard_bool(__FILE__, __LINE__);
}

// The leading dims as one: its stride, or empty where no single stride fits.
std::optional<int64_t> row_stride_of(const at::Tensor& x) {
  if (x.size(-1) != 1 && x.stride(-1) != 1) {
    return std::nullopt;
  }
  std::optional<int64_t> stride;  // stride of the innermost leading dim with more than one index
  int64_t reach = 0;              // the stride that the next dim must have
  for (int64_t dim = x.dim() - 2; dim >= 0; --dim) {
    if (x.size(dim) == 1) {
      continue;
    }
    if (stride.has_value() && x.stride(dim) != reach) {
      return std::nullopt;
    }
    stride = stride.value_or(x.stride(dim));
    reach = x.stride(dim) * x.size(dim);
  }
  return stride.value_or(x.size(-1));
}

}  // namespace

MatrixInput matrix_of(const at::Tensor& x, const Grouping& grouping) {
  const Granularity granularity = parse(kScaleOp, grouping.granularity);
  if (is_one_scale(x, granularity)) {
    const int64_t n = x.numel();
    return {x.contiguous(), {1, n, ScaleLayout::kTensor, n, 1}, n};
  }
  const int64_t dim = at::maybe_wrap_dim(grouping.dim, x.dim());
  const int64_t length = x.size(dim);
  const int64_t group =
      granularity == Granularity::kChannel ? length : std::min<int64_t>(grouping.block, length);
  int64_t inner = 1;
  for (int64_t i = dim + 1; i < x.dim(); ++i) {
    inner *= x.size(i);
  }
  if (inner > 1) {
    return {x.contiguous(), {x.numel() / inner, inner, ScaleLayout::kColumns, group, length}, inner};
  }
  const MatrixShape shape{x.numel() / length, length, ScaleLayout::kRowGroups, group, 1};
  if (dim == x.dim() - 1) {
    // A stride of 0, or one below the length of a row, is fine: x is only read.
    if (const auto stride = row_stride_of(x)) {
      return {x, shape, *stride};
    }
  }
  return {x.contiguous(), shape, length};
}

at::Tensor prepare_scale(const at::Tensor& x, const Grouping& grouping) {
  check_input(kScaleOp, x, grouping);
  return new_tensor(scale_sizes(x, grouping), at::kFloat, x);
}

Quantized prepare_quantize(const at::Tensor& x, const OptionalTensor& scale, const Grouping& grouping) {
  check_input(kQuantizeOp, x, grouping);
  if (scale.has_value()) {
    check_scale(kQuantizeOp, x, *scale, grouping);
  }
  return {new_tensor(x.sym_sizes(), at::kFloat8_e4m3fn, x),
          new_tensor(scale_sizes(x, grouping), at::kFloat, x), new_tensor({}, at::kInt, x)};
}

at::Tensor prepare_fake(const at::Tensor& x, const OptionalTensor& scale, const Grouping& grouping) {
  check_input(kFakeOp, x, grouping);
  if (scale.has_value()) {
    check_scale(kFakeOp, x, *scale, grouping);
  }
  return new_tensor_like(x);
}

at::Tensor prepare_fake_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scale,
                                 const Grouping& grouping) {
  check_input(kFakeBackwardOp, x, grouping);
  check_scale(kFakeBackwardOp, x, scale, grouping);
  check_same_device(kFakeBackwardOp, "dy", dy, "x", x);
  check_same_dtype(kFakeBackwardOp, "dy", dy, "x", x);
  check_shape(kFakeBackwardOp, "dy", dy, x.sym_sizes(), "the shape of x");
  return new_tensor_like(x);
}

Grouping grouping_of(const at::Tensor& codes, const at::Tensor& scale, int64_t block) {
  if (scale.dim() == 0) {
    return {"tensor", 0, block};
  }
  TORCH_CHECK_VALUE(scale.dim() == codes.dim(), kDequantizeOp, ": scale must be [] or have the rank of q ",
                    codes.sym_sizes(), ", got ", scale.sym_sizes());
  int64_t differing = -1;
  int64_t of_size_one = -1;
  int64_t num_differing = 0;
  for (int64_t dim = 0; dim < codes.dim(); ++dim) {
    if (!is_equal(codes.sym_size(dim), scale.sym_size(dim))) {
      differing = dim;
      ++num_differing;
    } else if (is_equal(codes.sym_size(dim), 1)) {
      of_size_one = dim;
    }
  }
  if (num_differing == 0 && of_size_one >= 0) {
    return {"channel", of_size_one, block};
  }
  if (num_differing == 0 && (block == 1 || is_equal(codes.sym_numel(), 0))) {
    return {"block", -1, 1};
  }
  const bool single = num_differing == 1;
  if (single && is_equal(scale.sym_size(differing), 1)) {
    return {"channel", differing, block};
  }
  TORCH_CHECK_VALUE(
      single && is_equal(scale.sym_size(differing), num_blocks(codes.sym_size(differing), block)),
      kDequantizeOp, ": scale must be [] or have the shape of q ", codes.sym_sizes(),
      " with one dim of n reduced to 1 or to ceil(n / block) for block = ", block, ", got ",
      scale.sym_sizes());
  return {"block", differing, block};
}

at::Tensor prepare_dequantize(const at::Tensor& codes, const at::Tensor& scale, at::ScalarType dtype,
                              int64_t block) {
  check_dtype(kDequantizeOp, "q", codes, {at::kFloat8_e4m3fn});
  check_dtype(kDequantizeOp, "scale", scale, {at::kFloat});
  check_same_device(kDequantizeOp, "scale", scale, "q", codes);
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, kDequantizeOp,
                   ": dtype must be ", dtype_names({at::kFloat, at::kHalf, at::kBFloat16}), ", got ",
                   dtype_name(dtype));
  check_at_least(kDequantizeOp, "block", block, 1);
  grouping_of(codes, scale, block);
  return new_tensor(codes.sym_sizes(), dtype, codes);
}

}  // namespace htree::fp8
