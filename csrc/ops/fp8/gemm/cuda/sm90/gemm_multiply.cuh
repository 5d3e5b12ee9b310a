// The sums of fp8_gemm. The tensor cores of sm_90 do not add e4m3 products in fp32, but with about 14 bits
// below the largest term: as measured, a sum of 32 products errs by up to 2^-11 of the sum of magnitudes. So
// they sum only kPromoteK elements, and the partial sums are added in fp32 registers, as cuBLASLt does
// without "fast accumulation" (technique: DeepGEMM).
#pragma once

#include "device/sm90/gemm_pipeline.cuh"
#include "ops/fp8/gemm/cuda/sm90/gemm_instructions.cuh"
#include "ops/fp8/gemm/gemm_params.h"

namespace htree::fp8 {

// Starts the products of kPromoteK elements into d; they are committed, not waited for. `a` and `b` point to
// their first element.
template <typename T, int kColumns, int kPromoteK>
__device__ __forceinline__ void start_products(uint64_t a, uint64_t b, float (&d)[kColumns / 2]) {
  device::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kPromoteK / 32; ++step) {
    device::wgmma<T, kColumns>(d, device::advance(a, step * 32), device::advance(b, step * 32), step > 0);
  }
  device::wgmma_commit();
}

template <int kCount>
__device__ __forceinline__ void clear(float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum[i] = 0.0f;
  }
}

template <int kCount>
__device__ __forceinline__ void add_to(float (&sum)[kCount], float (&d)[kCount]) {
  device::pin_registers(d);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum[i] += d[i];
  }
}

// Descriptors of each stage: of the 64 rows number `half` of A, and of B. They are computed from one base,
// and so stay in uniform registers as long as `half` does (device::uniform).
template <class Shape>
struct StageDescriptors {
  uint64_t first_a;
  uint64_t first_b;

  __device__ __forceinline__ StageDescriptors(const device::GemmRing<Shape>& ring, int half)
      : first_a(
            device::k_major_descriptor<device::Swizzle::k128>(ring.a[0] + half * 64 * device::kBlockBytes)),
        first_b(device::k_major_descriptor<device::Swizzle::k128>(ring.b[0])) {}
  __device__ __forceinline__ uint64_t a(int stage) const {
    return device::advance(first_a, static_cast<uint32_t>(stage * Shape::kBytesA));
  }
  __device__ __forceinline__ uint64_t b(int stage) const {
    return device::advance(first_b, static_cast<uint32_t>(stage * Shape::kBytesB));
  }
};

// A warpgroup calls it: sum[half] = its 64 rows number `half` of A times all rows of B. kPromoteK is
// 32, 64 or 128.
template <class Shape, int kPromoteK, int kHalves>
__device__ __forceinline__ void multiply_promoted(device::GemmRing<Shape>& ring,
                                                  device::RingPlace<Shape::kStages>& place, int num_blocks,
                                                  int warpgroup, float (&sum)[kHalves][Shape::kRowsB / 2]) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    clear(sum[half]);
  }
  const StageDescriptors<Shape> descriptors(ring, warpgroup * kHalves);
  for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
    device::barrier_wait(&ring.full[place.stage], place.parity);
    const uint64_t b = descriptors.b(place.stage);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint64_t a = device::advance(descriptors.a(place.stage), half * 64 * device::kBlockBytes);
#pragma unroll
      for (int k = 0; k < device::kBlockBytes; k += kPromoteK) {
        float d[Shape::kRowsB / 2];
        start_products<typename Shape::T, Shape::kRowsB, kPromoteK>(device::advance(a, k),
                                                                    device::advance(b, k), d);
        device::wgmma_wait<0>();
        if (half + 1 == kHalves && k + kPromoteK == device::kBlockBytes) {
          device::release_stage(ring, place.stage);
        }
        add_to(sum[half], d);
      }
    }
    place.advance();
  }
}

// The same for one half, with two sets of accumulators: the tensor cores already have the next k-block while
// the sums of the previous one are added.
template <class Shape>
__device__ __forceinline__ void multiply_promoted_in_turns(device::GemmRing<Shape>& ring,
                                                           device::RingPlace<Shape::kStages>& place,
                                                           int num_blocks, int warpgroup,
                                                           float (&sum)[Shape::kRowsB / 2]) {
  const StageDescriptors<Shape> descriptors(ring, warpgroup);
  const auto start = [&](float(&d)[Shape::kRowsB / 2]) {
    device::barrier_wait(&ring.full[place.stage], place.parity);
    const int stage = place.stage;
    start_products<typename Shape::T, Shape::kRowsB, device::kBlockBytes>(descriptors.a(stage),
                                                                          descriptors.b(stage), d);
    place.advance();
    return stage;
  };
  float even[Shape::kRowsB / 2];
  float odd[Shape::kRowsB / 2];
  clear(sum);
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

}  // namespace htree::fp8
