// Tokens that a weight of 0 would not silence. Rows in masked tiles multiply what they do not see by 0, so such tokens are
// taken out of the tiles, and rows that see one gather. Hopper (sm_90a). No torch.
#pragma once

#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

// A token is wild where an element of its key is infinite or NaN, or one of its value is that or at least 2^32. Zeroes its
// rows of the tiles.
struct WildTokens {
  DenseTiles tiles;  // of the tokens
  TensorCoreShape shape;
  uint16_t* wild = nullptr;  // [heads, tiles * kTileParents]: bit i of a parent is its token i
  int64_t num_heads = 0;     // pairs (batch, K/V head)
};
cudaError_t launch_wild_tokens(const WildTokens& params, cudaStream_t stream);

}  // namespace htree::tree_attention
