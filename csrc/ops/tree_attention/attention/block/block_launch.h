// Launchers of the kernels that take the queries of a list together, on Hopper (sm_90a): r = 16, fp16 or bf16
// inputs, K = V in {32, 64, 128}, any G. No torch.
#pragma once

#include "ops/tree_attention/attention/attention_launch.h"

namespace htree::tree_attention {

constexpr int64_t slot_turns_bytes(int64_t slots, int64_t key_dim) {
  return slots * key_dim * 2;
}

// Fills GatherParams::slot_turns for `slots` slots; every angle 0 when `rotate` is false.
void launch_slot_turns(uint16_t* table, int64_t slots, int key_dim, double base, bool rotate,
                       cudaStream_t stream);

// As launch_attend. Lists are those that the selection writes: a list holds min(list_width, parents up to the
// queries' own) entries.
void launch_block_attend(const TensorCoreShape& shape, const AttendParams& params, cudaStream_t stream);

// Whether the code that the current device runs was made for sm_90a.
bool block_kernels_compiled();

}  // namespace htree::tree_attention
