// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/stages/select/select_topk.cuh"

namespace htree::tree_attention {
template cudaError_t launch_select_topk<FullWork>(const SelectParams&, cudaStream_t);
}  // namespace htree::tree_attention
