// A block of a row, from the columns that are held.
#pragma once

#include "ops/index_loss/cuda/any/loss_rows.cuh"

namespace htree::index_loss {

struct HeldBlock {
  float mass;      // mean over the heads of the index head
  float score;     // NaN where a product is
  int32_t column;  // that has the score first
};

// The columns of a row and index head; row counts the batches of the launch.
struct HeldRow {
  const float* masses;  // [parts, num_columns]
  const float* scores;
  const int32_t* places;
};

__device__ __forceinline__ HeldRow held_row(const LossSpan& span, const HeldColumns& held, int64_t row,
                                            int32_t head) {
  const int64_t at = row * held.index_heads + head;
  return {held.masses + at * held.parts * span.num_columns, held.scores + at * span.num_columns,
          held.places + at * span.num_columns};
}

// `column` is that of the block's first unit.
__device__ __forceinline__ HeldBlock held_block(const LossSpan& span, const HeldColumns& held,
                                                const HeldRow& row, int32_t column, int32_t units) {
  HeldBlock block = {0.0f, row.scores[column], column};
  for (int32_t unit = 0; unit < units; ++unit) {
    for (int32_t part = 0; part < held.parts; ++part) {
      block.mass += row.masses[static_cast<int64_t>(part) * span.num_columns + column + unit];
    }
    const float score = row.scores[column + unit];
    if (score > block.score || (score != score && block.score == block.score)) {
      block.score = score;
      block.column = column + unit;
    }
  }
  block.mass *= held.share;
  return block;
}

// Blocks [first, last) of a row among the held ones, and the columns of its block 0 and of a block.
struct BlockRange {
  int32_t first, last;
  int32_t column, units;
};

__device__ __forceinline__ BlockRange held_blocks(const LossSpan& span, const LossRow& row) {
  const int32_t units = span.block_size / span.unit;
  const int32_t column = first_column_of(span, row.start) - span.first_column;
  // Ranges begin and end with blocks.
  return {max(-column / units, 0), min((span.num_columns - column) / units, row.units / units), column,
          units};
}

}  // namespace htree::index_loss
