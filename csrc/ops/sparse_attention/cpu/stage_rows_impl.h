// The row kernels of stage_rows.h. Include it after host/cpu/simd.h, which says for which instruction set.
#pragma once

#include "host/cpu/simd.h"
#include "ops/selection/cpu/selection.h"
#include "ops/tree/cpu/stage_rows.h"
#include "ops/tree/io_weights.h"

namespace htree::HTREE_ISA {

using tree_attention::CandidateRows;
using tree_attention::CpuRotaryTable;
using tree_attention::Importance;
using tree_attention::StageRows;

// ---- build

// Four vectors at a time, so that one visit to a child's row uses whole cache lines for the half types too.
template <typename T>
void mean_row(const T* first, int64_t row_stride, int64_t count, int64_t width, T* out) {
  constexpr int kWidth = kLanesOf<VecOf<T>>;
  constexpr int kBlock = 4;
  const ScalarOf<T> divisor = static_cast<ScalarOf<T>>(count);
  int64_t i = 0;
  for (; i + kBlock * kWidth <= width; i += kBlock * kWidth) {
    VecOf<T> sum[kBlock];
    for (int j = 0; j < kBlock; ++j) {
      sum[j] = load(first + i + j * kWidth);
    }
    for (int64_t c = 1; c < count; ++c) {
      const T* row = first + c * row_stride + i;
      for (int j = 0; j < kBlock; ++j) {
        sum[j] += load(row + j * kWidth);
      }
    }
    for (int j = 0; j < kBlock; ++j) {
      store(out + i + j * kWidth, sum[j] / divisor);
    }
  }
  for_vectors<T>(width - i, [&](int64_t offset, auto lanes) {
    VecOf<T> sum = load_lanes(first + i + offset, lanes);
    for (int64_t c = 1; c < count; ++c) {
      sum += load_lanes(first + c * row_stride + i + offset, lanes);
    }
    store_lanes(out + i + offset, sum / divisor, lanes);
  });
}

template <typename T>
void share_row(const T* row, int64_t count, int64_t width, T* out) {
  const ScalarOf<T> divisor = static_cast<ScalarOf<T>>(count);
  for_vectors<T>(width, [&](int64_t i, auto lanes) {
    store_lanes(out + i, load_lanes(row + i, lanes) / divisor, lanes);
  });
}

// ---- rope

// Writes y = R x, times `scale`, as type Out. The sines take the sign of `direction`.
template <typename T, typename Out>
inline void rotate_into(const T* x, const ScalarOf<T>* cos, const ScalarOf<T>* sin, ScalarOf<T> direction,
                        ScalarOf<T> scale, int64_t half, Out* out) {
  for_vectors<T>(half, [&](int64_t i, auto lanes) {
    const VecOf<T> low = load_lanes(x + i, lanes) * scale;
    const VecOf<T> high = load_lanes(x + half + i, lanes) * scale;
    const VecOf<T> c = load_lanes(cos + i, lanes);
    const VecOf<T> s = load_lanes(sin + i, lanes) * direction;
    store_lanes(out + i, low * c - high * s, lanes);
    store_lanes(out + half + i, low * s + high * c, lanes);
  });
}

template <typename T>
void rotate_row(const T* x, const ScalarOf<T>* cos, const ScalarOf<T>* sin, bool inverse, int64_t half,
                T* out) {
  rotate_into(x, cos, sin, static_cast<ScalarOf<T>>(inverse ? -1 : 1), ScalarOf<T>{1}, half, out);
}

// ---- scores

template <typename R>
inline R dot(const R* a, const R* b, int64_t width) {
  VecOf<R> sum = {};
  for_vectors<R>(width,
                 [&](int64_t i, auto lanes) { sum += load_lanes(a + i, lanes) * load_lanes(b + i, lanes); });
  return horizontal_sum(sum);
}

template <typename T>
inline ScalarOf<T> row_sum(const T* row, int64_t width) {
  VecOf<T> sum = {};
  for_vectors<T>(width, [&](int64_t i, auto lanes) { sum += load_lanes(row + i, lanes); });
  return horizontal_sum(sum);
}

template <typename Work, typename T>
void score_row(const T* q, int64_t head_stride, int64_t num_heads, const CandidateRows<T>& keys,
               const CpuRotaryTable<ScalarOf<T>>& rotary, ScalarOf<T> scale, ScalarOf<T>* buffer,
               ScalarOf<T>* scores) {
  const int64_t half = rotary.half;
  ScalarOf<T>* key = buffer + num_heads * 2 * half;
  const auto angles = [&](int64_t p) {
    return row_sum(rotary.cos + p * rotary.cos_stride, half) +
           row_sum(rotary.sin + p * rotary.sin_stride, half);
  };
  for (int64_t g = 0; g < num_heads; ++g) {
    if constexpr (Work::kIoOnly) {
      buffer[g] = static_cast<ScalarOf<T>>(tree_attention::kIoQueryWeight) *
                      (row_sum(q + g * head_stride, 2 * half) + angles(keys.num - 1)) +
                  static_cast<ScalarOf<T>>(tree_attention::kIoHeadWeight) * static_cast<ScalarOf<T>>(g);
      continue;
    }
    rotate_into(q + g * head_stride, rotary.cos + (keys.num - 1) * rotary.cos_stride,
                rotary.sin + (keys.num - 1) * rotary.sin_stride, ScalarOf<T>{1}, scale, half,
                buffer + g * 2 * half);
  }
  for (int64_t p = 0; p < keys.num; ++p) {
    ScalarOf<T>* out = scores + p * num_heads;
    if (keys.nodes[p] < 0) {
      for (int64_t g = 0; g < num_heads; ++g) {
        out[g] = -std::numeric_limits<ScalarOf<T>>::infinity();
      }
      continue;
    }
    if constexpr (Work::kIoOnly) {
      const ScalarOf<T> shared = out[0] +
                                 static_cast<ScalarOf<T>>(tree_attention::kIoKeyWeight) *
                                     row_sum(keys.layer + keys.nodes[p] * keys.node_stride, 2 * half) +
                                 static_cast<ScalarOf<T>>(tree_attention::kIoQueryWeight) * angles(p);
      for (int64_t g = 0; g < num_heads; ++g) {
        out[g] = shared + buffer[g];
      }
      continue;
    }
    rotate_into(keys.layer + keys.nodes[p] * keys.node_stride, rotary.cos + p * rotary.cos_stride,
                rotary.sin + p * rotary.sin_stride, ScalarOf<T>{1}, ScalarOf<T>{1}, half, key);
    for (int64_t g = 0; g < num_heads; ++g) {
      out[g] = dot(buffer + g * 2 * half, key, 2 * half);
    }
  }
}

// ---- states

// out[g] += weights[g][p] * value_p over the candidates that are present and have a score above -inf for some
// head. A value without any weight is not touched: 0 * NaN would be NaN.
template <typename T>
inline void add_values(const CandidateRows<T>& values, const ScalarOf<T>* weights, const ScalarOf<T>* scores,
                       int64_t score_stride, int64_t num_heads, int64_t width, ScalarOf<T>* value,
                       ScalarOf<T>* out) {
  for (int64_t p = 0; p < values.num; ++p) {
    if (values.nodes[p] < 0) {
      continue;
    }
    const T* stored = values.layer + values.nodes[p] * values.node_stride;
    for_vectors<T>(
        width, [&](int64_t i, auto lanes) { store_lanes(value + i, load_lanes(stored + i, lanes), lanes); });
    for (int64_t g = 0; g < num_heads; ++g) {
      if (scores[p * score_stride + g] == -std::numeric_limits<ScalarOf<T>>::infinity()) {
        continue;
      }
      const ScalarOf<T> weight = weights[g * values.num + p];
      ScalarOf<T>* sum = out + g * width;
      for_vectors<ScalarOf<T>>(width, [&](int64_t i, auto lanes) {
        store_lanes(sum + i, load_lanes(sum + i, lanes) + load_lanes(value + i, lanes) * weight, lanes);
      });
    }
  }
}

template <typename T>
void accumulate_row(const ScalarOf<T>* scores, int64_t score_stride, int64_t num_heads,
                    const CandidateRows<T>& values, int64_t width, ScalarOf<T>* buffer, ScalarOf<T>* lmax,
                    ScalarOf<T>* lsum, ScalarOf<T>* lout) {
  const ScalarOf<T> infinity = std::numeric_limits<ScalarOf<T>>::infinity();
  for (int64_t g = 0; g < num_heads; ++g) {
    ScalarOf<T>* weights = buffer + g * values.num;
    for (int64_t p = 0; p < values.num; ++p) {
      weights[p] = values.nodes[p] < 0 ? -infinity : scores[p * score_stride + g];
    }
    const ScalarOf<T> top = selection::row_max(weights, values.num);
    lmax[g] = selection::has_nan(weights, values.num) ? std::numeric_limits<ScalarOf<T>>::quiet_NaN() : top;
    lsum[g] = selection::exp_row(weights, top == -infinity ? ScalarOf<T>{0} : top, weights, values.num);
  }
  std::memset(lout, 0, sizeof(ScalarOf<T>) * static_cast<size_t>(num_heads * width));
  add_values(values, buffer, scores, score_stride, num_heads, width, buffer + num_heads * values.num, lout);
}

template <typename T>
void normalize_row(const ScalarOf<T>* row, ScalarOf<T> sum, int64_t width, T* out) {
  for_vectors<T>(
      width, [&](int64_t i, auto lanes) { store_lanes(out + i, load_lanes(row + i, lanes) / sum, lanes); });
}

// ---- selection

template <typename R>
int64_t select_bytes(int64_t max_candidates, int64_t num_heads) {
  return selection::Workspace<R>::bytes(max_candidates) +
         static_cast<int64_t>(sizeof(R)) * max_candidates * num_heads;
}

template <typename Work, typename R>
int64_t select_row(const R* scores, int64_t score_stride, int64_t num_heads, int64_t num, int64_t top_k,
                   const tree_attention::SelectionOptions& options, void* buffer, int32_t* positions,
                   selection::Rank<R>* ranks) {
  selection::Workspace<R> workspace(buffer, num);
  R* by_head = reinterpret_cast<R*>(static_cast<char*>(buffer) + selection::Workspace<R>::bytes(num));
  for (int64_t p = 0; p < num; ++p) {
    for (int64_t g = 0; g < num_heads; ++g) {
      by_head[g * num + p] = scores[p * score_stride + g];
    }
  }
  if constexpr (Work::kIoOnly) {
    selection::Rank<R> fold = 0;
    for (int64_t i = 0; i < num * num_heads; ++i) {
      selection::Rank<R> bits;
      std::memcpy(&bits, by_head + i, sizeof(bits));
      fold ^= bits;
    }
    ranks[0] = fold;
    return num < top_k ? num : top_k;
  }
  selection::rank_candidates<R>(by_head, /*sums=*/nullptr, num, num_heads, num, options.importance,
                                workspace);
  const int64_t best = tree_attention::best_with_neighbours(options, top_k, num);
  const int64_t count = selection::select_ranked(num, top_k, best, workspace, positions);
  for (int64_t i = 0; i < count; ++i) {
    ranks[i] = workspace.ranks[positions[i]];
  }
  return count;
}

template <typename T>
constexpr StageRows<T, ScalarOf<T>, selection::Rank<ScalarOf<T>>> rows_of() {
  return {mean_row<T>,
          share_row<T>,
          rotate_row<T>,
          score_row<FullWork, T>,
          score_row<IoOnly, T>,
          accumulate_row<T>,
          select_row<FullWork, ScalarOf<T>>,
          select_row<IoOnly, ScalarOf<T>>,
          select_bytes<ScalarOf<T>>,
          normalize_row<T>};
}

constexpr tree_attention::StageTables stage_tables() {
  return {rows_of<float>(), rows_of<Fp16>(), rows_of<Bf16>(), rows_of<double>()};
}

}  // namespace htree::HTREE_ISA
