// CPU kernels of accumulate_non_topk and compute_and_select (docs/semantics/tree_attention.md §1.7, §1.8):
// rows in parallel.
#include <limits>

#include "host/dispatch.h"
#include "ops/tree_attention/cpu/stages/stage_cpu.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {
namespace {

// A state's three outputs, contiguous: lmax and lsum [rows, heads], lout [rows, heads, width].
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
                             const Tensor& parents, const RotaryTable<typename Stage<T>::Real>& rotary,
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
      kernels.select_bytes(max_candidates, 1) / 8 + 1;  // of 8 bytes, for its alignment

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
        taken = kernels.select(scores.data(), 1, 1, num, top_k, Importance::kLseCausal, scratch.data(),
                               indices, ranks.data());
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
  if (lmax.numel() == 0) {
    return;
  }
  dispatch_dtype("accumulate_non_topk", layer_v.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    accumulate_rows<typename decltype(tag)::type>(layer_v, parents, scores, num_candidates, args,
                                                  {lmax, lsum, lout});
  });
}

void compute_and_select_cpu(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                            const Tensor& parents, const Tensor& cos, const Tensor& sin,
                            const LayerArgs& args, const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                            const Tensor& topk_indices, const Tensor& topk_scores) {
  if (lmax.numel() == 0) {
    return;
  }
  dispatch_dtype("compute_and_select", q.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Real = typename Stage<T>::Real;
    const RotaryTable<Real> rotary{cos.const_data_ptr<Real>(), sin.const_data_ptr<Real>(), cos.stride(0),
                                   sin.stride(0), q.size(3) / 2};
    compute_and_select_rows<T>(q, layer_k, layer_v, parents, rotary, args, {lmax, lsum, lout}, topk_indices,
                               topk_scores);
  });
}

}  // namespace htree::tree_attention
