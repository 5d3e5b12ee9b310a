// Products of a key in global memory with queries in shared memory, in fp32.
#pragma once

#include "device/numeric.cuh"
#include "device/pack.cuh"

namespace htree::index_loss {

// sums[r] += <key, query r>; one chain of multiply-adds in the order of the elements. The key is aligned to kPack elements.
template <int kPack, int kRows, typename T>
__device__ __forceinline__ void multiply_packs(const T* key, int32_t width, const float (*queries)[kRows],
                                               float (&sums)[kRows]) {
  static_assert(kRows % 4 == 0);
  for (int32_t first = 0; first < width; first += kPack) {
    const auto pack = device::load_pack<kPack>(key + first);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      const float value = device::to_acc(pack[e]);
#pragma unroll
      for (int r = 0; r < kRows; r += 4) {
        const auto query = device::load_pack<4>(&queries[first + e][r]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[r + i] = fmaf(value, query[i], sums[r + i]);
        }
      }
    }
  }
}

// Any width; keys whose width allows it are aligned to 16 bytes.
template <int kRows, typename T>
__device__ __forceinline__ void multiply_key(const T* key, int32_t width, const float (*queries)[kRows],
                                             float (&sums)[kRows]) {
  if (width % device::kPackOf<T> == 0) {
    multiply_packs<device::kPackOf<T>>(key, width, queries, sums);
  } else {
    multiply_packs<1>(key, width, queries, sums);
  }
}

}  // namespace htree::index_loss
