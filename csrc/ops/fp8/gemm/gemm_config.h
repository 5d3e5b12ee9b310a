// The choice of kernel for fp8_gemm on CUDA: a pure function of the problem, printable and tested on the CPU.
#pragma once

#include <cstdint>
#include <string>

namespace htree::fp8 {

// kExact: codes converted to fp16, where they and their products are exact, and the library's fp16 product.
// kLibrary: cuBLASLt through torch's scaled product. kStream: rows of a are the n side, 64 columns per block
// (gemm_stream.cuh). kTile: persistent tiles (gemm_tile.cuh).
enum class GemmKernel : int { kExact, kLibrary, kStream, kTile };

struct GemmConfig {
  GemmKernel kernel;
  int rows;     // of c per block
  int columns;  // of c per block
  int promote;  // elements of k that are summed before fp32 registers take over
  int group;    // row tiles swept together, 0 for kStream
  int stages;   // k-blocks of 128 in flight
  int cluster;  // blocks that share the rows of a they load; for kStream, that share out k
};

// What the choice needs to know of the problem and the device.
struct GemmFacts {
  int64_t m;
  int64_t n;
  int64_t k;
  int multiprocessors;
  bool hopper;   // sm_90 with its kernels compiled
  bool library;  // cuBLASLt takes the dtypes, sizes, layouts and scales
};

// Tuple of the FP8_GEMM space in its key order. BLOCK_K is the number of elements that are summed before fp32
// registers take over; a stage always holds 128.
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
  return {GemmKernel::kTile,           static_cast<int>(f.block_m),      static_cast<int>(f.block_n),
          static_cast<int>(f.block_k), static_cast<int>(f.group_size_m), static_cast<int>(f.num_stages),
          f.block_m == 256 ? 2 : 1};
}

// Blocks that share out k: as many as bring every multiprocessor to work, with two k-blocks each at least.
inline int choose_parts(const GemmFacts& f) {
  const int64_t blocks = (f.n + 63) / 64;
  for (int parts : {4, 2}) {
    if (blocks * parts <= f.multiprocessors && f.k >= int64_t{256} * parts) {
      return parts;
    }
  }
  return 1;
}

// Up to 64 rows the weights stream once. Beyond, the library's kernel is the faster one wherever it runs.
inline GemmConfig choose_gemm_config(const GemmFacts& f) {
  if (f.hopper && f.m <= 64) {
    const int rows = f.m <= 16 ? 16 : f.m <= 32 ? 32 : 64;
    return {GemmKernel::kStream, rows, 64, 128, 0, 8, choose_parts(f)};
  }
  if (f.library) {
    return {GemmKernel::kLibrary, 0, 0, 0, 0, 0, 0};
  }
  if (!f.hopper) {
    return {GemmKernel::kExact, 0, 0, 0, 0, 0, 0};
  }
  return f.m > 1024 ? GemmConfig{GemmKernel::kTile, 256, 128, 128, 16, 4, 2}
                    : GemmConfig{GemmKernel::kTile, 128, 128, 128, 16, 5, 1};
}

inline std::string describe(const GemmConfig& c) {
  switch (c.kernel) {
    case GemmKernel::kExact:
      return "exact: fp16 product of the library";
    case GemmKernel::kLibrary:
      return "library: cuBLASLt";
    case GemmKernel::kStream:
    case GemmKernel::kTile:
      break;
  }
  return std::string(c.kernel == GemmKernel::kStream ? "stream" : "tile") + ": " + std::to_string(c.rows) +
         " rows x " + std::to_string(c.columns) + " columns, fp32 sums every " + std::to_string(c.promote) +
         ", groups of " + std::to_string(c.group) + ", " + std::to_string(c.stages) +
         " stages, clusters of " + std::to_string(c.cluster);
}

}  // namespace htree::fp8
