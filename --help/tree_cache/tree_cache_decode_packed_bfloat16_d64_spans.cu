// Written by setup.py from csrc/instances.py.
#include "ops/tree_cache/decode/decode.cuh"

namespace htree::tree_cache {
template cudaError_t launch_decode_packed<__nv_bfloat16, 64, true>(const AttendParams<__nv_bfloat16>&, const LeafPools&, const DecodePlans&, cudaStream_t);
}  // namespace htree::tree_cache
