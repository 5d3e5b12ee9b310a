#include "ops/tree_attention/stages/select/launch_select.cuh"

namespace htree::tree_attention {

void launch_io_select_topk(const SelectParams& params, cudaStream_t stream) {
  launch_select_as<IoOnly>(params, stream);
}

}  // namespace htree::tree_attention
