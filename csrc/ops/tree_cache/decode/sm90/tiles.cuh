// The stream of tiles of a warp: the 16 rows of a slot come through a ring of the warp's own, keys of all its
// slots of a layer first, then their values, then the keys of the layer below.
#pragma once

#include <type_traits>

#include "ops/tree_cache/decode/sm90/block.cuh"

namespace htree::tree_cache {

constexpr uint32_t kAbsentRow = 0xffffffffu;

// Where the pack `chunk` of row `row` stands in a tile. Both ways of reading meet all banks: four neighbouring
// packs of two rows, and one pack of eight rows.
template <class Tr>
__device__ __forceinline__ int pack_offset(int row, int chunk) {
  const int swizzle = (row & 1) << 2 | (row >> 1 & 3);
  return row * Tr::kRowBytes + (chunk ^ swizzle) * 16;
}

// ---- packed tokens: where codes and scales stand in a tile, and how codes become elements of T, with the numbers of
// PackedRow in attend.cuh. docs/semantics/tree_cache.md §7.5

// Where the 16 bytes `chunk` of the codes of row `row` stand in a tile. A row has 2, 4 or 8 chunks. They change places
// within their row, by the line of 128 bytes in which the row stands. Then both ways of reading meet all banks: one
// chunk of eight rows, and two neighbouring ones of four rows.
template <class Tr>
__device__ __forceinline__ int code_offset(int row, int chunk) {
  constexpr int kChunks = Tr::kCodeBytes / 16;
  const int line = row / (8 / kChunks);
  const int swizzle = (line << 1 & (kChunks - 2)) | (line / (kChunks / 2) & 1);
  return row * Tr::kCodeBytes + (chunk ^ swizzle) * 16;
}

// Four codes of a word as bytes, each above its code by kCodeBias. Of codes of 4 bits they are those in even places, or
// in odd ones.
template <int kBits>
constexpr int kCodeBias = kBits == 8 ? 128 : 8;
template <int kBits>
__device__ __forceinline__ uint32_t biased_codes(uint32_t word, int odd) {
  return kBits == 8 ? word ^ 0x80808080u : word >> 4 * odd & 0x0f0f0f0fu;
}

// The bytes kLow and kHigh of biased codes, each times its scale (two fp16 in a word), as two elements of T. A code and a
// scale have 18 bits together, so a product is rounded once: by the fp16 multiplication itself, or behind an exact one
// in fp32.
template <typename T, int kBits, int kLow, int kHigh>
__device__ __forceinline__ uint32_t expand_pair(uint32_t biased, uint32_t scales) {
  constexpr int kBias = kCodeBias<kBits>;
  const __half2 factors = *reinterpret_cast<const __half2*>(&scales);
  if constexpr (std::is_same_v<T, __half>) {
    // The upper byte 0x64 makes 1024 + x of a byte x.
    const uint32_t sums = __byte_perm(biased, 0x64646464, 0x4040 | kHigh << 8 | kLow);
    constexpr uint32_t kSubtracted = (0x6400 + kBias) * 0x00010001u;
    const __half2 codes =
        __hsub2(*reinterpret_cast<const __half2*>(&sums), *reinterpret_cast<const __half2*>(&kSubtracted));
    const __half2 values = __hmul2(codes, factors);
    return *reinterpret_cast<const uint32_t*>(&values);
  } else {
    // The upper byte 0x4b makes 2^23 + x of a byte x.
    const auto code = [&](int byte) {
      return __uint_as_float(__byte_perm(biased, 0x4b000000, 0x7440 | byte)) - (8388608.0f + kBias);
    };
    const float2 wide = __half22float2(factors);
    return device::pack_pair<T>(wide.x * code(kLow), wide.y * code(kHigh));
  }
}

// The eight codes at a shared address, times one scale that a word holds twice.
template <typename T, int kBits>
__device__ __forceinline__ uint4 expand_eight(uint32_t address, uint32_t scale) {
  uint32_t first, second;  // biased, in their order
  if constexpr (kBits == 8) {
    const uint2 words = device::load_shared_8(address);
    first = biased_codes<8>(words.x, 0);
    second = biased_codes<8>(words.y, 0);
  } else {
    const uint32_t word = device::load_shared_4(address);
    const uint32_t even = biased_codes<4>(word, 0), odd = biased_codes<4>(word, 1);
    first = __byte_perm(even, odd, 0x5140);
    second = __byte_perm(even, odd, 0x7362);
  }
  return make_uint4(expand_pair<T, kBits, 0, 1>(first, scale), expand_pair<T, kBits, 2, 3>(first, scale),
                    expand_pair<T, kBits, 0, 1>(second, scale), expand_pair<T, kBits, 2, 3>(second, scale));
}

// ---- rows and the ring

// row_of() for r = 16: the pool row of a finished node, or kAbsentRow. A parent of -1 has children behind every token.
// Packed tokens have pools of their own.
template <class Tr>
__device__ __forceinline__ uint32_t row_of_node(const DecodeBlock<Tr>& block, int layer, uint32_t node) {
  const PageLayout& layout = block.attend().layout;
  if (node > node_at(block.walk.query.token, layer)) {
    return kAbsentRow;
  }
  const int log2 = kDecodeRateLog2 * layer;  // of the tokens of a node
  const uint32_t page = block.params.page_size.quotient(((node + 1) << log2) - 1);
  const uint32_t in_page = node - (page * layout.page_size >> log2);
  const Place place = {page, layout.first_row[layer] + in_page};
  const int64_t page_rows = Tr::kLeafBits > 0 && layer == 0 ? layout.page_size : layout.key_rows();
  const int64_t row = row_at(block.attend(), block.walk, place, page_rows, 1);
  return row < 0 ? kAbsentRow : static_cast<uint32_t>(row);
}

// Writes the pool row of each candidate of the warp's slots to rows(which). Only this warp reads them.
template <class Tr>
__device__ __forceinline__ void find_rows(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                          const int32_t* list, uint32_t* rows) {
  const int tiles = block.params.plan.shares * slots.tiles;
  // Above the tokens the rightmost node is opened whatever its score, and may be unfinished: it is not read.
  const int readable = slots.num - (slots.layer > 0);
  const int child = block.lane % kDecodeRate;
  // The table is read for four pairs of slots together.
  constexpr int kAtOnce = 4, kStep = 32 / kDecodeRate;
  for (int first = block.lane / kDecodeRate; first < tiles; first += kAtOnce * kStep) {
    int slot[kAtOnce];
    uint32_t row[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = first + i * kStep;
      slot[i] = index < tiles ? slot_of_tile(block, slots, index) : -1;
      const int in_list = slots.first + max(slot[i], 0);
      const bool present = slot[i] >= 0 && in_list * kDecodeRate + child < readable;
      const uint32_t node = static_cast<uint32_t>(list[in_list]) * kDecodeRate + child;
      row[i] = row_of_node(block, slots.layer, present ? node : ~0u);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (slot[i] >= 0) {
        rows[slot[i] * kDecodeRate + child] = row[i];
      }
    }
  }
  __syncwarp();
}

// The ring of a warp. Tiles are waited for in the order in which they were asked for.
template <class Tr>
class TileRing {
 public:
  using T = typename Tr::T;

  __device__ __forceinline__ explicit TileRing(const DecodeBlock<Tr>& block)
      : block_(block), memory_(block.ring()), stages_(block.params.plan.stages) {}

  __device__ __forceinline__ int ahead() const { return stages_ - 1; }

  // The buffer of a tile: that of the one that was taken last. It is free until the next ask().
  __device__ __forceinline__ uint8_t* buffer() const {
    return memory_ + (taken_ == 0 ? stages_ - 1 : taken_ - 1) * Tr::kStageBytes;
  }

  // Asks for place `index` of a layer's sequence: its keys, then its values. Places without a tile
  // count too, because waiting counts. It takes the buffer of the tile before the last one that was taken.
  __device__ __forceinline__ void ask(const LayerSlots& slots, const uint32_t* rows, int index) {
    __syncwarp();
    const int tiles = block_.params.plan.shares * slots.tiles;
    if (slots.layer >= 0 && index < 2 * tiles) {
      const bool values = index >= tiles;
      const int slot = slot_of_tile(block_, slots, values ? index - tiles : index);
      if (slot >= 0) {
        copy_children(slots, rows, slot, values);
        if (!values) {
          copy_rotation((slots.first + slot) * kDecodeRate);
        }
      }
      asked_ = asked_ + 1 == stages_ ? 0 : asked_ + 1;
    }
    device::commit_copies();
  }

  // Returns the oldest tile that was asked for and not yet taken, when it has arrived.
  __device__ __forceinline__ uint8_t* take() {
    if (stages_ == 4) {
      device::wait_copies<2>();
    } else if (stages_ == 3) {
      device::wait_copies<1>();
    } else {
      device::wait_copies<0>();
    }
    __syncwarp();
    uint8_t* tile = memory_ + taken_ * Tr::kStageBytes;
    taken_ = taken_ + 1 == stages_ ? 0 : taken_ + 1;
    return tile;
  }

 private:
  __device__ __forceinline__ void copy_children(const LayerSlots& slots, const uint32_t* rows, int slot,
                                                bool values) {
    if constexpr (Tr::kLeafBits > 0) {
      if (has_codes<Tr>(slots)) {
        copy_codes(rows + slot * kDecodeRate, values);
        return;
      }
    }
    copy_rows([&](int row) { return rows[slot * kDecodeRate + row]; }, values);
  }

  // row_of(i) is the pool row of row i of the tile.
  template <class RowOf>
  __device__ __forceinline__ void copy_rows(RowOf&& row_of, bool values) {
    constexpr int kRowsAtOnce = 32 / Tr::kChunks;
    const auto& attend = block_.attend();
    const uint32_t tile = device::shared_address(memory_ + asked_ * Tr::kStageBytes);
    const int chunk = block_.lane % Tr::kChunks;
    const T* pool = (values ? attend.values : attend.keys) + chunk * 8;
#pragma unroll
    for (int first = 0; first < kDecodeRate; first += kRowsAtOnce) {
      const int row = first + block_.lane / Tr::kChunks;
      uint32_t index = row_of(row);
      const bool present = index != kAbsentRow;
      index = present ? index : 0;
      if (Tr::kSpans && values) {
        // A page has more key rows than value rows.
        const auto extra = static_cast<uint32_t>(attend.layout.key_rows() - attend.layout.value_rows());
        index -= block_.params.key_rows.quotient(index) * extra;
      }
      device::copy_async_16_prefix(tile + pack_offset<Tr>(row, chunk), pool + int64_t{index} * Tr::kDim,
                                   present ? 16 : 0);
    }
  }

  // `rows` are those of a slot, whose 16 tokens are neighbours in a page. Tokens behind the query's own are absent: their
  // codes and scales become zeros.
  __device__ __forceinline__ void copy_codes(const uint32_t* rows, bool values) {
    constexpr int kChunks = Tr::kCodeBytes / 16, kRowsAtOnce = 32 / kChunks;
    const LeafPool& pool = values ? block_.params.attend.leaves.values : block_.params.attend.leaves.keys;
    const uint32_t tile = device::shared_address(memory_ + asked_ * Tr::kStageBytes);
    const bool present = rows[block_.lane % kDecodeRate] != kAbsentRow;
    const int count = __popc(__ballot_sync(device::kFullMask, present)) / 2;  // two lanes saw each token
    const int64_t first_row = count > 0 ? rows[0] : 0;
    const int chunk = block_.lane % kChunks;
#pragma unroll
    for (int first = 0; first < kDecodeRate; first += kRowsAtOnce) {
      const int row = first + block_.lane / kChunks;
      const int64_t from = (first_row + (row < count ? row : 0)) * Tr::kCodeBytes + chunk * 16;
      device::copy_async_16_prefix(tile + code_offset<Tr>(row, chunk), pool.codes + from,
                                   row < count ? 16 : 0);
    }
    if (block_.lane < 2) {
      const int eight = block_.lane * 8;  // the tokens of a chunk of scales begin there
      device::copy_async_16_prefix(tile + Tr::kScalesAt + eight * 2, pool.scales + first_row + eight,
                                   min(max(count - eight, 0), 8) * 2);
    }
  }

  // cos and sin of a position stand behind the rows.
  __device__ __forceinline__ void copy_rotation(int position) {
    constexpr int kPacks = Tr::kHalf / 4;
    const auto& options = block_.attend().options;
    if (options.cos == nullptr) {
      return;
    }
    const uint32_t to = device::shared_address(memory_ + asked_ * Tr::kStageBytes + Tr::kTileBytes);
    if (block_.lane < 2 * kPacks) {
      const float* table = block_.lane < kPacks ? options.cos : options.sin;
      device::copy_async_16(to + block_.lane * 16,
                            table + int64_t{position} * Tr::kHalf + block_.lane % kPacks * 4);
    }
  }

  const DecodeBlock<Tr>& block_;
  uint8_t* memory_;
  int stages_;
  int asked_ = 0;  // stage of the next tile to ask for
  int taken_ = 0;  // stage of the next tile to take
};

}  // namespace htree::tree_cache
