// Sizes and shared memory of the kernel that attends for whole selection blocks, see per_list_attend.cuh.
//
// A tile is 8 parents, 128 keys, one parent per producer warp. With 128 rows each of the two consumer
// warpgroups multiplies its 64 rows by every tile; with 64 rows they take the tiles in turn and merge.
#pragma once

#include "device/hopper/mbarrier.cuh"
#include "ops/tree_attention/cuda/tree/packed_parent.cuh"

namespace htree::tree_attention {

constexpr int kTileSlots = 8;
constexpr int kTileKeys = kTileSlots * kParentRows;

// What the consumers must know of a tile beyond its keys and values.
struct alignas(16) TileNote {
  // Per slot: bit c = child c takes part, kScaled = some key row has a power of two other than 1.
  uint32_t slots[kTileSlots];
  uint8_t exponents[kTileKeys];  // of what undoes the powers, biased; valid where kScaled is set
  uint32_t nonfinite;            // values that only some of the queries see were not finite and read as 0

  static constexpr uint32_t kAll = 0xffff;
  static constexpr uint32_t kScaled = 0x10000;
};

template <int kKeyDim_, int kValueDim_, int kRows_>
struct PerListTile {
  static constexpr int kKeyDim = kKeyDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kRows = kRows_;  // (query, head) pairs of a block
  static_assert(kRows == 64 || kRows == 128);
  static constexpr bool kSplitKeys = kRows == 64;
  static constexpr int kTileStep = kSplitKeys ? 2 : 1;  // tiles from one of a consumer group to its next

  static constexpr int kProducerGroups = 2;
  static constexpr int kConsumerGroups = 2;
  static constexpr int kThreads = 128 * (kProducerGroups + kConsumerGroups);
  static_assert(kProducerGroups * 4 == kTileSlots);
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 200;
  static constexpr int kLaunchRegisters = 65536 / kThreads;
  static_assert(128 * (kProducerGroups * kProducerRegisters + kConsumerGroups * kConsumerRegisters) <=
                    kThreads * kLaunchRegisters,
                "raise_registers would wait for ever");

  static constexpr int kStages = 3;
  // Notes outlive the keys of their tile by the rest of the consumers' iteration: a note is written again
  // only after the keys of the same group's next tile have been read.
  static constexpr int kNotes = 8;
  static_assert(kNotes >= kStages + kTileStep);

  static constexpr int kQueryBytes = kRows * kKeyDim * 2;
  static constexpr int kKeyBytes = kTileKeys * kKeyDim * 2;
  static constexpr int kValueBytes = kTileKeys * kValueDim * 2;
  static constexpr int kSlotKeyBytes = kParentRows * kKeyDim * 2;
  static constexpr int kSlotValueBytes = kParentRows * kValueDim * 2;
  // Half of the output of 64 rows in fp32; the other half goes where the queries were.
  static constexpr int kExchangeBytes = kSplitKeys ? 64 * kValueDim * 2 : 0;
  static_assert(!kSplitKeys || kExchangeBytes <= kQueryBytes);
};

template <typename Tile>
struct PerListShared {
  char query[Tile::kQueryBytes + Tile::kExchangeBytes];
  char keys[Tile::kStages][Tile::kKeyBytes];
  char values[Tile::kStages][Tile::kValueBytes];
  float unscale[Tile::kRows];  // undoes the power of two of a query row, times the scale of the scores
  float2 states[Tile::kSplitKeys ? 2 * 64 : 1];  // max and sum of the groups that split the keys
  TileNote notes[Tile::kNotes];
  device::Barrier keys_landed[Tile::kStages][kTileSlots];  // one producer warp's copy
  device::Barrier keys_full[Tile::kStages];                // every warp's keys are rotated
  device::Barrier keys_empty[Tile::kStages];
  device::Barrier values_full[Tile::kStages];
  device::Barrier values_empty[Tile::kStages];
};

enum PerListBarrier : int {
  kQueryReady = 1,  // and kQueryReady + 1: one per consumer group
  kGroupsMeet = 3,
};

}  // namespace htree::tree_attention
