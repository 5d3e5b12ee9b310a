// The backward for every dtype and shape: the same walk as in cuda/backward.cpp, with kernels that assume
// nothing. Its lists are explicit at every layer, the top included. Scratch is tensors, not a Workspace: the stage that
// selects lists again takes tensors, and memory that one layer needs is free for the next.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include "host/dispatch.h"
#include "ops/sparse_attention/cuda/any/general_gradient.h"
#include "ops/sparse_attention/cuda/any/inverted_lists.h"
#include "ops/tree/cuda/any/push_gradient.h"
#include "ops/tree/cuda/copies.h"
#include "ops/tree_attention/cuda/general_backward.h"

namespace htree::tree_attention {
namespace {

class GeneralBackward {
 public:
  GeneralBackward(const AttentionProblem& problem, const BackwardConfig& config, const Backward& b,
                  const CudaTree& tree, cudaStream_t stream)
      : problem_(problem), config_(config), b_(b), tree_(tree), stream_(stream) {
    const int64_t positions = rotated_positions(problem);
    rope_ = scratch_of(positions * problem.key_dim, at::kFloat, b.q);
    const Tensor inv_freq = given_frequencies(problem.args.inv_freq, b.q, stream);
    C10_CUDA_CHECK(launch_rope_table(rope(), positions, static_cast<int>(problem.key_dim),
                                     {problem.args.rope_base, problem.args.rotate,
                                      inv_freq.defined() ? inv_freq.const_data_ptr<double>() : nullptr},
                                     stream));
    if (b.parents.empty()) {
      tables_ = general_rope_tables(problem, b.q, stream);
      span_means_ = build_span_means(tree.keys[0], problem.args);
    }
    for (size_t i = 0; i < tree.keys.size(); ++i) {
      const int64_t rows =
          problem.batch * problem.num_kv_heads * num_parents(i) * problem.args.compression_rate;
      key_sums_.push_back(b.dk.defined() ? scratch_of(rows * problem.key_dim, at::kFloat, b.q) : Tensor());
      value_sums_.push_back(b.dv.defined() ? scratch_of(rows * problem.value_dim, at::kFloat, b.q)
                                           : Tensor());
    }
  }

  void run() {
    for (int64_t batch = 0; batch < problem_.batch; batch += config_.batch_chunk) {
      for (int64_t query = 0; query < problem_.num_queries;) {
        const int64_t num_queries = problem_.chunk_queries(query, config_.query_chunk);
        chunk({batch, std::min(config_.batch_chunk, problem_.batch - batch), query, num_queries});
        query += num_queries;
      }
    }
    finish(key_sums_, problem_.key_dim, b_.dk);
    finish(value_sums_, problem_.value_dim, b_.dv);
  }

 private:
  float2* rope() const { return reinterpret_cast<float2*>(rope_.mutable_data_ptr<float>()); }
  int64_t num_parents(size_t layer) const {
    return ceil_div(tree_.keys[layer].size(1), problem_.args.compression_rate);
  }
  Tensor rows_of(const Tensor& x, const Chunk& c) const {
    return x.narrow(0, c.batch, c.num_batches).narrow(1, c.query, c.num_queries);
  }

  // The lists of every layer of a chunk, those of the top written out.
  std::vector<Tensor> lists_of(const Chunk& c) const {
    const int64_t stride = problem_.args.selection_stride, count = ceil_div(c.num_queries, stride);
    const size_t top = tree_.keys.size() - 1;
    std::vector<Tensor> lists(top + 1);
    for (size_t i = 0; i < top && !b_.parents.empty(); ++i) {
      lists[i] = b_.parents[i].narrow(0, c.batch, c.num_batches).narrow(1, c.query / stride, count);
    }
    const auto new_lists = [&](int64_t width) {
      return at::empty({c.num_batches, count, problem_.num_kv_heads, width}, b_.q.options().dtype(at::kInt));
    };
    lists[top] = new_lists(list_capacity(problem_));
    const int64_t parent_span = node_span(problem_.args.compression_rate, problem_.layers());
    C10_CUDA_CHECK(launch_top_lists(
        {lists[top].mutable_data_ptr<int32_t>(), c.num_batches, count, count, problem_.num_kv_heads,
         lists[top].size(3), problem_.token_of(c.query), stride, parent_span},
        stream_));
    for (size_t i = top; i > 0 && b_.parents.empty(); --i) {
      lists[i - 1] = new_lists(problem_.args.top_k);
      recompute_selection_cuda(
          rows_of(b_.q, c), tree_.keys[i].narrow(0, c.batch, c.num_batches),
          span_means_.defined() ? span_means_.narrow(0, c.batch, c.num_batches) : Tensor(), lists[i],
          tables_.cos, tables_.sin, layer_args(problem_, static_cast<int64_t>(i), c.query), lists[i - 1]);
    }
    return lists;
  }

  void chunk(const Chunk& c) {
    const std::vector<Tensor> lists = lists_of(c);
    const int64_t heads = c.num_batches * c.num_queries * problem_.num_heads;
    const Tensor delta = scratch_of(heads, at::kFloat, b_.q);
    const Tensor partial = scratch_of(b_.dq.defined() ? heads * problem_.key_dim : 1, at::kFloat, b_.q);
    for (size_t i = lists.size(); i-- > 0;) {
      const GeneralGradientParams params = layer_params(c, lists, i, delta);
      dispatch(params, c, i, partial);
    }
  }

  GeneralGradientParams layer_params(const Chunk& c, const std::vector<Tensor>& lists, size_t i,
                                     const Tensor& delta) const {
    GeneralGradientParams params;
    params.queries = view_of(rows_of(b_.q, c));
    params.gradients = view_of(rows_of(b_.dout, c));
    params.outputs = view_of(rows_of(b_.out, c));
    params.layer.keys = view_of(tree_.keys[i].narrow(0, c.batch, c.num_batches));
    params.layer.values = view_of(tree_.values[i].narrow(0, c.batch, c.num_batches));
    params.states.max = rows_of(b_.gmax, c).const_data_ptr<float>();
    params.states.sum = rows_of(b_.gsum, c).const_data_ptr<float>();
    if (b_.dlse.defined()) {
      params.states.lse_gradients = rows_of(b_.dlse, c).const_data_ptr<float>();
    }
    params.states.batch = b_.gmax.stride(0);
    params.delta = delta.mutable_data_ptr<float>();
    params.rope = rope();
    params.lists.data = lists[i].const_data_ptr<int32_t>();
    params.lists.batch = lists[i].stride(0);
    if (i > 0) {
      params.lists.next = lists[i - 1].const_data_ptr<int32_t>();
      params.lists.next_batch = lists[i - 1].stride(0);
      params.lists.next_width = static_cast<int>(lists[i - 1].size(3));
    }
    params.layer.num_nodes = tree_.keys[i].size(1);
    params.layer.rate = problem_.args.compression_rate;
    params.layer.node_span = node_span(params.layer.rate, static_cast<int64_t>(i));
    params.t0 = problem_.token_of(c.query);
    params.lists.stride = problem_.args.selection_stride;
    params.scale = static_cast<float>(problem_.args.scale);
    params.num_batches = static_cast<int>(c.num_batches);
    params.num_queries = static_cast<int>(c.num_queries);
    params.lists.num_lists = static_cast<int>(lists[i].size(1));
    params.heads.num_kv_heads = static_cast<int>(problem_.num_kv_heads);
    params.heads.group = static_cast<int>(problem_.group());
    params.lists.width = static_cast<int>(lists[i].size(3));
    params.heads.key_dim = static_cast<int>(problem_.key_dim);
    params.heads.value_dim = static_cast<int>(problem_.value_dim);
    return params;
  }

  void dispatch(const GeneralGradientParams& params, const Chunk& c, size_t i, const Tensor& partial) {
    const bool top = i + 1 == tree_.keys.size();
    const auto launch = [&](auto tag) {
      using T = typename decltype(tag)::type;
      if (top) {
        C10_CUDA_CHECK(launch_general_delta<T>(params, stream_));
      }
      if (b_.dq.defined()) {
        GeneralQueryGradient query;
        query.partial = partial.mutable_data_ptr<float>();
        query.first = top;
        query.last = i == 0;
        query.gradient = rows_of(b_.dq, c).mutable_data_ptr();
        query.gradient_batch = b_.dq.stride(0);
        C10_CUDA_CHECK(launch_general_query_gradient<T>(params, query, stream_));
      }
      if (b_.dk.defined() || b_.dv.defined()) {
        key_gradient<T>(params, c, i);
      }
    };
    // c10's half types have the layout of CUDA's, which the kernels are compiled for
    switch (b_.q.scalar_type()) {
      case at::kFloat:
        return launch(Type<float>{});
      case at::kHalf:
        return launch(Type<__half>{});
      case at::kBFloat16:
        return launch(Type<__nv_bfloat16>{});
      default:
        TORCH_CHECK_TYPE(false, "attention_backward: dtype = ", b_.q.scalar_type(),
                         " has no CUDA kernel; compiled: Float Half BFloat16");
    }
  }

  template <typename T>
  void key_gradient(const GeneralGradientParams& params, const Chunk& c, size_t i) {
    const int64_t lists = int64_t{params.num_batches} * params.lists.num_lists * params.heads.num_kv_heads;
    const int64_t heads = int64_t{params.num_batches} * params.heads.num_kv_heads;
    const Tensor counts = scratch_of(lists, at::kInt, b_.q);
    const ListTable table = {params.lists.data,      params.lists.batch,        params.num_batches,
                             params.lists.num_lists, params.heads.num_kv_heads, params.lists.width};
    ListMaskParams count = {table};
    count.counts = counts.mutable_data_ptr<int32_t>();
    count.rate = params.layer.rate;
    count.t0 = params.t0;
    count.stride = params.lists.stride;
    count.node_span = params.layer.node_span;
    C10_CUDA_CHECK(launch_list_masks(count, stream_));

    GeneralKeyGradient key;
    key.num_parents = num_parents(i);
    const Tensor entries = scratch_of(lists * params.lists.width, at::kInt, b_.q);
    const Tensor offsets = scratch_of(heads * (key.num_parents + 1), at::kInt, b_.q);
    const Tensor run_counts = scratch_of(
        heads * ceil_div(params.lists.num_lists, kInvertedListRows) * key.num_parents, at::kInt, b_.q);
    const auto words = [](const Tensor& x) { return static_cast<uint32_t*>(x.mutable_data_ptr()); };
    InvertedListParams inverted = {table};
    inverted.num_parents = key.num_parents;
    inverted.entries = words(entries);
    inverted.offsets = words(offsets);
    inverted.run_counts = words(run_counts);
    C10_CUDA_CHECK(launch_inverted_lists(inverted, stream_));

    key.counts = counts.const_data_ptr<int32_t>();
    key.entries = inverted.entries;
    key.offsets = inverted.offsets;
    key.add = c.query > 0;
    const int64_t first_row = c.batch * params.heads.num_kv_heads * key.num_parents * params.layer.rate;
    if (b_.dk.defined()) {
      key.keys = key_sums_[i].mutable_data_ptr<float>() + first_row * params.heads.key_dim;
    }
    if (b_.dv.defined()) {
      key.values = value_sums_[i].mutable_data_ptr<float>() + first_row * params.heads.value_dim;
    }
    C10_CUDA_CHECK(launch_general_key_gradient<T>(params, key, stream_));
  }

  // Takes the sums from the top down to the tokens, where they are rounded into the gradient.
  void finish(const std::vector<Tensor>& sums, int64_t dim, const Tensor& gradient) const {
    for (size_t i = sums.size(); gradient.defined() && i-- > 0;) {
      PushParams push;
      push.child = sums[i].mutable_data_ptr<float>();
      push.heads = problem_.batch * problem_.num_kv_heads;
      push.num_nodes = tree_.keys[i].size(1);
      push.rate = problem_.args.compression_rate;
      push.child_rows = num_parents(i) * push.rate;
      push.dim = dim;
      if (i + 1 < sums.size()) {
        push.parent = sums[i + 1].const_data_ptr<float>();
        push.parent_rows = num_parents(i + 1) * push.rate;
      }
      if (i == 0) {
        C10_CUDA_CHECK(launch_store_gradient(push, problem_.num_kv_heads, store_type(gradient),
                                             gradient.mutable_data_ptr(), stream_));
      } else if (push.parent) {
        C10_CUDA_CHECK(launch_push_gradient(push, stream_));
      }
    }
  }

  const AttentionProblem& problem_;
  const BackwardConfig& config_;
  const Backward& b_;
  const CudaTree& tree_;
  cudaStream_t stream_;
  Tensor rope_;
  RopeTables tables_;
  Tensor span_means_;  // where lists are selected again
  std::vector<Tensor> key_sums_, value_sums_;
};

}  // namespace

void run_general_backward(const AttentionProblem& problem, const BackwardConfig& config,
                          const Backward& backward, const CudaTree& tree, cudaStream_t stream) {
  GeneralBackward(problem, config, backward, tree, stream).run();
}

}  // namespace htree::tree_attention
