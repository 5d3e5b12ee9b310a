// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/select/dense_selection.cuh"

namespace htree::tree_attention {
template cudaError_t launch_dense_references<__half, 128>(const DenseReferenceParams&, cudaStream_t);
template cudaError_t launch_dense_importances<__half, 128>(const DenseImportanceParams&, cudaStream_t);
}  // namespace htree::tree_attention
