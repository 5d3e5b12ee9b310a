// Contract of tree_build and its backward: every check and every output.
// docs/semantics/tree_attention.md §1.2, §1.8.
#pragma once

#include "ops/tree_attention/checks.h"

namespace htree::tree_attention {

// k [B, N, H, K], v [B, N, H, V]; double has CUDA kernels because gradcheck of the whole op needs it.
inline void check_level(const char* op, const char* k_name, const Tensor& k, const char* v_name,
                        const Tensor& v, int64_t compression_rate) {
  check_rate(op, compression_rate);
  check_rank(op, k_name, k, 4, "[B, N, H, K]");
  check_floating(op, k_name, k, /*double_on_cuda=*/true);
  check_values(op, k_name, k, v_name, v);
  TORCH_CHECK_VALUE(holds(k.sym_size(3).sym_ge(1)), op, ": K, the last size of ", k_name,
                    ", must be at least 1, got ", k.sym_sizes());
}

// Returns (pk [B, ceil(N/r), H, K], pv [B, ceil(N/r), H, V]) in the dtype of k, uninitialised.
inline std::tuple<Tensor, Tensor> prepare_tree_build(const Tensor& k, const Tensor& v,
                                                     int64_t compression_rate) {
  check_level("tree_build", "k", k, "v", v, compression_rate);
  const SymInt parents = (k.sym_size(1) + (compression_rate - 1)) / compression_rate;
  return {new_tensor({k.sym_size(0), parents, k.sym_size(2), k.sym_size(3)}, k.scalar_type(), k),
          new_tensor({v.sym_size(0), parents, v.sym_size(2), v.sym_size(3)}, v.scalar_type(), v)};
}

// Returns (dk [B, n_child, H, K], dv [B, n_child, H, V]), uninitialised.
inline std::tuple<Tensor, Tensor> prepare_tree_build_backward(const Tensor& dpk, const Tensor& dpv,
                                                              const SymInt& n_child,
                                                              int64_t compression_rate) {
  constexpr const char* kOp = "tree_build_backward";
  check_level(kOp, "dpk", dpk, "dpv", dpv, compression_rate);
  TORCH_CHECK_VALUE(holds(n_child.sym_ge(0)) &&
                        same_size((n_child + (compression_rate - 1)) / compression_rate, dpk.sym_size(1)),
                    kOp, ": n_child must have ceil(n_child / compression_rate) = ", dpk.sym_size(1),
                    " parents, the length of dpk, ", "got n_child = ", n_child,
                    " and compression_rate = ", compression_rate);
  return {new_tensor({dpk.sym_size(0), n_child, dpk.sym_size(2), dpk.sym_size(3)}, dpk.scalar_type(), dpk),
          new_tensor({dpv.sym_size(0), n_child, dpv.sym_size(2), dpv.sym_size(3)}, dpv.scalar_type(), dpv)};
}

}  // namespace htree::tree_attention
