// Fills the table of turned_query.cuh. One translation unit includes this.
#pragma once

#include "ops/tree_attention/attention/turned_query.cuh"

namespace htree::tree_attention {

constexpr int kTurnThreads = 256;

// One thread per pair of dims of a slot.
__global__ void turn_table_kernel(__half2* table, int64_t total, int key_dim, double log_base, bool rotate) {
  const int64_t i = int64_t{blockIdx.x} * kTurnThreads + threadIdx.x;
  if (i >= total) {
    return;
  }
  const int pairs = key_dim / 16, half = key_dim / 2;
  const int pair = static_cast<int>(i % pairs), lane = static_cast<int>(i / pairs % 4);
  const int64_t slot = i / (4 * pairs);
  float cos_of[2], sin_of[2];
  for (int e = 0; e < 2; ++e) {
    const int dim = fragment_dim(2 * pair + e, lane);
    const double angle =
        rotate ? static_cast<double>(slot * kBlockRows) * exp(-log_base * static_cast<double>(dim) / half)
               : 0.0;
    cos_of[e] = static_cast<float>(cos(angle));
    sin_of[e] = static_cast<float>(sin(angle));
  }
  __half2* at = table + slot * 8 * pairs + lane * pairs + pair;
  at[0] = __floats2half2_rn(cos_of[0], cos_of[1]);
  at[4 * pairs] = __floats2half2_rn(sin_of[0], sin_of[1]);
}

}  // namespace htree::tree_attention
