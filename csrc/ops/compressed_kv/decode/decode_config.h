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
  const int available = most_shared - table_bytes - padding;
  const int num_warps = std::clamp(available / (fewest_stages * stage_bytes), 1, most_warps);
  const int num_stages = available >= num_warps * most_stages * stage_bytes ? most_stages : fewest_stages;
  const int ring = num_warps * num_stages * stage_bytes + padding;
  return {num_warps, num_stages, table_bytes + std::max(ring, merge_bytes)};
}

// The fewest warps that take `tiles` tiles in no more rounds than `most_warps` would: a warp costs as much as
// some tiles before its first and after its last one. But some more than that fill the selector tables sooner.
inline int warps_for(int64_t tiles, int most_warps) {
  constexpr int64_t kFewest = 12;
  const int64_t rounds = std::max<int64_t>(1, ceil_div(tiles, most_warps));
  return static_cast<int>(std::min<int64_t>(std::max(ceil_div(tiles, rounds), kFewest), most_warps));
}

constexpr int kMostClusterSplits = device::kPortableCluster;

inline bool runs_as_cluster(int64_t splits, const ClusterCounts& clusters) {
  return splits > 1 && splits <= kMostClusterSplits && clusters[splits] > 0;
}

// What takes how long, in one unit.
struct SplitCosts {
  int64_t token;  // of a split
  int64_t block;  // before its first token and after its last
  int64_t merge;  // the kernel that merges splits,
  int64_t split;  // and for each of them
};

constexpr int64_t kTileStep = 128;  // a split of the tensor-core kernel is a multiple of so many tokens

// Of the tensor-core kernel, in nanoseconds on an H100.
constexpr SplitCosts tile_costs(int k_bits, int v_bits) {
  return {(k_bits == 16 ? 5 : 3) + (v_bits == 16 ? 5 : 3), 9300, 2200, 160};
}

// Of the general kernel, whose splits are always merged.
constexpr SplitCosts kGeneralCosts{1, 1024, 0, 0};

struct SplitChoice {
  int64_t size;  // tokens of a split
  bool cluster;  // whether the blocks of its splits are to be a cluster
};

// A multiple of `step` tokens: the number of splits that costs least. Several are merged by the blocks themselves, as
// a cluster, of which so many run at once, or by a kernel of its own.
inline SplitChoice choose_split_size(int64_t capacity, int64_t num_groups, int num_processors, int64_t step,
                                     const SplitCosts& costs, const ClusterCounts& clusters) {
  constexpr int64_t kMostSplits = 256;
  const int64_t steps = std::max<int64_t>(1, ceil_div(capacity, step));
  SplitChoice best{steps * step, false};
  int64_t best_cost = -1;
  const auto consider = [&](int64_t size, bool cluster, int64_t waves, int64_t merge) {
    const int64_t cost = waves * (size * costs.token + costs.block) + merge;
    if (best_cost < 0 || cost < best_cost) {
      best = {size, cluster};
      best_cost = cost;
    }
  };
  for (int64_t splits = 1; splits <= kMostSplits;) {
    const int64_t per_split = ceil_div(steps, splits);  // the least for so many splits
    if (runs_as_cluster(splits, clusters)) {
      consider(per_split * step, true, ceil_div(num_groups, clusters[splits]), 0);
    }
    consider(per_split * step, false, ceil_div(num_groups * splits, num_processors),
             splits > 1 ? costs.merge + splits * costs.split : 0);
    if (per_split == 1) {
      break;
    }
    splits = ceil_div(steps, per_split - 1);
  }
  return best;
}

}  // namespace htree::compressed_kv
