// The choice of kernel for gated_mlp on CUDA: a pure function of the problem, printable and tested on the
// CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "device/ceil_div.h"

namespace htree::gated_mlp {

// kComposed: two matrix products of the library in fp32 and one elementwise kernel. kStream: rows of x are
// the n side of products, 64 columns per block, weights read once (gated_mlp_stream.cuh). kTile: 128 rows x
// `columns` per block (gated_mlp_tile.cuh).
enum class Kernel : int { kComposed, kStream, kTile };

struct KernelConfig {
  Kernel kernel;
  int rows;     // of x per block
  int columns;  // of the output per block
  int stages;   // k-blocks of 64 in flight
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

// Tuple of the GATED_MLP space in its key order: BLOCK_M, BLOCK_N, BLOCK_K, num_warps that multiply,
// num_stages.
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

// For a tuple of the compiled space.
constexpr KernelConfig config_of(const ForcedConfig& f) {
  const auto rows = static_cast<int>(f.block_m);
  const auto columns = static_cast<int>(f.block_n);
  const auto stages = static_cast<int>(f.num_stages);
  return f.block_m == 128 ? KernelConfig{Kernel::kTile, rows, columns, stages, columns == 128 ? 2 : 1}
                          : KernelConfig{Kernel::kStream, rows, columns, stages, 1};
}

// Microseconds on an H200 as graph replays show them; what decides is their order. per_turn: of a tile that a
// block, or a cluster, takes; per_block: of each of its k-blocks of 64.
struct TileCost {
  double per_launch;
  double per_turn;
  double per_block;
};
inline constexpr TileCost kNarrow{4.7, 0.5, 0.41};  // 128 rows x 64 columns, a block
inline constexpr TileCost kWide{4.5, 3.1, 0.645};   // 256 rows x 128 columns, a cluster

inline double narrow_time(const Facts& f) {
  const int64_t turns = ceil_div(ceil_div(f.rows, 128) * ceil_div(f.inner, 64), f.multiprocessors);
  const auto k_blocks = static_cast<double>(ceil_div(f.hidden, 64));
  return kNarrow.per_launch + static_cast<double>(turns) * (kNarrow.per_turn + k_blocks * kNarrow.per_block);
}

// The blocks of a cluster share the tiles of a last turn that half of the clusters would take.
inline double wide_time(const Facts& f) {
  constexpr double kExchange = 0.5;
  const int64_t clusters = std::max(1, f.multiprocessors / 2);
  const int64_t tiles = ceil_div(f.rows, 256) * ceil_div(f.inner, 128);
  const int64_t rest = tiles % clusters;
  const bool shares = tiles > clusters && rest > 0 && 2 * rest <= clusters && f.hidden > 64;
  const auto whole = static_cast<double>(tiles / clusters + (rest > 0 && !shares ? 1 : 0));
  const double k_time = static_cast<double>(ceil_div(f.hidden, 64)) * kWide.per_block;
  return kWide.per_launch + whole * (kWide.per_turn + k_time) +
         (shares ? kExchange + kWide.per_turn + 0.5 * k_time : 0.0);
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
  return narrow_time(f) < wide_time(f) ? KernelConfig{Kernel::kTile, 128, 64, 6, 1}
                                       : KernelConfig{Kernel::kTile, 128, 128, 4, 2};
}

inline std::string describe(const KernelConfig& c) {
  if (c.kernel == Kernel::kComposed) {
    return "composed: two library products, one elementwise kernel";
  }
  return std::string(c.kernel == Kernel::kStream ? "stream" : "tile") + ": " + std::to_string(c.rows) +
         " rows x " + std::to_string(c.columns) + " columns, " + std::to_string(c.stages) +
         " stages, clusters of " + std::to_string(c.cluster);
}

}  // namespace htree::gated_mlp
