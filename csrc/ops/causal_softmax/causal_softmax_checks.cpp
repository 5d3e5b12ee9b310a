// All checks and output allocation of the family, shared by the CPU, CUDA and Meta kernels.

#include "host/check.h"
#include "host/outputs.h"
#include "host/overlap.h"
#include "ops/causal_softmax/causal_softmax.h"

namespace htree::causal_softmax {
namespace {

void check_scores(const char* op, const char* name, const at::Tensor& x) {
  check_floating(op, name, x, /*double_on_cuda=*/true);
  TORCH_CHECK_VALUE(x.dim() >= 2, op, ": ", name, " must have at least 2 dims [..., h, w], got ", x.dim(),
                    "-D ", x.sym_sizes());
  TORCH_CHECK_VALUE(holds(x.sym_size(-1).sym_ge(x.sym_size(-2))), op, ": ", name,
                    " must have at least as many columns (keys) as rows (queries), got ", x.sym_sizes());
}

void check_block_size(const char* op, int64_t block_size) {
  TORCH_CHECK_NOT_IMPLEMENTED(block_size == 0 || block_size == 512 || block_size == 1024, op,
                              ": block_size must be 0 (automatic), 512 or 1024, got ", block_size);
}

}  // namespace

std::optional<int64_t> batch_stride(const at::Tensor& x) {
  int64_t stride = 0;
  int64_t count = 1;
  for (int64_t dim = x.dim() - 3; dim >= 0; --dim) {
    if (x.size(dim) == 1) {
      continue;
    }
    if (count == 1) {
      stride = x.stride(dim);
    } else if (x.stride(dim) != stride * count) {
      return std::nullopt;
    }
    count *= x.size(dim);
  }
  return stride;
}

at::Tensor with_batch_stride(const at::Tensor& x) {
  return batch_stride(x).has_value() ? x : x.contiguous();
}

Problem problem_of(const at::Tensor& x, int64_t block_size) {
  return {
      .batch = c10::multiply_integers(x.sizes().slice(0, x.dim() - 2)),
      .rows = x.size(-2),
      .cols = x.size(-1),
      .block_size = static_cast<int>(block_size),
  };
}

Strides strides_of(const at::Tensor& x) {
  return {.batch = batch_stride(x).value(), .row = x.stride(-2), .col = x.stride(-1)};
}

at::Tensor prepare(const at::Tensor& x, int64_t block_size) {
  check_scores("causal_softmax", "x", x);
  check_block_size("causal_softmax", block_size);
  return new_tensor_like(x);
}

void prepare_out(const at::Tensor& x, int64_t block_size, const at::Tensor& out) {
  constexpr const char* kOp = "causal_softmax.out";
  check_scores(kOp, "x", x);
  check_block_size(kOp, block_size);
  check_same_dtype(kOp, "out", out, "x", x);
  check_same_device(kOp, "out", out, "x", x);
  check_shape(kOp, "out", out, x.sym_sizes(), "the shape of x");
  check_writable(kOp, "out", out);
  if (!is_same_view(x, out)) {
    check_disjoint(kOp, "out", out, "x, unless it is the same view", x);
  }
}

void prepare_inplace(const at::Tensor& x, int64_t block_size) {
  check_scores("causal_softmax_", "x", x);
  check_block_size("causal_softmax_", block_size);
  check_writable("causal_softmax_", "x", x);
}

at::Tensor prepare_backward(const at::Tensor& dy, const at::Tensor& y) {
  constexpr const char* kOp = "causal_softmax_backward";
  check_scores(kOp, "y", y);
  check_same_dtype(kOp, "dy", dy, "y", y);
  check_same_device(kOp, "dy", dy, "y", y);
  check_shape(kOp, "dy", dy, y.sym_sizes(), "the shape of y");
  return new_tensor_like(y);
}

}  // namespace htree::causal_softmax
