// From a problem to its launches. Every chunk shape of quantize_config.h is compiled here.
#pragma once

#include <algorithm>
#include <utility>

#include "host/cuda/kernel_launch.h"
#include "ops/fp8/quantize/chunk_kernel.cuh"
#include "ops/fp8/quantize/column_kernel.cuh"
#include "ops/fp8/quantize/largest_kernel.cuh"
#include "ops/fp8/quantize/quantize_launch.h"

namespace htree::fp8 {
namespace {

// Chunks of one launch: their numbers, also of those behind the last block, must stay below 2^31.
constexpr int64_t kMaxChunks = int64_t{1} << 30;
// From so many scales on, each is finished by one thread.
constexpr int64_t kMinThreadEach = 4096;

template <typename T>
constexpr int kWidePack = 16 / static_cast<int>(sizeof(T));

// What every launch needs of a call.
template <typename In, typename Out>
struct Operands {
  const In* x;
  const Out* dy;
  Out* out;
  float* scale;
  int* num_overflow;
  const uint32_t* partial;
  int num_partials;
  int64_t row_stride;
  const MatrixShape& shape;
  int num_processors;
  int most_pdl_blocks;
};

template <typename T, typename Out>
Operands<T, Out> operands_of(const QuantizeArgs<T>& a, int64_t num_partials) {
  Out* out = nullptr;
  if constexpr (std::is_same_v<Out, uint8_t>) {
    out = a.codes;
  } else {
    out = a.values;
  }
  return {a.x,
          nullptr,
          out,
          a.scale,
          a.num_overflow,
          a.partial,
          static_cast<int>(num_partials),
          a.row_stride,
          a.shape,
          a.num_processors,
          a.most_pdl_blocks};
}

// Small launches use programmatic dependent launch.
template <typename Args>
LaunchShape with_pdl(LaunchShape shape, const Args& a) {
  shape.pdl = shape.grid.x <= static_cast<unsigned>(a.most_pdl_blocks);
  return shape;
}

__global__ void zero_kernel(int* counter) {
  device::pdl_launch_and_wait();
  *counter = 0;
}

template <typename T>
T* advance(T* data, int64_t elements) {
  return data == nullptr ? nullptr : data + elements;
}

template <typename Tr>
cudaError_t launch_chunks(const Operands<typename Tr::In, typename Tr::Out>& o, cudaStream_t stream) {
  const MatrixShape& s = o.shape;
  const int64_t groups_per_row = ceil_div(s.cols, s.group);
  const int64_t chunks_per_group = ceil_div(s.group, Tr::kConfig.capacity());
  const int64_t chunks_per_row = groups_per_row * chunks_per_group;
  const int64_t slice = std::max<int64_t>(1, kMaxChunks / chunks_per_row);
  for (int64_t row = 0; row < s.rows; row += slice) {
    const int64_t num_chunks = std::min(slice, s.rows - row) * chunks_per_row;
    if (num_chunks > kMaxChunks) {
      return cudaErrorNotSupported;
    }
    const ChunkParams<typename Tr::In, typename Tr::Out> params{
        .x = o.x + row * o.row_stride,
        .row_stride = o.row_stride,
        .dy = advance(o.dy, row * s.cols),
        .out = advance(o.out, row * s.cols),
        .scale = o.scale + row * groups_per_row,
        .num_overflow = o.num_overflow,
        .partial = o.partial,
        .num_partials = o.num_partials,
        .cols = s.cols,
        .group = s.group,
        .num_chunks = static_cast<uint32_t>(num_chunks),
        .chunks_per_group = device::FastDivisor(static_cast<uint32_t>(chunks_per_group)),
        .groups_per_row = device::FastDivisor(static_cast<uint32_t>(groups_per_row))};
    const auto num_blocks = static_cast<unsigned>(ceil_div(num_chunks, Tr::kChunksPerBlock));
    const cudaError_t error =
        launch_kernel(chunk_kernel<Tr>, with_pdl({num_blocks, Tr::kBlock}, o), stream, params);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

// Tries shape kIndex of the list and those after it.
template <typename Job, ScaleSource kSource, int kPack, int kIndex = 0>
cudaError_t launch_chunk_shape(const ChunkConfig& config,
                               const Operands<typename Job::In, typename Job::Out>& o, cudaStream_t stream) {
  constexpr ChunkShapes kShapes = kPack > 1 ? kPackShapes : kElementShapes;
  constexpr int kThreads = kShapes.threads[kIndex % kNumChunkShapes];
  constexpr int kPacks = kShapes.packs[kIndex % kNumChunkShapes];
  constexpr bool kIsCompiled = kSource == ScaleSource::kChunk || kThreads <= kMaxSharedThreads;
  if constexpr (kIndex == kNumChunkShapes || kThreads == 0 || !kIsCompiled) {
    return cudaErrorNotSupported;
  } else {
    if (config.threads == kThreads && config.packs == kPacks) {
      return launch_chunks<ChunkTraits<Job, kSource, kThreads, kPacks, kPack>>(o, stream);
    }
    return launch_chunk_shape<Job, kSource, kPack, kIndex + 1>(config, o, stream);
  }
}

template <int kPack>
ColumnGrid column_grid(const MatrixShape& s, int num_processors) {
  const int64_t num_groups = num_scales(s) / s.cols;
  const int64_t num_tiles = ceil_div(s.cols, kColumnLanes * kPack);
  return {.cols = s.cols,
          .group = s.group,
          .length = s.length,
          .groups_per_matrix = static_cast<uint32_t>(ceil_div(s.length, s.group)),
          .num_groups = static_cast<uint32_t>(num_groups),
          .num_splits =
              static_cast<uint32_t>(choose_column_splits(num_tiles * num_groups, s.group, num_processors)),
          .num_tiles = static_cast<uint32_t>(num_tiles)};
}

LaunchShape shape_of(const ColumnGrid& grid) {
  return {.grid = grid.num_tiles * grid.num_splits * grid.num_groups,
          .threads = kColumnLanes,
          .thread_rows = kColumnRows};
}

// Launches an elementwise job whose scale is in memory.
template <typename Job, int kPack>
cudaError_t launch_known(const Operands<typename Job::In, typename Job::Out>& o, cudaStream_t stream) {
  if (o.shape.layout != ScaleLayout::kColumns) {
    if constexpr (kPack > 1 && kIsDecode<Job>) {
      const ChunkConfig config = choose_decode_config(o.shape, kPack, o.num_processors);
      if (config.threads == kDecodeThreads && config.packs == kDecodePacks) {
        using Tr = ChunkTraits<Job, ScaleSource::kMemory, kDecodeThreads, kDecodePacks, kPack>;
        return launch_chunks<Tr>(o, stream);
      }
      return launch_chunk_shape<Job, ScaleSource::kMemory, kPack>(config, o, stream);
    } else {
      return launch_chunk_shape<Job, ScaleSource::kMemory, kPack>(choose_chunk_config(o.shape.group, kPack),
                                                                  o, stream);
    }
  }
  const ColumnParams<typename Job::In, typename Job::Out> params{
      .x = o.x,
      .dy = o.dy,
      .out = o.out,
      .scale = o.scale,
      .num_overflow = o.num_overflow,
      .grid = column_grid<kPack>(o.shape, o.num_processors)};
  return launch_kernel(column_kernel<Job, kPack>, with_pdl(shape_of(params.grid), o), stream, params);
}

// Finds the largest magnitudes of the groups and writes them to a.partial, or writes the scales at once where
// each group has one block.
template <typename T, int kPack>
cudaError_t launch_largest(const QuantizeArgs<T>& a, int64_t num_splits, cudaStream_t stream) {
  const MatrixShape& s = a.shape;
  if (s.layout == ScaleLayout::kColumns) {
    const LargestColumnParams<T> params{.x = a.x,
                                        .grid = column_grid<kPack>(s, a.num_processors),
                                        .partial = a.partial,
                                        .scale = num_splits == 1 ? a.scale : nullptr};
    return launch_kernel(largest_column_kernel<T, kPack>, with_pdl(shape_of(params.grid), a), stream, params);
  }
  const int64_t total = num_scales(s);
  using Tr = LargestTraits<T, kLargestThreads, kLargestPacks, kPack>;
  const LargestParams<T> params{.x = a.x,
                                .row_stride = a.row_stride,
                                .cols = s.cols,
                                .group = s.group,
                                .groups_per_row = static_cast<uint32_t>(ceil_div(s.cols, s.group)),
                                .num_groups = static_cast<uint32_t>(total),
                                .num_splits = static_cast<uint32_t>(num_splits),
                                .partial = a.partial,
                                .num_overflow = a.num_overflow};
  const LaunchShape shape{static_cast<unsigned>(total * num_splits), Tr::kThreads};
  return launch_kernel(largest_kernel<Tr>, with_pdl(shape, a), stream, params);
}

template <typename T>
cudaError_t finish_scale(const QuantizeArgs<T>& a, int64_t num_splits, cudaStream_t stream) {
  const int64_t total = num_scales(a.shape);
  const bool warp_each = total < kMinThreadEach;
  const auto num_blocks =
      static_cast<unsigned>(ceil_div(warp_each ? total * device::kWarpSize : total, kFinishThreads));
  const auto splits = static_cast<uint32_t>(num_splits);
  const auto kernel = warp_each ? finish_scale_kernel<T, true> : finish_scale_kernel<T, false>;
  return launch_kernel(kernel, with_pdl({num_blocks, kFinishThreads}, a), stream, a.partial, a.scale, splits,
                       total);
}

template <typename Job, int kPack>
cudaError_t quantize_packs(const QuantizeArgs<typename Job::In>& a, cudaStream_t stream) {
  using T = typename Job::In;
  constexpr bool kWrites = !std::is_same_v<Job, Nothing<T>>;
  const LargestConfig largest = choose_largest_config(a.shape, kPack, a.num_processors);
  const auto operands = operands_of<T, typename Job::Out>(a, largest.num_partials);
  const bool is_tensor = a.shape.layout == ScaleLayout::kTensor;
  cudaError_t error = cudaSuccess;
  if (a.num_overflow != nullptr && (a.is_scale_given || !is_tensor)) {
    error = launch_kernel(zero_kernel, with_pdl({1, 1}, a), stream, a.num_overflow);
  }
  if (!a.is_scale_given && error == cudaSuccess) {
    if (largest.num_splits == 0) {
      return launch_chunk_shape<Job, ScaleSource::kChunk, kPack>(choose_group_config(a.shape.group, kPack),
                                                                 operands, stream);
    }
    error = launch_largest<T, kPack>(a, largest.num_splits, stream);
    if constexpr (kWrites) {
      if (is_tensor && error == cudaSuccess) {
        constexpr ChunkConfig kConfig = choose_chunk_config(int64_t{1} << 40, kPack);
        return launch_chunks<ChunkTraits<Job, ScaleSource::kPartials, kConfig.threads, kConfig.packs, kPack>>(
            operands, stream);
      }
    }
    const bool is_finished = a.shape.layout == ScaleLayout::kColumns && largest.num_splits == 1;
    if (!is_finished && error == cudaSuccess) {
      error = finish_scale(a, largest.num_splits, stream);
    }
  }
  if constexpr (kWrites) {
    if (error == cudaSuccess) {
      error = launch_known<Job, kPack>(operands, stream);
    }
  }
  return error;
}

template <typename Job, typename Args>
cudaError_t apply_packs(const Args& a, cudaStream_t stream) {
  using Out = typename Job::Out;
  const Operands<typename Job::In, Out> operands{a.x,
                                                 a.dy,
                                                 a.out,
                                                 const_cast<float*>(a.scale),
                                                 nullptr,
                                                 nullptr,
                                                 0,
                                                 a.row_stride,
                                                 a.shape,
                                                 a.num_processors,
                                                 a.most_pdl_blocks};
  return a.pack > 1 ? launch_known<Job, kWidePack<Out>>(operands, stream)
                    : launch_known<Job, 1>(operands, stream);
}

}  // namespace

template <typename T>
cudaError_t launch_quantize(const QuantizeArgs<T>& a, cudaStream_t stream) {
  const auto with_pack = [&](auto job) {
    using Job = decltype(job);
    return a.pack > 1 ? quantize_packs<Job, kWidePack<T>>(a, stream) : quantize_packs<Job, 1>(a, stream);
  };
  if (a.codes != nullptr) {
    return with_pack(Encode<T>{});
  }
  return a.values != nullptr ? with_pack(Round<T>{}) : with_pack(Nothing<T>{});
}

template <typename T>
cudaError_t launch_dequantize(const ApplyArgs<uint8_t, T>& a, cudaStream_t stream) {
  return apply_packs<Decode<T>>(a, stream);
}

template <typename T>
cudaError_t launch_fake_backward(const ApplyArgs<T, T>& a, cudaStream_t stream) {
  return apply_packs<RoundBackward<T>>(a, stream);
}

}  // namespace htree::fp8
