// The launches that select the parents of one layer, from the scores of gathered lists or by the dense passes
// of the top layer.
#include "ops/selection/cuda/select_layer.h"

#include "ops/selection/cuda/selection.h"
#include "ops/selection/plan/score_memory.h"

namespace htree::tree_attention {

namespace {

SpanTiles span_tiles_of(const TreeCall& call, const Chunk& chunk) {
  const int64_t first = chunk.batch * call.problem.num_kv_heads * call.top_spans.num_tiles;
  SpanTiles tiles = call.top_spans;
  tiles.keys += first * dense_tile_bytes(call.problem.key_dim);
  tiles.scales += first * kDenseTileNodes;
  tiles.scaled += first;
  return tiles;
}

// Computes the scores of a gathered layer, by span means if there are any. The selection itself turns them into
// importances.
void score_lists(const TreeCall& call, const PackedSpans& spans, const Chunk& chunk,
                 const GatherParams& gather, int64_t most_candidates, float* scratch,
                 LeaderSelectParams& select, cudaStream_t stream) {
  ListScoreParams score;
  score.gather = gather;
  score.selection = call.problem.args.selection;
  Workspace space(scratch);
  const ListScoreMemory memory = lay_out_list_scores(
      space, int64_t{gather.num_batches} * gather.num_lists * call.problem.num_heads, most_candidates);
  score.scores = memory.scores;
  score.score_width = most_candidates;
  score.num_runs = static_cast<int>(score_runs(most_candidates));
  score.sums = reinterpret_cast<float2*>(memory.sums);
  select.scores = scratch;
  select.score_width = score.score_width;
  select.sums = score.sums;
  select.num_runs = score.num_runs;
  if (spans.blocks) {
    score.spans = spans;
    score.spans.blocks += chunk.batch * call.problem.num_kv_heads * spans.num_parents * spans.rows *
                          packed_span_bytes(call.problem.key_dim);
    launch_of_shape(call.shape, [&](auto type, auto dim) {
      return launch_span_list_scores<typename decltype(type)::type, dim.value>(score, stream);
    });
  } else {
    launch_of_shape(call.shape, [&](auto type, auto dim) {
      return launch_list_scores<typename decltype(type)::type, dim.value>(score, stream);
    });
  }
}

// The most entries of the lists of `gather`, whose last query stands in node `last_rank`.
int64_t longest_list(const GatherParams& gather, int64_t last_rank) {
  const int64_t parents = last_rank / kTensorCoreRate + 1;
  return gather.lists ? std::min<int64_t>(parents, gather.list_width) : parents;
}

// Computes the scores of a dense top by span means.
void score_top_spans(const TreeCall& call, const Chunk& chunk, const GatherParams& gather, float* scratch,
                     LeaderSelectParams& select, cudaStream_t stream) {
  SpanScoreParams params;
  params.gather = gather;
  params.tiles = span_tiles_of(call, chunk);
  params.selection = call.problem.args.selection;
  Workspace space(scratch);
  const SpanScoreMemory memory = lay_out_span_scores(
      space, call.problem, int64_t{gather.num_batches} * gather.num_lists * call.problem.num_heads);
  SpanScores& scores = params.scores;
  scores.tiling = params.tiles.tiling;
  scores.sums = memory.sums;
  scores.references = memory.references;
  scores.runs = reinterpret_cast<float2*>(memory.runs);
  scores.width = importance_width(top_nodes(call.problem));
  scores.num_groups = static_cast<int>(scores.tiling.groups(top_nodes(call.problem)));
  scores.num_runs = static_cast<int>(scores.tiling.runs(top_nodes(call.problem)));
  select.spans = scores;
  launch_of_shape(call.shape, [&](auto type, auto dim) {
    return launch_span_scores<typename decltype(type)::type, dim.value>(params, stream);
  });
}

// Computes the references of all lists of the chunk.
void refer_top(const TreeCall& call, const Chunk& chunk, const GatherParams& gather, float* scratch,
               DenseReferenceParams& params, cudaStream_t stream) {
  params.gather = gather;
  params.tiles = tiles_of_batch(call, call.top, chunk.batch);
  params.selection = call.problem.args.selection;
  params.references = scratch;
  params.reference_batch = int64_t{gather.num_lists} * call.problem.num_heads;
  launch_of_shape(call.shape, [&](auto type, auto dim) {
    return launch_dense_references<typename decltype(type)::type, dim.value>(params, stream);
  });
}

// Computes the importances of the lists of `gather`, which are `first` lists behind those of `reference`.
void rank_top(const TreeCall& call, const DenseReferenceParams& reference, float* importances,
              const GatherParams& gather, int64_t first, int64_t last_rank, LeaderSelectParams& select,
              cudaStream_t stream) {
  DenseImportanceParams params;
  params.reference = reference;
  params.reference.gather = gather;
  params.reference.references += first * call.problem.num_heads;
  params.importances = importances;
  params.width = importance_width(std::max<int64_t>(last_rank, 1));
  select.scores = params.importances;
  select.score_width = params.width;
  launch_of_shape(call.shape, [&](auto type, auto dim) {
    return launch_dense_importances<typename decltype(type)::type, dim.value>(params, stream);
  });
}

}  // namespace

void select_layer(const TreeCall& call, size_t layer_idx, const Chunk& chunk, const ListSlice& lists,
                  const ListSlice& next, float* scratch, uint32_t* mask, cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  const int64_t words = mask_words(p);
  const TreeLayer& layer = call.layers[layer_idx];
  const bool dense = call.config.dense_top && layer_idx + 1 == call.layers.size() && !layer.spans.blocks;
  const bool dense_spans = dense && call.top_spans.keys;
  const int64_t chunk_lists = ceil_div(chunk.num_queries, p.args.selection_stride);
  const int64_t most = dense ? call.config.top_chunk : call.config.selection_chunk;
  Workspace space(scratch);
  const DenseScoreMemory memory =
      lay_out_dense_scores(space, chunk.num_batches * chunk_lists * p.num_heads, /*importances=*/0);
  DenseReferenceParams reference;
  if (dense && !dense_spans) {
    refer_top(call, chunk, gather_of(call, layer_idx, chunk), memory.references, reference, stream);
  }
  for (int64_t first = 0; first < chunk_lists; first += most) {
    const int64_t count = std::min(most, chunk_lists - first);
    Chunk part = chunk;
    part.query += first * p.args.selection_stride;
    part.num_queries =
        std::min(count * p.args.selection_stride, chunk.num_queries - first * p.args.selection_stride);
    const int64_t last_rank = p.token_of(part.query + part.num_queries - 1) / layer.node_span;
    GatherParams gather = gather_of(call, layer_idx, part);
    const int64_t row_offset = first * p.num_kv_heads * p.args.top_k;
    gather.lists = lists.data ? lists.data + row_offset : nullptr;
    gather.list_batch = lists.batch;
    LeaderSelectParams select;
    select.gather = gather;
    select.next_lists = next.data + row_offset;
    select.next_batch = next.batch;
    select.selected = mask ? mask + first * p.num_kv_heads * words : nullptr;
    select.selected_batch = chunk_lists * p.num_kv_heads * words;
    select.mask_words = words;
    select.selection = p.args.selection;
    if (dense_spans) {
      score_top_spans(call, part, gather, scratch, select, stream);
    } else if (dense) {
      rank_top(call, reference, memory.importances, gather, first, last_rank, select, stream);
    } else {
      const int64_t most_candidates = longest_list(gather, last_rank) * kTensorCoreRate;
      score_lists(call, layer.spans, part, gather, most_candidates, scratch, select, stream);
    }
    C10_CUDA_CHECK(launch_leader_select(select, stream));
  }
}

}  // namespace htree::tree_attention
