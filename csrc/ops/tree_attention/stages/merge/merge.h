// Contract of the state ops: every check and every output. docs/semantics/tree_attention.md §1.7, §1.8.
#pragma once

#include <array>
#include <utility>

#include "host/overlap.h"
#include "ops/tree_attention/checks.h"

namespace htree::tree_attention {

inline void prepare_merge_to_global(const Tensor& gmax, const Tensor& gsum, const Tensor& gout,
                                    const Tensor& lmax, const Tensor& lsum, const Tensor& lout) {
  constexpr const char* kOp = "merge_to_global_";
  check_state(kOp, {"gmax", "gsum", "gout"}, gmax, gsum, gout);
  check_state(kOp, {"lmax", "lsum", "lout"}, lmax, lsum, lout);
  check_same_dtype(kOp, "lout", lout, "gout", gout);
  check_same_device(kOp, "lout", lout, "gout", gout);
  check_shape(kOp, "lout", lout, gout.sym_sizes(), "the shape of gout");
  // What is written shares memory with nothing else.
  using Named = std::pair<const char*, const Tensor&>;
  const std::array<Named, 3> written = {Named{"gmax", gmax}, {"gsum", gsum}, {"gout", gout}};
  for (size_t i = 0; i < written.size(); ++i) {
    const auto& [name, tensor] = written[i];
    check_writable(kOp, name, tensor);
    for (size_t j = i + 1; j < written.size(); ++j) {
      check_disjoint(kOp, name, tensor, written[j].first, written[j].second);
    }
    for (const auto& [read_name, read] : {Named{"lmax", lmax}, {"lsum", lsum}, {"lout", lout}}) {
      check_disjoint(kOp, name, tensor, read_name, read);
    }
  }
}

// layer_v [B, N, H_kv, V], topk_indices int32 and topk_scores [B, T_q, H, k], state [B, T_q, H(, V)].
// Returns selected_indices int32 [B, T_q, H, k], uninitialised.
inline Tensor prepare_subtract_topk(const Tensor& layer_v, const Tensor& topk_indices,
                                    const Tensor& topk_scores, const Tensor& lmax, const Tensor& lsum,
                                    const Tensor& lout) {
  constexpr const char* kOp = "subtract_topk";
  check_rank(kOp, "layer_v", layer_v, 4, "[B, N, H_kv, V]");
  check_floating(kOp, "layer_v", layer_v, /*double_on_cuda=*/false);
  check_state(kOp, {"lmax", "lsum", "lout"}, lmax, lsum, lout);
  check_dtype(kOp, "lout", lout, {state_dtype(layer_v)});
  check_same_device(kOp, "lout", lout, "layer_v", layer_v);
  check_size(kOp, "layer_v", layer_v, 0, lout.sym_size(0), "B of lout");
  check_size(kOp, "layer_v", layer_v, 3, lout.sym_size(3), "V of lout");
  const SymInt heads = lout.sym_size(2);
  const SymInt kv_heads = layer_v.sym_size(2);
  TORCH_CHECK_VALUE(holds(kv_heads.sym_ge(1)) && holds(heads.sym_ge(1)) && same_size(heads % kv_heads, 0),
                    kOp, ": H of lout must be a positive multiple of H_kv of layer_v, got H = ", heads,
                    " and H_kv = ", kv_heads, " in ", lout.sym_sizes(), " and ", layer_v.sym_sizes());
  check_rank(kOp, "topk_indices", topk_indices, 4, "[B, T_q, H, k]");
  check_indices(kOp, "topk_indices", topk_indices,
                {lout.sym_size(0), lout.sym_size(1), heads, topk_indices.sym_size(3)},
                "[B, T_q, H] of lout, then k", layer_v);
  check_same_dtype(kOp, "topk_scores", topk_scores, "lout", lout);
  check_same_device(kOp, "topk_scores", topk_scores, "lout", lout);
  check_shape(kOp, "topk_scores", topk_scores, topk_indices.sym_sizes(), "the shape of topk_indices");
  return new_tensor(topk_indices.sym_sizes(), at::kInt, topk_indices);
}

// Returns [B, T_q, H, V] in `dtype`, by default that of gout, uninitialised.
inline Tensor prepare_final_normalize(const Tensor& gout, const Tensor& gsum,
                                      std::optional<at::ScalarType> dtype) {
  constexpr const char* kOp = "final_normalize";
  check_state(kOp, {"gsum", "gsum", "gout"}, gsum, gsum, gout);
  const at::ScalarType target = dtype.value_or(gout.scalar_type());
  const bool supported = target == at::kFloat || target == at::kHalf || target == at::kBFloat16 ||
                         (target == at::kDouble && !gout.is_cuda());
  TORCH_CHECK_TYPE(supported, kOp, ": dtype must be ", dtype_names({at::kFloat, at::kHalf, at::kBFloat16}),
                   gout.is_cuda() ? "" : " or torch.float64", ", got ", dtype_name(target));
  return new_tensor(gout.sym_sizes(), target, gout);
}

}  // namespace htree::tree_attention
