// Tiles of 16 rows on their way from global to shared memory: one ring of stages per warp, so that no warp
// waits for another.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "ops/compressed_kv/decode_params.h"

namespace htree::compressed_kv {

// Rows of a multiple of 32 bytes are laid 16 bytes further apart, or the same code of eight rows would lie in
// one bank. A row is then a power of two of chunks of 16 bytes; the shift turns a chunk into its row.
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

// Byte offsets of the parts of a stage. Every part has room for the bytes before its first row, because
// copies start at multiples of 16.
struct StageLayout {
  int bitmap[2];  // of K and V
  int scales[2];
  int values[2];
  int bytes;

  __host__ __device__ constexpr StageLayout(int head_dim, int k_row_bytes, int v_row_bytes)
      : bitmap{0, bitmap_bytes(head_dim)},
        scales{2 * bitmap_bytes(head_dim), 2 * bitmap_bytes(head_dim) + 48},
        values{scales[1] + 48, scales[1] + 48 + kTileRows * row_pitch(k_row_bytes) + 16},
        bytes(values[1] + kTileRows * row_pitch(v_row_bytes) + 16) {}

 private:
  __host__ __device__ static constexpr int bitmap_bytes(int head_dim) {
    return kTileRows * head_dim / 8 + (head_dim < 128 ? 16 : 0);
  }
};

// Bytes behind the last stage that the windows of a bitmap with too many bits may read: D values of 2 bytes,
// and a window.
constexpr int kStagePadding = 2 * 256 + 32;

// What one lane copies of one part of a tile: `count` chunks of 16 bytes, every `lanes`-th of the part.
struct LaneCopy {
  const uint8_t* from;  // chunk of tile 0
  uint32_t to;          // offset in the stage
  int count;
};

// `first_row` is the row of tile 0, `bytes` those of a row; lanes 0 ... lanes - 1 of a part share it.
__device__ __forceinline__ LaneCopy lane_copy(const uint8_t* from, int64_t first_row, int bytes, int part,
                                              int shift, int lane, int lanes) {
  const int64_t start = first_row * bytes;
  const int before = static_cast<int>(start) & 15;
  const int chunks = bytes + (before != 0 ? 1 : 0);  // of 16 rows
  LaneCopy copy;
  copy.from = from + (start - before) + 16 * lane;
  copy.to = part + 16 * (lane + (lane >> shift));
  copy.count = from == nullptr || lane >= chunks ? 0 : (chunks - lane + lanes - 1) / lanes;
  return copy;
}

// Chunk by chunk, reading nothing at or behind `end`; the last bytes one by one, past the asynchronous
// copies.
__device__ __noinline__ void copy_clipped(const uint8_t* from, uint32_t to, uint32_t step, int stride,
                                          int count, const uint8_t* end) {
  for (int i = 0; i < count; ++i, from += stride, to += step) {
    const int64_t left = end - from;
    if (left >= 16) {
      device::copy_async_16(to, from);
    } else {
      for (int byte = 0; byte < left; byte += 2) {  // rows have an even number of bytes
        const uint16_t value = *reinterpret_cast<const uint16_t*>(from + byte);
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + byte), "h"(value) : "memory");
      }
    }
  }
}

// Tiles of 16 rows of K and V: what this lane copies of each.
template <int kHeadDim>
struct TileCopy {
  LaneCopy bitmap;  // lanes 0 to 15: K; the others: V
  LaneCopy scales;
  LaneCopy k_values;
  LaneCopy v_values;
  uint32_t k_step;  // between the chunks of a lane
  uint32_t v_step;

  __device__ __forceinline__ TileCopy(const DecodeParams& p, const StageLayout& layout, int64_t first_row,
                                      int lane) {
    const bool second = lane >= 16;
    const auto* k_scales = reinterpret_cast<const uint8_t*>(p.k.scales);
    const auto* v_scales = reinterpret_cast<const uint8_t*>(p.v.scales);
    bitmap = lane_copy(second ? p.v.bitmap : p.k.bitmap, first_row, kHeadDim / 8,
                       second ? layout.bitmap[1] : layout.bitmap[0], 31, lane & 15, 16);
    scales = lane_copy(second ? v_scales : k_scales, first_row, 2,
                       second ? layout.scales[1] : layout.scales[0], 31, lane & 15, 16);
    const int k_shift = pitch_shift(p.k.row_bytes);
    const int v_shift = pitch_shift(p.v.row_bytes);
    k_values = lane_copy(p.k.values, first_row, p.k.row_bytes, layout.values[0], k_shift, lane, 32);
    v_values = lane_copy(p.v.values, first_row, p.v.row_bytes, layout.values[1], v_shift, lane, 32);
    k_step = 16 * (32 + (32 >> k_shift));
    v_step = 16 * (32 + (32 >> v_shift));
  }

  // Calls put(copy, bytes of a tile, bytes between its chunks here and in the stage, its tensor, bytes of a
  // row).
  template <typename Put>
  __device__ __forceinline__ void for_parts(const DecodeParams& p, int lane, Put&& put) const {
    const bool second = lane >= 16;
    put(bitmap, kTileRows * kHeadDim / 8, 256, 256u, second ? p.v.bitmap : p.k.bitmap, kHeadDim / 8);
    put(scales, kTileRows * 2, 256, 256u, reinterpret_cast<const uint8_t*>(second ? p.v.scales : p.k.scales),
        2);
    put(k_values, kTileRows * p.k.row_bytes, 512, k_step, p.k.values, p.k.row_bytes);
    put(v_values, kTileRows * p.v.row_bytes, 512, v_step, p.v.values, p.v.row_bytes);
  }

  // Tile `tile` to the stage at shared address `stage`. All lanes must call; it commits no group. `clipped`:
  // the tile holds the last row of the tensors.
  __device__ __forceinline__ void operator()(const DecodeParams& p, uint32_t stage, uint32_t tile,
                                             bool clipped, int lane) const {
    for_parts(p, lane,
              [&](const LaneCopy& copy, int tile_bytes, int stride, uint32_t step, const uint8_t* tensor,
                  int row_bytes) {
                const uint8_t* from =
                    copy.from + static_cast<uint64_t>(tile) * static_cast<uint32_t>(tile_bytes);
                uint32_t to = stage + copy.to;
                if (clipped) {
                  copy_clipped(from, to, step, stride, copy.count, tensor + p.num_rows * row_bytes);
                  return;
                }
#pragma unroll 1
                for (int i = 0; i < copy.count; ++i, from += stride, to += step) {
                  device::copy_async_16(to, from);
                }
              });
  }
};

// Returns when at most `pending` of the committed groups are under way; `pending` is uniform.
__device__ __forceinline__ void wait_pending(int pending) {
  switch (pending) {
    case 0:
      return device::wait_copies<0>();
    case 1:
      return device::wait_copies<1>();
    case 2:
      return device::wait_copies<2>();
    case 3:
      return device::wait_copies<3>();
    case 4:
      return device::wait_copies<4>();
    case 5:
      return device::wait_copies<5>();
    default:
      return device::wait_copies<6>();
  }
}
constexpr int kMaxStages = 7;

}  // namespace htree::compressed_kv
