// The gradients of a chunk of the queries of one (batch, key/value head) against layers of keys and values, on the CPU:
// what one thread computes for a query, and what one thread adds for a parent.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/sparse_attention/cpu/query_worker.h"

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

// Where one query's heads lie. The heads of `q` and `dout` stand `q_head` and `dout_head` apart, those of `out` V.
template <typename T, typename Real>
struct GradientRow {
  const T* q;
  int64_t q_head;
  const T* dout;
  int64_t dout_head;
  const T* out;
  const Real* shares = nullptr;  // [G]: dO counts times this; null: times 1
  const Real* dlse = nullptr;    // [G]: gradient of the log-sum-exp; null: none
};

template <typename T, typename Real>
class GradientChunk {
 public:
  // For chunks of a call of `num_queries`; `stride` of them share a list and are never parted.
  GradientChunk(const QueryShape& shape, int64_t num_queries, int64_t stride)
      : shape_(shape), stride_(stride) {
    const int64_t query_bytes = 2 * shape.group * shape.score_stride() * static_cast<int64_t>(sizeof(Real));
    size_ = round_up(std::clamp(kChunkBytes / query_bytes, kMinChunk, kMaxChunk), stride);
    size_ = std::min(size_, round_up(num_queries, stride));
    queries_.resize(size_ * shape.group * shape.row());
    query_gradients_.resize(queries_.size());
    douts_.resize(size_ * shape.group * shape.value_pad);
    deltas_.resize(size_ * shape.group);
    finite_.resize(size_);
    weights_.resize(size_ * shape.group * shape.score_stride());
    dscores_.resize(weights_.size());
    candidates_.resize(size_);
  }

  int64_t size() const { return size_; }

  // Calls f(worker, row) for the first `count` queries of the chunk. All queries of a list are in one task, in order.
  template <typename F>
  void for_queries(int64_t count, F&& f) {
    const int64_t task_queries = round_up(kTaskQueries, stride_);
    parallel_tasks(ceil_div(count, task_queries), [&] {
      return [&, worker = QueryWorker<Real>(shape_), visit_one = f](int64_t task) mutable {
        const int64_t first = task * task_queries;
        for (int64_t row = first; row < std::min(first + task_queries, count); ++row) {
          visit_one(worker, row);
        }
      };
    });
  }

  void load(QueryWorker<Real>& worker, int64_t row, const GradientRow<T, Real>& from, double scale) {
    Real* query = queries_.data() + row * shape_.group * shape_.row();
    worker.load_query(from.q, from.q_head, scale);
    worker.copy_query(query);
    Real probe = 0;  // 0 as long as everything is finite
    for (int64_t j = 0; j < shape_.group * shape_.row(); ++j) {
      probe += query[j] * 0;
    }
    for (int64_t g = 0; g < shape_.group; ++g) {
      const T* dout = from.dout + g * from.dout_head;
      const T* out = from.out + g * shape_.value_dim;
      const Real share = from.shares != nullptr ? from.shares[g] : Real{1};
      Real* to = douts_.data() + (row * shape_.group + g) * shape_.value_pad;
      Real delta = 0;
      for (int64_t d = 0; d < shape_.value_dim; ++d) {
        to[d] = static_cast<Real>(dout[d]) * share;
        delta += to[d] * static_cast<Real>(out[d]);
        probe += to[d] * 0;
      }
      std::fill(to + shape_.value_dim, to + shape_.value_pad, Real{0});
      if (from.dlse != nullptr) delta -= from.dlse[g];
      deltas_[row * shape_.group + g] = delta;
    }
    finite_[row] = probe == 0;
    std::fill_n(query_gradients_.data() + row * shape_.group * shape_.row(), shape_.group * shape_.row(),
                Real{0});
  }

  // What a query meets in the layer at hand. A count of 0: it merges nothing.
  Candidates& candidates(int64_t row) { return candidates_[row]; }
  const Real* query(int64_t row) const { return queries_.data() + row * shape_.group * shape_.row(); }
  Real* scores(int64_t row) { return weights_.data() + row * shape_.group * shape_.score_stride(); }

  // Turns the scores of a query into P and, where `wants_scores`, makes dS, and adds to dq where `wants_query`. gmax and
  // gsum are those of its first head.
  void visit(QueryWorker<Real>& worker, const PackedLayer<Real>& layer, const Rotation<Real>& rotation,
             int64_t row, const std::vector<int32_t>& excluded, int64_t num_excluded, const Real* gmax,
             const Real* gsum, bool wants_scores, bool wants_query) {
    Real* dscores = wants_scores ? dscores_.data() + (scores(row) - weights_.data()) : nullptr;
    query_kernels<Real>().weigh(shape_, layer, candidates_[row], excluded.data(), num_excluded,
                                douts_.data() + row * shape_.group * shape_.value_pad,
                                deltas_.data() + row * shape_.group, gmax, gsum, scores(row), dscores);
    if (wants_query) {
      worker.query_gradient(layer, rotation, candidates_[row], excluded.data(), num_excluded, dscores,
                            query_gradients_.data() + row * shape_.group * shape_.row());
    }
  }

  // Adds what the first `count` queries give to the gradients of a layer, [nodes][row] and [nodes][value_pad]; either may
  // be null. One thread takes all children of a parent.
  void scatter(const PackedLayer<Real>& layer, const Rotation<Real>& rotation, int64_t count, Real* dkeys,
               Real* dvalues) {
    const int64_t r = shape_.r;
    const int64_t num_parents = ceil_div(layer.num_nodes, r);
    inverted_.build(candidates_, count, num_parents);
    parallel_tasks(ceil_div(num_parents, kTaskParents), [&] {
      return [&, rotated = std::vector<Real>(kParentUses * shape_.group * shape_.row()),
              uses = std::vector<ParentUse<Real>>(kParentUses)](int64_t task) mutable {
        for (int64_t p = task * kTaskParents; p < std::min((task + 1) * kTaskParents, num_parents); ++p) {
          const int64_t num_children = std::min(r, layer.num_nodes - p * r);
          for (int64_t e = inverted_.begin[p]; e < inverted_.begin[p + 1]; e += kParentUses) {
            const int64_t uses_here = std::min(kParentUses, inverted_.begin[p + 1] - e);
            for (int64_t u = 0; u < uses_here; ++u) {
              uses[u] = use_of(inverted_.entries[e + u]);
            }
            query_kernels<Real>().node_gradients(shape_, rotation, uses.data(), uses_here, num_children,
                                                 rotated.data(),
                                                 dkeys ? dkeys + p * r * shape_.row() : nullptr,
                                                 dvalues ? dvalues + p * r * shape_.value_pad : nullptr);
          }
        }
      };
    });
  }

  // Rounds the dq of a query's heads, K elements apart, to the dtype of q.
  void write_query(int64_t row, double scale, T* out) const {
    const Real factor = static_cast<Real>(scale);
    for (int64_t g = 0; g < shape_.group; ++g) {
      const Real* from = query_gradients_.data() + (row * shape_.group + g) * shape_.row();
      for (int64_t d = 0; d < shape_.half; ++d) {
        out[g * 2 * shape_.half + d] = static_cast<T>(from[d] * factor);
        out[(g * 2 + 1) * shape_.half + d] = static_cast<T>(from[shape_.half_pad + d] * factor);
      }
    }
  }

 private:
  static constexpr int64_t kChunkBytes = int64_t{16} << 20;
  static constexpr int64_t kMinChunk = 16;   // queries
  static constexpr int64_t kMaxChunk = 256;  // queries
  static constexpr int64_t kTaskQueries = 8;
  static constexpr int64_t kTaskParents = 16;

  ParentUse<Real> use_of(const InvertedList::Entry& entry) const {
    const int64_t at = entry.query * shape_.group * shape_.score_stride() + entry.slot * shape_.r;
    return {weights_.data() + at,
            dscores_.data() + at,
            queries_.data() + entry.query * shape_.group * shape_.row(),
            douts_.data() + entry.query * shape_.group * shape_.value_pad,
            candidates_[entry.query].count - 1 - entry.slot * shape_.r,
            finite_[entry.query] != 0};
  }

  QueryShape shape_;
  int64_t stride_;
  int64_t size_;  // number of queries, a multiple of the stride

  // [size_] rows of the sizes named in query_kernels.h.
  std::vector<Real> queries_, query_gradients_, douts_, deltas_, weights_, dscores_;
  std::vector<uint8_t> finite_;
  std::vector<Candidates> candidates_;
  InvertedList inverted_;
};

}  // namespace htree::tree_attention
