// Which columns the rows of a thread block count, document by document.
#pragma once

#include "ops/index_loss/cuda/any/loss_params.h"

namespace htree::index_loss {

__device__ __forceinline__ const LossRow* table_of(const LossSpan& span, int32_t batch) {
  return span.table + static_cast<int64_t>(span.first_batch + batch) * span.rows;
}

// The column of the first unit of a document.
__device__ __forceinline__ int32_t first_column_of(const LossSpan& span, int32_t start) {
  return start / span.block_size * (span.block_size / span.unit);
}

// Units [begin, end) of a document, and the column of its unit 0 among those that are held.
struct UnitRange {
  int32_t begin, end;
  int32_t column;
};

// Those of share `split` of the columns, as far as the last of the `units` that any row counts.
__device__ __forceinline__ UnitRange units_of_split(const LossSpan& span, int32_t start, int32_t units,
                                                    int32_t split) {
  const int64_t first = static_cast<int64_t>(split) * span.split_columns;
  const int64_t last = min(first + span.split_columns, static_cast<int64_t>(span.num_columns));
  const int32_t column = first_column_of(span, start) - span.first_column;
  return {static_cast<int32_t>(max(first - column, int64_t{0})),
          static_cast<int32_t>(min(last - column, static_cast<int64_t>(units))), column};
}

// Calls f(first row, last row, start, units) for the runs of rows [first, last) that have one document and count anything.
template <typename F>
__device__ __forceinline__ void for_runs(const LossRow* table, int32_t first, int32_t last, const F& f) {
  while (first < last) {
    const LossRow row = table[first];
    const int32_t end = min(row.run_end, last);
    const int32_t units = table[end - 1].units;  // rows ascend
    if (units > 0) {
      f(first, end, row.start, units);
    }
    first = end;
  }
}

}  // namespace htree::index_loss
