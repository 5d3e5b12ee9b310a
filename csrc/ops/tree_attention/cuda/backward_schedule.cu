#include "ops/tree_attention/cuda/backward_schedule.h"
#include "ops/tree_attention/cuda/dispatch_shape.h"

#include "ops/tree_attention/cuda/backward/inverse_lists.h"
#include "ops/tree_attention/cuda/backward/per_parent/parent_gradient.h"
#include "ops/tree_attention/cuda/backward/push_gradient.h"
#include "ops/tree_attention/cuda/backward/shared_gather/shared_gather_gradient.h"
#include "ops/tree_attention/cuda/tree/tables.h"
#include "ops/tree_attention/plan/backward_scratch.h"

namespace htree::tree_attention {
namespace {

class BackwardRun {
 public:
  BackwardRun(const TreeCall& call, const BackwardBuffers& buffers, cudaStream_t stream)
      : call_(call),
        p_(call.problem),
        buffers_(buffers),
        at_(call, buffers.parents.empty()),
        stream_(stream),
        top_(call.layers.size() - 1) {}

  cudaError_t run() {
    cudaMemsetAsync(scratch<char>(at_.key_bounds), 0, p_.batch * p_.num_kv_heads * sizeof(KeyBounds),
                    stream_);
    PackParams tokens;
    tokens.keys = call_.layers[0].keys;
    tokens.values = call_.layers[0].values;
    tokens.num_nodes = call_.layers[0].num_nodes;
    tokens.num_batches = p_.batch;
    tokens.num_kv_heads = p_.num_kv_heads;
    if (layer_per_list(call_, top_)) {  // they only ever add
      const int64_t first = per_list() ? 0 : layer_rows(call_, top_);
      const size_t rows = static_cast<size_t>(gradient_sum_rows(call_) - first);
      if (buffers_.key_sums) {
        cudaMemsetAsync(buffers_.key_sums + first * p_.key_dim, 0, rows * p_.key_dim * 4, stream_);
      }
      if (buffers_.value_sums) {
        cudaMemsetAsync(buffers_.value_sums + first * p_.value_dim, 0, rows * p_.value_dim * 4, stream_);
      }
    }
    cudaError_t error = cudaGetLastError();  // of the fills
    if (error == cudaSuccess && by_parent(call_) && keys_wanted()) {
      error = launch_position_rotations(call_.rope, scratch<__half2>(at_.rotations), call_.rope_rows(),
                                        static_cast<int>(p_.key_dim), stream_);
    }
    if (error == cudaSuccess) {
      error = launch_key_bounds(call_.shape, tokens, scratch<KeyBounds>(at_.key_bounds), stream_);
    }
    for (int64_t batch = 0; batch < p_.batch; batch += call_.config.batch_chunk) {
      for (int64_t query = 0; query < p_.num_queries && error == cudaSuccess;
           query += call_.config.query_chunk) {
        error = chunk({batch, std::min(call_.config.batch_chunk, p_.batch - batch), query,
                       std::min(call_.config.query_chunk, p_.num_queries - query)});
      }
    }
    return error != cudaSuccess ? error : finish();
  }

 private:
  template <typename T>
  T* scratch(int64_t offset) const {
    return reinterpret_cast<T*>(buffers_.scratch + offset);
  }
  bool per_list() const { return call_.config.gather == GatherKernel::kPerList; }
  bool keys_wanted() const { return buffers_.key_sums || buffers_.value_sums; }

  char* query_gradient_of(const Chunk& chunk) const {
    return static_cast<char*>(buffers_.query_gradient) +
           2 * (chunk.batch * p_.num_queries + chunk.query) * p_.num_heads * p_.key_dim;
  }

  ListSlice lists_of(size_t layer_idx, const Chunk& chunk) const {
    const int64_t row = p_.num_kv_heads * p_.args.top_k;
    if (!buffers_.parents.empty()) {
      const int64_t batch_stride = p_.num_lists() * row;
      // only read: the lists of the caller are never a target of select_layer
      return {const_cast<int32_t*>(buffers_.parents[layer_idx]) + chunk.batch * batch_stride +
                  chunk.query / p_.args.selection_stride * row,
              batch_stride};
    }
    return {scratch<int32_t>(at_.lists + static_cast<int64_t>(layer_idx) * at_.list_bytes),
            ceil_div(chunk.num_queries, p_.args.selection_stride) * row};
  }

  cudaError_t chunk(const Chunk& chunk) {
    if (buffers_.parents.empty()) {
      for (size_t i = top_; i > 0; --i) {
        const cudaError_t error =
            select_layer(call_, i, chunk, i == top_ ? ListSlice{} : lists_of(i, chunk),
                         lists_of(i - 1, chunk), scratch<float>(at_.scores), nullptr, stream_);
        if (error != cudaSuccess) {
          return error;
        }
      }
    }
    cudaMemsetAsync(scratch<char>(at_.query_bounds), 0,
                    chunk.num_batches * p_.num_kv_heads * sizeof(QueryBounds), stream_);
    RowParams rows;
    rows.queries = at_row(call_.queries, chunk.batch, chunk.query);
    rows.gradients = at_row(buffers_.gradients, chunk.batch, chunk.query);
    rows.outputs = at_row(buffers_.outputs, chunk.batch, chunk.query);
    const int64_t state = (chunk.batch * p_.num_queries + chunk.query) * p_.num_heads;
    rows.max = buffers_.max + state;
    rows.sum = buffers_.sum + state;
    rows.state_batch = p_.num_queries * p_.num_heads;
    rows.records = layer_per_list(call_, 0) ? nullptr : scratch<char>(at_.records);
    rows.tiled = by_parent(call_);
    rows.meta = scratch<RowMeta>(at_.meta);
    rows.bounds = scratch<QueryBounds>(at_.query_bounds);
    rows.num_batches = static_cast<int>(chunk.num_batches);
    rows.num_queries = static_cast<int>(chunk.num_queries);
    rows.num_kv_heads = static_cast<int>(p_.num_kv_heads);
    rows.group = static_cast<int>(p_.group());
    cudaError_t error = launch_gradient_rows(call_.shape, rows, stream_);
    for (size_t i = top_ + 1; i-- > 0 && error == cudaSuccess;) {
      error = layer(i, chunk);
    }
    return error;
  }

  cudaError_t layer(size_t layer_idx, const Chunk& chunk) {
    const bool implicit = layer_idx == top_;
    const ListSlice lists = implicit ? ListSlice{} : lists_of(layer_idx, chunk);
    GradientParams common;
    common.gather = gather_of(call_, layer_idx, chunk);
    common.gather.lists = lists.data;
    common.gather.list_batch = lists.batch;
    common.records = scratch<char>(at_.records);
    common.tiled = by_parent(call_);
    common.meta = scratch<RowMeta>(at_.meta);
    common.key_bounds = scratch<KeyBounds>(at_.key_bounds) + chunk.batch * p_.num_kv_heads;
    common.query_bounds = scratch<QueryBounds>(at_.query_bounds);
    common.selected = layer_idx > 0 ? scratch<uint32_t>(at_.mask) : nullptr;
    common.mask_words = call_.mask_words();
    common.scale = static_cast<float>(p_.args.scale);

    if (!implicit || layer_idx > 0) {
      ListMaskParams mask;
      mask.lists = lists.data;
      mask.list_batch = lists.batch;
      if (layer_idx > 0) {
        const ListSlice next = lists_of(layer_idx - 1, chunk);
        mask.next_lists = next.data;
        mask.next_batch = next.batch;
      }
      mask.selected = scratch<uint32_t>(at_.mask);
      mask.mask_words = common.mask_words;
      mask.counts = scratch<int32_t>(at_.counts);
      mask.num_batches = common.gather.num_batches;
      mask.num_lists = common.gather.num_lists;
      mask.num_kv_heads = common.gather.num_kv_heads;
      mask.width = common.gather.list_width;
      mask.t0 = common.gather.t0;
      mask.stride = common.gather.stride;
      mask.node_span = common.gather.node_span;
      if (const cudaError_t error = launch_list_masks(mask, stream_); error != cudaSuccess) {
        return error;
      }
    }
    if (layer_per_list(call_, layer_idx)) {
      return per_list_layer(layer_idx, chunk, common, lists);
    }
    if (buffers_.query_gradient) {
      QueryGradientParams query;
      query.common = common;
      query.first = implicit;
      query.last = layer_idx == 0;
      query.partial = scratch<float>(at_.query_sums);
      query.gradient = query_gradient_of(chunk);
      query.gradient_batch = p_.num_queries * p_.num_heads * p_.key_dim;
      const cudaError_t error =
          call_.config.shared_gather_queries
              ? dispatch_shape(
                    call_.shape,
                    [&](auto type, auto dim) {
                      return launch_shared_gather_gradient<typename decltype(type)::type, dim.value>(
                          {query, call_.rotations}, stream_);
                    })
              : dispatch_shape(call_.shape, [&](auto type, auto dim) {
                  return launch_query_gradient<typename decltype(type)::type, dim.value>(query, stream_);
                });
      if (error != cudaSuccess) {
        return error;
      }
    }
    return keys_wanted() ? layer_keys(layer_idx, chunk, common, lists) : cudaSuccess;
  }

  cudaError_t layer_keys(size_t layer_idx, const Chunk& chunk, const GradientParams& common,
                         const ListSlice& lists) {
    const TreeLayer& layer = call_.layers[layer_idx];
    KeyGradientParams key;
    key.common = common;
    key.counts = scratch<int32_t>(at_.counts);
    if (lists.data) {
      if (const cudaError_t error = invert(layer, common.gather, lists); error != cudaSuccess) {
        return error;
      }
      key.entries = scratch<uint32_t>(at_.entries);
      key.offsets = scratch<uint32_t>(at_.offsets);
    }
    sums_of(layer_idx, chunk, key.keys, key.values);
    key.add = chunk.query > 0;
    if (!by_parent(call_)) {
      return dispatch_shape(call_.shape, [&](auto type, auto dim) {
        return launch_key_gradient<typename decltype(type)::type, dim.value>(key, stream_);
      });
    }
    key.rotations = scratch<__half2>(at_.rotations);
    const int64_t list_bytes = p_.args.selection_stride * p_.group() * 2 * (p_.key_dim + p_.value_dim);
    const int64_t window = std::max<int64_t>(1, kParentWindowBytes / list_bytes);
    cudaError_t error = cudaSuccess;
    for (int64_t first = 0; first < common.gather.num_lists && error == cudaSuccess; first += window) {
      key.first_list = static_cast<uint32_t>(first);
      key.end_list = static_cast<uint32_t>(std::min<int64_t>(first + window, common.gather.num_lists));
      error = dispatch_shape(call_.shape, [&](auto type, auto dim) {
        return launch_parent_gradient<typename decltype(type)::type, dim.value>(key, stream_);
      });
      key.add = true;
    }
    return error;
  }

  // Users of every parent of the layer.
  cudaError_t invert(const TreeLayer& layer, const GatherParams& gather, const ListSlice& lists) {
    InverseParams inverse;
    inverse.lists = lists.data;
    inverse.list_batch = lists.batch;
    inverse.num_parents = layer.num_parents;
    inverse.num_batches = gather.num_batches;
    inverse.num_lists = gather.num_lists;
    inverse.num_kv_heads = gather.num_kv_heads;
    inverse.width = gather.list_width;
    inverse.entries = scratch<uint32_t>(at_.entries);
    inverse.offsets = scratch<uint32_t>(at_.offsets);
    inverse.run_counts = scratch<uint32_t>(at_.run_counts);
    return launch_inverse_lists(inverse, stream_);
  }

  void sums_of(size_t layer_idx, const Chunk& chunk, float*& keys, float*& values) const {
    const int64_t rows = layer_rows(call_, layer_idx) + chunk.batch * p_.num_kv_heads *
                                                            call_.layers[layer_idx].num_parents *
                                                            kTensorCoreRate;
    keys = buffers_.key_sums ? buffers_.key_sums + rows * p_.key_dim : nullptr;
    values = buffers_.value_sums ? buffers_.value_sums + rows * p_.value_dim : nullptr;
  }

  // Both gradients at once.
  cudaError_t per_list_layer(size_t layer_idx, const Chunk& chunk, const GradientParams& common,
                             const ListSlice& lists) {
    PerListLayerParams layer;
    PartialSumParams& sums = layer.sums;
    sums_of(layer_idx, chunk, sums.keys, sums.values);
    if (lists.data && keys_wanted()) {
      if (const cudaError_t error = invert(call_.layers[layer_idx], common.gather, lists);
          error != cudaSuccess) {
        return error;
      }
      sums.entries = scratch<uint32_t>(at_.entries);
      sums.offsets = scratch<uint32_t>(at_.offsets);
    }
    PerListGradientParams& tasks = sums.tasks;
    tasks.gather = common.gather;
    tasks.mask_stride = common.gather.stride;
    tasks.rotations = call_.rotations;
    if (layer_runs(call_, layer_idx)) {
      GatherParams& gather = tasks.gather;
      tasks.rotations = call_.top_rotations;
      tasks.lead = static_cast<int>(gather.t0 % kGradientRun);
      for (int group = gather.group; group > 1; group /= 2) {
        ++tasks.group_shift;
      }
      gather.stride = kGradientRun;
      gather.num_lists = static_cast<int>(ceil_div(tasks.lead + chunk.num_queries, kGradientRun));
    }
    tasks.gradients = at_row(buffers_.gradients, chunk.batch, chunk.query);
    tasks.meta = common.meta;
    tasks.key_bounds = common.key_bounds;
    tasks.query_bounds = common.query_bounds;
    tasks.counts = lists.data ? scratch<int32_t>(at_.counts) : nullptr;
    tasks.selected = common.selected;
    tasks.mask_words = common.mask_words;
    tasks.scale = common.scale;
    tasks.first = layer_idx == top_;
    tasks.last = layer_idx == 0;
    tasks.partial_queries = scratch<float>(at_.query_sums);
    if (buffers_.query_gradient) {
      tasks.query_gradient = query_gradient_of(chunk);
      tasks.query_gradient_batch = p_.num_queries * p_.num_heads * p_.key_dim;
    }
    tasks.partial_slots = partial_slots(call_, layer_idx);
    layer.tasks = tasks_of_list(call_, layer_idx);
    layer.partials = scratch<char>(at_.partials);
    layer.partial_bytes = at_.partial_bytes;
    layer.num_sms = call_.config.num_sms;
    return run_per_list_layer(call_.shape, layer, stream_);
  }

  // From the top to the tokens, where the sums are rounded into the gradients.
  cudaError_t finish() {
    const StoreType type = call_.shape.dtype == HalfType::kHalf ? StoreType::kHalf : StoreType::kBFloat16;
    cudaError_t error = cudaSuccess;
    const auto push = [&](float* sums, int64_t dim, void* out) {
      for (size_t i = top_ + 1; sums && error == cudaSuccess && i-- > 0;) {
        const TreeLayer& layer = call_.layers[i];
        PushParams params;
        params.child = sums + layer_rows(call_, i) * dim;
        params.heads = p_.batch * p_.num_kv_heads;
        params.num_nodes = layer.num_nodes;
        params.child_rows = layer.num_parents * kTensorCoreRate;
        params.dim = dim;
        if (i < top_) {
          params.parent = sums + layer_rows(call_, i + 1) * dim;
          params.parent_rows = call_.layers[i + 1].num_parents * kTensorCoreRate;
        }
        if (i == 0) {
          error = launch_store_gradient(params, p_.num_kv_heads, type, out, stream_);
        } else if (params.parent) {
          error = launch_push_gradient(params, stream_);
        }
      }
    };
    push(buffers_.key_sums, p_.key_dim, buffers_.key_gradient);
    push(buffers_.value_sums, p_.value_dim, buffers_.value_gradient);
    return error;
  }

  const TreeCall& call_;
  const AttentionProblem& p_;
  const BackwardBuffers& buffers_;
  BackwardScratch at_;
  cudaStream_t stream_;
  size_t top_;
};

}  // namespace

int64_t gradient_sum_rows(const TreeCall& call) {
  return layer_rows(call, call.layers.size());
}

int64_t backward_scratch_bytes(const TreeCall& call, bool recompute) {
  return BackwardScratch(call, recompute).total;
}

cudaError_t run_backward(const TreeCall& call, const BackwardBuffers& buffers, cudaStream_t stream) {
  return BackwardRun(call, buffers, stream).run();
}

}  // namespace htree::tree_attention
