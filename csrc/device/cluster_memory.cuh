// Shared memory of the other blocks of a cluster (sm_90).
#pragma once

#include <cstdint>

#include "device/shared_address.cuh"

namespace htree::device {

// Writes to the place of `shared` in block `block_rank` of the cluster, which must have started: a
// cluster_sync() comes first. Visible there after cluster_arrive() here and cluster_wait() there.
__device__ __forceinline__ void store_to_block(float* shared, uint32_t block_rank, float value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.f32 [remote], %2;\n"
      "}" ::"r"(shared_address(shared)),
      "r"(block_rank), "f"(value)
      : "memory");
}
__device__ __forceinline__ void store_to_block(float4* shared, uint32_t block_rank, const float4& value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n"
      "}" ::"r"(shared_address(shared)),
      "r"(block_rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

}  // namespace htree::device
