// CPU kernel of attention_backward (docs/semantics/tree_attention.md §1.10). Its result does not depend on
// the number of threads.
//
// It works on one key/value head at a time, in chunks of queries, layer by layer, in two steps. The first
// goes by query: it scores again, writes P and dS into the chunk's buffer, and adds up dq. The second goes by
// destination: an inverse list names, for each parent, the queries of the chunk that have it in their list,
// and one thread sums the gradients of the parent's children in the order of the queries. At the end the
// gradients of the upper layers are pushed down. Temporary memory: the layers laid out twice
// (packed_layer.h), their gradients in fp32 for one head, and the chunk's buffers (gradient_chunk.h).
#include <cstdint>
#include <vector>

#include "host/outputs.h"
#include "ops/sparse_attention/cpu/gradient_chunk.h"
#include "ops/tree_attention/cpu/pyramid.h"

namespace htree::tree_attention {

namespace {

template <typename T, typename Real>
class Backward {
 public:
  Backward(const Tensor& dout, const Tensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
           const Tensor& out, const Tensor& gmax, const Tensor& gsum, const std::vector<Tensor>& parents,
           const AttentionArgs& args, const Tensor& dq, const Tensor& dk, const Tensor& dv)
      : args_(args),
        pyramid_(q, k, v, args, /*selects=*/parents.empty(), /*gradients=*/true, Type<T>{}),
        shape_(pyramid_.shape),
        dout_(dout),
        dlse_(dlse),
        out_(out.contiguous()),
        gmax_(gmax.contiguous()),
        gsum_(gsum.contiguous()),
        q_(q),
        dq_(dq),
        dk_(dk),
        dv_(dv),
        parents_(parents),
        chunk_(shape_, pyramid_.num_queries, args.selection_stride) {
    if (parents_.empty()) {
      lists_.resize(pyramid_.depth * ceil_div(chunk_.size(), args.selection_stride) * args.top_k);
    }
    for (const auto& layer : pyramid_.layers) {
      key_gradients_.emplace_back(wants_keys() ? layer.num_nodes() * shape_.row() : 0);
      value_gradients_.emplace_back(wants_values() ? layer.num_nodes() * shape_.value_pad : 0);
    }
  }

  void run() {
    for (int64_t b = 0; b < pyramid_.batch; ++b) {
      for (int64_t h = 0; h < pyramid_.kv_heads; ++h) {
        for (int64_t l = 0; l < pyramid_.depth; ++l) {
          std::fill(key_gradients_[l].begin(), key_gradients_[l].end(), Real{0});
          std::fill(value_gradients_[l].begin(), value_gradients_[l].end(), Real{0});
        }
        for (int64_t begin = 0; begin < pyramid_.num_queries; begin += chunk_.size()) {
          run_chunk(b, h, begin, std::min(begin + chunk_.size(), pyramid_.num_queries));
        }
        if (wants_keys()) write_keys(b, h);
        if (wants_values()) write_values(b, h);
      }
    }
  }

 private:
  bool wants_keys() const { return dk_.defined(); }
  bool wants_values() const { return dv_.defined(); }
  bool wants_scores() const { return dq_.defined() || dk_.defined(); }

  // Offset of query row i and head 0 of the group in tensors [B, T_q, H].
  int64_t head_row(int64_t b, int64_t h, int64_t i) const {
    return (b * pyramid_.num_queries + i) * pyramid_.heads + h * shape_.group;
  }

  void run_chunk(int64_t b, int64_t h, int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    chunk_.for_queries(count,
                       [&](QueryWorker<Real>& worker, int64_t row) { load(worker, b, h, begin + row, row); });
    for (int64_t l = pyramid_.depth - 1; l >= 0; --l) {
      const PackedLayer<Real> layer = pyramid_.layers[l].at(b, h);
      chunk_.for_queries(count, [&, positions = std::vector<int32_t>(args_.top_k)](QueryWorker<Real>& worker,
                                                                                   int64_t row) mutable {
        visit(worker, layer, b, h, l, begin, begin + row, positions);
      });
      if (wants_keys() || wants_values()) {
        chunk_.scatter(layer, pyramid_.rotation(), count, wants_keys() ? key_gradients_[l].data() : nullptr,
                       wants_values() ? value_gradients_[l].data() : nullptr);
      }
    }
    if (dq_.defined()) {
      chunk_.for_queries(count, [&](QueryWorker<Real>&, int64_t row) {
        chunk_.write_query(row, args_.scale,
                           dq_.mutable_data_ptr<T>() + head_row(b, h, begin + row) * 2 * shape_.half);
      });
    }
  }

  void load(QueryWorker<Real>& worker, int64_t b, int64_t h, int64_t i, int64_t row) {
    const int64_t at = head_row(b, h, i) * pyramid_.value_dim;
    GradientRow<T, Real> from{};
    from.q = q_.const_data_ptr<T>() + b * q_.stride(0) + i * q_.stride(1) + h * shape_.group * q_.stride(2);
    from.q_head = q_.stride(2);
    from.dout = dout_.const_data_ptr<T>() + b * dout_.stride(0) + i * dout_.stride(1) +
                h * shape_.group * dout_.stride(2);
    from.dout_head = dout_.stride(2);
    from.out = out_.const_data_ptr<T>() + at;
    from.dlse = dlse_.defined() ? dlse_.const_data_ptr<Real>() + head_row(b, h, i) : nullptr;
    chunk_.load(worker, row, from, args_.scale);
  }

  // The list of query row i at layer l: the given one, or the chunk's own.
  int32_t* list_of(int64_t b, int64_t h, int64_t l, int64_t begin, int64_t i) {
    const int64_t row = i / args_.selection_stride;
    if (!parents_.empty()) {
      return const_cast<int32_t*>(parents_[l].const_data_ptr<int32_t>()) + b * parents_[l].stride(0) +
             (row * pyramid_.kv_heads + h) * args_.top_k;
    }
    const int64_t rows = ceil_div(chunk_.size(), args_.selection_stride);
    return lists_.data() + (l * rows + row - begin / args_.selection_stride) * args_.top_k;
  }

  // Works on one query at one layer: selects its list again if need be, then P, dS and dq.
  void visit(QueryWorker<Real>& worker, const PackedLayer<Real>& layer, int64_t b, int64_t h, int64_t l,
             int64_t begin, int64_t i, std::vector<int32_t>& positions) {
    const int64_t r = args_.compression_rate;
    const int64_t token = token_of_query(args_, pyramid_.num_queries, i);
    const int64_t row = i - begin;
    const bool selects = parents_.empty() && i % args_.selection_stride == 0;
    Candidates& candidates = chunk_.candidates(row);
    candidates = l + 1 == pyramid_.depth
                     ? pyramid_.top_candidates(token, r)
                     : candidates_of(list_of(b, h, l, begin, i), std::min(args_.top_k, shape_.max_parents),
                                     token / pyramid_.spans[l], layer.num_nodes, r);
    int64_t num_excluded = 0;
    if (l > 0 && !parents_.empty()) {
      num_excluded =
          positions_of(candidates, r, list_of(b, h, l - 1, begin, i), args_.top_k, positions.data());
    }
    const bool merges =
        l == 0 || (parents_.empty() ? candidates.count > args_.top_k : candidates.count > num_excluded);
    const Real* query = chunk_.query(row);
    Real* weights = chunk_.scores(row);
    if (merges) worker.score_into(layer, pyramid_.rotation(), candidates, query, weights);
    if (selects && l > 0) {
      const CpuPackedSpans<Real>& means = pyramid_.span_means[l];
      const int64_t count = means.empty()
                                ? worker.select_from(weights, candidates, args_.top_k, positions.data())
                                : worker.select_by_span(means.at(b, h), pyramid_.rotation(), candidates,
                                                        query, args_.top_k, positions.data());
      write_list(candidates, r, positions.data(), count, args_.top_k, list_of(b, h, l - 1, begin, i));
    }
    if (!merges) {
      candidates.count = 0;
      return;
    }
    if (l > 0 && parents_.empty()) {
      num_excluded =
          positions_of(candidates, r, list_of(b, h, l - 1, begin, i), args_.top_k, positions.data());
    }
    const int64_t heads = head_row(b, h, i);
    chunk_.visit(worker, layer, pyramid_.rotation(), row, positions, num_excluded,
                 gmax_.const_data_ptr<Real>() + heads, gsum_.const_data_ptr<Real>() + heads, wants_scores(),
                 dq_.defined());
  }

  // Calls f(node, child, share, parent) for the nodes of layer l; `share` = 1 / c is what
  // the parent's gradient counts.
  template <typename F>
  void for_nodes(int64_t l, F&& f) {
    const int64_t r = args_.compression_rate;
    const int64_t num_nodes = pyramid_.layers[l].num_nodes();
    at::parallel_for(0, num_nodes, 256, [&](int64_t first, int64_t last) {
      for (int64_t node = first; node < last; ++node) {
        const int64_t parent = node / r;
        f(node, node - parent * r, Real{1} / static_cast<Real>(std::min(r, num_nodes - parent * r)), parent);
      }
    });
  }

  // Calls f with the elements of a gradient: rounded, or as they were summed.
  template <typename F>
  void with_elements_of(const Tensor& gradient, F&& f) {
    if (gradient.scalar_type() == c10::CppTypeToScalarType<T>::value) {
      f(gradient.mutable_data_ptr<T>());
    } else {
      f(gradient.mutable_data_ptr<Real>());
    }
  }

  void write_keys(int64_t b, int64_t h) {
    const Rotation<Real> rotation = pyramid_.rotation();
    const int64_t half = shape_.half;
    for (int64_t l = pyramid_.depth - 1; l >= 0; --l) {
      const Real* above = l + 1 < pyramid_.depth ? key_gradients_[l + 1].data() : nullptr;
      Real* own = key_gradients_[l].data();
      for_nodes(l, [&](int64_t node, int64_t child, Real share, int64_t parent) {
        Real* row = own + node * shape_.row();
        for (int64_t d = 0; d < half; ++d) {
          const int64_t hi_at = shape_.half_pad + d;
          Real lo = row[d];
          Real hi = row[hi_at];
          if (rotation.cos != nullptr) {  // K' was rotated by `child`: rotate back
            const Real c = rotation.cos[child * shape_.half_pad + d];
            const Real s = rotation.sin[child * shape_.half_pad + d];
            row[d] = lo * c + hi * s;
            row[hi_at] = hi * c - lo * s;
          }
          if (above != nullptr) {
            row[d] += above[parent * shape_.row() + d] * share;
            row[hi_at] += above[parent * shape_.row() + hi_at] * share;
          }
        }
      });
    }
    with_elements_of(dk_, [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      for_nodes(0, [&](int64_t node, int64_t, Real, int64_t) {
        const Real* row = key_gradients_[0].data() + node * shape_.row();
        Out* target = out + ((b * pyramid_.num_tokens + node) * pyramid_.kv_heads + h) * 2 * half;
        for (int64_t d = 0; d < half; ++d) {
          target[d] = static_cast<Out>(row[d]);
          target[half + d] = static_cast<Out>(row[shape_.half_pad + d]);
        }
      });
    });
  }

  void write_values(int64_t b, int64_t h) {
    for (int64_t l = pyramid_.depth - 2; l >= 0; --l) {
      const Real* above = value_gradients_[l + 1].data();
      Real* own = value_gradients_[l].data();
      for_nodes(l, [&](int64_t node, int64_t, Real share, int64_t parent) {
        for (int64_t d = 0; d < pyramid_.value_dim; ++d) {
          own[node * shape_.value_pad + d] += above[parent * shape_.value_pad + d] * share;
        }
      });
    }
    with_elements_of(dv_, [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      for_nodes(0, [&](int64_t node, int64_t, Real, int64_t) {
        const Real* row = value_gradients_[0].data() + node * shape_.value_pad;
        Out* target = out + ((b * pyramid_.num_tokens + node) * pyramid_.kv_heads + h) * pyramid_.value_dim;
        for (int64_t d = 0; d < pyramid_.value_dim; ++d) {
          target[d] = static_cast<Out>(row[d]);
        }
      });
    });
  }

  AttentionArgs args_;
  Pyramid<Real> pyramid_;
  QueryShape shape_;
  Tensor dout_, dlse_, out_, gmax_, gsum_, q_, dq_, dk_, dv_;
  std::vector<Tensor> parents_;
  GradientChunk<T, Real> chunk_;
  std::vector<int32_t> lists_;  // [depth][chunk / stride][k]

  // For the head, per layer: [nodes][row] and [nodes][value_pad].
  std::vector<std::vector<Real>> key_gradients_, value_gradients_;
};

}  // namespace

void attention_backward_cpu(const Tensor& dout, const Tensor& dlse, const Tensor& q, const Tensor& k,
                            const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                            const std::vector<Tensor>& parents, const AttentionArgs& args, const Tensor& dq,
                            const Tensor& dk, const Tensor& dv) {
  if (!dq.defined() && !dk.defined() && !dv.defined()) return;
  if (q.size(0) * q.size(1) * q.size(2) == 0) return fill_zeros({dq, dk, dv});
  dispatch_storage("attention_backward", q.scalar_type(), [&](auto storage, auto real) {
    Backward<typename decltype(storage)::type, typename decltype(real)::type>(dout, dlse, q, k, v, out, gmax,
                                                                              gsum, parents, args, dq, dk, dv)
        .run();
  });
}

}  // namespace htree::tree_attention
