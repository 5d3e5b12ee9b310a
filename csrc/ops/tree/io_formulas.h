// The formulas of the IO-only variants (docs/semantics/io_only.md §2.3), the same code for CPU and CUDA.
// Integers wrap modulo 2^32.
#pragma once

#include <cstdint>

#include "ops/tree/io_weights.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

HTREE_HOST_DEVICE uint32_t lcg_hash(uint32_t x, uint32_t offset = 0) {
  constexpr uint32_t kMultiplier = 1103515245u;
  constexpr uint32_t kIncrement = 12345u;
  return (x * kMultiplier + kIncrement + offset) & 0x7fffffffu;
}

// rnd * 10 - 5 with rnd = hash / 2147483647 in [0, 1]. As a float the divisor is 2^31, so the division is
// exact. Product and difference are rounded once together, so that every machine gives the same bits.
HTREE_HOST_DEVICE float io_score_base(int64_t node, int64_t kv_head, int64_t token) {
  constexpr float kReciprocal = 1.0f / 2147483648.0f;
  const uint32_t offset = 7u * static_cast<uint32_t>(kv_head) + 13u * static_cast<uint32_t>(token);
  const float rnd = static_cast<float>(lcg_hash(static_cast<uint32_t>(node), offset)) * kReciprocal;
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(rnd, 10.0f, -5.0f);
#else
  return static_cast<float>(static_cast<double>(rnd) * 10.0 - 5.0);  // exact before the cast
#endif
}

HTREE_HOST_DEVICE uint32_t io_position_seed(int64_t batch, int64_t token, int64_t kv_head) {
  return 7u * static_cast<uint32_t>(token) + 13u * static_cast<uint32_t>(kv_head) +
         31u * static_cast<uint32_t>(batch);
}

// Position j of the `count` = min(k, n) that are chosen among n >= 1 candidates. The last one
// is the rightmost candidate.
HTREE_HOST_DEVICE int32_t io_position(int64_t j, int64_t count, int64_t num, uint32_t seed, bool stratified) {
  if (j == count - 1) {
    return static_cast<int32_t>(num - 1);
  }
  const uint32_t hash = lcg_hash(static_cast<uint32_t>(j) + seed);
  if (!stratified) {
    return static_cast<int32_t>(hash % static_cast<uint32_t>(num));
  }
  const int64_t first = j * num / count;
  const int64_t width = (j + 1) * num / count - first;
  return static_cast<int32_t>(first + hash % static_cast<uint32_t>(width));
}

// What the IO-only variant of the selection takes besides the arguments of the
// full kernel. docs/semantics/io_only.md §2.3
struct IoPositions {
  int64_t t0 = 0;       // token of the first query
  bool bottom = false;  // layer 0: nothing is selected
  bool stratified = false;
  uint32_t fold_mask = 0;  // 0, which the compiler cannot know: it keeps the loads alive
};

}  // namespace htree::tree_attention
