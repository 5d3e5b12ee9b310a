// Distributed shared memory (DSMEM): access to the shared memory of other blocks of a cluster (sm_90).
#pragma once

#include <cstdint>

#include "device/shared_memory.cuh"
#include "device/sm90/mbarrier.cuh"

namespace htree::device {

// As cluster_arrive(), but it orders no memory access, so it waits for none. That is enough where
// fence_barrier_init() has made the barriers visible.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Writes `value` to the place of `shared` in block `block_rank` of the cluster, and counts its bytes at the
// barrier at the place of `barrier` there; a thread that waited for that barrier sees the value. The other
// block must have initialised the barrier before: call cluster_arrive_relaxed() there and cluster_wait() here
// first. This needs no fence for the whole device, with which cluster_arrive() begins.
__device__ __forceinline__ void send_to_block(float* shared, Barrier* barrier, uint32_t block_rank,
                                              float value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %3, [remote_barrier];\n"
      "}" ::"r"(shared_address(shared)),
      "r"(shared_address(barrier)), "r"(block_rank), "f"(value)
      : "memory");
}
__device__ __forceinline__ void send_to_block(float4* shared, Barrier* barrier, uint32_t block_rank,
                                              const float4& value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%3, %4, %5, %6}, "
      "[remote_barrier];\n"
      "}" ::"r"(shared_address(shared)),
      "r"(shared_address(barrier)), "r"(block_rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

// Writes `value` to the place of `shared` in block `block_rank` of the cluster, which must have begun. It is seen there
// behind a cluster_sync().
__device__ __forceinline__ void store_to_block(uint32_t* shared, uint32_t block_rank, uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.u32 [remote], %2;\n"
      "}" ::"r"(shared_address(shared)),
      "r"(block_rank), "r"(value)
      : "memory");
}

// Reads, in block `block_rank` of the cluster, what stands at the place of `shared`. What was written there
// before a cluster_sync() is seen.
__device__ __forceinline__ float load_from_block(const float* shared, uint32_t block_rank) {
  float value;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n"
      "}"
      : "=f"(value)
      : "r"(shared_address(shared)), "r"(block_rank)
      : "memory");
  return value;
}
__device__ __forceinline__ float4 load_from_block(const float4* shared, uint32_t block_rank) {
  float4 value;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(shared_address(shared)), "r"(block_rank)
      : "memory");
  return value;
}

}  // namespace htree::device
