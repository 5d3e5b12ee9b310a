// Blocks, stages and splits of the CUDA decode kernels: pure functions, printable and tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "device/sizes.h"
#include "host/cuda/probes.h"
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

constexpr int kMostClusterSplits = 8;  // blocks of a portable cluster

inline bool runs_as_cluster(int64_t splits, const ClusterCounts& clusters) {
  return splits > 1 && splits <= kMostClusterSplits && clusters[splits] > 0;
}

struct SplitChoice {
  int64_t size;  // tokens of a split
  bool cluster;  // whether the blocks of its splits are to be a cluster
};

// A multiple of `step` tokens. It is the number of splits whose last wave of blocks leaves the fewest
// multiprocessors idle, where a block costs as much as kOverhead tokens before it starts. More splits than `unmerged`
// are merged by the blocks themselves, as a cluster, where enough clusters run at once, or by a kernel that costs as
// much as kMerge tokens.
inline SplitChoice choose_split_size(int64_t capacity, int64_t num_groups, int num_processors, int64_t step,
                                     int64_t unmerged, const ClusterCounts& clusters) {
  constexpr int64_t kOverhead = 1024;
  constexpr int64_t kMerge = 768;
  constexpr int64_t kMostSplits = 256;
  const int64_t steps = std::max<int64_t>(1, ceil_div(capacity, step));
  SplitChoice best{steps * step, false};
  int64_t best_cost = -1;
  const auto consider = [&](int64_t per_split, bool cluster, int64_t waves, int64_t end) {
    const int64_t cost = waves * (per_split * step + kOverhead) + end;
    if (best_cost < 0 || cost < best_cost) {
      best = {per_split * step, cluster};
      best_cost = cost;
    }
  };
  for (int64_t count = 1; count <= std::min(steps, kMostSplits); ++count) {
    const int64_t per_split = ceil_div(steps, count);
    const int64_t splits = ceil_div(steps, per_split);
    if (runs_as_cluster(splits, clusters)) {
      consider(per_split, true, ceil_div(num_groups, clusters[splits]), 0);
    }
    consider(per_split, false, ceil_div(num_groups * splits, num_processors), splits > unmerged ? kMerge : 0);
  }
  return best;
}

}  // namespace htree::compressed_kv
