// Written by setup.py from csrc/instances.py.
#include "ops/compressed_kv/compress/compress_launch.cuh"

namespace htree::compressed_kv {
template cudaError_t launch_compress<float>(const CompressParams&, cudaStream_t);
template cudaError_t launch_decompress<float>(const DecompressParams&, cudaStream_t);
}  // namespace htree::compressed_kv
