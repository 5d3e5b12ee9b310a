// attention_forward on CUDA: docs/semantics/tree_attention.md §1.5. What it allocates, and the order of its launches
// over layers and chunks. Temporary memory: plan/ and §1.8.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAException.h>

#include <limits>

#include "host/cuda/launch_scope.h"
#include "ops/tree_attention/cuda/forward/attend.h"
#include "ops/tree_attention/cuda/launch_params.h"
#include "ops/tree_attention/cuda/tree/copies.h"
#include "ops/tree_attention/cuda/tree/cuda_tree.h"
#include "ops/tree_attention/cuda/tree_call.h"

namespace htree::tree_attention {

namespace {

constexpr double kLog2E = 1.4426950408889634;

// Sizes of the scratch of one chunk in bytes, in the order they lie in memory.
struct ForwardScratch {
  int64_t partial, lists, mask, scores;

  explicit ForwardScratch(const TreeCall& call) {
    const AttentionProblem& p = call.problem;
    const AttentionConfig& c = call.config;
    const int64_t chunk_lists = ceil_div(c.query_chunk, p.args.selection_stride);
    const bool many = call.layers.size() > 1;
    partial = many ? aligned(c.batch_chunk * c.query_chunk * p.num_heads * p.value_dim * 4) : 0;
    lists = many ? aligned(c.batch_chunk * chunk_lists * p.num_kv_heads * p.args.top_k * 4) : 0;
    mask = many ? aligned(c.batch_chunk * chunk_lists * p.num_kv_heads * call.mask_words() * 4) : 0;
    scores = score_scratch_bytes(call);
  }
  int64_t total() const { return partial + 2 * lists + mask + scores; }
};

cudaError_t attend_layer(const TreeCall& call, size_t layer_idx, const Chunk& chunk,
                         const AttendParams& attend, cudaStream_t stream) {
  switch (
      layer_kernel(call.config, static_cast<int64_t>(layer_idx), static_cast<int64_t>(call.layers.size()))) {
    case LayerKernel::kDense:
      return dispatch_shape(call.shape, [&](auto type, auto dim) {
        return launch_dense_attend<typename decltype(type)::type, dim.value>(
            {attend, dense_tiles_of(call, chunk)}, stream);
      });
    case LayerKernel::kPerList:
      return dispatch_shape(call.shape, [&](auto type, auto dim) {
        return launch_per_list_attend<typename decltype(type)::type, dim.value>(attend, stream);
      });
    case LayerKernel::kSharedGather:
      return dispatch_shape(call.shape, [&](auto type, auto dim) {
        return launch_shared_gather_attend<typename decltype(type)::type, dim.value>(attend, stream);
      });
    case LayerKernel::kPerQuery:
    case LayerKernel::kGeneral:  // does not come here: forward.cu
      return dispatch_shape(call.shape, [&](auto type, auto dim) {
        return launch_per_query_attend<typename decltype(type)::type, dim.value>(attend, stream);
      });
  }
  return cudaErrorInvalidValue;
}

cudaError_t forward_chunk(const TreeCall& call, const ForwardBuffers& buffers, const Chunk& chunk,
                          cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  const ForwardScratch sizes(call);
  const int64_t stride = p.args.selection_stride;
  const int64_t chunk_lists = ceil_div(chunk.num_queries, stride);
  const int64_t list_row = p.num_kv_heads * p.args.top_k;
  float* partial = reinterpret_cast<float*>(buffers.scratch);
  char* scratch_lists = buffers.scratch + sizes.partial;
  uint32_t* mask = reinterpret_cast<uint32_t*>(scratch_lists + 2 * sizes.lists);
  float* scores = reinterpret_cast<float*>(scratch_lists + 2 * sizes.lists + sizes.mask);
  const int64_t mask_words = call.mask_words();

  auto lists_of = [&](size_t layer_idx) {
    if (!buffers.parents.empty()) {
      const int64_t batch_stride = p.num_lists() * list_row;
      return ListSlice{
          buffers.parents[layer_idx] + chunk.batch * batch_stride + chunk.query / stride * list_row,
          batch_stride};
    }
    return ListSlice{reinterpret_cast<int32_t*>(scratch_lists + layer_idx % 2 * sizes.lists),
                     chunk_lists * list_row};
  };

  const size_t top = call.layers.size() - 1;
  for (size_t layer_idx = call.layers.size(); layer_idx-- > 0;) {
    const ListSlice lists = layer_idx == top ? ListSlice{} : lists_of(layer_idx);
    if (layer_idx > 0) {
      const cudaError_t error =
          select_layer(call, layer_idx, chunk, lists, lists_of(layer_idx - 1), scores, mask, stream);
      if (error != cudaSuccess) {
        return error;
      }
    }
    AttendParams attend;
    attend.gather = gather_of(call, layer_idx, chunk);
    attend.gather.lists = lists.data;
    attend.gather.list_batch = lists.batch;
    attend.selected = layer_idx > 0 ? mask : nullptr;
    attend.selected_batch = chunk_lists * p.num_kv_heads * mask_words;
    attend.mask_words = mask_words;
    attend.first = layer_idx == top;
    attend.last = layer_idx == 0;
    const int64_t state = (chunk.batch * p.num_queries + chunk.query) * p.num_heads;
    attend.max = buffers.max + state;
    attend.sum = buffers.sum + state;
    attend.state_batch = p.num_queries * p.num_heads;
    attend.partial = partial;
    attend.out = static_cast<char*>(buffers.out) + 2 * state * p.value_dim;
    attend.rotations = call.rotations;
    if (const cudaError_t error = attend_layer(call, layer_idx, chunk, attend, stream);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

TensorView at_row(TensorView view, int64_t batch, int64_t row) {
  view.data = static_cast<const char*>(view.data) + 2 * (batch * view.batch + row * view.row);
  return view;
}

GatherParams gather_of(const TreeCall& call, size_t layer_idx, const Chunk& chunk) {
  const AttentionProblem& p = call.problem;
  const TreeLayer& layer = call.layers[layer_idx];
  GatherParams g;
  g.queries = at_row(call.queries, chunk.batch, chunk.query);
  g.packed = layer.packed +
             chunk.batch * p.num_kv_heads * layer.num_parents * packed_parent_bytes(p.key_dim, p.value_dim);
  g.num_parents = layer.num_parents;
  g.rope = call.rope;
  g.score_scale = static_cast<float>(p.args.scale * kLog2E);
  g.node_span = layer.node_span;
  g.t0 = p.t0() + chunk.query;
  g.num_queries = static_cast<int>(chunk.num_queries);
  g.num_lists = static_cast<int>(ceil_div(chunk.num_queries, p.args.selection_stride));
  g.num_batches = static_cast<int>(chunk.num_batches);
  g.num_kv_heads = static_cast<int>(p.num_kv_heads);
  g.group = static_cast<int>(p.group());
  g.list_width = static_cast<int>(p.args.top_k);
  g.stride = static_cast<int>(p.args.selection_stride);
  return g;
}

int64_t forward_scratch_bytes(const TreeCall& call) {
  return ForwardScratch(call).total();
}

cudaError_t run_prepare(const TreeCall& call, cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  cudaError_t error = launch_rope_table(call.rope, call.rope_rows(), static_cast<int>(p.key_dim),
                                        p.args.rope_base, p.args.rotate, stream);
  if (call.rotations && error == cudaSuccess) {
    const RotationOrder order =
        call.config.gather == GatherKernel::kSharedGather || call.config.shared_gather_queries
            ? RotationOrder::kFragments
            : RotationOrder::kDims;
    error = launch_rotation_table(call.rotations, call.rotation_slots(), static_cast<int>(p.key_dim), order,
                                  p.args.rope_base, p.args.rotate, stream);
  }
  if (call.top_rotations && error == cudaSuccess) {
    error = launch_rotation_table(call.top_rotations, call.rotation_slots(), static_cast<int>(p.key_dim),
                                  RotationOrder::kDims, p.args.rope_base, p.args.rotate, stream);
  }
  for (size_t i = 0; i < call.layers.size() && error == cudaSuccess; ++i) {
    const TreeLayer& layer = call.layers[i];
    PackParams pack;
    pack.keys = layer.keys;
    pack.values = layer.values;
    pack.rope = call.rope;
    pack.packed = layer.packed;
    pack.num_nodes = layer.num_nodes;
    pack.num_parents = layer.num_parents;
    pack.num_batches = p.batch;
    pack.num_kv_heads = p.num_kv_heads;
    error = dispatch_shape(call.shape, [&](auto type, auto dim) {
      return launch_pack_layer<typename decltype(type)::type, dim.value>(pack, stream);
    });
  }
  if (call.config.dense_top && error == cudaSuccess) {
    DenseLayerParams pack;
    pack.keys = call.layers.back().keys;
    pack.values = call.layers.back().values;
    pack.rope = call.rope;
    pack.tiles = call.top;
    pack.num_nodes = call.layers.back().num_nodes;
    pack.num_batches = p.batch;
    pack.num_kv_heads = p.num_kv_heads;
    error = dispatch_shape(call.shape, [&](auto type, auto dim) {
      return launch_dense_layer<typename decltype(type)::type, dim.value>(pack, stream);
    });
  }
  return error;
}

cudaError_t run_forward(const TreeCall& call, const ForwardBuffers& buffers, cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  const AttentionConfig& c = call.config;
  if (!buffers.parents.empty()) {
    const cudaError_t error =
        launch_top_lists(buffers.parents.back(), p.batch, p.num_lists(), p.num_kv_heads, p.args.top_k, p.t0(),
                         p.args.selection_stride, call.layers.back().node_span * kTensorCoreRate, stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  for (int64_t batch = 0; batch < p.batch; batch += c.batch_chunk) {
    for (int64_t query = 0; query < p.num_queries; query += c.query_chunk) {
      const Chunk chunk{batch, std::min(c.batch_chunk, p.batch - batch), query,
                        std::min(c.query_chunk, p.num_queries - query)};
      if (const cudaError_t error = forward_chunk(call, buffers, chunk, stream); error != cudaSuccess) {
        return error;
      }
    }
  }
  return cudaSuccess;
}

// ---- attention_forward on CUDA: docs/semantics/tree_attention.md §1.5. Temporary memory: plan/ and
// §1.8; calls go over the queries in chunks.

namespace {

void forward_tensor_core(const AttentionProblem& problem, const AttentionConfig& config, const Tensor& q,
                         const CudaTree& tree, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                         const std::vector<Tensor>& parents, cudaStream_t stream) {
  const TensorCoreTree prepared = prepare_tensor_cores(problem, config, q, tree, stream);
  const int64_t bytes = std::max<int64_t>(forward_scratch_bytes(prepared.call), 1);
  const Tensor scratch = at::empty({bytes}, q.options().dtype(at::kByte));
  ForwardBuffers buffers;
  buffers.out = out.mutable_data_ptr();
  buffers.max = gmax.mutable_data_ptr<float>();
  buffers.sum = gsum.mutable_data_ptr<float>();
  buffers.scratch = static_cast<char*>(scratch.mutable_data_ptr());
  for (const Tensor& list : parents) {
    buffers.parents.push_back(list.mutable_data_ptr<int32_t>());
  }
  C10_CUDA_CHECK(run_forward(prepared.call, buffers, stream));
}

// Batches [batch, batch + batches), queries [query, query + queries): contiguous slices of contiguous
// outputs, since a chunk of several batches holds all queries.
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
  Tensor lists = at::empty({slice.batches, num_lists, problem.num_kv_heads, problem.args.top_k},
                           like.options().dtype(at::kInt));
  const int64_t rate = problem.args.compression_rate;
  C10_CUDA_CHECK(launch_top_lists(lists.mutable_data_ptr<int32_t>(), slice.batches, num_lists,
                                  problem.num_kv_heads, problem.args.top_k, problem.t0() + slice.query,
                                  slice.stride, node_span(rate, problem.layers()),
                                  c10::cuda::getCurrentCUDAStream()));
  return lists;
}

void general_chunk(const AttentionProblem& problem, const Slice& slice, const Tensor& q, const CudaTree& tree,
                   const RopeTables& rope, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                   const std::vector<Tensor>& parents) {
  const Tensor queries = slice.rows(q);
  const auto options = gmax.options();
  const Tensor max = slice.rows(gmax).fill_(-std::numeric_limits<double>::infinity());
  const Tensor sum = slice.rows(gsum).zero_();
  const std::vector<int64_t> state = {slice.batches, slice.queries, problem.num_heads};
  const std::vector<int64_t> state_out = {slice.batches, slice.queries, problem.num_heads, problem.value_dim};
  const Tensor partial = at::full(state_out, 0.0, options);
  const Tensor layer_max = at::empty(state, options), layer_sum = at::empty(state, options);
  const Tensor layer_out = at::empty(state_out, options);

  Tensor lists = top_lists(problem, slice, q);
  if (!parents.empty()) {
    slice.lists(parents.back()).copy_(lists);
  }
  for (int64_t layer = problem.layers() - 1; layer >= 0; --layer) {
    const LayerArgs args = layer_args(problem, layer, slice.query);
    const Tensor keys = slice.nodes(tree.keys[layer]), values = slice.nodes(tree.values[layer]);
    if (layer > 0) {
      const Tensor next = parents.empty() ? at::empty_like(lists) : slice.lists(parents[layer - 1]);
      select_accumulate_cuda(queries, keys, values, lists, rope.cos, rope.sin, args, layer_max, layer_sum,
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

}  // namespace

void attention_forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
                            const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                            const std::vector<Tensor>& parents) {
  const LaunchScope scope(q);
  if (gmax.numel() == 0 || k.size(2) == 0) {
    return;
  }
  const AttentionProblem problem = attention_problem(q, k, v, args);
  const AttentionConfig config = attention_config(problem);
  const CudaTree tree = build_cuda_tree(k, v, args);
  if (config.path == AttentionPath::kTensorCore) {
    forward_tensor_core(problem, config, q, tree, out, gmax, gsum, parents, scope.stream());
    return;
  }
  const RopeTables rope = general_rope_tables(problem, q);
  for (int64_t batch = 0; batch < problem.batch; batch += config.batch_chunk) {
    for (int64_t query = 0; query < problem.num_queries; query += config.query_chunk) {
      const Slice slice{batch, std::min(config.batch_chunk, problem.batch - batch), query,
                        std::min(config.query_chunk, problem.num_queries - query), args.selection_stride};
      general_chunk(problem, slice, q, tree, rope, out, gmax, gsum, parents);
    }
  }
}

}  // namespace htree::tree_attention
