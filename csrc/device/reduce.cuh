// Reductions over a warp and over a block. The order of the additions depends on the launch shape alone.
#pragma once

namespace htree::device {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// A NaN loses against a number (IEEE 754-2008 maxNum).
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// All 32 lanes must call; all lanes get the result.
template <typename Op, typename T>
__device__ __forceinline__ T warp_reduce(T value, Op op = {}) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}

// Every thread of a block of kThreads (a multiple of 32) must call; all threads get the result. `scratch`
// holds kThreads / 32 values in shared memory and may be used again after the caller's next __syncthreads;
// two calls in a row need two scratch arrays. Costs one __syncthreads.
template <int kThreads, typename Op, typename T>
__device__ __forceinline__ T block_reduce(T value, T* scratch, Op op = {}) {
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024);
  value = warp_reduce<Op>(value, op);
  if constexpr (kThreads > kWarpSize) {
    constexpr int kWarps = kThreads / kWarpSize;
    if (threadIdx.x % kWarpSize == 0) {
      scratch[threadIdx.x / kWarpSize] = value;
    }
    __syncthreads();
    value = scratch[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) {
      value = op(value, scratch[warp]);
    }
  }
  return value;
}

}  // namespace htree::device
