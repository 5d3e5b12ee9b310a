// All checks and the outputs' allocation, shared by the CPU, CUDA and Meta kernels.
#include <algorithm>
#include <limits>

#include "host/check.h"
#include "host/outputs.h"
#include "ops/rmsnorm_rope/rmsnorm_rope.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_config.h"

namespace htree::rmsnorm_rope {
namespace {

bool equal(const c10::SymInt& a, const c10::SymInt& b) {
  return a.sym_eq(b).guard_bool(__FILE__, __LINE__);
}

// Whether width = size * count, without forming a product that may overflow.
bool is_product(const c10::SymInt& width, const c10::SymInt& size, int64_t count) {
  return equal(width % count, 0) && equal(width / count, size);
}

// The width of the heads that are rotated. A table row holds a whole head, or half of one where something
// else (num_heads, or the last dim of x) says how wide a head is.
c10::SymInt head_dim_of(const Arguments& a) {
  const c10::SymInt columns = a.cos.sym_size(-1);
  const c10::SymInt width = a.x.sym_size(-1);
  if (a.norm == Norm::kHead) {
    return width;
  }
  const bool half = a.num_heads.has_value() && is_product(width, columns * 2, *a.num_heads);
  return half ? columns * 2 : columns;
}

void check_tables(const char* op, const Arguments& a, const c10::SymInt& head_dim) {
  const bool batched = a.cos.dim() > 2;
  if (batched) {
    const c10::SymInt tables = a.cos.sym_size(0);
    const c10::SymInt batch = a.x.sym_size(0);
    TORCH_CHECK_VALUE(equal(tables, 1) || same_size(tables, batch), op, ": size 0 of cos must be 1 or ",
                      batch, " (B of x), got ", tables, " in ", a.cos.sym_sizes());
  }
  if (a.cos.dim() == 4) {
    check_size(op, "cos", a.cos, 2, 1, "one table for all heads");
  }
  check_shape(op, "sin", a.sin, a.cos.sym_sizes(), "the shape of cos");
  const c10::SymInt positions = a.cos.sym_size(batched ? 1 : 0);
  TORCH_CHECK_VALUE(holds(positions.sym_ge(a.x.sym_size(1))), op,
                    ": cos and sin must have at least S = ", a.x.sym_size(1), " positions, got ", positions,
                    " in ", a.cos.sym_sizes());
  const c10::SymInt columns = a.cos.sym_size(-1);
  TORCH_CHECK_VALUE(equal(columns, head_dim) || equal(columns * 2, head_dim), op,
                    ": the last dim of cos and sin must be hd = ", head_dim, " or hd / 2, got ",
                    a.cos.sym_sizes());
  TORCH_CHECK_VALUE(equal(head_dim % 2, 0), op, ": cos and sin must have an even head dim, got ", head_dim,
                    " in ", a.cos.sym_sizes());
}

void check(const char* op, const Arguments& a) {
  const std::initializer_list<std::pair<const char*, const at::Tensor&>> others = {
      {"weight", a.weight}, {"cos", a.cos}, {"sin", a.sin}};
  for (const auto& [name, tensor] : others) {
    check_same_device(op, name, tensor, "x", a.x);
  }
  check_floating(op, "x", a.x, /*double_on_cuda=*/true);
  for (const auto& [name, tensor] : others) {
    check_floating(op, name, tensor, /*double_on_cuda=*/true);
  }
  const bool hidden = a.norm == Norm::kHidden;
  check_rank(op, "x", a.x, hidden ? 3 : 4, hidden ? "[B, S, Hd]" : "[B, S, H, hd]");
  check_rank(op, "weight", a.weight, 1, hidden ? "[Hd]" : "[hd]");
  TORCH_CHECK_VALUE(a.cos.dim() >= 2 && a.cos.dim() <= 4, op,
                    ": cos must be 2-D [S, hd], 3-D [B, S, hd] or 4-D [B, S, 1, hd], got ", a.cos.dim(),
                    "-D ", a.cos.sym_sizes());
  check_size(op, "weight", a.weight, 0, a.x.sym_size(-1), hidden ? "Hd of x" : "hd of x");
  if (a.num_heads.has_value()) {
    check_at_least(op, "num_heads", *a.num_heads, 1);
  }
  const c10::SymInt head_dim = head_dim_of(a);
  const c10::SymInt width = a.x.sym_size(-1);
  if (a.norm == Norm::kHidden && a.num_heads.has_value()) {
    TORCH_CHECK_VALUE(is_product(width, head_dim, *a.num_heads), op,
                      ": cos and sin must have a head dim of Hd / num_heads = ", width, " / ", *a.num_heads,
                      " or half of it, got ", head_dim, " in ", a.cos.sym_sizes());
  } else if (!equal(width, 0)) {
    TORCH_CHECK_VALUE(!equal(head_dim, 0) && equal(width % head_dim, 0), op,
                      ": cos and sin must have a head dim that divides Hd of x = ", width, ", got ", head_dim,
                      " in ", a.cos.sym_sizes());
  }
  check_tables(op, a, head_dim);
  TORCH_CHECK_VALUE(std::isfinite(a.eps) && a.eps >= 0, op, ": eps must be finite and not negative, got ",
                    a.eps);
}

void check_config(const char* op, at::OptionalIntArrayRef config) {
  if (!config.has_value()) {
    return;
  }
  TORCH_CHECK_VALUE(config->size() == 3, op, ": config must be (BLOCK_SIZE, num_warps, num_stages), got ",
                    config->size(), " values");
  TORCH_CHECK_NOT_IMPLEMENTED(in_compiled_space({(*config)[0], (*config)[1], (*config)[2]}), op,
                              ": no kernel is compiled for BLOCK_SIZE = ", (*config)[0],
                              ", num_warps = ", (*config)[1], ", num_stages = ", (*config)[2],
                              "; compiled: BLOCK_SIZE 64, 128, 256 with num_warps = BLOCK_SIZE / 32 and "
                              "num_stages 1, 2, 3");
}

at::Tensor with_unit_stride(const at::Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous();
}

// eps, raised so that it stays positive in fp32, where other dtypes compute too: a row of
// zeros then gives zeros.
double in_range(double eps, at::ScalarType dtype) {
  constexpr double kLeast = std::numeric_limits<float>::min();
  return dtype == at::kDouble || eps == 0 ? eps : std::max(eps, kLeast);
}

at::Tensor table_rows(const at::Tensor& table) {
  return with_unit_stride(table.dim() == 4 ? table.select(2, 0) : table);
}

}  // namespace

at::Tensor prepare(const Arguments& arguments, at::OptionalIntArrayRef config) {
  check(op_name(arguments.norm), arguments);
  check_config(op_name(arguments.norm), config);
  return new_tensor_like(arguments.x);
}

Gradients prepare_backward(const Arguments& arguments, const at::Tensor& dy, std::array<bool, 2> wanted) {
  const char* op = backward_name(arguments.norm);
  check(op, arguments);
  check_same_device(op, "dy", dy, "x", arguments.x);
  check_same_dtype(op, "dy", dy, "x", arguments.x);
  check_shape(op, "dy", dy, arguments.x.sym_sizes(), "the shape of x");
  return {new_gradient(wanted[0], arguments.x), new_gradient(wanted[1], arguments.weight)};
}

at::Tensor as_rows(Norm norm, const at::Tensor& x) {
  return with_unit_stride(norm == Norm::kHidden ? x.unsqueeze(2) : x);
}

Operands operands_of(const Arguments& arguments) {
  Operands o{{},
             as_rows(arguments.norm, arguments.x),
             with_unit_stride(arguments.weight),
             table_rows(arguments.cos),
             table_rows(arguments.sin)};
  const int64_t head_dim = head_dim_of(arguments).expect_int();
  o.problem = {
      .batch = o.x.size(0),
      .positions = o.x.size(1),
      .heads = o.x.size(2),
      .width = o.x.size(3),
      .head_dim = head_dim,
      .half_tables = o.cos.size(-1) != head_dim,
      .batched_tables = table_batch_stride(o.cos) != 0 || table_batch_stride(o.sin) != 0,
      .eps = in_range(arguments.eps, arguments.x.scalar_type()),
  };
  return o;
}

}  // namespace htree::rmsnorm_rope
