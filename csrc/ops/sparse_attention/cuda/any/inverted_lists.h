// The masks of parent lists and the inverse of the lists, for every r. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

// The lists of a layer.
struct ListTable {
  const int32_t* lists = nullptr;  // [B, num_lists, H_kv, width]; null: implicit lists
  int64_t list_batch = 0;
  int num_batches = 0;
  int num_lists = 0;
  int num_kv_heads = 0;
  int width = 0;
};

// Bit p of a list's mask: candidate p is in the list of the layer below. counts: the number of
// parents in a list.
struct ListMaskParams : ListTable {
  const int32_t* next_lists = nullptr;  // null: no mask wanted
  int64_t next_batch = 0;
  uint32_t* selected = nullptr;  // [B, num_lists, H_kv, mask_words]
  int64_t mask_words = 0;
  int32_t* counts = nullptr;  // [B, num_lists, H_kv]
  int64_t rate = 16;
  int64_t t0 = 0;
  int64_t stride = 1;
  int64_t node_span = 1;
};
cudaError_t launch_list_masks(const ListMaskParams& params, cudaStream_t stream);

// The inverted list of every parent. With h = batch * H_kv + kv head, entries[offsets[h][j] ... offsets[h][j + 1])
// are list_row * width + slot of the lists of head h that hold parent j, in the order of the lists.
struct InvertedListParams : ListTable {
  int64_t num_parents = 0;
  uint32_t* entries = nullptr;     // [B, H_kv, num_lists * width]
  uint32_t* offsets = nullptr;     // [B, H_kv, num_parents + 1]
  uint32_t* run_counts = nullptr;  // [B, H_kv, ceil(num_lists / kInvertedListRows), num_parents], scratch
};
cudaError_t launch_inverted_lists(const InvertedListParams& params, cudaStream_t stream);

inline ListTable list_table(const GatherParams& gather) {
  return {gather.lists,     gather.list_batch,   gather.num_batches,
          gather.num_lists, gather.num_kv_heads, gather.list_width};
}
// What counts the entries of a chunk's lists; the rate is that of the tensor cores.
inline ListMaskParams counted_lists(const GatherParams& gather) {
  ListMaskParams params = {list_table(gather)};
  params.t0 = gather.t0;
  params.stride = gather.stride;
  params.node_span = gather.node_span;
  return params;
}

}  // namespace htree::tree_attention
