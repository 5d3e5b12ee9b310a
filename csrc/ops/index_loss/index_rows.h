// The CPU loops of index_loss, one table per instruction set (host/cpu/isa.h).
#pragma once

#include "host/cpu/simd_prelude.h"

namespace htree::index_loss {

// Keys of T, arithmetic in Real.
template <typename T, typename Real>
struct IndexRows {
  // row[i] = (Real)from[i] * factor, i < d
  void (*widen)(const T* from, int64_t d, Real factor, Real* row);
  // products[r * product_stride + j] = <row r, key j> for `count` keys that lie key_stride elements apart.
  void (*multiply)(const Real* rows, int64_t num_rows, const T* keys, int64_t key_stride, int64_t count,
                   int64_t d, Real* products, int64_t product_stride);
  // The sum of e^(x[i] - reference), i < count.
  Real (*sum_exponentials)(const Real* x, int64_t count, Real reference);
  // sums[i] += factor * from[i], i < d
  void (*add_scaled)(const T* from, int64_t d, Real factor, Real* sums);
  // to[i] = (T)from[i], i < d
  void (*narrow)(const Real* from, int64_t d, T* to);
};

struct IndexTables {
  IndexRows<float, float> for_float;
  IndexRows<Fp16, float> for_half;
  IndexRows<Bf16, float> for_bfloat16;
  IndexRows<double, double> for_double;
};

extern const IndexTables kIndexTablesBaseline;
extern const IndexTables kIndexTablesAvx2;
extern const IndexTables kIndexTablesAvx512;

}  // namespace htree::index_loss
