// What one thread needs to work on a key/value head: scratch memory, and the steps of a
// query through one layer.
#pragma once

#include "ops/sparse_attention/cpu/packed_layer.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

// The number of entries before the first -1.
inline int64_t list_length(const int32_t* parents, int64_t width) {
  int64_t length = 0;
  while (length < width && parents[length] != -1) {
    ++length;
  }
  return length;
}

// The candidates of a query, given its list (padded with -1 to `width`) and `rightmost`, its own
// node in the layer.
inline Candidates candidates_of(const int32_t* parents, int64_t width, int64_t rightmost, int64_t num_nodes,
                                int64_t r) {
  Candidates candidates;
  candidates.parents = parents;
  candidates.num_parents = list_length(parents, width);
  candidates.rightmost = rightmost;
  candidates.count = candidate_count(candidates.num_parents, rightmost, r);
  const int64_t own = rightmost / r;
  bool regular =
      candidates.num_parents > 0 && rightmost < num_nodes && parents[candidates.num_parents - 1] == own;
  for (int64_t i = 0; i + 1 < candidates.num_parents; ++i) {
    regular &= parents[i] >= 0 && parents[i] < parents[i + 1];
  }
  candidates.regular = regular && parents[0] >= 0;
  return candidates;
}

// Writes the positions that the nodes of `selected` (padded with -1 to `width`) have among the candidates,
// both ascending, and returns their number. A node that is no candidate is passed over.
inline int64_t positions_of(const Candidates& candidates, int64_t r, const int32_t* selected, int64_t width,
                            int32_t* positions) {
  int64_t count = 0;
  int64_t slot = 0;
  for (int64_t i = 0; i < width && selected[i] != -1; ++i) {
    const int64_t parent = selected[i] / r;
    while (slot < candidates.num_parents && candidates.parents[slot] < parent) {
      ++slot;
    }
    if (slot == candidates.num_parents) break;
    const int64_t position = slot * r + selected[i] % r;
    const bool ascending = count == 0 || positions[count - 1] < position;
    if (selected[i] >= 0 && candidates.parents[slot] == parent && position < candidates.count && ascending) {
      positions[count++] = static_cast<int32_t>(position);
    }
  }
  return count;
}

// next[i] = the node of positions[i], ascending, padded with -1
// to `width`. docs/semantics/tree_attention.md §1.6
inline void write_list(const Candidates& candidates, int64_t r, const int32_t* positions, int64_t count,
                       int64_t width, int32_t* next) {
  for (int64_t i = 0; i < count; ++i) {
    next[i] = static_cast<int32_t>(candidates.parents[positions[i] / r] * r + positions[i] % r);
  }
  if (!candidates.regular) std::sort(next, next + count);
  std::fill(next + count, next + width, -1);
}

template <typename Real>
class QueryWorker {
 public:
  explicit QueryWorker(const QueryShape& shape)
      : shape_(shape),
        kernels_(query_kernels<Real>()),
        q_(shape.group * shape.row()),
        rotated_(shape.group * shape.row()),
        scores_(shape.group * shape.score_stride()),
        partial_(shape.group * shape.value_pad),
        max_(shape.group),
        sum_(shape.group),
        out_(shape.group * shape.value_pad),
        row_positions_(shape.max_parents * shape.r),
        row_nodes_(shape.max_parents * shape.r),
        // Counted in doubles, for the alignment.
        select_workspace_(ceil_div(kernels_.select_workspace_bytes(shape.max_parents * shape.r), 8)) {}

  // q points to the first head of the group for one query; heads stand `head_stride` apart. The scale is
  // applied in Real.
  template <typename T>
  void load_query(const T* q, int64_t head_stride, double scale) {
    for (int64_t g = 0; g < shape_.group; ++g) {
      for (int64_t i = 0; i < shape_.half; ++i) {
        Real* row = q_.data() + g * shape_.row();
        row[i] = static_cast<Real>(q[g * head_stride + i]) * static_cast<Real>(scale);
        row[shape_.half_pad + i] =
            static_cast<Real>(q[g * head_stride + shape_.half + i]) * static_cast<Real>(scale);
      }
    }
  }

  void clear_state() {
    std::fill(max_.begin(), max_.end(), -std::numeric_limits<Real>::infinity());
    std::fill(sum_.begin(), sum_.end(), Real{0});
    std::fill(out_.begin(), out_.end(), Real{0});
  }

  void score(const PackedLayer<Real>& layer, const Rotation<Real>& rotation, const Candidates& candidates) {
    score_into(layer, rotation, candidates, q_.data(), scores_.data());
  }

  // Selects from the scores: writes up to `top_k` positions, ascending, and returns their number.
  int64_t select(const Candidates& candidates, int64_t top_k, int32_t* positions) {
    return select_from(scores_.data(), candidates, top_k, positions);
  }
  // Selects from the scores of span means instead.
  int64_t select_by_span(const PackedSpan<Real>& span, const Rotation<Real>& rotation,
                         const Candidates& candidates, int64_t top_k, int32_t* positions) {
    return select_by_span(span, rotation, candidates, q_.data(), top_k, positions);
  }

  void accumulate(const PackedLayer<Real>& layer, const Candidates& candidates, const int32_t* excluded,
                  int64_t num_excluded) {
    kernels_.accumulate(shape_, layer, candidates, excluded, num_excluded, scores_.data(),
                        {row_positions_.data(), row_nodes_.data()}, partial_.data(),
                        {max_.data(), sum_.data(), out_.data()});
  }

  // Copies the query that load_query() left into `out` [G][row].
  void copy_query(Real* out) const { std::copy(q_.begin(), q_.end(), out); }

  // For the gradients, whose scores are stored outside the worker.
  void score_into(const PackedLayer<Real>& layer, const Rotation<Real>& rotation,
                  const Candidates& candidates, const Real* q, Real* scores) {
    kernels_.score(shape_, layer, rotation, candidates, q, rotated_.data(), scores);
  }
  int64_t select_from(const Real* scores, const Candidates& candidates, int64_t top_k, int32_t* positions) {
    return candidates.count == 0 ? 0
                                 : kernels_.select(shape_, candidates, scores, /*sums=*/nullptr, top_k,
                                                   select_workspace_.data(), positions);
  }
  int64_t select_by_span(const PackedSpan<Real>& span, const Rotation<Real>& rotation,
                         const Candidates& candidates, const Real* q, int64_t top_k, int32_t* positions) {
    if (candidates.count <= top_k || top_k == 1) {  // no score is needed
      return select_from(nullptr, candidates, top_k, positions);
    }
    span_maxima_.resize(shape_.group * shape_.score_stride());
    span_sums_.resize(span_maxima_.size());
    kernels_.score_span(shape_, span, rotation, candidates, q, rotated_.data(), span_maxima_.data(),
                        span_sums_.data());
    return kernels_.select(shape_, candidates, span_maxima_.data(), span_sums_.data(), top_k,
                           select_workspace_.data(), positions);
  }
  void query_gradient(const PackedLayer<Real>& layer, const Rotation<Real>& rotation,
                      const Candidates& candidates, const int32_t* excluded, int64_t num_excluded,
                      const Real* dscores, Real* dq) {
    kernels_.query_gradient(shape_, layer, rotation, candidates, excluded, num_excluded, dscores,
                            {row_positions_.data(), row_nodes_.data()}, rotated_.data(), dq);
  }

  const Real* max() const { return max_.data(); }
  const Real* sum() const { return sum_.data(); }
  const Real* out(int64_t g) const { return out_.data() + g * shape_.value_pad; }

 private:
  QueryShape shape_;
  const QueryKernels<Real>& kernels_;
  std::vector<Real> q_, rotated_, scores_, partial_, max_, sum_, out_;
  std::vector<Real> span_maxima_,
      span_sums_;  // laid out as scores_; empty before the first selection by span means
  std::vector<int32_t> row_positions_, row_nodes_;
  std::vector<double> select_workspace_;
};

}  // namespace htree::tree_attention
