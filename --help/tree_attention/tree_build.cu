// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/stages/build/tree_build.cuh"

namespace htree::tree_attention {
template cudaError_t launch_tree_build(const TreeBuildParams<float>&, cudaStream_t);
template cudaError_t launch_tree_build(const TreeBuildParams<__half>&, cudaStream_t);
template cudaError_t launch_tree_build(const TreeBuildParams<__nv_bfloat16>&, cudaStream_t);
template cudaError_t launch_tree_build(const TreeBuildParams<double>&, cudaStream_t);
template cudaError_t launch_tree_build_backward(const TreeBuildParams<float>&, cudaStream_t);
template cudaError_t launch_tree_build_backward(const TreeBuildParams<__half>&, cudaStream_t);
template cudaError_t launch_tree_build_backward(const TreeBuildParams<__nv_bfloat16>&, cudaStream_t);
template cudaError_t launch_tree_build_backward(const TreeBuildParams<double>&, cudaStream_t);
}  // namespace htree::tree_attention
