// Blocks, stages and splits of the CUDA decode kernels: pure functions, printable and tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/compressed_kv/format.h"

namespace htree::compressed_kv {

// The ring of a warp has one of two lengths, so that the number to wait for is a constant of the code.
constexpr int kMinStages = 2;
constexpr int kMaxStages = 4;

struct DecodeConfig {
  int num_warps;
  int num_stages;
  int shared_bytes;
};

// Takes the `stage_bytes` of one warp, the `table_bytes` of the selector tables, the `merge_bytes` of the
// final sums, and the most shared memory that a block may have. It takes as many warps as fit with the fewest
// stages, then the most stages if they fit.
inline DecodeConfig choose_decode_config(int stage_bytes, int table_bytes, int merge_bytes, int padding,
                                         int most_warps, int fewest_stages, int most_stages,
                                         int most_shared) {
  const int room = most_shared - table_bytes - padding;
  const int num_warps = std::clamp(room / (fewest_stages * stage_bytes), 1, most_warps);
  const int num_stages = room >= num_warps * most_stages * stage_bytes ? most_stages : fewest_stages;
  const int ring = num_warps * num_stages * stage_bytes + padding;
  return {num_warps, num_stages, table_bytes + std::max(ring, merge_bytes)};
}

// The fewest warps that take `tiles` tiles in no more rounds than `most_warps` would: a warp costs as much as
// some tiles before its first and after its last one.
inline int warps_for(int64_t tiles, int most_warps) {
  const int64_t rounds = std::max<int64_t>(1, (tiles + most_warps - 1) / most_warps);
  return static_cast<int>(std::clamp<int64_t>((tiles + rounds - 1) / rounds, 1, most_warps));
}

// The tokens of a split, a multiple of `step`. It is the number of splits whose last wave of blocks leaves
// the fewest multiprocessors idle, where a block costs as much as kOverhead tokens before it starts, and the
// kernel that merges more than `cheap_splits` splits costs as much as kMerge tokens.
inline int64_t choose_split_size(int64_t capacity, int64_t num_groups, int num_processors, int64_t step,
                                 int64_t cheap_splits) {
  constexpr int64_t kOverhead = 1024;
  constexpr int64_t kMerge = 512;
  constexpr int64_t kMostSplits = 256;
  const int64_t steps = std::max<int64_t>(1, (capacity + step - 1) / step);
  int64_t best = steps;
  int64_t best_cost = -1;
  for (int64_t splits = 1; splits <= std::min(steps, kMostSplits); ++splits) {
    const int64_t per_split = (steps + splits - 1) / splits;
    const int64_t waves = (num_groups * splits + num_processors - 1) / num_processors;
    const int64_t cost = waves * (per_split * step + kOverhead) + (splits > cheap_splits ? kMerge : 0);
    if (best_cost < 0 || cost < best_cost) {
      best = per_split;
      best_cost = cost;
    }
  }
  return best * step;
}

}  // namespace htree::compressed_kv
