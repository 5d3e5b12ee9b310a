// CUDA entry points of the ops for prompts: copies from pages, and calls over them.
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include "host/cuda/launch_scope.h"
#include "ops/tree_attention/cuda/growing_tree.h"
#include "ops/tree_attention/cuda/walk.h"
#include "ops/tree_cache/prompt/page_copies.h"
#include "ops/tree_cache/prompt/prompt_ops.h"
#include "ops/tree_cache/row_tree.h"

namespace htree::tree_cache {
namespace {

using tree_attention::TreeCall;
using tree_attention::UnitRange;

tree_attention::HalfType half_type(const Tensor& x) {
  return x.scalar_type() == at::kHalf ? tree_attention::HalfType::kHalf : tree_attention::HalfType::kBFloat16;
}

PagedSequences sequences_of(const Pools& pages, const PageLayout& layout, int64_t tokens) {
  const auto aligned = [](const Tensor& x) {
    return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  };
  PagedSequences sequences;
  sequences.layout = layout;
  sequences.keys = pages.keys.const_data_ptr();
  sequences.values = pages.values.const_data_ptr();
  sequences.block_table = pages.block_table.const_data_ptr<int32_t>();
  sequences.num_sequences = pages.block_table.size(0);
  sequences.tokens = static_cast<uint32_t>(tokens);
  sequences.aligned = aligned(pages.keys) && aligned(pages.values);
  return sequences;
}

// Copies units of a layer from the pages. `rope` is null where rows are not rotated.
template <typename Target>
void copy_units(const TreeCall& call, const PagedSequences& sequences, size_t layer, const Target& target,
                const float2* rope, const UnitRange& range, cudaStream_t stream) {
  const PageCopy<Target> params{sequences, target, rope, static_cast<uint32_t>(layer), range};
  tree_attention::launch_of_shape(call.shape, [&](auto type, auto dim) {
    return launch_page_copy<typename decltype(type)::type, dim.value>(params, stream);
  });
}

// The rotations of rows that stand at their positions in the sequence. Without rotations the table may end before they do.
const float2* sequence_rope(const TreeCall& call) {
  return call.problem.args.rotate ? call.rope : nullptr;
}

}  // namespace

int64_t prompt_bytes_cuda(const Tensor& keys, const AttentionProblem& problem) {
  const LaunchScope scope(keys);
  const auto& args = problem.args;
  if (has_open_top(args.max_top_nodes, args.top_k, args.compression_rate)) {
    return 0;  // copies are laid out for one depth, and rows walk trees of several
  }
  return tree_attention::growing_tree_bytes(problem);
}

void pack_prompt_cuda(const Pools& pages, const PageLayout& layout, const PackCall& call) {
  const LaunchScope scope(pages.keys);
  const cudaStream_t stream = scope.stream();
  const TreeCall tree =
      tree_attention::growing_tree_call(call.problem, tree_attention::forward_config(call.problem),
                                        half_type(pages.keys), call.capacity, call.copies.mutable_data_ptr());
  const PagedSequences sequences = sequences_of(pages, layout, call.problem.num_keys);
  const tree_attention::TreeChange change = tree_attention::growing_tree_change(call.problem, call.begin);
  if (call.begin == 0) {
    tree_attention::fill_growing_tables(tree, stream);
  }
  for (size_t i = 0; i < tree.layers.size(); ++i) {
    const tree_attention::TreeLayer& layer = tree.layers[i];
    copy_units(tree, sequences, i, ParentTarget{layer.packed, layer.num_parents}, tree.rope, change.packed[i],
               stream);
    copy_units(tree, sequences, i, ParentSpanTarget{layer.spans}, tree.rope, change.spans[i], stream);
  }
  const size_t top = tree.layers.size() - 1;
  copy_units(tree, sequences, top, TileTarget{tree.top}, sequence_rope(tree), change.top, stream);
  copy_units(tree, sequences, top, TileSpanTarget{tree.top_spans}, tree.rope, change.top_spans, stream);
}

void prompt_cuda(const Pools& pages, const PageLayout& layout, const PromptCall& call) {
  const LaunchScope scope(call.q);
  if (!call.copies.has_value() || call.copies->numel() == 0) {
    const Tensor table = pages.block_table.clamp(0, pages.keys.size(0) - 1);
    prompt_from_tokens({pages.keys, pages.values, table, kNoTensor, pages.page_size}, call,
                       tree_attention::attention_forward_cuda);
    return;
  }
  const AttentionProblem& problem = call.problem;
  const tree_attention::ForwardConfig config = tree_attention::forward_config(problem);
  // The kernels only read the copies: a pointer for writing would copy memory that is shared lazily.
  TreeCall tree = tree_attention::growing_tree_call(problem, config, half_type(call.q), call.capacity,
                                                    const_cast<void*>(call.copies->const_data_ptr()));
  tree.queries = tree_attention::aligned_view_of(call.q);
  Tensor tiles;
  if (const int64_t rows = tree_attention::tiled_tokens(problem, config); rows > 0) {
    tiles = at::empty({tree_attention::dense_layer_bytes(problem, rows)}, call.q.options().dtype(at::kByte));
    tree.rows = tree_attention::lay_out_tiles(problem, rows, static_cast<char*>(tiles.mutable_data_ptr()));
    copy_units(tree, sequences_of(pages, layout, rows), 0, TileTarget{tree.rows}, sequence_rope(tree),
               {0, tree.rows.num_tiles}, scope.stream());
  }
  const auto& [out, gmax, gsum, lists] = call.outputs;
  tree_attention::run_tensor_core_forward(tree, config, out, gmax, gsum, lists.unbind(0), scope.stream());
}

}  // namespace htree::tree_cache
