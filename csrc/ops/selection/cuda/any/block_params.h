// What the kernels of select_blocks are given. docs/semantics/selection.md §9. No torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/selection/block_options.h"
#include "ops/selection/plan/block_launch.h"
#include "ops/tree/cuda/any/geometry.h"

namespace htree::tree_attention {

// A sequence of a batch, or a packed document. Slots number the leaders of all of them, one behind the other.
struct BlockDocument {
  int64_t query;       // element of its first query, in head 0
  int64_t key;         // element of its first key, in head 0
  int32_t first_slot;  // of its leaders
  int32_t num_leaders;
  int32_t first_token;  // its tokens before its first query, a multiple of the stride
  int32_t list_row;     // of its first leader among the rows of the lists
  int32_t broken;       // its lengths break the contract
};

// Fills `documents`: from offsets, or for sequences of equal length where `cu_seq_q` is null.
struct BlockDocumentParams {
  BlockDocument* documents = nullptr;  // [num_documents]
  const int32_t* cu_seq_q = nullptr;   // [num_documents + 1]
  const int32_t* cu_seq_k = nullptr;
  int32_t num_documents = 0;
  int32_t num_queries = 0, num_keys = 0;  // rows of the packed tensors, or of each sequence
  int32_t max_q = 0, max_k = 0;
  int32_t stride = 1;
  int64_t query_step = 0, key_step = 0;  // elements between packed rows, or between sequences
};
cudaError_t launch_block_documents(const BlockDocumentParams& params, cudaStream_t stream);

// Leaders [first_slot, first_slot + num_slots) and heads [first_head, first_head + num_heads) of a call.
struct BlockChunk {
  const BlockDocument* documents = nullptr;
  int32_t num_documents = 0;
  int32_t first_slot = 0, num_slots = 0;
  int32_t first_head = 0, num_heads = 0;
  int32_t block_size = 16, stride = 1;
  int32_t unit = 16;  // tokens whose maximum is stored
  int64_t row = 0;    // floats of a row of scores
  float* scores =
      nullptr;  // [num_heads, num_slots, row]: of unit i of a leader's sequence, before its diagonal block
  // [num_heads, num_slots, tile_row(row)]: the largest score of each tile of kTileUnits units; true of the tiles that end
  // before a leader's diagonal block. Null: not there.
  float* tiles = nullptr;
};

template <typename T>
struct BlockScoreParams {
  BlockChunk chunk;
  View<const T> query, key;  // their batch strides are in the documents
  int32_t d = 0;
  int32_t splits = 1;
};

// T is float, __half or __nv_bfloat16; `unit` is block_size. A sum runs over d in index order.
template <typename T>
cudaError_t launch_block_scores(const BlockScoreParams<T>& params, cudaStream_t stream);
// T is __half or __nv_bfloat16; `unit` is kUnitTokens; rows of query and key are aligned to 16 bytes.
template <typename T>
cudaError_t launch_block_unit_scores(const BlockScoreParams<T>& params, cudaStream_t stream);

struct BlockListParams {
  BlockChunk chunk;
  BlockOptions options;
  int32_t* blocks = nullptr;  // [rows, heads, count]
  float* scores = nullptr;    // [rows, heads, count], or null
  int32_t heads = 0;          // of the lists
  int32_t row_step = 1;       // rows of the lists from leader to leader
  int64_t first_token = 0;    // of a leader whose lists are written
  // Keys of rows, one for each block: in shared memory where null, else key_capacity elements for each of num_blocks thread
  // blocks.
  uint32_t* keys = nullptr;
  int64_t key_capacity = 0;
  int64_t num_blocks = 0;
  TileUse tile_use = TileUse::kNone;
};
// Shared memory of a thread block that chooses: the keys and places that a row is filtered to, two numbers for 32 keys,
// and, where they are there, the keys, from a multiple of 16 bytes on. Rows are filtered by their tiles where the place of
// the keys can hold as much.
constexpr int64_t kFilteredKeys = 1024;
constexpr int64_t row_shared_bytes(int64_t key_capacity, bool holds_keys) {
  return kFilteredKeys * 8 + (key_capacity + 63) / 64 * 16 + (holds_keys ? key_capacity * 4 : 0);
}
cudaError_t launch_block_lists(const BlockListParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
