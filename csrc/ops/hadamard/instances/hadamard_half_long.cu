#include "ops/hadamard/instances/launch.cuh"

namespace htree::hadamard {
template <typename T>
cudaError_t launch_long(const Params<T>& params, cudaStream_t stream) {
  return launch_between<T, 8, 15>(params, stream);
}
template cudaError_t launch_long<__half>(const Params<__half>&, cudaStream_t);
}  // namespace htree::hadamard
