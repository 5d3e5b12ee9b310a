// How many tokens the sequences of a cache have: what appends, attention and truncations do to the lengths on the device,
// for CPU and CUDA. Whose the pages are, the host decides. No torch. docs/semantics/tree_cache.md §7.4.
#pragma once

#include <cstdint>

#include "ops/tree/tree_args.h"

namespace htree::tree_cache {

// What was wrong with a sequence, which then stays as it was; errors are ORed. htree_ops/ops/tree_cache/errors.py has the
// words.
enum LengthError : int32_t {
  kNoCapacity = 1,      // the tokens exceed the capacity
  kNoPage = 2,          // the sequence has no page for them
  kBadLength = 4,       // a negative number of tokens, or more than the sequence holds
  kInsideStride = 8,    // truncated inside a stride whose leader's lists are gone
  kMissingLeader = 16,  // a query whose leader is neither in the call nor in the ring
  kSharedPage = 32,     // truncated into pages that others have too
  kBadPage = 64,        // the table names a page that the pool does not have
  kTailLost = 128,      // truncated inside a node whose tokens are left in fewer bits only
};

// What a cache keeps of its sequences.
struct SequenceLengths {
  int32_t* lengths = nullptr;     // [B]
  int32_t* errors = nullptr;      // [B], LengthError
  int32_t* plan = nullptr;        // [2, B]: lengths before the step, tokens that it takes
  int32_t* list_pos = nullptr;    // [B, ring]
  int32_t* tail_begin = nullptr;  // [B]: the first token that the tail of packed tokens has; null without one
  int num_sequences = 0;
  int ring = 0;
};

struct LengthStep {
  const int32_t* counts =
      nullptr;  // [B]: new tokens and queries, or in a truncation what is left, -1 for all
  const int32_t* block_table = nullptr;  // [B, max_pages]
  const int32_t* own_from = nullptr;     // [B], of a truncation: tokens before this one stand in shared pages
  int64_t max_pages = 0;
  int64_t num_pages = 0;
  int64_t capacity = 0;
  int64_t page_size = 0;
  int64_t stride = 1;
  int64_t rate = 1;
  int64_t tail_tokens = 0;
  bool appends = false;
  bool attends = false;
};

HTREE_HOST_DEVICE bool has_leader(const SequenceLengths& all, int64_t b, int64_t leader) {
  bool found = false;
  for (int i = 0; i < all.ring; ++i) {
    found |= all.list_pos[b * all.ring + i] == leader;
  }
  return found;
}

HTREE_HOST_DEVICE int32_t append_error(const SequenceLengths& all, const LengthStep& step, int64_t b) {
  const int64_t length = all.lengths[b], after = length + step.counts[b];
  if (length < 0 || after < length) return kBadLength;
  if (after > step.capacity || after > step.max_pages * step.page_size) return kNoCapacity;
  const int64_t first = length / step.page_size, end = (after + step.page_size - 1) / step.page_size;
  for (int64_t i = first; i < end; ++i) {  // those that get tokens
    const int32_t page = step.block_table[b * step.max_pages + i];
    if (page == -1) return kNoPage;
    if (page < 0 || page >= step.num_pages) return kBadPage;
  }
  return 0;
}

// Takes the new tokens of a sequence, if nothing is wrong, and says which of its queries have no leader.
HTREE_HOST_DEVICE void advance(const SequenceLengths& all, const LengthStep& step, int64_t b) {
  const int32_t count = step.counts[b];
  int32_t error = 0;
  if (step.appends) {
    error = append_error(all, step, b);
    const int32_t before = all.lengths[b], taken = error == 0 ? count : 0;
    all.plan[b] = before;
    all.plan[all.num_sequences + b] = taken;
    all.lengths[b] = before + taken;
    if (all.tail_begin != nullptr) {
      const int64_t begin = int64_t{before} + taken - step.tail_tokens;
      all.tail_begin[b] = begin > all.tail_begin[b] ? static_cast<int32_t>(begin) : all.tail_begin[b];
    }
  }
  if (step.attends && step.stride > 1 && count > 0 && all.lengths[b] > 0) {
    const int64_t begin = int64_t{all.lengths[b]} - count;
    const int64_t first = begin > 0 ? begin : 0;
    if (first % step.stride != 0 && !has_leader(all, b, first - first % step.stride)) {
      error |= kMissingLeader;
    }
  }
  all.errors[b] |= error;
}

HTREE_HOST_DEVICE int32_t truncate_error(const SequenceLengths& all, const LengthStep& step, int64_t b) {
  const int64_t length = step.counts[b], last = length - 1;
  if (length > all.lengths[b] || length < -1) return kBadLength;
  if (length < 0 || length == all.lengths[b]) return 0;
  if (length < step.own_from[b]) return kSharedPage;
  if (length % step.stride != 0 && !has_leader(all, b, last - last % step.stride)) return kInsideStride;
  const int64_t node = length - length % step.rate;  // the first token of the node that is open then
  const bool lost = all.tail_begin != nullptr && node < length && node < all.tail_begin[b];
  return lost ? kTailLost : 0;
}

// Takes the tokens behind a new length back, if nothing is wrong.
HTREE_HOST_DEVICE void truncate(const SequenceLengths& all, const LengthStep& step, int64_t b) {
  const int32_t error = truncate_error(all, step, b), length = step.counts[b];
  all.errors[b] |= error;
  if (error != 0 || length < 0) return;
  all.lengths[b] = length;
  for (int i = 0; i < all.ring; ++i) {
    int32_t& leader = all.list_pos[b * all.ring + i];
    leader = leader >= length ? -1 : leader;
  }
  if (all.tail_begin != nullptr && all.tail_begin[b] > length) all.tail_begin[b] = length;
}

}  // namespace htree::tree_cache
