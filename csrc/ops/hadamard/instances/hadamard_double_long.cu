#include "ops/hadamard/instances/launch.cuh"

namespace htree::hadamard {
template <typename T>
cudaError_t launch_long(const Params<T>& params, cudaStream_t stream) {
  return launch_between<T, 8, 14>(params, stream);
}
template cudaError_t launch_long<double>(const Params<double>&, cudaStream_t);

cudaError_t launch_join_halves(const Params<double>& params, cudaStream_t stream) {
  const RowNumbers rows = number_rows(params);
  const unsigned blocks_per_row = 1u << (params.log2_length - 9);
  join_halves_kernel<double><<<rows.num_rows * blocks_per_row, 256, 0, stream>>>(params, rows);
  return cudaGetLastError();
}
}  // namespace htree::hadamard
