// Elementwise with a known scale: codes or values of x, values of codes, and the gradient of the rounding.
#pragma once

#include "ops/fp8/quantize/emit.cuh"
#include "ops/fp8/quantize/matrix_index.cuh"

namespace htree::fp8 {

constexpr int kApplyThreads = 256;

template <typename T, typename Emit>
struct EncodeGiven {
  using In = T;
  using Out = typename Emit::template Out<T>;
  static constexpr bool kCounts = std::is_same_v<Emit, EmitCodes>;
  static constexpr bool kHasGradient = false;

  template <int N, typename Scale>
  __device__ __forceinline__ static Pack<Out, N> apply(const Pack<T, N>& x, const Pack<Out, N>&,
                                                       const Scale& scale) {
    return Emit::template apply<T, N>(x, scale);
  }
};

// q / s rounded to T.
template <typename T>
struct Decode {
  using In = uint8_t;
  using Out = T;
  static constexpr bool kCounts = false;
  static constexpr bool kHasGradient = false;

  template <int N, typename Scale>
  __device__ __forceinline__ static Pack<T, N> apply(const Pack<uint8_t, N>& codes, const Pack<T, N>&,
                                                     const Scale& scale) {
    return decode_pack<T, N>(codes, scale);
  }
};

// dy where |x s| <= 448, else 0.
template <typename T>
struct RoundBackward {
  using In = T;
  using Out = T;
  static constexpr bool kCounts = false;
  static constexpr bool kHasGradient = true;

  template <int N, typename Scale>
  __device__ __forceinline__ static Pack<T, N> apply(const Pack<T, N>& x, const Pack<T, N>& dy,
                                                     const Scale& scale) {
    Pack<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool is_inside = fabsf(__fmul_rn(device::to_acc(x[i]), scale.of(i))) <= kMaxValue;
      out[i] = is_inside ? dy[i] : device::from_acc<T>(0.0f);
    }
    return out;
  }
};

template <typename In, typename Out, int kPack>
struct ApplyParams {
  const In* x;
  const Out* dy;  // RoundBackward alone; contiguous
  Out* out;       // contiguous
  const float* scale;
  int* num_overflow;  // where codes are made; zero before the launch
  MatrixIndex<kPack> index;
};

// Each thread has kPacks packs of kPack elements.
template <typename Op, int kPacks, int kPack>
__global__ void __launch_bounds__(kApplyThreads)
    apply_kernel(const __grid_constant__ ApplyParams<typename Op::In, typename Op::Out, kPack> p) {
  using In = typename Op::In;
  using Out = typename Op::Out;
  const int64_t first = int64_t{blockIdx.x} * (kApplyThreads * kPacks) + threadIdx.x;
  Pack<In, kPack> value[kPacks] = {};
  Pack<Out, kPack> upstream[kPacks] = {};
  int64_t scale_idx[kPacks] = {};
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t pack = first + i * kApplyThreads;
    if (pack < p.index.num_packs()) {
      const auto place = p.index.place(pack);
      scale_idx[i] = place.scale_idx;
      value[i] = device::load_pack<kPack>(p.x + place.offset);
      if constexpr (Op::kHasGradient) {
        upstream[i] = device::load_pack<kPack>(p.dy + pack * kPack);
      }
    }
  }
  int count = 0;
  const auto write = [&](int i, int64_t pack, const auto& scale) {
    device::store_pack(p.out + pack * kPack, Op::template apply<kPack>(value[i], upstream[i], scale));
    if constexpr (Op::kCounts) {
      count += count_overflow(value[i], scale);
    }
  };
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t pack = first + i * kApplyThreads;
    if (pack < p.index.num_packs()) {
      if (p.index.has_lane_scales()) {
        write(i, pack, LaneScales<kPack>(p.scale + scale_idx[i]));
      } else {
        write(i, pack, OneScale(__ldg(p.scale + scale_idx[i])));
      }
    }
  }
  if constexpr (Op::kCounts) {
    add_overflow(count, p.num_overflow);
  }
}

}  // namespace htree::fp8
