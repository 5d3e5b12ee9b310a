// Configuration to kernel: every configuration that the choice can return is listed here, and nothing else.
#pragma once

#include "ops/rmsnorm_rope/looping.cuh"
#include "ops/rmsnorm_rope/rmsnorm_rope_launch.h"

namespace htree::rmsnorm_rope {
namespace {

constexpr int64_t kFreeSharedBytes = 48 * 1024 - kStaticSharedBytes;

// More than 48 KiB of shared memory in all must be asked for, per kernel and device.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, int64_t bytes) {
  if (bytes > kFreeSharedBytes) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }
}

template <typename T, int kThreads, int kPairs, bool kRing>
struct Instance {
  using Tr = Traits<T, kThreads, kPairs, kRing>;

  static bool matches(const KernelConfig& c) {
    return c.vectorised && c.threads == kThreads && c.pairs == kPairs && (c.stages > 1) == kRing;
  }
  static void forward(const KernelConfig& c, const ForwardParams<T>& p, int blocks, cudaStream_t stream) {
    const int64_t shared = ring_bytes(c, 1);
    allow_shared_memory(forward_kernel<Tr>, shared);
    forward_kernel<Tr><<<blocks, Tr::kBlock, shared, stream>>>(
        p, RowsView(p.shape, blocks), LaneGrid(p.shape, kThreads, Tr::kPack), c.stages);
  }
  static void backward(const KernelConfig& c, const BackwardParams<T>& p, int blocks, cudaStream_t stream) {
    const int64_t shared = ring_bytes(c, 2);
    allow_shared_memory(backward_kernel<Tr>, shared);
    backward_kernel<Tr><<<blocks, Tr::kBlock, shared, stream>>>(
        p, RowsView(p.shape, blocks), LaneGrid(p.shape, kThreads, Tr::kPack), c.stages);
  }
};

template <typename T, int kPack>
struct LoopingInstance {
  using Tr = LoopingTraits<T, kPack>;

  static bool matches(const KernelConfig& c) { return c.pairs == 0 && c.vectorised == (kPack > 1); }
  static device::FastDivisor packs_per_half(const Shape& shape) {
    return device::FastDivisor(static_cast<uint32_t>(shape.head_dim / (2 * kPack)));
  }
  static void forward(const KernelConfig&, const ForwardParams<T>& p, int blocks, cudaStream_t stream) {
    int device = 0;
    int available = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const int64_t row = int64_t{p.shape.width} * sizeof(T);
    const bool keep = p.shape.width <= kOnChipWidth && row + kStaticSharedBytes <= available;
    const int64_t shared = keep ? row : 0;
    allow_shared_memory(looping_forward_kernel<Tr>, shared);
    looping_forward_kernel<Tr>
        <<<blocks, Tr::kBlock, shared, stream>>>(p, RowsView(p.shape, blocks), packs_per_half(p.shape), keep);
  }
  static void backward(const KernelConfig&, const BackwardParams<T>& p, int blocks, cudaStream_t stream) {
    looping_backward_kernel<Tr>
        <<<blocks, Tr::kBlock, 0, stream>>>(p, RowsView(p.shape, blocks), packs_per_half(p.shape));
  }
};

struct NoInstance {
  static bool matches(const KernelConfig&) { return false; }
  template <typename... Arguments>
  static void forward(Arguments&&...) {}
  template <typename... Arguments>
  static void backward(Arguments&&...) {}
};

template <typename... Instances>
struct KernelTable {
  // Runs `launch` of the first instance that matches.
  template <typename Launch>
  static bool run(const KernelConfig& config, Launch&& launch) {
    return ((Instances::matches(config) && (launch(Instances{}), true)) || ...);
  }
};

// Nothing where a thread cannot hold so many pairs of T.
template <typename T, int kThreads, int kPairs, bool kRing>
using InstanceIfHeld =
    std::conditional_t<(kPairs <= max_pairs(sizeof(T))), Instance<T, kThreads, kPairs, kRing>, NoInstance>;

// What choose_config returns: rows that share a block or have one, loading ahead where there is room.
template <typename T>
using Automatic =
    KernelTable<Instance<T, 4, 1, true>, Instance<T, 8, 1, true>, Instance<T, 16, 1, true>,
                Instance<T, 32, 1, true>, Instance<T, 64, 1, true>, Instance<T, 128, 1, true>,
                Instance<T, 256, 1, true>, Instance<T, 512, 1, true>, Instance<T, 512, 2, true>,
                Instance<T, 512, 2, false>, InstanceIfHeld<T, 512, 4, true>, InstanceIfHeld<T, 512, 4, false>,
                LoopingInstance<T, device::kPackOf<T>>, LoopingInstance<T, 1>>;

// What tuples of the tuning space add.
template <typename T>
using Tuned =
    KernelTable<Instance<T, 64, 2, true>, InstanceIfHeld<T, 64, 4, true>, Instance<T, 128, 2, true>,
                InstanceIfHeld<T, 128, 4, true>, Instance<T, 256, 2, true>, InstanceIfHeld<T, 256, 4, true>,
                Instance<T, 64, 1, false>, Instance<T, 64, 2, false>, InstanceIfHeld<T, 64, 4, false>,
                Instance<T, 128, 1, false>, Instance<T, 128, 2, false>, InstanceIfHeld<T, 128, 4, false>,
                Instance<T, 256, 1, false>, Instance<T, 256, 2, false>, InstanceIfHeld<T, 256, 4, false>>;

}  // namespace
}  // namespace htree::rmsnorm_rope
