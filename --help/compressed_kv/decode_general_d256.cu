// Written by setup.py from csrc/instances.py.
#include "ops/compressed_kv/decode/general.cuh"

namespace htree::compressed_kv {
template cudaError_t launch_general<256>(const GeneralParams&, int64_t, cudaStream_t);
template cudaError_t launch_merge<256>(const DecodeParams&, int64_t, cudaStream_t);
}  // namespace htree::compressed_kv
