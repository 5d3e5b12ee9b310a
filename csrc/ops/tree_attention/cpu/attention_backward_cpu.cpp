// CPU kernel of attention_backward (docs/semantics/tree_attention.md §1.10). Its result does not depend on
// the number of threads.
//
// It works on one key/value head at a time, in chunks of queries, layer by layer, in two steps. The first
// goes by query: it scores again, writes P and dS into the chunk's buffer, and adds up dq. The second goes by
// destination: an inverse list names, for each parent, the queries of the chunk that have it in their list,
// and one thread sums the gradients of the parent's children in the order of the queries. At the end the
// gradients of the upper layers are pushed down. Temporary memory: the layers laid out twice
// (packed_layer.h), their gradients in fp32 for one head, and the chunk's buffers, about kChunkBytes.
#include <cstdint>
#include <vector>

#include "ops/sparse_attention/cpu/query_kernels.h"
#include "ops/tree_attention/cpu/pyramid.h"

namespace htree::tree_attention {

// The inverse of parent lists: which queries of a chunk have a parent in their list. Entries [begin[p],
// begin[p + 1]) belong to parent p, in ascending order of the query.
struct InvertedList {
  struct Entry {
    int32_t query;
    int32_t slot;
  };
  std::vector<int64_t> begin;
  std::vector<Entry> entries;

  // `candidates` has one entry per query; its count is 0 for a query that merges nothing.
  void build(const std::vector<Candidates>& candidates, int64_t num_queries, int64_t num_parents) {
    begin.assign(num_parents + 1, 0);
    const auto for_each = [&](auto&& visit) {
      for (int64_t i = 0; i < num_queries; ++i) {
        const Candidates& list = candidates[i];
        for (int64_t slot = 0; list.count > 0 && slot < list.num_parents; ++slot) {
          const int64_t parent = list.parents[slot];
          if (parent >= 0 && parent < num_parents) visit(parent, i, slot);
        }
      }
    };
    for_each([&](int64_t parent, int64_t, int64_t) { ++begin[parent + 1]; });
    for (int64_t p = 0; p < num_parents; ++p) {
      begin[p + 1] += begin[p];
    }
    entries.resize(begin[num_parents]);
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for_each([&](int64_t parent, int64_t i, int64_t slot) {
      entries[next[parent]++] = {static_cast<int32_t>(i), static_cast<int32_t>(slot)};
    });
  }
};

namespace {

constexpr int64_t kChunkBytes = int64_t{16} << 20;
constexpr int64_t kMinChunk = 16;   // queries
constexpr int64_t kMaxChunk = 256;  // queries
constexpr int64_t kTaskQueries = 8;
constexpr int64_t kTaskParents = 16;

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
        parents_(parents) {
    const int64_t query_bytes = 2 * shape_.group * shape_.score_stride() * static_cast<int64_t>(sizeof(Real));
    chunk_ = round_up(std::clamp(kChunkBytes / query_bytes, kMinChunk, kMaxChunk), args.selection_stride);
    chunk_ = std::min(chunk_, round_up(pyramid_.num_queries, args.selection_stride));
    queries_.resize(chunk_ * shape_.group * shape_.row());
    query_gradients_.resize(queries_.size());
    douts_.resize(chunk_ * shape_.group * shape_.value_pad);
    deltas_.resize(chunk_ * shape_.group);
    finite_.resize(chunk_);
    weights_.resize(chunk_ * shape_.group * shape_.score_stride());
    dscores_.resize(weights_.size());
    candidates_.resize(chunk_);
    if (parents_.empty()) {
      lists_.resize(pyramid_.depth * ceil_div(chunk_, args.selection_stride) * args.top_k);
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
        for (int64_t begin = 0; begin < pyramid_.num_queries; begin += chunk_) {
          run_chunk(b, h, begin, std::min(begin + chunk_, pyramid_.num_queries));
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
    for_queries(begin, end, [&](QueryWorker<Real>& worker, int64_t i) { load(worker, b, h, begin, i); });
    for (int64_t l = pyramid_.depth - 1; l >= 0; --l) {
      const PackedLayer<Real> layer = pyramid_.layers[l].at(b, h);
      for_queries(
          begin, end,
          [&, positions = std::vector<int32_t>(args_.top_k)](QueryWorker<Real>& worker, int64_t i) mutable {
            visit(worker, layer, b, h, l, begin, i, positions);
          });
      if (wants_keys() || wants_values()) scatter(layer, l, end - begin);
    }
    if (dq_.defined()) {
      for_queries(begin, end, [&](QueryWorker<Real>&, int64_t i) { write_query(b, h, begin, i); });
    }
  }

  // Calls f(worker, i) for the queries of the chunk. All queries of a leader are in one task, in order.
  template <typename F>
  void for_queries(int64_t begin, int64_t end, F&& f) {
    const int64_t task_queries = round_up(kTaskQueries, args_.selection_stride);
    parallel_tasks(ceil_div(end - begin, task_queries), [&] {
      return [&, worker = QueryWorker<Real>(shape_), visit_one = f](int64_t task) mutable {
        const int64_t first = begin + task * task_queries;
        for (int64_t i = first; i < std::min(first + task_queries, end); ++i) {
          visit_one(worker, i);
        }
      };
    });
  }

  void load(QueryWorker<Real>& worker, int64_t b, int64_t h, int64_t begin, int64_t i) {
    const T* q =
        q_.const_data_ptr<T>() + b * q_.stride(0) + i * q_.stride(1) + h * shape_.group * q_.stride(2);
    Real* query = queries_.data() + (i - begin) * shape_.group * shape_.row();
    worker.load_query(q, q_.stride(2), args_.scale);
    worker.copy_query(query);
    Real probe = 0;  // 0 as long as everything is finite
    for (int64_t j = 0; j < shape_.group * shape_.row(); ++j) {
      probe += query[j] * 0;
    }
    const int64_t at = head_row(b, h, i) * pyramid_.value_dim;
    const T* out = out_.const_data_ptr<T>() + at;
    for (int64_t g = 0; g < shape_.group; ++g) {
      const T* dout = dout_.const_data_ptr<T>() + b * dout_.stride(0) + i * dout_.stride(1) +
                      (h * shape_.group + g) * dout_.stride(2);
      Real* row = douts_.data() + ((i - begin) * shape_.group + g) * shape_.value_pad;
      Real delta = 0;
      for (int64_t d = 0; d < pyramid_.value_dim; ++d) {
        row[d] = static_cast<Real>(dout[d]);
        delta += row[d] * static_cast<Real>(out[g * pyramid_.value_dim + d]);
        probe += row[d] * 0;
      }
      std::fill(row + pyramid_.value_dim, row + shape_.value_pad, Real{0});
      if (dlse_.defined()) delta -= dlse_.const_data_ptr<Real>()[head_row(b, h, i) + g];
      deltas_[(i - begin) * shape_.group + g] = delta;
    }
    finite_[i - begin] = probe == 0;
    std::fill_n(query_gradients_.data() + (i - begin) * shape_.group * shape_.row(),
                shape_.group * shape_.row(), Real{0});
  }

  // The list of query row i at layer l: the given one, or the chunk's own.
  int32_t* list_of(int64_t b, int64_t h, int64_t l, int64_t begin, int64_t i) {
    const int64_t row = i / args_.selection_stride;
    if (!parents_.empty()) {
      return const_cast<int32_t*>(parents_[l].const_data_ptr<int32_t>()) + b * parents_[l].stride(0) +
             (row * pyramid_.kv_heads + h) * args_.top_k;
    }
    const int64_t rows = ceil_div(chunk_, args_.selection_stride);
    return lists_.data() + (l * rows + row - begin / args_.selection_stride) * args_.top_k;
  }

  // Works on one query at one layer: selects its list again if need be, then P, dS and dq.
  void visit(QueryWorker<Real>& worker, const PackedLayer<Real>& layer, int64_t b, int64_t h, int64_t l,
             int64_t begin, int64_t i, std::vector<int32_t>& positions) {
    const int64_t r = args_.compression_rate;
    const int64_t token = token_of_query(args_, pyramid_.num_queries, i);
    const int64_t row = i - begin;
    const bool selects = parents_.empty() && i % args_.selection_stride == 0;
    int32_t* list = list_of(b, h, l, begin, i);
    if (selects && l + 1 == pyramid_.depth) pyramid_.write_top_list(token, r, args_.top_k, list);
    Candidates& candidates = candidates_[row];
    candidates = candidates_of(list, std::min(args_.top_k, shape_.max_parents), token / pyramid_.spans[l],
                               layer.num_nodes, r);
    int64_t num_excluded = 0;
    if (l > 0 && !parents_.empty()) {
      num_excluded =
          positions_of(candidates, r, list_of(b, h, l - 1, begin, i), args_.top_k, positions.data());
    }
    const bool merges =
        l == 0 || (parents_.empty() ? candidates.count > args_.top_k : candidates.count > num_excluded);
    const Real* query = queries_.data() + row * shape_.group * shape_.row();
    const int64_t at = row * shape_.group * shape_.score_stride();
    Real* weights = weights_.data() + at;
    if (merges) worker.score_into(layer, pyramid_.rotation(), candidates, query, weights);
    if (selects && l > 0) {
      const PackedSpans<Real>& means = pyramid_.span_means[l];
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
    Real* dscores = wants_scores() ? dscores_.data() + at : nullptr;
    query_kernels<Real>().weigh(shape_, layer, candidates, positions.data(), num_excluded,
                                douts_.data() + row * shape_.group * shape_.value_pad,
                                deltas_.data() + row * shape_.group, gmax_.const_data_ptr<Real>() + heads,
                                gsum_.const_data_ptr<Real>() + heads, weights, dscores);
    if (dq_.defined()) {
      worker.query_gradient(layer, pyramid_.rotation(), candidates, positions.data(), num_excluded, dscores,
                            query_gradients_.data() + row * shape_.group * shape_.row());
    }
  }

  // Adds the chunk's contribution to the gradients of layer l; one thread takes all children of a parent.
  void scatter(const PackedLayer<Real>& layer, int64_t l, int64_t num_queries) {
    const int64_t r = args_.compression_rate;
    const int64_t num_parents = ceil_div(layer.num_nodes, r);
    inverted_.build(candidates_, num_queries, num_parents);
    Real* dkeys = wants_keys() ? key_gradients_[l].data() : nullptr;
    Real* dvalues = wants_values() ? value_gradients_[l].data() : nullptr;
    parallel_tasks(ceil_div(num_parents, kTaskParents), [&] {
      return [&, rotated = std::vector<Real>(kParentUses * shape_.group * shape_.row()),
              uses = std::vector<ParentUse<Real>>(kParentUses)](int64_t task) mutable {
        for (int64_t p = task * kTaskParents; p < std::min((task + 1) * kTaskParents, num_parents); ++p) {
          const int64_t num_children = std::min(r, layer.num_nodes - p * r);
          for (int64_t e = inverted_.begin[p]; e < inverted_.begin[p + 1]; e += kParentUses) {
            const int64_t count = std::min(kParentUses, inverted_.begin[p + 1] - e);
            for (int64_t u = 0; u < count; ++u) {
              uses[u] = use_of(inverted_.entries[e + u]);
            }
            query_kernels<Real>().node_gradients(shape_, pyramid_.rotation(), uses.data(), count,
                                                 num_children, rotated.data(),
                                                 dkeys ? dkeys + p * r * shape_.row() : nullptr,
                                                 dvalues ? dvalues + p * r * shape_.value_pad : nullptr);
          }
        }
      };
    });
  }

  ParentUse<Real> use_of(const InvertedList::Entry& entry) const {
    const int64_t at = entry.query * shape_.group * shape_.score_stride() + entry.slot * shape_.r;
    return {weights_.data() + at,
            dscores_.data() + at,
            queries_.data() + entry.query * shape_.group * shape_.row(),
            douts_.data() + entry.query * shape_.group * shape_.value_pad,
            candidates_[entry.query].count - 1 - entry.slot * shape_.r,
            finite_[entry.query] != 0};
  }

  void write_query(int64_t b, int64_t h, int64_t begin, int64_t i) {
    T* out = dq_.mutable_data_ptr<T>() + head_row(b, h, i) * 2 * shape_.half;
    const Real scale = static_cast<Real>(args_.scale);
    for (int64_t g = 0; g < shape_.group; ++g) {
      const Real* row = query_gradients_.data() + ((i - begin) * shape_.group + g) * shape_.row();
      for (int64_t d = 0; d < shape_.half; ++d) {
        out[g * 2 * shape_.half + d] = static_cast<T>(row[d] * scale);
        out[(g * 2 + 1) * shape_.half + d] = static_cast<T>(row[shape_.half_pad + d] * scale);
      }
    }
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
  int64_t chunk_;  // number of queries, a multiple of the selection stride

  // For the chunk: [chunk] rows of the sizes named in query_kernels.h.
  std::vector<Real> queries_, query_gradients_, douts_, deltas_, weights_, dscores_;
  std::vector<uint8_t> finite_;
  std::vector<Candidates> candidates_;
  std::vector<int32_t> lists_;  // [depth][chunk / stride][k]
  InvertedList inverted_;

  // For the head, per layer: [nodes][row] and [nodes][value_pad].
  std::vector<std::vector<Real>> key_gradients_, value_gradients_;
};

}  // namespace

void attention_backward_cpu(const Tensor& dout, const Tensor& dlse, const Tensor& q, const Tensor& k,
                            const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                            const std::vector<Tensor>& parents, const AttentionArgs& args, const Tensor& dq,
                            const Tensor& dk, const Tensor& dv) {
  if (!dq.defined() && !dk.defined() && !dv.defined()) return;
  if (q.size(0) * q.size(1) * q.size(2) == 0) {
    for (const Tensor& gradient : {dq, dk, dv}) {
      if (gradient.defined()) gradient.zero_();
    }
    return;
  }
  dispatch_storage("attention_backward", q.scalar_type(), [&](auto storage, auto real) {
    Backward<typename decltype(storage)::type, typename decltype(real)::type>(dout, dlse, q, k, v, out, gmax,
                                                                              gsum, parents, args, dq, dk, dv)
        .run();
  });
}

}  // namespace htree::tree_attention
