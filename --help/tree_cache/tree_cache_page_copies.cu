// Written by setup.py from csrc/instances.py.
#include "ops/tree_cache/prompt/page_copies.cuh"

namespace htree::tree_cache {
template cudaError_t launch_page_copy<__half, 32>(const PageCopy<ParentTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 64>(const PageCopy<ParentTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 128>(const PageCopy<ParentTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 32>(const PageCopy<ParentTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 64>(const PageCopy<ParentTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 128>(const PageCopy<ParentTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 32>(const PageCopy<TileTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 64>(const PageCopy<TileTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 128>(const PageCopy<TileTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 32>(const PageCopy<TileTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 64>(const PageCopy<TileTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 128>(const PageCopy<TileTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 32>(const PageCopy<ParentSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 64>(const PageCopy<ParentSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 128>(const PageCopy<ParentSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 32>(const PageCopy<ParentSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 64>(const PageCopy<ParentSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 128>(const PageCopy<ParentSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 32>(const PageCopy<TileSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 64>(const PageCopy<TileSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__half, 128>(const PageCopy<TileSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 32>(const PageCopy<TileSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 64>(const PageCopy<TileSpanTarget>&, cudaStream_t);
template cudaError_t launch_page_copy<__nv_bfloat16, 128>(const PageCopy<TileSpanTarget>&, cudaStream_t);
}  // namespace htree::tree_cache
