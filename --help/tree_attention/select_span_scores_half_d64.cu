// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/select/span_scores.cuh"

namespace htree::tree_attention {
template cudaError_t launch_span_scores<__half, 64>(const SpanScoreParams&, cudaStream_t);
}  // namespace htree::tree_attention
