// A caller's lists as the kernels read them. docs/semantics/sparse_attention.md §8. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace htree::tree_attention {

// Writes for every list the blocks that its queries can see, ascending and each once, then -1.
//
// The kernels take a list's last entry for the diagonal block, of which they read the tokens up to the query's own. Where a
// list has entries and the diagonal block is none of them, `sizes` says so, or, if it is null, `num_blocks` stands behind
// them: no token of block num_blocks exists.
struct VisibleListParams {
  const int32_t* blocks =
      nullptr;  // [num_batches, num_lists, num_list_heads, width], batches blocks_batch apart
  int64_t blocks_batch = 0;
  int32_t* lists = nullptr;  // [num_batches, num_lists, num_kv_heads, visible_width] contiguous
  int32_t* sizes = nullptr;  // [num_batches, num_lists, num_kv_heads], as GatherParams::list_sizes
  int64_t num_batches = 0;
  int64_t num_lists = 0;
  int num_list_heads = 1;  // 1 or num_kv_heads
  int num_kv_heads = 1;
  int64_t width = 0;
  int64_t visible_width = 0;  // at least min(width, num_blocks) * parts, and one more where `sizes` is null
  int64_t num_blocks = 0;
  int64_t t0 = 0;  // token of the first list
  int64_t stride = 1;
  int64_t block_size = 16;
  int64_t parts = 1;  // a block becomes so many entries of block_size / parts tokens
};
cudaError_t launch_visible_lists(const VisibleListParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
