#include "ops/tree_attention/stages/scores/compute_scores.cuh"

namespace htree::tree_attention {

template void launch_compute_scores(const ScoresParams<float>&, cudaStream_t);

}  // namespace htree::tree_attention
