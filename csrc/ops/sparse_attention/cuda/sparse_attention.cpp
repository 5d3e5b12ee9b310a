// sparse_attention on CUDA: docs/semantics/sparse_attention.md §8. What the tensor cores do not take runs on the general
// kernels of tree attention's tokens, for every dtype and shape, over lists that are sorted first. Launches only; nothing
// is read on the host.
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>

#include <limits>

#include "device/work.cuh"
#include "ops/selection/cuda/any/compute_scores.h"
#include "ops/sparse_attention/cuda/any/accumulate.h"
#include "ops/sparse_attention/cuda/any/general_gradient.h"
#include "ops/sparse_attention/cuda/any/inverted_lists.h"
#include "ops/sparse_attention/cuda/any/visible_lists.h"
#include "ops/sparse_attention/cuda/gradient_tensors.h"
#include "ops/sparse_attention/cuda/tensor_cores.h"
#include "ops/sparse_attention/plan/sparse.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "ops/tree/cuda/any/cuda_tensors.h"
#include "ops/tree/cuda/copies.h"

namespace htree::tree_attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

SparseProblem problem_of(const SparseCall& call) {
  return {call.batch(),     call.num_queries(),    call.num_keys(), call.kv_heads(), call.group(),
          call.value_dim(), call.x.blocks.size(3), call.block_size, call.stride};
}

// Batches [batch, batch + batches), queries [query, query + queries).
struct SparseSlice {
  int64_t batch, batches, query, queries;

  Tensor rows(const Tensor& x) const { return x.narrow(0, batch, batches).narrow(1, query, queries); }
  Tensor keys(const Tensor& x) const { return x.narrow(0, batch, batches); }
};

template <typename F>
void for_each_slice(const SparseProblem& p, const SparseChunks& chunks, F&& f) {
  for (int64_t batch = 0; batch < p.batch; batch += chunks.batches) {
    for (int64_t query = 0; query < p.num_queries; query += chunks.queries) {
      f(SparseSlice{batch, std::min(chunks.batches, p.batch - batch), query,
                    std::min(chunks.queries, p.num_queries - query)});
    }
  }
}

// The lists of a slice as the kernels read them: int32 [batches, lists, H_kv, visible_width].
Tensor visible_lists(const SparseCall& call, const SparseProblem& p, const SparseSlice& slice,
                     cudaStream_t stream) {
  const Tensor& blocks = call.x.blocks;
  const int64_t rows = p.list_rows(slice.queries);
  const Tensor lists = at::empty({slice.batches, rows, p.num_kv_heads, p.visible_width()}, blocks.options());
  VisibleListParams params;
  params.blocks = blocks.const_data_ptr<int32_t>() + slice.batch * blocks.stride(0) +
                  slice.query / p.stride * blocks.stride(1);
  params.blocks_batch = blocks.stride(0);
  params.lists = lists.mutable_data_ptr<int32_t>();
  params.num_batches = slice.batches;
  params.num_lists = rows;
  params.num_list_heads = static_cast<int>(blocks.size(2));
  params.num_kv_heads = static_cast<int>(p.num_kv_heads);
  params.width = p.list_width;
  params.visible_width = p.visible_width();
  params.num_blocks = p.num_blocks();
  params.t0 = call.first_token() + slice.query;
  params.stride = p.stride;
  params.block_size = p.block_size;
  C10_CUDA_CHECK(launch_visible_lists(params, stream));
  return lists;
}

Geometry geometry_of_slice(const SparseCall& call, const SparseProblem& p, const SparseSlice& slice) {
  LayerArgs args;
  args.compression_rate = p.block_size;
  args.list_width = p.visible_width();
  args.t0 = call.first_token() + slice.query;
  args.selection_stride = p.stride;
  return geometry_of(args, slice.batches, slice.queries, p.num_kv_heads, p.group, /*lists_per_kv_head=*/1,
                     p.num_keys);
}

// The softmax states of a slice: max and sum [B, T_q, H] and the weighted values [B, T_q, H, V], fp32.
struct SliceStates {
  Tensor max, sum, values;
};

template <typename T>
void accumulate_slice(const SparseCall& call, const SparseProblem& p, const SparseSlice& slice,
                      const Tensor& lists, const Tensor& scores, const Tensor& counts,
                      const SliceStates& states, cudaStream_t stream) {
  const Geometry geometry = geometry_of_slice(call, p, slice);
  ScoresParams<T> score;
  score.geometry = geometry;
  score.q = input_view<T>(slice.rows(call.x.query));
  score.keys = input_view<T>(slice.keys(call.x.key));
  score.parents = input_view<int32_t>(lists);
  score.scores = output<float>(scores);
  score.num_candidates = output<int32_t>(counts);
  score.key_dim = call.x.query.size(3);
  score.scale = static_cast<float>(call.scale);
  score.fill_tail = false;
  C10_CUDA_CHECK(launch_compute_scores<FullWork>(score, stream));
  AccumulateParams<T> add;
  add.geometry = geometry;
  add.values = input_view<T>(slice.keys(call.x.value));
  add.parents = score.parents;
  add.scores = input<float>(scores);
  add.num_candidates = input<int32_t>(counts);
  add.state = {output<float>(states.max), output<float>(states.sum), output<float>(states.values),
               slice.queries * call.heads(), call.heads()};
  add.value_dim = p.value_dim;
  C10_CUDA_CHECK(launch_accumulate(add, stream));
}

// Rows whose list holds nothing: bool [B, T_q, H].
Tensor dead_rows(const SparseProblem& p, const Tensor& lists, int64_t queries) {
  const Tensor dead = lists.select(3, 0).lt(0);
  return dead.repeat_interleave(p.stride, 1).narrow(1, 0, queries).repeat_interleave(p.group, 2);
}

// Writes out and lse of a slice from its states.
void finish_slice(const SparseCall& call, const SliceStates& states, const Tensor& dead, const Tensor& out,
                  const Tensor& lse) {
  const auto& [max, sum, values] = states;
  lse.copy_(max.add(sum.log()));
  Tensor factor = sum.reciprocal();
  if (call.x.sinks.defined()) {
    const Tensor top = at::maximum(max, call.x.sinks);
    const Tensor keys = max.sub(top).exp_();
    factor = keys.div(keys.mul(sum).add_(call.x.sinks.sub(top).exp_()));
  }
  // The states of a row that sees nothing are -inf, 0 and 0: its factor is not finite.
  out.copy_(values.mul(factor.unsqueeze(-1)).masked_fill_(dead.unsqueeze(-1), 0));
}

// The gradients of key and value: fp32 sums over the slices, [B, H_kv, blocks * block_size, D], and how they are rounded.
struct KeySums {
  Tensor keys, values;

  static Tensor make(const SparseProblem& p, const Tensor& gradient) {
    return gradient.defined()
               ? scratch_of(p.batch * p.num_kv_heads * p.num_blocks() * p.block_size * gradient.size(3),
                            at::kFloat, gradient)
               : Tensor();
  }
  static float* from_batch(const SparseProblem& p, const Tensor& sums, int64_t dim, int64_t batch) {
    return sums.defined()
               ? sums.mutable_data_ptr<float>() + batch * p.num_kv_heads * p.num_blocks() * p.block_size * dim
               : nullptr;
  }
  static void store(const SparseProblem& p, const Tensor& sums, const Tensor& gradient, cudaStream_t stream) {
    if (!gradient.defined()) return;
    PushParams push;
    push.child = sums.mutable_data_ptr<float>();
    push.heads = p.batch * p.num_kv_heads;
    push.num_nodes = p.num_keys;
    push.rate = p.block_size;
    push.child_rows = p.num_blocks() * p.block_size;
    push.dim = gradient.size(3);
    C10_CUDA_CHECK(launch_store_gradient(push, p.num_kv_heads, store_type(gradient),
                                         gradient.mutable_data_ptr(), stream));
  }
};

// The lists that hold each block.
struct SliceInverse {
  Tensor counts, entries, offsets, run_counts;
};

SliceInverse invert(const SparseProblem& p, const SparseSlice& slice, const Tensor& lists,
                    cudaStream_t stream) {
  const int64_t rows = lists.size(1), heads = slice.batches * p.num_kv_heads, width = lists.size(3);
  const SliceInverse found = {
      scratch_of(heads * rows, at::kInt, lists), scratch_of(heads * rows * width, at::kInt, lists),
      scratch_of(heads * (p.num_blocks() + 1), at::kInt, lists),
      scratch_of(heads * ceil_div(rows, kInvertedListRows) * p.num_blocks(), at::kInt, lists)};
  const ListTable table = {lists.const_data_ptr<int32_t>(),  lists.stride(0),
                           static_cast<int>(slice.batches),  static_cast<int>(rows),
                           static_cast<int>(p.num_kv_heads), static_cast<int>(width)};
  ListMaskParams count = {table};
  count.counts = found.counts.mutable_data_ptr<int32_t>();
  count.rate = p.block_size;
  count.stride = p.stride;
  C10_CUDA_CHECK(launch_list_masks(count, stream));
  const auto words = [](const Tensor& x) { return static_cast<uint32_t*>(x.mutable_data_ptr()); };
  InvertedListParams inverse = {table};
  inverse.num_parents = p.num_blocks();
  inverse.entries = words(found.entries);
  inverse.offsets = words(found.offsets);
  inverse.run_counts = words(found.run_counts);
  C10_CUDA_CHECK(launch_inverted_lists(inverse, stream));
  return found;
}

}  // namespace

void sparse_forward_cuda(const SparseCall& call, const Tensor& out, const Tensor& lse) {
  const LaunchScope scope(call.x.query);
  if (takes_tensor_cores(call)) {
    sparse_forward_tensor_cores(call, out, lse, scope.stream());
    return;
  }
  const SparseProblem p = problem_of(call);
  const SparseChunks chunks = sparse_forward_chunks(p);
  const auto floats = call.x.query.options().dtype(at::kFloat);
  for_each_slice(p, chunks, [&](const SparseSlice& slice) {
    const Tensor lists = visible_lists(call, p, slice, scope.stream());
    const std::vector<int64_t> shape = {slice.batches, slice.queries, call.heads()};
    const Tensor scores =
        at::empty({slice.batches * slice.queries * call.heads() * p.visible_width() * p.block_size}, floats);
    const Tensor counts = at::empty({slice.batches * slice.queries * p.num_kv_heads}, lists.options());
    const SliceStates states = {at::empty(shape, floats), at::empty(shape, floats),
                                at::empty({shape[0], shape[1], shape[2], p.value_dim}, floats)};
    dispatch_device_dtype("sparse_attention", call.x.query.scalar_type(), FloatTypes{}, [&](auto tag) {
      using T = typename decltype(tag)::type;
      accumulate_slice<T>(call, p, slice, lists, scores, counts, states, scope.stream());
    });
    finish_slice(call, states, dead_rows(p, lists, slice.queries), slice.rows(out), slice.rows(lse));
  });
}

void sparse_backward_cuda(const SparseCall& call, const SparseResults& results, const Tensor& dout,
                          const Tensor& dlse, const SparseGradients& gradients) {
  const LaunchScope scope(call.x.query);
  const cudaStream_t stream = scope.stream();
  const auto& [out, lse] = results;
  const auto& [dq, dk, dv, dsinks] = gradients;
  // The weights e^(s - lse) leave the sink out, so that dO counts times the keys' share of the softmax.
  Tensor upstream = dout;
  if (call.x.sinks.defined()) {
    const Tensor share = lse.sub(call.x.sinks).sigmoid_().masked_fill_(lse.eq(-kInfinity), 0);
    upstream = dout.to(at::kFloat).mul(share.unsqueeze(-1)).to(dout.scalar_type());
  }
  if (takes_tensor_cores(call)) {
    sparse_backward_tensor_cores(call, results, upstream, dlse, gradients, stream);
    return;
  }
  const SparseProblem p = problem_of(call);
  const Tensor key_sums = KeySums::make(p, dk), value_sums = KeySums::make(p, dv);
  // The states are those of a softmax with maximum lse and sum 1.
  const Tensor ones = at::ones(lse.sizes(), lse.options());
  const Tensor rope = scratch_of(p.visible_width() * p.block_size * call.x.query.size(3), at::kFloat, out);
  auto* table = reinterpret_cast<float2*>(rope.mutable_data_ptr<float>());
  C10_CUDA_CHECK(launch_rope_table(table, p.visible_width() * p.block_size,
                                   static_cast<int>(call.x.query.size(3)),
                                   {10000.0, /*rotate=*/false, nullptr}, stream));
  for_each_slice(p, sparse_backward_chunks(p), [&](const SparseSlice& slice) {
    const Tensor lists = visible_lists(call, p, slice, stream);
    const Tensor delta = at::empty({slice.batches, slice.queries, call.heads()}, lse.options());
    GeneralGradientParams params;
    params.heads = {static_cast<int>(p.num_kv_heads), static_cast<int>(p.group),
                    static_cast<int>(call.x.query.size(3)), static_cast<int>(p.value_dim)};
    params.layer = {view_of(slice.keys(call.x.key)), view_of(slice.keys(call.x.value)), p.num_keys,
                    p.block_size,
                    /*node_span=*/1};
    params.lists = {lists.const_data_ptr<int32_t>(),
                    lists.stride(0),
                    nullptr,
                    0,
                    p.stride,
                    static_cast<int>(lists.size(1)),
                    static_cast<int>(lists.size(3))};
    params.queries = view_of(slice.rows(call.x.query));
    params.gradients = view_of(slice.rows(upstream));
    params.outputs = view_of(slice.rows(out));
    params.states = {slice.rows(lse).const_data_ptr<float>(), slice.rows(ones).const_data_ptr<float>(),
                     dlse.defined() ? slice.rows(dlse).const_data_ptr<float>() : nullptr, lse.stride(0)};
    params.delta = delta.mutable_data_ptr<float>();
    params.rope = table;
    params.t0 = call.first_token() + slice.query;
    params.scale = static_cast<float>(call.scale);
    params.num_batches = static_cast<int>(slice.batches);
    params.num_queries = static_cast<int>(slice.queries);
    dispatch_device_dtype("sparse_attention", out.scalar_type(), FloatTypes{}, [&](auto tag) {
      using T = typename decltype(tag)::type;
      C10_CUDA_CHECK(launch_general_delta<T>(params, stream));
      if (dq.defined()) {
        GeneralQueryGradient query;
        query.first = query.last = true;
        query.gradient = slice.rows(dq).mutable_data_ptr();
        query.gradient_batch = dq.stride(0);
        C10_CUDA_CHECK(launch_general_query_gradient<T>(params, query, stream));
      }
      if (dk.defined() || dv.defined()) {
        const SliceInverse inverse = invert(p, slice, lists, stream);
        GeneralKeyGradient key;
        key.counts = inverse.counts.const_data_ptr<int32_t>();
        key.entries = static_cast<const uint32_t*>(inverse.entries.const_data_ptr());
        key.offsets = static_cast<const uint32_t*>(inverse.offsets.const_data_ptr());
        key.num_parents = p.num_blocks();
        key.keys = KeySums::from_batch(p, key_sums, call.x.query.size(3), slice.batch);
        key.values = KeySums::from_batch(p, value_sums, p.value_dim, slice.batch);
        key.add = slice.query > 0;
        C10_CUDA_CHECK(launch_general_key_gradient<T>(params, key, stream));
      }
    });
  });
  KeySums::store(p, key_sums, dk, stream);
  KeySums::store(p, value_sums, dv, stream);
}

}  // namespace htree::tree_attention
