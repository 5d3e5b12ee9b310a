// The elementwise half of the gated MLP, for products that cuBLAS made: g * act(u) and its gradients.
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "ops/gated_mlp/cuda/activation.cuh"

namespace htree::gated_mlp {

inline constexpr int kGateThreads = 256;
inline constexpr int kGateElements = 8;  // per thread and step: 16 bytes of a half type, two loads of float

// Calls step(first, count) for this thread's runs of up to kGateElements elements.
template <class Step>
__device__ __forceinline__ void for_runs(int64_t count, Step&& step) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x * kGateElements;
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kGateElements; i < count; i += stride) {
    step(i, count - i < kGateElements ? static_cast<int>(count - i) : kGateElements);
  }
}

// Loads kGateElements elements from `p` on as floats, or `count` of them followed by zeros. `p` is aligned to
// 16 bytes: buffers are, and runs start at multiples of eight elements.
template <typename T>
__device__ __forceinline__ void load_run(const T* p, int count, float (&values)[kGateElements]) {
  if (count == kGateElements) {
    constexpr int kPack = device::kPackOf<T>;
#pragma unroll
    for (int i = 0; i < kGateElements / kPack; ++i) {
      const auto pack = device::load_pack<kPack>(p + i * kPack);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        values[i * kPack + j] = device::to_acc(pack[j]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kGateElements; ++i) {
      values[i] = i < count ? device::to_acc(p[i]) : 0.0f;
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_run(T* p, int count, const float (&values)[kGateElements]) {
  if (count == kGateElements) {
    constexpr int kPack = device::kPackOf<T>;
    T rounded[kGateElements];
    device::from_acc<T>(values, rounded);
#pragma unroll
    for (int i = 0; i < kGateElements / kPack; ++i) {
      device::Pack<T, kPack> pack;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        pack[j] = rounded[i * kPack + j];
      }
      device::store_pack(p + i * kPack, pack);
    }
  } else {
    for (int i = 0; i < count; ++i) {
      p[i] = device::from_acc<T>(values[i]);
    }
  }
}

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(kGateThreads)
    gate_kernel(int64_t count, const float* __restrict__ gate, const float* __restrict__ up,
                T* __restrict__ out) {
  for_runs(count, [&](int64_t first, int run) {
    float g[kGateElements];
    float u[kGateElements];
    load_run(gate + first, run, g);
    load_run(up + first, run, u);
#pragma unroll
    for (int i = 0; i < kGateElements; ++i) {
      g[i] *= activate<kActivation>(u[i]);
    }
    store_run(out + first, run, g);
  });
}

template <typename T, typename P, Activation kActivation>
__global__ void __launch_bounds__(kGateThreads)
    gate_backward_kernel(int64_t count, const T* __restrict__ dy, const P* __restrict__ gate,
                         const P* __restrict__ up, T* __restrict__ dgate, T* __restrict__ dup) {
  for_runs(count, [&](int64_t first, int run) {
    float d[kGateElements];
    float g[kGateElements];
    float u[kGateElements];
    load_run(dy + first, run, d);
    load_run(gate + first, run, g);
    load_run(up + first, run, u);
#pragma unroll
    for (int i = 0; i < kGateElements; ++i) {
      float slope;
      const float act = activate<kActivation>(u[i], slope);
      u[i] = d[i] * g[i] * slope;
      g[i] = d[i] * act;
    }
    store_run(dgate + first, run, g);
    store_run(dup + first, run, u);
  });
}

}  // namespace htree::gated_mlp
