// All checks, the output's allocation and the layout of rows, shared by the CPU, CUDA and Meta kernels.

#include <vector>

#include "host/check.h"
#include "host/outputs.h"
#include "host/overlap.h"
#include "ops/hadamard/hadamard.h"
#include "ops/hadamard/hadamard_params.h"

namespace htree::hadamard {
namespace {

constexpr const char* kOp = "hadamard_transform";
constexpr const char* kGroupedOp = "grouped_hadamard";
constexpr int64_t kMaxLength = int64_t{1} << kMaxLog2Length;

// -1 where n is not a power of two that the family transforms.
int log2_of_length(int64_t n) {
  if (n < 1 || n > kMaxLength || (n & (n - 1)) != 0) {
    return -1;
  }
  int log2 = 0;
  while (int64_t{1} << log2 < n) {
    ++log2;
  }
  return log2;
}

// The kernel depends on the length, so a symbolic length becomes a constant of the trace.
int64_t length_of(const at::Tensor& x, int64_t dim) {
  return x.sym_size(dim).guard_int(__FILE__, __LINE__);
}

// The factor is applied in fp32 (in fp64 for fp64) and must be finite there.
void check_scale(const char* op, const at::Tensor& x, std::optional<double> scale) {
  if (scale.has_value()) {
    TORCH_CHECK_VALUE(std::isfinite(x.scalar_type() == at::kDouble ? *scale : static_cast<float>(*scale)), op,
                      ": scale must be finite in ", x.scalar_type() == at::kDouble ? "float64" : "float32",
                      ", got ", *scale);
  }
}

void check_transform(const char* op, const at::Tensor& x, std::optional<double> scale) {
  check_floating(op, "x", x, /*double_on_cuda=*/true);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least one dim, got 0-D []");
  TORCH_CHECK_VALUE(log2_of_length(length_of(x, -1)) >= 0, op,
                    ": the last dim of x must be a power of two between 1 and ", kMaxLength, ", got ",
                    x.sym_sizes());
  check_scale(op, x, scale);
}

Problem make_problem(int64_t length, int64_t segment, std::optional<double> scale) {
  return {.log2_length = log2_of_length(length),
          .log2_segment = log2_of_length(segment),
          .scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(length)))};
}

struct Dim {
  int64_t size;
  int64_t x_stride;
  int64_t y_stride;
};

// Drops dims of size 1 and joins neighbours that are one dim both in x and in y. Empty where more
// than three are left.
std::optional<Rows> make_rows(const std::vector<Dim>& dims, int64_t x_segment_stride,
                              int64_t y_segment_stride) {
  std::vector<Dim> joined;
  for (const Dim& dim : dims) {
    if (dim.size == 1) {
      continue;
    }
    if (!joined.empty() && joined.back().x_stride == dim.x_stride * dim.size &&
        joined.back().y_stride == dim.y_stride * dim.size) {
      joined.back() = {joined.back().size * dim.size, dim.x_stride, dim.y_stride};
    } else {
      joined.push_back(dim);
    }
  }
  if (joined.size() > 3) {
    return std::nullopt;
  }
  Rows rows{{1, 1, 1}, {0, 0, 0}, {0, 0, 0}, x_segment_stride, y_segment_stride};
  const size_t unused = 3 - joined.size();
  for (size_t i = 0; i < joined.size(); ++i) {
    rows.sizes[unused + i] = joined[i].size;
    rows.x_strides[unused + i] = joined[i].x_stride;
    rows.y_strides[unused + i] = joined[i].y_stride;
  }
  return rows;
}

bool has_unit_stride(const at::Tensor& t) {
  return t.size(-1) == 1 || t.stride(-1) == 1;
}

}  // namespace

Problem problem_of(const at::Tensor& x, std::optional<double> scale) {
  return make_problem(x.size(-1), x.size(-1), scale);
}

Problem grouped_problem_of(const at::Tensor& x, int64_t group, std::optional<double> scale) {
  return make_problem(x.size(-1) * group, x.size(-1), scale);
}

std::optional<Rows> rows_of(const Problem&, const at::Tensor& x, const at::Tensor& y) {
  if (!has_unit_stride(x) || !has_unit_stride(y)) {
    return std::nullopt;
  }
  std::vector<Dim> dims;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
    dims.push_back({x.size(dim), x.stride(dim), y.stride(dim)});
  }
  return make_rows(dims, /*x_segment_stride=*/0, /*y_segment_stride=*/0);
}

std::optional<Rows> grouped_rows_of(const Problem& problem, const at::Tensor& x, const at::Tensor& y) {
  if (!has_unit_stride(x) || !has_unit_stride(y)) {
    return std::nullopt;
  }
  const int64_t group = int64_t{1} << (problem.log2_length - problem.log2_segment);
  return make_rows({{x.size(0), x.stride(0), y.stride(0)},
                    {x.size(1) / group, x.stride(1) * group, y.stride(1) * group},
                    {x.size(2), x.stride(2), y.stride(2)}},
                   x.stride(1), y.stride(1));
}

at::Tensor prepare(const at::Tensor& x, std::optional<double> scale) {
  check_transform(kOp, x, scale);
  return new_tensor_like(x);
}

void prepare_inplace(const at::Tensor& x, std::optional<double> scale) {
  check_transform("hadamard_transform_", x, scale);
  check_writable("hadamard_transform_", "x", x);
}

at::Tensor prepare_grouped(const at::Tensor& x, int64_t group, std::optional<double> scale) {
  check_floating(kGroupedOp, "x", x, /*double_on_cuda=*/true);
  check_rank(kGroupedOp, "x", x, 4, "[B, H, S, D]");
  check_at_least(kGroupedOp, "group", group, 1);
  TORCH_CHECK_VALUE(holds((x.sym_size(1) % group).sym_eq(0)), kGroupedOp,
                    ": H of x must be a multiple of group = ", group, ", got ", x.sym_size(1), " in ",
                    x.sym_sizes());
  const int64_t width = length_of(x, -1);
  // The bounds on the factors keep the product from overflowing.
  TORCH_CHECK_VALUE(group <= kMaxLength && width <= kMaxLength && log2_of_length(group * width) >= 0,
                    kGroupedOp, ": D of x times group = ", group, " must be a power of two between 1 and ",
                    kMaxLength, ", got D = ", width, " in ", x.sym_sizes());
  check_scale(kGroupedOp, x, scale);
  return new_tensor_like(x);
}

}  // namespace htree::hadamard
