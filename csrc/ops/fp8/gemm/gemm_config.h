// The choice of kernel for fp8_gemm on CUDA: a pure function of the problem, printable and tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace htree::fp8 {

// kExact: codes converted to fp16, where they and their products are exact, and the library's fp16 product.
// kLibrary: cuBLASLt (gemm_library.h). kStream: rows of a are the n side, 64 columns per block
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

// Microseconds of one product on an H200 as graph replays show them; what decides is their order. block_us:
// per k-block of 128, tile_us: per tile, launch_us: per call.
struct GemmTile {
  int rows;
  int columns;
  int stages;
  double block_us;
  double tile_us;
  double launch_us;
};
inline constexpr GemmTile kGemmTiles[] = {
    {64, 32, 15, 0.133, 0.8, 2.0},
    {64, 64, 12, 0.15, 1.1, 2.0},
    {128, 64, 8, 0.25, 0.6, 2.0},
    {128, 128, 5, 0.445, 0.6, 1.6},
};
inline constexpr int kTileGroup = 16;  // row tiles swept together

// No kernel is faster than memory.
inline double memory_time(const GemmFacts& f) {
  constexpr double kBytesPerUs = 4.2e6;
  const auto m = static_cast<double>(f.m), n = static_cast<double>(f.n), k = static_cast<double>(f.k);
  return 3.0 + (m * k + n * k + 2 * m * n) / kBytesPerUs;
}

// The multiprocessors take the tiles in turns. Tensor copies fill rows outside of a with zeros at a quarter
// of their speed.
inline double tile_time(const GemmTile& tile, const GemmFacts& f) {
  const int64_t tiles = (f.m + tile.rows - 1) / tile.rows * ((f.n + tile.columns - 1) / tile.columns);
  const auto turns = static_cast<double>((tiles + f.multiprocessors - 1) / f.multiprocessors);
  const auto blocks = static_cast<double>((f.k + 127) / 128);
  const auto outside = static_cast<double>((tile.rows - f.m % tile.rows) % tile.rows);
  const double block_us = tile.block_us + 0.0025 * outside;
  return std::max(memory_time(f), tile.launch_us + turns * (blocks * block_us + tile.tile_us));
}

// With its reciprocals of the scales, which are a kernel of their own.
inline double library_time(const GemmFacts& f) {
  constexpr double kOperationsPerUs = 1.22e9;
  const double operations =
      2.0 * static_cast<double>(f.m) * static_cast<double>(f.n) * static_cast<double>(f.k);
  constexpr double kReciprocals = 2.2;
  return kReciprocals + std::max(memory_time(f), 3.0 + operations / kOperationsPerUs);
}

// One cluster per 64 columns, all at work at once.
inline double stream_time(const GemmFacts& f, int parts) {
  return std::max(memory_time(f), 6.4 + 0.075 * static_cast<double>((f.k + 127) / 128) / parts);
}

// Up to 32 rows the weights stream once, shared out along k. Beyond, what the estimates say.
inline GemmConfig choose_gemm_config(const GemmFacts& f) {
  if (!f.hopper) {
    return {f.library ? GemmKernel::kLibrary : GemmKernel::kExact, 0, 0, 0, 0, 0, 0};
  }
  const int parts = choose_parts(f);
  if (f.m <= 32) {
    return {GemmKernel::kStream, f.m <= 16 ? 16 : 32, 64, 128, 0, 8, parts};
  }
  const GemmTile* best = kGemmTiles;
  for (const GemmTile& tile : kGemmTiles) {
    if (tile_time(tile, f) < tile_time(*best, f)) {
      best = &tile;
    }
  }
  const double time = tile_time(*best, f);
  // Four blocks would exchange more sums of 64 rows than they save.
  if (f.m <= 64 && parts > 1 && stream_time(f, 2) < time) {
    return {GemmKernel::kStream, 64, 64, 128, 0, 8, 2};
  }
  if (f.library && library_time(f) < time) {
    return {GemmKernel::kLibrary, 0, 0, 0, 0, 0, 0};
  }
  return {GemmKernel::kTile, best->rows, best->columns, 128, kTileGroup, best->stages, 1};
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
