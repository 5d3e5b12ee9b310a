// launch_tile for one storage type.
#pragma once

#include "ops/gated_mlp/gated_mlp_tile.cuh"
#include "ops/gated_mlp/instances/launch.cuh"

namespace htree::gated_mlp {
namespace {

// Clusters of row tiles swept together before the next columns: 8 x 256 rows of x stay in L2. At 4096 rows on
// an H200, in turns from cold: 970 us, 979 with 16, 981 with 4.
constexpr int kRowTilesPerGroup = 8;

template <class Tr>
cudaError_t launch_tiles(const ForwardParams<typename Tr::T>& p, cudaStream_t stream) {
  using T = typename Tr::T;
  int processors = 0;
  const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, processors);
  if (error != cudaSuccess) {
    return error;
  }
  const Sizes& s = p.sizes;
  const bool aligned = s.inner % 8 == 0;
  const auto result_map = [&](T* data) {
    return aligned && data != nullptr ? matrix_map<T>(data, s.rows, s.inner, s.inner, kStoreRows)
                                      : CUtensorMap{};
  };
  const TileMaps maps{
      row_maps<Tr::kRows>(p.x, s.rows, s.hidden),
      matrix_map(p.gate_weight.data, s.inner, s.hidden, p.gate_weight.pitch, Tr::kColumns),
      matrix_map(p.up_weight.data, s.inner, s.hidden, p.up_weight.pitch, Tr::kColumns),
      result_map(p.out),
      result_map(p.gate),
      result_map(p.up),
  };
  constexpr int kClusterRows = Tr::kRows * Tr::kCluster;
  const device::TileOrder order{static_cast<int>((s.rows + kClusterRows - 1) / kClusterRows),
                                static_cast<int>((s.inner + Tr::kColumns - 1) / Tr::kColumns),
                                kRowTilesPerGroup};
  const int blocks = std::min(processors / Tr::kCluster, order.count()) * Tr::kCluster;
  const TileArguments<T> arguments{
      s, device::share_tiles(order.count() * Tr::kCluster, blocks, num_k_blocks(s.hidden)),
      aligned ? nullptr : p.out, aligned ? nullptr : p.gate, aligned ? nullptr : p.up};
  return launch_cluster(tile_kernel<Tr>, dim3(static_cast<unsigned>(blocks)), Tr::kThreads, Tr::kSharedBytes,
                        Tr::kCluster, stream, maps, order, arguments);
}

template <typename T, Activation kActivation, bool kKeepsProducts>
cudaError_t launch_config(const ForwardParams<T>& p, const KernelConfig& c, cudaStream_t stream) {
  const auto is = [&](int rows, int columns, int stages, int cluster) {
    return c.rows == rows && c.columns == columns && c.stages == stages && c.cluster == cluster;
  };
  if (is(128, 128, 4, 2)) {
    return launch_tiles<TileTraits<T, kActivation, 128, 128, 4, 2, kKeepsProducts>>(p, stream);
  }
  if (is(128, 128, 4, 1)) {
    return launch_tiles<TileTraits<T, kActivation, 128, 128, 4, 1, kKeepsProducts>>(p, stream);
  }
  if (is(192, 64, 5, 1)) {
    return launch_tiles<TileTraits<T, kActivation, 192, 64, 5, 1, kKeepsProducts>>(p, stream);
  }
  if (is(128, 64, 6, 1)) {
    return launch_tiles<TileTraits<T, kActivation, 128, 64, 6, 1, kKeepsProducts>>(p, stream);
  }
  if constexpr (!kKeepsProducts) {  // named by a tuple of the tuning space, which serves inference alone
    if (is(128, 64, 4, 1)) {
      return launch_tiles<TileTraits<T, kActivation, 128, 64, 4, 1, kKeepsProducts>>(p, stream);
    }
  }
  return cudaErrorNotSupported;
}

}  // namespace

template <typename T>
cudaError_t launch_tile(const ForwardParams<T>& p, const KernelConfig& config, cudaStream_t stream) {
  const bool silu = p.activation == Activation::kSilu;
  if (p.gate != nullptr) {
    return silu ? launch_config<T, Activation::kSilu, true>(p, config, stream)
                : launch_config<T, Activation::kGelu, true>(p, config, stream);
  }
  return silu ? launch_config<T, Activation::kSilu, false>(p, config, stream)
              : launch_config<T, Activation::kGelu, false>(p, config, stream);
}

}  // namespace htree::gated_mlp
