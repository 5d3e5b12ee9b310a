// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/stages/select/next_parents.cuh"

namespace htree::tree_attention {
template cudaError_t launch_compute_next_parents<FullWork>(const NextParentsParams&, cudaStream_t);
template cudaError_t launch_compute_next_parents<IoOnly>(const NextParentsParams&, cudaStream_t);
}  // namespace htree::tree_attention
