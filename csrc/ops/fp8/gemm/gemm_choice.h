// The choice of kernel for fp8_gemm on CUDA: a pure function of the problem, printable and tested on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "device/sizes.h"
#include "ops/fp8/gemm/gemm_config.h"

namespace htree::fp8 {

// What the choice needs to know of the problem and the device.
struct GemmFacts {
  int64_t m;
  int64_t n;
  int64_t k;
  int multiprocessors;
  bool hopper;  // sm_90 with its kernels compiled
  bool cublas;  // cuBLASLt takes the dtypes, sizes, layouts and scales
};

// Microseconds on an H200, taken from graph replays; only their order decides. wave_us: per tile or block
// that a multiprocessor takes. block_us: per k-block of 128 while few multiprocessors work; with all of them
// at work it is larger by the share `contention`.
struct GemmCost {
  double wave_us;
  double block_us;
  double contention;
};

// kSwapAb: columns of c are the M = 64 of the products. kMulticast: the same in clusters of two,
// which take neighbouring rows of c and copy the columns of b once for both. kSplitK: a last wave that would leave half
// of the blocks idle is a stream-K tail, whose tiles are split along K over clusters, which costs reduction_us.
enum class TileKind : int { kPlain, kSwapAb, kMulticast, kSplitK };

// How many waves the tiles make over the multiprocessors decides between them, so there are many.
struct GemmTile {
  TileKind kind;
  int rows;     // rows of c
  int columns;  // columns of c
  int stages;
  double launch_us;  // per call
  GemmCost cost;
  double reduction_us;
};
inline constexpr GemmTile kGemmTiles[] = {
    {TileKind::kPlain, 64, 48, 14, 2.14, {0.24, 0.132, 0.104}, 0.0},
    {TileKind::kPlain, 64, 64, 12, 1.54, {0.36, 0.164, 0.108}, 0.0},
    {TileKind::kPlain, 64, 80, 11, 1.46, {0.42, 0.179, 0.126}, 0.0},
    {TileKind::kPlain, 128, 64, 8, 1.27, {0.65, 0.198, 0.208}, 0.0},
    {TileKind::kPlain, 128, 80, 7, 1.02, {1.31, 0.207, 0.272}, 0.0},
    {TileKind::kPlain, 128, 96, 7, 1.11, {1.29, 0.234, 0.234}, 0.0},
    {TileKind::kPlain, 128, 112, 6, 1.18, {1.62, 0.254, 0.282}, 0.0},
    {TileKind::kPlain, 128, 128, 5, 1.68, {1.24, 0.294, 0.275}, 0.0},
    {TileKind::kPlain, 128, 128, 6, 1.19, {1.57, 0.291, 0.281}, 0.0},
    {TileKind::kPlain, 128, 144, 5, 1.34, {1.86, 0.346, 0.205}, 0.0},
    {TileKind::kPlain, 128, 160, 5, 1.23, {2.00, 0.399, 0.312}, 0.0},
    {TileKind::kPlain, 192, 96, 5, 1.03, {1.58, 0.327, 0.317}, 0.0},
    {TileKind::kPlain, 192, 128, 4, 1.59, {1.68, 0.421, 0.324}, 0.0},
    {TileKind::kSwapAb, 104, 128, 6, 1.80, {0.98, 0.244, 0.291}, 0.0},
    {TileKind::kSwapAb, 120, 128, 5, 1.71, {1.05, 0.287, 0.244}, 0.0},
    {TileKind::kSwapAb, 144, 128, 5, 1.76, {1.24, 0.327, 0.296}, 0.0},
    {TileKind::kSwapAb, 152, 128, 5, 1.83, {1.43, 0.348, 0.285}, 0.0},
    {TileKind::kSwapAb, 160, 128, 5, 1.80, {1.96, 0.406, 0.130}, 0.0},
    {TileKind::kSwapAb, 200, 128, 4, 1.90, {2.70, 0.478, 0.190}, 0.0},
    {TileKind::kSwapAb, 104, 192, 4, 2.00, {1.24, 0.373, 0.283}, 0.0},
    {TileKind::kSwapAb, 120, 192, 4, 1.98, {1.47, 0.427, 0.242}, 0.0},
    {TileKind::kSwapAb, 128, 192, 4, 1.86, {1.65, 0.454, 0.225}, 0.0},
    {TileKind::kMulticast, 72, 128, 8, 1.94, {0.78, 0.200, 0.212}, 0.0},
    {TileKind::kMulticast, 80, 128, 7, 1.95, {0.72, 0.212, 0.258}, 0.0},
    {TileKind::kMulticast, 96, 128, 7, 2.19, {0.84, 0.230, 0.243}, 0.0},
    {TileKind::kMulticast, 104, 128, 6, 2.18, {0.87, 0.248, 0.273}, 0.0},
    {TileKind::kMulticast, 112, 128, 6, 2.13, {0.90, 0.261, 0.282}, 0.0},
    {TileKind::kSplitK, 128, 64, 8, 1.32, {0.65, 0.198, 0.208}, 0.8},
    {TileKind::kSplitK, 128, 96, 6, 1.32, {1.29, 0.234, 0.234}, 1.0},
    {TileKind::kSplitK, 128, 128, 5, 1.65, {1.24, 0.294, 0.275}, 1.1},
    {TileKind::kSplitK, 192, 96, 5, 1.41, {1.58, 0.327, 0.317}, 0.4},
    {TileKind::kSplitK, 192, 128, 4, 1.70, {1.68, 0.421, 0.324}, 0.7},
};

constexpr bool swaps_ab(const GemmTile& t) {
  return t.kind == TileKind::kSwapAb || t.kind == TileKind::kMulticast;
}
constexpr int blocks_per_copy(const GemmTile& t) {
  return t.kind == TileKind::kMulticast ? 2 : 1;
}

// Blocks of `rows` rows and 64 columns; clusters of `parts` blocks split K. `resident` blocks fit a
// multiprocessor: two where the rings are shorter, for problems with a few more blocks than multiprocessors.
struct GemmStream {
  int rows;
  int parts;
  int stages;
  int resident;
  GemmCost cost;
};
inline constexpr GemmStream kGemmStreams[] = {
    {16, 1, 12, 1, {3.20, 0.106, 0.18}}, {16, 2, 8, 1, {2.00, 0.145, 0.18}},
    {16, 4, 8, 1, {2.10, 0.145, 0.18}},  {32, 1, 12, 1, {3.20, 0.115, 0.18}},
    {32, 2, 8, 1, {2.25, 0.152, 0.18}},  {32, 4, 8, 1, {2.40, 0.152, 0.18}},
    {64, 1, 12, 1, {3.20, 0.140, 0.18}}, {64, 2, 8, 1, {2.55, 0.178, 0.18}},
    {64, 4, 8, 1, {2.60, 0.178, 0.18}},  {80, 1, 10, 1, {3.20, 0.160, 0.30}},
    {80, 2, 8, 1, {2.75, 0.190, 0.18}},  {80, 4, 8, 1, {2.80, 0.190, 0.18}},
    {96, 1, 10, 1, {3.20, 0.170, 0.30}}, {96, 2, 8, 1, {2.95, 0.198, 0.18}},
    {96, 4, 8, 1, {3.00, 0.198, 0.18}},  {128, 4, 7, 1, {3.40, 0.230, 0.18}},
    {144, 2, 7, 1, {3.75, 0.255, 0.18}}, {160, 2, 7, 1, {3.90, 0.280, 0.18}},
    {16, 1, 6, 2, {3.20, 0.200, 0.0}},   {32, 1, 5, 2, {3.20, 0.260, 0.0}},
    {80, 1, 5, 2, {3.20, 0.350, 0.0}},   {96, 1, 5, 2, {3.20, 0.375, 0.0}},
};

// Clusters of four do not fill the chip, because its groups of multiprocessors are not multiples of four.
inline constexpr int64_t kMostBlocksInFours = 96;
inline double operations(const GemmFacts& f) {
  return 2.0 * static_cast<double>(f.m) * static_cast<double>(f.n) * static_cast<double>(f.k);
}

// No kernel is faster than memory. Near the speed of memory a kernel waits for memory and for its products, a
// tile kernel more so than a stream kernel: the time is the root of the sum of fourth or sixth powers. This
// runs at every launch, so it does without std::pow.
inline double join_fourth(double time, double memory_time) {
  const double a = time * time, b = memory_time * memory_time;
  return std::sqrt(std::sqrt(a * a + b * b));
}
inline double join_sixth(double time, double memory_time) {
  const double a = time * time, b = memory_time * memory_time;
  return std::cbrt(std::sqrt(a * a * a + b * b * b));
}
// The time until the first bytes have come.
inline constexpr double kFirstBytesUs = 2.0;
inline double bytes_time(const GemmFacts& f, double bytes_per_us) {
  const auto m = static_cast<double>(f.m), n = static_cast<double>(f.n), k = static_cast<double>(f.k);
  return (m * k + n * k + 2 * m * n) / bytes_per_us;
}
// The same for tiles and for cuBLASLt.
inline double with_memory(const GemmFacts& f, double time) {
  constexpr double kBytesPerUs = 4.0e6;
  return join_fourth(time, kFirstBytesUs + bytes_time(f, kBytesPerUs));
}

inline int64_t count_k_blocks(const GemmFacts& f) {
  return ceil_div(f.k, 128);
}

// The time of one wave, in which the share `at_work` of the multiprocessors takes `k_blocks` k-blocks.
inline double wave_time(const GemmCost& cost, double k_blocks, double at_work) {
  return cost.wave_us + k_blocks * cost.block_us * (1.0 + cost.contention * std::min(1.0, at_work));
}

// The multiprocessors take the tiles in waves. Pairs that split no tile are as fast as single blocks in one
// wave, and slightly slower in more. Swap-AB tiles that lack a third of their rows are slower than this
// says and are left out. Beyond kUnthrottled operations the chip lowers its clock.
inline double tile_time(const GemmTile& t, const GemmFacts& f) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  constexpr double kUnthrottled = 6e10;
  constexpr double kThrottling = 0.13;
  if (swaps_ab(t) && 3 * f.m < 2 * t.rows) {
    return kNever;
  }
  const int64_t cluster = blocks_per_copy(t);
  const int64_t tiles = ceil_div(f.m, t.rows * cluster) * cluster * ceil_div(f.n, t.columns);
  const int64_t whole = tiles / f.multiprocessors;
  const int64_t rest = tiles % f.multiprocessors;
  const auto k_blocks = static_cast<double>(count_k_blocks(f));
  const double at_work = static_cast<double>(rest) / f.multiprocessors;
  const bool splits =
      t.kind == TileKind::kSplitK && rest > 0 && 2 * rest <= f.multiprocessors && count_k_blocks(f) >= 2;
  double time = t.launch_us + static_cast<double>(whole) * wave_time(t.cost, k_blocks, 1.0);
  if (splits) {
    time += t.reduction_us + wave_time(t.cost, 0.5 * k_blocks, 2.0 * at_work);
  } else if (t.kind == TileKind::kSplitK && whole > (rest > 0 ? 0 : 1)) {
    return kNever;
  } else if (rest > 0) {
    time += wave_time(t.cost, k_blocks, at_work);
  }
  const double work = operations(f);
  const double throttling = work > kUnthrottled ? 1.0 + kThrottling * (1.0 - kUnthrottled / work) : 1.0;
  return throttling * with_memory(f, time);
}

inline int64_t count_blocks(const GemmStream& s, const GemmFacts& f) {
  return ceil_div(f.m, s.rows) * ceil_div(f.n, 64) * s.parts;
}

// Each part needs at least two k-blocks. Where two blocks share a multiprocessor, there must be a single wave
// and not too many rows of zeros: up to 64 rows tiles are faster than blocks of 80.
inline bool stream_takes(const GemmStream& s, const GemmFacts& f) {
  const int64_t blocks = count_blocks(s, f);
  const bool has_k = s.parts == 1 || f.k >= int64_t{256} * s.parts;
  const bool in_fours = s.parts < 4 || blocks <= kMostBlocksInFours;
  const bool in_twos = s.resident == 1 || (blocks > f.multiprocessors && blocks <= 2 * f.multiprocessors &&
                                           (s.rows <= 32 || f.m > 64));
  return has_k && in_fours && in_twos;
}

// The blocks come in waves, and each wave waits for its share of the bytes: a short last wave
// leaves the memory idle.
inline double stream_time(const GemmStream& s, const GemmFacts& f) {
  constexpr double kBytesPerUs = 4.2e6;
  const int64_t blocks = count_blocks(s, f);
  const int64_t at_once = int64_t{f.multiprocessors} * s.resident;
  const int64_t whole = blocks / at_once;
  const int64_t rest = blocks % at_once;
  const double k_blocks = static_cast<double>(count_k_blocks(f)) / s.parts;
  const double bytes = bytes_time(f, kBytesPerUs) / static_cast<double>(blocks);  // bytes of a block
  const auto wave = [&](int64_t count, double first_bytes) {
    return join_sixth(wave_time(s.cost, k_blocks, static_cast<double>(count) / f.multiprocessors),
                      first_bytes + bytes * static_cast<double>(count));
  };
  if (whole == 0) {
    return wave(rest, kFirstBytesUs);
  }
  return wave(at_once, kFirstBytesUs) + static_cast<double>(whole - 1) * wave(at_once, 0.0) +
         (rest > 0 ? wave(rest, 0.0) : 0.0);
}

// The time of cuBLASLt, with the kernel that makes the reciprocals of the scales. cuBLASLt has kernels of
// many shapes, so this errs by a tenth both ways; ours still win where they have enough tiles for the device.
// For a c of very few tiles cuBLASLt runs a second kernel, or has few blocks. Beyond kUnthrottled operations
// the chip lowers its clock.
inline double cublas_time(const GemmFacts& f) {
  constexpr double kReciprocals = 1.4;
  constexpr double kMargin = 1.15;
  constexpr double kUnthrottled = 4e10;
  const double work = operations(f);
  if (8 * ceil_div(f.m, 128) * ceil_div(f.n, 128) <= f.multiprocessors) {
    return kReciprocals + with_memory(f, 6.4 + work / 0.69e9);
  }
  const double short_sums = 1.0 + 400.0 / static_cast<double>(f.k);
  const double time =
      5.5 + short_sums * std::min(work, kUnthrottled) / 1.57e9 + std::max(0.0, work - kUnthrottled) / 1.05e9;
  return kMargin * (kReciprocals + with_memory(f, time));
}

inline GemmConfig config_of_tile(const GemmTile& t) {
  return {.kernel = GemmKernel::kTile,
          .rows = t.rows,
          .columns = t.columns,
          .promote = 128,
          .group = kTileGroup,
          .stages = t.stages,
          .cluster = blocks_per_copy(t),
          .parts = t.kind == TileKind::kSplitK ? 2 : 1,
          .swaps_ab = swaps_ab(t)};
}
inline GemmConfig config_of_stream(const GemmStream& s) {
  return {.kernel = GemmKernel::kStream,
          .rows = s.rows,
          .columns = 64,
          .promote = 128,
          .group = 0,
          .stages = s.stages,
          .cluster = 1,
          .parts = s.parts,
          .swaps_ab = false};
}

// The configuration with the shortest estimated time.
inline GemmConfig choose_gemm_config(const GemmFacts& f) {
  GemmConfig best{.kernel = f.cublas ? GemmKernel::kCublas : GemmKernel::kHalf};
  if (!f.hopper) {
    return best;
  }
  double least = f.cublas ? cublas_time(f) : std::numeric_limits<double>::infinity();
  for (const GemmTile& t : kGemmTiles) {
    const double time = tile_time(t, f);
    if (time < least) {
      least = time;
      best = config_of_tile(t);
    }
  }
  for (const GemmStream& s : kGemmStreams) {
    const double time = stream_time(s, f);
    if (time < least && stream_takes(s, f)) {
      least = time;
      best = config_of_stream(s);
    }
  }
  return best;
}

}  // namespace htree::fp8
