#include "ops/tree_attention/stages/gather/accumulate.cuh"

namespace htree::tree_attention {

template void launch_accumulate(const AccumulateParams<__half>&, cudaStream_t);

}  // namespace htree::tree_attention
