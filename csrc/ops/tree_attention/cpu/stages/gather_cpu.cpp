// CPU kernels of select_accumulate, bottom_accumulate and recompute_selection: one layer for all queries.
// The scores of a query live in its thread's scratch, never in memory for all queries. Temporary memory: the
// layer laid out once (attention/relay.h), and per thread about G k r elements.
#include "ops/tree_attention/cpu/query_worker.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {
namespace {

// Queries of a task: enough to hide the hand-over, few enough to balance the load.
constexpr int64_t kTaskQueries = 32;

// Undefined outputs are not computed. `next` is written for layer > 0, the states when lmax is defined.
template <typename T, typename Real>
void run_layer(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v, const Tensor& parents,
               const Tensor& cos, const Tensor& sin, const LayerArgs& args, const Tensor& lmax,
               const Tensor& lsum, const Tensor& lout, const Tensor& next) {
  const int64_t r = args.compression_rate;
  const int64_t batch = q.size(0);
  const int64_t num_queries = q.size(1);
  const int64_t kv_heads = layer_k.size(2);
  const int64_t num_nodes = layer_k.size(1);
  const int64_t width = args.list_width;
  const int64_t stride = args.selection_stride;
  const bool states = lmax.defined();
  const int64_t value_dim = states ? layer_v.size(3) : 1;
  const QueryShape shape = query_shape(q, kv_heads, value_dim, r, std::max<int64_t>(1, width),
                                       args.importance, query_kernels<Real>().lanes);
  const RotationTable table = copy_rotation<Real>(cos, sin, shape.max_parents * r, shape);
  const Rotation<Real> rotation = table.rotation<Real>();
  const auto layers =
      PackedLayers<Real>::make(layer_k, layer_v, shape, rotation, /*gradients=*/false, Type<T>{});

  const Tensor lists = parents.contiguous();
  const int32_t* list_data = lists.const_data_ptr<int32_t>();
  const int64_t num_lists = lists.size(1);
  const int64_t span = node_span(r, args.layer);
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
        if (merges) worker.score(layer, rotation, candidates);
        if (leader) {
          num_selected = worker.select(candidates, args.top_k, selected.data());
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
                           const Tensor& parents, const Tensor& cos, const Tensor& sin, const LayerArgs& args,
                           const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                           const Tensor& next_parents) {
  if (q.numel() == 0) return;
  dispatch_storage("select_accumulate", q.scalar_type(), [&](auto storage, auto real) {
    run_layer<typename decltype(storage)::type, typename decltype(real)::type>(
        q, layer_k, layer_v, parents, cos, sin, args, lmax, lsum, lout, next_parents);
  });
}

void bottom_accumulate_cpu(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                           const Tensor& parents, const Tensor& cos, const Tensor& sin, const LayerArgs& args,
                           const Tensor& lmax, const Tensor& lsum, const Tensor& lout) {
  if (q.numel() == 0) return;
  dispatch_storage("bottom_accumulate", q.scalar_type(), [&](auto storage, auto real) {
    run_layer<typename decltype(storage)::type, typename decltype(real)::type>(
        q, layer_k, layer_v, parents, cos, sin, args, lmax, lsum, lout, Tensor());
  });
}

void recompute_selection_cpu(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                             const Tensor& sin, const LayerArgs& args, const Tensor& next_parents) {
  if (q.numel() == 0) return;
  dispatch_storage("recompute_selection", q.scalar_type(), [&](auto storage, auto real) {
    run_layer<typename decltype(storage)::type, typename decltype(real)::type>(
        q, layer_k, Tensor(), parents, cos, sin, args, Tensor(), Tensor(), Tensor(), next_parents);
  });
}

}  // namespace htree::tree_attention
