// CPU kernels of the ops that gather (docs/semantics/tree_attention.md §1.7, §1.8): accumulate_non_topk and
// compute_and_select, parallel over rows, then select_accumulate, bottom_accumulate and recompute_selection,
// parallel over queries.
#include <limits>

#include "host/dispatch.h"
#include "ops/sparse_attention/cpu/query_worker.h"
#include "ops/tree/cpu/stage_cpu.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {

namespace {

// The three outputs of a state, contiguous: lmax and lsum [rows, heads], lout [rows, heads, width].
template <typename Real>
struct StateOut {
  Real* lmax;
  Real* lsum;
  Real* lout;
  int64_t heads;
  int64_t width;

  StateOut(const Tensor& max, const Tensor& sum, const Tensor& out)
      : lmax(max.mutable_data_ptr<Real>()),
        lsum(sum.mutable_data_ptr<Real>()),
        lout(out.mutable_data_ptr<Real>()),
        heads(max.size(2)),
        width(out.size(3)) {}
};

template <typename T>
void accumulate_rows(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                     const Tensor& num_candidates, const LayerArgs& args,
                     const StateOut<typename Stage<T>::Real>& state) {
  using Real = typename Stage<T>::Real;
  const int64_t num_queries = scores.size(1);
  const int64_t kv_heads = scores.size(2);
  const int64_t max_candidates = scores.size(3);
  const int64_t group = scores.size(4);
  const int64_t span = node_span(args.compression_rate, args.layer);
  const RowStrides v_strides = row_strides(layer_v);
  const RowStrides list_strides = row_strides(parents);
  const RowStrides score_strides = row_strides(scores);
  const RowStrides count_strides = row_strides(num_candidates);
  const auto* values = stored<T>(layer_v);
  const int32_t* lists = parents.const_data_ptr<int32_t>();
  const int32_t* counts = num_candidates.const_data_ptr<int32_t>();
  const Real* score_data = scores.const_data_ptr<Real>();
  const auto accumulate = Stage<T>::rows().accumulate;

  for_rows(scores.size(0), num_queries, kv_heads, max_candidates * group * state.width, [&] {
    return [&, nodes = std::vector<int64_t>(max_candidates),
            buffer = std::vector<Real>(max_candidates * group + state.width)](int64_t b, int64_t i,
                                                                              int64_t s) mutable {
      const int32_t* list = lists + list_strides.at(b, i, s);
      const int64_t rightmost = (args.t0 + i) / span;
      const int64_t listed =
          candidate_count(count_parents(list, args.list_width), rightmost, args.compression_rate);
      const int64_t num = std::clamp<int64_t>(counts[count_strides.at(b, i, s)], 0, listed);
      resolve_nodes(list, num, args.compression_rate, rightmost, layer_v.size(1), nodes.data());
      const int64_t head = (b * num_queries + i) * state.heads + s * group;
      accumulate(score_data + score_strides.at(b, i, s), scores.stride(3), group,
                 {values + v_strides.at(b, 0, s), v_strides.d1, nodes.data(), num}, state.width,
                 buffer.data(), state.lmax + head, state.lsum + head, state.lout + head * state.width);
    };
  });
}

template <typename T>
void compute_and_select_rows(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                             const Tensor& parents, const CpuRotaryTable<typename Stage<T>::Real>& rotary,
                             const LayerArgs& args, const StateOut<typename Stage<T>::Real>& state,
                             const Tensor& topk_indices, const Tensor& topk_scores) {
  using Real = typename Stage<T>::Real;
  using Rank = typename Stage<T>::Rank;
  const auto& kernels = Stage<T>::rows();
  const int64_t r = args.compression_rate;
  const int64_t group = state.heads / layer_k.size(2);
  const int64_t max_candidates = args.list_width * r;
  const int64_t top_k = topk_indices.size(3);  // 0 at the bottom
  const int64_t span = node_span(r, args.layer);
  const RowStrides q_strides = row_strides(q);
  const RowStrides k_strides = row_strides(layer_k);
  const RowStrides v_strides = row_strides(layer_v);
  const RowStrides list_strides = row_strides(parents);
  const auto* queries = stored<T>(q);
  const auto* keys = stored<T>(layer_k);
  const auto* values = stored<T>(layer_v);
  const int32_t* lists = parents.const_data_ptr<int32_t>();
  int32_t* index_data = topk_indices.mutable_data_ptr<int32_t>();
  Real* score_data = topk_scores.mutable_data_ptr<Real>();
  const int64_t scratch_words =
      kernels.select_bytes(max_candidates, 1) / 8 + 1;  // in words of 8 bytes, for the alignment

  for_rows(q.size(0), q.size(1), state.heads, max_candidates * (q.size(3) + state.width), [&] {
    return [&, nodes = std::vector<int64_t>(max_candidates), scores = std::vector<Real>(max_candidates),
            buffer = std::vector<Real>(std::max(2 * q.size(3), max_candidates + state.width)),
            scratch = std::vector<uint64_t>(scratch_words), ranks = std::vector<Rank>(top_k),
            order = std::vector<std::pair<Rank, int32_t>>()](int64_t b, int64_t i, int64_t h) mutable {
      const int32_t* list = lists + list_strides.at(b, i, h);
      const int64_t rightmost = (args.t0 + i) / span;
      const int64_t num = candidate_count(count_parents(list, args.list_width), rightmost, r);
      const int64_t head = (b * q.size(1) + i) * state.heads + h;
      int32_t* indices = index_data + head * top_k;
      Real* chosen_scores = score_data + head * top_k;
      int64_t taken = 0;
      resolve_nodes(list, num, r, rightmost, layer_k.size(1), nodes.data());
      if (num > 0) {
        kernels.score(queries + q_strides.at(b, i, h), q_strides.d2, 1,
                      {keys + k_strides.at(b, 0, h / group), k_strides.d1, nodes.data(), num}, rotary,
                      static_cast<Real>(args.scale), buffer.data(), scores.data());
      }
      if (num > 0 && top_k > 0) {
        taken = kernels.select(scores.data(), 1, 1, num, top_k, {}, scratch.data(), indices, ranks.data());
        order_by_key(indices, ranks.data(), taken, order);
      }
      for (int64_t j = 0; j < taken; ++j) {
        const int64_t p = indices[j];
        chosen_scores[j] = scores[p];
        indices[j] = static_cast<int32_t>(int64_t{list[p / r]} * r + p % r);
      }
      std::fill(indices + taken, indices + top_k, -1);
      std::fill(chosen_scores + taken, chosen_scores + top_k, -std::numeric_limits<Real>::infinity());
      kernels.accumulate(
          scores.data(), 1, 1, {values + v_strides.at(b, 0, h / group), v_strides.d1, nodes.data(), num},
          state.width, buffer.data(), state.lmax + head, state.lsum + head, state.lout + head * state.width);
    };
  });
}

}  // namespace

void accumulate_non_topk_cpu(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                             const Tensor& num_candidates, const LayerArgs& args, const Tensor& lmax,
                             const Tensor& lsum, const Tensor& lout) {
  dispatch_dtype("accumulate_non_topk", layer_v.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    accumulate_rows<typename decltype(tag)::type>(layer_v, parents, scores, num_candidates, args,
                                                  {lmax, lsum, lout});
  });
}

void compute_and_select_cpu(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                            const Tensor& parents, const Tensor& cos, const Tensor& sin,
                            const LayerArgs& args, const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                            const Tensor& topk_indices, const Tensor& topk_scores) {
  dispatch_dtype("compute_and_select", q.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Real = typename Stage<T>::Real;
    const CpuRotaryTable<Real> rotary{cos.const_data_ptr<Real>(), sin.const_data_ptr<Real>(), cos.stride(0),
                                      sin.stride(0), q.size(3) / 2};
    compute_and_select_rows<T>(q, layer_k, layer_v, parents, rotary, args, {lmax, lsum, lout}, topk_indices,
                               topk_scores);
  });
}

// ---- select_accumulate, bottom_accumulate and recompute_selection: one layer for all queries
//
// The scores of a query live in the scratch of its thread, never in memory for all queries. Temporary memory:
// the layer laid out once (packed_layer.h), and about G k r elements per thread.

namespace {

// Queries of a task: enough to pay for handing it over, few enough to balance the load.
constexpr int64_t kTaskQueries = 32;

// Undefined outputs are not computed. `next` is written above layer 0, the state where lmax is defined.
template <typename T, typename Real>
void run_layer(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v, const Tensor& span_k,
               const Tensor& parents, const Tensor& cos, const Tensor& sin, const LayerArgs& args,
               const Tensor& lmax, const Tensor& lsum, const Tensor& lout, const Tensor& next) {
  const int64_t r = args.compression_rate;
  const int64_t batch = q.size(0);
  const int64_t num_queries = q.size(1);
  const int64_t kv_heads = layer_k.size(2);
  const int64_t num_nodes = layer_k.size(1);
  const int64_t width = args.list_width;
  const int64_t stride = args.selection_stride;
  const bool states = lmax.defined();
  const int64_t value_dim = states ? layer_v.size(3) : 1;
  const QueryShape shape = query_shape(q, kv_heads, value_dim, r, std::max<int64_t>(1, width), args.selection,
                                       query_kernels<Real>().lanes);
  const RotationTable table = copy_rotation<Real>(cos, sin, shape.max_parents * r, shape);
  const Rotation<Real> rotation = table.rotation<Real>();
  const auto layers =
      PackedLayers<Real>::make(layer_k, layer_v, shape, rotation, /*gradients=*/false, Type<T>{});
  const int64_t span = node_span(r, args.layer);
  CpuPackedSpans<Real> means;
  if (span_k.defined() && span_k.numel() > 0) {
    means = CpuPackedSpans<Real>(span_k, num_nodes, span / args.selection_span, shape, rotation, Type<T>{});
  }

  const Tensor lists = parents.contiguous();
  const int32_t* list_data = lists.const_data_ptr<int32_t>();
  const int64_t num_lists = lists.size(1);
  const T* q_data = q.const_data_ptr<T>();
  int32_t* next_data = next.defined() ? next.mutable_data_ptr<int32_t>() : nullptr;
  Real* max_data = states ? lmax.mutable_data_ptr<Real>() : nullptr;
  Real* sum_data = states ? lsum.mutable_data_ptr<Real>() : nullptr;
  Real* out_data = states ? lout.mutable_data_ptr<Real>() : nullptr;

  const int64_t task_queries = round_up(kTaskQueries, stride);
  const int64_t tasks_per_head = ceil_div(num_queries, task_queries);
  parallel_tasks(batch * kv_heads * tasks_per_head, [&] {
    return [&, worker = QueryWorker<Real>(shape), selected = std::vector<int32_t>(args.top_k),
            num_selected = int64_t{0}](int64_t task) mutable {
      const int64_t b = task / tasks_per_head / kv_heads;
      const int64_t h = task / tasks_per_head % kv_heads;
      const int64_t begin = task % tasks_per_head * task_queries;
      const int64_t end = std::min(begin + task_queries, num_queries);
      const PackedLayer<Real> layer = layers.at(b, h);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = (b * num_lists + i / stride) * kv_heads + h;
        const Candidates candidates =
            candidates_of(list_data + row * width, width, (args.t0 + i) / span, num_nodes, r);
        const bool leader = args.layer > 0 && i % stride == 0;
        if (!states && !leader) continue;
        worker.load_query(q_data + b * q.stride(0) + i * q.stride(1) + h * shape.group * q.stride(2),
                          q.stride(2), args.scale);
        const bool merges = args.layer == 0 || candidates.count > args.top_k;  // else all are selected
        if (merges && (states || means.empty())) worker.score(layer, rotation, candidates);
        if (leader) {
          num_selected = means.empty() ? worker.select(candidates, args.top_k, selected.data())
                                       : worker.select_by_span(means.at(b, h), rotation, candidates,
                                                               args.top_k, selected.data());
          write_list(candidates, r, selected.data(), num_selected, args.top_k, next_data + row * args.top_k);
        }
        if (!states) continue;
        worker.clear_state();
        if (merges) {
          worker.accumulate(layer, candidates, selected.data(), num_selected);
        }
        const int64_t at = (b * num_queries + i) * q.size(2) + h * shape.group;
        for (int64_t g = 0; g < shape.group; ++g) {
          max_data[at + g] = worker.max()[g];
          sum_data[at + g] = worker.sum()[g];
          std::copy(worker.out(g), worker.out(g) + value_dim, out_data + (at + g) * value_dim);
        }
      }
    };
  });
}

}  // namespace

void select_accumulate_cpu(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                           const Tensor& span_k, const Tensor& parents, const Tensor& cos, const Tensor& sin,
                           const LayerArgs& args, const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                           const Tensor& next_parents) {
  dispatch_storage("select_accumulate", q.scalar_type(), [&](auto storage, auto real) {
    run_layer<typename decltype(storage)::type, typename decltype(real)::type>(
        q, layer_k, layer_v, span_k, parents, cos, sin, args, lmax, lsum, lout, next_parents);
  });
}

void bottom_accumulate_cpu(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                           const Tensor& parents, const Tensor& cos, const Tensor& sin, const LayerArgs& args,
                           const Tensor& lmax, const Tensor& lsum, const Tensor& lout) {
  dispatch_storage("bottom_accumulate", q.scalar_type(), [&](auto storage, auto real) {
    run_layer<typename decltype(storage)::type, typename decltype(real)::type>(
        q, layer_k, layer_v, Tensor(), parents, cos, sin, args, lmax, lsum, lout, Tensor());
  });
}

void recompute_selection_cpu(const Tensor& q, const Tensor& layer_k, const Tensor& span_k,
                             const Tensor& parents, const Tensor& cos, const Tensor& sin,
                             const LayerArgs& args, const Tensor& next_parents) {
  dispatch_storage("recompute_selection", q.scalar_type(), [&](auto storage, auto real) {
    run_layer<typename decltype(storage)::type, typename decltype(real)::type>(
        q, layer_k, Tensor(), span_k, parents, cos, sin, args, Tensor(), Tensor(), Tensor(), next_parents);
  });
}

}  // namespace htree::tree_attention
