// attention_backward on CUDA: docs/semantics/tree_attention.md §1.10. What it allocates, and the order of its launches
// over chunks and layers. Deterministic, without float atomics. Scratch beyond the fp32 sums of dK and dV and the
// tree: at most kBackwardScratchBytes (1.8 GiB) at any T, as long as one list of one batch fits.
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "host/cuda/launch_scope.h"
#include "ops/tree_attention/cuda/backward/general/general_backward.h"
#include "ops/tree_attention/cuda/backward/gradients.h"
#include "ops/tree_attention/cuda/backward/inverse_lists.h"
#include "ops/tree_attention/cuda/backward/push_gradient.h"
#include "ops/tree_attention/cuda/launch_params.h"
#include "ops/tree_attention/cuda/tree/copies.h"
#include "ops/tree_attention/cuda/tree_call.h"

namespace htree::tree_attention {

// Lists whose partial sums fit `budget` bytes; at least one.
inline int64_t partial_sum_lists(int64_t budget, int64_t tasks, int64_t slots, int64_t bytes) {
  return std::max<int64_t>(1, budget / (tasks * slots * bytes));
}

struct PerListLayerParams {
  PartialSumParams sums;     // without partials, first_task and num_tasks; keys and values may be null
  int64_t tasks = 1;         // of kGradientRows rows per list
  char* partials = nullptr;  // partial_bytes of them
  int64_t partial_bytes = 0;
  int64_t num_sms = 1;
};

// Lists from `first` on, counted over all heads, whose partial sums fit `slots` of them together; `most` is
// how many slots each of them may need. Without lists, later queries need more of them. A thread block takes
// one list at a time, so that a launch has a multiple of `wave` lists, as many as run together, if it can.
struct ListRun {
  int64_t lists, most;
};
inline ListRun next_lists(const PerListGradientParams& b, int64_t first, int64_t num_lists, int64_t slots,
                          int64_t wave) {
  const GatherParams& p = b.gather;
  const int64_t row = first % p.num_lists, left = num_lists - first;
  const auto needed = [&](int64_t lists) {
    if (p.lists) {
      return b.run.slots;  // a caller's list may hold more than it should
    }
    const int64_t last_row = std::min(row + lists, int64_t{p.num_lists}) - 1;
    return (p.t0 - b.lead + last_row * p.stride) / p.node_span / kTensorCoreRate + 1;
  };
  int64_t low = 1, high = left;  // at least one list
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (middle * needed(middle) <= slots) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t lists = low < left && low > wave ? low / wave * wave : low;
  return {lists, needed(lists)};
}

inline cudaError_t run_per_list_layer(const TensorCoreShape& shape, const PerListLayerParams& layer,
                                      cudaStream_t stream) {
  PartialSumParams sums = layer.sums;
  PerListGradientParams& b = sums.tasks;
  const GatherParams& p = b.gather;
  const bool keys_wanted = sums.keys || sums.values;
  const int64_t num_lists = int64_t{p.num_batches} * p.num_kv_heads * p.num_lists;
  const int64_t slots =
      layer.partial_bytes / (layer.tasks * partial_sum_bytes(shape.key_dim, shape.value_dim));
  const int64_t wave = std::max<int64_t>(1, layer.num_sms / layer.tasks);
  const PerListGradientParams all = b;
  b.run.partials = keys_wanted ? layer.partials : nullptr;
  for (int64_t first = 0; first < num_lists;) {
    const ListRun run = keys_wanted ? next_lists(all, first, num_lists, slots, wave) : ListRun{num_lists, 1};
    b.run.slots = run.most;
    b.run.first_task = first * layer.tasks;
    b.run.num_tasks = run.lists * layer.tasks;
    first += run.lists;
    cudaError_t error = dispatch_shape(shape, [&](auto type, auto dim) {
      return launch_per_list_gradient<typename decltype(type)::type, dim.value>(b, stream);
    });
    if (keys_wanted && error == cudaSuccess) {
      error = dispatch_shape(shape, [&](auto type, auto dim) {
        return launch_partial_sums<typename decltype(type)::type, dim.value>(sums, stream);
      });
    }
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

// ---- Which kernels make the gradients of a layer, and where their scratch lies. No torch.

// Whether the gradients of a layer are made by backward/per_list/, and there for runs of neighbouring queries.
inline bool layer_per_list(const TreeCall& call, size_t layer_idx) {
  return call.config.gather == GatherKernel::kPerList ||
         (call.config.per_list_top && layer_idx + 1 == call.layers.size());
}
inline bool layer_runs(const TreeCall& call, size_t layer_idx) {
  return call.config.per_list_top && layer_idx + 1 == call.layers.size();
}
// Blocks of kGradientRows rows per list or run.
inline int64_t tasks_of_list(const TreeCall& call, size_t layer_idx) {
  const int64_t queries = layer_runs(call, layer_idx) ? kGradientRun : call.problem.args.selection_stride;
  return ceil_div(queries * call.problem.group(), kGradientRows);
}
// Partial sums of a block in a layer, at most.
inline int64_t partial_slots(const TreeCall& call, size_t layer_idx) {
  const bool implicit = layer_idx + 1 == call.layers.size();
  return implicit ? call.layers[layer_idx].num_parents : call.problem.args.top_k;
}
inline int64_t partial_bytes_of(const TreeCall& call) {
  return partial_sum_bytes(call.problem.key_dim, call.problem.value_dim);
}

// Whether dK and dV are made by parent_gradient.cuh.
inline bool by_parent(const TreeCall& call) {
  const int64_t group = call.problem.group();
  return call.config.gather != GatherKernel::kPerList && group >= kMinParentGroup && group <= kMaxParentGroup;
}

// Offsets of the scratch, in bytes.
struct BackwardScratch {
  int64_t key_bounds, query_bounds, records, meta, query_sums, lists, list_bytes, mask, counts, entries,
      offsets, run_counts, rotations, partials, partial_bytes, scores, total;

  BackwardScratch(const TreeCall& call, bool recompute) {
    const AttentionProblem& p = call.problem;
    const AttentionConfig& c = call.config;
    const int64_t chunk_lists = ceil_div(c.query_chunk, p.args.selection_stride);
    const int64_t rows = c.batch_chunk * c.query_chunk * p.num_heads;
    const int64_t query_rows = c.batch_chunk * c.query_chunk * p.num_kv_heads;
    const int64_t list_rows = c.batch_chunk * chunk_lists * p.num_kv_heads;
    const int64_t num_entries = call.layers.size() > 1 ? list_rows * p.args.top_k : 0;
    total = 0;
    const auto take = [&](int64_t bytes) {
      const int64_t at = total;
      total += aligned(bytes);
      return at;
    };
    key_bounds = take(p.batch * p.num_kv_heads * static_cast<int64_t>(sizeof(KeyBounds)));
    query_bounds = take(c.batch_chunk * p.num_kv_heads * static_cast<int64_t>(sizeof(QueryBounds)));
    const bool per_list = c.gather == GatherKernel::kPerList;
    records = take(layer_per_list(call, 0) ? 0
                   : by_parent(call)       ? query_rows * tiled_record_bytes(p.key_dim, p.value_dim)
                                           : rows * 2 * (p.key_dim + p.value_dim));
    meta = take(rows * static_cast<int64_t>(sizeof(RowMeta)));
    query_sums = take(call.layers.size() > 1 ? rows * p.key_dim * 4 : 0);
    list_bytes = aligned(list_rows * p.args.top_k * 4);
    lists = take(recompute ? list_bytes * static_cast<int64_t>(call.layers.size() - 1) : 0);
    mask = take(call.layers.size() > 1 ? list_rows * call.mask_words() * 4 : 0);
    counts = take(list_rows * 4);
    entries = take(num_entries * 4);
    const int64_t heads = num_entries ? c.batch_chunk * p.num_kv_heads : 0;
    offsets = take(heads * (call.layers[0].num_parents + 1) * 4);
    run_counts = take(heads * ceil_div(chunk_lists, kInverseRows) * call.layers[0].num_parents * 4);
    rotations = take(by_parent(call) ? call.rope_rows() * p.key_dim * 2 : 0);
    partial_bytes = 0;
    for (size_t i = 0; i < call.layers.size(); ++i) {
      if (layer_per_list(call, i)) {
        const int64_t list_sums = tasks_of_list(call, i) * partial_slots(call, i) * partial_bytes_of(call);
        const int64_t most = partial_sum_lists(per_list ? kPartialSumBytes : kTopSumBytes, 1, 1, list_sums);
        const int64_t runs = (c.query_chunk / kGradientRun + 2) * c.batch_chunk * p.num_kv_heads;
        partial_bytes =
            std::max(partial_bytes, std::min(most, layer_runs(call, i) ? runs : list_rows) * list_sums);
      }
    }
    // scores are there while lists are selected, before the first sum
    scores = partials = take(std::max(partial_bytes, recompute ? score_scratch_bytes(call) : 0));
  }
};

// First row of a layer's sums.
inline int64_t layer_rows(const TreeCall& call, size_t layer_idx) {
  int64_t rows = 0;
  for (size_t i = 0; i < layer_idx; ++i) {
    rows += call.problem.batch * call.problem.num_kv_heads * call.layers[i].num_parents * kTensorCoreRate;
  }
  return rows;
}

// ---- The order of launches of the tensor-core backward over chunks and layers. Buffers come from the caller; no
// torch.

struct BackwardBuffers {
  TensorView gradients;        // dO [B, T_q, H, V]
  TensorView outputs;          // O
  const float* max = nullptr;  // [B, T_q, H]
  const float* sum = nullptr;
  std::vector<const int32_t*> parents;  // per layer, or empty: recomputed
  void* query_gradient = nullptr;       // [B, T_q, H, K]; null: not wanted
  void* key_gradient = nullptr;         // [B, T, H_kv, K]
  void* value_gradient = nullptr;       // [B, T, H_kv, V]
  float* key_sums = nullptr;    // gradient_sum_rows() rows of K; null where the gradient is not wanted
  float* value_sums = nullptr;  // rows of V
  char* scratch = nullptr;      // backward_scratch_bytes()
};

// Rows of the fp32 sums: [B, H_kv, 16 * parents] per layer, layer after layer.
int64_t gradient_sum_rows(const TreeCall& call);
int64_t backward_scratch_bytes(const TreeCall& call, bool recompute);

// run_prepare has run.
cudaError_t run_backward(const TreeCall& call, const BackwardBuffers& buffers, cudaStream_t stream);

// ----

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
      error = dispatch_shape(call_.shape, [&](auto type, auto dim) {
        return launch_key_bounds<typename decltype(type)::type, dim.value>(
            tokens, scratch<KeyBounds>(at_.key_bounds), stream_);
      });
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
    cudaError_t error = dispatch_shape(call_.shape, [&](auto type, auto dim) {
      return launch_gradient_rows<typename decltype(type)::type, dim.value>(rows, stream_);
    });
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
    tasks.query.first = layer_idx == top_;
    tasks.query.last = layer_idx == 0;
    tasks.query.partial = scratch<float>(at_.query_sums);
    if (buffers_.query_gradient) {
      tasks.query.gradient = query_gradient_of(chunk);
      tasks.query.gradient_batch = p_.num_queries * p_.num_heads * p_.key_dim;
    }
    tasks.run.slots = partial_slots(call_, layer_idx);
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

// ---- attention_backward on CUDA: docs/semantics/tree_attention.md §1.10. Deterministic, without float atomics.
// Scratch beyond the fp32 sums of dK and dV and the tree: at most kBackwardScratchBytes (1.8 GiB) at any T,
// as long as one list of one batch fits.

namespace {

void backward_tensor_core(const AttentionProblem& problem, const AttentionConfig& config, const Backward& b,
                          const CudaTree& tree, cudaStream_t stream) {
  const TensorCoreTree prepared = prepare_tensor_cores(problem, config, b.q, tree, stream);
  const TreeCall& call = prepared.call;
  BackwardBuffers buffers;
  buffers.gradients = view_of(b.dout);
  buffers.outputs = view_of(b.out);
  buffers.max = b.gmax.const_data_ptr<float>();
  buffers.sum = b.gsum.const_data_ptr<float>();
  for (const Tensor& list : b.parents) {
    buffers.parents.push_back(list.const_data_ptr<int32_t>());
  }
  buffers.query_gradient = b.data(b.dq);
  buffers.key_gradient = b.data(b.dk);
  buffers.value_gradient = b.data(b.dv);
  const int64_t rows = gradient_sum_rows(call);
  Tensor key_sums, value_sums;
  if (b.dk.defined()) {
    key_sums = scratch_of(rows * problem.key_dim, at::kFloat, b.q);
    buffers.key_sums = key_sums.mutable_data_ptr<float>();
  }
  if (b.dv.defined()) {
    value_sums = scratch_of(rows * problem.value_dim, at::kFloat, b.q);
    buffers.value_sums = value_sums.mutable_data_ptr<float>();
  }
  const Tensor scratch = scratch_of(backward_scratch_bytes(call, b.parents.empty()), at::kByte, b.q);
  buffers.scratch = static_cast<char*>(scratch.mutable_data_ptr());
  C10_CUDA_CHECK(run_backward(call, buffers, stream));
}

// Blocks stand along y of a grid by batch and K/V head.
constexpr int64_t kMostPairs = 65535;

}  // namespace

void attention_backward_cuda(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                             const std::vector<Tensor>& parents, const AttentionArgs& args, const Tensor& dq,
                             const Tensor& dk, const Tensor& dv) {
  const LaunchScope scope(q);
  if (!dq.defined() && !dk.defined() && !dv.defined()) {
    return;
  }
  if (gmax.numel() == 0 || k.size(2) == 0) {  // no query: nothing reaches the keys
    for (const Tensor& gradient : {dk, dv}) {
      if (gradient.defined()) {
        gradient.zero_();
      }
    }
    return;
  }
  const int64_t batches = k.size(0), most_batches = kMostPairs / k.size(2);
  TORCH_CHECK_VALUE(most_batches > 0, "attention_backward: k must have at most ", kMostPairs,
                    " heads on CUDA, got ", k.size(2));
  if (batches > most_batches) {
    for (int64_t first = 0; first < batches; first += most_batches) {
      const auto part = [&](const Tensor& x) {
        return x.defined() ? x.narrow(0, first, std::min(most_batches, batches - first)) : x;
      };
      std::vector<Tensor> part_lists;
      for (const Tensor& list : parents) {
        part_lists.push_back(part(list));
      }
      attention_backward_cuda(part(dout), part(q), part(k), part(v), part(out), part(gmax), part(gsum),
                              part_lists, args, part(dq), part(dk), part(dv));
    }
    return;
  }
  std::vector<Tensor> lists;
  for (const Tensor& list : parents) {
    lists.push_back(list.contiguous());
  }
  const Tensor max = gmax.contiguous(), sum = gsum.contiguous();
  const AttentionProblem problem = attention_problem(q, k, v, args);
  const AttentionConfig config = attention_backward_config(problem);
  const CudaTree tree = build_cuda_tree(k, v, args);
  const Backward backward{dout, q, out, max, sum, lists, dq, dk, dv};
  if (config.path == AttentionPath::kTensorCore) {
    backward_tensor_core(problem, config, backward, tree, scope.stream());
  } else {
    run_general_backward(problem, config, backward, tree, scope.stream());
  }
}

}  // namespace htree::tree_attention
