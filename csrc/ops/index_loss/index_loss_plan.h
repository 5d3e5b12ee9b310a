// Which kernel of index_loss runs on a GPU, and how a call is cut into launches. Pure functions, so that they can be
// tested without a GPU. No torch, no CUDA.
#pragma once

#include <algorithm>
#include <string>

#include "device/sizes.h"

namespace htree::index_loss {

enum class MassKernel {
  kGeneral,     // any dtype, K and block_size: fp32 multiply-adds
  kTensorCore,  // fp16 and bf16, K and block_size multiples of 16, K up to 256, sm_80 and later
};

inline std::string describe(MassKernel kernel) {
  return kernel == MassKernel::kGeneral ? "general" : "tensor_core";
}

constexpr int64_t kUnitTokens = 16;        // the tensor cores sum masses over units of tokens
constexpr int64_t kTileUnits = 8;          // of a tile of keys
constexpr int64_t kMostTensorWidth = 256;  // K
constexpr int64_t kGeneralHeads = 8;       // query rows of a thread block of the general kernel
constexpr int64_t kScorePositions = 8;     // positions of a thread block that scores
// Thread blocks that fill a GPU a few times over, whose shares of a triangle differ.
constexpr int64_t kFillingBlocks = 1024;
// Masses, scores and their tokens, of a range of columns.
constexpr int64_t kScratchBytes = int64_t{160} << 20;
constexpr int64_t kMostGridRows = 65535;

struct LossProblem {
  int64_t batch = 1, rows = 1, tokens = 1;
  int64_t heads = 1, kv_heads = 1, index_heads = 1;
  int64_t key_dim = 1;
  int64_t block_size = 16;
  bool half_dtype = false;
  int major = 9;

  int64_t group() const { return heads / kv_heads; }
};

inline int64_t power_of_two_above(int64_t x) {
  int64_t power = 1;
  while (power < x)
    power *= 2;
  return power;
}

// Query rows of a thread block on the tensor cores: a warp holds 32 of them in registers, 16 of wide heads.
constexpr int64_t tile_rows(int64_t key_dim) {
  return key_dim > 128 ? 128 : 256;
}

// Of a call on a GPU.
inline MassKernel choose_mass_kernel(const LossProblem& p) {
  return p.half_dtype && p.major >= 8 && p.key_dim % 16 == 0 && p.key_dim <= kMostTensorWidth &&
                 p.block_size % kUnitTokens == 0
             ? MassKernel::kTensorCore
             : MassKernel::kGeneral;
}

// A *part* is the heads of a K/V head whose masses one warp, or one thread block of the general kernel, adds. A *column* is
// a unit of tokens: columns of a document begin at that of its first block, counted as if blocks began at token 0.
struct LossPlan {
  MassKernel kernel;
  int64_t unit;           // tokens of a column, a divisor of block_size
  int64_t part_heads;     // a power of two; the last heads of a part may be missing
  int64_t parts;          // of a K/V head
  int64_t columns;        // of the longest sequence
  int64_t splits;         // thread blocks that share the columns of the same query rows
  int64_t split_columns;  // of one of them
  int64_t batches;        // whose masses are held at once
  int64_t range_blocks;   // blocks of a range
  int64_t score_columns;  // the same for block scores

  int64_t units_of_block(int64_t block_size) const { return block_size / unit; }
  // Columns that are held: a range, and the block before it, whose last tokens it may have where documents do not begin at
  // multiples of a block.
  int64_t held_columns(int64_t block_size) const { return (range_blocks + 1) * units_of_block(block_size); }
};

// Shares of `columns`, whole tiles, such that `others` times as many thread blocks fill a GPU.
inline int64_t columns_of_split(int64_t columns, int64_t others) {
  const int64_t splits = std::clamp<int64_t>(ceil_div(kFillingBlocks, others), 1, kMostGridRows);
  return std::max<int64_t>(1, ceil_div(ceil_div(columns, splits), kTileUnits)) * kTileUnits;
}

inline LossPlan plan_loss(const LossProblem& p) {
  LossPlan plan{};
  plan.kernel = choose_mass_kernel(p);
  const bool tensor_core = plan.kernel == MassKernel::kTensorCore;
  plan.unit = tensor_core ? kUnitTokens : p.block_size;
  const int64_t most_heads = !tensor_core ? kGeneralHeads : tile_rows(p.key_dim) / 8;
  plan.part_heads = std::min(power_of_two_above(p.group()), most_heads);
  plan.parts = ceil_div(p.group(), plan.part_heads);
  const int64_t blocks = ceil_div(p.tokens, p.block_size);
  plan.columns = blocks * plan.units_of_block(p.block_size);

  const int64_t column_bytes = p.rows * (4 * p.kv_heads * plan.parts + 8 * p.index_heads);
  const int64_t block_bytes = column_bytes * plan.units_of_block(p.block_size);
  const int64_t most_batches = std::max<int64_t>(1, kMostGridRows / (p.kv_heads * plan.parts));
  plan.batches = std::clamp<int64_t>(kScratchBytes / (block_bytes * std::min<int64_t>(blocks + 1, 1024)), 1,
                                     std::min(p.batch, most_batches));
  plan.range_blocks =
      std::clamp<int64_t>(kScratchBytes / (block_bytes * plan.batches) - 1, 1, std::max<int64_t>(1, blocks));

  const int64_t tiles = tensor_core ? ceil_div(p.rows, tile_rows(p.key_dim) / plan.part_heads) : p.rows;
  plan.split_columns = columns_of_split(plan.columns, tiles * p.kv_heads * plan.parts * plan.batches);
  plan.splits = ceil_div(plan.columns, plan.split_columns);
  plan.score_columns =
      columns_of_split(plan.columns, ceil_div(p.rows, kScorePositions) * p.index_heads * plan.batches);
  return plan;
}

}  // namespace htree::index_loss
