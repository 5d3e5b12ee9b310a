// The loops of block_rows.h, compiled per instruction set after host/cpu/simd.h (csrc/instances.py).
#pragma once

#include "ops/selection/cpu/block_rows.h"
#include "ops/selection/cpu/selection.h"

namespace htree::HTREE_ISA::blocks {

using tree_attention::BlockOptions;

// A tile of sums stays in registers, beside kGroups vectors of keys: kQueries * kGroups independent chains.
constexpr int kQueries = HTREE_LANES == 16 ? 8 : 4;
constexpr int kGroups = 2;

template <typename T>
void pack(const T* keys, int64_t stride, int64_t count, int64_t block_size, int64_t tokens, int64_t d,
          ScalarOf<T>* packed) {
  using Vec = VecOf<T>;
  constexpr int kWidth = kLanesOf<Vec>;
  if (count < kWidth) {
    std::memset(packed, 0, sizeof(ScalarOf<T>) * static_cast<size_t>(tokens * d * kWidth));
  }
  for (int64_t lane = 0; lane < count; ++lane) {
    for (int64_t token = 0; token < tokens; ++token) {
      const T* row = keys + (lane * block_size + token) * stride;
      ScalarOf<T>* to = packed + token * d * kWidth + lane;
      for (int64_t i = 0; i < d; i += kWidth) {  // d is a multiple of 16, and so of the width
        const Vec values = load(row + i);
        for (int e = 0; e < kWidth; ++e) {
          to[(i + e) * kWidth] = values[e];
        }
      }
    }
  }
}

template <typename T>
void widen(const T* query, int64_t d, ScalarOf<T>* row) {
  for_vectors<T>(d,
                 [&](int64_t i, auto lanes) { store_lanes(row + i, load_lanes(query + i, lanes), lanes); });
}

// kCount groups side by side. A product is one chain over the elements of a key, so that its bits follow from d alone.
template <typename Real, int kCount>
void score_groups(const Real* queries, const Real* packed, int64_t group_stride, int64_t tokens, int64_t d,
                  Real* scores, int64_t score_stride) {
  using Vec = VecOf<Real>;
  constexpr int kWidth = kLanesOf<Vec>;
  Vec best[kQueries][kCount];
  for (int r = 0; r < kQueries; ++r) {
    for (int g = 0; g < kCount; ++g) {
      best[r][g] = load(scores + r * score_stride + g * kWidth);
    }
  }
  for (int64_t token = 0; token < tokens; ++token) {
    Vec sums[kQueries][kCount] = {};
    const Real* keys = packed + token * d * kWidth;
    for (int64_t i = 0; i < d; ++i) {
      Vec key[kCount];
      for (int g = 0; g < kCount; ++g) {
        key[g] = load(keys + g * group_stride + i * kWidth);
      }
      for (int r = 0; r < kQueries; ++r) {
        const Vec query = splat(queries[r * d + i]);
        for (int g = 0; g < kCount; ++g) {
          sums[r][g] += query * key[g];
        }
      }
    }
    for (int r = 0; r < kQueries; ++r) {
      for (int g = 0; g < kCount; ++g) {
        best[r][g] = max(sums[r][g], best[r][g]);  // keeps the second where the first is NaN
      }
    }
  }
  for (int r = 0; r < kQueries; ++r) {
    for (int g = 0; g < kCount; ++g) {
      store(scores + r * score_stride + g * kWidth, best[r][g] + Vec{});  // -0 becomes +0: they are equal
    }
  }
}

template <typename Real>
void score(const Real* queries, const Real* packed, int64_t groups, int64_t group_stride, int64_t tokens,
           int64_t d, Real* scores, int64_t score_stride) {
  constexpr int kWidth = kLanesOf<VecOf<Real>>;
  int64_t g = 0;
  for (; g + kGroups <= groups; g += kGroups) {
    score_groups<Real, kGroups>(queries, packed + g * group_stride, group_stride, tokens, d,
                                scores + g * kWidth, score_stride);
  }
  for (; g < groups; ++g) {
    score_groups<Real, 1>(queries, packed + g * group_stride, group_stride, tokens, d, scores + g * kWidth,
                          score_stride);
  }
}

// Ranks order as scores do, which are never NaN; those of infinities leave ranks free on either side.
template <typename Real>
inline selection::Rank<Real> rank_of_score(Real score) {
  using R = selection::Rank<Real>;
  constexpr R kSign = R{1} << (8 * sizeof(R) - 1);
  R bits;
  std::memcpy(&bits, &score, sizeof bits);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

template <typename Real>
void select(const Real* scores, int64_t num_blocks, const BlockOptions& options, void* scratch,
            int32_t* blocks, Real* list_scores) {
  using R = selection::Rank<Real>;
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const int64_t diagonal = num_blocks - 1;
  const selection::Ranking<R> ranking(scratch, num_blocks);
  if (num_blocks > options.count) {
    for (int64_t b = 0; b < diagonal; ++b) {
      ranking.ranks[b] = rank_of_score(scores[b]);
    }
    for (int64_t b = 0; b < options.first; ++b) {
      ranking.ranks[b] = ~R{0};
    }
    for (int64_t b = num_blocks - options.local; b < diagonal; ++b) {
      ranking.ranks[b] = ~R{0};
    }
  }
  const int64_t best = tree_attention::best_blocks(options, num_blocks);
  const int64_t taken = selection::select_ranked(num_blocks, options.count, best, ranking, blocks);
  for (int64_t i = 0; i < taken; ++i) {
    const bool forced = tree_attention::block_is_forced(options, blocks[i], diagonal);
    list_scores[i] = forced ? kInfinity : scores[blocks[i]];
  }
  for (int64_t i = taken; i < options.count; ++i) {
    blocks[i] = -1;
    list_scores[i] = -kInfinity;
  }
}

template <typename T>
constexpr tree_attention::BlockRows<T, ScalarOf<T>> rows_of() {
  using Real = ScalarOf<T>;
  return {kLanesOf<VecOf<T>>,
          kQueries,
          pack<T>,
          widen<T>,
          score<Real>,
          select<Real>,
          selection::Ranking<selection::Rank<Real>>::bytes};
}

constexpr tree_attention::BlockTables block_tables() {
  return {rows_of<float>(), rows_of<Fp16>(), rows_of<Bf16>(), rows_of<double>()};
}

}  // namespace htree::HTREE_ISA::blocks
