// launch_input_gradient and launch_weight_gradients for one storage type.
#pragma once

#include "ops/gated_mlp/gated_mlp_gradient.cuh"
#include "ops/gated_mlp/instances/launch.cuh"

namespace htree::gated_mlp {
namespace {

// Boxes of 64 columns x 64 rows, for the columns as rows of an MN-major operand.
template <typename T>
CUtensorMap column_map(const Operand<T>& x, int64_t rows, int64_t columns) {
  return matrix_map(x.data, rows, columns, x.pitch, 64);
}

template <typename T>
CUtensorMap result_map(T* data, int64_t rows, int64_t columns) {
  return matrix_map<T>(data, rows, columns, columns, kStoreRows);
}

// `num_results` of [rows, columns], `num_products` summed in each, over `k`.
template <class Tr>
cudaError_t launch_gradient(const GradientMaps& maps, int64_t rows, int64_t columns, int64_t k,
                            int num_products, int num_results, cudaStream_t stream) {
  constexpr int kRowTilesPerGroup = 8;  // of clusters, swept together before the next columns
  int processors = 0;
  const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, processors);
  if (error != cudaSuccess) {
    return error;
  }
  constexpr int kClusterRows = Tr::kRows * Tr::kCluster;
  static_assert(kClusterRows == kGradientRows && Tr::kColumns == kGradientColumns);
  const int row_tiles = static_cast<int>((rows + kClusterRows - 1) / kClusterRows);
  const device::TileOrder order{row_tiles * num_results,
                                static_cast<int>((columns + Tr::kColumns - 1) / Tr::kColumns),
                                kRowTilesPerGroup};
  // Twice as many clusters as tiles of theirs, where there are, share the k of all.
  const int blocks = std::min(processors / Tr::kCluster, 2 * order.count()) * Tr::kCluster;
  const int num_blocks = num_k_blocks(k);
  const GradientArguments arguments{
      rows, columns, num_blocks, row_tiles * kClusterRows,
      device::share_tiles(order.count() * Tr::kCluster, blocks, num_blocks * num_products)};
  return launch_cluster(gradient_kernel<Tr>, dim3(static_cast<unsigned>(blocks)), Tr::kThreads,
                        Tr::kSharedBytes, Tr::kCluster, stream, maps, order, arguments);
}

}  // namespace

template <typename T>
cudaError_t launch_input_gradient(const InputGradientParams<T>& p, cudaStream_t stream) {
  using Tr = GradientTraits<T, false>;
  const Sizes& s = p.sizes;
  const GradientMaps maps{
      {row_maps<Tr::kRows>(p.dproducts[0], s.rows, s.inner),
       row_maps<Tr::kRows>(p.dproducts[1], s.rows, s.inner)},
      {column_map(p.weights[0], s.inner, s.hidden), column_map(p.weights[1], s.inner, s.hidden)},
      {result_map(p.dx, s.rows, s.hidden), CUtensorMap{}}};
  return launch_gradient<Tr>(maps, s.rows, s.hidden, s.inner, 2, 1, stream);
}

template <typename T>
cudaError_t launch_weight_gradients(const WeightGradientParams<T>& p, cudaStream_t stream) {
  using Tr = GradientTraits<T, true>;
  const Sizes& s = p.sizes;
  GradientMaps maps{};
  maps.factors[0] = column_map(p.x, s.rows, s.hidden);
  int num_results = 0;
  for (int i = 0; i < 2; ++i) {
    if (p.dweights[i] != nullptr) {
      maps.products[num_results].whole = column_map(p.dproducts[i], s.rows, s.inner);
      maps.results[num_results] = result_map(p.dweights[i], s.inner, s.hidden);
      ++num_results;
    }
  }
  return launch_gradient<Tr>(maps, s.inner, s.hidden, s.rows, 1, num_results, stream);
}

}  // namespace htree::gated_mlp
