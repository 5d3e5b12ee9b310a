// CPU kernels that fill the tree cache: append, lengths, copies of pages.
// docs/semantics/tree_cache.md §7.2, §7.4.
#include <ATen/Parallel.h>
#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "host/dispatch.h"
#include "ops/tree/cpu/stage_cpu.h"
#include "ops/tree_cache/index/coded_row.h"
#include "ops/tree_cache/index/index_keys.h"
#include "ops/tree_cache/packed/packed_leaves_cpu.h"
#include "ops/tree_cache/tree_cache.h"

namespace htree::tree_cache {
namespace {

using tree_attention::Stage;
using tree_attention::stored;
using tree_attention::stored_mutable;

// ---- append

// The new tokens of a sequence: rows [first, first + count) of the call, which follow `before` tokens.
struct NewTokens {
  int64_t sequence, first, before, count;
};

void check_page(const char* name, const int32_t* table, int64_t sequence, int64_t page, int64_t num_pages) {
  TORCH_CHECK_INDEX(table[page] >= 0 && table[page] < num_pages, name, ": block_table[", sequence, ", ", page,
                    "] must be a page of the pool, between 0 and ", num_pages - 1, ", got ", table[page]);
}

// A page that is written must not hold other tokens, of its own sequence or of another one: except that a page which its
// writer fills may stand in the same place of sequences that begin behind it.
void check_owners(const Pools& pools, const PageLayout& layout, const char* op,
                  const std::vector<NewTokens>& all, const std::vector<int64_t>& after) {
  const auto* table = pools.block_table.const_data_ptr<int32_t>();
  const auto* before = pools.lengths.const_data_ptr<int32_t>();
  std::vector<int64_t> written(layout.num_pages, -1);  // the entry of the table, by page
  for (const NewTokens& tokens : all) {
    const int64_t last = tokens.before + tokens.count - 1;
    for (int64_t i = tokens.before / layout.page_size; i <= last / layout.page_size; ++i) {
      const int64_t entry = tokens.sequence * layout.max_pages + i;
      written[static_cast<size_t>(table[entry])] = entry;
    }
  }
  for (int64_t b = 0; b < pools.lengths.numel() && !all.empty(); ++b) {
    for (int64_t i = 0; i * layout.page_size < after[static_cast<size_t>(b)]; ++i) {
      const int64_t entry = b * layout.max_pages + i, page = table[entry];
      if (page < 0 || page >= layout.num_pages) continue;  // of a sequence that gets no tokens
      const int64_t owner = written[static_cast<size_t>(page)];
      if (owner < 0 || owner == entry) continue;
      const int64_t writer = owner / layout.max_pages, place = owner % layout.max_pages;
      const int64_t end = (place + 1) * layout.page_size;
      const bool filled = place == i && after[static_cast<size_t>(writer)] >= end && before[b] >= end;
      TORCH_CHECK_VALUE(filled, op, ": block_table names page ", page, ", which is written, at [", writer,
                        ", ", place, "] and [", b, ", ", i, "]: only full pages can be shared");
    }
  }
}

// Everything is checked before anything is written.
std::vector<NewTokens> new_tokens(const Pools& pools, const PageLayout& layout, const AppendCall& call) {
  const auto* before = pools.lengths.const_data_ptr<int32_t>();
  const auto* cu = call.cu_new.const_data_ptr<int32_t>();
  const auto* counts = call.new_lengths.has_value() ? call.new_lengths->const_data_ptr<int32_t>() : nullptr;
  std::vector<NewTokens> all;
  std::vector<int64_t> after(static_cast<size_t>(pools.lengths.numel()));
  for (int64_t b = 0; b < pools.lengths.numel(); ++b) {
    TORCH_CHECK_VALUE(cu[b] >= 0 && cu[b] <= cu[b + 1] && cu[b + 1] <= call.k.size(0), call.op,
                      ": cu_new must ascend between 0 and N_new = ", call.k.size(0), ", got ", cu[b], " and ",
                      cu[b + 1], " at ", b);
    const int64_t rows = cu[b + 1] - cu[b];
    TORCH_CHECK_VALUE(counts == nullptr || (counts[b] >= 0 && counts[b] <= rows), call.op,
                      ": new_lengths must lie between 0 and the rows of the sequence = ", rows, ", got ",
                      counts == nullptr ? 0 : counts[b], " at ", b);
    const int64_t count = counts == nullptr ? rows : counts[b];
    TORCH_CHECK_VALUE(count <= call.max_new, call.op, ": max_new = ", call.max_new,
                      " must be at least the new tokens of every sequence, got ", count, " at ", b);
    TORCH_CHECK_VALUE(before[b] >= 0 && before[b] + count <= layout.capacity(), call.op,
                      ": lengths must be at least 0 and with the new tokens at most max_pages * page_size = ",
                      layout.capacity(), ", got ", before[b], " and ", count, " more at ", b);
    after[static_cast<size_t>(b)] = before[b] + count;
    if (count == 0) continue;
    const auto* table = pools.block_table.const_data_ptr<int32_t>() + b * layout.max_pages;
    // The children of nodes that end now may stand in any earlier page.
    for (int64_t page = 0; page * layout.page_size < before[b] + count; ++page) {
      check_page(call.op, table, b, page, layout.num_pages);
    }
    all.push_back({b, cu[b], before[b], count});
  }
  check_owners(pools, layout, call.op, all, after);
  return all;
}

// The rows of one pool, keys or values.
template <typename T>
struct PoolRows {
  const PageLayout& layout;
  const int32_t* table;  // of one sequence
  T* pool;
  int64_t page_rows;
  int64_t width;

  T* at(const Place& place, int64_t head) const {
    return pool + ((int64_t{table[place.page]} * layout.num_kv_heads + head) * page_rows + place.row) * width;
  }
};

// The row of a new token as the caller gave it.
template <typename T>
const Storage<T>* given_row(const NewTokens& tokens, const Tensor& rows, uint32_t token, int64_t head) {
  return stored<T>(rows) + (tokens.first + token - tokens.before) * rows.stride(0) + head * rows.stride(1);
}

// Writes the nodes of one layer that the tokens of one sequence finish to one pool, or the span means where `layer` is the
// number of layers. token_row(token, head) is where a token stands that is not in a node yet.
template <typename T, typename TokenRow>
void append_layer(const NewTokens& tokens, const PoolRows<Storage<T>>& pool, uint32_t layer,
                  TokenRow&& token_row) {
  const PageLayout& layout = pool.layout;
  const int64_t heads = layout.num_kv_heads;
  const auto mean = Stage<T>::rows().mean;
  const int64_t after = tokens.before + tokens.count;
  // Writes the mean of `count` rows of a layer at each place(index), index = before / size ... after / size - 1.
  const auto write_means = [&](int64_t size, uint32_t count, auto&& child, auto&& place) {
    const int64_t first = tokens.before / size;
    const int64_t grain = std::max<int64_t>(1, 32768 / (pool.width * count));
    at::parallel_for(0, (after / size - first) * heads, grain, [&](int64_t begin, int64_t end) {
      std::vector<Storage<T>> children(static_cast<size_t>(count * pool.width));
      for (int64_t i = begin; i < end; ++i) {
        const auto index = static_cast<uint32_t>(first + i / heads);
        for (uint32_t c = 0; c < count; ++c) {
          const auto* row = child(index * count + c, i % heads);
          std::copy(row, row + pool.width, children.begin() + c * pool.width);
        }
        mean(children.data(), pool.width, count, pool.width, pool.at(place(index), i % heads));
      }
    });
  };
  const auto place = [&](uint32_t index) { return layout.node(layer, index); };
  if (layer == layout.num_layers) {
    write_means(layout.span, layout.span, token_row, [&](uint32_t index) { return layout.span_mean(index); });
  } else if (layer == 1) {
    write_means(layout.tokens[1], layout.rate, token_row, place);
  } else {
    const auto node_row = [&](uint32_t node, int64_t head) {
      return pool.at(layout.node(layer - 1, node), head);
    };
    write_means(layout.tokens[layer], layout.rate, node_row, place);
  }
}

// The new rows of keys or of values, and where they go.
template <typename T>
struct AppendedRows {
  const Tensor& given;
  Storage<T>* pool;
  int64_t page_rows;
  int64_t width;
  bool means;          // whether span means are kept
  const Tensor* tail;  // of packed tokens, else null

  PoolRows<Storage<T>> of(const Pools& pools, const PageLayout& layout, const NewTokens& tokens) const {
    const auto* table = pools.block_table.const_data_ptr<int32_t>() + tokens.sequence * layout.max_pages;
    return {layout, table, pool, page_rows, width};
  }
};

template <typename T>
std::array<AppendedRows<T>, 2> appended_rows(const Pools& pools, const PageLayout& layout,
                                             const AppendCall& call) {
  const auto& leaves = pools.leaves;
  return {{{call.k, stored_mutable<T>(pools.keys), layout.key_rows(), pools.keys.size(3), layout.span > 0,
            !leaves.has_value() ? nullptr : &leaves->k_tail},
           {call.v, stored_mutable<T>(pools.values), layout.value_rows(), pools.values.size(3), false,
            !leaves.has_value() ? nullptr : &leaves->v_tail}}};
}

// Where tokens are packed, the row of one that is in the tail.
template <typename T>
Storage<T>* tail_row(const NewTokens& tokens, const Tensor& tail, uint32_t token, int64_t head) {
  const int64_t kept = tail.size(2);
  return stored_mutable<T>(tail) +
         ((tokens.sequence * tail.size(1) + head) * kept + token % kept) * tail.size(3);
}

// Writes the tokens of one sequence to one pool; with `leaves` it packs them, and keeps the last ones in the tail.
template <typename T>
void append_tokens(const NewTokens& tokens, const AppendedRows<T>& rows, const PoolRows<Storage<T>>& pool,
                   const LeafRows<T>* leaves) {
  const int64_t heads = pool.layout.num_kv_heads, cost = leaves == nullptr ? 1 : 4;
  at::parallel_for(0, tokens.count * heads, std::max<int64_t>(1, 16384 / cost / pool.width),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       const auto token = static_cast<uint32_t>(tokens.before + i / heads);
                       const int64_t head = i % heads;
                       const Place place = pool.layout.node(0, token);
                       const auto* row = given_row<T>(tokens, rows.given, token, head);
                       if (leaves == nullptr) {
                         std::copy(row, row + pool.width, pool.at(place, head));
                         continue;
                       }
                       leaves->pack(pool.table[place.page], head, place.row, row);
                       if (tokens.count - i / heads <= rows.tail->size(2)) {
                         std::copy(row, row + pool.width, tail_row<T>(tokens, *rows.tail, token, head));
                       }
                     }
                   });
}

}  // namespace

// Packed tokens go last: a node is finished by tokens of the call and by earlier ones, which are in the tail as they came,
// until the call's last tokens replace them.
void append_cpu(const Pools& pools, const PageLayout& layout, const AppendCall& call) {
  const std::vector<NewTokens> all = new_tokens(pools, layout, call);
  const auto& leaves = pools.leaves;
  dispatch_dtype(call.op, call.k.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto both = appended_rows<T>(pools, layout, call);
    for (const AppendedRows<T>& rows : both) {
      for (size_t i = 0; !leaves.has_value() && i < all.size(); ++i) {
        append_tokens<T>(all[i], rows, rows.of(pools, layout, all[i]), nullptr);
      }
      // Layer by layer, all sequences in each: a node may have children in pages that another sequence of the call fills.
      for (uint32_t layer = 1; layer < layout.num_layers + (rows.means ? 1 : 0); ++layer) {
        for (const NewTokens& tokens : all) {
          const auto pool = rows.of(pools, layout, tokens);
          append_layer<T>(tokens, pool, layer, [&](uint32_t token, int64_t head) -> const Storage<T>* {
            if (!leaves.has_value()) return pool.at(layout.node(0, token), head);
            return token < tokens.before ? tail_row<T>(tokens, *rows.tail, token, head)
                                         : given_row<T>(tokens, rows.given, token, head);
          });
        }
      }
    }
    if (!leaves.has_value()) return;
    const LeafRows<T> keys(leaves->k_codes, leaves->k_scales, pools.keys.size(3));
    const LeafRows<T> values(leaves->v_codes, leaves->v_scales, pools.values.size(3));
    for (const NewTokens& tokens : all) {
      append_tokens<T>(tokens, both[0], both[0].of(pools, layout, tokens), &keys);
      append_tokens<T>(tokens, both[1], both[1].of(pools, layout, tokens), &values);
    }
  });
}

namespace {

// The new tokens of one sequence as codes and scales.
void append_index_codes(const NewTokens& tokens, const Tensor& rows, const PageLayout& layout,
                        const int32_t* table, const IndexPool& index) {
  const int64_t heads = layout.num_kv_heads, width = index.keys.size(3), page_size = layout.page_size;
  const auto* given = rows.const_data_ptr<c10::BFloat16>();
  auto* codes = static_cast<uint8_t*>(index.keys.mutable_data_ptr());
  auto* scales = index.scales.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < tokens.count; ++i) {
    const int64_t token = tokens.before + i;
    for (int64_t head = 0; head < heads; ++head) {
      const auto* from = given + (tokens.first + i) * rows.stride(0) + head * rows.stride(1);
      float largest = 0.0f;
      for (int64_t c = 0; c < width; ++c) {
        const float magnitude = std::fabs(static_cast<float>(from[c]));
        largest = magnitude > largest ? magnitude : largest;  // NaN loses, one that std::fmax passes on too
      }
      const int64_t row = (table[token / page_size] * heads + head) * page_size + token % page_size;
      const uint8_t scale = index_scale(largest);
      scales[row] = scale;
      for (int64_t c = 0; c < width; ++c) {
        codes[row * width + c] = c10::Float8_e4m3fn(scaled_channel(static_cast<float>(from[c]), scale)).x;
      }
    }
  }
}

}  // namespace

void append_index_cpu(const Pools& pools, const IndexPool& index, const PageLayout& layout,
                      const AppendCall& call) {
  const std::vector<NewTokens> all = new_tokens(pools, layout, call);
  const Tensor& index_pool = index.keys;
  const PageLayout of_index = index_layout(layout, index_pool.size(1));
  if (index.coded()) {
    for (const NewTokens& tokens : all) {
      const auto* table = pools.block_table.const_data_ptr<int32_t>() + tokens.sequence * layout.max_pages;
      append_index_codes(tokens, call.k, of_index, table, index);
    }
    return;
  }
  dispatch_dtype(call.op, call.k.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const AppendedRows<T> rows = {
        call.k,          stored_mutable<T>(index_pool), of_index.key_rows(), index_pool.size(3),
        /*means=*/false,
        /*tail=*/nullptr};
    for (const NewTokens& tokens : all) {
      append_tokens<T>(tokens, rows, rows.of(pools, of_index, tokens), nullptr);
    }
  });
}

void copy_cpu(const Tensor& k_pool, const Tensor& v_pool, const Tensor& pages) {
  const auto* from = pages.const_data_ptr<int32_t>();
  const int64_t num = pages.size(1), num_pages = k_pool.size(0);
  for (int64_t i = 0; i < num; ++i) {
    const int32_t to = from[num + i];
    if (from[i] == -1) continue;
    TORCH_CHECK_INDEX(from[i] >= 0 && from[i] < num_pages && to >= 0 && to < num_pages, "tree_cache_copy_",
                      ": pages must lie between 0 and num_pages - 1 = ", num_pages - 1, ", got ", from[i],
                      " and ", to);
  }
  for (int64_t i = 0; i < num; ++i) {
    if (from[i] == -1 || from[i] == from[num + i]) continue;
    for (const Tensor& pool : {k_pool, v_pool}) {
      if (pool.numel() == 0) continue;
      const size_t bytes = pool.nbytes() / static_cast<size_t>(pool.size(0));
      auto* data = static_cast<char*>(pool.mutable_data_ptr());
      std::memcpy(data + static_cast<size_t>(from[num + i]) * bytes,
                  data + static_cast<size_t>(from[i]) * bytes, bytes);
    }
  }
}

// ---- lengths

void lengths_cpu(const SequenceLengths& all, const LengthStep& step, bool truncates, const Tensor& /*like*/) {
  for (int64_t b = 0; step.appends && b < all.num_sequences; ++b) {  // before anything changes
    const int32_t error = append_error(all, step, b);
    TORCH_CHECK_INDEX(error != kBadPage,
                      "tree_cache_step_: block_table must name pages of the pool, between 0 and ",
                      step.num_pages - 1, ", got another one for new tokens of sequence ", b);
    TORCH_CHECK_VALUE(error == 0, "tree_cache_step_: sequence ", b, " holds ", all.lengths[b], " tokens; ",
                      step.counts[b], " more exceed ",
                      error == kNoPage ? "its pages" : "the capacity, or are less than none");
  }
  for (int64_t b = 0; b < all.num_sequences; ++b) {
    truncates ? truncate(all, step, b) : advance(all, step, b);
  }
}

}  // namespace htree::tree_cache
