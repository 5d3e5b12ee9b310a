// Which kernel of select_blocks runs on a GPU, and how a call is cut into launches. Pure functions, so that they can be
// tested without a GPU. No torch, no CUDA.
#pragma once

#include <algorithm>
#include <string>

#include "ops/selection/block_options.h"

namespace htree::tree_attention {

enum class BlockKernel {
  kGeneral,     // any dtype and block_size: fp32 multiply-adds
  kTensorCore,  // fp16 and bf16, block_size a multiple of kUnitTokens, sm_80 and later
};

inline std::string describe(BlockKernel kernel) {
  return kernel == BlockKernel::kGeneral ? "general" : "tensor_core";
}

// The tensor-core kernel stores the maximum of every unit of tokens; a block's score is that of its units.
constexpr int64_t kUnitTokens = 16;
// Rows of scores hold whole tiles of units, and a place for the diagonal block.
constexpr int64_t kTileUnits = 8;
// Floats of the tiles of a row of scores: whole groups of 16 bytes.
constexpr int64_t tile_row(int64_t row) {
  return (row / kTileUnits + 3) / 4 * 4;
}
// Rows of so many tiles are cut by them: of 1 048 576 tokens that leaves a quarter of the time, of 131 072 it takes a fifth
// longer.
constexpr int64_t kLeastTiles = 2048;
// Leaders of a thread block of either kernel.
constexpr int64_t kTensorCoreLeaders = 128;
constexpr int64_t kGeneralLeaders = 8;
// Units of a thread block of the tensor-core kernel: enough to pay for the loads of its queries, and few enough that a
// chunk of long sequences fills a GPU.
constexpr int64_t kUnitsOfSplit = 256;
// Scores of a chunk. What the L2 of an H200 holds, 64 MiB, is too few leaders to fill the GPU.
constexpr int64_t kScoreChunkBytes = int64_t{256} << 20;
// Keys of rows that do not fit into shared memory.
constexpr int64_t kKeyScratchBytes = int64_t{128} << 20;
constexpr int64_t kMostGridRows = 65535;

// Of a call on a GPU; bits of a score depend on this alone, never on sizes.
inline BlockKernel choose_block_kernel(bool half_dtype, int64_t block_size, int major) {
  return half_dtype && block_size % kUnitTokens == 0 && major >= 8 ? BlockKernel::kTensorCore
                                                                   : BlockKernel::kGeneral;
}

struct BlockLaunch {
  BlockKernel kernel;
  int64_t unit;     // tokens whose maximum is stored
  int64_t units;    // of the blocks before the last diagonal one of the longest sequence
  int64_t row;      // floats of a row of scores
  int64_t heads;    // of a chunk
  int64_t leaders;  // of a chunk
  int64_t splits;   // thread blocks that share the units of the same leaders
  int64_t bytes() const { return row * heads * leaders * 4; }
  int64_t tile_bytes() const { return tile_row(row) * heads * leaders * 4; }
};

// How the choice among blocks of `block_size` tokens reads the maxima of the tiles of units: not, in the place of the units
// where a block has whole tiles, or, where a tile has whole blocks, to leave out the tiles that no chosen block lies in.
enum class TileUse { kNone, kUnits, kCut };
inline TileUse tile_use(const BlockLaunch& launch, const BlockOptions& options, int64_t block_size) {
  const int64_t tile = kTileUnits * launch.unit;
  if (launch.kernel != BlockKernel::kTensorCore) {
    return TileUse::kNone;
  }
  if (block_size % tile == 0) {
    return TileUse::kUnits;
  }
  const bool long_rows =
      launch.units >= std::max(kLeastTiles, 2 * options.count) * kTileUnits && !options.open_next;
  return tile % block_size == 0 && long_rows ? TileUse::kCut : TileUse::kNone;
}

// `most_tokens`: of the longest sequence; `slots`: leaders of all sequences.
inline BlockLaunch block_launch(BlockKernel kernel, int64_t most_tokens, int64_t slots, int64_t num_heads,
                                int64_t block_size) {
  BlockLaunch launch{};
  const bool tensor_core = kernel == BlockKernel::kTensorCore;
  launch.kernel = kernel;
  launch.unit = tensor_core ? kUnitTokens : block_size;
  launch.units = most_tokens > 0 ? (most_tokens - 1) / block_size * (block_size / launch.unit) : 0;
  launch.row = ceil_div(launch.units + 1, kTileUnits) * kTileUnits;
  const int64_t rows = std::max<int64_t>(1, kScoreChunkBytes / (launch.row * 4));
  launch.heads = std::clamp<int64_t>(std::min(rows, kMostGridRows), 1, std::max<int64_t>(1, num_heads));
  const int64_t tile = tensor_core ? kTensorCoreLeaders : kGeneralLeaders;
  launch.leaders = std::min(rows / launch.heads, kMostGridRows * tile);
  launch.leaders -= launch.leaders > tile ? launch.leaders % tile : 0;
  launch.leaders = std::clamp<int64_t>(launch.leaders, 1, std::max<int64_t>(1, slots));
  launch.splits = std::max<int64_t>(1, ceil_div(launch.units, kUnitsOfSplit));
  return launch;
}

}  // namespace htree::tree_attention
