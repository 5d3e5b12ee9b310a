// The choice of kernel for fp8_gemm on CUDA: a pure function of the problem, printable and tested on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/fp8/gemm/gemm_config.h"

namespace htree::fp8 {

// What the choice needs to know of the problem and the device.
struct GemmFacts {
  int64_t m;
  int64_t n;
  int64_t k;
  int multiprocessors;
  bool hopper;   // sm_90 with its kernels compiled
  bool library;  // cuBLASLt takes the dtypes, sizes, layouts and scales
};

// Microseconds on an H200 as graph replays show them; what decides is their order. launch_us: per call,
// turn_us: per tile or block that a multiprocessor takes, block_us: per k-block of 128 where few
// multiprocessors are at work. With all of them it is `contention` of that more.
struct GemmCost {
  double launch_us;
  double turn_us;
  double block_us;
  double contention;
};

// parts: 2 where the blocks of a cluster share the tiles of a last turn that would leave half of them idle.
// Not for 192 rows: that kernel gave right results, but racecheck came to no end with it; the
// cause is not known.
struct GemmTile {
  int rows;
  int columns;
  int stages;
  int parts;
  GemmCost cost;
};
inline constexpr GemmTile kGemmTiles[] = {
    {64, 64, 12, 1, {2.03, 0.06, 0.179, 0.065}},  {128, 64, 8, 1, {2.21, 0.56, 0.190, 0.164}},
    {128, 64, 8, 2, {1.98, 0.58, 0.183, 0.242}},  {128, 96, 7, 1, {1.93, 1.07, 0.214, 0.273}},
    {128, 96, 6, 2, {1.55, 1.41, 0.234, 0.216}},  {128, 112, 6, 1, {2.08, 1.39, 0.224, 0.358}},
    {128, 128, 5, 1, {2.51, 1.05, 0.268, 0.318}}, {128, 128, 5, 2, {2.45, 1.05, 0.271, 0.318}},
    {192, 128, 4, 1, {2.73, 1.40, 0.366, 0.394}},
};

// Blocks of `rows` rows and 64 columns, of which clusters of `parts` share out k.
struct GemmStream {
  int rows;
  int parts;
  GemmCost cost;
};
inline constexpr GemmStream kGemmStreams[] = {
    {16, 1, {0.0, 3.20, 0.106, 0.18}},  {16, 2, {0.0, 2.00, 0.145, 0.18}},  {16, 4, {0.0, 2.10, 0.145, 0.18}},
    {32, 1, {0.0, 3.20, 0.115, 0.18}},  {32, 2, {0.0, 2.25, 0.152, 0.18}},  {32, 4, {0.0, 2.40, 0.152, 0.18}},
    {64, 1, {0.0, 3.20, 0.140, 0.18}},  {64, 2, {0.0, 2.55, 0.178, 0.18}},  {64, 4, {0.0, 2.60, 0.178, 0.18}},
    {80, 1, {0.0, 3.20, 0.160, 0.18}},  {80, 2, {0.0, 2.75, 0.190, 0.18}},  {80, 4, {0.0, 2.80, 0.190, 0.18}},
    {96, 1, {0.0, 3.20, 0.170, 0.18}},  {96, 2, {0.0, 2.95, 0.198, 0.18}},  {96, 4, {0.0, 3.00, 0.198, 0.18}},
    {128, 4, {0.0, 3.40, 0.230, 0.18}}, {144, 2, {0.0, 3.75, 0.255, 0.18}},
};
// Clusters of four do not fill the chip: its groups of multiprocessors are no multiples of four.
inline constexpr int64_t kMostBlocksInFours = 96;
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

// `turns` of blocks or tiles, `k_blocks` for each multiprocessor, of which the share `at_work` works.
inline double kernel_time(const GemmFacts& f, const GemmCost& cost, double turns, double k_blocks,
                          double at_work) {
  const double block_us = cost.block_us * (1.0 + cost.contention * std::min(1.0, at_work));
  return with_memory(f, cost.launch_us + turns * cost.turn_us + k_blocks * block_us);
}

inline int64_t count_k_blocks(const GemmFacts& f) {
  return (f.k + 127) / 128;
}

// The multiprocessors take the tiles in turns. Sharing those of the last one costs kExchange. Pairs that
// share nothing are as fast as single blocks in one turn, and slightly slower in more.
inline double tile_time(const GemmTile& t, const GemmFacts& f) {
  constexpr double kExchange = 0.9;
  const int64_t tiles = (f.m + t.rows - 1) / t.rows * ((f.n + t.columns - 1) / t.columns);
  const int64_t whole = tiles / f.multiprocessors;
  const int64_t rest = tiles % f.multiprocessors;
  const auto k_blocks = static_cast<double>(count_k_blocks(f));
  const auto turns = static_cast<double>(whole + (rest > 0 ? 1 : 0));
  const double at_work = static_cast<double>(tiles) / f.multiprocessors;
  const bool shares = t.parts == 2 && rest > 0 && 2 * rest <= f.multiprocessors && count_k_blocks(f) >= 2;
  if (shares) {
    return kExchange +
           kernel_time(f, t.cost, turns, (static_cast<double>(whole) + 0.5) * k_blocks, 2.0 * at_work);
  }
  return t.parts == 2 && turns > 1 ? std::numeric_limits<double>::infinity()
                                   : kernel_time(f, t.cost, turns, turns * k_blocks, at_work);
}

inline int64_t count_blocks(const GemmStream& s, const GemmFacts& f) {
  return (f.m + s.rows - 1) / s.rows * ((f.n + 63) / 64) * s.parts;
}

// At least two k-blocks for each part.
inline bool stream_takes(const GemmStream& s, const GemmFacts& f) {
  return (s.parts == 1 || f.k >= int64_t{256} * s.parts) &&
         (s.parts < 4 || count_blocks(s, f) <= kMostBlocksInFours);
}

inline double stream_time(const GemmStream& s, const GemmFacts& f) {
  const int64_t blocks = count_blocks(s, f);
  const auto turns = static_cast<double>((blocks + f.multiprocessors - 1) / f.multiprocessors);
  const double k_blocks = static_cast<double>(count_k_blocks(f)) / s.parts;
  return kernel_time(f, s.cost, turns, turns * k_blocks, static_cast<double>(blocks) / f.multiprocessors);
}

// With its reciprocals of the scales, which are a kernel of their own. Beyond kUnthrottled operations the
// chip lowers its clock; what our own kernels lose by that is in their figures.
inline double library_time(const GemmFacts& f) {
  constexpr double kReciprocals = 1.4;
  constexpr double kUnthrottled = 4e10;
  const double short_sums = 1.0 + 400.0 / static_cast<double>(f.k);
  const double work = operations(f);
  const double time =
      5.5 + short_sums * std::min(work, kUnthrottled) / 1.57e9 + std::max(0.0, work - kUnthrottled) / 1.05e9;
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
              .parts = t.parts};
    }
  }
  for (const GemmStream& s : kGemmStreams) {
    const double time = stream_time(s, f);
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

}  // namespace htree::fp8
