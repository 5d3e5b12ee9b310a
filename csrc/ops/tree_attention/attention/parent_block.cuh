// The re-laid copy of a layer that the tensor-core kernels gather from: one contiguous block per (batch, kv
// head, parent) with the parent's 16 children.
//
//   keys    16 rows of K fp16: R_{c mod 16} K_c times a power of two per row (docs/semantics.md §1.4)
//   scales  16 floats that undo the powers of two
//   values  16 rows of V in the input's dtype
//
// The power of two brings the largest finite |element| of a row into [128, 256), so all of bfloat16's range
// fits fp16. It belongs to the row, not to the head: a key in the future cannot change how one in the past is
// rounded. Rows are cut into 16-byte chunks stored in an order that makes ldmatrix free of bank conflicts in
// both directions.
#pragma once

#include <cstdint>

#include "ops/tree_attention/attention/attention_launch.h"

namespace htree::tree_attention {

constexpr int kBlockRows = kTensorCoreRate;

template <int kKeyDim, int kValueDim>
struct ParentBlock {
  static_assert(kKeyDim % 32 == 0 && kValueDim % 32 == 0);
  static constexpr int kKeyBytes = kBlockRows * kKeyDim * 2;
  static constexpr int kScaleOffset = kKeyBytes;
  static constexpr int kValueOffset = kScaleOffset + kBlockRows * 4;
  static constexpr int kValueBytes = kBlockRows * kValueDim * 2;
  static constexpr int kBytes = kValueOffset + kValueBytes;
  static_assert(kBytes == parent_block_bytes(kKeyDim, kValueDim));
};

// Byte offset of the 16-byte chunk `chunk` of row `row` in a tile of 16 rows of kDim 2-byte elements.
template <int kDim>
__host__ __device__ constexpr int chunk_offset(int row, int chunk) {
  if (kDim % 64 == 0) {
    return row * kDim * 2 + ((chunk ^ (row & 7)) << 4);
  }
  // rows of 64 bytes: two of them share the 128 bytes of one pass over the banks
  return row * kDim * 2 + ((chunk ^ ((row >> 1) & 3)) << 4);
}

struct PowerOfTwo {
  float scale;
  float inverse;
};

// The power of two that brings `largest` >= 0, finite, into [128, 256); exponents are kept where both are
// normal.
__device__ __forceinline__ PowerOfTwo half_range_scale(float largest) {
  const int exponent_field = static_cast<int>(__float_as_uint(largest) >> 23) & 0xff;
  const int shift = largest == 0.f ? 0 : min(134 - exponent_field, 126);
  return {__uint_as_float(static_cast<uint32_t>(127 + shift) << 23),
          __uint_as_float(static_cast<uint32_t>(127 - shift) << 23)};
}

// |x| for the search of the largest; what is not finite does not take part.
__device__ __forceinline__ float finite_magnitude(float x) {
  const float magnitude = fabsf(x);
  return magnitude <= 3.402823466e38f ? magnitude : 0.f;
}

}  // namespace htree::tree_attention
