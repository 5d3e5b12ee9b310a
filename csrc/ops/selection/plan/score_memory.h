// The memory of the scores of a selection. Pure functions. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/tree/plan/tree_config.h"
#include "ops/tree/plan/workspace.h"

namespace htree::tree_attention {

// The scores of `rows` (list, head) at a dense top whose nodes are scored by span means, see SpanScores.
struct SpanScoreMemory {
  float* sums;        // [rows, importance_width(nodes)]
  float* references;  // [rows, groups]
  float* runs;        // [rows, runs] pairs
};
inline SpanScoreMemory lay_out_span_scores(Workspace& space, const AttentionProblem& p, int64_t rows) {
  const SpanTiling tiling = span_tiling(span_rows(p, p.layers() - 1));
  float* sums = space.take<float>(rows * importance_width(top_nodes(p)));
  float* references = space.take<float>(rows * tiling.groups(top_nodes(p)));
  return {sums, references, space.take<float>(rows * tiling.runs(top_nodes(p)), 2 * sizeof(float))};
}
inline int64_t span_score_bytes(const AttentionProblem& p, int64_t rows) {
  Workspace space;
  lay_out_span_scores(space, p, rows);
  return space.bytes();
}

// The scores of `rows` (list, head) of a gathered layer, and their sums over runs of slots.
struct ListScoreMemory {
  float* scores;  // [rows, width]
  float* sums;    // [rows, score_runs(width)] pairs
};
inline ListScoreMemory lay_out_list_scores(Workspace& space, int64_t rows, int64_t width) {
  float* scores = space.take<float>(rows * width);
  return {scores, space.take<float>(rows * score_runs(width), 2 * sizeof(float))};
}

// At a dense top: references of all lists of a chunk, and the importances of some of its lists.
struct DenseScoreMemory {
  float* references;
  float* importances;
};
inline DenseScoreMemory lay_out_dense_scores(Workspace& space, int64_t references, int64_t importances) {
  float* at = space.take<float>(references);
  return {at, space.take<float>(importances)};
}

// The bytes of the scores of the layer that needs most.
inline int64_t selection_bytes(const AttentionProblem& p, const TreeConfig& c) {
  int64_t bytes = 0;
  for (int64_t layer = 1; layer < p.layers(); ++layer) {
    Workspace space;
    const bool dense = c.dense_top && layer + 1 == p.layers();
    if (dense && dense_span_shape(p)) {
      lay_out_span_scores(space, p, c.batch_chunk * c.top_chunk * p.num_heads);
    } else if (dense && span_rows(p, layer) == 1) {
      lay_out_dense_scores(space,
                           c.batch_chunk * ceil_div(c.query_chunk, p.args.selection_stride) * p.num_heads,
                           c.batch_chunk * c.top_chunk * p.num_kv_heads * importance_width(p.nodes(layer)));
    } else {
      lay_out_list_scores(space, c.batch_chunk * c.selection_chunk * p.num_heads,
                          most_parents(p, layer) * kTensorCoreRate);
    }
    bytes = std::max(bytes, space.bytes());
  }
  return bytes;
}

}  // namespace htree::tree_attention
