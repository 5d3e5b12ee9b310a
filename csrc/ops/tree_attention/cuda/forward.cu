// attention_forward on CUDA: docs/semantics/tree_attention.md §1.5. Temporary memory: attention_config.h and
// §1.8; calls go over the queries in chunks.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAException.h>

#include <limits>

#include "host/cuda/launch_scope.h"
#include "ops/tree_attention/cuda/tree/cuda_tree.h"
#include "ops/tree_attention/cuda/tree/tables.h"
#include "ops/tree_attention/stages/gather/layer_general.h"

namespace htree::tree_attention {
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
      select_accumulate_general(queries, keys, values, lists, rope.cos, rope.sin, args, layer_max, layer_sum,
                                layer_out, next);
      lists = next;
    } else {
      bottom_accumulate_general(queries, keys, values, lists, rope.cos, rope.sin, args, layer_max, layer_sum,
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
