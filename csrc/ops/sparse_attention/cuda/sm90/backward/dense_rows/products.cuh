// Steps that both gradients of the dense rows share. sm_90a.
#pragma once

#include "device/sm90/wgmma.cuh"
#include "ops/sparse_attention/cuda/sm90/backward/dense_rows/rows.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/dense_rows/rows.cuh"
#include "ops/tree/cuda/sm80/running_state.cuh"

namespace htree::tree_attention {

// d = a * b^T over the head dim, of 64 rows and N rows. Both operands are K-major panels, of kRowsA and kRowsB rows; the
// descriptors point to the first rows.
template <typename T, int kDim, int N, int kRowsA, int kRowsB>
__device__ __forceinline__ void start_product(float (&d)[N / 2], uint64_t a, uint64_t b) {
  device::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint32_t inside = step % 4 * 32;
    device::wgmma<T, N>(d, device::advance(a, step / 4 * kRowsA * kPanelRowBytes + inside),
                        device::advance(b, step / 4 * kRowsB * kPanelRowBytes + inside), step > 0);
  }
  device::wgmma_commit();
}

// d += a * b, with a in registers and b kSteps * 16 rows of panels of kRowsB rows, MN-major.
template <typename T, int kDim, int kSteps, int kRowsB>
__device__ __forceinline__ void start_sum(float (&d)[kDim / 2], const uint32_t (&a)[kSteps][4],
                                          const char* b) {
  const uint64_t rows = device::mn_major_descriptor<device::Swizzle::k128>(b, kRowsB * kPanelRowBytes);
  device::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    device::wgmma<T, kDim, device::Major::kMN>(d, a[step], device::advance(rows, step * 16 * kPanelRowBytes),
                                               true);
  }
  device::wgmma_commit();
}

// An accumulator as the operand A of the next product.
template <typename T, int kSteps>
__device__ __forceinline__ void pack_operand(const float (&x)[8 * kSteps], uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) {
    a[i / 4][i % 4] = device::pack_pair<T>(x[2 * i], x[2 * i + 1]);
  }
}

template <int kCount>
__device__ __forceinline__ void clear(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = 0.f;
  }
}

// Rotates elements of a row back by its position and calls store(dim, x, y) with dims `dim` and the next, times
// `factor`. `sum` is an accumulator of all dims; h = 0 is the first of this thread's two rows. `rotations` is the row of
// the table [positions, K/2].
template <int kDim, typename Store>
__device__ __forceinline__ void rotate_back(const float (&sum)[kDim / 2], int h, const float2* rotations,
                                            float factor, Store store) {
  constexpr int kHalf = kDim / 2;
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const float4 rotation = __ldg(reinterpret_cast<const float4*>(rotations + 8 * i + column));
    const float* low = sum + 4 * i + 2 * h;
    const float* high = low + kDim / 4;
    store(8 * i + column, (low[0] * rotation.x + high[0] * rotation.y) * factor,
          (low[1] * rotation.z + high[1] * rotation.w) * factor);
    store(8 * i + column + kHalf, (high[0] * rotation.x - low[0] * rotation.y) * factor,
          (high[1] * rotation.z - low[1] * rotation.w) * factor);
  }
}

}  // namespace htree::tree_attention
