// What the CPU kernels of the stages share: the row kernels for a dtype, and the walk over the
// candidates of a row.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "ops/tree/cpu/stage_rows.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

inline const StageTables& stage_tables() {
  return HTREE_PICK_ISA(kStageTables);
}

// From torch's element type to the storage and arithmetic types of the row kernels.
template <typename T>
struct Stage {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using Rank = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;
  static const auto& rows() { return loops_of<T>(stage_tables()); }
};

template <typename T>
const Storage<T>* stored(const at::Tensor& tensor) {
  return reinterpret_cast<const Storage<T>*>(tensor.const_data_ptr<T>());
}
template <typename T>
Storage<T>* stored_mutable(const at::Tensor& tensor) {
  return reinterpret_cast<Storage<T>*>(tensor.mutable_data_ptr<T>());
}

// Strides of the first three dims; further dims, if any, belong to the row.
struct RowStrides {
  int64_t d0, d1, d2;
  int64_t at(int64_t i0, int64_t i1, int64_t i2) const { return i0 * d0 + i1 * d1 + i2 * d2; }
};
inline RowStrides row_strides(const at::Tensor& x) {
  return {x.stride(0), x.stride(1), x.stride(2)};
}

// Runs task(i0, i1, i2) for every row of [n0, n1, n2] in parallel. make_task() is called once per piece of
// work and owns its scratch. `cost`, of one row in elementary steps, sets the size of a piece.
template <typename MakeTask>
void for_rows(int64_t n0, int64_t n1, int64_t n2, int64_t cost, MakeTask&& make_task) {
  constexpr int64_t kStepsPerPiece = 1 << 15;
  const int64_t grain = std::max<int64_t>(1, kStepsPerPiece / std::max<int64_t>(1, cost));
  at::parallel_for(0, n0 * n1 * n2, grain, [&](int64_t begin, int64_t end) {
    auto task = make_task();
    int64_t i0 = begin / (n1 * n2);
    int64_t i1 = begin / n2 % n1;
    int64_t i2 = begin % n2;
    for (int64_t i = begin; i < end; ++i) {
      task(i0, i1, i2);
      i2 = i2 + 1 == n2 ? 0 : i2 + 1;
      i1 = i2 != 0 ? i1 : i1 + 1 == n1 ? 0 : i1 + 1;
      i0 += i2 == 0 && i1 == 0;
    }
  });
}

// m of docs/semantics/tree_attention.md §1.3: the number of entries before the first -1.
inline int64_t count_parents(const int32_t* parents, int64_t width) {
  return std::find(parents, parents + width, -1) - parents;
}

// nodes[p] for p in [0, num): the node of candidate p, or -1 where it is absent. The list holds at least num
// / r parents.
inline void resolve_nodes(const int32_t* parents, int64_t num, int64_t r, int64_t rightmost,
                          int64_t num_nodes, int64_t* nodes) {
  for (int64_t first = 0; first < num; first += r, ++parents) {
    const int64_t base = int64_t{*parents} * r;
    const int64_t children = std::min(r, num - first);
    for (int64_t c = 0; c < children; ++c) {
      nodes[first + c] = node_present(base + c, rightmost, num_nodes) ? base + c : -1;
    }
  }
}

// Sorts positions, which come ascending, into the order of docs/semantics/tree_attention.md §1.6: larger rank
// first, then smaller position.
template <typename Rank>
void order_by_key(int32_t* positions, const Rank* ranks, int64_t count,
                  std::vector<std::pair<Rank, int32_t>>& keys) {
  keys.clear();
  for (int64_t i = 0; i < count; ++i) {
    keys.emplace_back(~ranks[i], positions[i]);
  }
  std::sort(keys.begin(), keys.end());
  for (int64_t i = 0; i < count; ++i) {
    positions[i] = keys[i].second;
  }
}

}  // namespace htree::tree_attention
