// CPU kernel of attention_forward: a task takes a few queries of one key/value head through all layers from
// the top down, so that neither scores nor (unless they are kept) parent lists exist for more than one query
// per thread. Temporary memory: the layers of the tree, fp32 copies of them and of the span means
// (packed_layer.h), and about G k r elements per thread.
#include "ops/tree_attention/cpu/pyramid.h"

namespace htree::tree_attention {
namespace {

constexpr int64_t kTaskQueries = 32;

template <typename T, typename Real>
void forward_typed(bool lists_given, const Tensor& q, const Tensor& k, const Tensor& v,
                   const AttentionArgs& args, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                   const std::vector<Tensor>& parents) {
  const Pyramid<Real> pyramid(q, k, v, args, /*selects=*/!lists_given, /*gradients=*/false, Type<T>{});
  const Rotation<Real> rotation = pyramid.rotation();
  const int64_t r = args.compression_rate;
  const int64_t group = pyramid.shape.group;
  const int64_t width = args.top_k;
  const T* q_data = q.const_data_ptr<T>();
  T* out_data = out.mutable_data_ptr<T>();
  Real* max_data = gmax.mutable_data_ptr<Real>();
  Real* sum_data = gsum.mutable_data_ptr<Real>();
  std::vector<int32_t*> kept;
  for (const Tensor& list : parents) {
    kept.push_back(list.mutable_data_ptr<int32_t>());
  }
  const int64_t kept_batch = parents.empty() ? 0 : parents.front().stride(0);

  const int64_t task_queries = round_up(kTaskQueries, args.selection_stride);
  const int64_t tasks_per_head = ceil_div(pyramid.num_queries, task_queries);
  parallel_tasks(pyramid.batch * pyramid.kv_heads * tasks_per_head, [&] {
    return [&, worker = QueryWorker<Real>(pyramid.shape), lists = std::vector<int32_t>(pyramid.depth * width),
            selected = std::vector<int32_t>(pyramid.depth * width),
            num_selected = std::vector<int64_t>(pyramid.depth)](int64_t task) mutable {
      const int64_t b = task / tasks_per_head / pyramid.kv_heads;
      const int64_t h = task / tasks_per_head % pyramid.kv_heads;
      // The last queries have the longest lists: start with them.
      const int64_t begin = (tasks_per_head - 1 - task % tasks_per_head) * task_queries;
      const int64_t end = std::min(begin + task_queries, pyramid.num_queries);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t token = token_of_query(args, pyramid.num_queries, i);
        const bool leader = i % args.selection_stride == 0;
        const int64_t list_row = i / args.selection_stride * pyramid.kv_heads + h;
        const auto list_of = [&](int64_t layer) {
          return kept.empty() ? lists.data() + layer * width
                              : kept[layer] + b * kept_batch + list_row * width;
        };
        worker.load_query(q_data + b * q.stride(0) + i * q.stride(1) + h * group * q.stride(2), q.stride(2),
                          args.scale);
        worker.clear_state();
        const int64_t top = pyramid.depth - 1;
        if (leader && !lists_given && !kept.empty()) pyramid.write_top_list(token, r, width, list_of(top));
        for (int64_t l = top; l >= 0; --l) {
          const PackedLayer<Real> layer = pyramid.layers[l].at(b, h);
          const Candidates candidates =
              l == top ? pyramid.top_candidates(token, r)
                       : candidates_of(list_of(l), width, token / pyramid.spans[l], layer.num_nodes, r);
          const bool merges = l == 0 || candidates.count > width;  // else all are selected
          if (merges) worker.score(layer, rotation, candidates);
          int32_t* const positions = selected.data() + l * width;
          if (leader && l > 0 && lists_given) {
            num_selected[l] = positions_of(candidates, r, list_of(l - 1), width, positions);
          } else if (leader && l > 0) {
            const CpuPackedSpans<Real>& means = pyramid.span_means[l];
            num_selected[l] =
                means.empty() ? worker.select(candidates, width, positions)
                              : worker.select_by_span(means.at(b, h), rotation, candidates, width, positions);
            write_list(candidates, r, positions, num_selected[l], width, list_of(l - 1));
          }
          if (merges) worker.accumulate(layer, candidates, positions, l > 0 ? num_selected[l] : 0);
        }
        const int64_t at = (b * pyramid.num_queries + i) * pyramid.heads + h * group;
        for (int64_t g = 0; g < group; ++g) {
          const Real sum = worker.sum()[g];
          const Real inverse = Real{1} / sum;
          max_data[at + g] = worker.max()[g];
          sum_data[at + g] = sum;
          for (int64_t d = 0; d < pyramid.value_dim; ++d) {
            out_data[(at + g) * pyramid.value_dim + d] = static_cast<T>(worker.out(g)[d] * inverse);
          }
        }
      }
    };
  });
}

void run(bool lists_given, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
         const Tensor& out, const Tensor& gmax, const Tensor& gsum, const std::vector<Tensor>& parents) {
  if (q.size(0) * q.size(1) * q.size(2) == 0) return;
  dispatch_storage("attention_forward", q.scalar_type(), [&](auto storage, auto real) {
    forward_typed<typename decltype(storage)::type, typename decltype(real)::type>(lists_given, q, k, v, args,
                                                                                   out, gmax, gsum, parents);
  });
}

}  // namespace

void attention_forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
                           const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                           const std::vector<Tensor>& parents) {
  run(/*lists_given=*/false, q, k, v, args, out, gmax, gsum, parents);
}

void attention_over_lists_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
                              const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                              const std::vector<Tensor>& parents) {
  run(/*lists_given=*/true, q, k, v, args, out, gmax, gsum, parents);
}

}  // namespace htree::tree_attention
