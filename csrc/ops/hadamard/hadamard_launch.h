// Torch-free launchers of the family, one set per storage type; csrc/instances.py lists them.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/hadamard/hadamard_params.h"

namespace htree::hadamard {

template <typename T>
struct ScalarOf {
  using type = float;
};
template <>
struct ScalarOf<double> {
  using type = double;
};
template <typename T>
using Params = TransformParams<T, typename ScalarOf<T>::type>;

constexpr int kMaxShortLog2 = 7;

// Launch on `stream`; the errors are those of the runtime. Short rows have up to 2^kMaxShortLog2
// elements, long ones more. cudaErrorNotSupported: the length is not compiled, or the device lacks the
// shared memory for it.
template <typename T>
cudaError_t launch_short(const Params<T>& params, cudaStream_t stream);
template <typename T>
cudaError_t launch_long(const Params<T>& params, cudaStream_t stream);

// The last stage of a row for which is_split() holds: sums and differences of the halves of y, in place,
// times the scale.
template <typename T>
cudaError_t launch_join_halves(const Params<T>& params, cudaStream_t stream);

}  // namespace htree::hadamard
