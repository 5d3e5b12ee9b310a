// Written by setup.py from csrc/instances.py.
#include "ops/tree_cache/decode/top_spans.cuh"

namespace htree::tree_cache {
template cudaError_t launch_top_spans<__nv_bfloat16, 64>(const AttendParams<__nv_bfloat16>&, int, cudaStream_t);
template cudaError_t launch_top_spans<__nv_bfloat16, 128>(const AttendParams<__nv_bfloat16>&, int, cudaStream_t);
}  // namespace htree::tree_cache
