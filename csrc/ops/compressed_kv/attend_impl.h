// Body of the CPU kernels that attend to a tile of expanded rows; included by the rows_*.cpp files after
// rows_impl.h.
#pragma once

#include "ops/compressed_kv/rows.h"

namespace htree::HTREE_ISA {

using compressed_kv::kTileTokens;
using compressed_kv::Tile;

// Four tokens share each load of the query.
inline void add_scores(const Tile& tile, const float* q, const float* k, float* scores) {
  const int head_dim = tile.head_dim;
  for (int query = 0; query < tile.num_queries; ++query) {
    const float* row = q + static_cast<int64_t>(query) * head_dim;
    float* score = scores + query * kTileTokens;
    int token = 0;
    for (; token + 4 <= tile.num_tokens; token += 4) {
      const float* keys = k + static_cast<int64_t>(token) * head_dim;
      VecF sum[4] = {};
      for (int d = 0; d < head_dim; d += kLanes) {
        const VecF value = load(row + d);
        for (int i = 0; i < 4; ++i) {
          sum[i] += value * load(keys + i * head_dim + d);
        }
      }
      for (int i = 0; i < 4; ++i) {
        score[token + i] += horizontal_sum(sum[i]);
      }
    }
    for (; token < tile.num_tokens; ++token) {
      VecF sum = {};
      for (int d = 0; d < head_dim; d += kLanes) {
        sum += load(row + d) * load(k + static_cast<int64_t>(token) * head_dim + d);
      }
      score[token] += horizontal_sum(sum);
    }
  }
}

// The sum of a NaN or +inf score's weight is NaN, and so is the output.
inline float weigh(float* scores, int num_tokens, float& max, float& sum) {
  const float infinity = std::numeric_limits<float>::infinity();
  float new_max = max;
  for (int token = 0; token < num_tokens; ++token) {
    new_max = scores[token] > new_max ? scores[token] : new_max;
  }
  const float shift = new_max == -infinity ? 0.0f : new_max;
  const float rescale = max == -infinity ? 0.0f : exp(splat(max - shift))[0];
  for (int token = num_tokens; token < kTileTokens; ++token) {
    scores[token] = -infinity;
  }
  VecF total = {};
  for (int token = 0; token < kTileTokens; token += kLanes) {
    const VecF weight = exp(load(scores + token) - shift);
    store(scores + token, weight);
    total += weight;
  }
  max = new_max;
  sum = sum * rescale + horizontal_sum(total);
  return rescale;
}

inline void accumulate(const Tile& tile, const float* v, float* scores, float* max, float* sum, float* acc) {
  const int head_dim = tile.head_dim;
  constexpr int kStep = 4 * kLanes;  // channels in registers; D is a multiple of 64
  for (int query = 0; query < tile.num_queries; ++query) {
    float* weight = scores + query * kTileTokens;
    float* out = acc + static_cast<int64_t>(query) * head_dim;
    const float rescale = weigh(weight, tile.num_tokens, max[query], sum[query]);
    for (int d = 0; d < head_dim; d += kStep) {
      VecF value[4];
      for (int i = 0; i < 4; ++i) {
        value[i] = load(out + d + i * kLanes) * rescale;
      }
      for (int token = 0; token < tile.num_tokens; ++token) {
        const VecF w = splat(weight[token]);
        const float* row = v + static_cast<int64_t>(token) * head_dim + d;
        for (int i = 0; i < 4; ++i) {
          value[i] += w * load(row + i * kLanes);
        }
      }
      for (int i = 0; i < 4; ++i) {
        store(out + d + i * kLanes, value[i]);
      }
    }
  }
}

constexpr compressed_kv::RowKernels row_kernels() {
  return {typed_kernels<float>(), typed_kernels<Fp16>(), typed_kernels<Bf16>(), add_scores, accumulate};
}

}  // namespace htree::HTREE_ISA
