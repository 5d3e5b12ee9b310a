// Tiles of 16 rows on their way from global to shared memory: one ring of stages per warp, so that no warp
// waits for another.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "ops/compressed_kv/decode_params.h"

namespace htree::compressed_kv {

// 16 bytes of which the first `valid` are read and the others become zero.
__device__ __forceinline__ void copy_async_clipped(uint32_t shared, const void* global, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid)
               : "memory");
}

// Byte offsets of the parts of a stage. Every part has room for the bytes before its first row, because
// copies start at multiples of 16.
struct StageLayout {
  int k_bitmap;
  int v_bitmap;
  int k_scales;
  int v_scales;
  int k_values;
  int v_values;
  int bytes;

  __host__ __device__ StageLayout(int head_dim, int k_row_bytes, int v_row_bytes) {
    const int bitmap_bytes = kTileRows * head_dim / 8 + (head_dim < 128 ? 16 : 0);
    k_bitmap = 0;
    v_bitmap = bitmap_bytes;
    k_scales = 2 * bitmap_bytes;
    v_scales = k_scales + 48;
    k_values = v_scales + 48;
    v_values = k_values + kTileRows * k_row_bytes + 16;
    bytes = v_values + kTileRows * v_row_bytes + 16;
  }
};

// Bytes behind the last stage that the windows of a bitmap with too many bits may read: D values of 2 bytes,
// and a window.
constexpr int kStagePadding = 2 * 256 + 32;

// Copies `bytes` bytes from `start` on to shared address `to` + start % 16, in chunks of 16 that `num_lanes`
// lanes share. `clipped`: nothing at or behind `total` is read.
__device__ __forceinline__ void copy_span(uint32_t to, const uint8_t* from, int64_t start, int bytes,
                                          int64_t total, bool clipped, int lane, int num_lanes) {
  const int before = static_cast<int>(start) & 15;
  const int num_chunks = (before + bytes + 15) >> 4;
  const uint8_t* source = from + (start - before);
  if (clipped) {
    const int64_t left = total - (start - before);
    for (int chunk = lane; chunk < num_chunks; chunk += num_lanes) {
      const int64_t valid = left - 16 * chunk;
      if (valid > 0) {
        copy_async_clipped(to + 16 * chunk, source + 16 * chunk, valid < 16 ? static_cast<int>(valid) : 16);
      }
    }
  } else {
    for (int chunk = lane; chunk < num_chunks; chunk += num_lanes) {
      device::copy_async_16(to + 16 * chunk, source + 16 * chunk);
    }
  }
}

// The rows row ... row + 15 of K and V. All 32 lanes must call; it commits no group.
template <int kHeadDim>
__device__ __forceinline__ void copy_tile(const DecodeParams& p, const StageLayout& layout, uint32_t stage,
                                          int64_t row, int lane) {
  const bool clipped = row + kTileRows >= p.num_rows;
  const bool second = lane >= 16;
  const uint8_t* bitmap = second ? p.v.bitmap : p.k.bitmap;
  const uint16_t* scales = second ? p.v.scales : p.k.scales;
  constexpr int kBitmapBytes = kHeadDim / 8;
  copy_span(stage + (second ? layout.v_bitmap : layout.k_bitmap), bitmap, row * kBitmapBytes,
            kTileRows * kBitmapBytes, p.num_rows * kBitmapBytes, clipped, lane & 15, 16);
  if (scales != nullptr && (lane & 15) < 3) {
    copy_span(stage + (second ? layout.v_scales : layout.k_scales), reinterpret_cast<const uint8_t*>(scales),
              row * 2, kTileRows * 2, p.num_rows * 2, clipped, lane & 15, 16);
  }
  copy_span(stage + layout.k_values, p.k.values, row * p.k.row_bytes, kTileRows * p.k.row_bytes,
            p.num_rows * p.k.row_bytes, clipped, lane, 32);
  copy_span(stage + layout.v_values, p.v.values, row * p.v.row_bytes, kTileRows * p.v.row_bytes,
            p.num_rows * p.v.row_bytes, clipped, lane, 32);
}

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
