// All checks and the output's allocation of fp8_gemm, shared by the CPU, CUDA and Meta kernels.
#include <ATen/ops/empty.h>

#include "host/check.h"
#include "ops/fp8/gemm/gemm.h"
#include "ops/fp8/gemm/gemm_config.h"

namespace htree::fp8 {
namespace {

// A scale must not vary along K: it is [] or has 1 there.
void check_gemm_scale(const char* op, const char* name, const at::Tensor& scale, const c10::SymInt& rows,
                      const c10::SymInt& columns) {
  check_dtype(op, name, scale, {at::kFloat});
  TORCH_CHECK_VALUE(scale.dim() == 0 || (scale.dim() == 2 && same_size(scale.sym_size(0), rows) &&
                                         same_size(scale.sym_size(1), columns)),
                    op, ": ", name, " must be [] or [", rows, ", ", columns, "], constant along K, got ",
                    scale.sym_sizes());
}

void check_gemm_config(at::OptionalIntArrayRef config) {
  if (!config.has_value()) {
    return;
  }
  const at::IntArrayRef c = *config;
  TORCH_CHECK_VALUE(
      c.size() == 6,
      "fp8_gemm: config must be (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_SIZE_M, num_warps, num_stages), "
      "got ",
      c.size(), " values");
  TORCH_CHECK_NOT_IMPLEMENTED(in_compiled_space({c[0], c[1], c[2], c[3], c[4], c[5]}),
                              "fp8_gemm: no kernel is compiled for (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_SIZE_M, "
                              "num_warps, num_stages) = ",
                              c, "; compiled: ", kCompiledGemmSpace);
}

}  // namespace

at::Tensor prepare_gemm(const GemmArguments& g, at::OptionalIntArrayRef config) {
  const char* op = g.op;
  check_same_device(op, "b", g.b, "a", g.a);
  check_same_device(op, "a_scale", g.a_scale, "a", g.a);
  check_same_device(op, "b_scale", g.b_scale, "a", g.a);
  check_dtype(op, "a", g.a, {at::kFloat8_e4m3fn});
  check_dtype(op, "b", g.b, {at::kFloat8_e4m3fn});
  TORCH_CHECK_TYPE(
      g.output_dtype == at::kHalf || g.output_dtype == at::kBFloat16 || g.output_dtype == at::kFloat, op,
      ": output_dtype must be ", dtype_names({at::kFloat, at::kHalf, at::kBFloat16}), ", got ",
      dtype_name(g.output_dtype));
  check_rank(op, "a", g.a, 2, "[M, K]");
  check_rank(op, "b", g.b, 2, "[K, N]");
  check_size(op, "b", g.b, 0, g.a.sym_size(1), "K of a");
  check_gemm_scale(op, "a_scale", g.a_scale, g.a.sym_size(0), 1);
  check_gemm_scale(op, "b_scale", g.b_scale, 1, g.b.sym_size(1));
  check_gemm_config(config);
  return at::empty_symint({g.a.sym_size(0), g.b.sym_size(1)}, g.a.options().dtype(g.output_dtype));
}

}  // namespace htree::fp8
