// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/stages/gather/accumulate.cuh"

namespace htree::tree_attention {
template cudaError_t launch_accumulate(const AccumulateParams<float>&, cudaStream_t);
}  // namespace htree::tree_attention
