// From the configuration to the kernel: every configuration that the choice can return is listed
// here, and nothing else.
#pragma once

#include "device/sizes.h"
#include "host/cuda/kernel_launch.h"
#include "ops/rmsnorm_rope/dweight.cuh"
#include "ops/rmsnorm_rope/looping.cuh"
#include "ops/rmsnorm_rope/rmsnorm_rope_launch.h"

namespace htree::rmsnorm_rope {
namespace {

template <typename T, int kThreads, int kPairs, bool kRing>
struct Instance {
  using Tr = Traits<T, kThreads, kPairs, kRing>;

  static bool matches(const KernelConfig& c) {
    return c.vectorised && c.threads == kThreads && c.pairs == kPairs && (c.stages > 1) == kRing;
  }
  static cudaError_t forward(const KernelConfig& c, const ForwardParams<T>& p, int blocks, bool pdl,
                             cudaStream_t stream) {
    LaunchShape shape = shape_of(c, blocks, 1);
    shape.pdl = pdl;
    return launch_kernel(forward_kernel<Tr>, shape, stream, p, RowsView(p.shape, blocks),
                         LaneGrid(p.shape, kThreads, Tr::kPack), c.stages, pdl);
  }
  static cudaError_t backward(const KernelConfig& c, const BackwardParams<T>& p, int blocks,
                              cudaStream_t stream) {
    return launch_kernel(backward_kernel<Tr>, shape_of(c, blocks, 2), stream, p, RowsView(p.shape, blocks),
                         LaneGrid(p.shape, kThreads, Tr::kPack), c.stages);
  }

 private:
  static LaunchShape shape_of(const KernelConfig& c, int blocks, int num_operands) {
    return {static_cast<unsigned>(blocks), Tr::kBlock, ring_bytes(c, num_operands)};
  }
};

template <typename T, int kPack>
struct LoopingInstance {
  using Tr = LoopingTraits<T, kPack>;

  static bool matches(const KernelConfig& c) { return c.pairs == 0 && c.vectorised == (kPack > 1); }
  static device::FastDivisor packs_per_half(const Shape& shape) {
    return device::FastDivisor(static_cast<uint32_t>(shape.head_dim / (2 * kPack)));
  }
  static cudaError_t forward(const KernelConfig&, const ForwardParams<T>& p, int blocks, bool,
                             cudaStream_t stream) {
    int available = 0;
    const cudaError_t error = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, available);
    if (error != cudaSuccess) {
      return error;
    }
    const int64_t row = int64_t{p.shape.width} * sizeof(T);
    const bool keep = p.shape.width <= kOnChipWidth && row + kStaticSharedBytes <= available;
    const int64_t shared = keep ? row : 0;
    return launch_kernel(looping_forward_kernel<Tr>, {static_cast<unsigned>(blocks), Tr::kBlock, shared},
                         stream, p, RowsView(p.shape, blocks), packs_per_half(p.shape), keep);
  }
  static cudaError_t backward(const KernelConfig&, const BackwardParams<T>& p, int blocks,
                              cudaStream_t stream) {
    return launch_kernel(looping_backward_kernel<Tr>, {static_cast<unsigned>(blocks), Tr::kBlock}, stream, p,
                         RowsView(p.shape, blocks), packs_per_half(p.shape));
  }
};

struct NoInstance {
  static bool matches(const KernelConfig&) { return false; }
  template <typename... Arguments>
  static cudaError_t forward(Arguments&&...) {
    return cudaErrorNotSupported;
  }
  template <typename... Arguments>
  static cudaError_t backward(Arguments&&...) {
    return cudaErrorNotSupported;
  }
};

template <typename... Instances>
struct KernelTable {
  // Calls `launch` for the first instance that matches; cudaErrorNotSupported where none does.
  template <typename Launch>
  static cudaError_t run(const KernelConfig& config, Launch&& launch) {
    cudaError_t error = cudaErrorNotSupported;
    (void)((Instances::matches(config) && (error = launch(Instances{}), true)) || ...);
    return error;
  }
};

// An instance, or nothing where a thread cannot hold so many pairs of T.
template <typename T, int kThreads, int kPairs, bool kRing>
using InstanceIfHeld =
    std::conditional_t<(kPairs <= max_pairs(sizeof(T))), Instance<T, kThreads, kPairs, kRing>, NoInstance>;

// What choose_config returns: rows that share a block or have one to themselves, loaded ahead
// where there is space.
template <typename T>
using Automatic =
    KernelTable<Instance<T, 4, 1, true>, Instance<T, 8, 1, true>, Instance<T, 16, 1, true>,
                Instance<T, 32, 1, true>, Instance<T, 64, 1, true>, Instance<T, 128, 1, true>,
                Instance<T, 256, 1, true>, Instance<T, 512, 1, true>, Instance<T, 512, 2, true>,
                Instance<T, 512, 2, false>, InstanceIfHeld<T, 512, 4, true>, InstanceIfHeld<T, 512, 4, false>,
                LoopingInstance<T, device::kPackOf<T>>, LoopingInstance<T, 1>>;

// What tuples of the tuning space add to these.
template <typename T>
using Tuned =
    KernelTable<Instance<T, 64, 2, true>, InstanceIfHeld<T, 64, 4, true>, Instance<T, 128, 2, true>,
                InstanceIfHeld<T, 128, 4, true>, Instance<T, 256, 2, true>, InstanceIfHeld<T, 256, 4, true>,
                Instance<T, 64, 1, false>, Instance<T, 64, 2, false>, InstanceIfHeld<T, 64, 4, false>,
                Instance<T, 128, 1, false>, Instance<T, 128, 2, false>, InstanceIfHeld<T, 128, 4, false>,
                Instance<T, 256, 1, false>, Instance<T, 256, 2, false>, InstanceIfHeld<T, 256, 4, false>>;

}  // namespace

template <typename T>
cudaError_t launch_forward(const KernelConfig& config, const ForwardParams<T>& params, int blocks, bool pdl,
                           cudaStream_t stream) {
  const auto run = [&](auto instance) { return instance.forward(config, params, blocks, pdl, stream); };
  const cudaError_t error = Automatic<T>::run(config, run);
  return error == cudaErrorNotSupported ? Tuned<T>::run(config, run) : error;
}

template <typename T>
cudaError_t launch_backward(const KernelConfig& config, const BackwardParams<T>& params, int blocks,
                            cudaStream_t stream) {
  return Automatic<T>::run(config,
                           [&](auto instance) { return instance.backward(config, params, blocks, stream); });
}

template <typename A>
cudaError_t launch_sum(const SumParams<A>& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(params.width, kSumColumns));
  return launch_kernel(sum_blocks_kernel<A>, {blocks, kSumColumns * kSumSlices}, stream, params);
}

}  // namespace htree::rmsnorm_rope
