#include "ops/tree_attention/stages/select/launch_select.cuh"

namespace htree::tree_attention {

int64_t select_scratch_bytes(const SelectParams& params) {
  const SelectPlan plan = select_plan(params);
  return plan.scratch_bytes * plan.num_blocks;
}

void launch_select_topk(const SelectParams& params, cudaStream_t stream) {
  launch_select_as<FullWork>(params, stream);
}

}  // namespace htree::tree_attention
