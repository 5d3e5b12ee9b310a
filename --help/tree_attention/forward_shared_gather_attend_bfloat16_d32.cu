// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/forward/shared_gather/attend.cuh"

namespace htree::tree_attention {
template cudaError_t launch_shared_gather_attend<__nv_bfloat16, 32>(const AttendParams&, cudaStream_t);
}  // namespace htree::tree_attention
