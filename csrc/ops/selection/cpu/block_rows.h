// The CPU loops of select_blocks, one table per instruction set (host/cpu/isa.h).
#pragma once

#include "host/cpu/simd_prelude.h"
#include "ops/selection/block_options.h"

namespace htree::tree_attention {

// Keys of T, arithmetic in Real. A group is `width` blocks side by side, one a lane, so that the maximum over the
// tokens of a block needs no exchange of lanes: packed keys are [groups, tokens, d, width].
template <typename T, typename Real>
struct BlockRows {
  int64_t width;
  int64_t rows;  // queries of a call of `score`
  // Packs `tokens` keys of each of `count` blocks, at most `width`. Key j of block b is at keys + (b * block_size + j) *
  // stride; the lanes of other blocks hold zeros.
  void (*pack)(const T* keys, int64_t stride, int64_t count, int64_t block_size, int64_t tokens, int64_t d,
               Real* packed);
  // row[i] = (Real)query[i], i < d
  void (*widen)(const T* query, int64_t d, Real* row);
  // scores[r * score_stride + b] becomes the largest of what it is and <query r, key j> over the keys of block b, for
  // `rows` queries [rows, d] and the blocks of `groups` groups that lie group_stride elements apart. NaN counts as -inf.
  void (*score)(const Real* queries, const Real* packed, int64_t groups, int64_t group_stride, int64_t tokens,
                int64_t d, Real* scores, int64_t score_stride);
  // The list of a query among `num_blocks` blocks, the last of which is the diagonal one: `options.count` entries of
  // blocks and of their scores. `scores` has num_blocks - 1 elements, `scratch` scratch_bytes(num_blocks), aligned to 8.
  void (*select)(const Real* scores, int64_t num_blocks, const BlockOptions& options, void* scratch,
                 int32_t* blocks, Real* list_scores);
  int64_t (*scratch_bytes)(int64_t num_blocks);
};

struct BlockTables {
  BlockRows<float, float> for_float;
  BlockRows<Fp16, float> for_half;
  BlockRows<Bf16, float> for_bfloat16;
  BlockRows<double, double> for_double;
};

extern const BlockTables kBlockTablesBaseline;
extern const BlockTables kBlockTablesAvx2;
extern const BlockTables kBlockTablesAvx512;

}  // namespace htree::tree_attention
