// From a problem to its launches. Every group shape of quantize_config.h is compiled here.
#pragma once

#include <algorithm>
#include <utility>

#include "ops/fp8/quantize/apply_kernel.cuh"
#include "ops/fp8/quantize/group_kernel.cuh"
#include "ops/fp8/quantize/largest_kernel.cuh"
#include "ops/fp8/quantize/quantize_launch.h"
#include "ops/fp8/quantize/tensor_kernel.cuh"

namespace htree::fp8 {
namespace {

// Groups of one launch: their numbers, and those behind the last block, must stay below 2^31.
constexpr int64_t kMaxGroups = int64_t{1} << 30;
constexpr int kApplyPacks = 4;

template <typename T>
constexpr int kWidePack = 16 / static_cast<int>(sizeof(T));

template <typename T, typename Out>
Out* output_of(const QuantizeArgs<T>& a) {
  if constexpr (std::is_same_v<Out, uint8_t>) {
    return a.codes;
  } else {
    return a.values;
  }
}

template <typename Tr>
cudaError_t launch_groups(const QuantizeArgs<typename Tr::T>& a, cudaStream_t stream) {
  const int64_t groups_per_row = ceil_div(a.shape.cols, a.shape.group);
  const int64_t slice = std::max<int64_t>(1, kMaxGroups / groups_per_row);
  for (int64_t row = 0; row < a.shape.rows; row += slice) {
    const int64_t num_groups = std::min(slice, a.shape.rows - row) * groups_per_row;
    if (num_groups > kMaxGroups) {
      return cudaErrorNotSupported;
    }
    auto* out = output_of<typename Tr::T, typename Tr::Out>(a);
    const GroupParams<typename Tr::T, typename Tr::Out> params{
        .x = a.x + row * a.row_stride,
        .row_stride = a.row_stride,
        .out = out == nullptr ? nullptr : out + row * a.shape.cols,
        .scale = a.scale + row * groups_per_row,
        .num_overflow = a.num_overflow,
        .cols = a.shape.cols,
        .group = a.shape.group,
        .num_groups = static_cast<uint32_t>(num_groups),
        .groups_per_row = device::FastDivisor(static_cast<uint32_t>(groups_per_row))};
    const auto num_blocks = static_cast<unsigned>(ceil_div(num_groups, Tr::kGroupsPerBlock));
    group_kernel<Tr><<<num_blocks, Tr::kBlock, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

// Tries shape kIndex of the list and those behind it.
template <typename T, typename Emit, int kPack, int kIndex = 0>
cudaError_t launch_group_shape(const GroupConfig& config, const QuantizeArgs<T>& a, cudaStream_t stream) {
  constexpr GroupShapes kShapes = kPack > 1 ? kPackShapes : kElementShapes;
  if constexpr (kIndex == kNumGroupShapes || kShapes.threads[kIndex % kNumGroupShapes] == 0) {
    return cudaErrorNotSupported;
  } else {
    constexpr int kThreads = kShapes.threads[kIndex];
    constexpr int kPacks = kShapes.packs[kIndex];
    if (config.threads == kThreads && config.packs == kPacks) {
      return launch_groups<GroupTraits<T, Emit, kThreads, kPacks, kPack>>(a, stream);
    }
    return launch_group_shape<T, Emit, kPack, kIndex + 1>(config, a, stream);
  }
}

// The largest magnitudes of the problem's groups into a.partial.
template <typename T, int kPack>
cudaError_t launch_largest(const QuantizeArgs<T>& a, int64_t num_splits, cudaStream_t stream) {
  const MatrixShape& s = a.shape;
  const int64_t total = num_scales(s);
  if (s.layout == ScaleLayout::kColumns) {
    const int64_t num_tiles = ceil_div(s.cols, kColumnLanes * kPack);
    const ColumnParams<T> params{.x = a.x,
                                 .cols = s.cols,
                                 .group = s.group,
                                 .length = s.length,
                                 .groups_per_matrix = static_cast<uint32_t>(ceil_div(s.length, s.group)),
                                 .num_groups = static_cast<uint32_t>(total / s.cols),
                                 .num_splits = static_cast<uint32_t>(num_splits),
                                 .num_tiles = static_cast<uint32_t>(num_tiles),
                                 .partial = a.partial};
    const auto num_blocks = static_cast<unsigned>(num_tiles * num_splits * (total / s.cols));
    largest_column_kernel<T, kPack><<<num_blocks, dim3(kColumnLanes, kColumnRows), 0, stream>>>(params);
    return cudaGetLastError();
  }
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
  largest_kernel<Tr><<<static_cast<unsigned>(total * num_splits), Tr::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename Op, int kPack, typename Args>
cudaError_t launch_apply(const Args& a, typename Op::Out* out, const typename Op::Out* dy, int* num_overflow,
                         cudaStream_t stream) {
  const ApplyParams<typename Op::In, typename Op::Out, kPack> params{
      .x = a.x,
      .dy = dy,
      .out = out,
      .scale = a.scale,
      .num_overflow = num_overflow,
      .index = MatrixIndex<kPack>(a.shape, a.row_stride)};
  const int64_t num_blocks = ceil_div(params.index.num_packs(), kApplyThreads * kApplyPacks);
  apply_kernel<Op, kApplyPacks, kPack>
      <<<static_cast<unsigned>(num_blocks), kApplyThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename T, typename Emit, int kPack>
cudaError_t launch_tensor(const QuantizeArgs<T>& a, int64_t num_partials, cudaStream_t stream) {
  // 32 registers: all 2048 threads of a multiprocessor
  using Tr = TensorTraits<T, Emit, 512, 2, kPack, std::is_same_v<Emit, EmitCodes> ? 4 : 3>;
  const int64_t num_packs = a.shape.cols / kPack;
  const TensorParams<T, typename Tr::Out> params{.x = a.x,
                                                 .out = output_of<T, typename Tr::Out>(a),
                                                 .partial = a.partial,
                                                 .scale = a.scale,
                                                 .num_overflow = a.num_overflow,
                                                 .num_packs = num_packs,
                                                 .num_partials = static_cast<int>(num_partials)};
  tensor_kernel<Tr>
      <<<static_cast<unsigned>(ceil_div(num_packs, Tr::kTile)), Tr::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename T>
cudaError_t finish_scale(const QuantizeArgs<T>& a, int64_t num_splits, cudaStream_t stream) {
  const int64_t total = num_scales(a.shape);
  const int64_t num_blocks = ceil_div(total, kFinishThreads / device::kWarpSize);
  finish_scale_kernel<T><<<static_cast<unsigned>(num_blocks), kFinishThreads, 0, stream>>>(
      a.partial, a.scale, static_cast<uint32_t>(num_splits), total);
  return cudaGetLastError();
}

#define HTREE_RETURN_IF_ERROR(call)        \
  if (const cudaError_t error = (call); error != cudaSuccess) { \
    return error;                          \
  }

template <typename T, typename Emit, int kPack>
cudaError_t quantize_packs(const QuantizeArgs<T>& a, cudaStream_t stream) {
  constexpr bool kEmits = !std::is_same_v<Emit, EmitNothing>;
  const LargestConfig largest = choose_largest_config(a.shape, kPack, a.num_processors);
  const bool is_tensor = a.shape.layout == ScaleLayout::kTensor;
  if (a.num_overflow != nullptr && (a.is_scale_given || !is_tensor)) {
    HTREE_RETURN_IF_ERROR(cudaMemsetAsync(a.num_overflow, 0, sizeof(int), stream));
  }
  if (!a.is_scale_given) {
    if (largest.num_splits == 0) {
      return launch_group_shape<T, Emit, kPack>(choose_group_config(a.shape.group, kPack), a, stream);
    }
    HTREE_RETURN_IF_ERROR((launch_largest<T, kPack>(a, largest.num_splits, stream)));
    if constexpr (kEmits) {
      if (is_tensor) {
        return launch_tensor<T, Emit, kPack>(a, largest.num_partials, stream);
      }
    }
    HTREE_RETURN_IF_ERROR(finish_scale(a, largest.num_splits, stream));
  }
  if constexpr (kEmits) {
    using Op = EncodeGiven<T, Emit>;
    return launch_apply<Op, kPack>(a, output_of<T, typename Op::Out>(a), nullptr, a.num_overflow, stream);
  }
  return cudaSuccess;
}

#undef HTREE_RETURN_IF_ERROR

}  // namespace

template <typename T>
cudaError_t launch_quantize(const QuantizeArgs<T>& a, cudaStream_t stream) {
  const auto with_pack = [&](auto emit) {
    using Emit = decltype(emit);
    return a.pack > 1 ? quantize_packs<T, Emit, kWidePack<T>>(a, stream)
                      : quantize_packs<T, Emit, 1>(a, stream);
  };
  if (a.codes != nullptr) {
    return with_pack(EmitCodes{});
  }
  return a.values != nullptr ? with_pack(EmitValues{}) : with_pack(EmitNothing{});
}

template <typename T>
cudaError_t launch_dequantize(const ApplyArgs<uint8_t, T>& a, cudaStream_t stream) {
  return a.pack > 1 ? launch_apply<Decode<T>, kWidePack<T>>(a, a.out, nullptr, nullptr, stream)
                    : launch_apply<Decode<T>, 1>(a, a.out, nullptr, nullptr, stream);
}

template <typename T>
cudaError_t launch_fake_backward(const ApplyArgs<T, T>& a, cudaStream_t stream) {
  return a.pack > 1 ? launch_apply<RoundBackward<T>, kWidePack<T>>(a, a.out, a.dy, nullptr, stream)
                    : launch_apply<RoundBackward<T>, 1>(a, a.out, a.dy, nullptr, stream);
}

}  // namespace htree::fp8
