// The stream of tiles of a warp: the 16 rows of a slot come through a ring of the warp's own, keys of all its
// slots of a layer first, then their values, then the keys of the layer below.
#pragma once

#include <type_traits>

#include "device/hopper/tma.cuh"
#include "ops/tree_cache/decode/block.cuh"

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

// Where the table of pages says that a node's row is: a page of the pool, or one that the pool does not have where there
// is no row, and the row in it.
struct TableEntry {
  uint32_t page;
  uint32_t row;
};

// The first half of row_of() for r = 16: the entry of a finished node. A parent of -1 has children behind every token.
template <class Tr>
__device__ __forceinline__ TableEntry entry_of_node(const DecodeBlock<Tr>& block, int layer, uint32_t node) {
  const PageLayout& layout = block.attend().layout;
  TableEntry entry = {~0u, 0};
  if (node <= node_at(block.walk.query.token, layer)) {
    const int log2 = kDecodeRateLog2 * layer;  // of the tokens of a node
    const uint32_t page = block.params.page_size.quotient(((node + 1) << log2) - 1);
    entry.row = layout.first_row[layer] + node - (page * layout.page_size >> log2);
    if (page < layout.max_pages) {
      const int64_t table = static_cast<int64_t>(block.walk.query.sequence) * layout.max_pages;
      entry.page = static_cast<uint32_t>(block.attend().sequences.block_table[table + page]);
    }
  }
  return entry;
}

// The second half: the pool row, or kAbsentRow. Packed tokens have pools of their own. A pool has fewer than 2^31 rows.
template <class Tr>
__device__ __forceinline__ uint32_t row_of_entry(const DecodeBlock<Tr>& block, int layer,
                                                 const TableEntry& entry) {
  const PageLayout& layout = block.attend().layout;
  const auto page_rows =
      static_cast<uint32_t>(Tr::kLeafBits > 0 && layer == 0 ? layout.page_size : layout.key_rows());
  const uint32_t row = (entry.page * layout.num_kv_heads + block.walk.head) * page_rows + entry.row;
  return entry.page < layout.num_pages ? row : kAbsentRow;
}

// Writes the pool row of each candidate of the warp's slots to rows(which). Only this warp reads them.
template <class Tr>
__device__ __forceinline__ void find_rows(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                          const int32_t* list, uint32_t* rows) {
  constexpr int kAtOnce = 32 / kDecodeRate;
  constexpr int kBatch = 4;  // looks into the table that are on their way together
  const int tiles = block.params.plan.shares * slots.tiles;
  // Above the tokens the rightmost node is opened whatever its score, and may be unfinished: it is not read.
  const int readable = slots.num - (slots.layer > 0);
  const int child = block.lane % kDecodeRate;
  for (int first = block.lane / kDecodeRate; first < tiles; first += kBatch * kAtOnce) {
    int slot[kBatch];
    TableEntry entries[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * kAtOnce;
      slot[i] = index < tiles ? slot_of_tile(block, slots, index) : -1;
      const int in_list = slots.first + slot[i];
      entries[i] = {~0u, 0};
      if (slot[i] >= 0 && in_list * kDecodeRate + child < readable) {
        entries[i] =
            entry_of_node(block, slots.layer, static_cast<uint32_t>(list[in_list]) * kDecodeRate + child);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (slot[i] >= 0) {
        rows[slot[i] * kDecodeRate + child] = row_of_entry(block, slots.layer, entries[i]);
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

  __device__ __forceinline__ explicit TileRing(const DecodeBlock<Tr>& block) : block_(block) {}

  __device__ __forceinline__ int ahead() const { return stages() - 1; }

  // Asks for place `index` of a layer's sequence: its keys, then its values. Places without a tile
  // count too, because waiting counts. It takes the room of the tile before the last one that was taken.
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
      asked_ = asked_ + 1 == stages() ? 0 : asked_ + 1;
    }
    device::commit_copies();
    fetch(slots, rows, index + block_.params.plan.fetched, 1);
  }

  // Asks for as many places as the ring holds ahead.
  __device__ __forceinline__ void ask_first(const LayerSlots& slots, const uint32_t* rows) {
#pragma unroll 1
    for (int index = 0; index < ahead(); ++index) {
      ask(slots, rows, index);
    }
  }

  // Brings the first places of a layer's sequence to the L2 cache, as soon as their rows are known. ask() keeps up the
  // distance.
  __device__ __forceinline__ void begin_layer(const LayerSlots& slots, const uint32_t* rows) const {
    const int count = block_.params.plan.fetched;
#pragma unroll 1
    for (int first = 0; first < count; first += device::kWarpSize) {
      fetch(slots, rows, first, min(count - first, device::kWarpSize));
    }
  }

  // Waits for the copies of this thread that are older than the first tiles.
  __device__ __forceinline__ void wait_for_older() const {
    if (stages() == 4) {
      device::wait_copies<3>();
    } else if (stages() == 3) {
      device::wait_copies<2>();
    } else {
      device::wait_copies<1>();
    }
  }

  // Returns the oldest tile that was asked for and not yet taken, when it has arrived.
  __device__ __forceinline__ uint8_t* take() {
    if (stages() == 4) {
      device::wait_copies<2>();
    } else if (stages() == 3) {
      device::wait_copies<1>();
    } else {
      device::wait_copies<0>();
    }
    __syncwarp();
    uint8_t* tile = block_.ring() + taken_ * Tr::kStageBytes;
    taken_ = taken_ + 1 == stages() ? 0 : taken_ + 1;
    return tile;
  }

 private:
  __device__ __forceinline__ int stages() const {
    return block_.params.plan.stages;
  }

  // The ring has room for few tiles. What comes behind them is fetched from memory while the warp is busy with others:
  // `count` places from `first` on, up to 32. A lane takes a place whose rows stand side by side.
  __device__ __forceinline__ void fetch(const LayerSlots& slots, const uint32_t* rows, int first,
                                        int count) const {
    const int tiles = block_.params.plan.shares * slots.tiles;
    if (slots.layer < 0 || first >= 2 * tiles) {
      return;
    }
    const int index = first + block_.lane;
    const bool values = index >= tiles;
    int slot = -1;
    if (block_.lane < count && index < 2 * tiles) {
      slot = slot_of_tile(block_, slots, values ? index - tiles : index);
    }
    const uint32_t* children = rows + max(slot, 0) * kDecodeRate;
    if constexpr (Tr::kLeafBits > 0) {
      if (has_codes<Tr>(slots)) {
        const LeafPool& pool = values ? block_.params.leaves.values : block_.params.leaves.keys;
        if (slot >= 0 && children[0] != kAbsentRow) {
          device::bulk_fetch(pool.codes + int64_t{children[0]} * Tr::kCodeBytes,
                             kDecodeRate * Tr::kCodeBytes);
          device::bulk_fetch(pool.scales + children[0], kDecodeRate * sizeof(uint16_t));
        }
        return;
      }
    }
    const bool together = slot >= 0 && side_by_side(slots, children);
    if (together) {
      device::bulk_fetch(row_address(children[0], values), Tr::kTileBytes);
    }
    uint32_t scattered = __ballot_sync(device::kFullMask, slot >= 0 && !together);
    for (; scattered != 0; scattered &= scattered - 1) {
      const int lane = __ffs(static_cast<int>(scattered)) - 1;
      fetch_rows(rows + __shfl_sync(device::kFullMask, slot, lane) * kDecodeRate, first + lane >= tiles);
    }
  }

  // The same for one place whose rows stand anywhere, by all lanes.
  __device__ __forceinline__ void fetch_rows(const uint32_t* children, bool values) const {
    constexpr int kLines = Tr::kRowBytes / 128;
    const int child = block_.lane / kLines;
    if (child < kDecodeRate && children[child] != kAbsentRow) {
      device::fetch_line(row_address(children[child], values) + block_.lane % kLines * 64);
    }
  }

  // Whether all children of a slot are there, in neighbouring rows: where pages hold whole parents.
  __device__ __forceinline__ bool side_by_side(const LayerSlots& slots, const uint32_t* children) const {
    const int log2 = kDecodeRateLog2 * (slots.layer + 1);  // of the tokens of a parent
    return log2 < 32 && (block_.attend().layout.page_size & ((1u << log2) - 1)) == 0 &&
           children[kDecodeRate - 1] != kAbsentRow;
  }

  // A pool row of T.
  __device__ __forceinline__ const T* row_address(uint32_t row, bool values) const {
    const auto& attend = block_.attend();
    if (Tr::kSpans && values) {
      // A page has more key rows than value rows.
      const auto extra = static_cast<uint32_t>(attend.layout.key_rows() - attend.layout.value_rows());
      row -= block_.params.key_rows.quotient(row) * extra;
    }
    return (values ? attend.values : attend.keys) + int64_t{row} * Tr::kDim;
  }

  __device__ __forceinline__ void copy_children(const LayerSlots& slots, const uint32_t* rows, int slot,
                                                bool values) {
    if constexpr (Tr::kLeafBits > 0) {
      if (has_codes<Tr>(slots)) {
        copy_codes(rows + slot * kDecodeRate, values);
        return;
      }
    }
    constexpr int kRowsAtOnce = 32 / Tr::kChunks;
    const uint32_t* children = rows + slot * kDecodeRate;
    const uint32_t tile = device::shared_address(block_.ring() + asked_ * Tr::kStageBytes);
    const int chunk = block_.lane % Tr::kChunks, first_row = block_.lane / Tr::kChunks;
    if (side_by_side(slots, children)) {
      auto from = reinterpret_cast<uint64_t>(row_address(children[0] + first_row, values) + chunk * 8);
      asm volatile("" : "+l"(from));  // one address, and what is added stands in the instructions
#pragma unroll
      for (int first = 0; first < kDecodeRate; first += kRowsAtOnce) {
        device::copy_async_16(tile + pack_offset<Tr>(first + first_row, chunk),
                              reinterpret_cast<const void*>(from + first * Tr::kRowBytes));
      }
      return;
    }
#pragma unroll 2
    for (int first = 0; first < kDecodeRate; first += kRowsAtOnce) {
      const uint32_t row = children[first + first_row];
      const bool present = row != kAbsentRow;
      device::copy_async_16_prefix(tile + pack_offset<Tr>(first + first_row, chunk),
                                   row_address(present ? row : 0, values) + chunk * 8, present ? 16 : 0);
    }
  }

  // `rows` are those of a slot, whose 16 tokens are neighbours in a page. Tokens behind the query's own are absent: their
  // codes and scales become zeros.
  __device__ __forceinline__ void copy_codes(const uint32_t* rows, bool values) {
    constexpr int kChunks = Tr::kCodeBytes / 16, kRowsAtOnce = 32 / kChunks;
    const LeafPool& pool = values ? block_.params.leaves.values : block_.params.leaves.keys;
    const uint32_t tile = device::shared_address(block_.ring() + asked_ * Tr::kStageBytes);
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
    const uint32_t to = device::shared_address(block_.ring() + asked_ * Tr::kStageBytes + Tr::kTileBytes);
    if (block_.lane < 2 * kPacks) {
      const float* table = block_.lane < kPacks ? options.cos : options.sin;
      device::copy_async_16(to + block_.lane * 16,
                            table + int64_t{position} * Tr::kHalf + block_.lane % kPacks * 4);
    }
  }

  const DecodeBlock<Tr>& block_;
  int asked_ = 0;  // stage of the next tile to ask for
  int taken_ = 0;  // stage of the next tile to take
};

}  // namespace htree::tree_cache
