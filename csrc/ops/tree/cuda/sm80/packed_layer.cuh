// The packed copy of a layer that the tensor-core kernels gather from. A packed parent, one per (batch, kv
// head, parent), holds the 16 children of the parent in one stretch of memory:
//
//   keys    16 rows of K fp16: R_{c mod 16} K_c times a power of two per row
//           (docs/semantics/tree_attention.md §1.4)
//   scales  16 floats that undo the powers of two
//   values  16 rows of V in the input's dtype
//
// Most rows take the power 1. A row whose largest finite |element| fp16 could not hold, or not hold well, is
// brought into [128, 256), so the whole range of bfloat16 fits. The power belongs to the row, not to the
// head: a key in the future cannot change how one in the past is rounded. Rows are cut into 16-byte chunks
// and stored in an order that makes ldmatrix free of bank conflicts in both directions and that wgmma reads
// as it is: groups of 8 rows of 128 bytes (64 for head dim 32) with the swizzle of that width.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

constexpr int kParentRows = kTensorCoreRate;
// Bytes of a parent's keys. The scales of its rows stand behind them.
template <int kKeyDim>
constexpr int kParentKeyBytes = kParentRows* kKeyDim * 2;

template <int kKeyDim, int kValueDim>
struct PackedParent {
  static_assert(kKeyDim % 32 == 0 && kValueDim % 32 == 0);
  static constexpr int kScaleOffset = kParentKeyBytes<kKeyDim>;
  static constexpr int kValueOffset = kScaleOffset + kParentRows * 4;
  static constexpr int kValueBytes = kParentRows * kValueDim * 2;
  static constexpr int kBytes = kValueOffset + kValueBytes;
  static_assert(kBytes == packed_parent_bytes(kKeyDim, kValueDim));
};

// Byte offset of the 16-byte chunk `chunk` of row `row`, in a tile of rows of kDim 2-byte elements. A group
// of 8 rows is contiguous; with head dim 128 the lower 64 dims of its rows stand before the upper ones.
template <int kDim>
__host__ __device__ constexpr int chunk_offset(int row, int chunk) {
  static_assert(kDim == 32 || kDim == 64 || kDim == 128);
  if (kDim == 128) {
    return (row >> 3) * 2048 + (chunk >> 3) * 1024 + (row & 7) * 128 + (((chunk ^ row) & 7) << 4);
  }
  if (kDim == 64) {
    return row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  // Rows have 64 bytes here, and two of them share the 128 bytes of one pass over the banks.
  return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
}

// The row that the byte at `offset` of such a tile belongs to.
template <int kDim>
__host__ __device__ constexpr int row_of_offset(int offset) {
  return kDim == 128 ? (offset >> 11) * 8 + (offset >> 7 & 7) : offset / (kDim * 2);
}

struct PowerOfTwo {
  float scale;
  float inverse;
};

// The power of two that brings `largest`, finite and not negative, into [128, 256). Both the power and its
// inverse are kept normal.
__device__ __forceinline__ PowerOfTwo half_range_scale(float largest) {
  const int exponent_field = static_cast<int>(__float_as_uint(largest) >> 23) & 0xff;
  const int shift = largest == 0.f ? 0 : min(134 - exponent_field, 126);
  return {__uint_as_float(static_cast<uint32_t>(127 + shift) << 23),
          __uint_as_float(static_cast<uint32_t>(127 - shift) << 23)};
}

// Whether fp16 holds a row well whose largest element is `largest`, times `factor`: rotation can make an
// element sqrt(2) times as large, and small elements must keep their digits.
__device__ __forceinline__ bool fits_half(float largest, float factor = 1.f) {
  const float scaled = largest * fabsf(factor);
  return largest == 0.f || factor == 0.f || (scaled >= 0x1p-8f && scaled < 0x1p15f);
}

// The power of two of a key row: 1 where that serves.
__device__ __forceinline__ PowerOfTwo key_row_scale(float largest) {
  return fits_half(largest) ? PowerOfTwo{1.f, 1.f} : half_range_scale(largest);
}

// x| for the search of the largest element; what is not finite counts as 0.
__device__ __forceinline__ float finite_magnitude(float x) {
  const float magnitude = fabsf(x);
  return magnitude <= 3.402823466e38f ? magnitude : 0.f;
}

// What undoes the powers of two of rows lane / 4 and lane / 4 + 8, the rows that a lane has in an accumulator
// of 16 rows. `scales` is an address in shared memory.
__device__ __forceinline__ void load_row_scales(uint32_t scales, float (&row_scale)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm volatile("ld.shared.f32 %0, [%1];"
                 : "=f"(row_scale[i])
                 : "r"(scales + (threadIdx.x % 32 / 4 + 8 * i) * 4)
                 : "memory");
  }
}

// Clears rows of a packed parent in the A operand of its transpose: bit i of `keep` is row i. What lies past
// a query's diagonal block may hold anything, NaN included, and a factor of 0 does not silence a NaN.
template <bool kPartial>
class RowMask {
 public:
  __device__ __forceinline__ explicit RowMask(unsigned keep) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned rows = keep >> (2 * (threadIdx.x % 4) + 8 * i);
      kept_[i] = (rows & 1 ? 0xffffu : 0u) | (rows & 2 ? 0xffff0000u : 0u);
    }
  }

  __device__ __forceinline__ void apply(uint32_t (&a)[4]) const {
    if constexpr (kPartial) {
      a[0] &= kept_[0];
      a[1] &= kept_[0];
      a[2] &= kept_[1];
      a[3] &= kept_[1];
    }
  }

 private:
  uint32_t kept_[2];
};

constexpr int kPackWarps = 8;

// Copies a layer into packed parents: keys rotated by their place under the parent, values as they are. One
// warp takes a row (batch, kv head, node); lane i handles the key dims 2i, 2i + 1 of both halves. Rows past
// the last node are zero.
template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kPackWarps * 32) pack_layer_kernel(PackParams p) {
  using Block = PackedParent<kKeyDim, kValueDim>;
  const int lane = threadIdx.x % 32;
  const int64_t row_idx = int64_t{blockIdx.x} * kPackWarps + threadIdx.x / 32;
  const int64_t rows_per_head = p.num_parents * kParentRows;
  if (row_idx >= p.num_batches * p.num_kv_heads * rows_per_head) {
    return;
  }
  const int64_t node = row_idx % rows_per_head;
  const int64_t head = row_idx / rows_per_head % p.num_kv_heads;
  const int64_t batch = row_idx / rows_per_head / p.num_kv_heads;
  const int row = static_cast<int>(node % kParentRows);
  char* block =
      p.packed + ((batch * p.num_kv_heads + head) * p.num_parents + node / kParentRows) * Block::kBytes;
  const bool exists = node < p.num_nodes;

  const T* key =
      static_cast<const T*>(p.keys.data) + batch * p.keys.batch + node * p.keys.row + head * p.keys.head;
  constexpr int kHalf = kKeyDim / 2;
  const int dim = 2 * lane;
  const bool active = exists && dim < kHalf;
  float low[2] = {}, high[2] = {};
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    low[i] = active ? device::to_acc(key[dim + i]) : 0.f;
    high[i] = active ? device::to_acc(key[kHalf + dim + i]) : 0.f;
    largest = fmaxf(largest, fmaxf(finite_magnitude(low[i]), finite_magnitude(high[i])));
  }
  largest = device::warp_reduce<device::Max>(largest);
  const PowerOfTwo power = key_row_scale(largest);
  if (dim < kHalf) {
    float first[2], second[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 rotation = p.rope[row * kHalf + dim + i];
      const float x = low[i] * power.scale, y = high[i] * power.scale;
      first[i] = x * rotation.x - y * rotation.y;
      second[i] = x * rotation.y + y * rotation.x;
    }
    auto store = [&](int at, float a, float b) {
      *reinterpret_cast<uint32_t*>(block + chunk_offset<kKeyDim>(row, at / 8) + at % 8 * 2) =
          device::pack_pair<__half>(a, b);
    };
    store(dim, first[0], first[1]);
    store(kHalf + dim, second[0], second[1]);
  }
  if (lane == 0) {
    *reinterpret_cast<float*>(block + Block::kScaleOffset + row * 4) = power.inverse;
  }

  const uint16_t* value = static_cast<const uint16_t*>(p.values.data) + batch * p.values.batch +
                          node * p.values.row + head * p.values.head;
#pragma unroll
  for (int at = 2 * lane; at < kValueDim; at += 64) {
    const uint32_t pair = exists ? value[at] | static_cast<uint32_t>(value[at + 1]) << 16 : 0u;
    *reinterpret_cast<uint32_t*>(block + Block::kValueOffset + chunk_offset<kValueDim>(row, at / 8) +
                                 at % 8 * 2) = pair;
  }
}

template <typename T, int kDim>
cudaError_t launch_pack_layer(const PackParams& params, cudaStream_t stream) {
  const int64_t rows = params.num_batches * params.num_kv_heads * params.num_parents * kParentRows;
  return launch_kernel(pack_layer_kernel<T, kDim, kDim>,
                       {.grid = num_blocks(rows, kPackWarps), .threads = kPackWarps * 32}, stream, params);
}

}  // namespace htree::tree_attention
