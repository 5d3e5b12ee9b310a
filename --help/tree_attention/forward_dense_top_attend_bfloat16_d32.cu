// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/forward/dense_top/attend.cuh"

namespace htree::tree_attention {
template cudaError_t launch_dense_attend<__nv_bfloat16, 32>(const DenseAttendParams&, cudaStream_t);
}  // namespace htree::tree_attention
