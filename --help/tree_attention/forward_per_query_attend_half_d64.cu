// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/forward/per_query/attend.cuh"

namespace htree::tree_attention {
template cudaError_t launch_per_query_attend<__half, 64>(const AttendParams&, cudaStream_t);
}  // namespace htree::tree_attention
