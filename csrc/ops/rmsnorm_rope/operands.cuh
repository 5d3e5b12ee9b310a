// Loads of rows, and of weights and tables, whose dtype is known at run time only.
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "ops/rmsnorm_rope/rmsnorm_rope_params.h"

namespace htree::rmsnorm_rope {

using device::Acc;
using device::Pack;

// Values as they are stored, in one dtype: several loads can be under way before the first is converted.
template <typename Source, int N>
struct Raw {
  static constexpr int kStep = N < device::kPackOf<Source> ? N : device::kPackOf<Source>;
  Pack<Source, kStep> packs[N / kStep];

  __device__ __forceinline__ void load(const void* data, int64_t offset) {
#pragma unroll
    for (int i = 0; i < N / kStep; ++i) {
      packs[i] = device::load_pack<kStep>(static_cast<const Source*>(data) + offset + i * kStep);
    }
  }
  template <typename A>
  __device__ __forceinline__ void convert(A (&to)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i] = static_cast<A>(device::to_acc(packs[i / kStep][i % kStep]));
    }
  }
};

// Calls f(Source{}) for the type that `dtype` names. All threads take the same branch.
template <typename F>
__device__ __forceinline__ void with_dtype(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat:
      return f(float{});
    case Dtype::kHalf:
      return f(__half{});
    case Dtype::kBFloat16:
      return f(__nv_bfloat16{});
    case Dtype::kDouble:
      return f(double{});
  }
}

// Loads N values at each of two offsets, which count elements and are aligned to the packs.
template <int N, typename A>
__device__ __forceinline__ void load_both(const void* data, Dtype dtype, int64_t first, int64_t second,
                                          A (&to_first)[N], A (&to_second)[N]) {
  with_dtype(dtype, [&](auto source) {
    Raw<decltype(source), N> a, b;
    a.load(data, first);
    b.load(data, second);
    a.convert(to_first);
    b.convert(to_second);
  });
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

  __device__ __forceinline__ void load(const Table& cos, const Table& sin, int64_t batch, int64_t position,
                                       int column) {
    const int64_t cos_at = batch * cos.batch_stride + position * cos.position_stride + column;
    const int64_t sin_at = batch * sin.batch_stride + position * sin.position_stride + column;
    if (cos.dtype != sin.dtype) {
      load_both(cos.data, cos.dtype, cos_at, cos_at + cos.upper, cos_lower, cos_upper);
      load_both(sin.data, sin.dtype, sin_at, sin_at + sin.upper, sin_lower, sin_upper);
      return;
    }
    with_dtype(cos.dtype, [&](auto source) {
      Raw<decltype(source), N> raw[4];
      raw[0].load(cos.data, cos_at);
      raw[1].load(cos.data, cos_at + cos.upper);
      raw[2].load(sin.data, sin_at);
      raw[3].load(sin.data, sin_at + sin.upper);
      raw[0].convert(cos_lower);
      raw[1].convert(cos_upper);
      raw[2].convert(sin_lower);
      raw[3].convert(sin_upper);
    });
  }

  // n cos + rotate_half(n) sin
  __device__ __forceinline__ void apply(int i, A lower, A upper, A& out_lower, A& out_upper) const {
    out_lower = lower * cos_lower[i] - upper * sin_lower[i];
    out_upper = upper * cos_upper[i] + lower * sin_upper[i];
  }

  // The transposed map, which gradients take.
  __device__ __forceinline__ void transposed(int i, A lower, A upper, A& out_lower, A& out_upper) const {
    out_lower = lower * cos_lower[i] + upper * sin_upper[i];
    out_upper = upper * cos_upper[i] - lower * sin_lower[i];
  }
};

}  // namespace htree::rmsnorm_rope
