// launch_vector for one storage type.
#pragma once

#include <algorithm>

#include "host/launch_cluster.h"
#include "ops/gated_mlp/gated_mlp_vector.cuh"

namespace htree::gated_mlp {
namespace {

template <class Tr>
cudaError_t launch_vectors(const ForwardParams<typename Tr::T>& p, cudaStream_t stream) {
  int device = 0;
  int processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) {
    return error;
  }
  const int64_t blocks = std::min<int64_t>(processors, (p.sizes.inner + Tr::kWarps - 1) / Tr::kWarps);
  return launch_cluster(vector_kernel<Tr>, dim3(static_cast<unsigned>(blocks)), Tr::kThreads,
                        static_cast<int>(Tr::shared_bytes(p.sizes.hidden)), 1, stream, p);
}

template <typename T, Activation kActivation>
cudaError_t launch_vector_rows(const ForwardParams<T>& p, const KernelConfig& c, cudaStream_t stream) {
  static_assert(VectorTraits<T, kActivation, 4>::kStages == 3);
  switch (vector_fits(p.sizes.rows, p.sizes.hidden) && c.stages == 3 ? c.rows : 0) {
    case 1:
      return launch_vectors<VectorTraits<T, kActivation, 1>>(p, stream);
    case 2:
      return launch_vectors<VectorTraits<T, kActivation, 2>>(p, stream);
    case 4:
      return launch_vectors<VectorTraits<T, kActivation, 4>>(p, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace

template <typename T>
cudaError_t launch_vector(const ForwardParams<T>& p, const KernelConfig& config, cudaStream_t stream) {
  return p.activation == Activation::kSilu ? launch_vector_rows<T, Activation::kSilu>(p, config, stream)
                                           : launch_vector_rows<T, Activation::kGelu>(p, config, stream);
}

}  // namespace htree::gated_mlp
