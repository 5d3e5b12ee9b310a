// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/stages/scores/compute_scores.cuh"

namespace htree::tree_attention {
template cudaError_t launch_compute_scores<FullWork>(const ScoresParams<__half>&, cudaStream_t);
}  // namespace htree::tree_attention
