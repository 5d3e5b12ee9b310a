// The checks and outputs declared in tree_cache.h, on symbolic sizes: Meta runs them too.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "host/check.h"
#include "host/overlap.h"
#include "ops/tree_cache/index/index_keys.h"
#include "ops/tree_cache/packed/packed_leaves.h"
#include "ops/tree_cache/row_tree.h"
#include "ops/tree_cache/tree_cache.h"

namespace htree::tree_cache {
namespace {

using tree_attention::check_indices;

constexpr const char* kCopyOp = "tree_cache_copy_";

// The options themselves have been checked.
void check_page_size(const char* op, int64_t page_size, int64_t rate) {
  TORCH_CHECK_VALUE(page_size >= rate && page_size < tree_attention::kIndexLimit && page_size % rate == 0, op,
                    ": page_size must be a multiple of compression_rate = ", rate, " below 2^31, got ",
                    page_size);
}

int64_t rows_of_page(int64_t page_size, int64_t rate, int64_t num_layers) {
  int64_t rows = 0;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    rows += ceil_div(page_size, tree_attention::node_span(rate, layer));
  }
  return rows;
}

using Named = std::pair<const char*, const Tensor&>;

int64_t leaf_bits(const Tensor& pool, const Tensor& codes) {
  return same_size(codes.sym_size(3), pool.sym_size(3)) ? 8 : 4;
}

// The packed tokens of one pool.
void check_leaves(const char* op, const char* pool_name, const Tensor& pool, const Named& codes,
                  const Named& scales, int64_t page_size) {
  check_dtype(op, pool_name, pool, {at::kFloat, at::kHalf, at::kBFloat16});
  const SymInt width = pool.sym_size(3);
  TORCH_CHECK_VALUE(
      same_size(width % 64, 0) && holds(width.sym_ge(64)) && holds(width.sym_le(compressed_kv::kMostHeadDim)),
      op, ": rows of ", pool_name,
      " must have a multiple of 64 channels, up to 512, where tokens are packed, got ", width);
  const auto& [codes_name, packed] = codes;
  const auto& [scales_name, factors] = scales;
  check_rank(op, codes_name, packed, 4, "[num_pages, H_kv, page_size, row bytes]");
  check_dtype(op, codes_name, packed, {at::kByte});
  check_rank(op, scales_name, factors, 3, "[num_pages, H_kv, page_size]");
  check_dtype(op, scales_name, factors, {at::kHalf});
  for (const auto& [name, tensor] : {codes, scales}) {
    check_same_device(op, name, tensor, pool_name, pool);
    check_contiguous(op, name, tensor);
    check_size(op, name, tensor, 0, pool.sym_size(0), "num_pages of the pools");
    check_size(op, name, tensor, 1, pool.sym_size(1), "H_kv of the pools");
    check_size(op, name, tensor, 2, page_size, "page_size");
  }
  const SymInt bytes = packed.sym_size(3);
  TORCH_CHECK_VALUE(same_size(bytes, width) || same_size(bytes * 2, width), op, ": ", codes_name,
                    " must have a byte for each channel or for each two of ", width, ", got ",
                    packed.sym_sizes());
}

// Rows of one call: [N, heads, channels] with the place where each sequence's begin, or [B, n, heads, channels].
void check_rows(const char* op, const char* name, const Tensor& rows, const char* packed_shape,
                const char* batched_shape, const Pools& pools) {
  const SymInt batch = pools.block_table.sym_size(0);
  const bool batched = rows.dim() == 4;
  check_rank(op, name, rows, batched ? 4 : 3, batched ? batched_shape : packed_shape);
  check_same_dtype(op, name, rows, "k_pool", pools.keys);
  check_same_device(op, name, rows, "k_pool", pools.keys);
  if (batched) {
    check_size(op, name, rows, 0, batch, "B of block_table");
  }
  const SymInt num = batched ? rows.sym_size(0) * rows.sym_size(1) : rows.sym_size(0);
  TORCH_CHECK_VALUE(holds(num.sym_lt(tree_attention::kIndexLimit)), op, ": ", name,
                    " must have fewer than 2^31 rows, got ", rows.sym_sizes());
}

// Where the rows of each sequence begin, and how many of them count.
void check_offsets(const char* op, const char* cu_name, const Tensor& cu, const char* lengths_name,
                   const std::optional<Tensor>& lengths, const Pools& pools) {
  const SymInt batch = pools.block_table.sym_size(0);
  check_indices(op, cu_name, cu, {batch + 1}, "[B + 1]", "k_pool", pools.keys);
  if (lengths.has_value()) {
    check_indices(op, lengths_name, *lengths, {batch}, "[B]", "k_pool", pools.keys);
  }
}

// The positions to which the candidates of a row are rotated, in a cache of `capacity` tokens, which is a multiple of r.
SymInt most_positions(const TreeOptions& options, const SymInt& capacity) {
  const int64_t rate = options.compression_rate, listed = options.top_k * rate;
  if (!has_open_top(options.max_top_nodes, options.top_k, rate)) return listed;
  const int64_t top = std::min(ceil_div(options.max_top_nodes, rate), tree_attention::kIndexLimit) * rate;
  return capacity.min(top).max(listed);
}

void check_tails(const char* op, const Pools& pools, const TreeOptions& options) {
  const PackedLeaves& leaves = *pools.leaves;
  const std::array<std::tuple<const char*, Tensor, const char*, Tensor>, 2> both = {
      {{"k_tail", leaves.k_tail, "k_pool", pools.keys}, {"v_tail", leaves.v_tail, "v_pool", pools.values}}};
  for (const auto& [name, tail, pool_name, pool] : both) {
    check_rank(op, name, tail, 4, "[B, H_kv, tokens, channels]");
    check_same_dtype(op, name, tail, pool_name, pool);
    check_same_device(op, name, tail, pool_name, pool);
    check_contiguous(op, name, tail);
    check_size(op, name, tail, 0, pools.block_table.sym_size(0), "B of block_table");
    check_size(op, name, tail, 1, pool.sym_size(1), "H_kv of the pools");
    check_size(op, name, tail, 2, leaves.k_tail.sym_size(2), "tokens of k_tail");
    check_size(op, name, tail, 3, pool.sym_size(3), "channels of the pool");
  }
  const SymInt tokens = leaves.k_tail.sym_size(2);
  TORCH_CHECK_VALUE(
      holds(tokens.sym_ge(options.compression_rate)) && same_size(tokens % options.compression_rate, 0) &&
          holds(tokens.sym_lt(tree_attention::kIndexLimit)),
      op, ": k_tail must have a positive multiple of compression_rate = ", options.compression_rate,
      " tokens below 2^31, got ", leaves.k_tail.sym_sizes());
}

}  // namespace

void check_cache_options(const char* op, const TreeOptions& options) {
  tree_attention::check_options(op, options);
  TORCH_CHECK_VALUE(
      options.importance != tree_attention::Importance::kLse, op,
      ": importance must be \"lse_causal\" or \"exp_joint\", got \"lse\": it weighs nodes that are "
      "not finished, which a cache does not hold");
}

int64_t cache_layers(const Pools& pools, const TreeOptions& options) {
  return tree_attention::depth_of(pools.block_table.sym_size(1) * pools.page_size, options);
}

void check_pools(const char* op, const Pools& pools, const TreeOptions& options) {
  const int64_t page_size = pools.page_size;
  check_page_size(op, page_size, options.compression_rate);
  check_rank(op, "k_pool", pools.keys, 4, "[num_pages, H_kv, key rows, K]");
  check_floating(op, "k_pool", pools.keys, /*double_on_cuda=*/false);
  check_rank(op, "v_pool", pools.values, 4, "[num_pages, H_kv, value rows, V]");
  check_same_dtype(op, "v_pool", pools.values, "k_pool", pools.keys);
  check_same_device(op, "v_pool", pools.values, "k_pool", pools.keys);
  check_contiguous(op, "k_pool", pools.keys);
  check_contiguous(op, "v_pool", pools.values);
  check_rank(op, "block_table", pools.block_table, 2, "[B, max_pages]");
  const SymInt max_pages = pools.block_table.sym_size(1);
  check_indices(op, "block_table", pools.block_table, {pools.block_table.sym_size(0), max_pages},
                "[B, max_pages]", "k_pool", pools.keys);
  if (pools.lengths.defined()) {
    check_indices(op, "lengths", pools.lengths, {pools.block_table.sym_size(0)}, "[B]", "k_pool", pools.keys);
  }
  TORCH_CHECK_VALUE(holds((max_pages * page_size).sym_lt(tree_attention::kIndexLimit)), op,
                    ": max_pages * page_size must be below 2^31, got ", max_pages, " and ", page_size);
  const int64_t tokens = !pools.leaves.has_value() ? 0 : page_size;  // rows that are elsewhere
  const int64_t rows =
      rows_of_page(page_size, options.compression_rate, cache_layers(pools, options)) - tokens;
  const int64_t means = options.selection_span.has_value() ? page_size / *options.selection_span : 0;
  check_size(op, "k_pool", pools.keys, 2, rows + means, "rows of a page: tokens, nodes and span means");
  check_size(op, "v_pool", pools.values, 0, pools.keys.sym_size(0), "num_pages of k_pool");
  check_size(op, "v_pool", pools.values, 1, pools.keys.sym_size(1), "H_kv of k_pool");
  check_size(op, "v_pool", pools.values, 2, rows, "rows of a page: tokens and nodes");
  const SymInt key_dim = pools.keys.sym_size(3);
  TORCH_CHECK_VALUE(holds(key_dim.sym_ge(2)) && same_size(key_dim % 2, 0), op,
                    ": K, the last size of k_pool, must be even and at least 2, got ",
                    pools.keys.sym_sizes());
  TORCH_CHECK_VALUE(holds(pools.keys.sym_size(1).sym_ge(1)) && holds(pools.values.sym_size(3).sym_ge(1)), op,
                    ": H_kv and V of v_pool must be at least 1, got ", pools.values.sym_sizes());
  TORCH_CHECK_VALUE(holds(pools.keys.sym_size(0).sym_lt(tree_attention::kIndexLimit)), op,
                    ": k_pool must have fewer than 2^31 pages, got ", pools.keys.sym_sizes());
  if (pools.leaves.has_value()) {
    check_leaves(op, "k_pool", pools.keys, {"k_codes", pools.leaves->k_codes},
                 {"k_scales", pools.leaves->k_scales}, page_size);
    check_leaves(op, "v_pool", pools.values, {"v_codes", pools.leaves->v_codes},
                 {"v_scales", pools.leaves->v_scales}, page_size);
    const int64_t bits = leaf_bits(pools.keys, pools.leaves->k_codes);
    const SymInt value_dim = pools.values.sym_size(3);
    TORCH_CHECK_VALUE(leaf_bits(pools.values, pools.leaves->v_codes) == bits, op,
                      ": v_codes must have V * bits / 8 = ", value_dim * bits / 8,
                      " bytes for V = ", value_dim, " of v_pool and the ", bits, " bits of k_codes, got ",
                      pools.leaves->v_codes.sym_sizes());
  }
}

PageLayout layout_of(const Pools& pools, const TreeOptions& options) {
  const PageLayout layout = page_layout(pools.page_size, options.compression_rate,
                                        cache_layers(pools, options), options.selection_span.value_or(0),
                                        pools.keys.size(0), pools.block_table.size(1), pools.keys.size(1));
  return !pools.leaves.has_value() ? layout : without_token_rows(layout);
}

void check_append(const char* op, const Pools& pools, const TreeOptions& options, const Tensor& k,
                  const Tensor& v, const Tensor& cu_new, const std::optional<Tensor>& new_lengths,
                  const std::optional<SymInt>& max_new) {
  check_rows(op, "k", k, "[N_new, H_kv, K]", "[B, n, H_kv, K]", pools);
  check_rows(op, "v", v, "[N_new, H_kv, V]", "[B, n, H_kv, V]", pools);
  check_offsets(op, "cu_new", cu_new, "new_lengths", new_lengths, pools);
  const int64_t heads = k.dim() - 2;
  check_rank(op, "v", v, k.dim(), "as k is");
  check_size(op, "k", k, heads, pools.keys.sym_size(1), "H_kv of k_pool");
  check_size(op, "k", k, heads + 1, pools.keys.sym_size(3), "K of k_pool");
  check_size(op, "v", v, heads - 1, k.sym_size(heads - 1), "the new tokens of k");
  check_size(op, "v", v, heads, pools.keys.sym_size(1), "H_kv of k_pool");
  check_size(op, "v", v, heads + 1, pools.values.sym_size(3), "V of v_pool");
  if (max_new.has_value()) {
    TORCH_CHECK_VALUE(holds(max_new->sym_ge(0)), op, ": max_new must be at least 0, got ", *max_new);
  }
  std::vector<std::pair<const char*, Tensor>> written = {{"k_pool", pools.keys}, {"v_pool", pools.values}};
  if (const auto& leaves = pools.leaves; leaves.has_value()) {
    check_tails(op, pools, options);
    written.insert(written.end(), {{"k_codes", leaves->k_codes},
                                   {"k_scales", leaves->k_scales},
                                   {"v_codes", leaves->v_codes},
                                   {"v_scales", leaves->v_scales},
                                   {"k_tail", leaves->k_tail},
                                   {"v_tail", leaves->v_tail}});
  }
  for (size_t i = 0; i < written.size(); ++i) {
    const auto& [name, tensor] = written[i];
    for (size_t j = 0; j < i; ++j) {
      check_disjoint(op, written[j].first, written[j].second, name, tensor);
    }
    check_disjoint(op, name, tensor, "k", k);
    check_disjoint(op, name, tensor, "v", v);
  }
}

AttentionOutputs prepare_attention(const char* op, const Pools& pools, const AttentionInputs& inputs,
                                   const TreeOptions& options) {
  const Tensor& q = inputs.q;
  check_rows(op, "q", q, "[N_q, H, K]", "[B, n, H, K]", pools);
  check_offsets(op, "cu_q", inputs.cu_q, "q_lengths", inputs.q_lengths, pools);
  const SymInt kv_heads = pools.keys.sym_size(1), width = pools.keys.sym_size(3);
  const SymInt num_heads = q.sym_size(-2);
  check_size(op, "q", q, q.dim() - 1, width, "K of k_pool");
  tree_attention::check_frequencies(op, options, width);
  TORCH_CHECK_VALUE(holds(num_heads.sym_ge(1)) && same_size(num_heads % kv_heads, 0), op,
                    ": H of q must be a positive multiple of H_kv = ", kv_heads, ", got ", q.sym_sizes());
  if (inputs.index.has_value()) {
    check_index_pool(op, pools, inputs.index->pool, pools.page_size);
    check_index_rows(op, "index_query", inputs.index->query, "the rows of q", q, inputs.index->pool.keys);
  }
  const SymInt batch = pools.block_table.sym_size(0);
  TORCH_CHECK_VALUE(inputs.lists.has_value() == inputs.list_pos.has_value(), op,
                    ": lists and list_pos must be given together, got only one of them");
  TORCH_CHECK_VALUE(inputs.lists.has_value() || options.selection_stride == 1, op,
                    ": lists and list_pos must be given for selection_stride > 1, of leaders or empty");
  SymInt ring = 0;
  if (inputs.lists.has_value()) {
    check_rank(op, "list_pos", *inputs.list_pos, 2, "[B, ring]");
    ring = inputs.list_pos->sym_size(1);
  }
  const int64_t layers = cache_layers(pools, options);
  const std::array<SymInt, 5> list_shape = {batch, ring, layers, kv_heads, options.top_k};
  if (inputs.lists.has_value()) {
    check_indices(op, "list_pos", *inputs.list_pos, {batch, ring}, "[B, ring]", "q", q);
    check_indices(op, "lists", *inputs.lists, list_shape, "[B, ring, layers, H_kv, top_k]", "q", q);
  }
  if (inputs.rope_table.has_value() && options.rope_base.has_value()) {
    const Tensor& table = *inputs.rope_table;
    check_rank(op, "rope_table", table, 3, "[2, size, K/2]");
    check_dtype(op, "rope_table", table, {tree_attention::state_dtype(q)});
    check_same_device(op, "rope_table", table, "q", q);
    check_contiguous(op, "rope_table", table);
    check_size(op, "rope_table", table, 0, 2, "cos and sin");
    check_size(op, "rope_table", table, 2, width / 2, "K/2");
    const SymInt positions = most_positions(options, pools.block_table.sym_size(1) * pools.page_size);
    TORCH_CHECK_VALUE(holds(table.sym_size(1).sym_ge(positions)), op, ": rope_table must have at least ",
                      positions, " positions, the most candidates of a row, got ", table.sym_sizes());
  }
  std::vector<SymInt> shape(q.sym_sizes().begin(), q.sym_sizes().end());
  shape.pop_back();
  Tensor lse = new_tensor(shape, tree_attention::state_dtype(q), q);
  shape.push_back(pools.values.sym_size(3));
  return {new_tensor(shape, q.scalar_type(), q), std::move(lse), new_tensor(list_shape, at::kInt, q),
          new_tensor({batch, ring}, at::kInt, q)};
}

void check_copy(const Tensor& k_pool, const Tensor& v_pool, const Tensor& pages) {
  const char* op = kCopyOp;
  check_rank(op, "k_pool", k_pool, 4, "[num_pages, H_kv, key rows, K]");
  check_rank(op, "v_pool", v_pool, 4, "[num_pages, H_kv, value rows, V]");
  for (const auto& [name, pool] : {std::pair{"k_pool", k_pool}, std::pair{"v_pool", v_pool}}) {
    check_dtype(op, name, pool, {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kByte});
  }
  check_same_device(op, "v_pool", v_pool, "k_pool", k_pool);
  check_size(op, "v_pool", v_pool, 0, k_pool.sym_size(0), "num_pages of k_pool");
  check_contiguous(op, "k_pool", k_pool);
  check_contiguous(op, "v_pool", v_pool);
  check_rank(op, "pages", pages, 2, "[2, n]");
  check_indices(op, "pages", pages, {2, pages.sym_size(1)}, "[2, n]", "k_pool", k_pool);
  check_disjoint(op, "k_pool", k_pool, "v_pool", v_pool);
  check_disjoint(op, "k_pool", k_pool, "pages", pages);
  check_disjoint(op, "v_pool", v_pool, "pages", pages);
}

}  // namespace htree::tree_cache
