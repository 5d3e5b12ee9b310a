#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/cuda/forward_schedule.h"

#include "ops/tree_attention/cuda/forward/dense_top/dense_attend.h"
#include "ops/tree_attention/cuda/forward/per_list/per_list_attend.h"
#include "ops/tree_attention/cuda/forward/per_query/per_query_attend.h"
#include "ops/tree_attention/cuda/forward/shared_gather/shared_gather_attend.h"
#include "ops/tree_attention/cuda/tree/packed_layer.h"
#include "ops/tree_attention/cuda/tree/tables.h"

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

}  // namespace htree::tree_attention
