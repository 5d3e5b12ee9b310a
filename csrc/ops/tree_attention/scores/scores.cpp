// Schema, Meta and registrations of compute_scores. docs/semantics.md §1.3, §1.4.
#include "ops/tree_attention/scores/scores.h"

#include "host/registration.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {
namespace {

using ScoresAndCount = std::tuple<Tensor, Tensor>;

// t = t0 + torch.arange(T_q); m = (parents >= 0).sum(-1)                                        [B, T_q,
// H_kv] n = torch.where(m > 0, (m - 1) * r + (t // r**layer % r)[:, None] + 1, 0) p = torch.arange(k * r);
// node = parents[..., p // r] * r + p % r                              [B, T_q, H_kv, k*r] key =
// rope(layer_k[b, node, h], p); query = rope(q, n - 1)                                    rotated as rope
// does scores = torch.where(p < n, scale * (key * query).sum(-1), -inf)                              [B, T_q,
// H_kv, k*r, G]
template <ComputeScores* kKernel>
ScoresAndCount compute_scores(const Tensor& q, const Tensor& layer_k, const Tensor& parents,
                              const Tensor& cos, const Tensor& sin, int64_t layer, int64_t compression_rate,
                              std::optional<double> scale, SymInt t0) {
  auto [scores, num_candidates] =
      prepare_compute_scores(q, layer_k, parents, cos, sin, layer, compression_rate, scale, t0);
  LayerArgs args = resolve_layer("compute_scores", layer, compression_rate, parents.size(3), parents.size(3),
                                 t0, layer_k.size(1), q.size(1));
  args.scale = resolve_scale(scale, q.size(3));
  if (num_candidates.numel() > 0) {
    kKernel(unit_last(q), unit_last(layer_k), unit_last(parents), unit_last(cos), unit_last(sin), args,
            scores, num_candidates);
  }
  return {scores, num_candidates};
}

ScoresAndCount compute_scores_meta(const Tensor& q, const Tensor& layer_k, const Tensor& parents,
                                   const Tensor& cos, const Tensor& sin, int64_t layer,
                                   int64_t compression_rate, std::optional<double> scale, SymInt t0) {
  return prepare_compute_scores(q, layer_k, parents, cos, sin, layer, compression_rate, scale, t0);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(htree, library) {
  define_ops(
      library,
      {
          "compute_scores(Tensor q, Tensor layer_k, Tensor parents, Tensor cos, Tensor sin, int layer, "
          "int compression_rate=16, float? scale=None, SymInt t0=0) -> (Tensor scores, Tensor "
          "num_candidates)",
      });
}

TORCH_LIBRARY_IMPL(htree, CPU, library) {
  library.impl("compute_scores", TORCH_FN(compute_scores<compute_scores_cpu>));
}

#if defined(HTREE_WITH_CUDA)
TORCH_LIBRARY_IMPL(htree, CUDA, library) {
  library.impl("compute_scores", TORCH_FN(compute_scores<compute_scores_cuda>));
}
#endif

TORCH_LIBRARY_IMPL(htree, Meta, library) {
  library.impl("compute_scores", TORCH_FN(compute_scores_meta));
}

TORCH_LIBRARY_IMPL(htree, Autograd, library) {
  register_no_gradient(library, {"compute_scores"});
}

}  // namespace htree::tree_attention
