#include "ops/tree_attention/stages/gather/pick_topk.cuh"

namespace htree::tree_attention {

void launch_pick_topk(const PickParams& params, cudaStream_t stream) {
  const int64_t items = params.num_batches * params.num_queries * params.num_lists * params.top_k;
  if (items > 0) {
    pick_topk_kernel<<<blocks_for(items), kElementThreads, 0, stream>>>(params, items);
  }
}

}  // namespace htree::tree_attention
