// Schema, checks, Meta and registrations of compute_scores and of its IO-only variant.
// docs/semantics/tree_attention.md §1.3, §1.4, §1.8
#include "host/no_gradient.h"
#include "host/registration.h"
#include "ops/tree/tree_checks.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {

namespace {

using ScoresAndCount = std::tuple<Tensor, Tensor>;

// t = t0 + torch.arange(T_q)
// m = (parents >= 0).sum(-1)  # [B, T_q, H_kv]
// n = torch.where(m > 0, (m - 1) * r + (t // r**layer % r)[:, None] + 1, 0)
// p = torch.arange(k * r)
// node = parents[..., p // r] * r + p % r  # [B, T_q, H_kv, k*r]
// key = rope(layer_k[b, node, h], p)
// query = rope(q, n - 1)  # rotated as rope does
// scores = torch.where(p < n, scale * (key * query).sum(-1), -inf)  # [B, T_q, H_kv, k*r, G]
template <ComputeScores* kKernel>
ScoresAndCount run_scores(const char* op, const Tensor& q, const Tensor& layer_k, const Tensor& parents,
                          const Tensor& cos, const Tensor& sin, int64_t layer, int64_t compression_rate,
                          std::optional<double> scale, SymInt t0) {
  check_position(op, layer, compression_rate, t0);
  check_scale(op, scale);
  check_queries(op, q, "layer_k", layer_k);
  const SymInt batch = q.sym_size(0), queries = q.sym_size(1), kv_heads = layer_k.sym_size(2);
  check_parents(op, parents, "q", q, kv_heads, compression_rate);
  const SymInt capacity = parents.sym_size(3) * compression_rate;
  check_cache(op, cos, sin, "q", q, capacity);
  Tensor scores =
      new_tensor({batch, queries, kv_heads, capacity, q.sym_size(2) / kv_heads}, state_dtype(q), q);
  Tensor num_candidates = new_tensor({batch, queries, kv_heads}, at::kInt, q);
  if constexpr (kKernel != nullptr) {
    LayerArgs args = resolve_layer(op, layer, compression_rate, parents.size(3), parents.size(3), t0,
                                   layer_k.size(1), q.size(1));
    args.scale = resolve_scale(scale, q.size(3));
    if (num_candidates.numel() > 0) {
      kKernel(unit_last(q), unit_last(layer_k), unit_last(parents), unit_last(cos), unit_last(sin), args,
              scores, num_candidates);
    }
  }
  return {scores, num_candidates};
}

template <ComputeScores* kKernel>
ScoresAndCount compute_scores(const Tensor& q, const Tensor& layer_k, const Tensor& parents,
                              const Tensor& cos, const Tensor& sin, int64_t layer, int64_t compression_rate,
                              std::optional<double> scale, SymInt t0) {
  return run_scores<kKernel>("compute_scores", q, layer_k, parents, cos, sin, layer, compression_rate, scale,
                             t0);
}

// hash = (node * 1103515245 + 12345 + 7 * h_kv + 13 * t) & 0x7fffffff; p < n as in compute_scores, else -inf
// scores = hash / 2147483647 * 10 - 5 + 0.01 * key.sum(-1) + 0.001 * g + 1e-6 * (q.sum(-1) + cos[p].sum(-1) +
//          sin[p].sum(-1) + cos[n - 1].sum(-1) + sin[n - 1].sum(-1))
template <ComputeScores* kKernel>
ScoresAndCount io_compute_scores(const Tensor& q, const Tensor& layer_k, const Tensor& parents,
                                 const Tensor& cos, const Tensor& sin, int64_t layer,
                                 int64_t compression_rate, std::optional<double> scale, SymInt t0) {
  return run_scores<kKernel>("io_compute_scores", q, layer_k, parents, cos, sin, layer, compression_rate,
                             scale, t0);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(
      library,
      {
          "compute_scores(Tensor q, Tensor layer_k, Tensor parents, Tensor cos, Tensor sin, int layer, "
          "int compression_rate=16, float? scale=None, SymInt t0=0) -> (Tensor scores, Tensor "
          "num_candidates)",
          "io_compute_scores(Tensor q, Tensor layer_k, Tensor parents, Tensor cos, Tensor sin, int layer, "
          "int compression_rate=16, float? scale=None, SymInt t0=0) -> (Tensor scores, Tensor "
          "num_candidates)",
      });
  const OpKernels cpu(library, DispatchKey::CPU);
  cpu.impl("compute_scores", TORCH_FN(compute_scores<compute_scores_cpu>));
  cpu.impl("io_compute_scores", TORCH_FN(io_compute_scores<io_compute_scores_cpu>));
#if defined(HTREE_WITH_CUDA)
  const OpKernels cuda(library, DispatchKey::CUDA);
  cuda.impl("compute_scores", TORCH_FN(compute_scores<compute_scores_cuda>));
  cuda.impl("io_compute_scores", TORCH_FN(io_compute_scores<io_compute_scores_cuda>));
#endif
  const OpKernels meta(library, DispatchKey::Meta);
  meta.impl("compute_scores", TORCH_FN(compute_scores<nullptr>));
  meta.impl("io_compute_scores", TORCH_FN(io_compute_scores<nullptr>));
  register_no_gradient(library, {"compute_scores", "io_compute_scores"});
}

}  // namespace htree::tree_attention
