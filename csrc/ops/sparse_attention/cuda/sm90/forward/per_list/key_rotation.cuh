// Rotates the keys of a parent in shared memory to their place in a list, R_{16
// slot} K' (docs/semantics/tree_attention.md §1.4).
//
// Two elements are rotated at a time, in fp16: three roundings of 2^-11 are still better than one to bf16.
#pragma once

#include <cuda_fp16.h>

#include "device/shared_memory.cuh"
#include "ops/tree/cuda/sm80/packed_layer.cuh"

namespace htree::tree_attention {

// cos and sin of the 8 pairs of dims that a lane rotates.
struct SlotRotation {
  uint4 cos, sin;
};

// Rotates the 16 key rows at `keys` in place. Lane i takes the 16-byte chunk i % (K / 16) of the lower half
// and its partner in the upper half, in an order free of bank conflicts.
template <int kKeyDim>
struct KeyRotation {
  static constexpr int kChunks = kKeyDim / 16;  // chunks in the lower half of a row
  static constexpr int kPasses = kParentRows * kChunks / 32;

  // Address of a lower chunk's partner.
  __device__ __forceinline__ static uint32_t partner(uint32_t address) {
    return kKeyDim == 128 ? address + 1024 : address ^ static_cast<uint32_t>(kKeyDim);
  }

  __device__ __forceinline__ static int chunk() { return threadIdx.x % kChunks; }
  // Eight lanes side by side must cover 128 bytes of banks.
  __device__ __forceinline__ static int row(int pass) {
    const int at = threadIdx.x % 32 / kChunks;
    if (kKeyDim == 128) {
      return at + 4 * pass;
    }
    if (kKeyDim == 64) {
      return (at & 1) * 4 + (at >> 1) + 8 * pass;
    }
    return (at & 1) + (at & 2) * 2 + (at & 4) / 2 + (at & 8);
  }

  __device__ __forceinline__ static SlotRotation load(const __half2* rotations, int slot) {
    const uint4* from = reinterpret_cast<const uint4*>(rotations + int64_t{slot} * (kKeyDim / 2)) + chunk();
    return {__ldg(from), __ldg(from + kChunks)};
  }

  __device__ __forceinline__ static void rotate_chunk(uint4& low, uint4& high, const SlotRotation& rotation) {
    __half2* x = reinterpret_cast<__half2*>(&low);
    __half2* y = reinterpret_cast<__half2*>(&high);
    const __half2* c = reinterpret_cast<const __half2*>(&rotation.cos);
    const __half2* s = reinterpret_cast<const __half2*>(&rotation.sin);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 rotated = __hfma2(x[i], c[i], __hneg2(__hmul2(y[i], s[i])));
      y[i] = __hfma2(y[i], c[i], __hmul2(x[i], s[i]));
      x[i] = rotated;
    }
  }

  __device__ __forceinline__ static void run(uint32_t keys, const SlotRotation& rotation) {
    constexpr int kBatch = kPasses < 2 ? kPasses : 2;  // chunks in registers at a time
#pragma unroll
    for (int first = 0; first < kPasses; first += kBatch) {
      uint4 low[kBatch], high[kBatch];
      uint32_t at[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        at[i] = keys + chunk_offset<kKeyDim>(row(first + i), chunk());
        low[i] = device::load_shared_16(at[i]);
        high[i] = device::load_shared_16(partner(at[i]));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        rotate_chunk(low[i], high[i], rotation);
        device::store_shared_16(at[i], low[i]);
        device::store_shared_16(partner(at[i]), high[i]);
      }
    }
  }
};

}  // namespace htree::tree_attention
