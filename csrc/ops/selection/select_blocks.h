// Contract of select_blocks and select_blocks_varlen: checks and outputs, and what CPU and CUDA provide.
// docs/semantics/selection.md §9
#pragma once

#include <vector>

#include "ops/selection/block_options.h"
#include "ops/tree/documents.h"

namespace htree::tree_attention {

// blocks int32 and scores [B, ceil(T_q / s), H_i, count]; of packed documents [N_q, H_i, count].
using BlockLists = std::tuple<Tensor, Tensor>;

// The checks of prepare_blocks() and of prepare_blocks_varlen() alone.
void check_blocks(const char* op, const Tensor& index_query, const Tensor& index_key,
                  const BlockOptions& options);
void check_blocks_varlen(const char* op, const Tensor& index_query, const Tensor& index_key,
                         const Documents& documents, const BlockOptions& options);
// Checks the arguments and allocates the lists. index_query [B, T_q, H_i, d], index_key [B, T, H_i, d]; of packed
// documents [N_q, H_i, d] and [N_k, H_i, d], which prepare_blocks_varlen() takes.
BlockLists prepare_blocks(const char* op, const Tensor& index_query, const Tensor& index_key,
                          const BlockOptions& options);
BlockLists prepare_blocks_varlen(const char* op, const Tensor& index_query, const Tensor& index_key,
                                 const Documents& documents, const BlockOptions& options);

// Arguments come checked, inputs with unit last strides; every element of the contiguous lists is written.
using SelectBlocks = void(const Tensor& index_query, const Tensor& index_key, const BlockOptions& options,
                          const BlockLists& lists);
using SelectBlocksVarlen = void(const char* op, const Tensor& index_query, const Tensor& index_key,
                                const Documents& documents, const BlockOptions& options,
                                const BlockLists& lists);
SelectBlocks select_blocks_cpu, select_blocks_cuda;
// The same for layers of blocks at once, from scores that are computed once: layers[i] are the lists of blocks of block_size *
// rate^i tokens. Those of leaders before token first_token, which
// no layer above has smaller, stay as they are. CUDA leaves out scores that are undefined.
struct BlockLayer {
  BlockLists lists;
  int64_t first_token = 0;
};
using SelectBlockLayers = void(const Tensor& index_query, const Tensor& index_key,
                               const BlockOptions& options, int64_t rate,
                               const std::vector<BlockLayer>& layers);
SelectBlockLayers select_block_layers_cpu, select_block_layers_cuda;
SelectBlocksVarlen select_blocks_varlen_cpu, select_blocks_varlen_cuda;

}  // namespace htree::tree_attention
