// CUDA entry points of select_blocks: chunks of leaders, each scored by one launch and chosen from by one for each layer.
// docs/semantics/selection.md §9
#include <ATen/cuda/CUDAContextLight.h>

#include <limits>

#include "ops/selection/cuda/any/block_keys.h"
#include "ops/selection/select_blocks.h"

namespace htree::tree_attention {
namespace {

// Sequences of a batch, or packed documents.
struct BlockSequences {
  int64_t count = 0;
  int64_t most_tokens = 0;  // of one
  int64_t slots = 0;        // the most leaders that all have together
  int64_t row_step = 1;     // rows of the lists from leader to leader
};

// [B, rows, heads, d], of packed rows [rows, heads, d] without the batch.
template <typename T>
View<const T> index_view(const Tensor& x) {
  const bool packed = x.dim() == 3;
  return {input<T>(x), packed ? 0 : x.stride(0), x.stride(x.dim() - 3), x.stride(x.dim() - 2)};
}

template <typename T>
void launch_scores(const BlockLaunch& launch, const BlockChunk& chunk, const Tensor& index_query,
                   const Tensor& index_key, cudaStream_t stream) {
  BlockScoreParams<T> params;
  params.chunk = chunk;
  params.query = index_view<T>(index_query);
  params.key = index_view<T>(index_key);
  params.d = static_cast<int32_t>(index_query.size(-1));
  params.splits = static_cast<int32_t>(launch.splits);
  if (launch.kernel == BlockKernel::kGeneral) {
    C10_CUDA_CHECK(launch_block_scores(params, stream));
  } else if constexpr (sizeof(T) == 2) {
    C10_CUDA_CHECK(launch_block_unit_scores(params, stream));
  }
}

// The lists of one layer and where the keys of their rows lie.
struct ListLayer {
  BlockListParams params;
  int64_t blocks = 0;  // the most of a row
  Tensor keys;
};

// layers[i]: of blocks of options.block_size * rate^i tokens.
void run(const BlockSequences& sequences, const BlockDocumentParams& table, const Tensor& index_query,
         const Tensor& index_key, const BlockOptions& options, int64_t rate,
         const std::vector<BlockLayer>& layers, cudaStream_t stream) {
  const Tensor& like = std::get<0>(layers.front().lists);
  const int64_t heads = index_query.size(-2);
  const BlockKernel kernel = choose_block_kernel(index_query.element_size() == 2, options.block_size,
                                                 at::cuda::getCurrentDeviceProperties()->major);
  const BlockLaunch launch =
      block_launch(kernel, sequences.most_tokens, sequences.slots, heads, options.block_size);
  const Tensor documents =
      device_scratch(sequences.count * static_cast<int64_t>(sizeof(BlockDocument)), like);
  const Tensor chunk_scores = device_scratch(launch.bytes(), like);
  BlockDocumentParams of_documents = table;
  of_documents.documents = static_cast<BlockDocument*>(documents.mutable_data_ptr());
  C10_CUDA_CHECK(launch_block_documents(of_documents, stream));

  BlockChunk chunk;
  chunk.documents = of_documents.documents;
  chunk.num_documents = static_cast<int32_t>(sequences.count);
  chunk.block_size = static_cast<int32_t>(options.block_size);
  chunk.stride = static_cast<int32_t>(options.stride);
  chunk.unit = static_cast<int32_t>(launch.unit);
  chunk.row = launch.row;
  chunk.scores = output<float>(chunk_scores);
  std::vector<ListLayer> lists;
  Tensor tiles;
  int64_t block_size = options.block_size;
  for (const auto& [of_layer, first_token] : layers) {
    const auto& [blocks, scores] = of_layer;
    ListLayer layer;
    layer.params.options = options;
    layer.params.options.block_size = block_size;
    layer.params.blocks = output<int32_t>(blocks);
    layer.params.scores = scores.defined() ? output<float>(scores) : nullptr;
    layer.params.heads = static_cast<int32_t>(heads);
    layer.params.row_step = static_cast<int32_t>(sequences.row_step);
    layer.params.first_token = first_token;
    layer.params.tile_use = tile_use(launch, options, block_size);
    layer.blocks = launch.units / (block_size / launch.unit) + 1;
    if (layer.params.tile_use != TileUse::kNone && !tiles.defined()) {
      tiles = device_scratch(launch.tile_bytes(), like);
      chunk.tiles = output<float>(tiles);
    }
    lists.push_back(std::move(layer));
    block_size *= rate;
  }
  for (int64_t slot = 0; slot < sequences.slots; slot += launch.leaders) {
    chunk.first_slot = static_cast<int32_t>(slot);
    chunk.num_slots = static_cast<int32_t>(std::min(launch.leaders, sequences.slots - slot));
    for (int64_t head = 0; head < heads; head += launch.heads) {
      chunk.first_head = static_cast<int32_t>(head);
      chunk.num_heads = static_cast<int32_t>(std::min(launch.heads, heads - head));
      if (launch.units > 0) {
        dispatch_device_dtype("select_blocks", index_query.scalar_type(), FloatTypes{}, [&](auto tag) {
          launch_scores<typename decltype(tag)::type>(launch, chunk, index_query, index_key, stream);
        });
      }
      for (ListLayer& layer : lists) {
        layer.params.chunk = chunk;
        layer.params.chunk.block_size = static_cast<int32_t>(layer.params.options.block_size);
        place_keys(layer.params, layer.blocks, like, layer.keys);
        C10_CUDA_CHECK(launch_block_lists(layer.params, stream));
      }
    }
  }
}

}  // namespace

void select_block_layers_cuda(const Tensor& index_query, const Tensor& index_key, const BlockOptions& options,
                              int64_t rate, const std::vector<BlockLayer>& layers) {
  const LaunchScope scope(index_query);
  BlockDocumentParams table;
  table.num_documents = static_cast<int32_t>(index_query.size(0));
  table.num_queries = static_cast<int32_t>(index_query.size(1));
  table.num_keys = static_cast<int32_t>(index_key.size(1));
  table.stride = static_cast<int32_t>(options.stride);
  table.query_step = index_query.stride(0);
  table.key_step = index_key.stride(0);
  const int64_t slots = index_query.size(0) * std::get<0>(layers.front().lists).size(1);
  TORCH_CHECK_VALUE(slots < kIndexLimit,
                    "select_blocks: index_query must have less than 2^31 lists a head, got ", slots, " in ",
                    index_query.sizes());
  run({index_query.size(0), index_key.size(1), slots, /*row_step=*/1}, table, index_query, index_key, options,
      rate, layers, scope.stream());
}

void select_blocks_cuda(const Tensor& index_query, const Tensor& index_key, const BlockOptions& options,
                        const BlockLists& lists) {
  select_block_layers_cuda(index_query, index_key, options, /*rate=*/1, {{lists}});
}

void select_blocks_varlen_cuda(const char* /*op*/, const Tensor& index_query, const Tensor& index_key,
                               const Documents& documents, const BlockOptions& options,
                               const BlockLists& lists) {
  const LaunchScope scope(index_query);
  const auto& [blocks, scores] = lists;
  blocks.fill_(-1);
  scores.fill_(-std::numeric_limits<double>::infinity());
  const int64_t count = documents.cu_seq_q.size(0) - 1;
  if (blocks.numel() == 0 || count == 0) {
    return;
  }
  const Tensor cu_seq_q = documents.cu_seq_q.contiguous(), cu_seq_k = documents.cu_seq_k.contiguous();
  const int64_t num_queries = index_query.size(0), num_keys = index_key.size(0);
  // No document is longer than all rows, and lengths are int32.
  const int64_t max_q = std::min(documents.max_q.guard_int(__FILE__, __LINE__), num_queries);
  const int64_t max_k = std::min(documents.max_k.guard_int(__FILE__, __LINE__), num_keys);
  BlockDocumentParams table;
  table.cu_seq_q = input<int32_t>(cu_seq_q);
  table.cu_seq_k = input<int32_t>(cu_seq_k);
  table.num_documents = static_cast<int32_t>(count);
  table.num_queries = static_cast<int32_t>(num_queries);
  table.num_keys = static_cast<int32_t>(num_keys);
  table.max_q = static_cast<int32_t>(max_q);
  table.max_k = static_cast<int32_t>(max_k);
  table.stride = static_cast<int32_t>(options.stride);
  table.query_step = index_query.stride(0);
  table.key_step = index_key.stride(0);
  const int64_t slots = std::min(num_queries, num_queries / options.stride + count);
  run({count, max_k, slots, /*row_step=*/options.stride}, table, index_query, index_key, options,
      /*rate=*/1, {{lists}}, scope.stream());
}

}  // namespace htree::tree_attention
