// The choice of kernel for gated_mlp on CUDA: a pure function of the problem, printable and
// tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>

#include "device/sizes.h"

namespace htree::gated_mlp {

// kComposed: two matrix products of cuBLAS in fp32 and one elementwise kernel. kStream: the rows of x are the
// N of the products, a block has 64 columns, weights are read once (gated_mlp_stream.cuh). kTile: `rows`
// x `columns` per block (gated_mlp_tile.cuh). kSwapAb: the same with the rows of x as N
// (gated_mlp_swap_ab.cuh). All in cuda/sm90/.
enum class Kernel : int { kComposed, kStream, kTile, kSwapAb };

struct KernelConfig {
  Kernel kernel;
  int rows;     // rows of x per block
  int columns;  // columns of the output per block
  int stages;   // k-blocks of 64 in the ring
  int cluster;  // blocks that share the weights they load
};

// What the choice needs to know of the problem and the device.
struct Facts {
  int64_t rows;
  int64_t inner;
  int64_t hidden;
  bool hopper_half;  // fp16 or bf16 on sm_90
  bool keeps_products;
  int multiprocessors;
};

// Tuple of the tuning space GATED_MLP in the order of its keys: BLOCK_M, BLOCK_N, BLOCK_K, num_warps (those
// that multiply), num_stages.
struct ForcedConfig {
  int64_t block_m;
  int64_t block_n;
  int64_t block_k;
  int64_t num_warps;
  int64_t num_stages;
};

inline constexpr char kCompiledSpace[] =
    "BLOCK_K 64 and num_warps 8 with (BLOCK_M, BLOCK_N, num_stages) = "
    "(128, 128, 4), (128, 64, 4), (64, 64, 4) or (32, 64, 4)";

constexpr bool in_compiled_space(const ForcedConfig& f) {
  const bool tile = f.block_m == 128 && (f.block_n == 128 || f.block_n == 64);
  const bool stream = (f.block_m == 64 || f.block_m == 32) && f.block_n == 64;
  return (tile || stream) && f.block_k == 64 && f.num_warps == 8 && f.num_stages == 4;
}

// The configuration of a tuple in the compiled space.
constexpr KernelConfig config_of(const ForcedConfig& f) {
  const auto rows = static_cast<int>(f.block_m);
  const auto columns = static_cast<int>(f.block_n);
  const auto stages = static_cast<int>(f.num_stages);
  return f.block_m == 128 ? KernelConfig{Kernel::kTile, rows, columns, stages, columns == 128 ? 2 : 1}
                          : KernelConfig{Kernel::kStream, rows, columns, stages, 1};
}

// Times are microseconds on an H200, taken from graph replays. Only their order decides: over 119 sizes of up to 1024
// rows the chosen tile takes 0.7 % longer than the fastest one on average.
struct TileKernel {
  KernelConfig config;
  double per_launch;
  double per_block;  // per block of k of each tile that a block, or a cluster, takes
};
inline constexpr TileKernel kTiles[] = {
    {{Kernel::kTile, 128, 64, 6, 1}, 1.7, 0.430},    {{Kernel::kTile, 192, 64, 5, 1}, 1.6, 0.603},
    {{Kernel::kTile, 128, 88, 5, 1}, 2.0, 0.600},    {{Kernel::kTile, 192, 88, 4, 1}, 2.5, 0.830},
    {{Kernel::kTile, 128, 112, 5, 1}, 2.0, 0.740},   {{Kernel::kTile, 128, 128, 4, 1}, 0.9, 0.812},
    {{Kernel::kTile, 128, 128, 4, 2}, 2.6, 0.804},   {{Kernel::kSwapAb, 144, 128, 4, 2}, 4.3, 0.856},
    {{Kernel::kSwapAb, 160, 128, 4, 2}, 4.5, 1.000},
};

// Beyond so many rows the padding of other tiles is small, and swap-AB ones, whose order is that of the weights, would
// read x too often.
inline constexpr int64_t kMostSwapAbRows = 640;

// In how many waves `workers`, which are blocks or clusters, take all tiles. `tail`: where the last tiles would occupy
// no more than half of the clusters, they are split along K over the blocks of a cluster.
inline double waves_of_tiles(int64_t tiles, int64_t workers, bool tail) {
  const int64_t rest = tiles % workers;
  const bool splits = tail && rest > 0 && 2 * rest <= workers;
  return static_cast<double>(tiles / workers) + (splits ? 0.5 : rest > 0 ? 1.0 : 0.0);
}

inline double tile_time(const TileKernel& kernel, const Facts& f) {
  const KernelConfig& c = kernel.config;
  const bool swaps_ab = c.kernel == Kernel::kSwapAb;  // its clusters stand along the columns
  if (swaps_ab && f.rows > kMostSwapAbRows) {
    return std::numeric_limits<double>::infinity();
  }
  const int64_t tiles = ceil_div(f.rows, c.rows * (swaps_ab ? 1 : c.cluster)) *
                        ceil_div(f.inner, c.columns * (swaps_ab ? c.cluster : 1));
  const int64_t workers = std::max(1, f.multiprocessors / c.cluster);
  const double waves = waves_of_tiles(tiles, workers, c.cluster == 2 && f.hidden > 64 && tiles > workers);
  return kernel.per_launch + waves * static_cast<double>(ceil_div(f.hidden, 64)) * kernel.per_block;
}

inline KernelConfig choose_config(const Facts& f) {
  if (!f.hopper_half) {
    return {Kernel::kComposed, 0, 0, 0, 0};
  }
  if (!f.keeps_products && f.rows <= 64) {
    return f.rows <= 16   ? KernelConfig{Kernel::kStream, 16, 64, 4, 1}
           : f.rows <= 32 ? KernelConfig{Kernel::kStream, 32, 64, 4, 1}
                          : KernelConfig{Kernel::kStream, 64, 64, 4, 1};
  }
  const auto* best = std::min_element(
      std::begin(kTiles), std::end(kTiles),
      [&](const TileKernel& a, const TileKernel& b) { return tile_time(a, f) < tile_time(b, f); });
  return best->config;
}

// ---- the products of the backward: the kernels of cuda/sm90/gated_mlp_gradient.cuh, or cuBLAS

// What a cluster of those kernels takes of a result.
inline constexpr int kGradientRows = 256;
inline constexpr int kGradientColumns = 256;

// Tensor copies must be able to read and write the rows, and twice `inner` rows must be countable.
inline bool has_gradient_kernels(const Facts& f) {
  return f.hopper_half && f.inner % 8 == 0 && f.hidden % 8 == 0 && f.inner < (int64_t{1} << 30);
}

// Whether our kernels compute the gradients of the weights: wherever the device has them, since they win at
// every size that was measured.
inline bool fuses_weight_gradients(const Facts& f) {
  return has_gradient_kernels(f);
}

// Whether they compute dx. Where rows and hidden are small, dx is a long sum with few tiles,
// which cuBLAS splits further.
inline bool fuses_input_gradient(const Facts& f) {
  if (!has_gradient_kernels(f)) {
    return false;
  }
  constexpr double kPerBlock = 0.713;          // per block of k
  constexpr double kCublasLaunches = 12.4;     // two products in fp32 and the rounding of their sum
  constexpr double kCublasOperations = 670e6;  // operations per microsecond
  constexpr double kCublasBytes = 3.65e6;      // bytes of the weights per microsecond
  const int64_t tiles = ceil_div(f.rows, kGradientRows) * ceil_div(f.hidden, kGradientColumns);
  const int64_t clusters = std::max(1, f.multiprocessors / 2);
  const double fused =
      waves_of_tiles(tiles, clusters, true) * 2.0 * static_cast<double>(ceil_div(f.inner, 64)) * kPerBlock;
  const double weights = static_cast<double>(f.inner) * static_cast<double>(f.hidden);
  const double cublas =
      kCublasLaunches +
      std::max(4 * static_cast<double>(f.rows) * weights / kCublasOperations, 4 * weights / kCublasBytes);
  return fused <= cublas;
}

inline std::string describe(const KernelConfig& c) {
  if (c.kernel == Kernel::kComposed) {
    return "composed: two products of cuBLAS, one elementwise kernel";
  }
  const char* name = c.kernel == Kernel::kStream ? "stream" : c.kernel == Kernel::kTile ? "tile" : "swap AB";
  return std::string(name) + ": " + std::to_string(c.rows) + " rows x " + std::to_string(c.columns) +
         " columns, " + std::to_string(c.stages) + " stages, clusters of " + std::to_string(c.cluster);
}

inline std::string describe_gradient(bool fuses) {
  return fuses ? "tile: 128 rows x 256 columns, 4 stages, clusters of 2" : "products of cuBLAS";
}

}  // namespace htree::gated_mlp
