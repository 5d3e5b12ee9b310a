// Sizes and shared memory of per_list_gradient.cuh: a tile is 8 parents, 128 keys, against 128 query rows.
#pragma once

#include "device/hopper/mbarrier.cuh"
#include "ops/tree_attention/cuda/backward/per_list/gradient_task.cuh"

namespace htree::tree_attention {

// What a consumer must know of a slot beyond keys and values: bit c = child c takes part for some query.
constexpr uint32_t kWholeSlot = 0xffff;
constexpr uint32_t kOwnSlot = 0x10000;    // queries see different numbers of its children
constexpr uint32_t kQuerySlot = 0x20000;  // queries have masks of their own

template <int kDim_>
struct GradientTile {
  static constexpr int kDim = kDim_;  // of keys and of values
  static constexpr int kProducerWarps = 4;
  static constexpr int kThreads = 128 * 3;  // one producer group, two consumer groups of 64 keys each
  // 168 registers at launch; the accumulators of three products and the weights fill 224
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(128 * (kProducerRegisters + 2 * kConsumerRegisters) <= kThreads * kLaunchRegisters,
                "raise_registers would wait for ever");

  static constexpr int kStages = 2;
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kSlotBytes = kParentRows * kRowBytes;
  static constexpr int kTileBytes = kGradientKeys * kRowBytes;
  static constexpr int kQueryBytes = kGradientRows * kRowBytes;
  // dS^T as [64 query rows][key][64 rows], rows of 128 bytes with the swizzle of that width
  static constexpr int kScoreHalfBytes = kGradientKeys * 128;
};

template <typename Tile>
struct GradientShared {
  char query[Tile::kQueryBytes];     // rotated to their positions, fp16
  char gradient[Tile::kQueryBytes];  // dO
  char score_gradient[2 * Tile::kScoreHalfBytes];
  char keys[Tile::kStages][Tile::kTileBytes];
  char values[Tile::kStages][Tile::kTileBytes];
  float log_sum[kGradientRows];      // log2 of the sum of e^score, less the shift of the weights
  float delta[kGradientRows];        // in the units of dS
  uint8_t own_limit[kGradientRows];  // children of the own parent that the row sees
  uint32_t slots[Tile::kStages][kGradientSlots];
  // bit c = child c takes part for the query, counted from the first of the block's
  uint16_t query_masks[Tile::kStages][kGradientSlots][kGradientRun];
  device::Barrier keys_landed[Tile::kStages][Tile::kProducerWarps];  // one producer warp's copies
  device::Barrier keys_full[Tile::kStages];                          // every warp's keys are rotated
  device::Barrier keys_empty[Tile::kStages];
  device::Barrier values_full[Tile::kStages];
  device::Barrier values_empty[Tile::kStages];
};

enum GradientBarrier : int {
  kRowsMeet = 1,
  kGroupWrote = 2,   // + group: its warps have written dS
  kOtherWrote = 4,   // + group: its dS can be read by the other group
  kDoneReading = 6,  // + group: it no longer reads dS
};

// Stage and phase of the tile with running number `tile_idx` of this thread block.
template <typename Tile>
__device__ __forceinline__ int gradient_stage(unsigned tile_idx) {
  return static_cast<int>(tile_idx % Tile::kStages);
}
template <typename Tile>
__device__ __forceinline__ uint32_t gradient_phase(unsigned tile_idx) {
  return tile_idx / Tile::kStages & 1;
}

}  // namespace htree::tree_attention
