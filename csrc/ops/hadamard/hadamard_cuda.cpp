// CUDA entry point of the hadamard family: parameters, access, slices and launch.
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "host/cuda/device_type.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/hadamard/hadamard.h"
#include "ops/hadamard/hadamard_config.h"
#include "ops/hadamard/hadamard_launch.h"

namespace htree::hadamard {
namespace {

constexpr int kPackBytes = 16;
// Rows of one launch: the numbers of rows, also of those behind the last tile, must stay below 2^31. It is a
// power of two, so that slices of rows that are shorter than a pack start at packs.
constexpr int64_t kMaxRows = int64_t{1} << 30;

template <typename T>
Access access_of(const Problem& problem, const Rows& rows, const T* data,
                 const std::array<int64_t, 3>& strides, int64_t segment_stride) {
  const auto aligned = [](int64_t elements) {
    return elements * static_cast<int64_t>(sizeof(T)) % kPackBytes == 0;
  };
  const bool whole = problem.log2_segment == problem.log2_length;
  if (reinterpret_cast<uintptr_t>(data) % kPackBytes != 0) {
    return Access::kElements;
  }
  if (!aligned(int64_t{1} << problem.log2_segment)) {
    // Rows shorter than a pack: a pack holds several rows where they lie one after another.
    const bool dense = rows.sizes[0] * rows.sizes[1] == 1 &&
                       (rows.sizes[2] == 1 || strides[2] == int64_t{1} << problem.log2_length);
    return whole && dense ? Access::kWhole : Access::kElements;
  }
  if (!std::all_of(strides.begin(), strides.end(), aligned) || !aligned(segment_stride)) {
    return Access::kElements;
  }
  return whole ? Access::kWhole : Access::kSegments;
}

template <typename T>
cudaError_t launch(const Params<T>& params, cudaStream_t stream) {
  if (params.log2_length <= kMaxShortLog2) {
    return launch_short<T>(params, stream);
  }
  if constexpr (std::is_same_v<T, double>) {
    if (is_split(sizeof(T), params.log2_length)) {
      // H_2m = H_2 (x) H_m: transforms both halves of each row, then takes sums and
      // differences of the halves.
      const int half = 1 << (params.log2_length - 1);
      const int64_t segment = half >> params.log2_segment;
      Params<T> part = params;
      part.log2_length -= 1;
      part.log2_segment = std::min(part.log2_segment, part.log2_length);
      part.scale = 1.0;
      for (int i = 0; i < 2; ++i) {
        const cudaError_t error = launch_long<T>(part, stream);
        if (error != cudaSuccess) {
          return error;
        }
        part.x.data += segment == 0 ? half : segment * params.x.segment_stride;
        part.y.data += segment == 0 ? half : segment * params.y.segment_stride;
      }
      return launch_join_halves(params, stream);
    }
  }
  return launch_long<T>(params, stream);
}

// Launches slices of at most kMaxRows rows.
template <typename T>
void launch_slices(Params<T> params, cudaStream_t stream) {
  int64_t* sizes = params.sizes;
  const int dim = sizes[0] > 1 ? 0 : sizes[1] > 1 ? 1 : 2;
  const int64_t inside = dim == 0 ? sizes[1] * sizes[2] : dim == 1 ? sizes[2] : 1;
  const int64_t num = sizes[dim];
  if (inside > kMaxRows) {
    sizes[dim] = 1;
    for (int64_t i = 0; i < num; ++i) {
      launch_slices(params, stream);
      params.x.data += params.x.strides[dim];
      params.y.data += params.y.strides[dim];
    }
    return;
  }
  const int64_t slice = kMaxRows / inside;
  for (int64_t first = 0; first < num; first += slice) {
    sizes[dim] = std::min(slice, num - first);
    const cudaError_t error = launch<T>(params, stream);
    TORCH_CHECK_NOT_IMPLEMENTED(error != cudaErrorNotSupported, "hadamard_transform: n = 2^",
                                params.log2_length,
                                " needs more shared memory per block than this device has");
    C10_CUDA_CHECK(error);
    params.x.data += slice * params.x.strides[dim];
    params.y.data += slice * params.y.strides[dim];
  }
}

}  // namespace

void transform_cuda(const Problem& problem, const Rows& rows, const at::Tensor& x, const at::Tensor& y) {
  const LaunchScope scope(x);
  dispatch_dtype("hadamard_transform", x.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = DeviceType<typename decltype(tag)::type>;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(y.mutable_data_ptr());
    const auto& xs = rows.x_strides;
    const auto& ys = rows.y_strides;
    const Params<T> params{
        .x = {from,
              {xs[0], xs[1], xs[2]},
              rows.x_segment_stride,
              access_of(problem, rows, from, xs, rows.x_segment_stride)},
        .y = {to,
              {ys[0], ys[1], ys[2]},
              rows.y_segment_stride,
              access_of(problem, rows, to, ys, rows.y_segment_stride)},
        .sizes = {rows.sizes[0], rows.sizes[1], rows.sizes[2]},
        .log2_length = problem.log2_length,
        .log2_segment = problem.log2_segment,
        .scale = static_cast<typename ScalarOf<T>::type>(problem.scale),
    };
    launch_slices<T>(params, scope.stream());
  });
}

}  // namespace htree::hadamard
