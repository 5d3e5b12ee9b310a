// out = (x Wg^T) * act(x Wu^T) for one to four rows of x: nothing but the speed at which weights stream
// matters. Every warp works alone: it takes whole columns of the output, streams the two rows of weights
// through stages of its own with bulk copies, long contiguous ones, and multiplies them in fp32 registers by
// x, which waits in shared memory. No warp waits for another, so 192 KB per multiprocessor are under way.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"
#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/gated_mlp/activation.cuh"
#include "ops/gated_mlp/gated_mlp_launch.h"

namespace htree::gated_mlp {

template <typename T_, Activation kActivation_, int kRows_>
struct VectorTraits {
  using T = T_;
  static constexpr Activation kActivation = kActivation_;
  static constexpr int kRows = kRows_;  // of x
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = 3;    // of a warp
  static constexpr int kChunk = 2048;  // elements of one row of weights in a stage
  static constexpr int kPack = 8;      // elements of 16 bytes

  struct Shared {
    T weights[kWarps][kStages][2][kChunk];  // of Wg, of Wu
    device::Barrier full[kWarps][kStages];
  };
  // x [kRows][hidden] stands behind.
  static constexpr int64_t shared_bytes(int64_t hidden) {
    return static_cast<int64_t>(sizeof(Shared)) + kRows * hidden * static_cast<int64_t>(sizeof(T));
  }
};

// One row of weights in chunks: chunk c of column i is chunk i * num_chunks + c of the warp.
struct VectorWork {
  int num_chunks;  // of a row
  int64_t count;   // chunks of the warp
  int64_t first;   // its first column
  int64_t stride;  // from one of its columns to the next
};

// One lane: starts the copies of chunk `index` of the warp.
template <class Tr>
__device__ __forceinline__ void load_chunk(typename Tr::Shared& shared, int warp, int stage,
                                           const ForwardParams<typename Tr::T>& p, const VectorWork& work,
                                           int64_t index) {
  const int64_t column = work.first + index / work.num_chunks * work.stride;
  const int64_t k = index % work.num_chunks * Tr::kChunk;
  const int64_t left = p.sizes.hidden - k;
  const uint32_t bytes = static_cast<uint32_t>(left < Tr::kChunk ? left : Tr::kChunk) *
                         static_cast<uint32_t>(sizeof(typename Tr::T));
  device::Barrier* full = &shared.full[warp][stage];
  device::barrier_arrive_expect(full, 2 * bytes);
  device::bulk_load(shared.weights[warp][stage][0], p.gate_weight.data + column * p.gate_weight.pitch + k,
                    bytes, full, device::kEvictFirst);
  device::bulk_load(shared.weights[warp][stage][1], p.up_weight.data + column * p.up_weight.pitch + k, bytes,
                    full, device::kEvictFirst);
}

// A warp: adds the products of `count` elements (a multiple of 8) of both weights with x [kRows][hidden].
template <class Tr>
__device__ __forceinline__ void add_products(const typename Tr::T (&weights)[2][Tr::kChunk],
                                             const typename Tr::T* x, int64_t hidden, int count,
                                             float (&sum)[Tr::kRows][2][2]) {
  using T = typename Tr::T;
  constexpr int kPack = Tr::kPack;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x % 32) * kPack; i < count; i += 32 * kPack) {
    const auto gate = device::load_pack<kPack>(&weights[0][i]);
    const auto up = device::load_pack<kPack>(&weights[1][i]);
#pragma unroll
    for (int row = 0; row < Tr::kRows; ++row) {
      const auto value = device::load_pack<kPack>(x + row * hidden + i);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float factor = device::to_acc(static_cast<T>(value[j]));
        sum[row][0][j % 2] = fmaf(factor, device::to_acc(static_cast<T>(gate[j])), sum[row][0][j % 2]);
        sum[row][1][j % 2] = fmaf(factor, device::to_acc(static_cast<T>(up[j])), sum[row][1][j % 2]);
      }
    }
  }
}

// hidden is a multiple of 8, sizes.rows at most kRows; one block per multiprocessor.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1) vector_kernel(const ForwardParams<typename Tr::T> p) {
#if HTREE_SM90A
  using T = typename Tr::T;
  extern __shared__ __align__(128) uint8_t raw[];
  auto& shared = *reinterpret_cast<typename Tr::Shared*>(raw);
  T* x = reinterpret_cast<T*>(raw + sizeof(typename Tr::Shared));
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t hidden = p.sizes.hidden;

  VectorWork work;
  work.num_chunks = static_cast<int>((hidden + Tr::kChunk - 1) / Tr::kChunk);
  work.first = int64_t{warp} * gridDim.x + blockIdx.x;
  work.stride = int64_t{gridDim.x} * Tr::kWarps;
  work.count =
      work.first < p.sizes.inner ? ((p.sizes.inner - 1 - work.first) / work.stride + 1) * work.num_chunks : 0;
  if (lane == 0) {
    for (int stage = 0; stage < Tr::kStages; ++stage) {
      device::barrier_init(&shared.full[warp][stage], 1);
    }
    device::fence_barrier_init();
    for (int stage = 0; stage < Tr::kStages && stage < work.count; ++stage) {
      load_chunk<Tr>(shared, warp, stage, p, work, stage);
    }
  }
  for (int64_t i = int64_t{threadIdx.x} * Tr::kPack; i < Tr::kRows * hidden; i += Tr::kThreads * Tr::kPack) {
    const int64_t row = i / hidden;
    device::Pack<T, Tr::kPack> pack{};
    if (row < p.sizes.rows) {
      pack = device::load_pack<Tr::kPack>(p.x.data + row * p.x.pitch + i % hidden);
    }
    device::store_pack(x + i, pack);
  }
  __syncthreads();

  int stage = 0;
  uint32_t parity = 0;
  float sum[Tr::kRows][2][2] = {};
  int chunk = 0;
  int64_t column = work.first;
  for (int64_t index = 0; index < work.count; ++index) {
    device::barrier_wait(&shared.full[warp][stage], parity);
    const int64_t k = int64_t{chunk} * Tr::kChunk;
    const int64_t left = hidden - k;
    add_products<Tr>(shared.weights[warp][stage], x + k, hidden,
                     static_cast<int>(left < Tr::kChunk ? left : Tr::kChunk), sum);
    __syncwarp();
    if (lane == 0 && index + Tr::kStages < work.count) {
      load_chunk<Tr>(shared, warp, stage, p, work, index + Tr::kStages);
    }
    if (++stage == Tr::kStages) {
      stage = 0;
      parity ^= 1;
    }
    if (++chunk < work.num_chunks) {
      continue;
    }
    chunk = 0;
#pragma unroll
    for (int row = 0; row < Tr::kRows; ++row) {
      const float gate = device::warp_reduce<device::Sum>(sum[row][0][0] + sum[row][0][1]);
      const float up = device::warp_reduce<device::Sum>(sum[row][1][0] + sum[row][1][1]);
      if (lane == 0 && row < p.sizes.rows) {
        p.out[row * p.sizes.inner + column] = device::from_acc<T>(gate * activate<Tr::kActivation>(up));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[row][i / 2][i % 2] = 0.0f;
      }
    }
    column += work.stride;
  }
#else
  __trap();  // the launcher does not come here: see is_compiled_for_hopper()
#endif
}

}  // namespace htree::gated_mlp
