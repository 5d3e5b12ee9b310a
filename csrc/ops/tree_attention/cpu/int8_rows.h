// Rows rounded to int8, each with a step of its own, for scores of span means in int8:
// docs/semantics/tree_attention.md §1.15. The integers are kept as Real. Their products and the sums of up to
// kMostInt8Dims of them are exact in it, so that the kernels of other scores multiply them.
#pragma once

#include <cstdint>
#include <limits>

#include "ops/tree_attention/cpu/query_kernels.h"

namespace htree::tree_attention {

// Functions are static, because they are compiled for several instruction sets.

// Whether the candidates are the nodes 0, 1, ... up to the query's own, so that candidate p is node p.
static inline bool full_list(const Candidates& candidates) {
  bool full = candidates.count == candidates.rightmost + 1;
  for (int64_t i = 0; i < candidates.num_parents; ++i) {
    full &= candidates.parents[i] == i;
  }
  return full;
}

// Replaces a rotated row by integers and returns its step: the row was about the integers times the step.
template <typename Real>
static inline Real round_row(Real* row, int64_t count) {
  // Adding it to a small number and taking it away again leaves the nearest integer, of two the even one.
  constexpr Real kRounder = Real{1.5} / std::numeric_limits<Real>::epsilon();
  Real largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const Real magnitude = row[i] < 0 ? -row[i] : row[i];
    finite &= magnitude <= std::numeric_limits<Real>::max();
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool zero = largest < static_cast<Real>(0x1p-100);
  if (!finite || zero) {
    for (int64_t i = 0; i < count; ++i) {
      row[i] = 0;
    }
    return finite ? Real{0} : std::numeric_limits<Real>::quiet_NaN();
  }
  const Real inverse = 127 / largest;
  for (int64_t i = 0; i < count; ++i) {
    row[i] = (row[i] * inverse + kRounder) - kRounder;
  }
  return largest / 127;
}

}  // namespace htree::tree_attention
