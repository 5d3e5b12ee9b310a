// From the configuration to the kernel: every configuration that choose_config can return is listed
// here, and nothing else.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>

#include "host/cuda/kernel_launch.h"
#include "ops/causal_softmax/causal_softmax.cuh"
#include "ops/causal_softmax/causal_softmax_launch.h"
#include "ops/causal_softmax/causal_softmax_streaming.cuh"

namespace htree::causal_softmax {
namespace {

RowsView rows_of(const Shape& shape) {
  return {device::FastDivisor(static_cast<uint32_t>(shape.rows)),
          static_cast<uint32_t>(shape.batch * shape.rows)};
}

template <typename Tr>
unsigned blocks_of(const RowsView& rows) {
  return (rows.num_rows + Tr::kRowsPerBlock - 1) / Tr::kRowsPerBlock;
}

// How many blocks of a kernel each device runs at one time, remembered by device.
using ResidentBlocks = std::array<std::atomic<int>, 64>;

template <typename Kernel>
cudaError_t resident_blocks(Kernel* kernel, int block, int shared, ResidentBlocks& known, int& result) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return error;
  }
  std::atomic<int>& slot = known[device % known.size()];
  result = slot.load(std::memory_order_relaxed);
  if (result > 0) {
    return cudaSuccess;
  }
  int per_processor = 0;
  int num_processors = 0;
  cudaError_t error = allow_shared_bytes(kernel, shared);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, block, shared);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    result = std::max(1, per_processor) * num_processors;
    slot.store(result, std::memory_order_relaxed);
  }
  return error;
}

template <typename T, int kThreads, int kRowsPerBlock, int kElems, bool kVectorised>
struct Instance {
  using Tr = Traits<T, kThreads, kRowsPerBlock, kElems, kVectorised>;

  static bool matches(const KernelConfig& c) {
    return c.stages == 0 && c.threads == kThreads && c.elems_per_thread == kElems &&
           c.vectorised == kVectorised;
  }
  static cudaError_t run(const ForwardParams<T>& params, cudaStream_t stream) {
    const RowsView rows = rows_of(params.shape);
    if constexpr (kElems == 0) {
      return launch_kernel(looping_forward_kernel<Tr>, {blocks_of<Tr>(rows), Tr::kBlock}, stream, params,
                           rows);
    } else {
      return launch_kernel(forward_kernel<Tr>, {blocks_of<Tr>(rows), Tr::kBlock}, stream, params, rows);
    }
  }
  static cudaError_t run(const BackwardParams<T>& params, cudaStream_t stream) {
    const RowsView rows = rows_of(params.shape);
    if constexpr (kElems == 0) {
      return launch_kernel(looping_backward_kernel<Tr>, {blocks_of<Tr>(rows), Tr::kBlock}, stream, params,
                           rows);
    } else {
      return launch_kernel(backward_kernel<Tr>, {blocks_of<Tr>(rows), Tr::kBlock}, stream, params, rows);
    }
  }
};

template <typename T, int kThreads, int kRowsPerBlock, int kPacks, int kStages>
struct Streaming {
  using Tr = StreamTraits<T, kThreads, kRowsPerBlock, kPacks * device::kPackOf<T>, kStages>;

  static bool matches(const KernelConfig& c) {
    return c.stages == kStages && c.threads == kThreads && c.elems_per_thread == kPacks * Tr::kPackElems;
  }
  template <typename Params>
  static cudaError_t run(const Params& params, cudaStream_t stream) {
    constexpr bool kForward = std::is_same_v<Params, ForwardParams<T>>;
    constexpr int kShared = (kForward ? 1 : 2) * kStages * kPacks * Tr::kBlock * kPackBytes;
    static ResidentBlocks known{};
    const RowsView rows = rows_of(params.shape);
    int resident = 0;
    const auto launch = [&](auto* kernel) {
      const cudaError_t error = resident_blocks(kernel, Tr::kBlock, kShared, known, resident);
      if (error != cudaSuccess) {
        return error;
      }
      const unsigned blocks = std::min(blocks_of<Tr>(rows), static_cast<unsigned>(resident));
      return launch_kernel(kernel, {blocks, Tr::kBlock, kShared}, stream, params, rows);
    };
    if constexpr (kForward) {
      return launch(streaming_forward_kernel<Tr>);
    } else {
      return launch(streaming_backward_kernel<Tr>);
    }
  }
};

template <typename... Instances>
struct Table {
  // Runs the first instance that matches; cudaErrorNotSupported where none does.
  template <typename Params>
  static cudaError_t run(const KernelConfig& config, const Params& params, cudaStream_t stream) {
    cudaError_t error = cudaErrorNotSupported;
    (void)((Instances::matches(config) && (error = Instances::run(params, stream), true)) || ...);
    return error;
  }
};

// A thread holds 32 elements of the half types or 16 of the wider ones. Both 512 and 1024 threads exist for
// every length, because `block_size` may ask for either.
template <typename T, bool kVectorised, int kHeld = sizeof(T) == 2 ? 32 : 16>
using BlockPerRow =
    Table<Instance<T, 32, kRowsPerBlock, 8, kVectorised>, Instance<T, 32, kRowsPerBlock, 16, kVectorised>,
          Instance<T, 32, kRowsPerBlock, kHeld, kVectorised>, Instance<T, 64, 1, kHeld, kVectorised>,
          Instance<T, 128, 1, kHeld, kVectorised>, Instance<T, 256, 1, kHeld, kVectorised>,
          Instance<T, 512, 1, 16, kVectorised>, Instance<T, 512, 1, 32, kVectorised>,
          Instance<T, 1024, 1, 16, kVectorised>, Instance<T, 1024, 1, 32, kVectorised>,
          Instance<T, 512, 1, 0, kVectorised>, Instance<T, 1024, 1, 0, kVectorised>>;

template <typename T, bool kBackward, int kSize = sizeof(T)>
struct StreamedRows : Table<> {};
template <typename T>
struct StreamedRows<T, /*kBackward=*/false, 2>
    : Table<Streaming<T, 256, 1, 4, 2>, Streaming<T, 512, 1, 4, 2>> {};
template <typename T>
struct StreamedRows<T, /*kBackward=*/true, 2>
    : Table<Streaming<T, 32, kRowsPerBlock, 1, 2>, Streaming<T, 32, kRowsPerBlock, 2, 2>,
            Streaming<T, 32, kRowsPerBlock, 4, 2>, Streaming<T, 32, kRowsPerBlock, 8, 2>,
            Streaming<T, 128, 1, 4, 2>, Streaming<T, 256, 1, 4, 2>, Streaming<T, 512, 1, 4, 1>,
            Streaming<T, 1024, 1, 4, 1>> {};
template <typename T>
struct StreamedRows<T, /*kBackward=*/true, 4>
    : Table<Streaming<T, 32, kRowsPerBlock, 1, 2>, Streaming<T, 32, kRowsPerBlock, 2, 2>,
            Streaming<T, 32, kRowsPerBlock, 4, 2>, Streaming<T, 64, 1, 4, 2>, Streaming<T, 128, 1, 4, 2>,
            Streaming<T, 256, 1, 4, 2>, Streaming<T, 512, 1, 4, 1>, Streaming<T, 1024, 1, 4, 1>> {};

template <typename T, typename Params>
cudaError_t run_compiled(const KernelConfig& config, const Params& params, cudaStream_t stream) {
  if (config.stages > 0) {
    return StreamedRows<T, std::is_same_v<Params, BackwardParams<T>>>::run(config, params, stream);
  }
  return config.vectorised ? BlockPerRow<T, true>::run(config, params, stream)
                           : BlockPerRow<T, false>::run(config, params, stream);
}

}  // namespace

template <typename T>
cudaError_t launch_forward(const KernelConfig& config, const ForwardParams<T>& params, cudaStream_t stream) {
  return run_compiled<T>(config, params, stream);
}

template <typename T>
cudaError_t launch_backward(const KernelConfig& config, const BackwardParams<T>& params,
                            cudaStream_t stream) {
  return run_compiled<T>(config, params, stream);
}

}  // namespace htree::causal_softmax
