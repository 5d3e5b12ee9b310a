#include "ops/tree_attention/stages/scores/compute_scores.cuh"

namespace htree::tree_attention {

template void launch_io_compute_scores(const ScoresParams<__half>&, cudaStream_t);

}  // namespace htree::tree_attention
