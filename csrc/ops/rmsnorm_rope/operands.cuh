// Loads of weight and tables, whose dtype is known at run time only, and of rows.
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "ops/rmsnorm_rope/rmsnorm_rope_params.h"

namespace htree::rmsnorm_rope {

using device::Acc;
using device::Pack;

template <typename Source, int N, typename A>
__device__ __forceinline__ void load_as(const Source* from, A (&to)[N]) {
  constexpr int kStep = N < device::kPackOf<Source> ? N : device::kPackOf<Source>;
#pragma unroll
  for (int first = 0; first < N; first += kStep) {
    const auto pack = device::load_pack<kStep>(from + first);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      to[first + i] = static_cast<A>(device::to_acc(pack[i]));
    }
  }
}

// N consecutive values at `offset` elements, aligned to their packs. The branch is the same for every thread.
template <int N, typename A>
__device__ __forceinline__ void load_any(const void* data, Dtype dtype, int64_t offset, A (&to)[N]) {
  switch (dtype) {
    case Dtype::kFloat:
      return load_as(static_cast<const float*>(data) + offset, to);
    case Dtype::kHalf:
      return load_as(static_cast<const __half*>(data) + offset, to);
    case Dtype::kBFloat16:
      return load_as(static_cast<const __nv_bfloat16*>(data) + offset, to);
    case Dtype::kDouble:
      return load_as(static_cast<const double*>(data) + offset, to);
  }
}

template <typename A>
__device__ __forceinline__ A load_any_one(const void* data, Dtype dtype, int64_t offset) {
  A value[1];
  load_any(data, dtype, offset, value);
  return value[0];
}

template <typename A>
__device__ __forceinline__ void store_any(void* data, Dtype dtype, int64_t offset, A value) {
  switch (dtype) {
    case Dtype::kFloat:
      static_cast<float*>(data)[offset] = static_cast<float>(value);
      return;
    case Dtype::kHalf:
      static_cast<__half*>(data)[offset] = device::from_acc<__half>(static_cast<float>(value));
      return;
    case Dtype::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[offset] = device::from_acc<__nv_bfloat16>(static_cast<float>(value));
      return;
    case Dtype::kDouble:
      static_cast<double*>(data)[offset] = value;
      return;
  }
}

// cos and sin of N neighbouring columns of the lower half of a head and of their partners in the upper half.
template <typename A, int N>
struct Rotation {
  A cos_lower[N];
  A cos_upper[N];
  A sin_lower[N];
  A sin_upper[N];

  __device__ __forceinline__ void load(const Table& cos, const Table& sin, int64_t position, int column) {
    const int64_t cos_at = position * cos.position_stride + column;
    const int64_t sin_at = position * sin.position_stride + column;
    load_any(cos.data, cos.dtype, cos_at, cos_lower);
    load_any(cos.data, cos.dtype, cos_at + cos.upper, cos_upper);
    load_any(sin.data, sin.dtype, sin_at, sin_lower);
    load_any(sin.data, sin.dtype, sin_at + sin.upper, sin_upper);
  }

  // n cos + rotate_half(n) sin
  __device__ __forceinline__ void apply(int i, A lower, A upper, A& out_lower, A& out_upper) const {
    out_lower = lower * cos_lower[i] - upper * sin_lower[i];
    out_upper = upper * cos_upper[i] + lower * sin_upper[i];
  }

  // The transposed map, for gradients.
  __device__ __forceinline__ void transposed(int i, A lower, A upper, A& out_lower, A& out_upper) const {
    out_lower = lower * cos_lower[i] + upper * sin_upper[i];
    out_upper = upper * cos_upper[i] - lower * sin_lower[i];
  }
};

}  // namespace htree::rmsnorm_rope
