// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/forward/masked_rows/attend.cuh"

namespace htree::tree_attention {
template cudaError_t launch_masked_rows<__nv_bfloat16, 128>(const MaskedAttendParams&, cudaStream_t);
}  // namespace htree::tree_attention
