// The host side of sparse_attention on tensor cores: a packed copy of keys and values, the caller's lists as lists of
// sixteens, and the kernels of tree attention's tokens over them, in chunks of queries. Of a chunk the rows that gather come
// first, then those in masked tiles, of which the others are none.
#include "ops/sparse_attention/cuda/tensor_cores.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include "host/cuda/launch_scope.h"
#include "ops/sparse_attention/cuda/any/inverted_lists.h"
#include "ops/sparse_attention/cuda/any/visible_lists.h"
#include "ops/sparse_attention/cuda/attend.h"
#include "ops/sparse_attention/cuda/gather_choice.h"
#include "ops/sparse_attention/cuda/gradient_tensors.h"
#include "ops/sparse_attention/cuda/layer_gradients.h"
#include "ops/sparse_attention/cuda/sm90/wild_tokens.h"
#include "ops/tree/cuda/cuda_tree.h"

namespace htree::tree_attention {
namespace {

AttentionProblem listed_problem_of(const SparseCall& call) {
  const at::ScalarType type = call.x.query.scalar_type();
  return list_problem(given_problem(call), call.x.query.size(3), type == at::kHalf || type == at::kBFloat16,
                      call.scale);
}

// Documents stand elsewhere in their sequence than in a call of their own, and so in other tiles: all of their rows gather.
GatherChoice choice_of(const SparseCall& call) {
  const GatherChoice choice = gather_choice();
  return call.packed && choice == GatherChoice::kAuto ? GatherChoice::kGathered : choice;
}

// Any row may gather, so the packed copy of the tokens is there beside their tiles.
TreeConfig without_tiles(TreeConfig config) {
  config.masked_rows = 0;
  return config;
}

Tensor scratch_like(const Tensor& x, int64_t bytes) {
  return at::empty({std::max<int64_t>(bytes, 1)}, x.options().dtype(at::kByte));
}

// A call in device memory: its packed keys and values, the tiles that masked rows see, and its chunks.
class ListedCall {
 public:
  ListedCall(const SparseCall& call, const SparseConfig& config, cudaStream_t stream)
      : config(config),
        call_(call),
        prepared_(prepare_tensor_cores(listed_problem_of(call), without_tiles(config), call.x.query,
                                       {{call.x.key}, {call.x.value}},
                                       /*selects=*/false, stream)),
        tree(prepared_.call),
        stream(stream) {
    if (masks_tiles(tree.problem, config)) {
      lay_out_masked_tiles();
    }
  }

  // f(chunk) for one chunk after the other.
  template <typename F>
  void for_each_chunk(F&& f) const {
    const AttentionProblem& p = tree.problem;
    for (int64_t batch = 0; batch < p.batch; batch += config.batch_chunk) {
      for (int64_t query = 0; query < p.num_queries; query += config.query_chunk) {
        f(Chunk{batch, std::min(config.batch_chunk, p.batch - batch), query,
                std::min(config.query_chunk, p.num_queries - query)});
      }
    }
  }

  // What the kernels read of a chunk; fills its lists.
  GatherParams gather(const Chunk& chunk, const SparseListMemory& memory) const {
    GatherParams gather = gather_of(tree, 0, chunk);
    gather.lists = memory.lists;
    gather.list_batch = int64_t{gather.num_lists} * gather.num_kv_heads * gather.list_width;
    gather.list_sizes = memory.sizes;
    const Tensor& blocks = call_.x.blocks;
    VisibleListParams params;
    params.blocks = blocks.const_data_ptr<int32_t>() + chunk.batch * blocks.stride(0) +
                    chunk.query / call_.stride * blocks.stride(1);
    params.blocks_batch = blocks.stride(0);
    params.lists = memory.lists;
    params.sizes = memory.sizes;
    params.num_batches = chunk.num_batches;
    params.num_lists = gather.num_lists;
    params.num_list_heads = static_cast<int>(blocks.size(2));
    params.num_kv_heads = gather.num_kv_heads;
    params.width = blocks.size(3);
    params.visible_width = gather.list_width;
    params.num_blocks = ceil_div(call_.num_keys(), call_.given_block_size);
    params.t0 = gather.t0;
    params.stride = call_.stride;
    params.block_size = call_.given_block_size;
    params.parts = call_.given_block_size / kTensorCoreRate;
    if (masked_queries(chunk) > 0) {
      const int64_t parents = tree.rows.num_tiles * kTileParents;
      params.masked = {config.masked_rows, masked_lists(tree.problem),
                       wild_ + chunk.batch * tree.problem.num_kv_heads * parents, parents, call_.num_keys()};
    }
    C10_CUDA_CHECK(launch_visible_lists(params, stream));
    return gather;
  }

  // How many queries of a chunk may be masked rows. They come first.
  int64_t masked_queries(const Chunk& chunk) const {
    const int64_t start = tree.problem.token_of(chunk.query);
    return queries_before({chunk.query, start, chunk.num_queries}, config.masked_rows);
  }
  // The token behind the last of them, or 0.
  int64_t masked_end(const Chunk& chunk) const { return masked_queries(chunk) > 0 ? config.masked_rows : 0; }
  // Their part of what gather() gave.
  GatherParams masked_rows(GatherParams gather, const Chunk& chunk) const {
    gather.num_queries = static_cast<int>(masked_queries(chunk));
    return gather;
  }
  TileMarks marks(const TileMarkMemory& memory) const {
    return {memory.marks, memory.tiles, memory.counts, tree.rows.num_tiles};
  }
  DenseTiles tiles(const Chunk& chunk) const { return tiles_of_batch(tree, tree.rows, chunk.batch); }

  const SparseConfig config;

 private:
  void lay_out_masked_tiles() {
    const AttentionProblem& p = tree.problem;
    const int64_t tokens = tiled_tokens(p, config), heads = p.batch * p.num_kv_heads;
    const auto own = [&](int64_t bytes) {
      prepared_.memory.push_back(scratch_like(call_.x.key, bytes));
      return prepared_.memory.back().mutable_data_ptr();
    };
    DenseLayerParams layer = layer_params<DenseLayerParams>(tree, tree.layers.front());
    layer.tiles = lay_out_tiles(p, tokens, static_cast<char*>(own(dense_layer_bytes(p, tokens))));
    layer.num_nodes = tokens;
    layer.rope = nullptr;
    prepared_.call.rows = layer.tiles;
    wild_ = static_cast<uint16_t*>(own(heads * layer.tiles.num_tiles * kTileParents * sizeof(uint16_t)));
    launch_of_shape(tree.shape, [&](auto type, auto dim) {
      return launch_dense_layer<typename decltype(type)::type, dim.value>(layer, stream);
    });
    C10_CUDA_CHECK(launch_wild_tokens({layer.tiles, tree.shape, wild_, heads}, stream));
  }

  const SparseCall& call_;
  TensorCoreTree prepared_;
  uint16_t* wild_ = nullptr;  // of WildTokens

 public:
  const TreeCall& tree;
  const cudaStream_t stream;
};

void attend(const ListedCall& c, const AttendParams& params) {
  launch_of_shape(c.tree.shape, [&](auto type, auto dim) {
    using T = typename decltype(type)::type;
    switch (c.config.gather) {
      case GatherKernel::kPerList:
        return launch_per_list_attend<T, dim.value>(params, c.stream);
      case GatherKernel::kSharedGather:
        return launch_shared_gather_attend<T, dim.value>(params, c.stream);
      case GatherKernel::kPerQuery:
        break;
    }
    return launch_per_query_attend<T, dim.value>(params, c.stream);
  });
}

// The rows of a chunk whose lists say so, after the others. They may have been written as rows that see nothing.
void attend_masked_rows(const ListedCall& c, const Chunk& chunk, AttendParams params,
                        const TileMarkMemory& memory) {
  const TileMarks marks = c.marks(memory);
  params.gather = c.masked_rows(params.gather, chunk);
  C10_CUDA_CHECK(launch_tile_marks(params.gather, marks, c.stream));
  launch_of_shape(c.tree.shape, [&](auto type, auto dim) {
    return launch_masked_rows<typename decltype(type)::type, dim.value>({{params, c.tiles(chunk)}, marks},
                                                                        c.stream);
  });
}

// The gradients of a call, chunk after chunk. dK and dV are sums in fp32 over all chunks.
class ListedGradients {
 public:
  ListedGradients(const ListedCall& call, const SparseResults& results, const Tensor& dout,
                  const Tensor& dlse, const SparseGradients& gradients)
      : c_(call), p_(call.tree.problem), query_gradient_(std::get<0>(gradients)) {
    const auto& [dq, dk, dv, dsinks] = gradients;
    Workspace sizes;
    lay_out_sparse_gradients(sizes, p_, c_.config);
    scratch_ = scratch_like(dout, sizes.bytes());
    Workspace space(scratch_.mutable_data_ptr());
    at_ = lay_out_sparse_gradients(space, p_, c_.config);
    gradients_ = view_of(dout);
    outputs_ = view_of(std::get<0>(results));
    // The states of a softmax with maximum lse and sum 1.
    ones_ = at::ones_like(std::get<1>(results));
    states_ = {std::get<1>(results).const_data_ptr<float>(), ones_.const_data_ptr<float>(),
               dlse.defined() ? dlse.const_data_ptr<float>() : nullptr, p_.num_queries * p_.num_heads};
    const int64_t rows = p_.batch * p_.num_kv_heads * p_.parents(0) * kTensorCoreRate;
    const auto sums = [&](const Tensor& gradient, int64_t dim) {
      return gradient.defined() ? scratch_of(rows * dim, at::kFloat, dout).zero_() : Tensor();
    };
    key_sums_ = sums(dk, p_.key_dim);
    value_sums_ = sums(dv, p_.value_dim);
    prepare();
  }

  void add(const Chunk& chunk) {
    C10_CUDA_CHECK(cudaMemsetAsync(at_.query_bounds, 0,
                                   chunk.num_batches * p_.num_kv_heads * kQueryBoundsBytes, c_.stream));
    RowParams rows;
    rows.queries = at_row(c_.tree.queries, chunk.batch, chunk.query);
    rows.gradients = at_row(gradients_, chunk.batch, chunk.query);
    rows.outputs = at_row(outputs_, chunk.batch, chunk.query);
    rows.states = states_;
    const int64_t first = (chunk.batch * p_.num_queries + chunk.query) * p_.num_heads;
    rows.states.max += first;
    rows.states.sum += first;
    if (rows.states.lse_gradients) rows.states.lse_gradients += first;
    rows.records = c_.config.per_list ? nullptr : at_.records;
    rows.tile_rows = tiled_record_rows(p_, c_.config);
    rows.meta = at_.meta;
    rows.bounds = at_.query_bounds;
    rows.num_batches = static_cast<int>(chunk.num_batches);
    rows.num_queries = static_cast<int>(chunk.num_queries);
    rows.num_kv_heads = static_cast<int>(p_.num_kv_heads);
    rows.group = static_cast<int>(p_.group());
    const GatherParams gather = c_.gather(chunk, at_.lists);
    rows.masked_end = c_.masked_end(chunk);
    rows.gather = gather;
    launch_of_shape(c_.tree.shape, [&](auto type, auto dim) {
      return launch_gradient_rows<typename decltype(type)::type, dim.value>(rows, c_.stream);
    });
    invert(gather);
    bound_lists(chunk, gather);
    if (c_.config.per_list) {
      add_per_list(chunk, gather, rows.gradients);
    } else {
      add_per_query(chunk, gather);
    }
    if (c_.masked_queries(chunk) > 0) {
      add_masked(chunk, gather, rows);
    }
  }

  void finish(const Tensor& key_gradient, const Tensor& value_gradient) const {
    store(key_sums_, p_.key_dim, key_gradient);
    store(value_sums_, p_.value_dim, value_gradient);
  }

 private:
  bool keys_wanted() const { return key_sums_.defined() || value_sums_.defined(); }

  // The bounds of all keys and values.
  void prepare() {
    const TreeLayer& layer = c_.tree.layers.front();
    PackParams rows = layer_params<PackParams>(c_.tree, layer);
    rows.num_parents = layer.num_parents;
    launch_of_shape(c_.tree.shape, [&](auto type, auto dim) {
      return launch_key_bounds<typename decltype(type)::type, dim.value>(
          rows, {at_.node_bounds, at_.parent_bounds, nullptr}, c_.stream);
    });
  }

  LayerBounds bounds_of(int64_t batch) const {
    const int64_t parents = batch * p_.num_kv_heads * c_.tree.layers.front().num_parents;
    return {at_.node_bounds + parents * kTensorCoreRate, at_.parent_bounds + parents, nullptr};
  }

  // Counts the entries of the lists and, for dK and dV, inverts them.
  void invert(const GatherParams& gather) {
    ListMaskParams count = counted_lists(gather);
    count.counts = at_.counts;
    C10_CUDA_CHECK(launch_list_masks(count, c_.stream));
    if (!keys_wanted()) return;
    InvertedListParams inverted = {list_table(gather)};
    inverted.num_parents = gather.num_parents;
    inverted.entries = at_.entries;
    inverted.offsets = at_.offsets;
    inverted.run_counts = at_.run_counts;
    C10_CUDA_CHECK(launch_inverted_lists(inverted, c_.stream));
  }

  void bound_lists(const Chunk& chunk, const GatherParams& gather) {
    ListBoundParams bounds;
    bounds.gather = gather;
    bounds.refines_own = false;
    bounds.bounds = bounds_of(chunk.batch);
    if (!c_.config.per_list || c_.masked_queries(chunk) > 0) {
      bounds.lists = at_.list_bounds;
    }
    if (c_.config.per_list) {
      bounds.powers = at_.task_powers;
      bounds.tasks = static_cast<int>(sparse_tasks_of_list(p_));
      bounds.meta = at_.meta;
    }
    C10_CUDA_CHECK(launch_list_bounds(bounds, c_.stream));
  }

  // The sums of a chunk's batches; null where they are not wanted.
  float* sums_from(const Tensor& sums, int64_t dim, const Chunk& chunk) const {
    const int64_t rows = chunk.batch * p_.num_kv_heads * c_.tree.layers.front().num_parents * kTensorCoreRate;
    return sums.defined() ? sums.mutable_data_ptr<float>() + rows * dim : nullptr;
  }
  void* query_gradient(const Chunk& chunk) const {
    if (!query_gradient_.defined()) return nullptr;
    return static_cast<char*>(query_gradient_.mutable_data_ptr()) +
           2 * (chunk.batch * p_.num_queries + chunk.query) * p_.num_heads * p_.key_dim;
  }

  void add_per_list(const Chunk& chunk, const GatherParams& gather, const TensorView& gradients) {
    PerListRuns runs;
    runs.sums.keys = sums_from(key_sums_, p_.key_dim, chunk);
    runs.sums.values = sums_from(value_sums_, p_.value_dim, chunk);
    runs.sums.entries = at_.entries;
    runs.sums.offsets = at_.offsets;
    PerListGradientParams& tasks = runs.sums.tasks;
    tasks.gather = gather;
    tasks.mask_stride = gather.stride;
    tasks.gradients = gradients;
    tasks.meta = at_.meta;
    tasks.powers = at_.task_powers;
    tasks.query_bounds = at_.query_bounds;
    tasks.counts = at_.counts;
    tasks.scale = static_cast<float>(p_.args.scale);
    tasks.query.first = tasks.query.last = true;
    tasks.query.gradient = query_gradient(chunk);
    tasks.query.gradient_batch = p_.num_queries * p_.num_heads * p_.key_dim;
    tasks.run.slots = p_.args.top_k;
    runs.tasks = sparse_tasks_of_list(p_);
    runs.partials = at_.partials;
    runs.partial_bytes = at_.partial_bytes;
    runs.num_sms = c_.config.num_sms;
    run_per_list_gradients(c_.tree.shape, runs, c_.stream);
  }

  void add_per_query(const Chunk& chunk, const GatherParams& gather) {
    GradientParams common;
    common.gather = gather;
    common.records = at_.records;
    common.tile_rows = tiled_record_rows(p_, c_.config);
    common.meta = at_.meta;
    common.list_bounds = at_.list_bounds;
    common.parent_bounds = bounds_of(chunk.batch).parents;
    common.query_bounds = at_.query_bounds;
    common.scale = static_cast<float>(p_.args.scale);
    if (query_gradient_.defined()) {
      QueryGradientParams query;
      query.common = common;
      query.first = query.last = true;
      query.gradient = query_gradient(chunk);
      query.gradient_batch = p_.num_queries * p_.num_heads * p_.key_dim;
      query.masked_end = c_.masked_end(chunk);
      run_query_gradient(c_.tree.shape, c_.config, query, /*rotations=*/nullptr, c_.stream);
    }
    if (keys_wanted()) {
      KeyGradientParams key;
      key.common = common;
      key.counts = at_.counts;
      key.entries = at_.entries;
      key.offsets = at_.offsets;
      key.keys = sums_from(key_sums_, p_.key_dim, chunk);
      key.values = sums_from(value_sums_, p_.value_dim, chunk);
      key.add = true;
      run_key_gradient(c_.tree.shape, c_.config, key, c_.stream);
    }
  }

  void add_masked(const Chunk& chunk, const GatherParams& gather, const RowParams& rows) {
    Workspace space(at_.records);  // which no row needs any more
    const MaskedGradientMemory memory = lay_out_masked_gradients(space, p_, c_.config);
    MaskedGradientParams params;
    params.gather = c_.masked_rows(gather, chunk);
    params.gradients = rows.gradients;
    params.outputs = rows.outputs;
    params.states = rows.states;
    params.tiles = c_.tiles(chunk);
    const int64_t runs = num_runs(params.gather.t0, params.gather.num_queries, p_.group());
    params.rows = {memory.rows.queries, memory.rows.gradients, memory.rows.numbers, memory.rows.scaled,
                   static_cast<int>(kRunRows / kRowTileRows * runs)};
    params.bounds = bounds_of(chunk.batch);
    params.query_bounds = memory.rows.bounds;
    params.scale = static_cast<float>(p_.args.scale);
    params.query_gradient = query_gradient(chunk);
    params.keys = sums_from(key_sums_, p_.key_dim, chunk);
    params.values = sums_from(value_sums_, p_.value_dim, chunk);
    params.sum_rows = gather.num_parents * kTensorCoreRate;
    params.add = true;
    params.marks = c_.marks(memory.marks);
    params.inverted = {memory.inverted_tiles, memory.inverted_tile_counts};
    params.list_bounds = at_.list_bounds;
    C10_CUDA_CHECK(cudaMemsetAsync(memory.rows.bounds, 0,
                                   chunk.num_batches * p_.num_kv_heads * kQueryBoundsBytes, c_.stream));
    run_masked_gradients(c_.tree.shape, params, c_.stream);
  }

  void store(const Tensor& sums, int64_t dim, const Tensor& gradient) const {
    if (!gradient.defined()) return;
    PushParams push;
    push.child = sums.mutable_data_ptr<float>();
    push.heads = p_.batch * p_.num_kv_heads;
    push.num_nodes = p_.num_keys;
    push.child_rows = p_.parents(0) * kTensorCoreRate;
    push.dim = dim;
    C10_CUDA_CHECK(launch_store_gradient(push, p_.num_kv_heads, store_type(gradient),
                                         gradient.mutable_data_ptr(), c_.stream));
  }

  const ListedCall& c_;
  const AttentionProblem& p_;
  const Tensor query_gradient_;
  Tensor scratch_, ones_, key_sums_, value_sums_;
  TensorView gradients_, outputs_;
  RowStates states_;
  SparseGradientMemory at_;
};

}  // namespace

SparseProblem given_problem(const SparseCall& call) {
  return {call.batch(),     call.num_queries(),    call.num_keys(),       call.kv_heads(), call.group(),
          call.value_dim(), call.x.blocks.size(3), call.given_block_size, call.stride};
}

bool takes_tensor_cores(const SparseCall& call) {
  return takes_tensor_cores(given_problem(call), listed_problem_of(call), current_device_facts());
}

void sparse_forward_tensor_cores(const SparseCall& call, const Tensor& out, const Tensor& lse,
                                 cudaStream_t stream) {
  const ListedCall c(
      call, choose_sparse_forward(listed_problem_of(call), current_device_facts(), choice_of(call)), stream);
  const AttentionProblem& p = c.tree.problem;
  Workspace sizes;
  lay_out_sparse_forward(sizes, p, c.config);
  const Tensor scratch = scratch_like(out, sizes.bytes());
  Workspace space(scratch.mutable_data_ptr());
  const SparseForwardMemory memory = lay_out_sparse_forward(space, p, c.config);
  const Tensor sums = at::empty_like(lse);
  c.for_each_chunk([&](const Chunk& chunk) {
    const int64_t row = (chunk.batch * p.num_queries + chunk.query) * p.num_heads;
    AttendParams params;
    params.gather = c.gather(chunk, memory.lists);
    params.first = params.last = true;
    params.max = lse.mutable_data_ptr<float>() + row;
    params.sum = sums.mutable_data_ptr<float>() + row;
    params.state_batch = p.num_queries * p.num_heads;
    params.out = static_cast<char*>(out.mutable_data_ptr()) + 2 * row * p.value_dim;
    params.sinks = call.x.sinks.defined() ? call.x.sinks.const_data_ptr<float>() : nullptr;
    params.masked_end = c.masked_end(chunk);
    attend(c, params);
    if (c.masked_queries(chunk) > 0) {
      attend_masked_rows(c, chunk, params, memory.marks);
    }
  });
  lse.add_(sums.log_());
}

void sparse_backward_tensor_cores(const SparseCall& call, const SparseResults& results, const Tensor& dout,
                                  const Tensor& dlse, const SparseGradients& gradients, cudaStream_t stream) {
  const ListedCall c(
      call, choose_sparse_backward(listed_problem_of(call), current_device_facts(), choice_of(call)), stream);
  ListedGradients sums(c, results, dout, dlse, gradients);
  c.for_each_chunk([&](const Chunk& chunk) { sums.add(chunk); });
  sums.finish(std::get<1>(gradients), std::get<2>(gradients));
}

}  // namespace htree::tree_attention
