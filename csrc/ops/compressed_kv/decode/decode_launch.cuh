// From the widths of codes to the kernel for tiles, with the warps and stages that fit the device.
#pragma once

#include <algorithm>

#include "host/cuda/kernel_launch.h"
#include "ops/compressed_kv/decode/decode_config.h"
#include "ops/compressed_kv/decode/decode_kernel.cuh"
#include "ops/compressed_kv/decode/decode_launch.h"

namespace htree::compressed_kv {
namespace {

template <typename Tr>
cudaError_t launch_traits(const DecodeParams& p, int64_t num_groups, cudaStream_t stream) {
  int most = 0;
  const cudaError_t error = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, most);
  if (error != cudaSuccess) {
    return error;
  }
  const StageLayout layout(Tr::kD, p.k.row_bytes, p.v.row_bytes);
  const int tables = Tr::kTableBytes + window_bytes<Tr>();
  const int padding = kStagePadding + chunk_table_bytes(Tr::kD, p.k.row_bytes, p.v.row_bytes);
  // Not from the capacity: with a fixed split size longer rows of other sequences change no bit.
  const int64_t tiles = p.split_size / kTileRows;
  const int scratch = scratch_bytes<Tr>(p.window.per_split);
  const auto choose = [&](int padding) {
    return choose_decode_config(layout.bytes, tables, static_cast<int>(sizeof(BlockMerge<Tr>)), padding,
                                warps_for(tiles, Tr::kMaxWarps), kMinStages, kMaxStages, most);
  };
  DecodeConfig config = choose(padding);
  // Where the last stages are small, the scratch ends behind them.
  const int with_scratch =
      tables + padding + (config.num_stages - 1) * config.num_warps * layout.bytes + scratch;
  if (with_scratch > most) {
    config = choose(padding + scratch);
  } else {
    config.shared_bytes = std::max(config.shared_bytes, with_scratch);
  }
  if (config.shared_bytes > most) {
    return cudaErrorNotSupported;
  }
  const auto kv_heads = static_cast<unsigned>(p.heads.kv), chunks = static_cast<unsigned>(p.heads.chunks);
  const auto grid = static_cast<unsigned>(num_groups * p.splits.launched);
  const TileLaunch launch{.layout = layout,
                          .plan = ChunkPlan(Tr::kD, Tr::kK, Tr::kV, p.k.row_bytes, p.v.row_bytes,
                                            p.tables.block_table != nullptr),
                          .chunk_table_bytes = chunk_table_bytes(Tr::kD, p.k.row_bytes, p.v.row_bytes),
                          .num_warps = config.num_warps,
                          .num_stages = config.num_stages,
                          .heads_per_kv = p.heads.per_kv(),
                          .pdl = grid <= static_cast<unsigned>(p.most_pdl_blocks)};
  const LaunchShape shape{.grid = dim3(grid / kv_heads / chunks, kv_heads, chunks),
                          .threads = 32 * config.num_warps,
                          .shared_bytes = config.shared_bytes,
                          .cluster = p.output.ending == Ending::kCluster ? p.splits.launched : 1,
                          .pdl = launch.pdl};
  return launch_kernel(decode_kernel<Tr>, shape, stream, p, launch);
}

// Kernels for at most four query heads per kv head exist for the usual head size only: they save a fifth of
// the instructions and double what there is to compile.
template <int kHeadDim, int kKeyBits, int kValueBits, typename T>
cudaError_t launch_heads(const DecodeParams& p, int64_t num_groups, cudaStream_t stream) {
  if constexpr (kHeadDim == 128) {
    if (p.heads.per_kv() <= 4) {
      return launch_traits<DecodeTraits<kHeadDim, kKeyBits, kValueBits, 4, T>>(p, num_groups, stream);
    }
  }
  return launch_traits<DecodeTraits<kHeadDim, kKeyBits, kValueBits, 8, T>>(p, num_groups, stream);
}

template <int kHeadDim, int kKeyBits, int kValueBits>
cudaError_t launch_pairs(const DecodeParams& p, QueryType pair_type, int64_t num_groups,
                         cudaStream_t stream) {
  if constexpr (kKeyBits == 16 || kValueBits == 16) {
    if (pair_type == QueryType::kBfloat16) {
      return launch_heads<kHeadDim, kKeyBits, kValueBits, __nv_bfloat16>(p, num_groups, stream);
    }
  }
  return launch_heads<kHeadDim, kKeyBits, kValueBits, __half>(p, num_groups, stream);
}

}  // namespace

template <int kHeadDim, int kKeyBits>
cudaError_t launch_decode_keys(const DecodeParams& p, int v_bits, QueryType pair_type, int64_t num_groups,
                               cudaStream_t stream) {
  switch (v_bits) {
    case 4:
      return launch_pairs<kHeadDim, kKeyBits, 4>(p, pair_type, num_groups, stream);
    case 8:
      return launch_pairs<kHeadDim, kKeyBits, 8>(p, pair_type, num_groups, stream);
    case 16:
      return launch_pairs<kHeadDim, kKeyBits, 16>(p, pair_type, num_groups, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace htree::compressed_kv
