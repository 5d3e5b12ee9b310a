// Written by setup.py from csrc/instances.py.
#include "ops/compressed_kv/decode/decode_launch.cuh"

namespace htree::compressed_kv {
template cudaError_t launch_decode_keys<256, 16>(const DecodeParams&, int, QueryType, int64_t, cudaStream_t);
}  // namespace htree::compressed_kv
