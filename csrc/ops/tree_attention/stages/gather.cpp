// Schemas, checks, Meta and registrations of the ops that gather the children of a layer's parents.
// docs/semantics/tree_attention.md §1.3, §1.7, §1.8
#include <array>

#include "host/no_gradient.h"
#include "host/registration.h"
#include "ops/tree_attention/kernels.h"
#include "ops/tree_attention/stages/select.h"

namespace htree::tree_attention {

// A state: lmax and lsum [B, T_q, H], lout [B, T_q, H, V].
using State = std::tuple<Tensor, Tensor, Tensor>;
using StateAndParents = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using StateAndTopk = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Every tensor of an op that scores a layer's candidates; `layer_v` and `span_k` are undefined
// where none is read.
struct LayerTensors {
  const Tensor& q;        // [B, T_q, H, K]
  const Tensor& layer_k;  // [B, N, H_kv, K]
  const Tensor& layer_v;  // [B, N, H_kv, V]
  const Tensor& parents;  // int32 [B, ceil(T_q / s), H_kv or H, k]
  const Tensor& cos;      // [size, K/2], size at least k*r
  const Tensor& sin;      // as cos
  Tensor span_k;          // [B, ceil(T / selection_span), H_kv, K]
};

struct LayerOptions {
  int64_t layer;
  int64_t compression_rate;
  std::optional<double> scale;
  const SymInt& t0;
  int64_t selection_stride = 1;
  std::optional<int64_t> selection_span = std::nullopt;
  SelectionOptions selection = {};
};

// A list is shared by the G query heads of a K/V head, or belongs to one query head.
inline void check_layer(const char* op, const LayerTensors& in, const LayerOptions& options,
                        bool list_per_query_head = false) {
  check_position(op, options.layer, options.compression_rate, options.t0, options.selection_stride);
  check_scale(op, options.scale);
  check_queries(op, in.q, "layer_k", in.layer_k);
  if (in.layer_v.defined()) {
    check_values(op, "layer_k", in.layer_k, "layer_v", in.layer_v);
  }
  const SymInt list_heads = (list_per_query_head ? in.q : in.layer_k).sym_size(2);
  check_parents(op, in.parents, "q", in.q, list_heads, options.compression_rate, options.selection_stride);
  check_cache(op, in.cos, in.sin, "q", in.q, in.parents.sym_size(3) * options.compression_rate);
}

inline void check_above_bottom(const char* op, int64_t layer) {
  TORCH_CHECK_VALUE(layer > 0, op, ": layer must be above the bottom (at least 1), got ", layer);
}

// What the ops that select take beyond check_layer. Their `span_k` and `selection_span` come both or neither.
inline void check_selection(const char* op, const LayerTensors& in, const LayerOptions& options,
                            int64_t top_k) {
  check_above_bottom(op, options.layer);
  check_list_width(op, "top_k", top_k, options.compression_rate);
  check_selection_span(op, options.selection_span, options.compression_rate, options.selection.importance);
  TORCH_CHECK_VALUE(in.span_k.defined() == options.selection_span.has_value(), op,
                    ": span_k and selection_span must be given together or not at all, got span_k ",
                    in.span_k.defined() ? "alone" : "None");
  if (!in.span_k.defined()) {
    return;
  }
  check_rank(op, "span_k", in.span_k, 4, "[B, ceil(T / selection_span), H_kv, K]");
  check_same_dtype(op, "span_k", in.span_k, "layer_k", in.layer_k);
  check_same_device(op, "span_k", in.span_k, "layer_k", in.layer_k);
  check_size(op, "span_k", in.span_k, 0, in.layer_k.sym_size(0), "B of layer_k");
  check_size(op, "span_k", in.span_k, 2, in.layer_k.sym_size(2), "H_kv of layer_k");
  check_size(op, "span_k", in.span_k, 3, in.layer_k.sym_size(3), "K of layer_k");
  const int64_t per_node = node_span(options.compression_rate, options.layer) / *options.selection_span;
  TORCH_CHECK_VALUE(same_size((in.span_k.sym_size(1) + (per_node - 1)) / per_node, in.layer_k.sym_size(1)),
                    op, ": span_k must have the means of the tokens below layer_k, ", per_node,
                    " per node and fewer for the last alone, got ", in.span_k.sym_size(1), " means for ",
                    in.layer_k.sym_size(1), " nodes");
}

inline State new_layer_state(const LayerTensors& in) {
  return new_state(in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2), in.layer_v.sym_size(3), in.q);
}

// int32 [B, ceil(T_q / s), H_kv, top_k], uninitialised.
inline Tensor new_lists(const LayerTensors& in, int64_t top_k) {
  return new_tensor({in.q.sym_size(0), in.parents.sym_size(1), in.layer_k.sym_size(2), top_k}, at::kInt,
                    in.q);
}

inline State prepare_accumulate_non_topk(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                                         const Tensor& num_candidates, int64_t layer,
                                         int64_t compression_rate, const SymInt& t0, const char* op) {
  check_position(op, layer, compression_rate, t0);
  check_scores(op, scores);
  check_rank(op, "layer_v", layer_v, 4, "[B, N, H_kv, V]");
  check_floating(op, "layer_v", layer_v, /*double_on_cuda=*/false);
  check_dtype(op, "scores", scores, {state_dtype(layer_v)});
  check_same_device(op, "scores", scores, "layer_v", layer_v);
  check_size(op, "layer_v", layer_v, 0, scores.sym_size(0), "B of scores");
  check_size(op, "layer_v", layer_v, 2, scores.sym_size(2), "H_kv of scores");
  TORCH_CHECK_VALUE(holds(layer_v.sym_size(3).sym_ge(1)), op,
                    ": V, the last size of layer_v, must be at least 1, ", "got ", layer_v.sym_sizes());
  check_num_candidates(op, num_candidates, scores);
  check_parents(op, parents, "scores", scores, scores.sym_size(2), compression_rate);
  check_size(op, "scores", scores, 3, parents.sym_size(3) * compression_rate,
             "k of parents times compression_rate");
  return new_state(scores.sym_size(0), scores.sym_size(1), scores.sym_size(2) * scores.sym_size(4),
                   layer_v.sym_size(3), layer_v);
}

inline StateAndTopk prepare_compute_and_select(const LayerTensors& in, const LayerOptions& options,
                                               int64_t top_k) {
  constexpr const char* kOp = "compute_and_select";
  check_layer(kOp, in, options, /*list_per_query_head=*/true);
  check_list_width(kOp, "top_k", top_k, options.compression_rate);
  auto [lmax, lsum, lout] = new_layer_state(in);
  const int64_t width = options.layer == 0 ? 0 : top_k;
  const std::array<SymInt, 4> shape = {in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2), width};
  return {lmax, lsum, lout, new_tensor(shape, at::kInt, in.q), new_tensor(shape, state_dtype(in.q), in.q)};
}

inline StateAndParents prepare_select_accumulate(const LayerTensors& in, const LayerOptions& options,
                                                 int64_t top_k) {
  constexpr const char* kOp = "select_accumulate";
  check_layer(kOp, in, options);
  check_selection(kOp, in, options, top_k);
  auto [lmax, lsum, lout] = new_layer_state(in);
  return {lmax, lsum, lout, new_lists(in, top_k)};
}

inline State prepare_bottom_accumulate(const LayerTensors& in, const LayerOptions& options) {
  constexpr const char* kOp = "bottom_accumulate";
  check_layer(kOp, in, options);
  return new_layer_state(in);
}

inline Tensor prepare_recompute_selection(const LayerTensors& in, const LayerOptions& options,
                                          int64_t top_k) {
  constexpr const char* kOp = "recompute_selection";
  check_layer(kOp, in, options);
  check_selection(kOp, in, options, top_k);
  return new_lists(in, top_k);
}

// ---- the ops

namespace {

Tensor unit_last_or_none(const Tensor& x) {
  return x.defined() ? unit_last(x) : Tensor();
}

LayerArgs resolve(const char* op, const LayerTensors& in, const LayerOptions& options, int64_t top_k) {
  LayerArgs args = resolve_layer(op, options.layer, options.compression_rate, in.parents.size(3), top_k,
                                 options.t0, in.layer_k.size(1), in.q.size(1));
  args.selection_stride = options.selection_stride;
  args.scale = resolve_scale(options.scale, in.q.size(3));
  args.selection_span = options.selection_span.value_or(0);
  args.selection = options.selection;
  return args;
}

// One body for CPU, CUDA and Meta: without a kernel it ends after the checks and allocations.

// keep = (torch.arange(k * r) < num_candidates[..., None])[..., None] & (scores != -inf)  # [B, T_q, H_kv, k*r, G]
// lmax = scores.where(keep, -inf).amax(-2)
// w = (scores - lmax).exp().where(keep, 0)
// lsum = w.sum(-2)
// lout = torch.einsum("bthpg,bthpv->bthgv", w, layer_v[b, node, h])  # node as in compute_scores
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

// The IO-only variant is the op itself: docs/semantics/io_only.md §2.2.
template <AccumulateNonTopk* kKernel>
State io_accumulate_non_topk(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                             const Tensor& num_candidates, int64_t layer, int64_t compression_rate,
                             SymInt t0) {
  return run_accumulate<kKernel>("io_accumulate_non_topk", layer_v, parents, scores, num_candidates, layer,
                                 compression_rate, t0);
}

// compute_scores, select_topk and the state of all candidates, with one list per query head:
// lmax = s.amax(-1)
// lsum = (s - lmax[..., None]).exp().sum(-1)
// topk_scores = s.gather(-1, position)
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
// topk = select_topk(scores, n, top_k, importance, open_next)
// mask_topk_scores_(scores, topk)
// accumulate_non_topk(layer_v, parents, scores, n, layer, r, t0), compute_next_parents(parents, topk, r)
// With s > 1, topk and next_parents belong to the leaders, and query t is masked by the row of its leader,
// t - t % s. With a selection_span topk comes from the scores of span_k in place of scores: §1.15.
template <SelectAccumulate* kKernel>
StateAndParents select_accumulate(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                                  const Tensor& parents, const Tensor& cos, const Tensor& sin, int64_t layer,
                                  int64_t compression_rate, int64_t top_k, std::optional<double> scale,
                                  std::string_view importance, SymInt t0, int64_t selection_stride,
                                  const std::optional<Tensor>& span_k, std::optional<int64_t> selection_span,
                                  bool open_next) {
  const LayerTensors in = {q, layer_k, layer_v, parents, cos, sin, span_k.value_or(Tensor())};
  const LayerOptions options = {layer,
                                compression_rate,
                                scale,
                                t0,
                                selection_stride,
                                selection_span,
                                {parse_importance("select_accumulate", importance), open_next}};
  StateAndParents result = prepare_select_accumulate(in, options, top_k);
  if constexpr (kKernel != nullptr) {
    const auto& [lmax, lsum, lout, next_parents] = result;
    const LayerArgs args = resolve("select_accumulate", in, options, top_k);
    if (lout.numel() > 0) {
      kKernel(unit_last(q), unit_last(layer_k), unit_last(layer_v), unit_last_or_none(in.span_k),
              unit_last(parents), unit_last(cos), unit_last(sin), args, lmax, lsum, lout, next_parents);
    }
  }
  return result;
}

// scores, n = compute_scores(q, layer_k, parents, cos, sin, 0, r, scale, t0)
// accumulate_non_topk(layer_v, parents, scores, n, 0, r, t0)  # every candidate
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
                           int64_t selection_stride, const std::optional<Tensor>& span_k,
                           std::optional<int64_t> selection_span, bool open_next) {
  const Tensor no_values;
  const LayerTensors in = {q, layer_k, no_values, parents, cos, sin, span_k.value_or(Tensor())};
  const LayerOptions options = {layer,
                                compression_rate,
                                scale,
                                t0,
                                selection_stride,
                                selection_span,
                                {parse_importance("recompute_selection", importance), open_next}};
  Tensor next_parents = prepare_recompute_selection(in, options, top_k);
  if constexpr (kKernel != nullptr) {
    const LayerArgs args = resolve("recompute_selection", in, options, top_k);
    if (next_parents.numel() > 0) {
      kKernel(unit_last(q), unit_last(layer_k), unit_last_or_none(in.span_k), unit_last(parents),
              unit_last(cos), unit_last(sin), args, next_parents);
    }
  }
  return next_parents;
}

template <AccumulateNonTopk* kAccumulate, ComputeAndSelect* kPerHead, SelectAccumulate* kSelect,
          BottomAccumulate* kBottom, RecomputeSelection* kRecompute>
void register_kernels(const OpKernels& kernels) {
  kernels.impl("accumulate_non_topk", TORCH_FN(accumulate_non_topk<kAccumulate>));
  kernels.impl("io_accumulate_non_topk", TORCH_FN(io_accumulate_non_topk<kAccumulate>));
  kernels.impl("compute_and_select", TORCH_FN(compute_and_select<kPerHead>));
  kernels.impl("select_accumulate", TORCH_FN(select_accumulate<kSelect>));
  kernels.impl("bottom_accumulate", TORCH_FN(bottom_accumulate<kBottom>));
  kernels.impl("recompute_selection", TORCH_FN(recompute_selection<kRecompute>));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
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
          "SymInt t0=0, int selection_stride=1, Tensor? span_k=None, int? selection_span=None, "
          "bool open_next=False) "
          "-> (Tensor lmax, Tensor lsum, Tensor lout, Tensor next_parents)",
          "bottom_accumulate(Tensor q, Tensor layer_k, Tensor layer_v, Tensor parents, Tensor cos, Tensor "
          "sin, "
          "int compression_rate=16, float? scale=None, SymInt t0=0, int selection_stride=1) "
          "-> (Tensor lmax, Tensor lsum, Tensor lout)",
          "recompute_selection(Tensor q, Tensor layer_k, Tensor parents, Tensor cos, Tensor sin, int layer, "
          "int compression_rate=16, int top_k=512, float? scale=None, str importance=\"lse_causal\", SymInt "
          "t0=0, "
          "int selection_stride=1, Tensor? span_k=None, int? selection_span=None, "
          "bool open_next=False) -> Tensor next_parents",
      });
  register_kernels<accumulate_non_topk_cpu, compute_and_select_cpu, select_accumulate_cpu,
                   bottom_accumulate_cpu, recompute_selection_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_kernels<accumulate_non_topk_cuda, compute_and_select_cuda, select_accumulate_cuda,
                   bottom_accumulate_cuda, recompute_selection_cuda>({library, DispatchKey::CUDA});
#endif
  register_kernels<nullptr, nullptr, nullptr, nullptr, nullptr>({library, DispatchKey::Meta});
  register_no_gradient(library, {"accumulate_non_topk", "io_accumulate_non_topk", "compute_and_select",
                                 "select_accumulate", "bottom_accumulate", "recompute_selection"});
}

}  // namespace htree::tree_attention
