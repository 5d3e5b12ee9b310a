// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/tree/span_copies.cuh"

namespace htree::tree_attention {
template cudaError_t launch_pack_spans<__half, 32>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_pack_spans<__half, 64>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_pack_spans<__half, 128>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_pack_spans<__nv_bfloat16, 32>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_pack_spans<__nv_bfloat16, 64>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_pack_spans<__nv_bfloat16, 128>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_tile_spans<__half, 32>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_tile_spans<__half, 64>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_tile_spans<__half, 128>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_tile_spans<__nv_bfloat16, 32>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_tile_spans<__nv_bfloat16, 64>(const SpanCopyParams&, cudaStream_t);
template cudaError_t launch_tile_spans<__nv_bfloat16, 128>(const SpanCopyParams&, cudaStream_t);
}  // namespace htree::tree_attention
