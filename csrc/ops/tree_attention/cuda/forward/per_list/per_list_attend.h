// Launchers of the kernels that take the queries of a list together, on Hopper (sm_90a): r = 16, fp16 or bf16
// inputs, K = V in {32, 64, 128}, any G. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

// As launch_attend; params.turns in TurnOrder::kDims. Lists are those that the selection writes: a list holds
// min(list_width, parents up to the queries' own) entries.
void launch_block_attend(const TensorCoreShape& shape, const AttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
