// Block scores from pages, then the choice of select_blocks for each layer.
#include "ops/tree_cache/index/index_lists_cuda.h"

#include "host/cuda/hopper.h"
#include "ops/selection/cuda/any/block_keys.h"
#include "ops/tree_cache/index/index_params.h"
#include "ops/tree_cache/row_tree.h"

namespace htree::tree_cache {
namespace {

using tree_attention::BlockDocument;
using tree_attention::BlockListParams;

void check_keys(const Tensor& keys) {
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(keys.const_data_ptr()) % 16 == 0,
                    "tree_cache_attention: index_pool must begin at a multiple of 16 bytes");
}

// Calls f with a tag for what the pages hold.
template <typename F>
void dispatch_keys(const IndexPool& pool, F&& f) {
  if (pool.coded()) return f(Type<IndexCode>{});
  tree_attention::dispatch_device_dtype("tree_cache_attention", pool.keys.scalar_type(), FloatTypes{}, f);
}

template <typename Key>
IndexRows<Key> index_rows(const IndexInputs& index) {
  const Tensor& keys = index.pool.keys;
  IndexRows<Key> rows;
  rows.query = tree_attention::input<IndexNumber<Key>>(index.query);
  rows.query_row = index.query.stride(0);
  rows.query_head = index.query.stride(1);
  rows.keys = tree_attention::input<Key>(keys);
  rows.scales = index.pool.coded() ? tree_attention::input<uint8_t>(index.pool.scales) : nullptr;
  rows.heads = static_cast<int>(keys.size(1));
  rows.d = static_cast<int>(keys.size(3));
  return rows;
}

template <typename Key>
void launch_scores(const IndexInputs& index, const PageLayout& layout, const CacheSequences& sequences,
                   const RowChunk& chunk, float* scores, cudaStream_t stream) {
  IndexScoreParams<Key> params;
  params.layout = layout;
  params.block_table = sequences.block_table;
  params.rows = chunk.rows;
  params.first = chunk.first;
  params.num = chunk.num;
  params.index = index_rows<Key>(index);
  params.scores = scores;
  params.row = index_score_row(layout);
  C10_CUDA_CHECK(launch_index_scores(params, stream));
}

}  // namespace

ChoicePlan index_choice_plan(const IndexInputs& index, const PageLayout& layout, const CacheOptions& options,
                             int64_t rows, int wanted_cluster) {
  if (!has_hopper_kernels() || layout.num_layers == 1) return {};
  ChoiceProblem problem;
  problem.rows = rows * index.pool.keys.size(1);
  problem.capacity = layout.capacity();
  problem.page_size = layout.page_size;
  problem.rate = layout.rate;
  problem.layers = layout.num_layers;
  problem.top_k = options.top_k;
  problem.key_bytes = index.pool.keys.size(3) * index.pool.keys.element_size();
  problem.two_bytes_or_codes = index.pool.keys.element_size() <= 2;
  problem.open_next = options.selection.open_next;
  return plan_choice(problem, at::cuda::getCurrentDeviceProperties()->multiProcessorCount, clusters_at_once(),
                     wanted_cluster);
}

void choose_in_one_launch(const IndexInputs& index, const AttendParams<__nv_bfloat16>& call,
                          const ChoicePlan& plan, cudaStream_t stream) {
  check_keys(index.pool.keys);
  dispatch_keys(index.pool, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    if constexpr (sizeof(Key) <= 2) {
      IndexChoiceParams<Key> params;
      params.call = call;
      params.index = index_rows<Key>(index);
      params.plan = plan;
      C10_CUDA_CHECK(launch_index_choice(params, stream));
    }
  });
}

int64_t index_score_row(const PageLayout& layout) {
  const int64_t blocks = ceil_div(layout.capacity(), int64_t{layout.rate});
  return ceil_div(blocks, tree_attention::kTileUnits) * tree_attention::kTileUnits;
}

void choose_by_index(const IndexInputs& index, const PageLayout& layout, const CacheSequences& sequences,
                     const CacheOptions& options, const RowChunk& chunk, cudaStream_t stream) {
  const Tensor& index_keys = index.pool.keys;
  const int64_t layers = layout.num_layers, kv_heads = layout.num_kv_heads, heads = index_keys.size(1);
  if (layers == 1 || chunk.num == 0) return;
  check_keys(index_keys);
  const int64_t row = index_score_row(layout);
  const Tensor scores = tree_attention::device_scratch(heads * chunk.num * row * 4, index_keys);
  const Tensor documents =
      tree_attention::device_scratch(chunk.num * static_cast<int64_t>(sizeof(BlockDocument)), index_keys);
  auto* of_scores = static_cast<float*>(scores.mutable_data_ptr());
  dispatch_keys(index.pool, [&](auto tag) {
    launch_scores<typename decltype(tag)::type>(index, layout, sequences, chunk, of_scores, stream);
  });
  auto* of_documents = static_cast<BlockDocument*>(documents.mutable_data_ptr());
  C10_CUDA_CHECK(launch_index_documents(chunk.rows, chunk.first, chunk.num, static_cast<int>(layers),
                                        of_documents, stream));
  BlockListParams params;
  params.options.count = options.top_k;
  params.options.open_next = options.selection.open_next;
  params.heads = static_cast<int32_t>(kv_heads);
  params.chunk.documents = of_documents;
  params.chunk.num_documents = static_cast<int32_t>(chunk.num);
  params.chunk.num_slots = static_cast<int32_t>(chunk.num);
  params.chunk.num_heads = static_cast<int32_t>(heads);
  params.chunk.unit = static_cast<int32_t>(layout.rate);
  params.chunk.row = row;
  params.chunk.scores = of_scores;
  for (int64_t layer = 0; layer + 1 < layers; ++layer) {
    Tensor keys;
    const int64_t block_size = layout.tokens[layer + 1];
    params.options.block_size = block_size;
    params.chunk.block_size = static_cast<int32_t>(block_size);
    // With an open top the lists of a row's top and of those above are implied.
    const bool open = has_open_top(options.max_top_nodes, options.top_k, layout.rate);
    params.first_token = open ? options.max_top_nodes * layout.tokens[layer] : 0;
    // Documents count the rows [leader, layer] of the lists; one index head may choose for all K/V heads.
    params.blocks = chunk.lists + layer * kv_heads * options.top_k;
    for (int64_t head = 0; head < kv_heads; head += heads) {
      params.chunk.first_head = static_cast<int32_t>(head);
      tree_attention::place_keys(params, ceil_div(layout.capacity(), block_size), index_keys, keys);
      C10_CUDA_CHECK(tree_attention::launch_block_lists(params, stream));
    }
  }
}

}  // namespace htree::tree_cache
