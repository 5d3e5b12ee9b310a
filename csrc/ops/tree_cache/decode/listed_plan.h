// Which calls the kernel of listed.cuh takes, and the parts of a row. Pure functions of sizes that the host knows. No torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/tree_cache/decode/decode_plan.h"

namespace htree::tree_cache {

// Parents of a part, 512 candidates: fixed, so that a row's bits follow from its own lists alone.
constexpr int kListedSlots = 32;

// What the kernel must know of a call beside DecodeProblem.
struct ListedProblem {
  int64_t capacity = 0;  // tokens of a sequence
  int64_t max_top_nodes = 0;
  int64_t top_k = 0;
  int64_t layers = 1;
  bool rotates = false;
  bool packed = false;
};

// The most parts of a row: those of its top, which may be any layer, and of the lists below.
inline int64_t listed_parts(const ListedProblem& listed) {
  int64_t most = 0, nodes = listed.capacity;
  const int64_t of_list = ceil_div(listed.top_k, kListedSlots);
  for (int64_t top = 0; top < listed.layers; ++top, nodes = ceil_div(nodes, kDecodeRate)) {
    const int64_t slots = ceil_div(std::min(listed.max_top_nodes, nodes), kDecodeRate);
    most = std::max(most, ceil_div(slots, kListedSlots) + top * of_list);
  }
  return most;
}

inline bool takes_listed(const DecodeProblem& problem, const ListedProblem& listed, int major) {
  return !listed.rotates && !listed.packed && !problem.spans && major >= 8 && problem.two_byte_type &&
         problem.aligned && problem.rate == kDecodeRate && problem.group <= 16 &&
         problem.key_dim == problem.value_dim && (problem.key_dim == 64 || problem.key_dim == 128) &&
         problem.pool_rows < (int64_t{1} << 31) && problem.rows > 0;
}

}  // namespace htree::tree_cache
