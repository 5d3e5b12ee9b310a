// Contract of the rotation ops and of their cache: every check and every output.
// docs/semantics/tree_attention.md §1.4, §1.8.
#pragma once

#include "ops/tree_attention/checks.h"

namespace htree::tree_attention {

inline void check_rope_cache(const SymInt& size, int64_t dim, double base, at::ScalarType dtype) {
  constexpr const char* kOp = "rope_cache";
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, kOp, ": dtype must be ",
                   dtype_names({at::kFloat, at::kDouble}), ", got ", dtype_name(dtype));
  TORCH_CHECK_VALUE(holds(size.sym_ge(0)) && holds(size.sym_lt(kIndexLimit)), kOp,
                    ": size must be between 0 and ", kIndexLimit - 1, ", got ", size);
  TORCH_CHECK_VALUE(dim >= 0 && dim < kIndexLimit, kOp, ": dim must be between 0 and ", kIndexLimit - 1,
                    ", got ", dim);
  TORCH_CHECK_VALUE(dim >= 2 && dim % 2 == 0, kOp, ": dim must be even and at least 2, got ", dim);
  TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(base)) && base > 0, kOp,
                    ": base must be positive and finite in float32, got ", base);
}

// x [B, T, H, K], cos and sin [size, K/2], positions int32 or int64 [T] or [B, T]. Returns x's shape and
// dtype, uninitialised. A position outside the cache is for the kernels: an error on the CPU, clamped on
// CUDA.
inline Tensor prepare_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                           [[maybe_unused]] bool inverse) {
  constexpr const char* kOp = "rope";
  check_rank(kOp, "x", x, 4, "[B, T, H, K]");
  check_floating(kOp, "x", x, /*double_on_cuda=*/true);
  const SymInt key_dim = x.sym_size(3);
  TORCH_CHECK_VALUE(holds(key_dim.sym_ge(2)) && same_size(key_dim % 2, 0), kOp,
                    ": K, the last size of x, must be even and at least 2, got ", x.sym_sizes());
  check_cache(kOp, cos, sin, x, /*min_size=*/1);
  check_dtype(kOp, "positions", positions, {at::kInt, at::kLong});
  check_same_device(kOp, "positions", positions, "x", x);
  if (positions.dim() == 1) {
    check_size(kOp, "positions", positions, 0, x.sym_size(1), "T of x");
  } else {
    TORCH_CHECK_VALUE(positions.dim() == 2, kOp, ": positions must be 1-D [T] or 2-D [B, T], got ",
                      positions.dim(), "-D ", positions.sym_sizes());
    check_size(kOp, "positions", positions, 0, x.sym_size(0), "B of x");
    check_size(kOp, "positions", positions, 1, x.sym_size(1), "T of x");
  }
  return new_tensor(x.sym_sizes(), x.scalar_type(), x);
}

}  // namespace htree::tree_attention
