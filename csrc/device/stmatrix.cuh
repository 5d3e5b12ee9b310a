// Fragments of 8 x 8 matrices to shared memory (sm_90), the mirror of load_matrices in device/mma.cuh.
#pragma once

#include <cstdint>

namespace htree::device {

// Four 8 x 8 matrices of 2-byte elements, held as products leave them: lane i has elements (row i / 4,
// columns 2 * (i % 4) and the next) of each. Lane i gives the 16-byte row address i % 8 of matrix i / 8. All
// 32 lanes.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The matrices transposed: the address of lane i is of column i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace htree::device
