// Ragged batches: which documents of a packed call run together, padded at their ends to one length. Pure
// functions of the lengths, so that they can be tested without a GPU. No CUDA and no torch.
//
// Attention is causal and a row does not depend on how long its document is, so padding behind a document changes
// none of its rows. docs/semantics/tree_attention.md §1.16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

// How a call puts documents together.
enum class Grouping {
  kDocument,  // equal documents that lie one behind the other, unpadded; reads the lengths on the host
  kLength,    // documents of similar lengths; reads the lengths on the host
  kRank,      // by bounds that hold for any lengths; reads nothing
};

// A document whose lengths fit the call. Its queries are the last `num_queries` of its tokens.
struct VarlenDocument {
  int64_t query_begin = 0, num_queries = 0;  // rows of the packed queries
  int64_t key_begin = 0, num_keys = 0;       // rows of the packed keys
  int64_t offset() const { return num_keys - num_queries; }
};

// Documents [first, first + count) of the plan's order as one batch of `num_keys` tokens with `num_queries`
// queries each. `in_place`: they lie one behind the other, from the begins on, and need no padding, so nothing
// is copied.
struct VarlenGroup {
  int64_t first = 0, count = 0;
  int64_t num_queries = 0, num_keys = 0;
  bool in_place = false;
  int64_t query_begin = 0, key_begin = 0;  // packed rows, where it is in place
};

// What the rows of a document without a group become.
enum DocumentKind : int32_t {
  kInGroup = 0,  // groups write them
  kBroken = 1,   // NaN: its lengths break the contract
  kUnused = 2,   // the empty value: it has keys and no query
};

// What the time of a batch depends on.
struct VarlenProblem {
  int64_t num_heads = 1;
  int64_t compression_rate = 16, max_top_nodes = 8192, top_k = 512;
};

// The most padded rows of a group of more than one document. Enough to fill a GPU, and few enough that the
// padded copies stay small beside the packed tensors of a long batch.
constexpr int64_t kGroupRows = 65536;
// A call that may not read the lengths takes at most this many times the packed rows; above it, a call
// outside a graph reads them.
constexpr double kMostRankRows = 1.5;
// The time of a group apart from its rows, of a row apart from its candidates, and of the copies of a row, all
// as scores of a query and a candidate. On an H200 a call of 8192 tokens of 32 heads, 2^30 scores, takes 1 to
// 4 ms, the launches of a group and its last blocks take 0.03 to 0.15 ms, and the copies of a token 10 to 20 ns.
constexpr double kGroupScores = 1 << 25;
constexpr double kRowScores = 256;
constexpr double kCopyScores = 256;
// Short documents whose lengths differ by less are not told apart, and a group ends at most so many kinds of
// documents after its first: both bound the time of the search.
constexpr double kSameLength = 1.02;
constexpr int64_t kMostKinds = 64;
// Ranks [a, a * ratio) share a bound of their length.
constexpr double kRankRatio = 1.25;

// The candidates that a query of a sequence of `num_keys` tokens scores on average, over all layers.
inline double varlen_candidates(const VarlenProblem& p, int64_t num_keys) {
  double candidates = 0;
  int64_t nodes = num_keys;
  for (; nodes > p.max_top_nodes; nodes = ceil_div(nodes, p.compression_rate)) {
    candidates +=
        std::min(static_cast<double>(p.top_k * p.compression_rate), 0.5 * static_cast<double>(nodes));
  }
  return candidates + 0.5 * static_cast<double>(nodes);
}

inline double varlen_copy_cost(const VarlenProblem& p, int64_t num_rows) {
  return kCopyScores * static_cast<double>(num_rows * p.num_heads);
}

// Without the copies of a group that is not in place.
inline double varlen_cost(const VarlenProblem& p, int64_t count, int64_t num_queries, int64_t num_keys) {
  const double scores = static_cast<double>(num_queries) * (varlen_candidates(p, num_keys) + kRowScores) +
                        static_cast<double>(num_keys) * kRowScores / 8;
  return kGroupScores + static_cast<double>(count * p.num_heads) * scores;
}

namespace varlen_detail {

// Documents [first, last) of the order, which are almost alike.
struct Kind {
  int64_t first = 0, last = 0;
  int64_t offset = 0, shortest = 0, longest = 0;  // the offset of all, and their numbers of keys
  bool in_place = true;                           // equal, one behind the other
};

// Appends the group of documents [first, last) in batches of at most kGroupRows rows of about equal size.
inline void append_group(std::vector<VarlenGroup>& groups, const VarlenGroup& group) {
  const int64_t most = std::max<int64_t>(1, kGroupRows / std::max<int64_t>(1, group.num_keys));
  const int64_t size = ceil_div(group.count, ceil_div(group.count, most));
  for (int64_t done = 0; done < group.count; done += size) {
    VarlenGroup part = group;
    part.first = group.first + done;
    part.count = std::min(size, group.count - done);
    part.query_begin += done * group.num_queries;
    part.key_begin += done * group.num_keys;
    groups.push_back(part);
  }
}

inline bool follows(const VarlenDocument& a, const VarlenDocument& b) {
  return b.query_begin == a.query_begin + a.num_queries && b.key_begin == a.key_begin + a.num_keys;
}

inline int64_t depth(const VarlenProblem& p, int64_t num_keys) {
  return num_layers(num_keys, p.max_top_nodes, p.compression_rate);
}

// Documents in ascending order as kinds. To join documents that need no copy with others costs their copies, so
// that is for those whose copies cost less than a group.
inline std::vector<Kind> kinds_of(const std::vector<VarlenDocument>& documents, const VarlenProblem& p) {
  std::vector<Kind> kinds;
  for (int64_t i = 0; i < static_cast<int64_t>(documents.size()); ++i) {
    const VarlenDocument& document = documents[i];
    const auto joins = [&](const Kind& kind) {
      if (kind.offset != document.offset()) return false;
      if (kind.in_place && kind.longest == document.num_keys && follows(documents[i - 1], document)) {
        return true;
      }
      const int64_t in_place_rows =
          std::max(document.num_keys, kind.in_place ? (kind.last - kind.first) * kind.longest : 0);
      return varlen_copy_cost(p, in_place_rows) < kGroupScores &&
             static_cast<double>(document.num_keys) <= kSameLength * static_cast<double>(kind.shortest) &&
             depth(p, kind.shortest) == depth(p, document.num_keys);
    };
    if (kinds.empty() || !joins(kinds.back())) {
      kinds.push_back({i, i, document.offset(), document.num_keys, document.num_keys});
    } else {
      kinds.back().in_place &=
          kinds.back().longest == document.num_keys && follows(documents[i - 1], document);
    }
    kinds.back().last = i + 1;
    kinds.back().longest = document.num_keys;
  }
  return kinds;
}

// For each kind the first kind of its group: the cheapest partition of the kinds into neighbours.
inline std::vector<int64_t> cheapest_partition(const std::vector<Kind>& kinds, const VarlenProblem& p) {
  const auto size = static_cast<int64_t>(kinds.size());
  std::vector<double> cost(size + 1, 0);
  std::vector<int64_t> first(size);
  for (int64_t last = 0; last < size; ++last) {
    cost[last + 1] = std::numeric_limits<double>::infinity();
    int64_t shortest = kinds[last].shortest, longest = kinds[last].longest;
    for (int64_t begin = last; begin >= 0 && last - begin < kMostKinds; --begin) {
      shortest = std::min(shortest, kinds[begin].shortest);
      longest = std::max(longest, kinds[begin].longest);
      if (depth(p, shortest) != depth(p, longest)) break;  // a deeper tree runs other kernels
      const int64_t count = kinds[last].last - kinds[begin].first;
      const bool in_place = begin == last && kinds[begin].in_place;
      const double copies = in_place ? 0 : varlen_copy_cost(p, count * longest);
      const double found =
          cost[begin] + copies + varlen_cost(p, count, longest - kinds[begin].offset, longest);
      if (found < cost[last + 1]) {
        cost[last + 1] = found;
        first[last] = begin;
      }
    }
  }
  return first;
}

}  // namespace varlen_detail

// Groups by length, the one that takes longest first: while it runs, the host launches the others. `documents`
// have queries; their order is changed.
inline std::vector<VarlenGroup> group_by_length(std::vector<VarlenDocument>& documents,
                                                const VarlenProblem& p) {
  using varlen_detail::Kind;
  std::sort(documents.begin(), documents.end(), [](const VarlenDocument& a, const VarlenDocument& b) {
    if (a.offset() != b.offset()) return a.offset() < b.offset();
    return a.num_keys != b.num_keys ? a.num_keys < b.num_keys : a.key_begin < b.key_begin;
  });
  const std::vector<Kind> kinds = varlen_detail::kinds_of(documents, p);
  const std::vector<int64_t> first = varlen_detail::cheapest_partition(kinds, p);
  std::vector<VarlenGroup> groups;
  for (auto last = static_cast<int64_t>(kinds.size()) - 1; last >= 0; last = first[last] - 1) {
    const auto begin = documents.begin() + kinds[first[last]].first;
    const auto end = documents.begin() + kinds[last].last;
    std::sort(begin, end,
              [](const VarlenDocument& a, const VarlenDocument& b) { return a.key_begin < b.key_begin; });
    VarlenGroup group;
    group.first = begin - documents.begin();
    group.count = end - begin;
    for (auto it = begin; it != end; ++it) {
      group.num_keys = std::max(group.num_keys, it->num_keys);
    }
    group.num_queries = group.num_keys - kinds[first[last]].offset;
    group.in_place = true;
    group.query_begin = begin->query_begin;
    group.key_begin = begin->key_begin;
    for (auto it = begin; it != end; ++it) {
      group.in_place &= it->num_keys == group.num_keys && it->num_queries == group.num_queries &&
                        (it == begin || varlen_detail::follows(it[-1], *it));
    }
    varlen_detail::append_group(groups, group);
  }
  const auto cost = [&](const VarlenGroup& x) { return varlen_cost(p, x.count, x.num_queries, x.num_keys); };
  std::stable_sort(groups.begin(), groups.end(),
                   [&](const VarlenGroup& a, const VarlenGroup& b) { return cost(a) > cost(b); });
  return groups;
}

// Groups equal documents that lie one behind the other.
inline std::vector<VarlenGroup> group_by_document(const std::vector<VarlenDocument>& documents) {
  std::vector<VarlenGroup> groups;
  const auto size = static_cast<int64_t>(documents.size());
  for (int64_t first = 0, last = 0; first < size; first = last) {
    const VarlenDocument& head = documents[first];
    for (last = first + 1; last < size && documents[last].num_keys == head.num_keys &&
                           documents[last].num_queries == head.num_queries &&
                           varlen_detail::follows(documents[last - 1], documents[last]);) {
      ++last;
    }
    varlen_detail::append_group(groups, {first, last - first, head.num_queries, head.num_keys, true,
                                         head.query_begin, head.key_begin});
  }
  return groups;
}

// Groups documents in the order of their lengths, the longest first, without knowing them: of documents that
// share `num_rows` rows, the one of rank i (from 1) has at most num_rows / i. Every document runs with queries
// for all of its tokens, because where its own begin is not known.
inline std::vector<VarlenGroup> group_by_rank(int64_t num_documents, int64_t num_rows, int64_t max_keys) {
  std::vector<VarlenGroup> groups;
  const int64_t longest = std::min(max_keys, num_rows);
  for (int64_t first = 0; first < num_documents && longest > 0;) {
    const int64_t bound = std::min(longest, num_rows / (first + 1));
    if (bound == 0) break;  // the others are empty
    const auto ratio = static_cast<int64_t>(kRankRatio * static_cast<double>(first + 1));
    const int64_t last = std::min(num_documents, std::max({num_rows / longest, ratio, first + 1}));
    varlen_detail::append_group(groups, {first, last - first, bound, bound});
    first = last;
  }
  return groups;
}

inline int64_t padded_rows(const std::vector<VarlenGroup>& groups) {
  int64_t rows = 0;
  for (const VarlenGroup& group : groups) {
    rows += group.count * group.num_queries;
  }
  return rows;
}

}  // namespace htree::tree_attention
