// From storage types to arithmetic types and back. Arithmetic is in float, for double in double; stores round
// to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace htree::device {

template <typename T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};
template <typename T>
using Acc = typename Arithmetic<T>::type;

__device__ __forceinline__ float to_acc(float x) {
  return x;
}
__device__ __forceinline__ double to_acc(double x) {
  return x;
}
__device__ __forceinline__ float to_acc(__half x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_acc(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ __forceinline__ T from_acc(Acc<T> x) {
  if constexpr (sizeof(T) == sizeof(Acc<T>)) {
    return x;
  } else if constexpr (sizeof(T) == sizeof(__half) && std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Converts two at a time, because one instruction converts a pair of half types. `to` holds an
// even number of T.
template <typename T, int N>
__device__ __forceinline__ void from_acc(const Acc<T> (&from)[N], T (&to)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      if constexpr (std::is_same_v<T, __half>) {
        *reinterpret_cast<__half2*>(&to[i]) = __floats2half2_rn(from[i], from[i + 1]);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(&to[i]) = __floats2bfloat162_rn(from[i], from[i + 1]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i] = from_acc<T>(from[i]);
    }
  }
}

// The largest of N values; NaN only where all are NaN. One instruction compares a pair of half types.
template <typename T, int N>
__device__ __forceinline__ Acc<T> max_of(const T (&values)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const Pair* pairs = reinterpret_cast<const Pair*>(values);
    Pair best = pairs[0];
#pragma unroll
    for (int i = 1; i < N / 2; ++i) {
      best = __hmax2(best, pairs[i]);
    }
    return fmaxf(to_acc(best.x), to_acc(best.y));
  } else {
    Acc<T> best = to_acc(values[0]);
#pragma unroll
    for (int i = 1; i < N; ++i) {
      if constexpr (sizeof(T) == 8) {
        best = fmax(best, to_acc(values[i]));
      } else {
        best = fmaxf(best, to_acc(values[i]));
      }
    }
    return best;
  }
}

template <typename T>
__device__ __forceinline__ T negative_infinity() {
  if constexpr (sizeof(T) == 8) {
    return -__longlong_as_double(0x7ff0000000000000LL);
  } else {
    return -__int_as_float(0x7f800000);
  }
}

// 2^x by the hardware: relative error 2^-22; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x with the accuracy that the storage type T can show: by the hardware's exp2 for the half types, by
// libdevice for the others.
template <typename T>
__device__ __forceinline__ Acc<T> exp_for(Acc<T> x) {
  if constexpr (sizeof(T) == 2) {
    return __expf(x);
  } else if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    return exp(x);
  }
}

}  // namespace htree::device
