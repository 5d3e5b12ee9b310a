// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/forward/dense_rows/attend.cuh"

namespace htree::tree_attention {
template cudaError_t launch_dense_rows<__nv_bfloat16, 64>(const DenseAttendParams&, cudaStream_t);
}  // namespace htree::tree_attention
