// Lists that an index chooses, from index keys in pages. CPU. docs/semantics/tree_cache.md §7.7
#include "ops/tree_cache/index/index_lists_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "ops/selection/select_blocks.h"
#include "ops/tree_cache/index/coded_row.h"
#include "ops/tree_cache/index/index_keys.h"

namespace htree::tree_cache {
namespace {

// The bf16 numbers that E4M3 codes are, with a row's scale.
class Decoded {
 public:
  Decoded() {
    for (int code = 0; code < 256; ++code) {
      values_[static_cast<size_t>(code)] =
          static_cast<float>(c10::Float8_e4m3fn(static_cast<uint8_t>(code), c10::Float8_e4m3fn::from_bits()));
    }
  }
  c10::BFloat16 operator()(uint8_t code, uint8_t scale) const {
    return c10::BFloat16(values_[code] * scale_value(scale));
  }

 private:
  std::array<float, 256> values_{};
};

// The index keys of a sequence's first `length` tokens, [1, length, H_i, d], as numbers; the tokens of a head lie side by
// side.
Tensor sequence_keys(const Pools& pools, const PageLayout& layout, const IndexPool& index, int64_t sequence,
                     int64_t length) {
  static const Decoded decoded;
  const Tensor& pool = index.keys;
  const int64_t heads = pool.size(1), page_size = pool.size(2), width = pool.size(3);
  const Tensor keys = at::empty({1, heads, length, width},
                                pool.options().dtype(index.coded() ? at::kBFloat16 : pool.scalar_type()));
  const auto row_bytes = static_cast<size_t>(width) * pool.element_size();
  const auto* table = pools.block_table.const_data_ptr<int32_t>() + sequence * layout.max_pages;
  const auto* from = static_cast<const char*>(pool.const_data_ptr());
  const auto* scales = index.coded() ? index.scales.const_data_ptr<uint8_t>() : nullptr;
  auto* to = static_cast<char*>(keys.mutable_data_ptr());
  const int64_t num_pages = ceil_div(length, page_size);
  at::parallel_for(0, num_pages * heads, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / num_pages, first = i % num_pages * page_size;
      const int64_t tokens = std::min(page_size, length - first), row = head * length + first;
      const int64_t stored = (table[first / page_size] * heads + head) * page_size;
      if (scales == nullptr) {
        std::memcpy(to + static_cast<size_t>(row) * row_bytes, from + static_cast<size_t>(stored) * row_bytes,
                    static_cast<size_t>(tokens) * row_bytes);
        continue;
      }
      const auto* codes = reinterpret_cast<const uint8_t*>(from) + stored * width;
      auto* numbers = reinterpret_cast<c10::BFloat16*>(to) + row * width;
      for (int64_t c = 0; c < tokens * width; ++c) {
        numbers[c] = decoded(codes[c], scales[stored + c / width]);
      }
    }
  });
  return keys.transpose(1, 2);
}

}  // namespace

IndexLists index_lists_cpu(const Pools& pools, const PageLayout& layout, const IndexInputs& index,
                           const AttentionArgs& args, const IndexedRows& rows) {
  const int64_t stride = args.selection_stride, rate = args.compression_rate;
  const int64_t leader = ceil_div(rows.first_token, stride) * stride;
  IndexLists lists;
  lists.first_stride = leader / stride;
  const int64_t depth = tree_attention::num_layers(rows.length, args.max_top_nodes, rate);
  if (leader >= rows.length || depth == 1) return lists;
  const Tensor query =
      index.query.narrow(0, rows.first_row + leader - rows.first_token, rows.length - leader).unsqueeze(0);
  const Tensor keys = sequence_keys(pools, layout, index.pool, rows.sequence, rows.length);
  tree_attention::BlockOptions blocks;
  blocks.count = std::min(args.top_k, ceil_div(rows.length, rate));
  blocks.stride = stride;
  blocks.open_next = args.selection.open_next;
  std::vector<tree_attention::BlockLayer> found;
  for (int64_t layer = 0; layer + 1 < depth; ++layer) {
    blocks.block_size = tree_attention::node_span(rate, layer + 1);
    found.push_back({tree_attention::prepare_blocks("tree_cache_attention", query, keys, blocks)});
    lists.of_layers.push_back(std::get<0>(found.back().lists)[0]);
  }
  blocks.block_size = rate;
  tree_attention::select_block_layers_cpu(query, keys, blocks, rate, found);
  return lists;
}

}  // namespace htree::tree_cache
