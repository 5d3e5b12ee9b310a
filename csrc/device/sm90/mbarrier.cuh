// Barriers in shared memory that count arrivals of threads and bytes of bulk copies (sm_90), and what a
// cluster of blocks needs to share them. Nothing here synchronises a warp: "one thread" means exactly that.
//
// A barrier completes one phase after another. Its first phase has parity 0, and a waiter names the parity of
// the phase it waits for. A thread for which a new barrier counts as free waits for parity 1 first, which
// returns at once.
#pragma once

#include <cstdint>

#include "device/shared_memory.cuh"

namespace htree::device {

using Barrier = uint64_t;  // in shared memory, 8-byte aligned

// One thread calls it. Before any use come fence_barrier_init() and a __syncthreads
// (cluster_sync in a cluster).
__device__ __forceinline__ void barrier_init(Barrier* barrier, uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals)
               : "memory");
}

// Makes the barriers that this thread initialised visible to bulk copies and to the other
// blocks of a cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival, with release order: a thread that waits sees what this thread wrote before.
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival that adds `bytes` to what the phase must receive from bulk copies before it completes.
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// One arrival at the barrier at the same place in block `block_rank` of the cluster. It orders what this
// block read, not what it wrote. An arrival with release order for the whole cluster waits until all writes
// of the thread are performed (a MEMBAR.GPU, about a microsecond), so leave that to cluster_sync().
__device__ __forceinline__ void barrier_arrive_remote(Barrier* barrier, uint32_t block_rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(block_rank)
      : "memory");
}

// Whether the phase of `parity` has completed. It may suspend the thread for a while first.
__device__ __forceinline__ bool barrier_try_wait(Barrier* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns when the phase of `parity` has completed.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

// ---- clusters

__device__ __forceinline__ uint32_t cluster_block_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster call it, converged per warp. What they wrote before is visible
// after the wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// ---- rings of stages in shared memory, each with barriers

// A stage of a ring and the parity of its phase. The threads that fill and the threads that read each carry
// their own place from tile to tile.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace htree::device
