// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/forward/per_list/attend.cuh"

namespace htree::tree_attention {
template cudaError_t launch_per_list_attend<__nv_bfloat16, 128>(const AttendParams&, cudaStream_t);
}  // namespace htree::tree_attention
