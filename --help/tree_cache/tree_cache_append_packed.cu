// Written by setup.py from csrc/instances.py.
#include "ops/tree_cache/packed/append_packed.cuh"

namespace htree::tree_cache {
template cudaError_t launch_append_packed(const AppendPackedParams<float>&, cudaStream_t);
template cudaError_t launch_append_packed(const AppendPackedParams<__half>&, cudaStream_t);
template cudaError_t launch_append_packed(const AppendPackedParams<__nv_bfloat16>&, cudaStream_t);
}  // namespace htree::tree_cache
