// Written by setup.py from csrc/instances.py.
#include "ops/tree_cache/decode/top_spans.cuh"

namespace htree::tree_cache {
template cudaError_t launch_top_spans<__half, 64>(const AttendParams<__half>&, int, cudaStream_t);
template cudaError_t launch_top_spans<__half, 128>(const AttendParams<__half>&, int, cudaStream_t);
}  // namespace htree::tree_cache
