// The mainloop of the Hopper matrix kernels: a producer thread streams k-blocks of both operands into a ring of
// shared-memory stages by tensor copies, and consumer warpgroups multiply from there. Each stage has two barriers:
// `full` counts bytes that have arrived, `empty` counts warps that have finished reading. The technique is
// that of the warp-specialised persistent kernels of CUTLASS and DeepGEMM.
//
// A k-block is 64 two-byte or 128 one-byte elements of each row, stored with the 128-byte swizzle. K-major:
// 128 bytes for each row of the operand. MN-major, two-byte types only: 128 bytes for each k, which hold 64
// rows of the operand; the next 64 rows stand behind all of them.
#pragma once

#include <cstdint>

#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"

namespace htree::device {

constexpr int kBlockBytes = 128;  // bytes of one row in one k-block

// M = kRowsA rows of A (64, or a multiple of it, per consumer warpgroup) against N = kRowsB rows of B. kCluster
// blocks go through their rings in step, because they multicast to one another.
template <typename T_, int kRowsA_, int kRowsB_, int kStages_, int kCluster_, int kWarpgroups_ = kRowsA_ / 64,
          Major kMajorA_ = Major::kK, Major kMajorB_ = Major::kK>
struct GemmShape {
  using T = T_;
  static constexpr Major kMajorA = kMajorA_;
  static constexpr Major kMajorB = kMajorB_;
  static constexpr int kRowsA = kRowsA_;
  static constexpr int kRowsB = kRowsB_;
  static constexpr int kStages = kStages_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kBlockK = kBlockBytes / static_cast<int>(sizeof(T));
  static constexpr int kWarpgroups = kWarpgroups_;            // consumer warpgroups
  static constexpr int kParts = kRowsA / (64 * kWarpgroups);  // 64 rows each, of a warpgroup
  static constexpr int kBytesA = kRowsA * kBlockBytes;
  static constexpr int kBytesB = kRowsB * kBlockBytes;
  static_assert(kRowsA % (64 * kWarpgroups) == 0 && kRowsB % 8 == 0 && kRowsB <= 256);
};

template <class Shape>
struct alignas(1024) GemmRing {
  uint8_t a[Shape::kStages][Shape::kBytesA];
  uint8_t b[Shape::kStages][Shape::kBytesB];
  Barrier full[Shape::kStages];
  Barrier empty[Shape::kStages];
};

// One thread calls it, before fence_barrier_init() and a synchronisation of the cluster or block.
template <class Shape>
__device__ __forceinline__ void init_ring(GemmRing<Shape>& ring) {
  for (int i = 0; i < Shape::kStages; ++i) {
    barrier_init(&ring.full[i], 1);
    barrier_init(&ring.empty[i], Shape::kCluster * Shape::kWarpgroups * 4);
  }
}

// One thread calls it. load(a, b, block_idx, barrier) starts this block's copies of one k-block into its
// stage. At every block of the cluster `bytes` must arrive at `barrier`, whoever copies them: kBytesA +
// kBytesB, or fewer where rows of an operand do not exist; products of such rows are not used.
template <class Shape, class Load>
__device__ __forceinline__ void fill_ring(GemmRing<Shape>& ring, RingPlace<Shape::kStages>& place,
                                          int num_blocks, uint32_t bytes, Load&& load) {
  for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
    barrier_wait(&ring.empty[place.stage], place.parity ^ 1);
    Barrier* full = &ring.full[place.stage];
    barrier_arrive_expect(full, bytes);
    load(ring.a[place.stage], ring.b[place.stage], block_idx, full);
    place.advance();
  }
}
template <class Shape, class Load>
__device__ __forceinline__ void fill_ring(GemmRing<Shape>& ring, RingPlace<Shape::kStages>& place,
                                          int num_blocks, Load&& load) {
  fill_ring<Shape>(ring, place, num_blocks, Shape::kBytesA + Shape::kBytesB, load);
}

// Each consumer warp calls it. After it any block of the cluster
// may overwrite the stage.
template <class Shape>
__device__ __forceinline__ void release_stage(GemmRing<Shape>& ring, int stage) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if constexpr (Shape::kCluster > 1) {
    if (lane < Shape::kCluster) {
      barrier_arrive_remote(&ring.empty[stage], static_cast<uint32_t>(lane));
    }
  } else if (lane == 0) {
    barrier_arrive(&ring.empty[stage]);
  }
}

// Descriptor of a k-block at `block`, from the first of the rows that a product takes on. Their number is a
// multiple of 64 where the operand is MN-major.
template <Major kMajor>
__device__ __forceinline__ uint64_t block_descriptor(const void* block) {
  return kMajor == Major::kK ? k_major_descriptor<Swizzle::k128>(block)
                             : mn_major_descriptor<Swizzle::k128>(block, 64 * kBlockBytes);
}

// One k-block: d[64 x N] (+)= rows of `a` times rows of `b`.
template <typename T, int N, Major kMajorA = Major::kK, Major kMajorB = Major::kK>
__device__ __forceinline__ void multiply_block(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  constexpr int kStepA = kMajorA == Major::kK ? 32 : 16 * kBlockBytes;
  constexpr int kStepB = kMajorB == Major::kK ? 32 : 16 * kBlockBytes;
#pragma unroll
  for (int k = 0; k < kBlockBytes / 32; ++k) {
    wgmma<T, N, kMajorA, kMajorB>(d, advance(a, k * kStepA), advance(b, k * kStepB), accumulate || k > 0);
  }
}

// A warpgroup calls it. d = its rows of A times all rows of B, over num_blocks >= 1 k-blocks: kParts results
// [64 x kRowsB], one behind the other.
template <class Shape>
__device__ __forceinline__ void multiply_ring(GemmRing<Shape>& ring, RingPlace<Shape::kStages>& place,
                                              int num_blocks, int warpgroup,
                                              float (&d)[Shape::kParts * Shape::kRowsB / 2]) {
  using T = typename Shape::T;
  using Sums = float[Shape::kRowsB / 2];
  int previous = 0;
  for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
    barrier_wait(&ring.full[place.stage], place.parity);
    const uint8_t* rows = ring.a[place.stage] + warpgroup * Shape::kParts * 64 * kBlockBytes;
    const uint64_t b = block_descriptor<Shape::kMajorB>(ring.b[place.stage]);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      multiply_block<T, Shape::kRowsB, Shape::kMajorA, Shape::kMajorB>(
          reinterpret_cast<Sums&>(d[part * Shape::kRowsB / 2]),
          block_descriptor<Shape::kMajorA>(rows + part * 64 * kBlockBytes), b, block_idx > 0);
    }
    wgmma_commit();
    if (block_idx > 0) {
      wgmma_wait<1>();
      release_stage(ring, previous);
    }
    previous = place.stage;
    place.advance();
  }
  wgmma_wait<0>();
  release_stage(ring, previous);
  pin_registers(d);
}

}  // namespace htree::device
