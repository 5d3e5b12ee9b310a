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
constexpr int kChoiceStaticBytes = 8 * 1024;

struct ChoiceProblem {
  int64_t rows = 0;      // of a chunk of the call, times index heads
  int64_t capacity = 0;  // tokens of a sequence
  int64_t rate = 16;
  int64_t layers = 1;
  int64_t top_k = 1;
  bool two_bytes_or_codes = false;
  bool open_next = false;
};

// Byte offsets in dynamic shared memory, and sizes.
struct ChoicePlan {
  int cluster = 0;    // blocks of a row and index head; 0: the kernel does not take the call
  int most_keys = 0;  // of a block: those of layer 0 come first, behind them those of the next layers
  int words = 0;      // WordRanks
  int gathered = 0;   // uint32 [layers - 1][2][cluster * top_k]: keys and places that the blocks of the cluster chose
  int bytes = 0;

  bool taken() const { return cluster > 0; }
};

// Blocks of r^(l+1) tokens are units of r^l times r tokens; a block of the cluster has whole ones of every layer that
// chooses.
inline ChoicePlan choice_places(const ChoiceProblem& problem, int cluster) {
  const int64_t units = problem.capacity / problem.rate + 1;
  const int64_t align = int64_t{1} << (kChoiceRateLog2 * std::max<int64_t>(problem.layers - 2, 0));
  const int64_t share = ceil_div(ceil_div(units, cluster), align) * align;
  const int64_t keys = share + share / (problem.rate - 1) + problem.layers;
  const int64_t gathered = cluster == 1 ? 0 : cluster * problem.top_k;
  const int64_t words = ceil_div(std::max(share, gathered), 32) * 8;
  const int64_t bytes = keys * 4 + 16 + words + (problem.layers - 1) * 2 * gathered * 4;
  if (bytes + kChoiceStaticBytes > device::kHopperSharedBytes) {
    return {};
  }
  ChoicePlan plan;
  plan.cluster = cluster;
  plan.most_keys = static_cast<int>(keys);
  plan.words = static_cast<int>((keys * 4 + 15) / 16 * 16);
  plan.gathered = plan.words + static_cast<int>(words);
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
  while (cluster > 1 && problem.rows * cluster > 2 * processors && choice_places(problem, cluster / 2).taken()) {
    cluster /= 2;
  }
  return choice_places(problem, cluster);
}

}  // namespace htree::tree_cache
