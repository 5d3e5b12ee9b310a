// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/stages/scores/round_rows.cuh"

namespace htree::tree_attention {
template cudaError_t launch_round_rows(const RoundRowsParams<float>&, cudaStream_t);
template cudaError_t launch_round_rows(const RoundRowsParams<__half>&, cudaStream_t);
template cudaError_t launch_round_rows(const RoundRowsParams<__nv_bfloat16>&, cudaStream_t);
}  // namespace htree::tree_attention
