// Written by setup.py from csrc/instances.py.
#include "ops/tree_cache/append.cuh"

namespace htree::tree_cache {
template cudaError_t launch_append(const AppendParams<float>&, cudaStream_t);
template cudaError_t launch_append(const AppendParams<__half>&, cudaStream_t);
template cudaError_t launch_append(const AppendParams<__nv_bfloat16>&, cudaStream_t);
}  // namespace htree::tree_cache
