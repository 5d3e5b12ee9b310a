// Unpacking of rows: a row has one warp, and a lane has D/32 channels. docs/semantics/compressed_kv.md §4.5
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "ops/compressed_kv/compress/compress_launch.h"
#include "ops/compressed_kv/compress/unpack.cuh"

namespace htree::compressed_kv {

constexpr int kDecompressThreads = 256;

// Blocks of kDecompressThreads threads, a row per warp.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kDecompressThreads)
    decompress_kernel(const __grid_constant__ DecompressParams p) {
  using Lane = LaneChannels<kHeadDim>;
  const int lane = threadIdx.x & 31;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kDecompressThreads + threadIdx.x) >> 5;
  if (row >= p.num_rows) {
    return;
  }
  const uint8_t* values = p.values + row * p.format.row_bytes();
  const float scale = p.format.quantised() ? __half2float(__ushort_as_half(p.scales[row])) : 1.0f;
  T out[Lane::kCount];
#pragma unroll
  for (int c = 0; c < Lane::kCount; ++c) {
    out[c] = device::from_acc<T>(0.0f);
  }
  for_kept_channels<kHeadDim>(p.bitmap + row * (kHeadDim / 32), p.format.keep, 0, lane, [&](int c, int at) {
    if (p.format.bits == 16) {
      if constexpr (sizeof(T) == 2) {  // the checks refuse fp32
        out[c] = reinterpret_cast<const T*>(values)[at];
      }
    } else {
      const int code = p.format.bits == 8 ? byte_code(values, at) : nibble_code(values, at);
      out[c] = device::from_acc<T>(scale * static_cast<float>(code));
    }
  });
  constexpr int kPack = Lane::kRun < device::kPackOf<T> ? Lane::kRun : device::kPackOf<T>;
  T* to = static_cast<T*>(p.out) + row * kHeadDim;
#pragma unroll
  for (int c = 0; c < Lane::kCount; c += kPack) {
    device::Pack<T, kPack> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      pack[i] = out[c + i];
    }
    device::store_pack<kPack>(to + Lane::channel_at(lane, c), pack);
  }
}

}  // namespace htree::compressed_kv
