// Which calls the kernel takes that chooses by an index in one launch, how many blocks share a row, and what they keep in
// shared memory. Pure functions of sizes that the host knows. No torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/sizes.h"
#include "host/cuda/probes.h"
#include "ops/tree_cache/page_layout.h"

namespace htree::tree_cache {

constexpr int kChoiceThreads = 512;
constexpr int kChoiceRateLog2 = 4;  // r = 16: a token for each of 16 lanes
constexpr int kChoiceWarps = kChoiceThreads / 32;
// The ring of a warp: index keys of at most so many blocks of r tokens, and their scales.
constexpr int kChoiceStages = 2, kStageUnits = 8, kStageKeyBytes = 4096;
constexpr int kStageBytes = kStageKeyBytes + kStageUnits * (1 << kChoiceRateLog2);
constexpr int kChoiceStaticBytes = 8 * 1024;

struct ChoiceProblem {
  int64_t rows = 0;      // of a chunk of the call, times index heads
  int64_t capacity = 0;  // tokens of a sequence
  int64_t page_size = 256;
  int64_t rate = 16;
  int64_t layers = 1;
  int64_t top_k = 1;
  int64_t key_bytes = 0;  // of an index key
  bool two_bytes_or_codes = false;
  bool open_next = false;
};

// Byte offsets in dynamic shared memory, and sizes.
struct ChoicePlan {
  int cluster = 0;  // blocks of a row and index head; 0: the kernel does not take the call
  int units = 1;    // of a stage, a power of two
  int run = 1;      // those of them that lie side by side in a page, a power of two
  // Shared memory of a block begins with the keys of its units, those of layer 0 first and behind them those of the next
  // layers.
  int words = 0;  // WordRanks
  // The rings of all warps, behind them in time uint32 [layers - 1][2][cluster * top_k]: keys and places that the blocks of
  // the cluster chose.
  int ring = 0;
  int bytes = 0;

  bool taken() const { return cluster > 0; }
};

// Blocks of r^(l+1) tokens are units of r^l times r tokens; a block of the cluster has whole ones of every layer that
// chooses.
inline ChoicePlan choice_places(const ChoiceProblem& problem, int cluster) {
  const int64_t units = problem.capacity / problem.rate + 1;
  const int64_t align = std::max<int64_t>(
      kStageUnits, int64_t{1} << (kChoiceRateLog2 * std::max<int64_t>(problem.layers - 2, 0)));
  const int64_t share = ceil_div(ceil_div(units, cluster), align) * align;
  const int64_t keys = share + share / (problem.rate - 1) + problem.layers;
  const int64_t gathered = cluster == 1 ? 0 : cluster * problem.top_k;
  const int64_t words = ceil_div(std::max(share, gathered), 32) * 8;
  const int64_t ring = ceil_div(keys * 4 + 16 + words, 128) * 128;
  const int64_t bytes = ring + std::max<int64_t>(kChoiceWarps * kChoiceStages * kStageBytes,
                                                 (problem.layers - 1) * 2 * gathered * 4);
  if (bytes + kChoiceStaticBytes > device::kHopperSharedBytes) {
    return {};
  }
  ChoicePlan plan;
  plan.cluster = cluster;
  while (plan.units < kStageUnits && 2 * plan.units * problem.rate * problem.key_bytes <= kStageKeyBytes) {
    plan.units *= 2;
  }
  while (plan.run < plan.units && problem.page_size % (2 * plan.run * problem.rate) == 0) {
    plan.run *= 2;
  }
  plan.words = static_cast<int>((keys * 4 + 15) / 16 * 16);
  plan.ring = static_cast<int>(ring);
  plan.bytes = static_cast<int>(bytes);
  return plan;
}

// Whether the kernel takes a call does not depend on its rows. `processors` is the number of multiprocessors.
// `wanted_cluster` 0 lets the sizes decide; a test may ask for a number.
inline ChoicePlan plan_choice(const ChoiceProblem& problem, int processors, const ClusterCounts& clusters,
                              int wanted_cluster = 0) {
  constexpr int kMostCluster = 16;
  const bool taken = problem.two_bytes_or_codes && !problem.open_next &&
                     problem.rate == int64_t{1} << kChoiceRateLog2 && clusters[kMostCluster] > 0 &&
                     choice_places(problem, kMostCluster).taken();
  if (!taken) {
    return {};
  }
  if (wanted_cluster > 0 && choice_places(problem, wanted_cluster).taken()) {
    return choice_places(problem, wanted_cluster);
  }
  int cluster = kMostCluster;
  while (cluster > 1 && problem.rows * cluster > processors && choice_places(problem, cluster / 2).taken()) {
    cluster /= 2;
  }
  return choice_places(problem, cluster);
}

}  // namespace htree::tree_cache
