// CUDA entry points of the tree cache: scratch, chunks of rows and launches.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <iterator>

#include "host/cuda/hopper.h"
#include "host/cuda/launch_scope.h"
#include "host/env.h"
#include "host/op_handle.h"
#include "ops/tree/cuda/any/cuda_tensors.h"
#include "ops/tree/cuda/cuda_tree.h"
#include "ops/tree_cache/decode/listed_plan.h"
#include "ops/tree_cache/index/index_keys.h"
#include "ops/tree_cache/index/index_lists_cuda.h"
#include "ops/tree_cache/index/index_params.h"
#include "ops/tree_cache/packed/packed_leaves.h"
#include "ops/tree_cache/row_tree.h"
#include "ops/tree_cache/tree_cache.h"
#include "ops/tree_cache/tree_cache_params.h"

namespace htree::tree_cache {
namespace {

using tree_attention::dispatch_device_dtype;
using tree_attention::input;
using tree_attention::output;

// The most scratch for one chunk of rows, unless the rows of a single stride need more.
constexpr int64_t kScratchBytes = int64_t{256} << 20;

const int32_t* optional_ints(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->numel() > 0 ? input<int32_t>(*tensor) : nullptr;
}

CacheSequences sequences_of(const Pools& pools, const AttentionInputs& inputs,
                            const AttentionOutputs& outputs) {
  CacheSequences sequences;
  sequences.block_table = input<int32_t>(pools.block_table);
  sequences.lengths = input<int32_t>(pools.lengths);
  sequences.cu_q = input<int32_t>(inputs.cu_q);
  sequences.q_lengths = optional_ints(inputs.q_lengths);
  sequences.lists = optional_ints(inputs.lists);
  sequences.list_pos = optional_ints(inputs.list_pos);
  sequences.new_lists = output<int32_t>(std::get<2>(outputs));
  sequences.new_list_pos = output<int32_t>(std::get<3>(outputs));
  sequences.num_sequences = static_cast<int>(pools.lengths.numel());
  sequences.ring = static_cast<int>(std::get<3>(outputs).size(1));
  return sequences;
}

// cos and sin [2, size, K/2], given by the caller or computed here; undefined without rotation.
Tensor rotations(const AttentionInputs& inputs, const AttentionArgs& args, int64_t size,
                 cudaStream_t stream) {
  if (!args.rotate) return {};
  if (inputs.rope_table.has_value()) return *inputs.rope_table;
  if (const Tensor given = tree_attention::given_frequencies(args.inv_freq, inputs.q, stream);
      given.defined()) {
    const Tensor angle = at::outer(at::arange(size, given.options()), given);
    return at::stack({angle.cos(), angle.sin()}).to(at::kFloat);
  }
  static const auto op = op_handle<Tensor(SymInt, int64_t, double, at::ScalarType, std::optional<at::Device>,
                                          std::optional<at::ArrayRef<double>>)>("htree::rope_cache");
  return op.call(size, inputs.q.size(2), args.rope_base, at::kFloat, inputs.q.device(), std::nullopt);
}

// The scratch of one row and head, each part counted in elements of four bytes.
struct RowScratch {
  int64_t scores, span_scores, keys, lists, parts, outs;
  int64_t bytes() const { return 4 * (scores + span_scores + keys + 2 * lists + 2 * parts + outs); }
};

template <typename T>
RowScratch row_scratch(const AttendParams<T>& params) {
  const int64_t capacity = most_candidates(params.layout, params.options);
  const int64_t layers = params.layout.num_layers;
  RowScratch scratch;
  scratch.scores = capacity * params.group;
  scratch.span_scores = params.layout.span > 0 ? scratch.scores : 0;
  scratch.keys = 4 * capacity > kMaxKeyBytes ? capacity : 0;
  scratch.lists = layers * params.options.top_k;
  scratch.parts = layers * num_splits(capacity) * params.group;
  scratch.outs = scratch.parts * params.value_dim;
  return scratch;
}

// HTREE_TREE_DECODE is read at every call, so that a test can compare the kernels: auto, general, or the number
// of blocks that share a row and K/V head.
struct DecodeChoice {
  bool allowed = true;
  int cluster = 0;
};
DecodeChoice decode_choice() {
  const std::string choice = env_or("HTREE_TREE_DECODE", "auto");
  if (choice == "auto") return {};
  if (choice == "general") return {.allowed = false};
  for (int cluster = 1; cluster <= kShares; cluster *= 2) {
    if (choice == std::to_string(cluster)) return {.cluster = cluster};
  }
  TORCH_CHECK_VALUE(false, "HTREE_TREE_DECODE is auto, general, 1, 2, 4, 8 or 16, got ", choice);
}

bool to_16_bytes(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

void check_alignment(const char* op, const char* name, const void* pointer) {
  TORCH_CHECK_VALUE(to_16_bytes(pointer), op, ": ", name,
                    " must begin at a multiple of 16 bytes where tokens are packed");
}

// Attention does not write: a pointer for writing would copy memory that is shared lazily.
LeafPools leaf_pools(const char* op, const PackedLeaves& leaves, int64_t key_dim, bool writes) {
  const auto pointer = [&](const Tensor& x) {
    return writes ? x.mutable_data_ptr() : const_cast<void*>(x.const_data_ptr());
  };
  const auto pool = [&](const char* name, const Tensor& codes, const Tensor& scales) {
    check_alignment(op, name, codes.const_data_ptr());
    return LeafPool{static_cast<uint8_t*>(pointer(codes)), static_cast<uint16_t*>(pointer(scales)),
                    static_cast<int>(codes.size(3))};
  };
  return {pool("k_codes", leaves.k_codes, leaves.k_scales), pool("v_codes", leaves.v_codes, leaves.v_scales),
          leaf_format(key_dim, leaves.k_codes.size(3)).bits};
}

template <typename T>
DecodeProblem decode_problem(const AttendParams<T>& params, int64_t rows) {
  DecodeProblem problem;
  problem.rows = rows * params.layout.num_kv_heads;
  problem.group = params.group;
  problem.rate = params.layout.rate;
  problem.slots = params.options.parents;
  problem.key_dim = params.key_dim;
  problem.value_dim = params.value_dim;
  const LeafPools& leaves = params.leaves;
  const int64_t tokens = leaves.bits > 0 ? params.layout.page_size : 0;  // rows of the pools of packed tokens
  const int64_t page_rows = std::max(params.layout.key_rows(), tokens);
  problem.pool_rows = int64_t{params.layout.num_pages} * params.layout.num_kv_heads * page_rows;
  problem.spans = params.layout.span > 0;
  problem.two_byte_type = sizeof(T) == 2;
  const void* const all[] = {params.keys,         params.values,       params.options.cos,
                             params.options.sin,  leaves.keys.codes,   leaves.keys.scales,
                             leaves.values.codes, leaves.values.scales};
  problem.aligned = std::all_of(std::begin(all), std::end(all), to_16_bytes);  // null is
  return problem;
}

// Whether and how the decode kernel takes `rows` rows of the call.
template <typename T>
DecodePlans decode_plans(const AttendParams<T>& params, int64_t rows) {
  const DecodeChoice choice = decode_choice();
  if (!choice.allowed || !has_hopper_kernels()) return {};
  return plan_decode(decode_problem(params, rows),
                     at::cuda::getCurrentDeviceProperties()->multiProcessorCount, clusters_at_once(),
                     choice.cluster);
}

// The parts of a row where its lists are given and the kernel of decode/listed.cuh takes the call; else 0.
template <typename T>
int64_t parts_of_listed(const AttendParams<T>& params) {
  ListedProblem listed;
  listed.capacity = params.layout.capacity();
  listed.max_top_nodes = params.options.max_top_nodes;
  listed.top_k = params.options.top_k;
  listed.layers = params.layout.num_layers;
  listed.rotates = params.options.cos != nullptr;
  listed.packed = params.leaves.bits > 0;
  const bool taken =
      params.options.lists_given && decode_choice().allowed &&
      takes_listed(decode_problem(params, 1), listed, at::cuda::getCurrentDeviceProperties()->major);
  return taken ? listed_parts(listed) : 0;
}

template <typename T, int kDim, bool kSpans>
cudaError_t launch_decode_chunk(const AttendParams<T>& params, const DecodePlans& plans,
                                cudaStream_t stream) {
  return params.leaves.bits == 0 ? launch_decode<T, kDim, kSpans>(params, plans, stream)
                                 : launch_decode_packed<T, kDim, kSpans>(params, plans, stream);
}

template <typename T>
cudaError_t launch_chunk(const AttendParams<T>& params, const DecodePlans& plans, int64_t listed_parts,
                         cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (listed_parts > 0) {
      const bool pdl = has_hopper_kernels();
      return params.key_dim == 64 ? launch_listed<T, 64>(params, listed_parts, pdl, stream)
                                  : launch_listed<T, 128>(params, listed_parts, pdl, stream);
    }
    if (plans.taken() && params.layout.span == 0) {
      return params.key_dim == 64 ? launch_decode_chunk<T, 64, false>(params, plans, stream)
                                  : launch_decode_chunk<T, 128, false>(params, plans, stream);
    }
    if (plans.taken()) {
      return params.key_dim == 64 ? launch_decode_chunk<T, 64, true>(params, plans, stream)
                                  : launch_decode_chunk<T, 128, true>(params, plans, stream);
    }
  }
  return launch_attend(params, stream);
}

// Computes all rows of the call, one chunk after another on the stream. Without an index scores choose.
template <typename T>
void attend_chunks(AttendParams<T> params, const std::optional<IndexInputs>& index, const Tensor& like,
                   cudaStream_t stream) {
  const int64_t heads = params.layout.num_kv_heads;
  const int64_t total = params.chunk.total;
  params.options.lists_given = index.has_value();
  const int64_t listed_parts = parts_of_listed(params);
  DecodePlans plans = listed_parts > 0 ? DecodePlans{} : decode_plans(params, total);
  const DecodeChoice wanted = decode_choice();
  const auto plan_index = [&](int64_t rows) {
    return index.has_value() && wanted.allowed
               ? index_choice_plan(*index, params.layout, params.options, rows, wanted.cluster)
               : ChoicePlan{};
  };
  const bool general = !plans.taken() && listed_parts == 0, at_once = plan_index(total).taken();
  // The ring is filled from descriptions of rows.
  const bool described = general || (index.has_value() && (!at_once || params.sequences.ring > 0));
  RowScratch scratch = row_scratch(params);
  if (listed_parts > 0) {
    scratch = {.lists = scratch.lists, .parts = scratch.parts, .outs = scratch.outs};
  } else if (!general) {
    const int64_t span_scores = most_candidates(params.layout, params.options) * padded_heads(params.group);
    scratch = {.span_scores = params.layout.span > 0 ? span_scores : 0,
               .lists = params.options.stride > 1 || index.has_value() ? scratch.lists : 0};
  }
  const int64_t index_bytes =
      !index.has_value() || at_once ? 0 : 4 * index->pool.keys.size(1) * index_score_row(params.layout);
  // Blocks of a row and K/V head, whatever the plan.
  const int64_t most_blocks = std::max<int64_t>(kShares, listed_parts);
  const int64_t most = general ? total : std::min(total, (int64_t{1} << 30) / (most_blocks * heads));
  const int64_t rows =
      std::clamp<int64_t>(kScratchBytes / std::max<int64_t>(scratch.bytes() * heads + index_bytes, 1),
                          params.options.stride, std::max<int64_t>(most, params.options.stride));
  const int64_t num = std::min(rows, total) * heads;
  const auto words = [&](int64_t count) { return at::empty({count}, like.options().dtype(at::kInt)); };
  const Tensor query_rows = words(described ? total * static_cast<int64_t>(sizeof(QueryRow) / 4) : 0);
  const Tensor floats =
      words(num * (scratch.scores + scratch.span_scores + 2 * scratch.parts + scratch.outs));
  const Tensor ints = words(num * (scratch.keys + 2 * scratch.lists));
  RowChunk& chunk = params.chunk;
  chunk.rows = described ? reinterpret_cast<QueryRow*>(query_rows.mutable_data_ptr()) : nullptr;
  chunk.scores = output<float>(floats);
  chunk.span_scores = chunk.scores + num * scratch.scores;
  chunk.part_max = chunk.span_scores + num * scratch.span_scores;
  chunk.part_sum = chunk.part_max + num * scratch.parts;
  chunk.part_out = chunk.part_sum + num * scratch.parts;
  chunk.lists = scratch.lists == 0 ? nullptr : output<int32_t>(ints);
  chunk.previous_lists = chunk.lists + num * scratch.lists;
  chunk.keys =
      scratch.keys == 0 ? nullptr : reinterpret_cast<uint32_t*>(chunk.previous_lists + num * scratch.lists);
  C10_CUDA_CHECK(launch_rows(params, stream));
  for (chunk.first = 0; chunk.first < total; chunk.first += rows) {
    chunk.num = std::min(rows, total - chunk.first);
    if (plans.taken() && chunk.num < total) {
      plans = decode_plans(params, chunk.num);
    }
    if (at_once) {
      AttendParams<__nv_bfloat16> call;
      call.layout = params.layout;
      call.sequences = params.sequences;
      call.options = params.options;
      call.chunk = chunk;
      choose_in_one_launch(*index, call, plan_index(chunk.num), stream);
      // The walk may begin beside the choice where both find space.
      const int64_t blocks_of_row = plans.taken() ? plans.plan.cluster : listed_parts;
      params.options.lists_follow =
          !general && plans.num_last == 0 && chunk.num * heads * blocks_of_row <= most_pdl_blocks();
    } else if (index.has_value()) {
      choose_by_index(*index, params.layout, params.sequences, params.options, chunk, stream);
      C10_CUDA_CHECK(launch_top_lists(params, stream));  // the index does not know where a leader's top is
    }
    C10_CUDA_CHECK(launch_chunk(params, plans, listed_parts, stream));
    if (index.has_value()) {
      C10_CUDA_CHECK(launch_store_ring(params, stream));
    }
    chunk.previous = chunk.first;
    std::swap(chunk.lists, chunk.previous_lists);
  }
}

template <typename T>
AppendParams<T> append_params(const Pools& pools, const PageLayout& layout, const AppendCall& call) {
  const auto rows = [](const Tensor& x) {
    return NewRows<T>{input<T>(x), x.stride(0), x.stride(1), static_cast<int>(x.size(2))};
  };
  AppendParams<T> params;
  params.layout = layout;
  params.keys = output<T>(pools.keys);
  params.values = output<T>(pools.values);
  params.k = rows(call.k);
  params.v = rows(call.v);
  params.block_table = input<int32_t>(pools.block_table);
  params.lengths = input<int32_t>(pools.lengths);
  params.cu_new = input<int32_t>(call.cu_new);
  params.new_lengths = optional_ints(call.new_lengths);
  params.num_sequences = static_cast<int>(pools.lengths.numel());
  params.num_rows = call.k.size(0);
  params.max_new = call.max_new;
  return params;
}

}  // namespace

void append_cuda(const Pools& pools, const PageLayout& layout, const AppendCall& call) {
  const LaunchScope scope(call.k);
  dispatch_device_dtype(call.op, call.k.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const AppendParams<T> append = append_params<T>(pools, layout, call);
    if (!pools.leaves.has_value()) {
      C10_CUDA_CHECK(launch_append(append, scope.stream()));
      return;
    }
    AppendPackedParams<T> params;
    params.append = append;
    params.leaves = leaf_pools(call.op, *pools.leaves, pools.keys.size(3), /*writes=*/true);
    params.key_tail = output<T>(pools.leaves->k_tail);
    params.value_tail = output<T>(pools.leaves->v_tail);
    params.tail_tokens = static_cast<uint32_t>(pools.leaves->k_tail.size(2));
    C10_CUDA_CHECK(launch_append_packed(params, scope.stream()));
  });
}

void append_index_cuda(const Pools& pools, const IndexPool& index, const PageLayout& layout,
                       const AppendCall& call) {
  const LaunchScope scope(call.k);
  const Tensor& index_pool = index.keys;
  const Pools of_index = {index_pool, index_pool, pools.block_table, pools.lengths, pools.page_size};
  if (index.coded()) {
    const PageLayout of_codes = index_layout(layout, index_pool.size(1));
    C10_CUDA_CHECK(launch_append_codes(append_params<__nv_bfloat16>(of_index, of_codes, call),
                                       output<IndexCode>(index_pool), output<uint8_t>(index.scales),
                                       scope.stream()));
    return;
  }
  dispatch_device_dtype(call.op, call.k.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    AppendParams<T> params = append_params<T>(of_index, index_layout(layout, index_pool.size(1)), call);
    params.v.width = 0;  // these pages have keys alone
    C10_CUDA_CHECK(launch_append(params, scope.stream()));
  });
}

void attention_cuda(const Pools& pools, const PageLayout& layout, const AttentionInputs& inputs,
                    const AttentionArgs& args, const AttentionOutputs& outputs) {
  constexpr const char* kOp = "tree_cache_attention";
  const LaunchScope scope(inputs.q);
  const int64_t total = inputs.q.size(0);
  if (pools.lengths.numel() == 0) {
    std::get<0>(outputs).zero_();
    std::get<1>(outputs).fill_(-std::numeric_limits<double>::infinity());
    return;
  }
  TORCH_CHECK_VALUE(total < kFromRing, kOp, ": q must have fewer than 2^30 rows on CUDA, got ", total);
  dispatch_device_dtype(kOp, inputs.q.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t rate = args.compression_rate;
    const int64_t parents = most_parents(args.max_top_nodes, args.top_k, rate, layout.capacity());
    const Tensor table = rotations(inputs, args, parents * rate, scope.stream());
    AttendParams<T> params;
    params.layout = layout;
    params.sequences = sequences_of(pools, inputs, outputs);
    params.options.top_k = static_cast<int>(args.top_k);
    // With more than kDecodeMaxSlots the decode kernel does not take the call, whatever the capacity is: which kernel
    // does shows in the bits of a row.
    params.options.parents = static_cast<int>(
        std::max(parents, most_parents(args.max_top_nodes, args.top_k, rate, (kDecodeMaxSlots + 1) * rate)));
    params.options.open_top = has_open_top(args.max_top_nodes, args.top_k, rate);
    params.options.max_top_nodes = args.max_top_nodes;
    params.options.stride = static_cast<int>(args.selection_stride);
    params.options.scale = static_cast<float>(args.scale);
    params.options.selection = args.selection;
    if (table.defined()) {
      params.options.cos = input<float>(table);
      params.options.sin = params.options.cos + table.stride(0);
    }
    params.chunk.total = total;
    params.q = input<T>(inputs.q);
    params.q_row = inputs.q.stride(0);
    params.q_head = inputs.q.stride(1);
    params.group = static_cast<int>(inputs.q.size(1) / layout.num_kv_heads);
    params.key_dim = static_cast<int>(inputs.q.size(2));
    params.value_dim = static_cast<int>(pools.values.size(3));
    params.keys = input<T>(pools.keys);
    params.values = input<T>(pools.values);
    params.out = output<T>(std::get<0>(outputs));
    params.lse = output<float>(std::get<1>(outputs));
    if (pools.leaves.has_value()) {
      params.leaves = leaf_pools(kOp, *pools.leaves, pools.keys.size(3), /*writes=*/false);
      check_alignment(kOp, "k_pool", params.keys);
      check_alignment(kOp, "v_pool", params.values);
      check_alignment(kOp, "rope_table", params.options.cos);
      check_alignment(kOp, "rope_table", params.options.sin);
    }
    attend_chunks(params, inputs.index, inputs.q, scope.stream());
  });
}

void lengths_cuda(const SequenceLengths& all, const LengthStep& step, bool truncates, const Tensor& like) {
  const LaunchScope scope(like);
  C10_CUDA_CHECK(launch_lengths(all, step, truncates, scope.stream()));
}

void copy_cuda(const Tensor& k_pool, const Tensor& v_pool, const Tensor& pages) {
  const LaunchScope scope(k_pool);
  const auto page_bytes = [](const Tensor& pool) {
    return static_cast<int64_t>(pool.nbytes()) / pool.size(0);
  };
  C10_CUDA_CHECK(launch_copy_pages(k_pool.mutable_data_ptr(), page_bytes(k_pool), v_pool.mutable_data_ptr(),
                                   page_bytes(v_pool), input<int32_t>(pages), pages.size(1), k_pool.size(0),
                                   scope.stream()));
}

}  // namespace htree::tree_cache
