// Exact, deterministic selection from one row of candidates (docs/semantics/tree_attention.md §1.6),
// for the staged and the fused CPU kernels. It knows no torch; include it after host/cpu/simd.h.
// Scores are [num_heads][stride], with unit stride over the candidates p in [0, n). All arithmetic is
// Scores are [num_heads][stride], with unit stride over the candidates p in [0, n). All arithmetic is in
// Real, float or double. With a selection_span (§1.15) a candidate's score is the largest of its means'
// scores, and `sums`, laid out as the scores, has the sum of exp(score - largest) over its means. It
// multiplies the exponential of the candidate's score. Without a selection_span `sums` is null.
//
// The order is: candidate n-1, then NaN importances, then larger importances; equal ones by smaller p. Each
// candidate has an unsigned `rank`, and equal ranks are ordered by position. That is exactly the order of the
// packed key (rank << 32 | ~p), without its 64 bits (96 for double).
#pragma once

#include "ops/tree/tree_args.h"

namespace htree::HTREE_ISA::selection {

using tree_attention::Importance;

template <typename Real>
struct RankOf;
template <>
struct RankOf<float> {
  using type = uint32_t;
};
template <>
struct RankOf<double> {
  using type = uint64_t;
};
template <typename Real>
using Rank = typename RankOf<Real>::type;

constexpr int kDigitBits = 11;
// So few candidates are ranked by comparing all pairs, which is cheaper than a pass over the histogram.
constexpr int64_t kSmallPool = 48;

// Scratch of one thread to choose among up to `max_candidates` ranks.
template <typename R>
struct Ranking {
  R* ranks;             // [max_candidates], written before a choice
  R* pool;              // [max_candidates]
  uint32_t* histogram;  // [2^kDigitBits]

  static constexpr int64_t bytes(int64_t max_candidates) {
    return 2 * max_candidates * static_cast<int64_t>(sizeof(R)) + (int64_t{4} << kDigitBits);
  }
  // `buffer` has bytes(max_candidates) and is aligned to 8.
  Ranking(void* buffer, int64_t max_candidates) {
    ranks = static_cast<R*>(buffer);
    pool = ranks + max_candidates;
    histogram = reinterpret_cast<uint32_t*>(pool + max_candidates);
  }
};

// The same where the ranks follow from scores (rank_candidates).
template <typename Real>
struct Workspace : Ranking<Rank<Real>> {
  Real* weights;     // [max_candidates]
  Real* importance;  // [max_candidates]

  static constexpr int64_t bytes(int64_t max_candidates) {
    return 2 * max_candidates * static_cast<int64_t>(sizeof(Real)) +
           Ranking<Rank<Real>>::bytes(max_candidates);
  }
  // `buffer` has bytes(max_candidates) and is aligned to 8.
  Workspace(void* buffer, int64_t max_candidates)
      : Ranking<Rank<Real>>(static_cast<Real*>(buffer) + 2 * max_candidates, max_candidates),
        weights(static_cast<Real*>(buffer)),
        importance(weights + max_candidates) {}
};

// ---- importance

// The largest of `count` scores that are not NaN; -inf where there is none.
template <typename Real>
inline Real row_max(const Real* x, int64_t count) {
  constexpr int kWidth = kLanesOf<VecOf<Real>>;
  constexpr int kChains = 4;  // independent of each other, to hide the latency of max
  const Real lowest = -std::numeric_limits<Real>::infinity();
  VecOf<Real> best[kChains] = {splat(lowest), splat(lowest), splat(lowest), splat(lowest)};
  int64_t i = 0;
  for (; i + kChains * kWidth <= count; i += kChains * kWidth) {
    for (int c = 0; c < kChains; ++c) {
      best[c] = max(load(x + i + c * kWidth), best[c]);
    }
  }
  for (; i + kWidth <= count; i += kWidth) {
    best[0] = max(load(x + i), best[0]);
  }
  Real top = horizontal_max(max(max(best[0], best[1]), max(best[2], best[3])));
  for (; i < count; ++i) {
    top = x[i] > top ? x[i] : top;
  }
  return top;
}

template <typename Real>
inline bool has_nan(const Real* x, int64_t count) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) {
    found |= x[i] != x[i];
  }
  return found;
}

// e[i] = exp(x[i] - base) * sums[i], 0 where that is below 2^-126; returns their sum. e may be x.
// base is not -inf.
template <typename Real>
inline Real exp_row(const Real* x, Real base, Real* e, int64_t count, const Real* sums = nullptr) {
  constexpr int kWidth = kLanesOf<VecOf<Real>>;
  constexpr int kChains = 2;
  const VecOf<Real> shift = splat(base);
  const VecOf<Real> smallest = splat(static_cast<Real>(0x1p-126));
  VecOf<Real> sum[kChains] = {};
  const auto step = [&](VecOf<Real> scores, int64_t at, int lanes) {
    VecOf<Real> value = exp(scores - shift);
    if (sums != nullptr) {
      value *= load_partial(sums + at, lanes, Real{0});
    }
    return value < smallest ? VecOf<Real>{} : value;
  };
  int64_t i = 0;
  for (; i + kChains * kWidth <= count; i += kChains * kWidth) {
    for (int c = 0; c < kChains; ++c) {
      const VecOf<Real> value = step(load(x + i + c * kWidth), i + c * kWidth, kWidth);
      store(e + i + c * kWidth, value);
      sum[c] += value;
    }
  }
  for (; i < count; i += kWidth) {
    const int lanes = count - i < kWidth ? static_cast<int>(count - i) : kWidth;
    // Missing lanes add exp(-inf - base) = 0.
    const VecOf<Real> scores = load_partial(x + i, lanes, -std::numeric_limits<Real>::infinity());
    const VecOf<Real> value = step(scores, i, lanes);
    store_partial(e + i, value, lanes);
    sum[0] += value;
  }
  return horizontal_sum(sum[0] + sum[1]);
}

// Writes weights and returns a factor such that weights[p] * factor = exp(scores[p] - LSE) for p < counted,
// with LSE over the first `counted` scores. exp(s - max) / sum is the same number with fewer roundings and
// half the exponentials. LSE = -inf gives 0. LSE = +inf gives NaN where the score is +inf and 0 elsewhere. A
// NaN among the counted scores gives NaN.
template <typename Real>
inline Real normalised_weights(const Real* scores, const Real* sums, int64_t counted, Real* weights) {
  const Real infinity = std::numeric_limits<Real>::infinity();
  const Real top = row_max(scores, counted);
  const Real sum = exp_row(scores, top == -infinity ? Real{0} : top, weights, counted, sums);
  if (top == infinity) {
    return has_nan(scores, counted) ? std::numeric_limits<Real>::quiet_NaN() : Real{1};
  }
  return sum == 0 ? Real{0} : Real{1} / sum;
}

// total[p] = weights[p] * factor, added to what is there unless `first`. Products below 2^-126 count as 0.
template <typename Real>
inline void add_weights(const Real* weights, Real factor, bool first, Real* total, int64_t count) {
  const Real smallest = static_cast<Real>(0x1p-126);
  for (int64_t p = 0; p < count; ++p) {
    const Real scaled = weights[p] * factor;
    const Real weight = scaled < smallest ? Real{0} : scaled;
    total[p] = first ? weight : total[p] + weight;
  }
}

// out[p] for p < n-1: the sum of the heads' weights in the order g = 0 ... num_heads-1. out[n-1] is not
// written: the rightmost candidate is always selected, and its score is read for kLse alone.
template <typename Real>
inline void importances(const Real* scores, const Real* sums, int64_t stride, int64_t num_heads, int64_t n,
                        Importance importance, Real* weights, Real* out) {
  const Real infinity = std::numeric_limits<Real>::infinity();
  const int64_t counted = importance == Importance::kLse ? n : n - 1;
  Real joint = -infinity;
  if (importance == Importance::kExpJoint) {
    for (int64_t g = 0; g < num_heads; ++g) {
      const Real* row = scores + g * stride;
      const Real top = row_max(row, counted);
      joint = top > joint ? top : joint;
      if (has_nan(row, counted)) {
        joint = std::numeric_limits<Real>::quiet_NaN();
        break;
      }
    }
  }
  for (int64_t g = 0; g < num_heads; ++g) {
    const Real* row = scores + g * stride;
    const Real* row_sums = sums != nullptr ? sums + g * stride : nullptr;
    Real factor = 1;
    if (importance != Importance::kExpJoint) {
      factor = normalised_weights(row, row_sums, counted, weights);
    } else if (joint == -infinity) {
      exp_row(row, Real{0}, weights, counted);  // gives zeros
    } else {
      exp_row(row, joint, weights, counted, row_sums);
    }
    add_weights(weights, factor, g == 0, out, n - 1);
  }
}

// ---- ranks

template <typename Real>
inline Rank<Real> rank_of(Real importance) {
  Rank<Real> bits;
  std::memcpy(&bits, &importance, sizeof bits);
  return importance == importance ? bits : ~Rank<Real>{3};  // below the rightmost and what is raised
}

// Fills workspace.ranks[0, n) from scores [num_heads][stride]. n >= 1.
template <typename Real>
inline void rank_candidates(const Real* scores, const Real* sums, int64_t stride, int64_t num_heads,
                            int64_t n, Importance importance, Workspace<Real>& workspace) {
  importances(scores, sums, stride, num_heads, n, importance, workspace.weights, workspace.importance);
  for (int64_t p = 0; p < n - 1; ++p) {
    workspace.ranks[p] = rank_of(workspace.importance[p]);
  }
  workspace.ranks[n - 1] = ~Rank<Real>{0};
}

// The set of the `wanted` largest ranks: all ranks above `rank`, and the first `num_equal` >= 1 positions
// whose rank is equal to it.
template <typename R>
struct Threshold {
  R rank;
  int64_t num_equal;
};

template <typename R>
inline Threshold<R> threshold_by_pairs(const R* ranks, int64_t count, int64_t wanted) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t above = 0;
    int64_t equal = 0;
    for (int64_t j = 0; j < count; ++j) {
      above += ranks[j] > ranks[i];
      equal += ranks[j] == ranks[i];
    }
    if (above < wanted && wanted <= above + equal) {
      return {ranks[i], wanted - above};
    }
  }
  return {0, 0};  // not reached for 1 <= wanted <= count
}

// Works on one digit at a time, the most significant first. After each digit only the ranks that share it
// with the threshold stay in the pool. 1 <= wanted <= count. pool [count] is overwritten, ranks are not.
template <typename R>
inline Threshold<R> find_threshold(const R* ranks, int64_t count, int64_t wanted, R* pool,
                                   uint32_t* histogram) {
  const R* source = ranks;
  for (int high = 8 * static_cast<int>(sizeof(R)); high > 0 && count > kSmallPool; high -= kDigitBits) {
    const int low = high > kDigitBits ? high - kDigitBits : 0;
    const R mask = (R{1} << (high - low)) - 1;
    std::memset(histogram, 0, sizeof(uint32_t) << (high - low));
    R top = 0;
    for (int64_t i = 0; i < count; ++i) {
      top = source[i] > top ? source[i] : top;
      ++histogram[(source[i] >> low) & mask];
    }
    R digit = (top >> low) & mask;
    while (static_cast<int64_t>(histogram[digit]) < wanted) {
      wanted -= histogram[digit];
      --digit;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const R rank = source[i];
      pool[kept] = rank;
      kept += ((rank >> low) & mask) == digit;
    }
    count = kept;
    source = pool;
  }
  // Either every digit was fixed, and the ranks that are left are all equal, or the pool is small.
  return count > kSmallPool ? Threshold<R>{source[0], wanted} : threshold_by_pairs(source, count, wanted);
}

// Raises the ranks of the `best` first candidates above all others but the rightmost's, and those of the
// candidates behind them above the rest (§1.6, open_next). 1 <= best < n.
template <typename R>
inline void raise_neighbours(int64_t n, int64_t best, const Ranking<R>& ranking) {
  R* ranks = ranking.ranks;
  const auto threshold = find_threshold(ranks, n - 1, best, ranking.pool, ranking.histogram);
  int64_t equal_left = threshold.num_equal;
  bool behind = false;
  for (int64_t p = 0; p < n - 1; ++p) {
    const bool equal = ranks[p] == threshold.rank && equal_left > 0;
    const bool chosen = equal || ranks[p] > threshold.rank;
    equal_left -= equal;
    ranks[p] = chosen ? ~R{1} : behind ? ~R{2} : ranks[p];
    behind = chosen;
  }
}

// Writes the min(top_k, n) selected positions in ascending order, the last of them n-1, and returns their
// number. The ranks of the others are filled, below ~R{2}, or ~R{0} for what is selected whatever the others are.
// With open_next `best` candidates come before those behind them, the rightmost among them; else it is 0. top_k >= 1
// and n >= 1. positions [min(top_k, n)].
template <typename R>
inline int64_t select_ranked(int64_t n, int64_t top_k, int64_t best, const Ranking<R>& ranking,
                             int32_t* positions) {
  if (n <= top_k) {
    for (int64_t p = 0; p < n; ++p) {
      positions[p] = static_cast<int32_t>(p);
    }
    return n;
  }
  int64_t taken = 0;
  if (best > 1) {
    raise_neighbours(n, best - 1, ranking);  // the rightmost is one of the best
  }
  if (top_k > 1) {
    const R* ranks = ranking.ranks;
    const auto threshold = find_threshold(ranks, n - 1, top_k - 1, ranking.pool, ranking.histogram);
    int64_t equal_left = threshold.num_equal;
    // At most top_k - 1 are taken before n-1, so a store that need not count stays inside the list.
    for (int64_t p = 0; p < n - 1; ++p) {
      const bool equal = ranks[p] == threshold.rank && equal_left > 0;
      positions[taken] = static_cast<int32_t>(p);
      equal_left -= equal;
      taken += equal || ranks[p] > threshold.rank;
    }
  }
  positions[taken] = static_cast<int32_t>(n - 1);
  return top_k;
}

// Whether the choice of top_k among n candidates depends on a score.
inline bool scores_are_read(int64_t n, int64_t top_k) {
  return n > top_k && top_k > 1;
}

// rank_candidates and select_ranked, without any arithmetic where everything is selected.
template <typename Real>
inline int64_t select_row(const Real* scores, const Real* sums, int64_t stride, int64_t num_heads, int64_t n,
                          int64_t top_k, const tree_attention::SelectionOptions& options,
                          Workspace<Real>& workspace, int32_t* positions) {
  if (scores_are_read(n, top_k)) {
    rank_candidates(scores, sums, stride, num_heads, n, options.importance, workspace);
  }
  const int64_t best = tree_attention::best_with_neighbours(options, top_k, n);
  return select_ranked(n, top_k, best, workspace, positions);
}

}  // namespace htree::HTREE_ISA::selection
