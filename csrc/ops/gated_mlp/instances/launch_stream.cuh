// launch_stream for one storage type.
#pragma once

#include "ops/gated_mlp/gated_mlp_stream.cuh"
#include "ops/gated_mlp/instances/launch.cuh"

namespace htree::gated_mlp {
namespace {

template <class Tr>
cudaError_t launch_streams(const ForwardParams<typename Tr::T>& p, cudaStream_t stream) {
  const Sizes& s = p.sizes;
  const StreamMaps maps{
      matrix_map(p.x.data, s.rows, s.hidden, p.x.pitch, Tr::kRows),
      matrix_map(p.gate_weight.data, s.inner, s.hidden, p.gate_weight.pitch, Tr::kColumns),
      matrix_map(p.up_weight.data, s.inner, s.hidden, p.up_weight.pitch, Tr::kColumns),
  };
  const dim3 grid(static_cast<unsigned>((s.inner + Tr::kColumns - 1) / Tr::kColumns),
                  static_cast<unsigned>((s.rows + Tr::kRows - 1) / Tr::kRows));
  if (grid.y > 65535) {
    return cudaErrorNotSupported;
  }
  return launch_cluster(stream_kernel<Tr>, grid, Tr::kThreads, Tr::kSharedBytes, 1, stream, maps, p.out, s,
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

}  // namespace htree::gated_mlp
