// The module `_host`: what the kernels' configurations are, for people and tests. No model needs it, and the package
// works without it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "device/sizes.h"
#include "host/cuda/probes.h"
#include "ops/causal_softmax/causal_softmax_config.h"
#include "ops/compressed_kv/decode/decode_config.h"
#include "ops/fp8/gemm/gemm_choice.h"
#include "ops/fp8/quantize/quantize_config.h"
#include "ops/gated_mlp/gated_mlp_config.h"
#include "ops/hadamard/hadamard_config.h"
#include "ops/index_loss/index_loss_plan.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_config.h"
#include "ops/selection/plan/block_chunks.h"
#include "ops/selection/plan/block_launch.h"
#include "ops/sparse_attention/plan/sparse.h"
#include "ops/tree/plan/growing_tree.h"
#include "ops/tree_attention/plan/backward.h"
#include "ops/tree_attention/plan/config_table.h"
#include "ops/tree_attention/plan/varlen.h"
#include "ops/tree_cache/decode/decode_plan.h"

namespace py = pybind11;

namespace {

constexpr int kMultiprocessors = 132;  // of an H100 and an H200

// What each family chooses over its range of problems. The choices are pure functions, so they can be printed
// without a GPU.
std::map<std::string, std::vector<std::string>> kernel_configurations() {
  std::map<std::string, std::vector<std::string>> families;
#if defined(HTREE_WITH_CUDA)
  auto& softmax = families["causal_softmax"];
  for (int block_size : {0, 512, 1024}) {
    for (int variant = 0; variant < 12; ++variant) {
      for (int64_t cols = 256; cols <= 65536; cols *= 2) {
        const auto text = htree::causal_softmax::describe(
            htree::causal_softmax::choose_config({.cols = cols,
                                                  .element_size = 2 << variant / 4,
                                                  .vectorised = variant % 2 == 0,
                                                  .backward = variant % 4 < 2,
                                                  .block_size = block_size,
                                                  .shared_bytes = htree::device::kHopperSharedBytes}));
        if (std::find(softmax.begin(), softmax.end(), text) == softmax.end()) {
          softmax.push_back(text);
        }
      }
    }
  }
  auto& compressed = families["compressed_kv"];
  compressed.push_back(
      "tiles: fp16, bf16; D of keys and values = 64, 128, 192, 256; bits 16, 8, 4; pages of a multiple of "
      "16; sm_80 and later");
  compressed.push_back("general: fp32; hadamard_group above 1; other pages; the window");
  auto& quantize = families["fp8"];
  for (int pack : {8, 1}) {
    for (int64_t group = 64; group <= 32768; group *= 2) {
      const auto text = htree::fp8::describe(htree::fp8::choose_group_config(group, pack));
      if (quantize.empty() || quantize.back() != text) {
        quantize.push_back(text);
      }
    }
  }
  auto& hadamard = families["hadamard"];
  for (int log2_length = 0; log2_length <= 15; ++log2_length) {
    const auto text =
        htree::hadamard::describe(htree::hadamard::choose_config(/*element_size=*/2, log2_length));
    if (std::find(hadamard.begin(), hadamard.end(), text) == hadamard.end()) {
      hadamard.push_back(text);
    }
  }
  auto& attention = families["tree_attention"];
  attention.push_back(
      "tensor_core: fp16, bf16; r = 16; K = V = 32, 64, 128; H / H_kv <= 16; k <= 1024; sm_80 and later");
  for (bool hopper : {true, false}) {
    for (const std::string& kernels : htree::tree_attention::tensor_core_kernels(hopper)) {
      attention.push_back("tensor_core on " + kernels);
    }
  }
  attention.push_back("general: fp32, fp16, bf16; every other shape");
  auto& selection = families["selection"];
  selection.push_back("tensor_core: fp16, bf16; block_size a multiple of 16; sm_80 and later");
  selection.push_back("general: fp32, fp16, bf16; every other block_size");
  auto& mlp = families["gated_mlp"];
  for (int64_t rows : {1, 17, 64}) {
    mlp.push_back(htree::gated_mlp::describe(
        htree::gated_mlp::choose_config({rows, 11264, 4096, /*hopper_half=*/true, false, kMultiprocessors})));
  }
  for (const auto& tile : htree::gated_mlp::kTiles) {
    mlp.push_back(htree::gated_mlp::describe(tile.config));
  }
  mlp.push_back(htree::gated_mlp::describe(htree::gated_mlp::config_of({128, 64, 64, 8, 4})));
  mlp.push_back(
      htree::gated_mlp::describe(htree::gated_mlp::choose_config({1, 1, 1, false, false, kMultiprocessors})));
  for (bool fuses : {true, false}) {
    mlp.push_back("backward: " + htree::gated_mlp::describe_gradient(fuses));
  }
  auto& gemm = families["fp8"];
  for (const auto& tile : htree::fp8::kGemmTiles) {
    gemm.push_back(htree::fp8::describe(htree::fp8::config_of_tile(tile)));
  }
  for (const auto& stream : htree::fp8::kGemmStreams) {
    gemm.push_back(htree::fp8::describe(htree::fp8::config_of_stream(stream)));
  }
  for (bool cublas : {true, false}) {
    gemm.push_back(htree::fp8::describe(
        htree::fp8::choose_gemm_config({1, 1, 1, kMultiprocessors, /*hopper=*/false, cublas})));
  }
  auto& norm = families["rmsnorm_rope"];
  for (int64_t width = 32; width <= 65536; width *= 2) {
    const auto config = htree::rmsnorm_rope::choose_config(width, std::min<int64_t>(width, 128),
                                                           /*element_size=*/2, /*vectorised=*/true,
                                                           /*backward=*/false);
    norm.push_back(htree::rmsnorm_rope::describe(config));
  }
  norm.erase(std::unique(norm.begin(), norm.end()), norm.end());
#endif
  return families;
}

// (tokens of a split, whether a cluster merges the splits) of the tensor-core decode kernel.
std::tuple<int64_t, bool> compressed_kv_split_size(int64_t capacity, int64_t num_groups, int num_processors,
                                                   const htree::ClusterCounts& clusters, int bits) {
  using namespace htree::compressed_kv;
  const auto choice =
      choose_split_size(capacity, num_groups, num_processors, kTileStep, tile_costs(bits, bits), clusters);
  return {choice.size, choice.cluster};
}

// (warps, stages of each warp, bytes of shared memory) of a block of the decode kernel.
std::tuple<int, int, int> compressed_kv_config(int stage_bytes, int table_bytes, int merge_bytes, int padding,
                                               int most_warps, int shared_bytes) {
  using namespace htree::compressed_kv;
  const auto config = choose_decode_config(stage_bytes, table_bytes, merge_bytes, padding, most_warps,
                                           kMinStages, kMaxStages, shared_bytes);
  return {config.num_warps, config.num_stages, config.shared_bytes};
}

// (threads per row, rows per block, elements per thread, rows loaded ahead) for rows of `cols` elements.
std::tuple<int, int, int, int> causal_softmax_config(int64_t cols, int element_size, bool vectorised,
                                                     bool backward, int block_size, int64_t shared_bytes) {
  const auto config = htree::causal_softmax::choose_config(
      {cols, element_size, vectorised, backward, block_size, shared_bytes});
  return {config.threads, config.rows_per_block, config.elems_per_thread, config.stages};
}

// (elements per thread, threads per tile, threads per block) for rows of 2^log2_length elements.
std::tuple<int, int, int> hadamard_config(int element_size, int log2_length) {
  const auto config = htree::hadamard::choose_config(element_size, log2_length);
  return {1 << config.elem_bits, 1 << (config.lane_bits + config.warp_bits), config.threads()};
}

// (threads per chunk, packs per thread, elements per pack, blocks that search a group together for its
// largest magnitude, or 0) for fp8_quantize of a contiguous matrix. `layout`: 0 one scale, 1 groups along
// rows, 2 groups of rows of one matrix.
std::tuple<int, int, int, int64_t> fp8_quantize_config(int64_t rows, int64_t cols, int layout, int64_t group,
                                                       int element_size) {
  using namespace htree::fp8;
  const MatrixShape shape{rows, cols, static_cast<ScaleLayout>(layout), group, rows};
  const int pack = choose_pack(shape, cols, element_size, /*aligned=*/true);
  const ChunkConfig config = choose_group_config(group, pack);
  return {config.threads, config.packs, pack,
          choose_largest_config(shape, pack, kMultiprocessors).num_splits};
}

// (threads per row, pairs of packs per thread, stages, vectorised) for `num_rows` rows of `width` elements.
std::tuple<int, int, int, bool> rmsnorm_rope_config(int64_t width, int64_t head_dim, int element_size,
                                                    bool vectorised, bool backward, int64_t num_rows) {
  using namespace htree::rmsnorm_rope;
  KernelConfig config = choose_config(width, head_dim, element_size, vectorised, backward);
  if (!backward) {
    config = spread_few_rows(config, num_rows, packs_per_half(head_dim, element_size), kMultiprocessors);
  }
  return {config.threads, config.pairs, config.stages, config.vectorised};
}

// In words, the kernel of gated_mlp for a result [rows, inner] and sums of length hidden.
std::string gated_mlp_config(int64_t rows, int64_t inner, int64_t hidden, bool hopper_half,
                             bool keeps_products) {
  return htree::gated_mlp::describe(
      htree::gated_mlp::choose_config({rows, inner, hidden, hopper_half, keeps_products, kMultiprocessors}));
}

// In words, what multiplies for dx, and for the gradients of the weights.
std::pair<std::string, std::string> gated_mlp_gradient_config(int64_t rows, int64_t inner, int64_t hidden,
                                                              bool hopper_half) {
  using namespace htree::gated_mlp;
  const Facts facts{rows, inner, hidden, hopper_half, /*keeps_products=*/true, kMultiprocessors};
  return {describe_gradient(fuses_input_gradient(facts)), describe_gradient(fuses_weight_gradients(facts))};
}

// The kernel that a tuple of the search space GATED_MLP names; std::invalid_argument where
// it is not compiled.
std::string gated_mlp_forced_config(int64_t block_m, int64_t block_n, int64_t block_k, int64_t num_warps,
                                    int64_t num_stages) {
  const htree::gated_mlp::ForcedConfig forced{block_m, block_n, block_k, num_warps, num_stages};
  if (!htree::gated_mlp::in_compiled_space(forced)) {
    throw std::invalid_argument(std::string("compiled: ") + htree::gated_mlp::kCompiledSpace);
  }
  return htree::gated_mlp::describe(htree::gated_mlp::config_of(forced));
}

// In words, the kernel of fp8_gemm for c [m, n] and sums of length k.
std::string fp8_gemm_config(int64_t m, int64_t n, int64_t k, bool hopper, bool cublas) {
  return htree::fp8::describe(htree::fp8::choose_gemm_config({m, n, k, kMultiprocessors, hopper, cublas}));
}

// Blocks of a cluster, stages and dynamic shared bytes; zeros where the general kernels stay. Then the number of last
// rows that have a launch of their own, and the blocks of their clusters.
std::array<int64_t, 5> tree_decode_config(int64_t rows, int64_t group, int64_t dim,
                                          const htree::ClusterCounts& clusters, int64_t slots, bool spans,
                                          int wanted_cluster) {
  const htree::tree_cache::DecodeProblem problem = {.rows = rows,
                                                    .group = group,
                                                    .slots = slots,
                                                    .key_dim = dim,
                                                    .value_dim = dim,
                                                    .spans = spans,
                                                    .two_byte_type = true,
                                                    .aligned = true};
  const auto plans = htree::tree_cache::plan_decode(problem, kMultiprocessors, clusters, wanted_cluster);
  return {plans.plan.cluster, plans.plan.stages, plans.plan.places.bytes, plans.num_last, plans.last.cluster};
}

// Of a dense top with `tiles` tiles: the query rows of a thread block that sums weights, and the blocks that share the
// tiles of the same rows for importances. `rows` are those of a pair (batch, K/V head), of which there are `heads`.
std::array<int64_t, 2> tree_top_scores(int64_t rows, int64_t heads, int64_t tiles) {
  namespace tree = htree::tree_attention;
  const int64_t blocks = htree::ceil_div(rows, tree::kTopLists) * heads;
  return {tree::reference_rows(rows, heads, kMultiprocessors),
          tree::importance_parts(blocks, tiles, kMultiprocessors)};
}

// A call of tree attention on a GPU of the given capability and shared memory per thread block, and what
// plan/ chooses for it.
namespace tree = htree::tree_attention;
class TreeAttentionCall {
 public:
  TreeAttentionCall(const std::array<int64_t, 7>& sizes, bool half_dtype, int64_t compression_rate,
                    int64_t max_top_nodes, int64_t top_k, int64_t selection_stride, int major,
                    int64_t shared_bytes, bool hopper_kernels, bool per_query_gather, int64_t num_sms,
                    int64_t selection_span, bool rotate, bool gathered, const std::vector<int64_t>& starts) {
    std::tie(problem_.batch, problem_.num_keys, problem_.num_queries, problem_.num_heads,
             problem_.num_kv_heads, problem_.key_dim, problem_.value_dim) = std::tuple_cat(sizes);
    problem_.half_dtype = half_dtype;
    problem_.args.compression_rate = compression_rate;
    problem_.args.max_top_nodes = max_top_nodes;
    problem_.args.top_k = top_k;
    problem_.args.selection_stride = selection_stride;
    problem_.args.selection_span = selection_span;
    problem_.args.rotate = rotate;
    problem_.args.starts =
        starts.empty() ? std::vector<int64_t>{problem_.num_keys - problem_.num_queries} : starts;
    const tree::DeviceFacts device{major, shared_bytes, major == 9 && hopper_kernels, num_sms};
    const auto gather = per_query_gather ? tree::GatherChoice::kPerQuery
                        : gathered       ? tree::GatherChoice::kGathered
                                         : tree::GatherChoice::kAuto;
    forward_ = tree::choose_forward_config(problem_, device, gather);
    backward_ = tree::choose_backward_config(problem_, device, gather);
    hopper_ = tree::hopper_kernels(device);
  }

  std::string forward() const {
    return tree::describe(forward_) + " layers=" + tree::describe_layers(problem_, forward_);
  }
  std::string backward() const {
    return tree::describe(backward_) + " " + tree::describe_gradients(problem_, backward_);
  }

  // Where the pieces of a chunk's scratch begin in memory at `base`, and where the last one ends. The memory
  // is never touched. With base 0 the layout only counts bytes.
  using Addresses = std::map<std::string, uintptr_t>;
  Addresses forward_memory(uintptr_t base) const {
    tree::Workspace space(reinterpret_cast<void*>(base));
    const tree::ForwardMemory at = tree::lay_out_forward(space, problem_, forward_);
    return {{"partial", address(at.partial)},     {"lists", address(at.lists[0])},
            {"next_lists", address(at.lists[1])}, {"mask", address(at.mask)},
            {"scores", address(at.scores)},       {"marks", address(at.marks.marks)},
            {"tiles", address(at.marks.tiles)},   {"counts", address(at.marks.counts)},
            {"end", base + space.bytes()}};
  }
  Addresses backward_memory(uintptr_t base, bool recompute) const {
    tree::Workspace space(reinterpret_cast<void*>(base));
    const tree::BackwardMemory at = tree::lay_out_backward(space, problem_, backward_, recompute);
    return {{"node_bounds", address(at.node_bounds)},
            {"parent_bounds", address(at.parent_bounds)},
            {"earlier_bounds", address(at.earlier_bounds)},
            {"query_bounds", address(at.query_bounds)},
            {"list_bounds", address(at.list_bounds)},
            {"task_powers", address(at.task_powers)},
            {"records", address(at.records)},
            {"meta", address(at.meta)},
            {"query_sums", address(at.query_sums)},
            {"lists", address(at.lists)},
            {"mask", address(at.mask)},
            {"counts", address(at.counts)},
            {"entries", address(at.entries)},
            {"offsets", address(at.offsets)},
            {"run_counts", address(at.run_counts)},
            {"rotations", address(at.rotations)},
            {"partials", address(at.partials)},
            {"partials_end", address(at.partials) + at.partial_bytes},
            {"scores", address(at.scores)},
            {"end", base + space.bytes()}};
  }
  // Likewise what masked rows have in the memory of `partials`.
  Addresses masked_gradient_memory(uintptr_t base) const {
    tree::Workspace space(reinterpret_cast<void*>(base));
    const tree::MaskedGradientMemory at = tree::lay_out_masked_gradients(space, problem_, backward_);
    return {{"queries", address(at.rows.queries)},
            {"gradients", address(at.rows.gradients)},
            {"numbers", address(at.rows.numbers)},
            {"scaled", address(at.rows.scaled)},
            {"bounds", address(at.rows.bounds)},
            {"marks", address(at.marks.marks)},
            {"tiles", address(at.marks.tiles)},
            {"counts", address(at.marks.counts)},
            {"inverted_tiles", address(at.inverted_tiles)},
            {"inverted_tile_counts", address(at.inverted_tile_counts)},
            {"end", base + space.bytes()}};
  }

  // Units of the copies of sequences of up to T tokens: (parents of each layer, span means of a node of each layer, tiles
  // of the top, tiles of its span means).
  using Capacity = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t, int64_t>;
  Capacity growing_capacity() const {
    const tree::TreeCapacity capacity = tree::tree_capacity(problem_, hopper_);
    return {capacity.parents, capacity.span_rows, capacity.top_tiles, capacity.top_span_tiles};
  }
  // Where these copies begin in memory at `base`, as (name, layer or -1, address), and where the last one ends.
  using Copies = std::vector<std::tuple<std::string, int64_t, uintptr_t>>;
  Copies growing_memory(uintptr_t base) const {
    tree::Workspace space(reinterpret_cast<void*>(base));
    const tree::GrowingMemory at =
        tree::lay_out_growing_tree(space, problem_, tree::tree_capacity(problem_, hopper_));
    Copies copies = {{"inv_freq", -1, address(at.inv_freq)},
                     {"rope", -1, address(at.rope)},
                     {"fragment_rotations", -1, address(at.fragment_rotations)},
                     {"dim_rotations", -1, address(at.dim_rotations)}};
    for (size_t layer = 0; layer < at.packed.size(); ++layer) {
      copies.emplace_back("packed", layer, address(at.packed[layer]));
      copies.emplace_back("spans", layer, address(at.spans[layer]));
    }
    copies.emplace_back("top", -1, address(at.top));
    copies.emplace_back("top_span_keys", -1, address(at.top_span_keys));
    copies.emplace_back("top_span_scales", -1, address(at.top_span_scales));
    copies.emplace_back("top_span_scaled", -1, address(at.top_span_scaled));
    copies.emplace_back("end", -1, base + space.bytes());
    return copies;
  }
  // What tokens [begin, T) change in them, as pairs (first unit, end): (packed parents of each layer, packed span means
  // of each layer, tiles of the top, tiles of its span means).
  using Units = std::pair<int64_t, int64_t>;
  std::tuple<std::vector<Units>, std::vector<Units>, Units, Units> growing_change(int64_t begin) const {
    const auto pair = [](const tree::UnitRange& range) { return Units{range.first, range.last}; };
    const tree::TreeChange change = tree::tree_change(problem_, hopper_, begin);
    std::vector<Units> packed, spans;
    std::transform(change.packed.begin(), change.packed.end(), std::back_inserter(packed), pair);
    std::transform(change.spans.begin(), change.spans.end(), std::back_inserter(spans), pair);
    return {packed, spans, pair(change.top), pair(change.top_spans)};
  }

 private:
  static uintptr_t address(const void* piece) { return reinterpret_cast<uintptr_t>(piece); }

  tree::AttentionProblem problem_;
  tree::ForwardConfig forward_;
  tree::BackwardConfig backward_;
  bool hopper_ = false;
};

// What sparse_attention chooses for a call on a GPU, as for tree attention: (kernel of the forward, of dQ, of dK and dV,
// bytes of scratch forward, backward). `sizes`: B, T, T_q, H, H_kv, K, V, n, block_size, s.
std::tuple<std::string, std::string, std::string, int64_t, int64_t> sparse_attention_plan(
    const std::array<int64_t, 10>& sizes, bool half_dtype, int major, bool hopper_kernels) {
  tree::SparseProblem problem;
  int64_t heads = 0, key_dim = 0;
  std::tie(problem.batch, problem.num_keys, problem.num_queries, heads, problem.num_kv_heads, key_dim,
           problem.value_dim, problem.list_width, problem.block_size, problem.stride) = std::tuple_cat(sizes);
  problem.group = heads / problem.num_kv_heads;
  const tree::DeviceFacts device{major, 227 << 10, major == 9 && hopper_kernels, kMultiprocessors};
  const tree::AttentionProblem listed = tree::list_problem(problem, key_dim, half_dtype, 1.0);
  if (!tree::takes_tensor_cores(problem, listed, device)) {
    return {"general", "general", "general", 0, 0};
  }
  const auto choice = tree::GatherChoice::kAuto;
  const tree::SparseConfig forward = tree::choose_sparse_forward(listed, device, choice);
  const tree::SparseConfig backward = tree::choose_sparse_backward(listed, device, choice);
  tree::Workspace lists, gradients;
  tree::lay_out_sparse_forward(lists, listed, forward);
  tree::lay_out_sparse_gradients(gradients, listed, backward);
  const char* kernels[] = {"per_query", "shared_gather", "per_list"};
  return {kernels[static_cast<int>(forward.gather)],
          backward.per_list                ? "per_list"
          : backward.shared_gather_queries ? "shared_gather"
                                           : "per_query",
          backward.per_list       ? "per_list"
          : backward.parent_warps ? "parent_gradient"
                                  : "key_gradient",
          lists.bytes(), gradients.bytes()};
}

// (documents, queries and keys of each after padding, whether nothing is copied) for every group of a packed
// call, whose documents have the given numbers of queries and keys.
std::vector<std::tuple<int64_t, int64_t, int64_t, bool>> varlen_groups(
    const std::vector<int64_t>& num_queries, const std::vector<int64_t>& num_keys,
    const std::string& grouping, int64_t num_heads) {
  namespace tree = htree::tree_attention;
  std::vector<tree::VarlenDocument> documents;
  int64_t query_begin = 0, key_begin = 0, longest = 0;
  for (size_t i = 0; i < num_keys.size(); ++i) {
    documents.push_back({query_begin, num_queries.at(i), key_begin, num_keys[i]});
    query_begin += num_queries[i];
    key_begin += num_keys[i];
    longest = std::max(longest, num_keys[i]);
  }
  const auto count = static_cast<int64_t>(documents.size());
  const tree::VarlenProblem problem = {.num_heads = num_heads};
  const std::vector<tree::VarlenGroup> groups =
      grouping == "rank"     ? tree::group_by_rank(count, key_begin, longest)
      : grouping == "length" ? tree::group_by_length(documents, problem)
                             : tree::group_by_document(documents);
  std::vector<std::tuple<int64_t, int64_t, int64_t, bool>> found;
  for (const tree::VarlenGroup& group : groups) {
    found.emplace_back(group.count, group.num_queries, group.num_keys, group.in_place);
  }
  return found;
}

}  // namespace

// (groups of blocks, heads, groups and tokens packed at once, queries) of a chunk of select_blocks on the CPU.
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> select_blocks_chunks(
    int64_t num_heads, int64_t num_blocks, int64_t leaders, int64_t block_size, int64_t d, int64_t width,
    int64_t tile, int64_t size) {
  const auto chunks =
      htree::tree_attention::block_chunks(num_heads, num_blocks, leaders, block_size, d, width, tile, size);
  return {chunks.groups, chunks.heads, chunks.segment, chunks.tokens, chunks.rows};
}

// (kernel, tokens of a unit, units, floats of a row, heads and leaders of a chunk, splits, bytes of its scores) of
// select_blocks on a GPU.
std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> select_blocks_launch(
    bool half_dtype, int major, int64_t most_tokens, int64_t slots, int64_t num_heads, int64_t block_size) {
  namespace tree = htree::tree_attention;
  const auto launch = tree::block_launch(tree::choose_block_kernel(half_dtype, block_size, major),
                                         most_tokens, slots, num_heads, block_size);
  return {tree::describe(launch.kernel),
          launch.unit,
          launch.units,
          launch.row,
          launch.heads,
          launch.leaders,
          launch.splits,
          launch.bytes()};
}

// What index_loss holds and launches on a GPU.
py::dict index_loss_plan(int64_t batch, int64_t rows, int64_t tokens, int64_t heads, int64_t kv_heads,
                         int64_t index_heads, int64_t key_dim, int64_t block_size, bool half_dtype,
                         int major) {
  namespace loss = htree::index_loss;
  const auto plan = loss::plan_loss(
      {batch, rows, tokens, heads, kv_heads, index_heads, key_dim, block_size, half_dtype, major});
  py::dict found;
  found["kernel"] = loss::describe(plan.kernel);
  found["unit"] = plan.unit;
  found["part_heads"] = plan.part_heads;
  found["parts"] = plan.parts;
  found["columns"] = plan.columns;
  found["splits"] = plan.splits;
  found["split_columns"] = plan.split_columns;
  found["batches"] = plan.batches;
  found["range_blocks"] = plan.range_blocks;
  found["score_columns"] = plan.score_columns;
  found["held_columns"] = plan.held_columns(block_size);
  return found;
}

PYBIND11_MODULE(_host, module) {
  module.doc() = "The compiled kernel configurations of htree_ops, and which of them a problem takes.";
  module.def("kernel_configurations", &kernel_configurations,
             "Compiled CUDA configurations by family; empty without.");
  module.def("causal_softmax_config", &causal_softmax_config, py::arg("cols"), py::arg("element_size"),
             py::arg("vectorised") = true, py::arg("backward") = false, py::arg("block_size") = 0,
             py::arg("shared_bytes") = htree::device::kHopperSharedBytes,
             "The kernel that causal_softmax takes for rows of `cols` elements.");
  module.def("compressed_kv_config", &compressed_kv_config, py::arg("stage_bytes"), py::arg("table_bytes"),
             py::arg("merge_bytes"), py::arg("padding"), py::arg("most_warps"),
             py::arg("shared_bytes") = htree::device::kHopperSharedBytes,
             "Warps, stages and shared bytes of a decode block of kv_decode_attention.");
  module.def(
      "compressed_kv_warps", &htree::compressed_kv::warps_for, py::arg("tiles"), py::arg("most_warps"),
      "Warps that a decode block of kv_decode_attention takes at most for so many tiles of 16 tokens.");
  module.def(
      "compressed_kv_split_size", &compressed_kv_split_size, py::arg("capacity"), py::arg("num_groups"),
      py::arg("num_processors"), py::arg("clusters"), py::arg("bits") = 4,
      "Tokens that a block of kv_decode_attention takes where split_size is 0, and whether a cluster merges "
      "the blocks; clusters[n] of n blocks run at once.");
  module.def("fp8_quantize_config", &fp8_quantize_config, py::arg("rows"), py::arg("cols"), py::arg("layout"),
             py::arg("group"), py::arg("element_size") = 2,
             "The kernels that fp8_quantize takes: (threads, packs, pack, splits).");
  module.def("hadamard_config", &hadamard_config, py::arg("element_size"), py::arg("log2_length"),
             "The kernel that hadamard_transform takes for rows of 2^log2_length elements.");
  module.def("rmsnorm_rope_config", &rmsnorm_rope_config, py::arg("width"), py::arg("head_dim"),
             py::arg("element_size"), py::arg("vectorised"), py::arg("backward") = false,
             py::arg("num_rows") = 1 << 20,
             "The kernel that rmsnorm_rope takes for rows of `width` elements.");
  module.def("gated_mlp_config", &gated_mlp_config, py::arg("rows"), py::arg("inner"),
             py::arg("hidden") = 4096, py::arg("hopper_half") = true, py::arg("keeps_products") = false,
             "The kernel that gated_mlp takes for a result [rows, inner] and sums of length hidden.");
  module.def("gated_mlp_gradient_config", &gated_mlp_gradient_config, py::arg("rows"), py::arg("inner"),
             py::arg("hidden") = 4096, py::arg("hopper_half") = true,
             "What multiplies in the backward of gated_mlp: for dx, and for the gradients of the weights.");
  module.def("gated_mlp_forced_config", &gated_mlp_forced_config, py::arg("BLOCK_M"), py::arg("BLOCK_N"),
             py::arg("BLOCK_K"), py::arg("num_warps"), py::arg("num_stages"),
             "The kernel that a tuple of the tuning space names. ValueError where none is compiled.");
  module.def("fp8_gemm_config", &fp8_gemm_config, py::arg("m"), py::arg("n"), py::arg("k") = 4096,
             py::arg("hopper") = true, py::arg("cublas") = true,
             "The kernel that fp8_gemm takes for a result [m, n] and sums of length k.");
  module.def("tree_decode_config", &tree_decode_config, py::arg("rows"), py::arg("group"), py::arg("dim"),
             py::arg("clusters"), py::arg("slots") = 512, py::arg("spans") = false,
             py::arg("wanted_cluster") = 0,
             "The decode kernel for `rows` rows and K/V heads of up to `slots` slots a layer: (blocks of a "
             "cluster, stages, shared bytes, "
             "number of last rows with a launch of their own, blocks of their clusters); clusters[n] of n "
             "blocks run at once.");
  module.def(
      "tree_top_scores", &tree_top_scores, py::arg("rows"), py::arg("heads"), py::arg("tiles"),
      "The scores of a dense top: (rows of a thread block, blocks that share the tiles of the same rows).");
  module.def(
      "sparse_attention_plan", &sparse_attention_plan, py::arg("sizes"), py::arg("half_dtype"),
      py::arg("major") = 9, py::arg("hopper_kernels") = true,
      "What sparse_attention takes for (B, T, T_q, H, H_kv, K, V, n, block_size, s): kernels of the forward, "
      "of dQ, and of dK and dV, and the scratch of both directions in bytes.");
  py::class_<TreeAttentionCall>(module, "TreeAttentionCall",
                                "An attention call, its sizes being (B, T, T_q, H, H_kv, K, V), and a GPU: "
                                "kernels, chunks and scratch.")
      .def(py::init<const std::array<int64_t, 7>&, bool, int64_t, int64_t, int64_t, int64_t, int, int64_t,
                    bool, bool, int64_t, int64_t, bool, bool, const std::vector<int64_t>&>(),
           py::arg("sizes"), py::arg("half_dtype"), py::arg("compression_rate") = 16,
           py::arg("max_top_nodes") = 8192, py::arg("top_k") = 512, py::arg("selection_stride") = 1,
           py::arg("major") = 9, py::arg("shared_bytes") = htree::device::kHopperSharedBytes,
           py::arg("hopper_kernels") = true, py::arg("per_query_gather") = false,
           py::arg("num_sms") = kMultiprocessors, py::arg("selection_span") = 0, py::arg("rotate") = true,
           py::arg("gathered") = false, py::arg("starts") = std::vector<int64_t>{})
      .def("forward", &TreeAttentionCall::forward,
           "Path, chunks, and the kernels of the layers from the top down.")
      .def("backward", &TreeAttentionCall::backward, "Path, chunks and the kernels of the gradients.")
      .def("forward_memory", &TreeAttentionCall::forward_memory, py::arg("base"),
           "Addresses of the scratch of a forward chunk on the tensor cores in memory at `base`.")
      .def("masked_gradient_memory", &TreeAttentionCall::masked_gradient_memory, py::arg("base"),
           "Where the pieces of the masked rows of the backward begin, behind each other from address base "
           "on.")
      .def("backward_memory", &TreeAttentionCall::backward_memory, py::arg("base"), py::arg("recompute"),
           "The same of a backward chunk, which selects lists again or is given them.")
      .def("growing_capacity", &TreeAttentionCall::growing_capacity,
           "Units of the copies of sequences that grow to T tokens.")
      .def("growing_memory", &TreeAttentionCall::growing_memory, py::arg("base"),
           "Addresses of these copies in memory at `base`.")
      .def("growing_change", &TreeAttentionCall::growing_change, py::arg("begin"),
           "Units of these copies that the tokens from `begin` to T change.");
  module.def(
      "select_blocks_chunks", &select_blocks_chunks, py::arg("num_heads"), py::arg("num_blocks"),
      py::arg("leaders"), py::arg("block_size"), py::arg("d"), py::arg("width"), py::arg("tile"),
      py::arg("size"),
      "How select_blocks divides a call on the CPU: (groups of blocks, heads, groups and tokens packed "
      "at once, queries).");
  module.def("index_loss_plan", &index_loss_plan, py::arg("batch"), py::arg("rows"), py::arg("tokens"),
             py::arg("heads"), py::arg("kv_heads"), py::arg("index_heads"), py::arg("key_dim"),
             py::arg("block_size"), py::arg("half_dtype") = true, py::arg("major") = 9,
             "How index_loss runs on a GPU: kernel, columns and how they are shared and held.");
  module.def("select_blocks_launch", &select_blocks_launch, py::arg("half_dtype"), py::arg("major"),
             py::arg("most_tokens"), py::arg("slots"), py::arg("num_heads"), py::arg("block_size"),
             "How select_blocks runs on a GPU: (kernel, tokens of a unit, units, floats of a row, heads and "
             "leaders of a chunk, splits, bytes of its scores).");
  module.def("varlen_groups", &varlen_groups, py::arg("num_queries"), py::arg("num_keys"),
             py::arg("grouping"), py::arg("num_heads") = 32,
             "Documents, padded queries and keys, and in place or not, of each group.");
}
