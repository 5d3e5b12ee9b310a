#include "ops/compressed_kv/instances/launch_decode.cuh"

namespace htree::compressed_kv {
template cudaError_t launch_decode_keys<64, 8>(const DecodeParams&, int, QueryType, int64_t, cudaStream_t);
}
