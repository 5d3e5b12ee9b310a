// Which calls the decode kernel takes, how many blocks share a row, and where they keep what in shared memory.
// Pure functions of sizes that the host knows. No torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/sizes.h"
#include "host/cuda/probes.h"

namespace htree::tree_cache {

constexpr int kDecodeRateLog2 = 4;
constexpr int kDecodeRate =
    1 << kDecodeRateLog2;              // r: the children of a slot are one tile of the tensor cores
constexpr int kDecodeMaxSlots = 1024;  // of a layer
constexpr int kDecodeMostWarps = 12;   // of a block
// The slots of a layer are cut into so many shares, whatever the launch. A share is summed in an order that
// follows from the row's own number of slots, and shares are merged in their order: so a row's bits do not
// depend on how many blocks divide the shares between them.
constexpr int kShares = 16;

// What the decode kernel must know of a call.
struct DecodeProblem {
  int64_t rows = 0;  // of a chunk of the call, times K/V heads
  int64_t group = 1;
  int64_t rate = 16;
  int64_t slots = 0;  // the most of a layer: parents of candidates, see row_tree.h
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t pool_rows = 0;  // of both pools, the larger number
  bool spans = false;
  bool two_byte_type = false;
  bool aligned = false;  // pools and table of rotations to 16 bytes
};

// Byte offsets in dynamic shared memory.
struct DecodePlaces {
  int scores = 0;       // float [slots of a block][16][heads], in units of log2
  int span_scores = 0;  // the same of span means; only with spans
  int keys = 0;         // uint32 [slots][16]
  int lists = 0;        // int32 [2][slots]
  int rows = 0;         // uint32 [2][slots of a block][16]
  int selected = 0;     // uint32 [slots / 2 + 1]: a bit for each candidate
  int states = 0;       // DecodeState [shares of a block]
  int queries = 0;      // the rotated queries as operands of products
  int children = 0;     // float [16][child_stride()]: rotations by the places in a slot
  int ring = 0;         // [warps][stages] tiles
  int bytes = 0;
};

// How a launch divides a row and K/V head.
struct DecodePlan {
  // Blocks of a row and K/V head, a divisor of kShares; 0: the kernel does not take the call.
  int cluster = 0;
  int shares = 0;  // of a block
  int stages = 0;  // tiles that a warp has space for
  DecodePlaces places;
};

// How a chunk divides its rows times K/V heads. The last of them may be so few that larger clusters take them at once,
// in a launch of their own.
struct DecodePlans {
  DecodePlan plan;
  int64_t num_last = 0;
  DecodePlan last;
  int top_span_blocks = 0;  // blocks of a row and K/V head that score span means before the walk

  bool taken() const { return plan.cluster > 0; }
};

// Query heads as the tiles of the tensor cores take them.
constexpr int padded_heads(int64_t group) {
  return group <= 8 ? 8 : 16;
}
// Warps of a block: as many as shared memory has space for, whatever the number of blocks that share a row, because
// a row's bits depend on it.
constexpr int decode_warps(int heads, bool spans, int64_t slots) {
  return heads == 8 && !spans && slots <= 512 ? kDecodeMostWarps : 8;
}
// A tile of 16 rows, and the rotation of its first candidate.
constexpr int stage_bytes(int64_t dim) {
  return static_cast<int>(kDecodeRate * dim * 2 + dim / 2 * 8);
}
// Floats of a child's cosines and sines. Four more spread the loads over the banks.
constexpr int child_stride(int64_t dim) {
  return static_cast<int>(dim + 4);
}
constexpr int state_bytes(int64_t dim, int heads) {
  return static_cast<int>(heads * (dim + 2) * 4);
}

inline DecodePlaces decode_places(const DecodeProblem& problem, int cluster, int stages) {
  const int heads = padded_heads(problem.group);
  const int all_slots = static_cast<int>(problem.slots), dim = static_cast<int>(problem.key_dim);
  const int shares = kShares / cluster;
  const int warps = decode_warps(heads, problem.spans, all_slots);
  const int slots = shares * static_cast<int>(ceil_div(all_slots, kShares));
  int next = 0;
  const auto take = [&](int bytes) {
    const int at = next;
    next += (bytes + 15) / 16 * 16;
    return at;
  };
  DecodePlaces places;
  places.scores = take(slots * kDecodeRate * heads * 4);
  places.span_scores = problem.spans ? take(slots * kDecodeRate * heads * 4) : places.scores;
  places.keys = take(kDecodeRate * all_slots * 4);
  places.lists = take(2 * all_slots * 4);
  places.rows = take(2 * slots * kDecodeRate * 4);
  places.selected = take((all_slots / 2 + 1) * 4);
  places.states = take(shares * state_bytes(dim, heads));
  places.queries = take(heads * dim * 4);
  places.children = take(kDecodeRate * child_stride(dim) * 4);
  places.ring = take(warps * stages * stage_bytes(dim));
  places.bytes = next;
  return places;
}

// Tiles that a warp may have space for.
constexpr int kMostStages = 4;
constexpr int kLeastStages = 2;

// Thread blocks of the kernel that scores the span means of the top on a multiprocessor.
constexpr int kTopSpanBlocks = 4;

// Static shared memory of the kernel is part of what a block may have.
constexpr int kDecodeStaticBytes = 8 * 1024;

// The smallest cluster from `cluster` to `most_cluster` blocks that has the shared memory, and its stages.
inline DecodePlan fitting_plan(const DecodeProblem& problem, int cluster, int most_cluster) {
  for (; cluster <= most_cluster; cluster *= 2) {
    for (int stages = kMostStages; stages >= kLeastStages; --stages) {
      const DecodePlan plan{.cluster = cluster,
                            .shares = kShares / cluster,
                            .stages = stages,
                            .places = decode_places(problem, cluster, stages)};
      if (plan.places.bytes + kDecodeStaticBytes <= device::kHopperSharedBytes) {
        return plan;
      }
    }
  }
  return {};
}

// `wanted_cluster` 0 lets the sizes decide; a test may ask for a number.
inline DecodePlans plan_decode(const DecodeProblem& problem, int processors, const ClusterCounts& clusters,
                               int wanted_cluster = 0) {
  const bool taken = problem.two_byte_type && problem.aligned && problem.rate == kDecodeRate &&
                     problem.slots <= kDecodeMaxSlots && problem.group <= (problem.spans ? 8 : 16) &&
                     problem.key_dim == problem.value_dim &&
                     (problem.key_dim == 64 || problem.key_dim == 128) &&
                     problem.pool_rows < (int64_t{1} << 31) && problem.rows > 0;
  if (!taken) {
    return {};
  }
  int most_cluster = kShares;
  while (most_cluster > 1 && clusters[most_cluster] == 0) {
    most_cluster /= 2;
  }
  DecodePlans plans;
  plans.top_span_blocks = static_cast<int>(ceil_div(int64_t{processors} * kTopSpanBlocks, problem.rows));
  if (wanted_cluster > 0) {
    plans.plan = fitting_plan(problem, std::min(wanted_cluster, most_cluster), most_cluster);
    return plans;
  }
  // A block should have some 64 slots to amortise its exchanges.
  int cluster = 1;
  while (cluster < most_cluster && cluster * 64 < problem.slots) {
    cluster *= 2;
  }
  plans.plan = fitting_plan(problem, cluster, most_cluster);
  if (!plans.taken()) {
    return {};
  }
  // Fewer are right for the rows that are left after the GPU was filled as often as it can be, where their clusters
  // still run at once.
  cluster = plans.plan.cluster;
  const int64_t at_once = cluster > 1 ? clusters[cluster] : processors;
  if (at_once == 0) {
    return plans;  // what the device did not answer
  }
  const int64_t left = (problem.rows - 1) % at_once + 1;
  while (cluster < most_cluster && left <= clusters[2 * cluster]) {
    cluster *= 2;
  }
  if (cluster > plans.plan.cluster) {
    const DecodePlan last = fitting_plan(problem, cluster, most_cluster);
    if (left == problem.rows) {
      plans.plan = last;
    } else {
      plans.num_last = left;
      plans.last = last;
    }
  }
  return plans;
}

}  // namespace htree::tree_cache
