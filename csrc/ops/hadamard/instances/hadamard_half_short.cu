#include "ops/hadamard/instances/launch.cuh"

namespace htree::hadamard {
template <typename T>
cudaError_t launch_short(const Params<T>& params, cudaStream_t stream) {
  return launch_between<T, 0, 7>(params, stream);
}
template cudaError_t launch_short<__half>(const Params<__half>&, cudaStream_t);
}  // namespace htree::hadamard
