// Written by setup.py from csrc/instances.py.
#include "ops/compressed_kv/decode/general.cuh"

namespace htree::compressed_kv {
template cudaError_t launch_transform_query<64>(const DecodeParams&, int64_t, float*, cudaStream_t);
template cudaError_t launch_transform_query<128>(const DecodeParams&, int64_t, float*, cudaStream_t);
template cudaError_t launch_transform_query<256>(const DecodeParams&, int64_t, float*, cudaStream_t);
template cudaError_t launch_transform_query<512>(const DecodeParams&, int64_t, float*, cudaStream_t);
}  // namespace htree::compressed_kv
