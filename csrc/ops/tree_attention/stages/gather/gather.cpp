// Schemas, Meta and registrations of the ops that gather the children of a layer's parents.
// docs/semantics/tree_attention.md §1.7.
#include "ops/tree_attention/stages/gather/gather.h"

#include "host/registration.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {
namespace {

LayerArgs resolve(const char* op, const LayerTensors& in, const LayerOptions& options, int64_t top_k) {
  LayerArgs args = resolve_layer(op, options.layer, options.compression_rate, in.parents.size(3), top_k,
                                 options.t0, in.layer_k.size(1), in.q.size(1));
  args.selection_stride = options.selection_stride;
  args.scale = resolve_scale(options.scale, in.q.size(3));
  return args;
}

// One body for CPU, CUDA and Meta: without a kernel it ends after the checks and allocations.

// keep = (torch.arange(k * r) < num_candidates[..., None])[..., None] & (scores != -inf)        [B, T_q,
// H_kv, k*r, G] lmax = scores.where(keep, -inf).amax(-2); w = (scores - lmax).exp().where(keep, 0); lsum =
// w.sum(-2) lout = torch.einsum("bthpg,bthpv->bthgv", w, layer_v[b, node, h]) node as in compute_scores
template <AccumulateNonTopk* kKernel>
State run_accumulate(const char* op, const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                     const Tensor& num_candidates, int64_t layer, int64_t compression_rate, SymInt t0) {
  State state =
      prepare_accumulate_non_topk(layer_v, parents, scores, num_candidates, layer, compression_rate, t0, op);
  if constexpr (kKernel != nullptr) {
    const auto& [lmax, lsum, lout] = state;
    const LayerArgs args = resolve_layer(op, layer, compression_rate, parents.size(3), parents.size(3), t0,
                                         layer_v.size(1), scores.size(1));
    if (lout.numel() > 0) {
      kKernel(unit_last(layer_v), unit_last(parents), unit_last(scores), unit_last(num_candidates), args,
              lmax, lsum, lout);
    }
  }
  return state;
}

template <AccumulateNonTopk* kKernel>
State accumulate_non_topk(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                          const Tensor& num_candidates, int64_t layer, int64_t compression_rate, SymInt t0) {
  return run_accumulate<kKernel>("accumulate_non_topk", layer_v, parents, scores, num_candidates, layer,
                                 compression_rate, t0);
}

// The IO-only twin is the op itself. docs/semantics/io_twins.md §2.2.
template <AccumulateNonTopk* kKernel>
State io_accumulate_non_topk(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                             const Tensor& num_candidates, int64_t layer, int64_t compression_rate,
                             SymInt t0) {
  return run_accumulate<kKernel>("io_accumulate_non_topk", layer_v, parents, scores, num_candidates, layer,
                                 compression_rate, t0);
}

// compute_scores, select_topk and the state of all candidates, with one list per query head:
// lmax = s.amax(-1); lsum = (s - lmax[..., None]).exp().sum(-1); topk_scores = s.gather(-1, position)
// topk_indices = node of each selected position, in key order
template <ComputeAndSelect* kKernel>
StateAndTopk compute_and_select(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                                const Tensor& parents, const Tensor& cos, const Tensor& sin, int64_t layer,
                                int64_t compression_rate, int64_t top_k, std::optional<double> scale,
                                SymInt t0) {
  const LayerTensors in = {q, layer_k, layer_v, parents, cos, sin};
  const LayerOptions options = {layer, compression_rate, scale, t0};
  StateAndTopk result = prepare_compute_and_select(in, options, top_k);
  if constexpr (kKernel != nullptr) {
    const auto& [lmax, lsum, lout, topk_indices, topk_scores] = result;
    const LayerArgs args = resolve("compute_and_select", in, options, top_k);
    if (lout.numel() > 0) {
      kKernel(unit_last(q), unit_last(layer_k), unit_last(layer_v), unit_last(parents), unit_last(cos),
              unit_last(sin), args, lmax, lsum, lout, topk_indices, topk_scores);
    }
  }
  return result;
}

// scores, n = compute_scores(q, layer_k, parents, cos, sin, layer, r, scale, t0)
// topk = select_topk(scores, n, top_k, importance); mask_topk_scores_(scores, topk)
// accumulate_non_topk(layer_v, parents, scores, n, layer, r, t0), compute_next_parents(parents, topk, r)
// For s > 1 topk and next_parents are the leaders', query t masks with the row of its leader t - t % s.
template <SelectAccumulate* kKernel>
StateAndParents select_accumulate(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                                  const Tensor& parents, const Tensor& cos, const Tensor& sin, int64_t layer,
                                  int64_t compression_rate, int64_t top_k, std::optional<double> scale,
                                  std::string_view importance, SymInt t0, int64_t selection_stride) {
  const LayerTensors in = {q, layer_k, layer_v, parents, cos, sin};
  const LayerOptions options = {layer, compression_rate, scale, t0, selection_stride};
  StateAndParents result = prepare_select_accumulate(in, options, top_k, importance);
  if constexpr (kKernel != nullptr) {
    const auto& [lmax, lsum, lout, next_parents] = result;
    LayerArgs args = resolve("select_accumulate", in, options, top_k);
    args.importance = parse_importance("select_accumulate", importance);
    if (lout.numel() > 0) {
      kKernel(unit_last(q), unit_last(layer_k), unit_last(layer_v), unit_last(parents), unit_last(cos),
              unit_last(sin), args, lmax, lsum, lout, next_parents);
    }
  }
  return result;
}

// scores, n = compute_scores(q, layer_k, parents, cos, sin, 0, r, scale, t0)
// accumulate_non_topk(layer_v, parents, scores, n, 0, r, t0)                                    every
// candidate
template <BottomAccumulate* kKernel>
State bottom_accumulate(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v, const Tensor& parents,
                        const Tensor& cos, const Tensor& sin, int64_t compression_rate,
                        std::optional<double> scale, SymInt t0, int64_t selection_stride) {
  const LayerTensors in = {q, layer_k, layer_v, parents, cos, sin};
  const LayerOptions options = {/*layer=*/0, compression_rate, scale, t0, selection_stride};
  State state = prepare_bottom_accumulate(in, options);
  if constexpr (kKernel != nullptr) {
    const auto& [lmax, lsum, lout] = state;
    const LayerArgs args = resolve("bottom_accumulate", in, options, parents.size(3));
    if (lout.numel() > 0) {
      kKernel(unit_last(q), unit_last(layer_k), unit_last(layer_v), unit_last(parents), unit_last(cos),
              unit_last(sin), args, lmax, lsum, lout);
    }
  }
  return state;
}

// select_accumulate(q, layer_k, layer_v, parents, ...)[3] without the values
template <RecomputeSelection* kKernel>
Tensor recompute_selection(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                           const Tensor& sin, int64_t layer, int64_t compression_rate, int64_t top_k,
                           std::optional<double> scale, std::string_view importance, SymInt t0,
                           int64_t selection_stride) {
  const Tensor no_values;
  const LayerTensors in = {q, layer_k, no_values, parents, cos, sin};
  const LayerOptions options = {layer, compression_rate, scale, t0, selection_stride};
  Tensor next_parents = prepare_recompute_selection(in, options, top_k, importance);
  if constexpr (kKernel != nullptr) {
    LayerArgs args = resolve("recompute_selection", in, options, top_k);
    args.importance = parse_importance("recompute_selection", importance);
    if (next_parents.numel() > 0) {
      kKernel(unit_last(q), unit_last(layer_k), unit_last(parents), unit_last(cos), unit_last(sin), args,
              next_parents);
    }
  }
  return next_parents;
}

template <AccumulateNonTopk* kAccumulate, ComputeAndSelect* kPerHead, SelectAccumulate* kSelect,
          BottomAccumulate* kBottom, RecomputeSelection* kRecompute>
void register_kernels(torch::Library& library) {
  library.impl("accumulate_non_topk", TORCH_FN(accumulate_non_topk<kAccumulate>));
  library.impl("io_accumulate_non_topk", TORCH_FN(io_accumulate_non_topk<kAccumulate>));
  library.impl("compute_and_select", TORCH_FN(compute_and_select<kPerHead>));
  library.impl("select_accumulate", TORCH_FN(select_accumulate<kSelect>));
  library.impl("bottom_accumulate", TORCH_FN(bottom_accumulate<kBottom>));
  library.impl("recompute_selection", TORCH_FN(recompute_selection<kRecompute>));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(htree, library) {
  define_ops(
      library,
      {
          "accumulate_non_topk(Tensor layer_v, Tensor parents, Tensor scores, Tensor num_candidates, int "
          "layer, "
          "int compression_rate=16, SymInt t0=0) -> (Tensor lmax, Tensor lsum, Tensor lout)",
          "io_accumulate_non_topk(Tensor layer_v, Tensor parents, Tensor scores, Tensor num_candidates, int "
          "layer, "
          "int compression_rate=16, SymInt t0=0) -> (Tensor lmax, Tensor lsum, Tensor lout)",
          "compute_and_select(Tensor q, Tensor layer_k, Tensor layer_v, Tensor parents, Tensor cos, Tensor "
          "sin, "
          "int layer, int compression_rate=16, int top_k=512, float? scale=None, SymInt t0=0) "
          "-> (Tensor lmax, Tensor lsum, Tensor lout, Tensor topk_indices, Tensor topk_scores)",
          "select_accumulate(Tensor q, Tensor layer_k, Tensor layer_v, Tensor parents, Tensor cos, Tensor "
          "sin, "
          "int layer, int compression_rate=16, int top_k=512, float? scale=None, str "
          "importance=\"lse_causal\", "
          "SymInt t0=0, int selection_stride=1) -> (Tensor lmax, Tensor lsum, Tensor lout, Tensor "
          "next_parents)",
          "bottom_accumulate(Tensor q, Tensor layer_k, Tensor layer_v, Tensor parents, Tensor cos, Tensor "
          "sin, "
          "int compression_rate=16, float? scale=None, SymInt t0=0, int selection_stride=1) "
          "-> (Tensor lmax, Tensor lsum, Tensor lout)",
          "recompute_selection(Tensor q, Tensor layer_k, Tensor parents, Tensor cos, Tensor sin, int layer, "
          "int compression_rate=16, int top_k=512, float? scale=None, str importance=\"lse_causal\", SymInt "
          "t0=0, "
          "int selection_stride=1) -> Tensor next_parents",
      });
}

TORCH_LIBRARY_IMPL(htree, CPU, library) {
  register_kernels<accumulate_non_topk_cpu, compute_and_select_cpu, select_accumulate_cpu,
                   bottom_accumulate_cpu, recompute_selection_cpu>(library);
}

#if defined(HTREE_WITH_CUDA)
TORCH_LIBRARY_IMPL(htree, CUDA, library) {
  register_kernels<accumulate_non_topk_cuda, compute_and_select_cuda, select_accumulate_cuda,
                   bottom_accumulate_cuda, recompute_selection_cuda>(library);
}
#endif

TORCH_LIBRARY_IMPL(htree, Meta, library) {
  register_kernels<nullptr, nullptr, nullptr, nullptr, nullptr>(library);
}

TORCH_LIBRARY_IMPL(htree, Autograd, library) {
  register_no_gradient(library, {"accumulate_non_topk", "io_accumulate_non_topk", "compute_and_select",
                                 "select_accumulate", "bottom_accumulate", "recompute_selection"});
}

}  // namespace htree::tree_attention
