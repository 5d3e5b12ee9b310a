// attention_forward on CUDA: docs/semantics/tree_attention.md §1.5. Allocates memory and launches the
// kernels, layer by layer and in chunks of queries. For the temporary memory see plan/ and §1.8.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAException.h>

#include <limits>

#include "host/cuda/launch_scope.h"
#include "ops/selection/cuda/select_layer.h"
#include "ops/sparse_attention/cuda/any/inverted_lists.h"
#include "ops/sparse_attention/cuda/attend.h"
#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/cuda_tree.h"
#include "ops/tree/cuda/launch_params.h"
#include "ops/tree/cuda/tree_call.h"
#include "ops/tree_attention/cuda/walk.h"

namespace htree::tree_attention {

namespace {

struct ForwardBuffers {
  void* out = nullptr;   // [B, T_q, H, V]
  float* max = nullptr;  // [B, T_q, H]
  float* sum = nullptr;
  std::vector<int32_t*> parents;  // per layer [B, num_lists, H_kv, k], or empty
  int64_t parents_batch = 0;      // stride in elements
  ForwardMemory memory;
};

// The tokens for rows that multiply whole tiles under the bits of their lists.
void attend_masked_rows(const TreeCall& call, const TileMarkMemory& memory, const Chunk& chunk,
                        const AttendParams& attend, cudaStream_t stream) {
  const TileMarks marks{memory.marks, memory.tiles, memory.counts, call.rows.num_tiles};
  C10_CUDA_CHECK(launch_tile_marks(attend.gather, marks, stream));
  launch_of_shape(call.shape, [&](auto type, auto dim) {
    return launch_masked_rows<typename decltype(type)::type, dim.value>(
        {{attend, tiles_of_batch(call, call.rows, chunk.batch)}, marks}, stream);
  });
}

// Counts the entries of a layer's lists and, with `next`, marks which of their candidates these lists of the layer below
// hold.
void count_lists(const TreeCall& call, const ForwardMemory& memory, const GatherParams& gather,
                 const ListSlice& lists, const ListSlice& next, cudaStream_t stream) {
  ListMaskParams mask = counted_lists(gather);
  mask.lists = lists.data;
  mask.list_batch = lists.batch;
  mask.next_lists = next.data;
  mask.next_batch = next.batch;
  mask.selected = memory.mask;
  mask.mask_words = mask_words(call.problem);
  mask.counts = memory.counts;
  C10_CUDA_CHECK(launch_list_masks(mask, stream));
}

void attend_layer(const TreeCall& call, const ForwardConfig& config, const ForwardMemory& memory,
                  size_t layer_idx, const Chunk& chunk, const AttendParams& attend, cudaStream_t stream) {
  const bool masked = call.problem.token_of(chunk.query) < config.masked_rows;
  switch (layer_kernel(config, static_cast<int64_t>(layer_idx), static_cast<int64_t>(call.layers.size()),
                       masked)) {
    case LayerKernel::kMaskedRows:
      return attend_masked_rows(call, memory.marks, chunk, attend, stream);
    case LayerKernel::kDense:
      return launch_of_shape(call.shape, [&](auto type, auto dim) {
        return launch_dense_attend<typename decltype(type)::type, dim.value>(
            {attend, tiles_of_batch(call, call.top, chunk.batch)}, stream);
      });
    case LayerKernel::kPerList: {
      AttendParams listed = attend;
      if (!attend.gather.lists && long_top_lists(call.problem, config)) {
        count_lists(call, memory, attend.gather, {}, {}, stream);
        listed.gather.list_sizes = memory.counts;
      }
      return launch_of_shape(call.shape, [&](auto type, auto dim) {
        return launch_per_list_attend<typename decltype(type)::type, dim.value>(listed, stream);
      });
    }
    case LayerKernel::kSharedGather:
      return launch_of_shape(call.shape, [&](auto type, auto dim) {
        return launch_shared_gather_attend<typename decltype(type)::type, dim.value>(attend, stream);
      });
    case LayerKernel::kPerQuery:
    case LayerKernel::kGeneral:  // never on the tensor-core path
      return launch_of_shape(call.shape, [&](auto type, auto dim) {
        return launch_per_query_attend<typename decltype(type)::type, dim.value>(attend, stream);
      });
  }
}

void forward_chunk(const TreeCall& call, const ForwardConfig& config, const ForwardBuffers& buffers,
                   const Chunk& chunk, cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  const ForwardMemory& memory = buffers.memory;
  const int64_t stride = p.args.selection_stride;
  const int64_t chunk_lists = ceil_div(chunk.num_queries, stride);
  const int64_t list_row = p.num_kv_heads * p.args.top_k;
  const int64_t words = mask_words(p);

  auto lists_of = [&](size_t layer_idx) {
    if (!buffers.parents.empty()) {
      return ListSlice{
          buffers.parents[layer_idx] + chunk.batch * buffers.parents_batch + chunk.query / stride * list_row,
          buffers.parents_batch};
    }
    return ListSlice{memory.lists[layer_idx % 2], chunk_lists * list_row};
  };

  const size_t top = call.layers.size() - 1;
  for (size_t layer_idx = call.layers.size(); layer_idx-- > 0;) {
    const ListSlice lists = layer_idx == top ? ListSlice{} : lists_of(layer_idx);
    if (layer_idx > 0 && config.lists_given) {
      count_lists(call, memory, gather_of(call, layer_idx, chunk), lists, lists_of(layer_idx - 1), stream);
    } else if (layer_idx > 0) {
      select_layer(call, layer_idx, chunk, lists, lists_of(layer_idx - 1), memory.scores, memory.mask,
                   stream);
    }
    AttendParams attend;
    attend.gather = gather_of(call, layer_idx, chunk);
    attend.gather.lists = lists.data;
    attend.gather.list_batch = lists.batch;
    attend.selected = layer_idx > 0 ? memory.mask : nullptr;
    attend.selected_batch = chunk_lists * p.num_kv_heads * words;
    attend.mask_words = words;
    attend.first = layer_idx == top;
    attend.last = layer_idx == 0;
    const int64_t state = (chunk.batch * p.num_queries + chunk.query) * p.num_heads;
    attend.max = buffers.max + state;
    attend.sum = buffers.sum + state;
    attend.state_batch = p.num_queries * p.num_heads;
    attend.partial = memory.partial;
    attend.out = static_cast<char*>(buffers.out) + 2 * state * p.value_dim;
    attend.rotations = config.dim_rotations ? call.dim_rotations : call.fragment_rotations;
    attend_layer(call, config, memory, layer_idx, chunk, attend, stream);
  }
}

// The lists that hold every parent up to the queries' own: those of the top, and of the dense rows at all layers.
void write_full_lists(const TreeCall& call, const ForwardBuffers& buffers, cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  const int64_t stride = p.args.selection_stride;
  TopListParams params;
  params.num_batches = p.batch;
  params.batch_lists = buffers.parents_batch / (p.num_kv_heads * p.args.top_k);
  params.num_kv_heads = p.num_kv_heads;
  params.width = p.args.top_k;
  params.stride = stride;
  for (size_t i = 0; i < buffers.parents.size(); ++i) {
    const bool top = i + 1 == buffers.parents.size();
    params.parent_span = call.layers[i].node_span * kTensorCoreRate;
    for (const Piece& piece : p.pieces()) {
      params.lists = buffers.parents[i] + piece.query / stride * p.num_kv_heads * p.args.top_k;
      params.num_lists = ceil_div(top ? piece.queries : dense_queries(piece, call.config), stride);
      params.t0 = piece.start;
      if (params.num_lists > 0) {
        C10_CUDA_CHECK(launch_top_lists(params, stream));
      }
    }
  }
}

// The first queries of every batch and piece as dense attention.
void attend_dense_rows(const TreeCall& call, const Piece& piece, const ForwardBuffers& buffers,
                       cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  const Chunk chunk{0, p.batch, piece.query, dense_queries(piece, call.config)};
  const int64_t state = chunk.query * p.num_heads;
  AttendParams attend;
  attend.gather = gather_of(call, 0, chunk);
  attend.first = attend.last = true;
  attend.max = buffers.max + state;
  attend.sum = buffers.sum + state;
  attend.state_batch = p.num_queries * p.num_heads;
  attend.out = static_cast<char*>(buffers.out) + 2 * state * p.value_dim;
  launch_of_shape(call.shape, [&](auto type, auto dim) {
    return launch_dense_rows<typename decltype(type)::type, dim.value>({attend, call.rows}, stream);
  });
}

// The rows between tokens `begin` and `end` of every batch and piece, from the top of the tree to the tokens.
void walk_rows(const TreeCall& call, const ForwardConfig& c, const ForwardBuffers& buffers, int64_t begin,
               int64_t end, cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  for (int64_t batch = 0; batch < p.batch; batch += c.batch_chunk) {
    for (const Piece& piece : p.pieces()) {
      const int64_t last = piece.query + queries_before(piece, end);
      for (int64_t query = piece.query + queries_before(piece, begin); query < last;) {
        const Chunk chunk{batch, std::min(c.batch_chunk, p.batch - batch), query,
                          std::min(c.query_chunk, last - query)};
        forward_chunk(call, c, buffers, chunk, stream);
        query += chunk.num_queries;
      }
    }
  }
}

void run_forward(const TreeCall& call, const ForwardConfig& c, const ForwardBuffers& buffers,
                 cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  if (!c.lists_given) {
    write_full_lists(call, buffers, stream);
  }
  for (const Piece& piece : p.pieces()) {
    if (dense_queries(piece, c) > 0) {
      attend_dense_rows(call, piece, buffers, stream);
    }
  }
  if (c.masked_rows > 0) {
    walk_rows(call, c, buffers, c.dense_rows, c.masked_rows, stream);
    if (!call.grows) {
      pack_layer(call, call.layers.front(), stream);  // in the place of the tiles
    }
  }
  walk_rows(call, c, buffers, std::max(c.dense_rows, c.masked_rows), p.num_keys, stream);
}

}  // namespace

// ---- attention_forward

void run_tensor_core_forward(const TreeCall& call, const ForwardConfig& config, const Tensor& out,
                             const Tensor& gmax, const Tensor& gsum, const std::vector<Tensor>& parents,
                             cudaStream_t stream) {
  Workspace sizes;
  lay_out_forward(sizes, call.problem, config);
  const Tensor scratch = at::empty({std::max<int64_t>(sizes.bytes(), 1)}, out.options().dtype(at::kByte));
  Workspace space(scratch.mutable_data_ptr());
  ForwardBuffers buffers;
  buffers.out = out.mutable_data_ptr();
  buffers.max = gmax.mutable_data_ptr<float>();
  buffers.sum = gsum.mutable_data_ptr<float>();
  buffers.memory = lay_out_forward(space, call.problem, config);
  for (const Tensor& list : parents) {
    buffers.parents.push_back(list.mutable_data_ptr<int32_t>());
    buffers.parents_batch = list.stride(0);
  }
  run_forward(call, config, buffers, stream);
}

namespace {

// Batches [batch, batch + batches), queries [query, query + queries). Slices of the outputs are contiguous,
// because a chunk of several batches holds all queries.
struct Slice {
  int64_t batch, batches, query, queries, stride;

  Tensor rows(const Tensor& x) const { return x.narrow(0, batch, batches).narrow(1, query, queries); }
  Tensor lists(const Tensor& x) const {
    return x.narrow(0, batch, batches).narrow(1, query / stride, ceil_div(queries, stride));
  }
  Tensor nodes(const Tensor& x) const { return x.narrow(0, batch, batches); }
};

Tensor top_lists(const AttentionProblem& problem, const Slice& slice, const Tensor& like) {
  const int64_t num_lists = ceil_div(slice.queries, slice.stride);
  Tensor lists = at::empty({slice.batches, num_lists, problem.num_kv_heads, list_capacity(problem)},
                           like.options().dtype(at::kInt));
  const int64_t parent_span = node_span(problem.args.compression_rate, problem.layers());
  C10_CUDA_CHECK(launch_top_lists(
      {lists.mutable_data_ptr<int32_t>(), slice.batches, num_lists, num_lists, problem.num_kv_heads,
       lists.size(3), problem.token_of(slice.query), slice.stride, parent_span},
      c10::cuda::getCurrentCUDAStream()));
  return lists;
}

void general_chunk(const AttentionProblem& problem, bool given, const Slice& slice, const Tensor& q,
                   const CudaTree& tree, const Tensor& span_means, const RopeTables& rope, const Tensor& out,
                   const Tensor& gmax, const Tensor& gsum, const std::vector<Tensor>& parents) {
  const Tensor queries = slice.rows(q);
  const auto options = gmax.options();
  const Tensor max = slice.rows(gmax).fill_(-std::numeric_limits<double>::infinity());
  const Tensor sum = slice.rows(gsum).zero_();
  const std::vector<int64_t> state = {slice.batches, slice.queries, problem.num_heads};
  const std::vector<int64_t> state_out = {slice.batches, slice.queries, problem.num_heads, problem.value_dim};
  const Tensor partial = at::full(state_out, 0.0, options);
  const Tensor layer_max = at::empty(state, options), layer_sum = at::empty(state, options);
  const Tensor layer_out = at::empty(state_out, options);

  const Tensor means = span_means.defined() ? slice.nodes(span_means) : Tensor();

  Tensor lists = top_lists(problem, slice, q);
  const std::vector<int64_t> next_shape = {lists.size(0), lists.size(1), lists.size(2), problem.args.top_k};
  if (!parents.empty() && !given) {
    slice.lists(parents.back()).copy_(lists.narrow(3, 0, problem.args.top_k));
  }
  for (int64_t layer = problem.layers() - 1; layer >= 0; --layer) {
    const LayerArgs args = layer_args(problem, layer, slice.query);
    const Tensor keys = slice.nodes(tree.keys[layer]), values = slice.nodes(tree.values[layer]);
    if (layer > 0) {
      const Tensor next =
          parents.empty() ? at::empty(next_shape, lists.options()) : slice.lists(parents[layer - 1]);
      (given ? accumulate_given_cuda : select_accumulate_cuda)(queries, keys, values, means, lists, rope.cos,
                                                               rope.sin, args, layer_max, layer_sum,
                                                               layer_out, next);
      lists = next;
    } else {
      bottom_accumulate_cuda(queries, keys, values, lists, rope.cos, rope.sin, args, layer_max, layer_sum,
                             layer_out);
    }
    merge_to_global_cuda(max, sum, partial, layer_max, layer_sum, layer_out);
  }
  final_normalize_cuda(partial, sum, slice.rows(out));
}

void run(bool lists_given, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
         const Tensor& out, const Tensor& gmax, const Tensor& gsum, const std::vector<Tensor>& parents) {
  const LaunchScope scope(q);
  if (gmax.numel() == 0 || k.size(2) == 0) {
    return;
  }
  const AttentionProblem problem = attention_problem(q, k, v, args);
  ForwardConfig config = forward_config(problem);
  config.lists_given = lists_given;
  const CudaTree tree = build_cuda_tree(k, v, args);
  if (config.path == AttentionPath::kTensorCore) {
    const TensorCoreTree prepared =
        prepare_tensor_cores(problem, config, q, tree, /*selects=*/!config.lists_given, scope.stream());
    run_tensor_core_forward(prepared.call, config, out, gmax, gsum, parents, scope.stream());
    return;
  }
  const RopeTables rope = general_rope_tables(problem, q, scope.stream());
  const Tensor span_means = build_span_means(k, args);
  for (int64_t batch = 0; batch < problem.batch; batch += config.batch_chunk) {
    for (int64_t query = 0; query < problem.num_queries;) {
      const Slice slice{batch, std::min(config.batch_chunk, problem.batch - batch), query,
                        problem.chunk_queries(query, config.query_chunk), args.selection_stride};
      general_chunk(problem, config.lists_given, slice, q, tree, span_means, rope, out, gmax, gsum, parents);
      query += slice.queries;
    }
  }
}

}  // namespace

void attention_forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
                            const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                            const std::vector<Tensor>& parents) {
  run(/*lists_given=*/false, q, k, v, args, out, gmax, gsum, parents);
}

void attention_over_lists_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
                               const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                               const std::vector<Tensor>& parents) {
  run(/*lists_given=*/true, q, k, v, args, out, gmax, gsum, parents);
}

}  // namespace htree::tree_attention
