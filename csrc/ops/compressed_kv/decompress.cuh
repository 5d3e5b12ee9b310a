// Unpacking of rows: one warp per row, a lane D/32 neighbouring channels. docs/semantics.md §4.5.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "ops/compressed_kv/compress_params.h"

namespace htree::compressed_kv {

constexpr int kDecompressThreads = 256;

// Blocks of kDecompressThreads, one row per warp.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kDecompressThreads)
    decompress_kernel(const __grid_constant__ DecompressParams p) {
  constexpr int kChannels = kHeadDim / 32;
  const int lane = threadIdx.x & 31;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kDecompressThreads + threadIdx.x) >> 5;
  if (row >= p.num_rows) {
    return;
  }
  const uint32_t* words = p.bitmap + row * (kHeadDim / 32);
  const int first = lane * kChannels;
  int rank = 0;
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; ++i) {
    const int below = first - 32 * i;  // channels of this word before the lane's first
    rank += below >= 32 ? __popc(words[i]) : below > 0 ? __popc(words[i] & ((1u << below) - 1)) : 0;
  }
  const uint32_t bits = words[first / 32] >> (first % 32);
  const uint8_t* values = p.values + row * p.format.row_bytes();
  const float scale = p.format.quantised() ? __half2float(__ushort_as_half(p.scales[row])) : 1.0f;
  T out[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    T value = device::from_acc<T>(0.0f);
    if ((bits >> c & 1) != 0) {
      const int at = min(rank, p.format.keep - 1);  // a bitmap with too many bits must not read other rows
      ++rank;
      if (p.format.bits == 16) {
        if constexpr (sizeof(T) == 2) {  // fp32 is refused by the checks
          value = reinterpret_cast<const T*>(values)[at];
        }
      } else {
        const int code = p.format.bits == 8 ? static_cast<int8_t>(values[at])
                                            : (values[at >> 1] >> (4 * (at & 1)) & 15) - 8;
        value = device::from_acc<T>(scale * static_cast<float>(code));
      }
    }
    out[c] = value;
  }
  constexpr int kPack = kChannels < device::kPackOf<T> ? kChannels : device::kPackOf<T>;
  T* to = static_cast<T*>(p.out) + row * kHeadDim + first;
#pragma unroll
  for (int c = 0; c < kChannels; c += kPack) {
    device::Pack<T, kPack> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      pack[i] = out[c + i];
    }
    device::store_pack<kPack>(to + c, pack);
  }
}

}  // namespace htree::compressed_kv
