// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/per_list/partial_sum.cuh"

namespace htree::tree_attention {
template cudaError_t launch_partial_sums<__nv_bfloat16, 64>(const PartialSumParams&, cudaStream_t);
}  // namespace htree::tree_attention
