// From the configuration to the kernel, for one output type: every configuration that choose_gemm_config or a
// forced tuple can name.
#pragma once

#include <type_traits>

#include "device/sizes.h"
#include "host/cuda/kernel_launch.h"
#include "host/cuda/tensor_map.h"
#include "host/cuda/tile_plan.h"
#include "ops/fp8/gemm/cuda/gemm_launch.h"
#include "ops/fp8/gemm/cuda/sm90/gemm_stream.cuh"
#include "ops/fp8/gemm/cuda/sm90/gemm_tile.cuh"

namespace htree::fp8 {
namespace {

inline int num_code_blocks(const GemmSizes& sizes) {
  return static_cast<int>(ceil_div(sizes.k, 128));
}

// Descriptors for tiles of kRows rows of an operand, of which each of kSharing blocks copies a share.
template <int kRows, int kSharing>
device::OperandMaps code_maps(const GemmOperand& x, int64_t rows, int64_t columns) {
  return operand_maps(x.data, CU_TENSOR_MAP_DATA_TYPE_UINT8, rows, columns, x.pitch, kRows, kRows / kSharing);
}

// Descriptor of the boxes in which c is written.
template <class Store, typename Out>
CUtensorMap result_map(const GemmParams<Out>& p) {
  TensorBox box;
  box.data = p.c;
  box.type = sizeof(Out) == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  box.sizes[0] = static_cast<uint64_t>(p.sizes.n);
  box.sizes[1] = static_cast<uint64_t>(p.sizes.m);
  box.strides_bytes[0] = static_cast<uint64_t>(p.sizes.n) * sizeof(Out);
  box.box[0] = Store::kBoxColumns;
  box.box[1] = Store::kBoxRows;
  box.swizzle = Store::kBoxBytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                : Store::kBoxBytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                         : CU_TENSOR_MAP_SWIZZLE_32B;
  return make_tensor_map(box);
}

template <class Tr>
cudaError_t launch_tiles(const GemmParams<typename Tr::Out>& p, int group, cudaStream_t stream) {
  using Out = typename Tr::Out;
  const bool copies_c = p.sizes.n * static_cast<int64_t>(sizeof(Out)) % 16 == 0;
  // What the kernel takes as a and b, and as m and n.
  const GemmOperand& rows = Tr::kSwapsAb ? p.b : p.a;
  const GemmOperand& columns = Tr::kSwapsAb ? p.a : p.b;
  const GemmSizes s = Tr::kSwapsAb ? GemmSizes{p.sizes.n, p.sizes.m, p.sizes.k} : p.sizes;
  const GemmTileMaps maps{code_maps<Tr::kRows, Tr::kCluster>(rows, s.m, s.k),
                          code_maps<Tr::kColumns, 1>(columns, s.n, s.k),
                          copies_c ? result_map<typename Tr::Store>(p) : CUtensorMap{}};
  constexpr int kClusterColumns = Tr::kColumns * Tr::kCluster;
  const device::TileOrder order{static_cast<int>(ceil_div(s.m, Tr::kRows)),
                                static_cast<int>(ceil_div(s.n, kClusterColumns)), group};
  TilePlan plan;
  const cudaError_t error = plan_tiles(order, /*tiles_per_place=*/1, Tr::kBlocksPerCluster,
                                       /*most_clusters=*/order.count(), num_code_blocks(s), plan);
  if (error != cudaSuccess) {
    return error;
  }
  const GemmTileArguments<Out> arguments{
      s,       Tr::kSwapsAb ? p.b_scale : p.a_scale, Tr::kSwapsAb ? p.a_scale : p.b_scale, p.c, plan.split,
      copies_c};
  const LaunchShape shape{.grid = static_cast<unsigned>(plan.blocks),
                          .threads = Tr::kThreads,
                          .shared_bytes = Tr::kSharedBytes,
                          .cluster = Tr::kBlocksPerCluster,
                          .pdl = true};
  return launch_kernel(gemm_tile_kernel<Tr>, shape, stream, maps, order, arguments);
}

template <class Tr>
cudaError_t launch_streams(const GemmParams<typename Tr::Out>& p, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, processors);
  if (error != cudaSuccess) {
    return error;
  }
  const GemmSizes& s = p.sizes;
  if (num_code_blocks(s) < Tr::kParts) {
    return cudaErrorNotSupported;  // every block of a cluster must have a part
  }
  const GemmStreamMaps maps{code_maps<Tr::kRows, 1>(p.a, s.m, s.k),
                            code_maps<Tr::kColumns, 1>(p.b, s.n, s.k)};
  const dim3 grid(static_cast<unsigned>(ceil_div(s.n, Tr::kColumns) * Tr::kParts),
                  static_cast<unsigned>(ceil_div(s.m, Tr::kRows)));
  const LaunchShape shape{.grid = grid,
                          .threads = Tr::kThreads,
                          .shared_bytes = Tr::kSharedBytes,
                          .cluster = Tr::kParts,
                          .pdl = grid.x * grid.y <= static_cast<unsigned>(processors)};
  return launch_kernel(gemm_stream_kernel<Tr>, shape, stream, maps, p, num_code_blocks(s));
}

template <class Tr>
bool is_tile(const GemmConfig& c) {
  constexpr int kRows = Tr::kSwapsAb ? Tr::kColumns : Tr::kRows;
  constexpr int kColumns = Tr::kSwapsAb ? Tr::kRows : Tr::kColumns;
  return c.rows == kRows && c.columns == kColumns && c.stages == Tr::Shape::kStages &&
         c.promote == Tr::kPromoteK && c.cluster == Tr::kCluster && c.parts == Tr::kParts &&
         c.swaps_ab == Tr::kSwapsAb;
}

// Launches the one of Tiles that `c` describes.
template <class... Tiles, typename Out>
cudaError_t launch_described_tile(const GemmParams<Out>& p, const GemmConfig& c, cudaStream_t stream) {
  cudaError_t error = cudaErrorNotSupported;
  (void)((is_tile<Tiles>(c) && (error = launch_tiles<Tiles>(p, c.group, stream), true)) || ...);
  return error;
}

template <class Tr>
bool is_stream(const GemmConfig& c) {
  return c.rows == Tr::kRows && c.stages == Tr::Shape::kStages && c.parts == Tr::kParts;
}

// Launches the one of Streams that `c` describes.
template <class... Streams, typename Out>
cudaError_t launch_described_stream(const GemmParams<Out>& p, const GemmConfig& c, cudaStream_t stream) {
  cudaError_t error = cudaErrorNotSupported;
  (void)((is_stream<Streams>(c) && (error = launch_streams<Streams>(p, stream), true)) || ...);
  return error;
}

}  // namespace

template <typename Out, int kRows, int kColumns, int kStages>
using PlainTile = GemmTileTraits<Out, kRows / 64, kRows, kColumns, kStages, 128, 1>;
template <typename Out, int kRows, int kColumns, int kStages>
using SplitKTile = GemmTileTraits<Out, kRows / 64, kRows, kColumns, kStages, 128, 1, 2>;
// kRows and kColumns are rows and columns of c.
template <typename Out, int kRows, int kColumns, int kStages>
using SwapAbTile = GemmTileTraits<Out, kColumns / 64, kColumns, kRows, kStages, 128, 1, 1, true>;
template <typename Out, int kRows, int kColumns, int kStages>
using MulticastTile = GemmTileTraits<Out, kColumns / 64, kColumns, kRows, kStages, 128, 2, 1, true>;

template <typename Out>
cudaError_t launch_gemm_tile(const GemmParams<Out>& p, const GemmConfig& c, cudaStream_t stream) {
  return launch_described_tile<
      PlainTile<Out, 64, 48, 14>, PlainTile<Out, 64, 64, 12>, PlainTile<Out, 64, 80, 11>,
      PlainTile<Out, 128, 64, 8>, PlainTile<Out, 128, 80, 7>, PlainTile<Out, 128, 96, 7>,
      PlainTile<Out, 128, 112, 6>, PlainTile<Out, 128, 128, 5>, PlainTile<Out, 128, 128, 6>,
      PlainTile<Out, 128, 144, 5>, PlainTile<Out, 128, 160, 5>, PlainTile<Out, 192, 96, 5>,
      PlainTile<Out, 192, 128, 4>, SplitKTile<Out, 128, 64, 8>, SplitKTile<Out, 128, 96, 6>,
      SplitKTile<Out, 128, 128, 5>, SplitKTile<Out, 192, 96, 5>, SplitKTile<Out, 192, 128, 4>,
      SwapAbTile<Out, 104, 128, 6>, SwapAbTile<Out, 120, 128, 5>, SwapAbTile<Out, 144, 128, 5>,
      SwapAbTile<Out, 152, 128, 5>, SwapAbTile<Out, 160, 128, 5>, SwapAbTile<Out, 200, 128, 4>,
      SwapAbTile<Out, 104, 192, 4>, SwapAbTile<Out, 120, 192, 4>, SwapAbTile<Out, 128, 192, 4>,
      MulticastTile<Out, 72, 128, 8>, MulticastTile<Out, 80, 128, 7>, MulticastTile<Out, 96, 128, 7>,
      MulticastTile<Out, 104, 128, 6>, MulticastTile<Out, 112, 128, 6>,
      // Only tuples of the tuning space name these.
      GemmTileTraits<Out, 2, 128, 128, 5, 64, 1>, GemmTileTraits<Out, 2, 256, 128, 4, 64, 2>>(p, c, stream);
}

template <typename Out>
cudaError_t launch_gemm_stream(const GemmParams<Out>& p, const GemmConfig& c, cudaStream_t stream) {
  return launch_described_stream<
      GemmStreamTraits<Out, 16, 12, 1>, GemmStreamTraits<Out, 16, 8, 2>, GemmStreamTraits<Out, 16, 8, 4>,
      GemmStreamTraits<Out, 32, 12, 1>, GemmStreamTraits<Out, 32, 8, 2>, GemmStreamTraits<Out, 32, 8, 4>,
      GemmStreamTraits<Out, 64, 12, 1>, GemmStreamTraits<Out, 64, 8, 2>, GemmStreamTraits<Out, 64, 8, 4>,
      GemmStreamTraits<Out, 80, 10, 1>, GemmStreamTraits<Out, 80, 8, 2>, GemmStreamTraits<Out, 80, 8, 4>,
      GemmStreamTraits<Out, 96, 10, 1>, GemmStreamTraits<Out, 96, 8, 2>, GemmStreamTraits<Out, 96, 8, 4>,
      GemmStreamTraits<Out, 128, 7, 4>, GemmStreamTraits<Out, 144, 7, 2>, GemmStreamTraits<Out, 160, 7, 2>,
      // Two blocks of these fit a multiprocessor.
      GemmStreamTraits<Out, 16, 6, 1>, GemmStreamTraits<Out, 32, 5, 1>, GemmStreamTraits<Out, 80, 5, 1>,
      GemmStreamTraits<Out, 96, 5, 1>>(p, c, stream);
}

}  // namespace htree::fp8
