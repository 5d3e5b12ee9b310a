// Configuration to kernel: every configuration that choose_config can return is listed here, and nothing
// else.
#pragma once

#include "ops/causal_softmax/causal_softmax.cuh"
#include "ops/causal_softmax/causal_softmax_launch.h"

namespace htree::causal_softmax {
namespace {

RowsView rows_of(const Shape& shape) {
  return {device::FastDivisor(static_cast<uint32_t>(shape.rows)),
          static_cast<uint32_t>(shape.batch * shape.rows)};
}

template <typename Tr>
dim3 grid_of(const RowsView& rows) {
  return dim3((rows.num_rows + Tr::kRowsPerBlock - 1) / Tr::kRowsPerBlock);
}

template <typename T, int kThreads, int kRowsPerBlock, int kElems, bool kVectorised>
struct Instance {
  using Tr = Traits<T, kThreads, kRowsPerBlock, kElems, kVectorised>;

  static bool matches(const KernelConfig& c) {
    return c.threads == kThreads && c.elems_per_thread == kElems && c.vectorised == kVectorised;
  }
  static void forward(const ForwardParams<T>& params, cudaStream_t stream) {
    const RowsView rows = rows_of(params.shape);
    if constexpr (kElems == 0) {
      looping_forward_kernel<Tr><<<grid_of<Tr>(rows), Tr::kBlock, 0, stream>>>(params, rows);
    } else {
      forward_kernel<Tr><<<grid_of<Tr>(rows), Tr::kBlock, 0, stream>>>(params, rows);
    }
  }
  static void backward(const BackwardParams<T>& params, cudaStream_t stream) {
    const RowsView rows = rows_of(params.shape);
    if constexpr (kElems == 0) {
      looping_backward_kernel<Tr><<<grid_of<Tr>(rows), Tr::kBlock, 0, stream>>>(params, rows);
    } else {
      backward_kernel<Tr><<<grid_of<Tr>(rows), Tr::kBlock, 0, stream>>>(params, rows);
    }
  }
};

template <typename... Instances>
struct Table {
  // Runs `launch` of the first instance that matches.
  template <typename Launch>
  static bool run(const KernelConfig& config, Launch&& launch) {
    return ((Instances::matches(config) && (launch(Instances{}), true)) || ...);
  }
};

template <typename T, bool kVectorised>
using Compiled =
    Table<Instance<T, 32, kRowsPerBlock, 8, kVectorised>, Instance<T, 32, kRowsPerBlock, 16, kVectorised>,
          Instance<T, 32, kRowsPerBlock, 32, kVectorised>, Instance<T, 128, 1, 16, kVectorised>,
          Instance<T, 128, 1, 32, kVectorised>, Instance<T, 256, 1, 32, kVectorised>,
          Instance<T, 512, 1, 16, kVectorised>, Instance<T, 512, 1, 32, kVectorised>,
          Instance<T, 1024, 1, 16, kVectorised>, Instance<T, 1024, 1, 32, kVectorised>,
          Instance<T, 512, 1, 0, kVectorised>, Instance<T, 1024, 1, 0, kVectorised>>;

template <typename T, typename Launch>
bool run_compiled(const KernelConfig& config, Launch&& launch) {
  return Compiled<T, true>::run(config, launch) || Compiled<T, false>::run(config, launch);
}

}  // namespace

template <typename T>
bool launch_forward(const KernelConfig& config, const ForwardParams<T>& params, cudaStream_t stream) {
  return run_compiled<T>(config, [&](auto instance) { instance.forward(params, stream); });
}

template <typename T>
bool launch_backward(const KernelConfig& config, const BackwardParams<T>& params, cudaStream_t stream) {
  return run_compiled<T>(config, [&](auto instance) { instance.backward(params, stream); });
}

}  // namespace htree::causal_softmax
