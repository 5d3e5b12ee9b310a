// From the configuration to the kernel: every configuration that choose_config or a forced tuple can
// name is listed here.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device/sizes.h"
#include "host/cuda/kernel_launch.h"
#include "host/cuda/tensor_map.h"
#include "host/cuda/tile_plan.h"
#include "ops/gated_mlp/cuda/gate.cuh"
#include "ops/gated_mlp/cuda/gated_mlp_launch.h"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_gradient.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_stream.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_swap_ab.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_tile.cuh"

namespace htree::gated_mlp {
namespace {

template <typename T>
inline constexpr CUtensorMapDataType kMapType =
    std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Descriptor of a matrix of `rows` x `columns` elements whose rows stand `pitch` elements apart.
template <typename T>
CUtensorMap matrix_map(const T* data, int64_t rows, int64_t columns, int64_t pitch, int box_rows) {
  return row_major_map(data, kMapType<T>, rows, columns, pitch * static_cast<int64_t>(sizeof(T)), box_rows);
}

// The descriptors of such a matrix for tiles of kRows rows, of which one copy brings kCopied.
template <int kRows, int kCopied = kRows, typename T>
device::OperandMaps row_maps(const Operand<T>& x, int64_t rows, int64_t columns) {
  return operand_maps(x.data, kMapType<T>, rows, columns, x.pitch * static_cast<int64_t>(sizeof(T)), kRows,
                      kCopied);
}

inline int num_k_blocks(int64_t k) {
  return static_cast<int>(ceil_div(k, 64));
}

template <class Tr>
cudaError_t launch_streams(const ForwardParams<typename Tr::T>& p, cudaStream_t stream) {
  const Sizes& s = p.sizes;
  const StreamMaps maps{
      matrix_map(p.x.data, s.rows, s.hidden, p.x.pitch, Tr::kRows),
      matrix_map(p.gate_weight.data, s.inner, s.hidden, p.gate_weight.pitch, Tr::kColumns),
      matrix_map(p.up_weight.data, s.inner, s.hidden, p.up_weight.pitch, Tr::kColumns),
  };
  const dim3 grid(static_cast<unsigned>(ceil_div(s.inner, Tr::kColumns)),
                  static_cast<unsigned>(ceil_div(s.rows, Tr::kRows)));
  if (grid.y > 65535) {
    return cudaErrorNotSupported;
  }
  return launch_kernel(stream_kernel<Tr>, {grid, Tr::kThreads, Tr::kSharedBytes}, stream, maps, p.out, s,
                       num_k_blocks(s.hidden));
}

template <typename T, Activation kActivation>
cudaError_t launch_rows(const ForwardParams<T>& p, const KernelConfig& c, cudaStream_t stream) {
  if (c.rows == 16 && c.stages == 4) {
    return launch_streams<StreamTraits<T, kActivation, 16, 4>>(p, stream);
  }
  if (c.rows == 32 && c.stages == 4) {
    return launch_streams<StreamTraits<T, kActivation, 32, 4>>(p, stream);
  }
  if (c.rows == 64 && c.stages == 4) {
    return launch_streams<StreamTraits<T, kActivation, 64, 4>>(p, stream);
  }
  return cudaErrorNotSupported;
}

}  // namespace

template <typename T>
cudaError_t launch_stream(const ForwardParams<T>& p, const KernelConfig& config, cudaStream_t stream) {
  return p.activation == Activation::kSilu ? launch_rows<T, Activation::kSilu>(p, config, stream)
                                           : launch_rows<T, Activation::kGelu>(p, config, stream);
}

namespace {

// Row tiles, counted in clusters, that are swept before the next columns: 8 x 256 rows of x stay in the L2.
// For 4096 rows on an H200, with cold caches: 970 us, with 16 979 us, with 4 981 us.
constexpr int kRowTilesPerGroup = 8;

// Launches a persistent kernel over tiles of `row_tiles` x `column_tiles` clusters, in groups of `group` row
// tiles, with the arguments that arguments_of(split) gives.
template <class Tr, typename Kernel, typename Maps, class ArgumentsOf>
cudaError_t launch_persistent(Kernel* kernel, int64_t row_tiles, int64_t column_tiles, int group,
                              int num_blocks, cudaStream_t stream, const Maps& maps,
                              ArgumentsOf&& arguments_of) {
  const device::TileOrder order{static_cast<int>(row_tiles), static_cast<int>(column_tiles), group};
  TilePlan plan;
  const cudaError_t error = plan_tiles(order, Tr::kCluster, Tr::kCluster, order.count(), num_blocks, plan);
  if (error != cudaSuccess) {
    return error;
  }
  return launch_kernel(kernel,
                       {static_cast<unsigned>(plan.blocks), Tr::kThreads, Tr::kSharedBytes, Tr::kCluster},
                       stream, maps, order, arguments_of(plan.split));
}

template <class Tr>
cudaError_t launch_tiles(const ForwardParams<typename Tr::T>& p, cudaStream_t stream) {
  using T = typename Tr::T;
  const Sizes& s = p.sizes;
  const bool aligned = s.inner % 8 == 0 && Tr::kStaged > 0;
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
  return launch_persistent<Tr>(
      tile_kernel<Tr>, ceil_div(s.rows, Tr::kRows * Tr::kCluster), ceil_div(s.inner, Tr::kColumns),
      kRowTilesPerGroup, num_k_blocks(s.hidden), stream, maps, [&](const device::SplitTiles& split) {
        return TileArguments<T>{s, split, aligned ? nullptr : p.out, aligned ? nullptr : p.gate,
                                aligned ? nullptr : p.up};
      });
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
  if (is(128, 88, 5, 1)) {
    return launch_tiles<TileTraits<T, kActivation, 128, 88, 5, 1, kKeepsProducts>>(p, stream);
  }
  if (is(192, 88, 4, 1)) {
    return launch_tiles<TileTraits<T, kActivation, 192, 88, 4, 1, kKeepsProducts>>(p, stream);
  }
  if (is(128, 112, 5, 1)) {
    return launch_tiles<TileTraits<T, kActivation, 128, 112, 5, 1, kKeepsProducts>>(p, stream);
  }
  if constexpr (!kKeepsProducts) {  // for tuples of the tuning space, which serves inference alone
    if (is(128, 64, 4, 1)) {
      return launch_tiles<TileTraits<T, kActivation, 128, 64, 4, 1, kKeepsProducts>>(p, stream);
    }
  }
  return cudaErrorNotSupported;
}

template <class Tr>
cudaError_t launch_swap_ab_tiles(const ForwardParams<typename Tr::T>& p, cudaStream_t stream) {
  const Sizes& s = p.sizes;
  const SwapAbMaps maps{
      row_maps<Tr::kColumns, Tr::kShare>(p.x, s.rows, s.hidden),
      matrix_map(p.gate_weight.data, s.inner, s.hidden, p.gate_weight.pitch, 64),
      matrix_map(p.up_weight.data, s.inner, s.hidden, p.up_weight.pitch, 64),
  };
  // Clusters that stand side by side in time take the same weights, which so come from memory once.
  constexpr int kGroup = 1;
  return launch_persistent<Tr>(swap_ab_kernel<Tr>, ceil_div(s.inner, Tr::kRows * Tr::kCluster),
                               ceil_div(s.rows, Tr::kColumns), kGroup, num_k_blocks(s.hidden), stream, maps,
                               [&](const device::SplitTiles& split) {
                                 return SwapAbArguments<typename Tr::T>{s, split, p.out, p.gate, p.up};
                               });
}

template <typename T, Activation kActivation, bool kKeepsProducts>
cudaError_t launch_swap_ab_config(const ForwardParams<T>& p, const KernelConfig& c, cudaStream_t stream) {
  const auto is = [&](int rows, int stages) {
    return c.rows == rows && c.columns == 128 && c.stages == stages && c.cluster == 2;
  };
  if (is(144, 4)) {
    return launch_swap_ab_tiles<SwapAbTraits<T, kActivation, 144, 4, kKeepsProducts>>(p, stream);
  }
  if (is(160, 4)) {
    return launch_swap_ab_tiles<SwapAbTraits<T, kActivation, 160, 4, kKeepsProducts>>(p, stream);
  }
  return cudaErrorNotSupported;
}

// Calls launch(activation, keeps_products), two std::integral_constants, as the parameters have it.
template <typename T, class Launch>
cudaError_t with_options(const ForwardParams<T>& p, Launch&& launch) {
  const auto with_activation = [&](auto activation) {
    return p.gate != nullptr ? launch(activation, std::true_type{}) : launch(activation, std::false_type{});
  };
  return p.activation == Activation::kSilu
             ? with_activation(std::integral_constant<Activation, Activation::kSilu>{})
             : with_activation(std::integral_constant<Activation, Activation::kGelu>{});
}

}  // namespace

template <typename T>
cudaError_t launch_swap_ab(const ForwardParams<T>& p, const KernelConfig& config, cudaStream_t stream) {
  return with_options(p, [&](auto activation, auto keeps) {
    return launch_swap_ab_config<T, decltype(activation)::value, decltype(keeps)::value>(p, config, stream);
  });
}

template <typename T>
cudaError_t launch_tile(const ForwardParams<T>& p, const KernelConfig& config, cudaStream_t stream) {
  return with_options(p, [&](auto activation, auto keeps) {
    return launch_config<T, decltype(activation)::value, decltype(keeps)::value>(p, config, stream);
  });
}

namespace {

// Boxes of 64 columns x 64 rows of an MN-major operand, whose columns are the rows of the product.
template <typename T>
CUtensorMap column_map(const Operand<T>& x, int64_t rows, int64_t columns) {
  return matrix_map(x.data, rows, columns, x.pitch, 64);
}

template <typename T>
CUtensorMap result_map(T* data, int64_t rows, int64_t columns) {
  return matrix_map<T>(data, rows, columns, columns, kStoreRows);
}

// Computes `num_results` results [rows, columns]. Each is the sum of `num_products` products over `k`.
template <class Tr>
cudaError_t launch_gradient(const GradientMaps& maps, int64_t rows, int64_t columns, int64_t k,
                            int num_products, int num_results, cudaStream_t stream) {
  constexpr int kRowTilesPerGroup = 8;  // in clusters, swept before the next columns
  constexpr int kClusterRows = Tr::kRows * Tr::kCluster;
  static_assert(kClusterRows == kGradientRows && Tr::kColumns == kGradientColumns);
  const int row_tiles = static_cast<int>(ceil_div(rows, kClusterRows));
  const device::TileOrder order{row_tiles * num_results, static_cast<int>(ceil_div(columns, Tr::kColumns)),
                                kRowTilesPerGroup};
  // Where there are enough, all tiles are split along K over twice as many clusters.
  const int num_blocks = num_k_blocks(k);
  TilePlan plan;
  const cudaError_t error =
      plan_tiles(order, Tr::kCluster, Tr::kCluster, 2 * order.count(), num_blocks * num_products, plan);
  if (error != cudaSuccess) {
    return error;
  }
  const GradientArguments arguments{rows, columns, num_blocks, row_tiles * kClusterRows, plan.split};
  return launch_kernel(gradient_kernel<Tr>,
                       {static_cast<unsigned>(plan.blocks), Tr::kThreads, Tr::kSharedBytes, Tr::kCluster},
                       stream, maps, order, arguments);
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

namespace {

// Enough blocks to fill any GPU; the kernels loop over what remains.
inline unsigned num_gate_blocks(int64_t count) {
  constexpr int64_t kPerBlock = int64_t{kGateThreads} * kGateElements;
  constexpr int64_t kMost = 1 << 14;
  return static_cast<unsigned>(std::min(ceil_div(count, kPerBlock), kMost));
}

}  // namespace

template <typename T>
cudaError_t launch_gate(Activation activation, int64_t count, const float* gate, const float* up, T* out,
                        cudaStream_t stream) {
  const auto kernel =
      activation == Activation::kSilu ? gate_kernel<T, Activation::kSilu> : gate_kernel<T, Activation::kGelu>;
  return launch_kernel(kernel, {num_gate_blocks(count), kGateThreads}, stream, count, gate, up, out);
}

template <typename T, typename P>
cudaError_t launch_gate_backward(Activation activation, int64_t count, const T* dy, const P* gate,
                                 const P* up, T* dgate, T* dup, cudaStream_t stream) {
  const auto kernel = activation == Activation::kSilu ? gate_backward_kernel<T, P, Activation::kSilu>
                                                      : gate_backward_kernel<T, P, Activation::kGelu>;
  return launch_kernel(kernel, {num_gate_blocks(count), kGateThreads}, stream, count, dy, gate, up, dgate,
                       dup);
}

}  // namespace htree::gated_mlp
