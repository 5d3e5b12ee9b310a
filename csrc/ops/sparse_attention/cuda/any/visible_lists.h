// A caller's lists as the kernels read them. docs/semantics/sparse_attention.md §8. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace htree::tree_attention {

// Which lists have rows that multiply masked tiles in the place of a gather: those before `end_token` whose diagonal sixteen
// comes before `factor` times their sixteens, and of whose tokens none is wild. So a list's rows go their way whatever
// other lists and tokens are there. Without an `end_token` there are none.
struct MaskedLists {
  int64_t end_token = 0;
  int64_t factor = 0;
  const uint16_t* wild = nullptr;  // [num_batches, num_kv_heads, wild_parents], WildTokens
  int64_t wild_parents = 0;
  int64_t end_query_token = 0;  // the token behind the last query
};

// An entry of a masked list, which is none for those who gather. Of a gathered list it is negative.
constexpr int32_t masked_entry(int32_t parent) {
  return -2 - parent;
}

// Writes for every list the blocks that its queries can see, ascending and each once, then -1; of masked lists their
// masked_entry().
//
// The kernels take a list's last entry for the diagonal block, of which they read the tokens up to the query's own. Where a
// list has entries and the diagonal block is none of them, `sizes` says so, or, if it is null, `num_blocks` stands behind
// them: no token of block num_blocks exists. The size of a masked list is that of an empty one, with the same mark.
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
  int64_t parts = 1;   // a block becomes so many entries of block_size / parts tokens
  MaskedLists masked;  // where parts are sixteens and `sizes` is given
};
cudaError_t launch_visible_lists(const VisibleListParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
