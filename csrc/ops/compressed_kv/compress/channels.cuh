// The channels of a row that one thread holds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace htree::compressed_kv {

// 32 channels: half types as pairs (channel i, channel i + 16), fp32 one by one.
template <typename T>
struct Channels {
  static constexpr int kWords = sizeof(T) == 2 ? 16 : 32;
  uint32_t words[kWords];

  // The bits of channel i in the lower bits; where T has 16 bits the upper half belongs to another channel.
  __device__ __forceinline__ uint32_t bits(int i) const {
    if constexpr (sizeof(T) == 2) {
      return i < 16 ? words[i] : words[i - 16] >> 16;
    } else {
      return words[i];
    }
  }
  __device__ __forceinline__ float value(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits(i))));
    } else {
      return __uint_as_float(i < 16 ? words[i] << 16 : words[i - 16] & 0xffff0000u);
    }
  }
};

template <typename T>
__device__ __forceinline__ Channels<T> load_32(const T* row) {
  Channels<T> x;
  const uint4* packs = reinterpret_cast<const uint4*>(row);
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 pack = packs[i];
      x.words[4 * i] = pack.x;
      x.words[4 * i + 1] = pack.y;
      x.words[4 * i + 2] = pack.z;
      x.words[4 * i + 3] = pack.w;
    }
  } else {
    uint32_t pairs[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 pack = packs[i];
      pairs[4 * i] = pack.x;
      pairs[4 * i + 1] = pack.y;
      pairs[4 * i + 2] = pack.z;
      pairs[4 * i + 3] = pack.w;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x.words[2 * i] = __byte_perm(pairs[i], pairs[i + 8], 0x5410);
      x.words[2 * i + 1] = __byte_perm(pairs[i], pairs[i + 8], 0x7632);
    }
  }
  return x;
}

}  // namespace htree::compressed_kv
