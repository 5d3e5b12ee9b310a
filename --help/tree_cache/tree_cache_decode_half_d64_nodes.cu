// Written by setup.py from csrc/instances.py.
#include "ops/tree_cache/decode/decode.cuh"

namespace htree::tree_cache {
template cudaError_t launch_decode<__half, 64, false>(const AttendParams<__half>&, const DecodePlans&, cudaStream_t);
}  // namespace htree::tree_cache
