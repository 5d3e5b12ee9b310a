// The query in the space in which the keys are stored. docs/semantics/hadamard.md §4.2.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/compressed_kv/compressed_kv.h"

namespace htree::compressed_kv {

// In place, x [n] times the orthonormal H_n in Sylvester order.
inline void hadamard_row(float* x, int n) {
  for (int distance = 1; distance < n; distance *= 2) {
    for (int i = 0; i < n; ++i) {
      if ((i & distance) == 0) {
        const float low = x[i];
        const float high = x[i + distance];
        x[i] = low + high;
        x[i + distance] = low - high;
      }
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(n));
  for (int i = 0; i < n; ++i) {
    x[i] *= scale;
  }
}

// q [B, H, D] to [G, B, H, D] times the scale of the scores: the query of each slot of the group of kv heads,
// q alone for groups 0 and 1. Slot j of the expanded query of kv head g is H_G[j, g] / sqrt(G) * (q H_D).
inline std::vector<float> transformed_queries(const DecodeProblem& p, std::vector<float> q) {
  const int64_t rows = p.batch * p.num_heads;
  const int64_t group = p.hadamard_group > 1 ? p.hadamard_group : 1;
  if (p.hadamard_group > 0) {
    for (int64_t row = 0; row < rows; ++row) {
      hadamard_row(q.data() + row * p.head_dim, p.head_dim);
    }
  }
  std::vector<float> slots(static_cast<size_t>(group * rows * p.head_dim));
  const auto factor = static_cast<float>(p.scale / std::sqrt(static_cast<double>(group)));
  for (int64_t slot = 0; slot < group; ++slot) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = row % p.num_heads / p.heads_per_kv() % group;
      const bool negative = (__builtin_popcountll(static_cast<uint64_t>(slot & own)) & 1) != 0;
      const float sign = negative ? -factor : factor;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        slots[static_cast<size_t>((slot * rows + row) * p.head_dim + d)] =
            sign * q[static_cast<size_t>(row * p.head_dim + d)];
      }
    }
  }
  return slots;
}

}  // namespace htree::compressed_kv
