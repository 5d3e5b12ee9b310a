// attention_backward on CUDA: docs/semantics/tree_attention.md §1.10. Allocates memory and launches the
// kernels, in chunks of queries and layer by layer. Deterministic, without float atomics. Scratch beyond the
// fp32 sums of dK and dV and the tree is at most kBackwardScratchBytes (1.8 GiB) at any T, as long as one
// list of one batch fits.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "host/cuda/launch_scope.h"
#include "host/outputs.h"
#include "ops/selection/cuda/select_layer.h"
#include "ops/sparse_attention/cuda/any/inverted_lists.h"
#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/layer_gradients.h"
#include "ops/tree/cuda/any/push_gradient.h"
#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/launch_params.h"
#include "ops/tree/cuda/tree_call.h"
#include "ops/tree_attention/cuda/general_backward.h"
#include "ops/tree_attention/cuda/walk.h"

namespace htree::tree_attention {

// ---- launches over chunks and layers

static_assert(sizeof(RowMeta) == kRowMetaBytes);
static_assert(sizeof(KeyBound) == kKeyBoundBytes && sizeof(QueryBounds) == kQueryBoundsBytes);
static_assert(sizeof(TaskPowers) == kTaskPowersBytes);

struct BackwardBuffers {
  TensorView gradients;  // dO [B, T_q, H, V]
  TensorView outputs;    // O
  RowStates states;
  // One per layer [B, num_lists, H_kv, k], batches parents_batch[layer] entries apart; empty: lists are recomputed.
  std::vector<const int32_t*> parents;
  std::vector<int64_t> parents_batch;
  void* query_gradient = nullptr;       // [B, T_q, H, K]; null: not wanted
  void* key_gradient = nullptr;         // [B, T, H_kv, K]
  void* value_gradient = nullptr;       // [B, T, H_kv, V]
  StoreType store = StoreType::kFloat;  // of the two
  float* key_sums = nullptr;    // gradient_sum_row(layers) rows of K; null: the gradient is not wanted
  float* value_sums = nullptr;  // rows of V
  BackwardMemory memory;
};

namespace {

class BackwardRun {
 public:
  // run_prepare() must have run before.
  BackwardRun(const TreeCall& call, const BackwardConfig& config, const BackwardBuffers& buffers,
              cudaStream_t stream)
      : call_(call),
        config_(config),
        p_(call.problem),
        buffers_(buffers),
        at_(buffers.memory),
        stream_(stream),
        top_(call.layers.size() - 1) {}

  void run() {
    if (sums_are_zeroed() ||
        layer_per_list(p_, config_, top_)) {  // the per-list kernels only add to the sums
      const int64_t first = config_.per_list || sums_are_zeroed() ? 0 : gradient_sum_row(p_, top_);
      const size_t rows = static_cast<size_t>(gradient_sum_row(p_, p_.layers()) - first);
      const auto zero = [&](float* sums, int64_t dim) {
        if (sums) C10_CUDA_CHECK(cudaMemsetAsync(sums + first * dim, 0, rows * dim * 4, stream_));
      };
      zero(buffers_.key_sums, p_.key_dim);
      zero(buffers_.value_sums, p_.value_dim);
    }
    if (config_.parent_warps && keys_wanted() && walks(p_, config_) && p_.args.rotate) {
      C10_CUDA_CHECK(launch_position_rotations(call_.rope, static_cast<__half2*>(at_.rotations),
                                               call_.rope_rows(), static_cast<int>(p_.key_dim), stream_));
    }
    for (size_t i = 0; i <= top_; ++i) {
      bound_layer(i);
    }
    for (const Piece& piece : p_.pieces()) {
      if (dense_queries(piece, config_) > 0) {
        dense_rows(piece);
      }
    }
    if (config_.masked_rows > 0) {
      walk_rows(config_.dense_rows, config_.masked_rows);
      pack_layer(call_, call_.layers.front(), stream_);  // in the place of the tiles
    }
    walk_rows(std::max(config_.dense_rows, config_.masked_rows), p_.num_keys);
    finish();
  }

 private:
  bool keys_wanted() const { return buffers_.key_sums || buffers_.value_sums; }

  // The bounds of a layer from batch `batch` on.
  LayerBounds bounds_of(size_t layer_idx, int64_t batch) const {
    const int64_t parents = gradient_sum_row(p_, static_cast<int64_t>(layer_idx)) / kTensorCoreRate +
                            batch * p_.num_kv_heads * call_.layers[layer_idx].num_parents;
    return {at_.node_bounds + parents * kTensorCoreRate, at_.parent_bounds + parents,
            at_.earlier_bounds + parents};
  }

  void bound_layer(size_t layer_idx) {
    const TreeLayer& layer = call_.layers[layer_idx];
    PackParams rows = layer_params<PackParams>(call_, layer);
    rows.num_parents = layer.num_parents;
    EarlierBoundParams earlier;
    earlier.bounds = bounds_of(layer_idx, 0);
    // Implicit lists hold all parents before their own, dense rows all tokens before theirs.
    earlier.num_parents = layer_idx == top_ ? layer.num_parents
                          : layer_idx == 0  ? ceil_div(tiled_tokens(p_, config_), kTensorCoreRate)
                                            : 0;
    earlier.head_parents = layer.num_parents;
    earlier.num_heads = static_cast<int>(p_.batch * p_.num_kv_heads);
    launch_of_shape(call_.shape, [&](auto type, auto dim) {
      return launch_key_bounds<typename decltype(type)::type, dim.value>(rows, earlier.bounds, stream_);
    });
    if (earlier.num_parents > 0) {
      C10_CUDA_CHECK(launch_earlier_bounds(earlier, stream_));
    }
  }

  // The dense rows of the first piece write the sums of the tokens up to the last of them. Where that is not all, because
  // other rows follow or the sequence goes on, the sums begin as zeros, and everything after these rows adds. Masked rows
  // always add.
  bool sums_are_zeroed() const {
    return keys_wanted() && (masks_tiles(p_, config_) ||
                             (config_.dense_rows > 0 && (walks(p_, config_) || p_.pieces().size() > 1 ||
                                                         tiled_tokens(p_, config_) < p_.num_keys)));
  }

  // The rows between tokens `begin` and `end` of every batch and piece, which walk the tree.
  void walk_rows(int64_t begin, int64_t end) {
    for (int64_t batch = 0; batch < p_.batch; batch += config_.batch_chunk) {
      for (const Piece& piece : p_.pieces()) {
        const int64_t last = piece.query + queries_before(piece, end);
        for (int64_t query = piece.query + queries_before(piece, begin); query < last;) {
          const int64_t num_queries = std::min(config_.query_chunk, last - query);
          chunk({batch, std::min(config_.batch_chunk, p_.batch - batch), query, num_queries});
          query += num_queries;
        }
      }
    }
  }

  // The gradients of the first queries of every batch of a piece, which are rows of dense attention.
  void dense_rows(const Piece& piece) {
    for (int64_t batch = 0; batch < p_.batch; batch += config_.dense_batches) {
      dense_rows({batch, std::min(config_.dense_batches, p_.batch - batch), piece.query,
                  dense_queries(piece, config_)});
    }
  }

  void dense_rows(const Chunk& chunk) {
    Workspace space(at_.partials);
    DenseGradientParams params;
    params.add = chunk.query > 0;  // of an earlier piece
    set_rows(params, lay_out_dense_gradients(space, p_, config_, chunk.num_batches), chunk);
    launch_of_shape(call_.shape, [&](auto type, auto dim) {
      using T = typename decltype(type)::type;
      C10_CUDA_CHECK((launch_row_tiles<T, dim.value>(params, stream_)));
      if (params.query_gradient) {
        C10_CUDA_CHECK((launch_dense_query_gradient<T, dim.value>(params, stream_)));
      }
      return keys_wanted() ? launch_dense_key_gradient<T, dim.value>(params, stream_) : cudaSuccess;
    });
  }

  // The tokens for rows that multiply whole tiles under the bits of their lists; `first`: there are no layers above.
  void masked_rows(const Chunk& chunk, const ListSlice& lists, bool first) {
    Workspace space(at_.partials);
    const MaskedGradientMemory memory = lay_out_masked_gradients(space, p_, config_);
    MaskedGradientParams params;
    set_rows(params, memory.rows, chunk);
    params.gather.lists = lists.data;
    params.gather.list_batch = lists.batch;
    params.marks = {memory.marks.marks, memory.marks.tiles, memory.marks.counts, params.tiles.num_tiles};
    params.inverted = {memory.inverted_tiles, memory.inverted_tile_counts};
    params.query_sums = first ? nullptr : at_.query_sums;
    params.add = true;
    run_masked_gradients(call_.shape, params, stream_);
  }

  // Sets what dense and masked rows have in common, and zeroes the bounds of the queries.
  void set_rows(DenseGradientParams& params, const DenseGradientMemory& memory, const Chunk& chunk) {
    params.gather = gather_of(call_, 0, chunk);
    params.gradients = at_row(buffers_.gradients, chunk.batch, chunk.query);
    params.outputs = at_row(buffers_.outputs, chunk.batch, chunk.query);
    params.states = states_of(chunk);
    params.tiles = tiles_of_batch(call_, call_.rows, chunk.batch);
    const int64_t runs = num_runs(params.gather.t0, chunk.num_queries, p_.group());
    params.rows = {memory.queries, memory.gradients, memory.numbers, memory.scaled,
                   static_cast<int>(kRunRows / kRowTileRows * runs)};
    params.bounds = bounds_of(0, chunk.batch);
    params.query_bounds = memory.bounds;
    params.scale = static_cast<float>(p_.args.scale);
    params.query_gradient = buffers_.query_gradient ? query_gradient_of(chunk) : nullptr;
    sums_of(0, chunk, params.keys, params.values);
    params.sum_rows = call_.layers[0].num_parents * kTensorCoreRate;
    C10_CUDA_CHECK(cudaMemsetAsync(memory.bounds, 0,
                                   chunk.num_batches * p_.num_kv_heads * sizeof(QueryBounds), stream_));
  }

  RowStates states_of(const Chunk& chunk) const {
    const int64_t first = (chunk.batch * p_.num_queries + chunk.query) * p_.num_heads;
    RowStates states = buffers_.states;
    states.max += first;
    states.sum += first;
    if (states.lse_gradients) {
      states.lse_gradients += first;
    }
    return states;
  }

  char* query_gradient_of(const Chunk& chunk) const {
    return static_cast<char*>(buffers_.query_gradient) +
           2 * (chunk.batch * p_.num_queries + chunk.query) * p_.num_heads * p_.key_dim;
  }

  ListSlice lists_of(size_t layer_idx, const Chunk& chunk) const {
    const int64_t row = p_.num_kv_heads * p_.args.top_k;
    if (!buffers_.parents.empty()) {
      const int64_t batch_stride = buffers_.parents_batch[layer_idx];
      // select_layer never writes to lists of the caller, so they are only read.
      return {const_cast<int32_t*>(buffers_.parents[layer_idx]) + chunk.batch * batch_stride +
                  chunk.query / p_.args.selection_stride * row,
              batch_stride};
    }
    return {at_.lists + static_cast<int64_t>(layer_idx) * at_.list_stride,
            ceil_div(chunk.num_queries, p_.args.selection_stride) * row};
  }

  void chunk(const Chunk& chunk) {
    if (buffers_.parents.empty()) {
      for (size_t i = top_; i > 0; --i) {
        select_layer(call_, i, chunk, i == top_ ? ListSlice{} : lists_of(i, chunk), lists_of(i - 1, chunk),
                     at_.scores, nullptr, stream_);
      }
    }
    C10_CUDA_CHECK(cudaMemsetAsync(at_.query_bounds, 0,
                                   chunk.num_batches * p_.num_kv_heads * sizeof(QueryBounds), stream_));
    RowParams rows;
    rows.queries = at_row(call_.queries, chunk.batch, chunk.query);
    rows.gradients = at_row(buffers_.gradients, chunk.batch, chunk.query);
    rows.outputs = at_row(buffers_.outputs, chunk.batch, chunk.query);
    rows.states = states_of(chunk);
    rows.records = layer_per_list(p_, config_, 0) ? nullptr : at_.records;
    rows.tile_rows = tiled_record_rows(p_, config_);
    rows.meta = at_.meta;
    rows.bounds = at_.query_bounds;
    rows.num_batches = static_cast<int>(chunk.num_batches);
    rows.num_queries = static_cast<int>(chunk.num_queries);
    rows.num_kv_heads = static_cast<int>(p_.num_kv_heads);
    rows.group = static_cast<int>(p_.group());
    launch_of_shape(call_.shape, [&](auto type, auto dim) {
      return launch_gradient_rows<typename decltype(type)::type, dim.value>(rows, stream_);
    });
    for (size_t i = top_ + 1; i-- > 0;) {
      layer(i, chunk);
    }
  }

  void layer(size_t layer_idx, const Chunk& chunk) {
    const bool implicit = layer_idx == top_;
    const ListSlice lists = implicit ? ListSlice{} : lists_of(layer_idx, chunk);
    if (layer_idx == 0 && p_.token_of(chunk.query) < config_.masked_rows) {
      return masked_rows(chunk, lists, implicit);
    }
    GradientParams common;
    common.gather = gather_of(call_, layer_idx, chunk);
    common.gather.lists = lists.data;
    common.gather.list_batch = lists.batch;
    common.records = at_.records;
    common.tile_rows = tiled_record_rows(p_, config_);
    common.meta = at_.meta;
    common.list_bounds = at_.list_bounds;
    common.parent_bounds = bounds_of(layer_idx, chunk.batch).parents;
    common.query_bounds = at_.query_bounds;
    common.selected = layer_idx > 0 ? at_.mask : nullptr;
    common.mask_words = mask_words(p_);
    common.scale = static_cast<float>(p_.args.scale);

    if (!implicit || layer_idx > 0) {
      ListMaskParams mask = counted_lists(common.gather);
      if (layer_idx > 0) {
        const ListSlice next = lists_of(layer_idx - 1, chunk);
        mask.next_lists = next.data;
        mask.next_batch = next.batch;
      }
      mask.selected = at_.mask;
      mask.mask_words = common.mask_words;
      mask.counts = at_.counts;
      C10_CUDA_CHECK(launch_list_masks(mask, stream_));
    }
    if (layer_per_list(p_, config_, layer_idx)) {
      return per_list_layer(layer_idx, chunk, common, lists);
    }
    if (buffers_.query_gradient) {
      ListBoundParams bounds = list_bounds_of(layer_idx, chunk, common.gather);
      bounds.lists = at_.list_bounds;
      C10_CUDA_CHECK(launch_list_bounds(bounds, stream_));
      QueryGradientParams query;
      query.common = common;
      query.first = implicit;
      query.last = layer_idx == 0;
      query.partial = at_.query_sums;
      query.gradient = query_gradient_of(chunk);
      query.gradient_batch = p_.num_queries * p_.num_heads * p_.key_dim;
      run_query_gradient(call_.shape, config_, query, call_.fragment_rotations, stream_);
    }
    if (keys_wanted()) {
      layer_keys(layer_idx, chunk, common, lists);
    }
  }

  // What all bounds of a layer's lists have in common.
  ListBoundParams list_bounds_of(size_t layer_idx, const Chunk& chunk, const GatherParams& gather) const {
    ListBoundParams bounds;
    bounds.gather = gather;
    bounds.refines_own = layer_idx > 0;
    bounds.bounds = bounds_of(layer_idx, chunk.batch);
    return bounds;
  }

  void layer_keys(size_t layer_idx, const Chunk& chunk, const GradientParams& common,
                  const ListSlice& lists) {
    const TreeLayer& layer = call_.layers[layer_idx];
    KeyGradientParams key;
    key.common = common;
    key.counts = at_.counts;
    if (lists.data) {
      invert(layer, common.gather);
      key.entries = at_.entries;
      key.offsets = at_.offsets;
    }
    sums_of(layer_idx, chunk, key.keys, key.values);
    key.add = chunk.query > 0 || sums_are_zeroed();
    key.rotations = p_.args.rotate ? static_cast<__half2*>(at_.rotations) : nullptr;
    run_key_gradient(call_.shape, config_, key, stream_);
  }

  // Inverts the lists of the layer.
  void invert(const TreeLayer& layer, const GatherParams& gather) {
    InvertedListParams inverted = {list_table(gather)};
    inverted.num_parents = layer.num_parents;
    inverted.entries = at_.entries;
    inverted.offsets = at_.offsets;
    inverted.run_counts = at_.run_counts;
    C10_CUDA_CHECK(launch_inverted_lists(inverted, stream_));
  }

  void sums_of(size_t layer_idx, const Chunk& chunk, float*& keys, float*& values) const {
    const int64_t rows = gradient_sum_row(p_, layer_idx) + chunk.batch * p_.num_kv_heads *
                                                               call_.layers[layer_idx].num_parents *
                                                               kTensorCoreRate;
    keys = buffers_.key_sums ? buffers_.key_sums + rows * p_.key_dim : nullptr;
    values = buffers_.value_sums ? buffers_.value_sums + rows * p_.value_dim : nullptr;
  }

  // Computes both gradients of a layer with the per-list kernels.
  void per_list_layer(size_t layer_idx, const Chunk& chunk, const GradientParams& common,
                      const ListSlice& lists) {
    PerListRuns layer;
    PartialSumParams& sums = layer.sums;
    sums_of(layer_idx, chunk, sums.keys, sums.values);
    if (lists.data && keys_wanted()) {
      invert(call_.layers[layer_idx], common.gather);
      sums.entries = at_.entries;
      sums.offsets = at_.offsets;
    }
    PerListGradientParams& tasks = sums.tasks;
    tasks.gather = common.gather;
    tasks.mask_stride = common.gather.stride;
    tasks.rotations = call_.dim_rotations;
    if (layer_runs(p_, config_, layer_idx)) {
      GatherParams& gather = tasks.gather;
      tasks.lead = static_cast<int>(gather.t0 % kGradientRun);
      for (int group = gather.group; group > 1; group /= 2) {
        ++tasks.group_shift;
      }
      gather.stride = kGradientRun;
      gather.num_lists = static_cast<int>(ceil_div(tasks.lead + chunk.num_queries, kGradientRun));
    }
    tasks.gradients = at_row(buffers_.gradients, chunk.batch, chunk.query);
    tasks.meta = common.meta;
    tasks.powers = at_.task_powers;
    tasks.query_bounds = common.query_bounds;
    tasks.counts = lists.data ? at_.counts : nullptr;
    tasks.selected = common.selected;
    tasks.mask_words = common.mask_words;
    tasks.scale = common.scale;
    tasks.query.first = layer_idx == top_;
    tasks.query.last = layer_idx == 0;
    tasks.query.partial = at_.query_sums;
    if (buffers_.query_gradient) {
      tasks.query.gradient = query_gradient_of(chunk);
      tasks.query.gradient_batch = p_.num_queries * p_.num_heads * p_.key_dim;
    }
    tasks.run.slots = partial_slots(p_, layer_idx);
    layer.tasks = tasks_of_list(p_, config_, layer_idx);
    ListBoundParams bounds = list_bounds_of(layer_idx, chunk, tasks.gather);
    bounds.lead = tasks.lead;
    bounds.powers = at_.task_powers;
    bounds.tasks = static_cast<int>(layer.tasks);
    bounds.meta = at_.meta;
    C10_CUDA_CHECK(launch_list_bounds(bounds, stream_));
    layer.partials = at_.partials;
    layer.partial_bytes = at_.partial_bytes;
    layer.num_sms = config_.num_sms;
    run_per_list_gradients(call_.shape, layer, stream_);
  }

  // Pushes the sums from the top down to the tokens, where they are rounded into the gradients.
  void finish() {
    const auto push = [&](float* sums, int64_t dim, void* out) {
      for (size_t i = top_ + 1; sums && i-- > 0;) {
        const TreeLayer& layer = call_.layers[i];
        PushParams params;
        params.child = sums + gradient_sum_row(p_, i) * dim;
        params.heads = p_.batch * p_.num_kv_heads;
        params.num_nodes = layer.num_nodes;
        params.child_rows = layer.num_parents * kTensorCoreRate;
        params.dim = dim;
        if (i < top_) {
          params.parent = sums + gradient_sum_row(p_, i + 1) * dim;
          params.parent_rows = call_.layers[i + 1].num_parents * kTensorCoreRate;
        }
        if (i == 0) {
          C10_CUDA_CHECK(launch_store_gradient(params, p_.num_kv_heads, buffers_.store, out, stream_));
        } else if (params.parent) {
          C10_CUDA_CHECK(launch_push_gradient(params, stream_));
        }
      }
    };
    push(buffers_.key_sums, p_.key_dim, buffers_.key_gradient);
    push(buffers_.value_sums, p_.value_dim, buffers_.value_gradient);
  }

  const TreeCall& call_;
  const BackwardConfig& config_;
  const AttentionProblem& p_;
  const BackwardBuffers& buffers_;
  const BackwardMemory& at_;
  cudaStream_t stream_;
  size_t top_;
};

}  // namespace

// ---- attention_backward

namespace {

void backward_tensor_core(const AttentionProblem& problem, const BackwardConfig& config, const Backward& b,
                          const CudaTree& tree, cudaStream_t stream) {
  const TensorCoreTree prepared =
      prepare_tensor_cores(problem, config, b.q, tree, /*selects=*/b.parents.empty(), stream);
  const TreeCall& call = prepared.call;
  BackwardBuffers buffers;
  buffers.gradients = view_of(b.dout);
  buffers.outputs = view_of(b.out);
  buffers.states = {b.gmax.const_data_ptr<float>(), b.gsum.const_data_ptr<float>(),
                    b.dlse.defined() ? b.dlse.const_data_ptr<float>() : nullptr,
                    problem.num_queries * problem.num_heads};
  for (const Tensor& list : b.parents) {
    buffers.parents.push_back(list.const_data_ptr<int32_t>());
    buffers.parents_batch.push_back(list.stride(0));
  }
  buffers.query_gradient = b.data(b.dq);
  buffers.key_gradient = b.data(b.dk);
  buffers.value_gradient = b.data(b.dv);
  if (b.dk.defined() || b.dv.defined()) {
    buffers.store = store_type(b.dk.defined() ? b.dk : b.dv);
  }
  const int64_t rows = gradient_sum_row(problem, problem.layers());
  Tensor key_sums, value_sums;
  if (b.dk.defined()) {
    key_sums = scratch_of(rows * problem.key_dim, at::kFloat, b.q);
    buffers.key_sums = key_sums.mutable_data_ptr<float>();
  }
  if (b.dv.defined()) {
    value_sums = scratch_of(rows * problem.value_dim, at::kFloat, b.q);
    buffers.value_sums = value_sums.mutable_data_ptr<float>();
  }
  const bool recompute = b.parents.empty();
  Workspace sizes;
  lay_out_backward(sizes, problem, config, recompute);
  const Tensor scratch = scratch_of(sizes.bytes(), at::kByte, b.q);
  Workspace space(scratch.mutable_data_ptr());
  buffers.memory = lay_out_backward(space, problem, config, recompute);
  BackwardRun(call, config, buffers, stream).run();
}

// The lists of all layers that a forward selects, where they are not stored.
std::vector<Tensor> selected_lists(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionArgs& args) {
  std::vector<Tensor> lists;
  const int64_t layers = num_layers(k.size(1), args.max_top_nodes, args.compression_rate);
  for (int64_t layer = 0; layer < layers; ++layer) {
    lists.push_back(at::empty({q.size(0), ceil_div(q.size(1), args.selection_stride), k.size(2), args.top_k},
                              q.options().dtype(at::kInt)));
  }
  const Tensor out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  const Tensor max = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  attention_forward_cuda(q, k, v, args, out, max, at::empty_like(max), lists);
  return lists;
}

// The gradients of groups in halves, each with a copy of its K/V head: kernels that gather for each query take 8 heads, and
// twice the gather costs less than what takes more. The halves' dK and dV are added before they are rounded.
void backward_in_halves(const Tensor& dout, const Tensor& dlse, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                        const std::vector<Tensor>& parents, const AttentionArgs& args, const Tensor& dq,
                        const Tensor& dk, const Tensor& dv) {
  const auto twice = [](const Tensor& x) { return x.repeat_interleave(2, 2); };
  std::vector<Tensor> lists;
  for (const Tensor& list : parents.empty() ? selected_lists(q, k, v, args) : parents) {
    lists.push_back(twice(list));
  }
  const auto sums_of = [](const Tensor& x) {
    return x.defined()
               ? at::empty({x.size(0), x.size(1), 2 * x.size(2), x.size(3)}, x.options().dtype(at::kFloat))
               : x;
  };
  const Tensor dk_sums = sums_of(dk), dv_sums = sums_of(dv);
  attention_backward_cuda(dout, dlse, q, twice(k), twice(v), out, gmax, gsum, lists, args, dq, dk_sums,
                          dv_sums);
  const auto add = [](const Tensor& sums, const Tensor& gradient) {
    if (gradient.defined()) {
      gradient.copy_(sums.unflatten(2, {gradient.size(2), 2}).sum(3));
    }
  };
  add(dk_sums, dk);
  add(dv_sums, dv);
}

// Batch and K/V head together are the y dimension of a grid, which has this limit.
constexpr int64_t kMostPairs = 65535;

}  // namespace

void attention_backward_cuda(const Tensor& dout, const Tensor& dlse, const Tensor& q, const Tensor& k,
                             const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                             const std::vector<Tensor>& parents, const AttentionArgs& args, const Tensor& dq,
                             const Tensor& dk, const Tensor& dv) {
  const LaunchScope scope(q);
  if (!dq.defined() && !dk.defined() && !dv.defined()) {
    return;
  }
  if (gmax.numel() == 0 || k.size(2) == 0) {
    return fill_zeros({dk, dv});  // without a query no key has a gradient
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
      attention_backward_cuda(part(dout), part(dlse), part(q), part(k), part(v), part(out), part(gmax),
                              part(gsum), part_lists, args, part(dq), part(dk), part(dv));
    }
    return;
  }
  const Tensor max = gmax.contiguous(), sum = gsum.contiguous();
  const AttentionProblem problem = attention_problem(q, k, v, args);
  const BackwardConfig config = backward_config(problem);
  if (config.halves && 2 * batches * k.size(2) <= kMostPairs) {
    backward_in_halves(dout, dlse, q, k, v, out, gmax, gsum, parents, args, dq, dk, dv);
    return;
  }
  const CudaTree tree = build_cuda_tree(k, v, args);
  const Backward backward{dout, dlse, q, out, max, sum, parents, dq, dk, dv};
  if (config.path == AttentionPath::kTensorCore) {
    backward_tensor_core(problem, config, backward, tree, scope.stream());
  } else {
    run_general_backward(problem, config, backward, tree, scope.stream());
  }
}

}  // namespace htree::tree_attention
