#include "ops/rmsnorm_rope/dweight.cuh"
#include "ops/rmsnorm_rope/rmsnorm_rope_launch.h"

namespace htree::rmsnorm_rope {

template <typename A>
void launch_sum(const SumParams<A>& params, cudaStream_t stream) {
  const int blocks = (params.width + kSumColumns - 1) / kSumColumns;
  sum_blocks_kernel<A><<<blocks, kSumColumns * kSumSlices, 0, stream>>>(params);
}

template void launch_sum<float>(const SumParams<float>&, cudaStream_t);
template void launch_sum<double>(const SumParams<double>&, cudaStream_t);

}  // namespace htree::rmsnorm_rope
