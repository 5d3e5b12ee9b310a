// Written by setup.py from csrc/instances.py.
#include "ops/compressed_kv/compress/compress_launch.cuh"

namespace htree::compressed_kv {
template cudaError_t launch_compress<__nv_bfloat16>(const CompressParams&, cudaStream_t);
template cudaError_t launch_decompress<__nv_bfloat16>(const DecompressParams&, cudaStream_t);
}  // namespace htree::compressed_kv
