// The sums of fp8_gemm. The tensor cores of sm_90 add e4m3 products with about 14 bits below the largest
// term, not in fp32: measured, a sum of 32 products errs by up to 2^-11 of the sum of magnitudes. So only
// kPromoteK elements are summed there, and the partial sums in fp32 registers, as cuBLASLt does without "fast
// accumulation" (technique: DeepGEMM).
#pragma once

#include "device/gemm_pipeline.cuh"
#include "ops/fp8/gemm/gemm_params.h"

namespace htree::fp8 {

// When one warpgroup adds partial sums the other must keep the tensor cores busy, which it does only if the
// two are out of step. kTile, kBlock: the second warpgroup waits for the first product of the first one, in
// every tile or in every k-block.
enum class Stagger : int { kNone, kTile, kBlock };

inline constexpr int kStaggerBarrier = 1;  // named barrier of both warpgroups

// The products of kPromoteK elements into d; committed, not waited for. `a`, `b` at their first element.
template <class Shape, int kPromoteK>
__device__ __forceinline__ void start_products(uint64_t a, uint64_t b, float (&d)[Shape::kRowsB / 2]) {
  device::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kPromoteK / 32; ++step) {
    device::wgmma<typename Shape::T, Shape::kRowsB>(d, device::advance(a, step * 32),
                                                    device::advance(b, step * 32), step > 0);
  }
  device::wgmma_commit();
}

template <int kCount>
__device__ __forceinline__ void add_to(float (&sum)[kCount], float (&d)[kCount]) {
  device::pin_registers(d);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum[i] += d[i];
  }
}

// A warpgroup: sum[half] = its 64 rows number `half` of A times all rows of B. kPromoteK: 32, 64 or 128.
template <class Shape, int kPromoteK, int kHalves, Stagger kStagger = Stagger::kNone>
__device__ __forceinline__ void multiply_promoted(device::GemmRing<Shape>& ring,
                                                  device::RingPlace<Shape::kStages>& place, int num_blocks,
                                                  int warpgroup, float (&sum)[kHalves][Shape::kRowsB / 2]) {
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
    const bool staggered = kStagger == Stagger::kBlock || (kStagger == Stagger::kTile && block_idx == 0);
    if (staggered && warpgroup == 1) {
      device::named_barrier_sync(kStaggerBarrier, 256);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint64_t a = device::k_major_descriptor<device::Swizzle::k128>(
          ring.a[place.stage] + (warpgroup * kHalves + half) * 64 * device::kBlockBytes);
#pragma unroll
      for (int k = 0; k < device::kBlockBytes; k += kPromoteK) {
        float d[Shape::kRowsB / 2];
        start_products<Shape, kPromoteK>(device::advance(a, k), device::advance(b, k), d);
        device::wgmma_wait<0>();
        if (half == 0 && k == 0 && staggered && warpgroup == 0) {
          device::named_barrier_arrive(kStaggerBarrier, 256);
        }
        if (half + 1 == kHalves && k + kPromoteK == device::kBlockBytes) {
          device::release_stage(ring, place.stage);
        }
        add_to(sum[half], d);
      }
    }
    place.advance();
  }
}

// The same for one half, with two sets of accumulators: the tensor cores have the next k-block at hand while
// the sums of the last one are added.
template <class Shape>
__device__ __forceinline__ void multiply_promoted_in_turns(device::GemmRing<Shape>& ring,
                                                           device::RingPlace<Shape::kStages>& place,
                                                           int num_blocks, int warpgroup,
                                                           float (&sum)[Shape::kRowsB / 2]) {
  const auto start = [&](float(&d)[Shape::kRowsB / 2]) {
    device::barrier_wait(&ring.full[place.stage], place.parity);
    const int stage = place.stage;
    start_products<Shape, device::kBlockBytes>(
        device::k_major_descriptor<device::Swizzle::k128>(ring.a[stage] +
                                                          warpgroup * 64 * device::kBlockBytes),
        device::k_major_descriptor<device::Swizzle::k128>(ring.b[stage]), d);
    place.advance();
    return stage;
  };
  float even[Shape::kRowsB / 2];
  float odd[Shape::kRowsB / 2];
#pragma unroll
  for (int i = 0; i < Shape::kRowsB / 2; ++i) {
    sum[i] = 0.0f;
  }
  int even_stage = start(even);
  for (int block_idx = 1;; block_idx += 2) {
    if (block_idx == num_blocks) {
      device::wgmma_wait<0>();
      device::release_stage(ring, even_stage);
      add_to(sum, even);
      return;
    }
    const int odd_stage = start(odd);
    device::wgmma_wait<1>();
    device::release_stage(ring, even_stage);
    add_to(sum, even);
    if (block_idx + 1 == num_blocks) {
      device::wgmma_wait<0>();
      device::release_stage(ring, odd_stage);
      add_to(sum, odd);
      return;
    }
    even_stage = start(even);
    device::wgmma_wait<1>();
    device::release_stage(ring, odd_stage);
    add_to(sum, odd);
  }
}

// 1 / the scale of row or column `index`, which may lie beyond the last.
__device__ __forceinline__ float inverse_scale(const GemmScale& scale, int64_t index, int64_t count) {
  return 1.0f / scale.data[(index < count ? index : count - 1) * scale.stride];
}

// The product of two inverse scales, kept finite so that a sum of zero stays zero.
__device__ __forceinline__ float joint_factor(float by_row, float by_column) {
  return fminf(by_row * by_column, 3.402823466e38f);
}

}  // namespace htree::fp8
