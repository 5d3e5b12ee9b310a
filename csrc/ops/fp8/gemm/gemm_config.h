// The choice of kernel for fp8_gemm on CUDA: a pure function of the problem, printable and tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
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
  int cluster;  // blocks that share the rows of a they load, 1 for kStream
  int parts;    // blocks that share out k, 1 for kTile
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
  return {.kernel = GemmKernel::kTile,
          .rows = static_cast<int>(f.block_m),
          .columns = static_cast<int>(f.block_n),
          .promote = static_cast<int>(f.block_k),
          .group = static_cast<int>(f.group_size_m),
          .stages = static_cast<int>(f.num_stages),
          .cluster = f.block_m == 256 ? 2 : 1,
          .parts = 1};
}

// Microseconds of one product on an H200 as graph replays show them; what decides is their order. block_us:
// per k-block of 128, tile_us: per tile or block, launch_us: per call.
struct GemmTile {
  int rows;
  int columns;
  int stages;
  double block_us;
  double tile_us;
  double launch_us;
};
inline constexpr GemmTile kGemmTiles[] = {
    {64, 64, 12, 0.150, 1.1, 2.0},  {128, 64, 8, 0.217, 0.9, 2.2},  {128, 96, 6, 0.270, 1.0, 2.4},
    {128, 128, 5, 0.350, 1.0, 2.4}, {192, 128, 4, 0.520, 1.4, 2.6},
};
inline constexpr int kTileGroup = 16;  // row tiles swept together

// Blocks of 64 columns, of which `parts` share out k.
struct GemmStream {
  int rows;
  int parts;
  double block_us;
  double tile_us;
  double launch_us;
};
inline constexpr GemmStream kGemmStreams[] = {
    {16, 1, 0.10, 1.0, 2.5},  {16, 2, 0.10, 1.8, 2.5},  {32, 1, 0.107, 1.0, 2.5}, {32, 2, 0.107, 2.0, 2.5},
    {64, 1, 0.125, 1.0, 2.5}, {64, 2, 0.125, 2.2, 2.5}, {80, 1, 0.150, 1.0, 2.5}, {80, 2, 0.150, 2.4, 2.5},
    {96, 1, 0.170, 1.0, 2.5}, {96, 2, 0.170, 2.5, 2.5}, {128, 1, 0.200, 1.0, 2.5}, {128, 2, 0.200, 2.8, 2.5},
};
constexpr int most_parts(int /*rows*/) {
  return 2;
}
constexpr int stream_stages(int rows, int parts) {
  return parts == 1 ? (rows <= 64 ? 12 : rows <= 96 ? 10 : 8) : rows <= 96 ? 8 : 7;
}

// No kernel is faster than memory.
inline double memory_time(const GemmFacts& f) {
  constexpr double kBytesPerUs = 4.2e6;
  const auto m = static_cast<double>(f.m), n = static_cast<double>(f.n), k = static_cast<double>(f.k);
  return 2.0 + (m * k + n * k + 2 * m * n) / kBytesPerUs;
}

inline double turns_time(const GemmFacts& f, int64_t blocks, double k_blocks, double block_us, double tile_us,
                         double launch_us) {
  const auto turns = static_cast<double>((blocks + f.multiprocessors - 1) / f.multiprocessors);
  return std::max(memory_time(f), launch_us + turns * (k_blocks * block_us + tile_us));
}

// The multiprocessors take the tiles in turns.
inline double tile_time(const GemmTile& t, const GemmFacts& f) {
  const int64_t tiles = (f.m + t.rows - 1) / t.rows * ((f.n + t.columns - 1) / t.columns);
  return turns_time(f, tiles, static_cast<double>((f.k + 127) / 128), t.block_us, t.tile_us, t.launch_us);
}

inline double stream_time(const GemmStream& t, const GemmFacts& f) {
  const int64_t blocks = (f.m + t.rows - 1) / t.rows * ((f.n + 63) / 64) * t.parts;
  return turns_time(f, blocks, static_cast<double>((f.k + 127) / 128) / t.parts, t.block_us, t.tile_us,
                    t.launch_us);
}

// With its reciprocals of the scales, which are a kernel of their own.
inline double library_time(const GemmFacts& f) {
  constexpr double kOperationsPerUs = 1.22e9;
  const double operations =
      2.0 * static_cast<double>(f.m) * static_cast<double>(f.n) * static_cast<double>(f.k);
  constexpr double kReciprocals = 1.5;
  return kReciprocals + std::max(memory_time(f), 4.0 + operations / kOperationsPerUs);
}

// What the estimates say.
inline GemmConfig choose_gemm_config(const GemmFacts& f) {
  const GemmConfig without_tiles{.kernel = f.library ? GemmKernel::kLibrary : GemmKernel::kExact};
  if (!f.hopper) {
    return without_tiles;
  }
  GemmConfig best{};
  double least = std::numeric_limits<double>::infinity();
  for (const GemmTile& t : kGemmTiles) {
    const double time = tile_time(t, f);
    if (time < least) {
      least = time;
      best = {.kernel = GemmKernel::kTile,
              .rows = t.rows,
              .columns = t.columns,
              .promote = 128,
              .group = kTileGroup,
              .stages = t.stages,
              .cluster = 1,
              .parts = 1};
    }
  }
  for (const GemmStream& t : kGemmStreams) {
    const double time = stream_time(t, f);
    if (time < least && (t.parts == 1 || f.k >= int64_t{256} * t.parts)) {
      least = time;
      best = {.kernel = GemmKernel::kStream,
              .rows = t.rows,
              .columns = 64,
              .promote = 128,
              .group = 0,
              .stages = stream_stages(t.rows, t.parts),
              .cluster = 1,
              .parts = t.parts};
    }
  }
  return f.library && library_time(f) < least ? without_tiles : best;
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
         " stages, clusters of " + std::to_string(c.cluster) + ", k in " + std::to_string(c.parts) + " parts";
}

}  // namespace htree::fp8
