// Bulk copies of sm_90: plain copies of contiguous bytes, and tensor copies, whose box, strides and
// shared-memory swizzle stand in a descriptor made on the host (host/cuda/tensor_map.h). One thread
// calls each function. Loads report their bytes to a barrier (device/sm90/mbarrier.cuh), stores to
// the thread's bulk groups.
//
// Tensor coordinates count elements, innermost dimension first. Parts of a box outside the tensor read as
// zero, yet count as bytes, and are not written. A descriptor is a __grid_constant__ kernel argument.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/shared_memory.cuh"
#include "device/sm90/mbarrier.cuh"

namespace htree::device {

// Cache policies, as createpolicy.fractional would make them: keep in the L2 to the last, or evict first.
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;

__device__ __forceinline__ void prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// Makes this thread's writes to shared memory visible to bulk copies and wgmma that come after it in order
// (after a barrier, if another thread issues them).
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- loads

// `bytes` is a multiple of 16; both addresses are aligned to 16 bytes.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, Barrier* barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// `shared` is aligned to 128 bytes, for the 128-byte swizzle to 1024.
__device__ __forceinline__ void tensor_load_2d(void* shared, const CUtensorMap* map, int x, int y,
                                               Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void tensor_load_2d(void* shared, const CUtensorMap* map, int x, int y,
                                               Barrier* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(x), "r"(y), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The box arrives at the same place in every block of the cluster whose bit is set in `block_mask`. The
// barrier at the same place in each of them counts its bytes.
__device__ __forceinline__ void tensor_load_2d_multicast(void* shared, const CUtensorMap* map, int x, int y,
                                                         Barrier* barrier, uint16_t block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(block_mask)
      : "memory");
}

// ---- stores: before them come fence_async_shared() by the threads that wrote, and a barrier

__device__ __forceinline__ void tensor_store_2d(const CUtensorMap* map, const void* shared, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(x), "r"(y), "r"(shared_address(shared))
               : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Returns when all but at most kPending of this thread's groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Returns when all but at most kPending of this thread's groups are written.
template <int kPending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace htree::device
