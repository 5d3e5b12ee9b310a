// CPU kernels that fill the tree cache: append, the table of pages, copies of pages.
// docs/semantics/tree_cache.md §7.2, §7.4.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "host/dispatch.h"
#include "ops/tree/cpu/stage_cpu.h"
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

// A page that is written must not hold other tokens, of its own sequence or of another one.
void check_owners(const Pools& pools, const PageLayout& layout, const char* op,
                  const std::vector<NewTokens>& all, const std::vector<int64_t>& after) {
  const auto* table = pools.block_table.const_data_ptr<int32_t>();
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
      TORCH_CHECK_VALUE(owner < 0 || owner == entry, op, ": block_table names page ", page,
                        ", which is written, at [", owner / layout.max_pages, ", ", owner % layout.max_pages,
                        "] and [", b, ", ", i, "]: only full pages can be shared");
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

// Writes the nodes that the tokens of one sequence finish to one pool and, if `means`, span means.
// token_row(token, head) is where a token stands that is not in a node yet.
template <typename T, typename TokenRow>
void append_nodes(const NewTokens& tokens, const PoolRows<Storage<T>>& pool, bool means,
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
  for (uint32_t layer = 1; layer < layout.num_layers; ++layer) {
    const auto place = [&](uint32_t index) { return layout.node(layer, index); };
    if (layer == 1) {
      write_means(layout.tokens[1], layout.rate, token_row, place);
    } else {
      const auto node_row = [&](uint32_t node, int64_t head) {
        return pool.at(layout.node(layer - 1, node), head);
      };
      write_means(layout.tokens[layer], layout.rate, node_row, place);
    }
  }
  if (means) {
    write_means(layout.span, layout.span, token_row, [&](uint32_t index) { return layout.span_mean(index); });
  }
}

// Writes the rows of one sequence to one pool: tokens, nodes and, if `means`, span means.
template <typename T>
void append_rows(const NewTokens& tokens, const Tensor& rows, const PoolRows<Storage<T>>& pool, bool means) {
  const PageLayout& layout = pool.layout;
  const int64_t heads = layout.num_kv_heads;
  const auto at_page = [&](uint32_t token, int64_t head) { return pool.at(layout.node(0, token), head); };
  at::parallel_for(0, tokens.count * heads, std::max<int64_t>(1, 16384 / pool.width),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       const auto token = static_cast<uint32_t>(tokens.before + i / heads);
                       std::memcpy(at_page(token, i % heads), given_row<T>(tokens, rows, token, i % heads),
                                   sizeof(Storage<T>) * static_cast<size_t>(pool.width));
                     }
                   });
  append_nodes<T>(tokens, pool, means, at_page);
}

// The same where tokens are packed. A node is finished by tokens of the call and by earlier ones, which are in the
// tail as they came; then the call's last tokens replace these.
template <typename T>
void append_packed_rows(const NewTokens& tokens, const Tensor& rows, const PoolRows<Storage<T>>& pool,
                        const LeafRows<T>& leaves, const Tensor& tail, bool means) {
  const PageLayout& layout = pool.layout;
  const int64_t heads = layout.num_kv_heads, kept = tail.size(2);
  const auto tail_row = [&](uint32_t token, int64_t head) {
    return stored_mutable<T>(tail) + ((tokens.sequence * heads + head) * kept + token % kept) * pool.width;
  };
  const auto given = [&](uint32_t token, int64_t head) { return given_row<T>(tokens, rows, token, head); };
  append_nodes<T>(tokens, pool, means, [&](uint32_t token, int64_t head) -> const Storage<T>* {
    return token < tokens.before ? tail_row(token, head) : given(token, head);
  });
  at::parallel_for(0, tokens.count * heads, std::max<int64_t>(1, 4096 / pool.width),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       const auto token = static_cast<uint32_t>(tokens.before + i / heads);
                       const Place place = layout.node(0, token);
                       leaves.pack(pool.table[place.page], i % heads, place.row, given(token, i % heads));
                       if (tokens.count - i / heads <= kept) {
                         const auto* row = given(token, i % heads);
                         std::copy(row, row + pool.width, tail_row(token, i % heads));
                       }
                     }
                   });
}

}  // namespace

void append_cpu(const Pools& pools, const PageLayout& layout, const AppendCall& call) {
  const std::vector<NewTokens> all = new_tokens(pools, layout, call);
  dispatch_dtype(call.op, call.k.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (const NewTokens& tokens : all) {
      const auto* table = pools.block_table.const_data_ptr<int32_t>() + tokens.sequence * layout.max_pages;
      append_rows<T>(tokens, call.k,
                     {layout, table, stored_mutable<T>(pools.keys), layout.key_rows(), pools.keys.size(3)},
                     layout.span > 0);
      append_rows<T>(
          tokens, call.v,
          {layout, table, stored_mutable<T>(pools.values), layout.value_rows(), pools.values.size(3)}, false);
    }
  });
}

void append_packed_cpu(const Pools& pools, const Tails& tails, const PageLayout& layout,
                       const AppendCall& call) {
  const std::vector<NewTokens> all = new_tokens(pools, layout, call);
  const PackedLeaves& leaves = *pools.leaves;
  dispatch_dtype(call.op, call.k.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const LeafRows<T> keys(leaves.k_codes, leaves.k_scales, pools.keys.size(3));
    const LeafRows<T> values(leaves.v_codes, leaves.v_scales, pools.values.size(3));
    for (const NewTokens& tokens : all) {
      const auto* table = pools.block_table.const_data_ptr<int32_t>() + tokens.sequence * layout.max_pages;
      append_packed_rows<T>(
          tokens, call.k,
          {layout, table, stored_mutable<T>(pools.keys), layout.key_rows(), pools.keys.size(3)}, keys,
          tails.keys, layout.span > 0);
      append_packed_rows<T>(
          tokens, call.v,
          {layout, table, stored_mutable<T>(pools.values), layout.value_rows(), pools.values.size(3)}, values,
          tails.values, false);
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
      const size_t bytes = pool.nbytes() / static_cast<size_t>(pool.size(0));
      auto* data = static_cast<char*>(pool.mutable_data_ptr());
      std::memcpy(data + static_cast<size_t>(from[num + i]) * bytes,
                  data + static_cast<size_t>(from[i]) * bytes, bytes);
    }
  }
}

// ---- the table of pages

namespace {

class PageTable {
 public:
  PageTable(const PageState& state, const PageRequest& request)
      : batch_(state.lengths.numel()),
        max_pages_(state.block_table.size(1)),
        ring_(state.list_pos.size(1)),
        page_size_(request.page_size),
        capacity_(request.capacity),
        num_pages_(state.users.size(0)),
        stride_(request.selection_stride),
        table_(state.block_table.mutable_data_ptr<int32_t>()),
        lengths_(state.lengths.mutable_data_ptr<int32_t>()),
        held_(state.held.mutable_data_ptr<int32_t>()),
        users_(state.users.mutable_data_ptr<int32_t>()),
        num_free_(state.free_pages.mutable_data_ptr<int32_t>()),
        stack_(num_free_ + 1),
        errors_(state.errors.mutable_data_ptr<int32_t>()),
        list_pos_(state.list_pos.mutable_data_ptr<int32_t>()),
        plan_(state.plan.mutable_data_ptr<int32_t>()),
        request_(request.request.const_data_ptr<int32_t>()) {}

  void run(PageStep step) {
    if (step != PageStep::kAttend) check_state();
    for (int64_t b = 0; b < batch_; ++b) {
      row(kBefore)[b] = lengths_[b];
      row(kTaken)[b] = 0;
      row(kFrom)[b] = -1;
      row(kTo)[b] = -1;
    }
    switch (step) {
      case PageStep::kAppend:
        return append(true);
      case PageStep::kReserve:
        return append(false);
      case PageStep::kTruncate:
        return truncate();
      case PageStep::kReorder:
        return reorder();
      case PageStep::kAttend:
        return attend();
    }
  }

 private:
  enum PlanRow { kBefore, kTaken, kFrom, kTo };

  // The caller keeps these tensors. Steps follow what stands in them, so it must fit together.
  void check_state() {
    std::vector<int32_t> users(static_cast<size_t>(num_pages_));
    std::vector<int64_t> last(static_cast<size_t>(num_pages_), -1);  // the last sequence that has the page
    for (int64_t b = 0; b < batch_; ++b) {
      TORCH_CHECK_VALUE(held_[b] >= 0 && held_[b] <= max_pages_, kPagesOp,
                        ": held must lie between 0 and max_pages = ", max_pages_, ", got ", held_[b], " at ",
                        b);
      TORCH_CHECK_VALUE(lengths_[b] >= 0 && lengths_[b] <= held_[b] * page_size_, kPagesOp,
                        ": lengths must lie between 0 and the tokens of the pages held = ",
                        held_[b] * page_size_, ", got ", lengths_[b], " at ", b);
      for (int64_t i = 0; i < held_[b]; ++i) {
        check_page(kPagesOp, pages(b), b, i, num_pages_);
        const auto page = static_cast<size_t>(pages(b)[i]);
        TORCH_CHECK_VALUE(last[page] != b, kPagesOp, ": a sequence must have a page once, got page ", page,
                          " again at block_table[", b, ", ", i, "]");
        last[page] = b;
        ++users[page];
      }
    }
    for (int64_t page = 0; page < num_pages_; ++page) {
      const int32_t count = users[static_cast<size_t>(page)];
      TORCH_CHECK_VALUE(users_[page] == count, kPagesOp,
                        ": users must be how often block_table has each page, ", count, " for page ", page,
                        ", got ", users_[page]);
    }
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t i = lengths_[b] / page_size_; i < held_[b]; ++i) {
        TORCH_CHECK_VALUE(users_[pages(b)[i]] == 1, kPagesOp, ": only full pages can be shared, got page ",
                          pages(b)[i], " at block_table[", b, ", ", i, "], of a sequence of ", lengths_[b],
                          " tokens, with ", users_[pages(b)[i]], " users");
      }
    }
    TORCH_CHECK_VALUE(*num_free_ >= 0 && *num_free_ <= num_pages_, kPagesOp,
                      ": free_pages must begin with their number, between 0 and num_pages = ", num_pages_,
                      ", got ", *num_free_);
    for (int64_t i = 0; i < *num_free_; ++i) {
      const int32_t page = stack_[i];
      const bool is_free =
          page >= 0 && page < num_pages_ && users[static_cast<size_t>(page)]++ == 0;  // it comes once
      TORCH_CHECK_VALUE(is_free, kPagesOp,
                        ": free_pages must name pages of the pool without users, each once, got ", page,
                        " at ", 1 + i);
    }
  }

  int32_t* row(PlanRow which) { return plan_ + which * batch_; }
  int32_t* pages(int64_t b) { return table_ + b * max_pages_; }

  int32_t pop() {
    const int32_t page = stack_[--*num_free_];
    users_[page] = 1;
    return page;
  }
  void push(int32_t page) { stack_[(*num_free_)++] = page; }

  void append(bool counts) {
    int64_t left = *num_free_;
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t after = int64_t{lengths_[b]} + request_[b];
      TORCH_CHECK_VALUE(request_[b] >= 0, kPagesOp, ": request must not be negative, got ", request_[b],
                        " for sequence ", b);
      TORCH_CHECK_VALUE(after <= capacity_, kPagesOp, ": sequence ", b, " holds ", lengths_[b], " tokens; ",
                        request_[b], " more exceed the capacity of ", capacity_);
      left -= std::max<int64_t>(0, ceil_div(after, page_size_) - held_[b]);
      TORCH_CHECK_VALUE(left >= 0, kPagesOp, ": no page is left for sequence ", b, ", which holds ",
                        lengths_[b], " tokens and was given ", request_[b], "; the pool has ", *num_free_,
                        " free pages of ", page_size_, " tokens");
    }
    for (int64_t b = 0; b < batch_; ++b) {
      while (held_[b] * page_size_ < int64_t{lengths_[b]} + request_[b]) {
        pages(b)[held_[b]++] = pop();
      }
      row(kTaken)[b] = request_[b];
      if (counts) lengths_[b] += request_[b];
    }
  }

  bool has_lists(int64_t b, int64_t leader) const {
    const int32_t* ring = list_pos_ + b * ring_;
    return std::find(ring, ring + ring_, static_cast<int32_t>(leader)) != ring + ring_;
  }

  void truncate() {
    for (int64_t b = 0; b < batch_; ++b) {
      const int32_t length = request_[b];
      TORCH_CHECK_VALUE(length >= -1 && length <= lengths_[b], kPagesOp,
                        ": a sequence can be truncated to at most what it holds, sequence ", b, " holds ",
                        lengths_[b], " tokens, got ", length);
      const int64_t last = int64_t{length} - 1;
      TORCH_CHECK_VALUE(
          length < 0 || length == lengths_[b] || length % stride_ == 0 || has_lists(b, last - last % stride_),
          kPagesOp, ": sequence ", b, " can be truncated to a multiple of selection_stride = ", stride_,
          ", or where the lists of the last token's leader are in the ring, got ", length);
    }
    check_copies();
    for (int64_t b = 0; b < batch_; ++b) {
      if (shortens(b)) shorten(b, request_[b]);
    }
  }

  bool shortens(int64_t b) const { return request_[b] >= 0 && request_[b] < lengths_[b]; }

  // Checks that each shared open page finds a free page for its copy when its sequence is shortened.
  void check_copies() {
    std::map<int32_t, int32_t> drops;
    int64_t left = *num_free_;
    for (int64_t b = 0; b < batch_; ++b) {
      if (!shortens(b)) continue;
      const int64_t keep = ceil_div(request_[b], page_size_);
      for (int64_t i = keep; i < held_[b]; ++i) {
        left += users_[pages(b)[i]] == ++drops[pages(b)[i]];
      }
      if (request_[b] % page_size_ == 0) continue;
      const int32_t open = pages(b)[keep - 1];
      if (users_[open] - drops[open] == 1) continue;
      ++drops[open];
      TORCH_CHECK_VALUE(--left >= 0, kPagesOp, ": no page is left for sequence ", b,
                        ", whose open page is shared");
    }
  }

  void shorten(int64_t b, int32_t length) {
    const int64_t keep = ceil_div(length, page_size_);
    const bool open = length % page_size_ != 0;
    const bool copies = open && users_[pages(b)[keep - 1]] > 1;
    for (int64_t i = keep; i < held_[b]; ++i) {
      int32_t& page = pages(b)[i];
      if (--users_[page] == 0) push(page);
      page = -1;
    }
    held_[b] = static_cast<int32_t>(keep);
    if (copies) {
      int32_t& page = pages(b)[keep - 1];
      --users_[page];
      row(kFrom)[b] = page;
      page = pop();
      row(kTo)[b] = page;
    }
    lengths_[b] = length;
    for (int64_t i = 0; i < ring_; ++i) {
      int32_t& leader = list_pos_[b * ring_ + i];
      if (leader >= length) leader = -1;
    }
  }

  // Sequence b becomes what request[b] was.
  void reorder() {
    for (int64_t b = 0; b < batch_; ++b) {
      TORCH_CHECK_VALUE(request_[b] >= 0 && request_[b] < batch_, kPagesOp,
                        ": a beam must lie between 0 and B - 1 = ", batch_ - 1, ", got ", request_[b]);
    }
    const std::vector<int32_t> table(table_, table_ + batch_ * max_pages_);
    const std::vector<int32_t> lengths(lengths_, lengths_ + batch_);
    const std::vector<int32_t> held(held_, held_ + batch_);
    const std::vector<int32_t> list_pos(list_pos_, list_pos_ + batch_ * ring_);
    const auto full = [&](int64_t b) { return lengths[static_cast<size_t>(b)] / page_size_; };
    const auto open = [&](int64_t b) { return lengths[static_cast<size_t>(b)] % page_size_ != 0; };
    const auto old_page = [&](int64_t b, int64_t i) {
      return table[static_cast<size_t>(b * max_pages_ + i)];
    };
    std::vector<int64_t> owner(static_cast<size_t>(batch_), -1);  // who keeps the open page of a sequence
    for (int64_t b = 0; b < batch_; ++b) {
      int64_t& first = owner[static_cast<size_t>(request_[b])];
      if (first < 0 || request_[b] == b) first = b;
    }
    const auto moves = [&](int64_t b) { return request_[b] != b; };
    const auto takes = [&](int64_t b) {  // how many pages of its source b shares or keeps
      const int64_t source = request_[b];
      return full(source) + (open(source) && owner[static_cast<size_t>(source)] == b);
    };
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t i = 0; moves(b) && i < takes(b); ++i)
        ++users_[old_page(request_[b], i)];
    }
    const int32_t free_before = *num_free_;
    int64_t copies = 0;
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t i = 0; moves(b) && i < held[static_cast<size_t>(b)]; ++i) {
        if (--users_[old_page(b, i)] == 0) push(old_page(b, i));
      }
      const int64_t source = request_[b];
      copies += moves(b) && open(source) && owner[static_cast<size_t>(source)] != b;
    }
    if (copies > *num_free_) {
      const int32_t free = *num_free_;
      *num_free_ = free_before;
      for (int64_t b = 0; b < batch_; ++b) {
        for (int64_t i = 0; moves(b) && i < takes(b); ++i)
          --users_[old_page(request_[b], i)];
        for (int64_t i = 0; moves(b) && i < held[static_cast<size_t>(b)]; ++i)
          ++users_[old_page(b, i)];
      }
      TORCH_CHECK_VALUE(false, kPagesOp, ": ", copies, " open pages must be copied, and ", free,
                        " pages are left");
    }
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t source = request_[b];
      row(kTaken)[b] = static_cast<int32_t>(source);
      if (!moves(b)) continue;
      int64_t count = takes(b);
      std::fill(pages(b), pages(b) + max_pages_, -1);
      for (int64_t i = 0; i < count; ++i)
        pages(b)[i] = old_page(source, i);
      if (open(source) && owner[static_cast<size_t>(source)] != b) {
        row(kFrom)[b] = old_page(source, count);
        row(kTo)[b] = pages(b)[count] = pop();
        ++count;
      }
      held_[b] = static_cast<int32_t>(count);
      lengths_[b] = lengths[static_cast<size_t>(source)];
      std::copy_n(list_pos.begin() + source * ring_, ring_, list_pos_ + b * ring_);
    }
  }

  // Reports the sequences that have a query whose leader is neither in the call nor in the ring.
  void attend() {
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t first = std::max<int64_t>(0, int64_t{lengths_[b]} - request_[b]);
      const bool any = request_[b] > 0 && lengths_[b] > 0;
      if (any && first % stride_ != 0 && !has_lists(b, first - first % stride_)) {
        errors_[b] |= kMissingLeader;
      }
    }
  }

  int64_t batch_, max_pages_, ring_, page_size_, capacity_, num_pages_, stride_;
  int32_t *table_, *lengths_, *held_, *users_, *num_free_, *stack_, *errors_, *list_pos_, *plan_;
  const int32_t* request_;
};

}  // namespace

void pages_cpu(const PageState& state, const PageRequest& request) {
  PageTable(state, request).run(request.step);
}

}  // namespace htree::tree_cache
