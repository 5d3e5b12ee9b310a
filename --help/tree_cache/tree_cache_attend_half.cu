// Written by setup.py from csrc/instances.py.
#include "ops/tree_cache/attend.cuh"

namespace htree::tree_cache {
template cudaError_t launch_rows(const AttendParams<__half>&, cudaStream_t);
template cudaError_t launch_attend(const AttendParams<__half>&, cudaStream_t);
template cudaError_t launch_attend_packed(const AttendParams<__half>&, const LeafPools&, cudaStream_t);
}  // namespace htree::tree_cache
