// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/select/list_scores.cuh"

namespace htree::tree_attention {
template cudaError_t launch_list_scores<__half, 128>(const ListScoreParams&, cudaStream_t);
}  // namespace htree::tree_attention
