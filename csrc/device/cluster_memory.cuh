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

}  // namespace htree::device
