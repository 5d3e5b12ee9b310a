// CPU kernel of tree_cache_attention. A task takes the queries of one stride of one sequence and one
// key/value head from layer to layer, with the row kernels of tree_attention. These see the same rows in the
// same order as there, so the bits are the same. docs/semantics/tree_cache.md §7.3.
//
// A query reads at most k r rows of a layer, at its top at most max_top_nodes. They are gathered and laid out for that query alone. Where
// a sequence has so many queries that every row would be read several times, its layers are laid out
// once as a whole.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include "ops/sparse_attention/cpu/query_worker.h"
#include "ops/tree_cache/index/index_lists_cpu.h"
#include "ops/tree_cache/packed/packed_leaves_cpu.h"
#include "ops/tree_cache/row_tree.h"
#include "ops/tree_cache/tree_cache.h"

namespace htree::tree_cache {
namespace {

using tree_attention::Candidates;
using tree_attention::CpuPackedSpans;
using tree_attention::PackedLayer;
using tree_attention::PackedLayers;
using tree_attention::PackedSpan;
using tree_attention::QueryShape;
using tree_attention::QueryWorker;
using tree_attention::Rotation;
using tree_attention::RotationTable;

constexpr const char* kOp = "tree_cache_attention";

// The queries of a sequence: rows [first_row, first_row + count) of the call, which are the
// last of `length` tokens.
struct Sequence {
  int64_t index, first_row, count, length;
  int64_t first_token() const { return length - count; }  // negative where `length` is less than `count`
  int64_t begin() const { return std::max<int64_t>(0, first_token()); }
};

std::vector<Sequence> sequences_of(const Pools& pools, const PageLayout& layout,
                                   const AttentionInputs& inputs) {
  const auto* lengths = pools.lengths.const_data_ptr<int32_t>();
  const auto* cu = inputs.cu_q.const_data_ptr<int32_t>();
  const auto* counts = inputs.q_lengths.has_value() ? inputs.q_lengths->const_data_ptr<int32_t>() : nullptr;
  std::vector<Sequence> all;
  for (int64_t b = 0; b < pools.lengths.numel(); ++b) {
    TORCH_CHECK_VALUE(cu[b] >= 0 && cu[b] <= cu[b + 1] && cu[b + 1] <= inputs.q.size(0), kOp,
                      ": cu_q must ascend between 0 and N_q = ", inputs.q.size(0), ", got ", cu[b], " and ",
                      cu[b + 1], " at ", b);
    const int64_t rows = cu[b + 1] - cu[b];
    TORCH_CHECK_VALUE(counts == nullptr || (counts[b] >= 0 && counts[b] <= rows), kOp,
                      ": q_lengths must lie between 0 and the rows of the sequence = ", rows, ", got ",
                      counts == nullptr ? 0 : counts[b], " at ", b);
    TORCH_CHECK_VALUE(lengths[b] >= 0 && lengths[b] <= layout.capacity(), kOp,
                      ": lengths must lie between 0 and max_pages * page_size = ", layout.capacity(),
                      ", got ", lengths[b], " at ", b);
    const auto* table = pools.block_table.const_data_ptr<int32_t>() + b * layout.max_pages;
    const int64_t count = counts == nullptr ? rows : counts[b];
    for (int64_t page = 0; count > 0 && page * layout.page_size < lengths[b]; ++page) {
      TORCH_CHECK_INDEX(table[page] >= 0 && table[page] < int64_t{layout.num_pages}, kOp, ": block_table[", b,
                        ", ", page, "] must be a page of the pool, between 0 and ",
                        static_cast<int64_t>(layout.num_pages) - 1, ", got ", table[page]);
    }
    all.push_back({b, cu[b], count, lengths[b]});
  }
  return all;
}

// The table of rotations. It is the same in every step of a generation, so the latest ones are kept.
template <typename Real>
RotationTable kept_rotation(int64_t positions, const QueryShape& shape, double base,
                            const std::vector<double>& inv_freq) {
  struct Kept {
    double base;
    std::vector<double> inv_freq;
    int64_t half, half_pad;
    RotationTable table;
  };
  constexpr size_t kMost = 4;
  static std::mutex mutex;
  static std::vector<Kept> kept;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto fits = [&](const Kept& x) {
    return x.base == base && x.inv_freq == inv_freq && x.half == shape.half && x.half_pad == shape.half_pad;
  };
  const auto found = std::find_if(kept.begin(), kept.end(), fits);
  if (found != kept.end() && found->table.table.size(1) >= positions) return found->table;
  if (found != kept.end()) kept.erase(found);
  if (kept.size() == kMost) kept.erase(kept.begin());
  int64_t size = 256;  // doubled as the sequence grows
  while (size < positions)
    size *= 2;
  kept.push_back({base, inv_freq, shape.half, shape.half_pad,
                  tree_attention::make_rotation<Real>(size, shape, base, inv_freq)});
  return kept.back().table;
}

// What all tasks of a call share.
template <typename T, typename Real>
struct Call {
  const Pools& pools;
  const PageLayout& layout;
  const AttentionInputs& inputs;
  const AttentionArgs& args;
  const AttentionOutputs& outputs;
  QueryShape shape;
  RotationTable table;
  // Those of the pages, keys or values.
  struct Rows {
    const Tensor& pool;
    int64_t page_rows;
    std::optional<LeafRows<T>> packed;
  };
  Rows keys, values;

  Call(const Pools& pools_, const PageLayout& layout_, const AttentionInputs& inputs_,
       const AttentionArgs& args_, const AttentionOutputs& outputs_, int64_t longest)
      : pools(pools_),
        layout(layout_),
        inputs(inputs_),
        args(args_),
        outputs(outputs_),
        keys{pools_.keys, layout_.key_rows(), {}},
        values{pools_.values, layout_.value_rows(), {}} {
    const int64_t r = args.compression_rate;
    const int64_t max_parents = std::max<int64_t>(
        1, std::min(most_parents(args.max_top_nodes, args.top_k, r, longest), ceil_div(longest, r)));
    const Tensor q = inputs.q.unsqueeze(0);
    shape = tree_attention::query_shape(q, layout.num_kv_heads, pools.values.size(3), r, max_parents,
                                        args.selection, tree_attention::query_kernels<Real>().lanes);
    if (const auto& leaves = pools.leaves; leaves.has_value()) {
      keys.packed.emplace(leaves->k_codes, leaves->k_scales, pools.keys.size(3));
      values.packed.emplace(leaves->v_codes, leaves->v_scales, pools.values.size(3));
    }
    if (!args.rotate) return;
    if (inputs.rope_table.has_value()) {
      table = tree_attention::copy_rotation<Real>(inputs.rope_table->select(0, 0),
                                                  inputs.rope_table->select(0, 1), max_parents * r, shape);
    } else {
      table = kept_rotation<Real>(max_parents * r, shape, args.rope_base, args.inv_freq);
    }
  }

  Rotation<Real> rotation() const { return table.rotation<Real>(); }
  bool open_top() const { return has_open_top(args.max_top_nodes, args.top_k, args.compression_rate); }
  int64_t ring() const { return std::get<3>(outputs).size(1); }
  int64_t ring_slot(int64_t leader) const { return leader / args.selection_stride % ring(); }

  int64_t page_of(int64_t b, const Place& place) const {
    return pools.block_table.const_data_ptr<int32_t>()[b * layout.max_pages + place.page];
  }
  // A row of a page of one head.
  const T* row(const Rows& rows, int64_t b, const Place& place, int64_t head) const {
    return rows.pool.template const_data_ptr<T>() +
           ((page_of(b, place) * layout.num_kv_heads + head) * rows.page_rows + place.row) *
               rows.pool.size(3);
  }
  // A token, or a finished node. A packed token is expanded at `scratch`, which has space for a row.
  const T* row(const Rows& rows, int64_t b, int64_t layer, int64_t node, int64_t head, T* scratch) const {
    const Place place = layout.node(static_cast<uint32_t>(layer), static_cast<uint32_t>(node));
    if (layer > 0 || !rows.packed.has_value()) return row(rows, b, place, head);
    rows.packed->expand(page_of(b, place), head, place.row, scratch);
    return scratch;
  }
  const T* span_mean(int64_t b, int64_t index, int64_t head) const {
    return row(keys, b, layout.span_mean(static_cast<uint32_t>(index)), head);
  }

  // [1, N, H_kv, .] of the rows from(i, head, scratch), which are zero where that is null.
  template <typename From>
  Tensor gather(const Rows& rows, int64_t num, const From& from) const {
    const int64_t heads = layout.num_kv_heads, width = rows.pool.size(3);
    const Tensor out = at::empty({1, num, heads, width}, rows.pool.options());
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, num * heads, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* at = to + i * width;
        const T* stored = from(i / heads, i % heads, at);
        if (stored == nullptr) {
          std::fill(at, at + width, T{});
        } else if (stored != at) {
          std::copy(stored, stored + width, at);
        }
      }
    });
    return out;
  }

  // All nodes of a layer. The last one is zero if it is not finished.
  std::pair<Tensor, Tensor> whole_layer(const Sequence& sequence, int64_t layer) const {
    const int64_t nodes = ceil_div(sequence.length, layout.tokens[layer]);
    const int64_t finished = sequence.length / layout.tokens[layer];
    const auto all = [&](const Rows& rows) {
      return gather(rows, nodes, [&](int64_t node, int64_t head, T* scratch) -> const T* {
        return node < finished ? row(rows, sequence.index, layer, node, head, scratch) : nullptr;
      });
    };
    return {all(keys), all(values)};
  }

  // All finished span means, of keys.
  Tensor whole_means(const Sequence& sequence) const {
    return gather(keys, sequence.length / layout.span, [&](int64_t mean, int64_t head, T* /*scratch*/) {
      return span_mean(sequence.index, mean, head);
    });
  }
};

// The layers of one sequence, laid out as tree_attention does it. Empty where each query gathers for itself.
template <typename Real>
struct WholeLayers {
  std::vector<PackedLayers<Real>> layers;
  std::vector<CpuPackedSpans<Real>> means;  // as many; empty ones where the selection needs none

  bool empty() const { return layers.empty(); }
};

template <typename T, typename Real>
class StrideTask {
 public:
  explicit StrideTask(const Call<T, Real>& call)
      : call_(call),
        worker_(call.shape),
        width_(call.args.top_k),
        lists_(call.layout.num_layers * width_),
        positions_(width_),
        slots_(call.shape.max_parents),
        expanded_(std::max(call.pools.keys.size(3), call.pools.values.size(3))) {
    for (size_t i = 0; i < slots_.size(); ++i)
      slots_[i] = static_cast<int32_t>(i);
  }

  // Computes the queries of the call among the tokens [stride s, stride (s + 1)). `chosen` are the lists of an index, null
  // where scores choose.
  void run(const Sequence& sequence, int64_t stride, int64_t head, const WholeLayers<Real>& whole,
           const IndexLists* chosen) {
    const int64_t leader = stride * call_.args.selection_stride;
    const int64_t begin = std::max(leader, sequence.begin());
    const int64_t end = std::min(leader + call_.args.selection_stride, sequence.length);
    const int64_t top = top_of(leader);
    bool known = begin == leader || load_lists(sequence.index, leader, head);
    if (begin == leader) {
      write_top_lists(leader, top);
      if (chosen != nullptr) take_lists(*chosen, stride, head, top);
    }
    for (int64_t token = begin; token < end; ++token) {
      known = known && attend(sequence, token, top, head, token == leader && chosen == nullptr, whole);
      write_row(sequence.first_row + token - sequence.first_token(), head, known);
    }
    const int64_t last = (sequence.length - 1) / call_.args.selection_stride;
    if (begin == leader && call_.ring() > 0 && stride + call_.ring() > last) {
      store_lists(sequence.index, leader, head);
    }
  }

 private:
  int32_t* list(int64_t layer) { return lists_.data() + layer * width_; }
  // Where the list of a layer and head begins in an entry of the ring.
  int64_t ring_row(int64_t slot, int64_t layer, int64_t head) const {
    return ((slot * call_.layout.num_layers + layer) * call_.layout.num_kv_heads + head) * width_;
  }

  bool load_lists(int64_t b, int64_t leader, int64_t head) {
    if (!call_.inputs.lists.has_value() || call_.ring() == 0) return false;
    const int64_t slot = b * call_.ring() + call_.ring_slot(leader);
    if (call_.inputs.list_pos->template const_data_ptr<int32_t>()[slot] != leader) return false;
    const auto* from = call_.inputs.lists->template const_data_ptr<int32_t>();
    for (int64_t layer = 0; layer < call_.layout.num_layers; ++layer)
      std::copy_n(from + ring_row(slot, layer, head), width_, list(layer));
    return true;
  }

  // The lists below the top that an index has chosen for the leader of a stride.
  void take_lists(const IndexLists& chosen, int64_t stride, int64_t head, int64_t top) {
    for (int64_t layer = 0; layer < top; ++layer)
      chosen.copy(layer, stride, head, width_, list(layer));
  }

  void store_lists(int64_t b, int64_t leader, int64_t head) {
    const int64_t slot = b * call_.ring() + call_.ring_slot(leader);
    auto* to = std::get<2>(call_.outputs).template mutable_data_ptr<int32_t>();
    for (int64_t layer = 0; layer < call_.layout.num_layers; ++layer)
      std::copy_n(list(layer), width_, to + ring_row(slot, layer, head));
  }

  // The top of a sequence that ends at a leader, which is that of all rows of its stride.
  int64_t top_of(int64_t leader) const {
    return tree_attention::num_layers(leader + 1, call_.args.max_top_nodes, call_.args.compression_rate) - 1;
  }

  // Writes the lists of the layers from that top upwards, which open every node, or say nothing.
  void write_top_lists(int64_t token, int64_t top) {
    for (int64_t layer = top; layer < call_.layout.num_layers; ++layer) {
      const int64_t count = call_.open_top() ? 0 : token / call_.layout.tokens[layer] / call_.layout.rate + 1;
      for (int64_t i = 0; i < count; ++i)
        list(layer)[i] = static_cast<int32_t>(i);
      std::fill(list(layer) + count, list(layer) + width_, -1);
    }
  }

  // The candidates of a row in a layer of `num_nodes` nodes, of which `rightmost` is its own.
  Candidates candidates_at(int64_t layer, int64_t top, int64_t rightmost, int64_t num_nodes) {
    const int64_t r = call_.args.compression_rate;
    return layer < top || !call_.open_top()
               ? tree_attention::candidates_of(list(layer), width_, rightmost, num_nodes, r)
               : tree_attention::candidates_of(slots_.data(), rightmost / r + 1, rightmost, num_nodes, r);
  }

  // Computes one row of a tree with that top, and below it the lists that the row chooses where it `selects`. False where a
  // list is not valid.
  bool attend(const Sequence& sequence, int64_t token, int64_t top, int64_t head, bool selects,
              const WholeLayers<Real>& whole) {
    const AttentionArgs& args = call_.args;
    const int64_t r = args.compression_rate;
    const Tensor& q = call_.inputs.q;
    const int64_t row = sequence.first_row + token - sequence.first_token();
    worker_.load_query(q.const_data_ptr<T>() + row * q.stride(0) + head * call_.shape.group * q.stride(1),
                       q.stride(1), args.scale);
    worker_.clear_state();
    for (int64_t l = top; l >= 0; --l) {
      const int64_t rightmost = token / call_.layout.tokens[l];
      const int64_t num_nodes =
          whole.empty() ? rightmost + 1 : whole.layers[static_cast<size_t>(l)].num_nodes();
      const Candidates found = candidates_at(l, top, rightmost, num_nodes);
      if (!found.regular) return false;
      const bool merges = l == 0 || found.count > width_;  // else every candidate is selected
      Candidates seen = found;
      PackedLayer<Real> layer;
      if (merges && whole.empty()) {
        layer = gathered(found.count);
        seen.parents = slots_.data();
        seen.rightmost = found.count - 1;
        gather_keys(sequence.index, l, head, found);
      } else if (merges) {
        layer = whole.layers[static_cast<size_t>(l)].at(0, head);
      }
      if (merges) worker_.score(layer, call_.rotation(), seen);
      int64_t num_selected = 0;
      if (l > 0 && selects) {
        num_selected = merges && call_.layout.span > 0
                           ? select_by_span(sequence.index, l, head, found, seen, whole)
                           : worker_.select(seen, width_, positions_.data());
        tree_attention::write_list(found, r, positions_.data(), num_selected, width_, list(l - 1));
      } else if (l > 0 && merges) {
        num_selected = tree_attention::positions_of(found, r, list(l - 1), width_, positions_.data());
      }
      if (merges && whole.empty()) gather_values(sequence.index, l, head, found, num_selected);
      if (merges) worker_.accumulate(layer, seen, positions_.data(), num_selected);
    }
    return true;
  }

  // The gathered parents as a layer of their own, in which parent i is entry i of the list.
  PackedLayer<Real> gathered(int64_t num_nodes) {
    const QueryShape& shape = call_.shape;
    if (keys_.empty()) {
      keys_.resize(static_cast<size_t>(shape.max_parents * 2 * shape.half * shape.r_pad));
      values_.resize(static_cast<size_t>(shape.max_parents * shape.r * shape.value_pad));
      row_.resize(static_cast<size_t>(shape.row()));
    }
    return {keys_.data(), values_.data(), nullptr, nullptr, num_nodes};
  }

  // Above the tokens the rightmost node is left out: its score is never used, and it may be unfinished.
  void gather_keys(int64_t b, int64_t layer, int64_t head, const Candidates& candidates) {
    const QueryShape& shape = call_.shape;
    const int64_t tile_size = 2 * shape.half * shape.r_pad;
    const int64_t count = candidates.count - (layer > 0);
    for (int64_t slot = 0; slot < candidates.num_parents; ++slot) {
      Real* tile = keys_.data() + slot * tile_size;
      const int64_t children = std::min(shape.r, count - slot * shape.r);
      if (children < shape.r_pad) std::fill(tile, tile + tile_size, Real{0});
      for (int64_t child = 0; child < children; ++child) {
        const int64_t node = candidates.parents[slot] * shape.r + child;
        const T* key = call_.row(call_.keys, b, layer, node, head, expanded_.data());
        tree_attention::pack_key(key, shape, call_.rotation(), child, shape.r_pad, row_.data(), tile);
      }
    }
  }

  // Selects from the span means of the candidates. `seen` are the candidates as the layer at hand numbers them.
  int64_t select_by_span(int64_t b, int64_t layer, int64_t head, const Candidates& candidates,
                         const Candidates& seen, const WholeLayers<Real>& whole) {
    PackedSpan<Real> span;
    if (!whole.empty()) {
      span = whole.means[static_cast<size_t>(layer)].at(0, head);
    } else {
      const QueryShape& shape = call_.shape;
      const int64_t per_node = call_.layout.tokens[layer] / call_.layout.span;
      const int64_t tile_size = 2 * shape.half * shape.r_pad;
      means_.assign(static_cast<size_t>(candidates.num_parents * per_node * tile_size), Real{0});
      for (int64_t p = 0; p < candidates.count - 1; ++p) {
        const int64_t node = candidates.parents[p / shape.r] * shape.r + p % shape.r;
        for (int64_t mean = 0; mean < per_node; ++mean) {
          tree_attention::pack_key(call_.span_mean(b, node * per_node + mean, head), shape, call_.rotation(),
                                   p % shape.r, shape.r_pad, row_.data(),
                                   means_.data() + (p / shape.r * per_node + mean) * tile_size);
        }
      }
      span = {means_.data(), candidates.count, candidates.count * per_node, per_node, per_node, shape.r_pad};
    }
    return worker_.select_by_span(span, call_.rotation(), seen, width_, positions_.data());
  }

  void gather_values(int64_t b, int64_t layer, int64_t head, const Candidates& candidates,
                     int64_t num_selected) {
    const QueryShape& shape = call_.shape;
    int64_t next = 0;
    for (int64_t p = 0; p < candidates.count; ++p) {
      if (next < num_selected && positions_[static_cast<size_t>(next)] == p) {
        ++next;
        continue;
      }
      const int64_t node = candidates.parents[p / shape.r] * shape.r + p % shape.r;
      const T* from = call_.row(call_.values, b, layer, node, head, expanded_.data());
      Real* to = values_.data() + p * shape.value_pad;
      for (int64_t i = 0; i < shape.value_dim; ++i)
        to[i] = static_cast<Real>(from[i]);
      std::fill(to + shape.value_dim, to + shape.value_pad, Real{0});
    }
  }

  void write_row(int64_t row, int64_t head, bool known) {
    const int64_t group = call_.shape.group;
    const int64_t value_dim = call_.shape.value_dim;
    const int64_t at = row * call_.inputs.q.size(1) + head * group;
    T* out = std::get<0>(call_.outputs).template mutable_data_ptr<T>();
    Real* lse = std::get<1>(call_.outputs).template mutable_data_ptr<Real>();
    for (int64_t g = 0; g < group; ++g) {
      const Real nan = std::numeric_limits<Real>::quiet_NaN();
      const Real sum = worker_.sum()[g];
      const Real inverse = Real{1} / sum;
      lse[at + g] = known ? worker_.max()[g] + std::log(sum) : nan;
      for (int64_t d = 0; d < value_dim; ++d) {
        out[(at + g) * value_dim + d] = static_cast<T>(known ? worker_.out(g)[d] * inverse : nan);
      }
    }
  }

  const Call<T, Real>& call_;
  QueryWorker<Real> worker_;
  int64_t width_;
  std::vector<int32_t> lists_;      // [L][k] of the leader
  std::vector<int32_t> positions_;  // selected positions of the current layer
  std::vector<int32_t> slots_;      // 0, 1, 2, ...
  std::vector<Real> keys_, values_, row_, means_;
  std::vector<T> expanded_;  // a packed token
};

// Makes the ring after the call: entries that are still valid, and the last leaders of the call.
template <typename T, typename Real>
void start_ring(const Call<T, Real>& call, const std::vector<Sequence>& sequences) {
  const auto& [out, lse, lists, list_pos] = call.outputs;
  if (call.inputs.lists.has_value()) {
    lists.copy_(*call.inputs.lists);
    list_pos.copy_(*call.inputs.list_pos);
  } else {
    lists.fill_(-1);
    list_pos.fill_(-1);
  }
  const int64_t stride = call.args.selection_stride;
  auto* positions = list_pos.template mutable_data_ptr<int32_t>();
  for (const Sequence& sequence : sequences) {
    int32_t* row = positions + sequence.index * call.ring();
    for (int64_t i = 0; i < call.ring(); ++i) {
      if (row[i] >= sequence.begin()) row[i] = -1;
    }
    for (int64_t i = ceil_div(sequence.begin(), stride); call.ring() > 0 && i * stride < sequence.length;
         ++i) {
      row[call.ring_slot(i * stride)] = static_cast<int32_t>(i * stride);
    }
  }
}

template <typename T, typename Real>
void attention_typed(const Pools& pools, const PageLayout& layout, const AttentionInputs& inputs,
                     const AttentionArgs& args, const AttentionOutputs& outputs) {
  const std::vector<Sequence> sequences = sequences_of(pools, layout, inputs);
  int64_t longest = 1;
  for (const Sequence& sequence : sequences) {
    longest = std::max(longest, sequence.length);
  }
  const Call<T, Real> call(pools, layout, inputs, args, outputs, longest);
  std::get<0>(outputs).zero_();
  std::get<1>(outputs).fill_(-std::numeric_limits<double>::infinity());
  start_ring(call, sequences);

  struct Task {
    const Sequence* sequence;
    int64_t stride;
  };
  // Those of an index, of the sequences that have rows.
  std::vector<std::optional<IndexLists>> chosen(sequences.size());
  const int64_t heads = layout.num_kv_heads;
  const auto run = [&](const std::vector<Task>& tasks, const WholeLayers<Real>& whole) {
    const auto num = static_cast<int64_t>(tasks.size());
    tree_attention::parallel_tasks(num * heads, [&] {
      return [&, worker = StrideTask<T, Real>(call)](int64_t task) mutable {
        const Task& one = tasks[static_cast<size_t>(num - 1 - task / heads)];  // the longest lists first
        const auto& lists = chosen[static_cast<size_t>(one.sequence - sequences.data())];
        worker.run(*one.sequence, one.stride, task % heads, whole, lists.has_value() ? &*lists : nullptr);
      };
    });
  };
  std::vector<Task> gathers;
  for (const Sequence& sequence : sequences) {
    const int64_t rows = sequence.length - sequence.begin();
    if (rows == 0 || sequence.count == 0) continue;
    if (inputs.index.has_value()) {
      const int64_t first_row = sequence.first_row + sequence.begin() - sequence.first_token();
      chosen[static_cast<size_t>(&sequence - sequences.data())] = index_lists_cpu(
          pools, layout, *inputs.index, args, {sequence.index, first_row, sequence.begin(), sequence.length});
    }
    const int64_t seen =
        std::min(std::max(args.top_k * args.compression_rate, args.max_top_nodes), sequence.length);
    constexpr int64_t kReadsPerRow = 4;  // above so many reads of a row it pays to lay out whole layers
    const bool lays_out = rows * seen > kReadsPerRow * sequence.length;
    std::vector<Task> tasks;
    for (int64_t i = sequence.begin() / args.selection_stride; i * args.selection_stride < sequence.length;
         ++i) {
      (lays_out ? tasks : gathers).push_back({&sequence, i});
    }
    if (!lays_out) continue;
    WholeLayers<Real> whole;
    const int64_t depth =
        tree_attention::num_layers(sequence.length, args.max_top_nodes, args.compression_rate);
    whole.means.resize(static_cast<size_t>(depth));
    const Tensor means = layout.span > 0 && depth > 1 ? call.whole_means(sequence) : Tensor();
    for (int64_t layer = 0; layer < depth; ++layer) {
      const auto [keys, values] = call.whole_layer(sequence, layer);
      whole.layers.push_back(
          PackedLayers<Real>::make(keys, values, call.shape, call.rotation(), false, Type<T>{}));
      const int64_t nodes = keys.size(1);
      if (layer > 0 && means.defined() && nodes > args.top_k) {
        whole.means[static_cast<size_t>(layer)] = CpuPackedSpans<Real>(
            means, nodes, layout.tokens[layer] / layout.span, call.shape, call.rotation(), Type<T>{});
      }
    }
    run(tasks, whole);
  }
  if (!gathers.empty()) run(gathers, {});
}

}  // namespace

void attention_cpu(const Pools& pools, const PageLayout& layout, const AttentionInputs& inputs,
                   const AttentionArgs& args, const AttentionOutputs& outputs) {
  tree_attention::dispatch_storage(kOp, inputs.q.scalar_type(), [&](auto storage, auto real) {
    attention_typed<typename decltype(storage)::type, typename decltype(real)::type>(pools, layout, inputs,
                                                                                     args, outputs);
  });
}

}  // namespace htree::tree_cache
