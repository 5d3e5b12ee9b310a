// The sums of fp8_gemm. The tensor cores of sm_90 add e4m3 products with about 14 bits below the largest
// term, not in fp32: measured, a sum of 32 products errs by up to 2^-11 of the sum of magnitudes. So only
// kPromoteK elements are summed there, and the partial sums in fp32 registers, as cuBLASLt does without "fast
// accumulation" (technique: DeepGEMM).
#pragma once

#include "device/gemm_pipeline.cuh"
#include "ops/fp8/gemm/gemm_params.h"

namespace htree::fp8 {

// A warpgroup: sum[half] = its 64 rows number `half` of A times all rows of B. kPromoteK: 32, 64 or 128.
template <class Shape, int kPromoteK, int kHalves>
__device__ __forceinline__ void multiply_promoted(device::GemmRing<Shape>& ring,
                                                  device::RingPlace<Shape::kStages>& place, int num_blocks,
                                                  int warpgroup, float (&sum)[kHalves][Shape::kRowsB / 2]) {
  constexpr int kSteps = kPromoteK / 32;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < Shape::kRowsB / 2; ++i) {
      sum[half][i] = 0.0f;
    }
  }
  for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
    device::barrier_wait(&ring.full[place.stage], place.parity);
    const uint64_t b = device::k_major_descriptor<device::Swizzle::k128>(ring.b[place.stage]);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint64_t a = device::k_major_descriptor<device::Swizzle::k128>(
          ring.a[place.stage] + (warpgroup * kHalves + half) * 64 * device::kBlockBytes);
#pragma unroll
      for (int k = 0; k < 4; k += kSteps) {
        float d[Shape::kRowsB / 2];
        device::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          device::wgmma<typename Shape::T, Shape::kRowsB>(d, device::advance(a, (k + step) * 32),
                                                          device::advance(b, (k + step) * 32), step > 0);
        }
        device::wgmma_commit();
        device::wgmma_wait<0>();
        device::pin_registers(d);
        if (half + 1 == kHalves && k + kSteps == 4) {
          device::release_stage(ring, place.stage);
        }
#pragma unroll
        for (int i = 0; i < Shape::kRowsB / 2; ++i) {
          sum[half][i] += d[i];
        }
      }
    }
    place.advance();
  }
}

// 1 / the scale of row or column `index`, which may lie beyond the last.
__device__ __forceinline__ float inverse_scale(const GemmScale& scale, int64_t index, int64_t count) {
  return 1.0f / scale.data[(index < count ? index : count - 1) * scale.stride];
}

// The sum times the product of two inverse scales, which may be infinite: a sum of zero stays zero.
__device__ __forceinline__ float rescale(float sum, float by_row, float by_column) {
  return sum == 0.0f ? 0.0f : sum * (by_row * by_column);
}

}  // namespace htree::fp8
