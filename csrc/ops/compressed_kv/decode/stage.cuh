// Copies tiles of 16 rows from global to shared memory: each warp has its own ring of stages, so that no warp
// waits for another.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "ops/compressed_kv/decode/decode_params.h"

namespace htree::compressed_kv {

// Rows of a multiple of 32 bytes are laid 16 bytes further apart, or the same code of eight rows would
// lie in one bank. Such a row is a power of two of 16-byte chunks; the shift takes a chunk's number to
// that of its row.
__host__ __device__ constexpr int pitch_shift(int row_bytes) {
  const int chunks = row_bytes / 16;
  const bool padded = row_bytes % 32 == 0 && chunks <= 32 && (chunks & (chunks - 1)) == 0;
  int shift = 0;
  while (padded && (1 << shift) < chunks) {
    ++shift;
  }
  return padded ? shift : 31;
}
__host__ __device__ constexpr int row_pitch(int row_bytes) {
  return row_bytes + (pitch_shift(row_bytes) < 31 ? 16 : 0);
}

// Byte offsets of the parts of a stage. They are multiples of 32: copies of 16 bytes to the halves of two
// 32-byte sectors take twice the time. Every part has space for the bytes before its first row, because copies
// start at multiples of 16. The last part also has space for a stretch of codes that starts at its end.
struct StageLayout {
  int bitmap[2];  // of K and V
  int scales[2];
  int values[2];
  int shift[2];  // pitch_shift() of values
  int bytes;

  __host__ __device__ constexpr StageLayout(int head_dim, int k_row_bytes, int v_row_bytes)
      : bitmap{0, part(head_dim / 8)},
        scales{2 * part(head_dim / 8), 2 * part(head_dim / 8) + part(2)},
        values{scales[1] + part(2), scales[1] + part(2) + part(row_pitch(k_row_bytes))},
        shift{pitch_shift(k_row_bytes), pitch_shift(v_row_bytes)},
        bytes(values[1] + part(row_pitch(v_row_bytes) + 1)) {}

  // Bytes from one row of values to the next.
  __host__ __device__ constexpr int pitch(int which, int row_bytes) const {
    return row_bytes + (shift[which] < 31 ? 16 : 0);
  }

 private:
  // It includes the bytes before the first row. There are none where 16 rows begin at multiples of 16.
  __host__ __device__ static constexpr int part(int row_bytes) {
    return (kTileRows * row_bytes + (row_bytes % 16 == 0 ? 0 : 16) + 31) / 32 * 32;
  }
};

// Bytes behind the last stage. A bitmap with too many bits makes lanes read them: D values of 2 bytes, and a
// stretch of codes.
constexpr int kStagePadding = 2 * kMostTileHeadDim + 32;

// One of the tensors that a tile has a part of. The part is contiguous; its first 16 bytes may begin before
// the first row.
struct StagePart {
  const uint8_t* from;  // null where the tensor is absent
  int row_bytes;
  int offset;  // in the stage
  int shift;   // pitch_shift() where rows may be laid further apart
};
constexpr int kNumParts = 6;

__device__ __forceinline__ StagePart stage_part(const DecodeParams& p, const StageLayout& layout,
                                                int head_dim, int index) {
  const int which = index & 1;
  const RowsView& view = which == 0 ? p.k : p.v;
  if (index < 2) {
    return {view.values, view.row_bytes, which == 0 ? layout.values[0] : layout.values[1],
            layout.shift[which]};
  }
  if (index < 4) {
    return {view.bitmap, head_dim / 8, which == 0 ? layout.bitmap[0] : layout.bitmap[1], 31};
  }
  return {reinterpret_cast<const uint8_t*>(view.scales), 2, which == 0 ? layout.scales[0] : layout.scales[1],
          31};
}

// The 16-byte chunks that hold a tile. bytes_before() lie between the first chunk's start and the first row.
__device__ __forceinline__ int bytes_before(const StagePart& part, int64_t first_row) {
  return static_cast<int>(first_row * part.row_bytes) & 15;
}
// Where rows are no multiple of 16 bytes there may be such bytes, and the last chunk reaches behind the tile. Tiles
// of pages (`paged`) begin at multiples of 16 bytes, and the last one may end where the tensor does.
__host__ __device__ constexpr int num_chunks(int row_bytes, bool paged) {
  return row_bytes + (row_bytes % 16 != 0 && !paged ? 1 : 0);
}

// Rows behind a tile that its last chunks may hold a part of: 16 bytes of scales, or of values, whose rows
// have at least four.
constexpr int kRowsBehindTile = 8;

// How many tiles that count from row `first_row` may be copied as a whole: nothing behind the tensors is read.
__device__ __forceinline__ uint32_t whole_tiles(const DecodeParams& p, int64_t first_row) {
  return static_cast<uint32_t>((p.num_rows - first_row - kRowsBehindTile) / kTileRows);
}

// A chunk of 16 bytes that some lane copies for every tile, or the first chunk of its runs.
struct alignas(16) ChunkCopy {
  const uint8_t* from;  // in tile 0
  uint32_t step;        // bytes from tile to tile in global memory, or from round to round in the stage
  uint32_t to;          // offset in the stage, or kNoChunk
};
constexpr uint32_t kNoChunk = 0xffffffffu;

// The values of a tile are `row_bytes` chunks. Rounds of 32 chunks lie at equal distances, in global
// memory and in the stage; four rounds are a run. The remaining values, the bitmaps and the scales are
// lists of 32 chunks.
constexpr int kRunRounds = 4;
__host__ __device__ constexpr int num_runs(int row_bytes) {
  return row_bytes / (32 * kRunRounds);
}

// The table of the chunks of a tile, the same for all warps of a block. Entry `lane` is this lane's first
// chunk in the runs of K, entry 32 + lane that in the runs of V, and entry 32 * (2 + i) + lane is in list i.
constexpr int kUsualLists = 3;  // the table has at least so many; chunks that do not exist are not copied
__host__ __device__ constexpr int most_lists(int head_dim, int k_row_bytes, int v_row_bytes) {
  const int run = 32 * kRunRounds;
  const int chunks = k_row_bytes % run + v_row_bytes % run + 2 * (head_dim / 8) + 2 * 2 + kNumParts;
  return chunks > 32 * kUsualLists ? (chunks + 31) / 32 : kUsualLists;
}
__host__ __device__ constexpr int chunk_table_bytes(int head_dim, int k_row_bytes, int v_row_bytes) {
  return 32 * (2 + most_lists(head_dim, k_row_bytes, v_row_bytes)) * static_cast<int>(sizeof(ChunkCopy));
}

// Where the parts of a tile end among its listed chunks; the host works it out.
struct ChunkPlan {
  int end[kNumParts];
  int lists;

  ChunkPlan(int head_dim, int k_bits, int v_bits, int k_row_bytes, int v_row_bytes, bool paged)
      : end{num_chunks(k_row_bytes, paged) - 32 * kRunRounds * num_runs(k_row_bytes),
            num_chunks(v_row_bytes, paged) - 32 * kRunRounds * num_runs(v_row_bytes),
            num_chunks(head_dim / 8, paged),
            num_chunks(head_dim / 8, paged),
            k_bits == 16 ? 0 : num_chunks(2, paged),
            v_bits == 16 ? 0 : num_chunks(2, paged)} {
    for (int i = 1; i < kNumParts; ++i) {
      end[i] += end[i - 1];
    }
    lists = (end[kNumParts - 1] + 31) / 32;
  }
};

// How many lists and runs the table has, in one register.
struct ChunkCounts {
  uint32_t bits;  // lists; from bit 8 on runs of K, from bit 20 on runs of V

  __device__ __forceinline__ ChunkCounts(const DecodeParams& p, int lists)
      : bits(static_cast<uint32_t>(lists | num_runs(p.k.row_bytes) << 8 | num_runs(p.v.row_bytes) << 20)) {
    asm volatile("" : "+r"(bits));  // kept, not computed again for each tile
  }
  __device__ __forceinline__ int lists() const { return static_cast<int>(bits & 0xffu); }
  __device__ __forceinline__ bool any_runs() const { return bits > 0xffu; }
  __device__ __forceinline__ int k_runs() const { return static_cast<int>(bits >> 8 & 0xfffu); }
  __device__ __forceinline__ int v_runs() const { return static_cast<int>(bits >> 20); }
};

// Chunk `chunk` of a part, for tiles that count from row `first_row`.
__device__ __forceinline__ ChunkCopy chunk_of(const StagePart& part, int64_t first_row, int chunk) {
  const int64_t start = first_row * part.row_bytes;
  return {part.from + (start & ~int64_t{15}) + 16 * chunk, static_cast<uint32_t>(kTileRows * part.row_bytes),
          static_cast<uint32_t>(part.offset + 16 * (chunk + (chunk >> part.shift)))};
}

// Fills the table for tiles that count from row `first_row`. Every thread of the block must call, and
// __syncthreads before the table is used.
__device__ __forceinline__ void fill_chunks(const DecodeParams& p, const StageLayout& layout,
                                            const ChunkPlan& plan, const ChunkCounts& counts, int head_dim,
                                            int64_t first_row, ChunkCopy* table) {
  const int entries = 32 * max(plan.lists, kUsualLists);
#pragma unroll 1
  for (int entry = threadIdx.x; entry < entries; entry += blockDim.x) {
    if (entry >= plan.end[kNumParts - 1]) {
      table[64 + entry].to = kNoChunk;
      continue;
    }
    int index = 0;
    int chunk = entry + 32 * kRunRounds * counts.k_runs();
#pragma unroll
    for (int i = 0; i < kNumParts - 1; ++i) {
      if (entry >= plan.end[i]) {
        index = i + 1;
        chunk = entry - plan.end[i] + (i == 0 ? 32 * kRunRounds * counts.v_runs() : 0);
      }
    }
    table[64 + entry] = chunk_of(stage_part(p, layout, head_dim, index), first_row, chunk);
  }
  if (counts.any_runs()) {
    for (int entry = threadIdx.x; entry < 64; entry += blockDim.x) {
      const StagePart part = stage_part(p, layout, head_dim, entry / 32);
      ChunkCopy copy = chunk_of(part, first_row, entry % 32);
      copy.step = static_cast<uint32_t>(16 * (32 + (32 >> part.shift)));
      table[entry] = copy;
    }
  }
}

// The entry of this lane in part `index` of the table. `table` is the shared address of this lane's first entry.
__device__ __forceinline__ ChunkCopy load_chunk(uint32_t table, int index) {
  ChunkCopy chunk;
  uint32_t low;
  uint32_t high;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(low), "=r"(high), "=r"(chunk.step), "=r"(chunk.to)
               : "r"(table + 512 * index));
  asm("mov.b64 %0, {%1, %2};" : "=l"(chunk.from) : "r"(low), "r"(high));
  return chunk;
}

// Copies runs of rounds, whose chunks are 512 bytes apart.
__device__ __forceinline__ void copy_runs(const ChunkCopy& first, int runs, int row_bytes, uint32_t stage,
                                          uint32_t tile) {
  const uint8_t* from = first.from + static_cast<uint64_t>(tile) * static_cast<uint32_t>(16 * row_bytes);
  uint32_t to = stage + first.to;
#pragma unroll 1
  for (; runs > 0; --runs) {
#pragma unroll
    for (int i = 0; i < kRunRounds; ++i) {
      device::copy_async_16(to, from + 512 * i);
      to += first.step;
    }
    from += 512 * kRunRounds;
  }
}

__device__ __forceinline__ void copy_any_chunk(const ChunkCopy& chunk, uint32_t stage, uint32_t tile) {
  device::copy_async_16(stage + chunk.to, chunk.from + static_cast<uint64_t>(tile) * chunk.step);
}

// Copies one chunk, unless there is no such chunk.
__device__ __forceinline__ void copy_chunk(const ChunkCopy& chunk, uint32_t stage, uint32_t tile) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, %3;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}" ::"r"(stage + chunk.to),
      "l"(chunk.from + static_cast<uint64_t>(tile) * chunk.step), "r"(chunk.to), "n"(kNoChunk)
      : "memory");
}

// Copies tile `tile` to the stage at shared address `stage`; `table` is as in load_chunk. All lanes of a warp
// must call. It commits no group.
__device__ __forceinline__ void copy_tile(const DecodeParams& p, uint32_t table, const ChunkCounts& counts,
                                          uint32_t stage, uint32_t tile) {
  // Entries are read together where possible, so that only one latency is waited for.
  const ChunkCopy first = load_chunk(table, 2);
  if (counts.any_runs()) {
    const ChunkCopy k = load_chunk(table, 0);
    const ChunkCopy v = load_chunk(table, 1);
    copy_runs(k, counts.k_runs(), p.k.row_bytes, stage, tile);
    copy_runs(v, counts.v_runs(), p.v.row_bytes, stage, tile);
  }
  if (counts.lists() < kUsualLists) {
    copy_chunk(first, stage, tile);
    if (counts.lists() > 1) {
      copy_chunk(load_chunk(table, 3), stage, tile);
    }
    return;
  }
  const ChunkCopy second = load_chunk(table, 3);
  const ChunkCopy third = load_chunk(table, 4);
  // Every list but the last is full.
  if (counts.lists() == kUsualLists) {
    copy_any_chunk(first, stage, tile);
    copy_any_chunk(second, stage, tile);
    copy_chunk(third, stage, tile);
    return;
  }
  const ChunkCopy fourth = load_chunk(table, 5);
  copy_any_chunk(first, stage, tile);
  copy_any_chunk(second, stage, tile);
  copy_any_chunk(third, stage, tile);
  copy_chunk(fourth, stage, tile);
#pragma unroll 1
  for (int i = kUsualLists + 1; i < counts.lists(); ++i) {
    copy_chunk(load_chunk(table, 2 + i), stage, tile);
  }
}

// Copies the last bytes of a tensor, an even number below 16, to shared address `to`: words as everything
// else is copied, then half a word where the number of scales is odd. (An asynchronous copy can be told how
// many bytes to read, but memcheck counts all 16.)
__device__ __forceinline__ void copy_last_bytes(uint32_t to, const uint8_t* from, int bytes) {
  int done = 0;
  for (; done + 4 <= bytes; done += 4) {
    device::copy_async_4(to + done, from + done);
  }
  if (done < bytes) {
    const uint16_t value = *reinterpret_cast<const uint16_t*>(from + done);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + done), "h"(value) : "memory");
  }
}

// The same as copy_tile for tiles from whole_tiles() on, where there are no pages; returns whether this is one.
inline __device__ __noinline__ bool copy_last_tile(const DecodeParams& p, const StageLayout& layout,
                                                   int head_dim, int64_t first_row, uint32_t stage,
                                                   uint32_t tile, int lane) {
  if (tile < whole_tiles(p, first_row)) {
    return false;
  }
  for (int index = 0; index < kNumParts; ++index) {
    const StagePart part = stage_part(p, layout, head_dim, index);
    const int64_t tile_row = first_row + static_cast<int64_t>(tile) * kTileRows;
    const int64_t start = tile_row * part.row_bytes - bytes_before(part, first_row);
    const int64_t end = p.num_rows * part.row_bytes;
    const int shift = part.shift;
    for (int chunk = lane; part.from != nullptr && chunk < num_chunks(part.row_bytes, /*paged=*/false);
         chunk += 32) {
      const int64_t at = start + 16 * chunk;
      const uint32_t to = stage + part.offset + 16 * (chunk + (chunk >> shift));
      if (at + 16 <= end) {
        device::copy_async_16(to, part.from + at);
      } else if (at < end) {
        copy_last_bytes(to, part.from + at, static_cast<int>(end - at));
      }
    }
  }
  return true;
}

}  // namespace htree::compressed_kv
