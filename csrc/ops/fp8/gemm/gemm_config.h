// The choice of kernel for fp8_gemm on CUDA: a pure function of the problem, printable and tested on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

namespace htree::fp8 {

// kHalf: codes converted to fp16, which holds every one, and the library's fp16 product with fp32 sums.
// kLibrary: cuBLASLt (gemm_library.h). kStream: rows of a are the n side, 64 columns per block
// (gemm_stream.cuh). kTile: persistent tiles (gemm_tile.cuh).
enum class GemmKernel : int { kHalf, kLibrary, kStream, kTile };

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

// Microseconds on an H200 as graph replays show them; what decides is their order. launch_us: per call,
// turn_us: per tile or block that a multiprocessor takes, block_us: per k-block of 128 where few
// multiprocessors are at work. With all of them it is `contention` of that more.
struct GemmCost {
  double launch_us;
  double turn_us;
  double block_us;
  double contention;
};

struct GemmTile {
  int rows;
  int columns;
  int stages;
  GemmCost cost;
};
inline constexpr GemmTile kGemmTiles[] = {
    {64, 64, 12, {1.9, 0.7, 0.155, 0.20}},  {128, 64, 8, {2.1, 0.5, 0.190, 0.25}},
    {128, 96, 7, {1.7, 0.9, 0.245, 0.30}},  {128, 128, 5, {2.0, 1.2, 0.270, 0.40}},
    {192, 128, 4, {2.2, 1.4, 0.410, 0.40}},
};
inline constexpr int kTileGroup = 16;  // row tiles swept together

// Blocks of `rows` rows and 64 columns, of which clusters of `parts` share out k.
struct GemmStream {
  int rows;
  int parts;
  GemmCost cost;
};
inline constexpr GemmStream kGemmStreams[] = {
    {16, 1, {0.0, 3.2, 0.106, 0.18}},  {16, 2, {0.0, 2.3, 0.145, 0.18}},  {16, 4, {0.0, 2.4, 0.145, 0.18}},
    {32, 1, {0.0, 3.2, 0.115, 0.18}},  {32, 2, {0.0, 2.6, 0.152, 0.18}},  {32, 4, {0.0, 2.7, 0.152, 0.18}},
    {64, 1, {0.0, 3.2, 0.140, 0.18}},  {64, 2, {0.0, 2.8, 0.178, 0.18}},  {64, 4, {0.0, 2.9, 0.178, 0.18}},
    {80, 1, {0.0, 3.2, 0.160, 0.18}},  {80, 2, {0.0, 3.0, 0.190, 0.18}},  {80, 4, {0.0, 3.1, 0.190, 0.18}},
    {96, 1, {0.0, 3.2, 0.170, 0.18}},  {96, 2, {0.0, 3.1, 0.198, 0.18}},  {96, 4, {0.0, 3.3, 0.198, 0.18}},
    {128, 2, {0.0, 4.2, 0.230, 0.18}}, {128, 4, {0.0, 3.7, 0.230, 0.18}},
};
inline constexpr int kMostParts = 4;
constexpr int least_parts(int rows) {
  return rows == 128 ? 2 : 1;
}
// Clusters of four do not fill the chip: its groups of multiprocessors are no multiples of four.
inline constexpr int64_t kMostBlocksInFours = 96;
constexpr int stream_stages(int rows, int parts) {
  return parts == 1 ? (rows <= 64 ? 12 : 10) : rows <= 96 ? 8 : 7;
}

inline double operations(const GemmFacts& f) {
  return 2.0 * static_cast<double>(f.m) * static_cast<double>(f.n) * static_cast<double>(f.k);
}

// No kernel is faster than memory, and near its speed each waits for both.
inline double with_memory(const GemmFacts& f, double time) {
  constexpr double kBytesPerUs = 4.2e6;
  const auto m = static_cast<double>(f.m), n = static_cast<double>(f.n), k = static_cast<double>(f.k);
  const double memory = 2.0 + (m * k + n * k + 2 * m * n) / kBytesPerUs;
  return std::pow(std::pow(time, 6) + std::pow(memory, 6), 1.0 / 6);
}

// The multiprocessors take the blocks in turns.
inline double own_time(const GemmFacts& f, const GemmCost& cost, int64_t blocks, int parts) {
  const auto turns = static_cast<double>((blocks + f.multiprocessors - 1) / f.multiprocessors);
  const double at_work = std::min(1.0, static_cast<double>(blocks) / f.multiprocessors);
  const double k_blocks = static_cast<double>((f.k + 127) / 128) / parts;
  const double block_us = cost.block_us * (1.0 + cost.contention * at_work);
  return with_memory(f, cost.launch_us + turns * (cost.turn_us + k_blocks * block_us));
}

inline double tile_time(const GemmTile& t, const GemmFacts& f) {
  return own_time(f, t.cost, (f.m + t.rows - 1) / t.rows * ((f.n + t.columns - 1) / t.columns), 1);
}

inline int64_t count_blocks(const GemmStream& s, const GemmFacts& f) {
  return (f.m + s.rows - 1) / s.rows * ((f.n + 63) / 64) * s.parts;
}

// At least two k-blocks for each part.
inline bool stream_takes(const GemmStream& s, const GemmFacts& f) {
  return (s.parts == 1 || f.k >= int64_t{256} * s.parts) &&
         (s.parts < 4 || count_blocks(s, f) <= kMostBlocksInFours);
}

// With its reciprocals of the scales, which are a kernel of their own. Beyond kUnthrottled operations the
// chip lowers its clock; what our own kernels lose by that is in their figures.
inline double library_time(const GemmFacts& f) {
  constexpr double kReciprocals = 1.4;
  constexpr double kUnthrottled = 4e10;
  const double short_sums = 1.0 + 400.0 / static_cast<double>(f.k);
  const double work = operations(f);
  const double time =
      5.7 + short_sums * std::min(work, kUnthrottled) / 1.52e9 + std::max(0.0, work - kUnthrottled) / 1.0e9;
  return kReciprocals + with_memory(f, time);
}

// What the estimates say.
inline GemmConfig choose_gemm_config(const GemmFacts& f) {
  GemmConfig best{.kernel = f.library ? GemmKernel::kLibrary : GemmKernel::kHalf};
  if (!f.hopper) {
    return best;
  }
  double least = f.library ? library_time(f) : std::numeric_limits<double>::infinity();
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
  for (const GemmStream& s : kGemmStreams) {
    const double time = own_time(f, s.cost, count_blocks(s, f), s.parts);
    if (time < least && stream_takes(s, f)) {
      least = time;
      best = {.kernel = GemmKernel::kStream,
              .rows = s.rows,
              .columns = 64,
              .promote = 128,
              .group = 0,
              .stages = stream_stages(s.rows, s.parts),
              .cluster = 1,
              .parts = s.parts};
    }
  }
  return best;
}

inline std::string describe(const GemmConfig& c) {
  switch (c.kernel) {
    case GemmKernel::kHalf:
      return "half: fp16 product of the library";
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
