// Configuration to kernel for one output type: every one that choose_gemm_config or a forced tuple can name.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/launch_cluster.h"
#include "host/tensor_map.h"
#include "ops/fp8/gemm/gemm_launch.h"
#include "ops/fp8/gemm/gemm_stream.cuh"
#include "ops/fp8/gemm/gemm_tile.cuh"

namespace htree::fp8 {
namespace {

// Boxes of 128 codes x `box_rows` rows of a matrix of `columns` x `rows` codes.
inline CUtensorMap code_map(const GemmOperand& x, int64_t rows, int64_t columns, int box_rows) {
  TensorBox box;
  box.data = x.data;
  box.type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  box.sizes[0] = static_cast<uint64_t>(columns);
  box.sizes[1] = static_cast<uint64_t>(rows);
  box.strides_bytes[0] = static_cast<uint64_t>(x.pitch);
  box.box[0] = 128;
  box.box[1] = static_cast<uint32_t>(box_rows);
  return make_tensor_map(box);
}

inline int num_code_blocks(const GemmSizes& sizes) {
  return static_cast<int>((sizes.k + 127) / 128);
}

template <class Tr>
cudaError_t launch_tiles(const GemmParams<typename Tr::Out>& p, int group, cudaStream_t stream) {
  using Out = typename Tr::Out;
  int device = 0;
  int processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) {
    return error;
  }
  const GemmSizes& s = p.sizes;
  const bool staged = sizeof(Out) == 2 && s.n % 8 == 0;
  GemmTileMaps maps{code_map(p.a, s.m, s.k, Tr::kLoadedRows), code_map(p.b, s.n, s.k, Tr::kColumns), {}};
  if (staged) {
    TensorBox box;
    box.data = p.c;
    box.type =
        std::is_same_v<Out, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    box.sizes[0] = static_cast<uint64_t>(s.n);
    box.sizes[1] = static_cast<uint64_t>(s.m);
    box.strides_bytes[0] = static_cast<uint64_t>(s.n) * sizeof(Out);
    box.box[0] = Tr::kStoreColumns;
    box.box[1] = 16;
    maps.c = make_tensor_map(box);
  }
  constexpr int kClusterColumns = Tr::kColumns * Tr::kCluster;
  const device::TileOrder order{static_cast<int>((s.m + Tr::kRows - 1) / Tr::kRows),
                                static_cast<int>((s.n + kClusterColumns - 1) / kClusterColumns), group};
  const GemmTileArguments<Out> arguments{s, p.a_scale, p.b_scale, staged ? nullptr : p.c, num_code_blocks(s)};
  const int clusters = std::min(processors / Tr::kCluster, order.count());
  return launch_cluster(gemm_tile_kernel<Tr>, dim3(static_cast<unsigned>(clusters * Tr::kCluster)),
                        Tr::kThreads, Tr::kSharedBytes, Tr::kCluster, stream, maps, order, arguments);
}

template <class Tr>
cudaError_t launch_streams(const GemmParams<typename Tr::Out>& p, cudaStream_t stream) {
  const GemmSizes& s = p.sizes;
  const GemmStreamMaps maps{code_map(p.a, s.m, s.k, Tr::kRows), code_map(p.b, s.n, s.k, Tr::kColumns)};
  const dim3 grid(static_cast<unsigned>((s.n + Tr::kColumns - 1) / Tr::kColumns * Tr::kParts),
                  static_cast<unsigned>((s.m + Tr::kRows - 1) / Tr::kRows));
  return launch_cluster(gemm_stream_kernel<Tr>, grid, Tr::kThreads, Tr::kSharedBytes, Tr::kParts, stream,
                        maps, p, num_code_blocks(s));
}

}  // namespace

template <typename Out>
cudaError_t launch_gemm_tile(const GemmParams<Out>& p, const GemmConfig& c, cudaStream_t stream) {
  if (c.rows == 128 && c.columns == 128 && c.stages == 5 && c.cluster == 1) {
    if (c.promote == 128) {
      return launch_tiles<GemmTileTraits<Out, 128, 128, 5, 128, 1>>(p, c.group, stream);
    }
    if (c.promote == 64) {
      return launch_tiles<GemmTileTraits<Out, 128, 128, 5, 64, 1>>(p, c.group, stream);
    }
  }
  if (c.rows == 256 && c.columns == 128 && c.stages == 4 && c.cluster == 2) {
    if (c.promote == 128) {
      return launch_tiles<GemmTileTraits<Out, 256, 128, 4, 128, 2, Stagger::kTile>>(p, c.group, stream);
    }
    if (c.promote == 64) {
      return launch_tiles<GemmTileTraits<Out, 256, 128, 4, 64, 2, Stagger::kTile>>(p, c.group, stream);
    }
  }
  return cudaErrorNotSupported;
}

template <typename Out, int kRows>
cudaError_t launch_stream_parts(const GemmParams<Out>& p, const GemmConfig& c, cudaStream_t stream) {
  switch (c.stages == 8 ? c.cluster : 0) {
    case 1:
      return launch_streams<GemmStreamTraits<Out, kRows, 8, 1>>(p, stream);
    case 2:
      return launch_streams<GemmStreamTraits<Out, kRows, 8, 2>>(p, stream);
    case 4:
      return launch_streams<GemmStreamTraits<Out, kRows, 8, 4>>(p, stream);
    default:
      return cudaErrorNotSupported;
  }
}

template <typename Out>
cudaError_t launch_gemm_stream(const GemmParams<Out>& p, const GemmConfig& c, cudaStream_t stream) {
  switch (c.rows) {
    case 16:
      return launch_stream_parts<Out, 16>(p, c, stream);
    case 32:
      return launch_stream_parts<Out, 32>(p, c, stream);
    case 64:
      return launch_stream_parts<Out, 64>(p, c, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace htree::fp8
