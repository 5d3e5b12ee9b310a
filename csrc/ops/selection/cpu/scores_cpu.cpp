// CPU kernels of compute_scores (docs/semantics/tree_attention.md §1.3, §1.4) and of its IO-only variant
// (docs/semantics/io_only.md §2.3), parallel over (query, kv head).
#include <limits>

#include "host/dispatch.h"
#include "ops/selection/selection_kernels.h"
#include "ops/tree/cpu/stage_cpu.h"
#include "ops/tree/io_formulas.h"

namespace htree::tree_attention {
namespace {

template <typename Work, typename T>
void score_rows(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                const Tensor& sin, const LayerArgs& args, const Tensor& scores,
                const Tensor& num_candidates) {
  using Real = typename Stage<T>::Real;
  const int64_t kv_heads = layer_k.size(2);
  const int64_t group = q.size(2) / kv_heads;
  const int64_t r = args.compression_rate;
  const int64_t max_candidates = args.list_width * r;
  const int64_t span = node_span(r, args.layer);
  const RowStrides q_strides = row_strides(q);
  const RowStrides k_strides = row_strides(layer_k);
  const RowStrides list_strides = row_strides(parents);
  const auto* queries = stored<T>(q);
  const auto* keys = stored<T>(layer_k);
  const auto* lists = parents.const_data_ptr<int32_t>();
  const CpuRotaryTable<Real> rotary{cos.const_data_ptr<Real>(), sin.const_data_ptr<Real>(), cos.stride(0),
                                    sin.stride(0), q.size(3) / 2};
  Real* score_data = scores.mutable_data_ptr<Real>();
  int32_t* counts = num_candidates.mutable_data_ptr<int32_t>();
  const auto score = Work::kIoOnly ? Stage<T>::rows().io_score : Stage<T>::rows().score;

  for_rows(q.size(0), q.size(1), kv_heads, max_candidates * q.size(3), [&] {
    return [&, nodes = std::vector<int64_t>(max_candidates),
            buffer = std::vector<Real>((group + 1) * q.size(3))](int64_t b, int64_t i, int64_t s) mutable {
      const int32_t* list = lists + list_strides.at(b, i, s);
      const int64_t rightmost = (args.t0 + i) / span;
      const int64_t num = candidate_count(count_parents(list, args.list_width), rightmost, r);
      const int64_t row = (b * q.size(1) + i) * kv_heads + s;
      Real* out = score_data + row * max_candidates * group;
      counts[row] = static_cast<int32_t>(num);
      if (num > 0) {
        resolve_nodes(list, num, r, rightmost, layer_k.size(1), nodes.data());
        for (int64_t p = 0; Work::kIoOnly && p < num; ++p) {
          out[p * group] = io_score_base(nodes[p], s, args.t0 + i);
        }
        score(queries + q_strides.at(b, i, s * group), q_strides.d2, group,
              {keys + k_strides.at(b, 0, s), k_strides.d1, nodes.data(), num}, rotary,
              static_cast<Real>(args.scale), buffer.data(), out);
      }
      std::fill(out + num * group, out + max_candidates * group, -std::numeric_limits<Real>::infinity());
    };
  });
}

template <typename Work>
void score_any_dtype(const char* op, const Tensor& q, const Tensor& layer_k, const Tensor& parents,
                     const Tensor& cos, const Tensor& sin, const LayerArgs& args, const Tensor& scores,
                     const Tensor& num_candidates) {
  dispatch_dtype(op, q.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    score_rows<Work, typename decltype(tag)::type>(q, layer_k, parents, cos, sin, args, scores,
                                                   num_candidates);
  });
}

}  // namespace

void compute_scores_cpu(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                        const Tensor& sin, const LayerArgs& args, const Tensor& scores,
                        const Tensor& num_candidates) {
  score_any_dtype<FullWork>("compute_scores", q, layer_k, parents, cos, sin, args, scores, num_candidates);
}

void io_compute_scores_cpu(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                           const Tensor& sin, const LayerArgs& args, const Tensor& scores,
                           const Tensor& num_candidates) {
  score_any_dtype<IoOnly>("io_compute_scores", q, layer_k, parents, cos, sin, args, scores, num_candidates);
}

}  // namespace htree::tree_attention
