// The kernels of fp8_gemm on CUDA and how they are named; gemm_choice.h chooses among them.
#pragma once

#include <cstdint>
#include <string>

namespace htree::fp8 {

// kHalf: codes are converted to fp16, which holds all of them, and cuBLAS multiplies fp16 with fp32 sums.
// kCublas: cuBLASLt (gemm_cublas.h). kStream: swap AB, the rows of a are the N of the products, a block has 64
// columns (cuda/sm90/gemm_stream.cuh). kTile: persistent tiles (cuda/sm90/gemm_tile.cuh).
enum class GemmKernel : int { kHalf, kCublas, kStream, kTile };

struct GemmConfig {
  GemmKernel kernel;
  int rows;       // rows of c per block
  int columns;    // columns of c per block
  int promote;    // elements of k that are summed before fp32 registers take over
  int group;      // row tiles that are swept together; 0 for kStream
  int stages;     // k-blocks of 128 in the ring
  int cluster;    // blocks that share the rows of a (b with swap AB) that they load; 1 for kStream
  int parts;      // split K over the blocks of a cluster: always for kStream, in their last tile for kTile
  bool swaps_ab;  // kTile: columns of c are the M = 64 of the products
};

// Tuple of the tuning space FP8_GEMM in the order of its keys. BLOCK_K is the number of elements that are
// summed before fp32 registers take over; a stage always holds 128.
struct ForcedGemmConfig {
  int64_t block_m;
  int64_t block_n;
  int64_t block_k;
  int64_t group_size_m;
  int64_t num_warps;
  int64_t num_stages;
};

inline constexpr char kCompiledGemmSpace[] =
    "(BLOCK_M, BLOCK_N, num_stages) = (128, 128, 5) or (256, 128, 4) with BLOCK_K 64, GROUP_SIZE_M 4 or 8, "
    "num_warps 8";

constexpr bool in_compiled_space(const ForcedGemmConfig& f) {
  const bool shape = f.block_n == 128 &&
                     ((f.block_m == 128 && f.num_stages == 5) || (f.block_m == 256 && f.num_stages == 4));
  return shape && f.block_k == 64 && (f.group_size_m == 4 || f.group_size_m == 8) && f.num_warps == 8;
}

constexpr GemmConfig config_of(const ForcedGemmConfig& f) {
  return {.kernel = GemmKernel::kTile,
          .rows = static_cast<int>(f.block_m),
          .columns = static_cast<int>(f.block_n),
          .promote = static_cast<int>(f.block_k),
          .group = static_cast<int>(f.group_size_m),
          .stages = static_cast<int>(f.num_stages),
          .cluster = f.block_m == 256 ? 2 : 1,
          .parts = 1,
          .swaps_ab = false};
}

// Row tiles that the tile kernels sweep together, or column tiles with swap AB.
inline constexpr int kTileGroup = 16;

inline std::string describe(const GemmConfig& c) {
  switch (c.kernel) {
    case GemmKernel::kHalf:
      return "half: fp16 product of cuBLAS";
    case GemmKernel::kCublas:
      return "cublas: cuBLASLt";
    case GemmKernel::kStream:
    case GemmKernel::kTile:
      break;
  }
  return std::string(c.kernel == GemmKernel::kStream ? "stream" : "tile") + ": " + std::to_string(c.rows) +
         " rows x " + std::to_string(c.columns) + " columns, fp32 sums every " + std::to_string(c.promote) +
         ", groups of " + std::to_string(c.group) + ", " + std::to_string(c.stages) +
         " stages, clusters of " + std::to_string(c.cluster) + ", k in " + std::to_string(c.parts) +
         " parts" + (c.swaps_ab ? ", swap AB" : "");
}

}  // namespace htree::fp8
