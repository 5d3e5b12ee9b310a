// CPU kernels of select_blocks (docs/semantics/selection.md §9), parallel over tiles of queries. Keys are packed once
// for all queries of a chunk, so that a lane of a vector has a block of its own.
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "host/dispatch.h"
#include "ops/selection/cpu/block_rows.h"
#include "ops/selection/plan/block_chunks.h"
#include "ops/selection/select_blocks.h"

namespace htree::tree_attention {
namespace {

// One call over sequences of equal length. layers[i] are those of blocks of block_size * rate^i tokens, whose scores are the
// largest of the blocks below.
template <typename T, typename Real>
class BlockSelection {
 public:
  using Stored = Storage<T>;

  BlockSelection(const Tensor& index_query, const Tensor& index_key, const BlockOptions& options,
                 int64_t rate, const std::vector<BlockLayer>& layers)
      : loops_(loops_of<T>(HTREE_PICK_ISA(kBlockTables))),
        query_(index_query),
        key_(index_key),
        options_(options),
        rate_(rate),
        layers_(layers),
        heads_(index_query.size(2)),
        d_(index_query.size(3)),
        leaders_(std::get<0>(layers[0].lists).size(1)),
        first_token_(index_key.size(1) - index_query.size(1)),
        chunks_(block_chunks(index_query.size(0) * heads_, diagonal(leaders_ - 1), leaders_,
                             options.block_size, d_, loops_.width, loops_.rows, sizeof(Real))),
        packed_(chunks_.heads * chunks_.segment * group_elements()),
        block_scores_(chunks_.heads * chunks_.rows * row_elements()) {}

  void run() {
    const int64_t num_heads = query_.size(0) * heads_;
    for (int64_t head = 0; head < num_heads; head += chunks_.heads) {
      const int64_t count = std::min(chunks_.heads, num_heads - head);
      segment_in_memory_ = {-1, -1};
      for (int64_t leader = 0; leader < leaders_; leader += chunks_.rows) {
        run_chunk(head, count, leader, std::min(leader + chunks_.rows, leaders_));
      }
    }
  }

 private:
  int64_t diagonal(int64_t leader) const {
    return (first_token_ + leader * options_.stride) / options_.block_size;
  }
  int64_t group_elements() const { return chunks_.tokens * d_ * loops_.width; }
  int64_t row_elements() const { return chunks_.row_elements(loops_.width); }

  const Stored* query_row(int64_t head, int64_t leader) const {
    const auto* data = reinterpret_cast<const Stored*>(query_.const_data_ptr<T>());
    return data + head / heads_ * query_.stride(0) + leader * options_.stride * query_.stride(1) +
           head % heads_ * query_.stride(2);
  }
  const Stored* key_row(int64_t head, int64_t token) const {
    const auto* data = reinterpret_cast<const Stored*>(key_.const_data_ptr<T>());
    return data + head / heads_ * key_.stride(0) + token * key_.stride(1) + head % heads_ * key_.stride(2);
  }
  template <typename Element>
  Element* list(const Tensor& x, int64_t head, int64_t leader) const {
    return x.mutable_data_ptr<Element>() + head / heads_ * x.stride(0) + leader * x.stride(1) +
           head % heads_ * x.stride(2);
  }
  // Of a leader of the chunk that begins at `chunk`; `slot` is the head's place among those of the chunk.
  Real* scores_of(int64_t slot, int64_t row) {
    return block_scores_.data() + (slot * chunks_.rows + row) * row_elements();
  }
  Real* packed_of(int64_t slot) { return packed_.data() + slot * chunks_.segment * group_elements(); }

  // Leaders [begin, end) of `count` heads.
  void run_chunk(int64_t head, int64_t count, int64_t begin, int64_t end) {
    const int64_t groups = ceil_div(diagonal(end - 1), loops_.width);
    for (int64_t group = 0; group < groups; group += chunks_.segment) {
      for (int64_t token = 0; token < options_.block_size; token += chunks_.tokens) {
        const int64_t tokens = std::min(chunks_.tokens, options_.block_size - token);
        pack(head, count, group, token, tokens);
        score(head, count, begin, end, group, token, tokens);
      }
    }
    select(head, count, begin, end);
  }

  void pack(int64_t head, int64_t count, int64_t group, int64_t token, int64_t tokens) {
    if (segment_in_memory_ == std::pair(group, token)) {
      return;
    }
    segment_in_memory_ = {group, token};
    const int64_t groups = std::min(chunks_.segment, chunks_.groups - group);
    const int64_t num_blocks = diagonal(leaders_ - 1);
    at::parallel_for(0, count * groups, grain(tokens * d_ * loops_.width), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t block = (group + i % groups) * loops_.width;
        Real* to = packed_of(i / groups) + i % groups * group_elements();
        loops_.pack(key_row(head + i / groups, block * options_.block_size + token), key_.stride(1),
                    std::min(loops_.width, num_blocks - block), options_.block_size, tokens, d_, to);
      }
    });
  }

  void score(int64_t head, int64_t count, int64_t begin, int64_t end, int64_t group, int64_t token,
             int64_t tokens) {
    const int64_t tiles = ceil_div(end - begin, loops_.rows);
    const int64_t steps = chunks_.segment * tokens * d_ * loops_.rows;
    at::parallel_for(0, count * tiles, grain(steps), [&](int64_t first, int64_t last) {
      std::vector<Real> queries(loops_.rows * d_);
      for (int64_t i = first; i < last; ++i) {
        // Long rows alternate with short ones, or the last thread would have most of the triangle.
        const int64_t turn = i % tiles, slot = i / tiles;
        const int64_t row = (turn % 2 == 0 ? turn / 2 : tiles - 1 - turn / 2) * loops_.rows;
        const int64_t last_leader = std::min(begin + row + loops_.rows, end) - 1;
        const int64_t groups =
            std::min(chunks_.segment, ceil_div(diagonal(last_leader), loops_.width) - group);
        if (groups <= 0) continue;
        for (int64_t r = 0; r < loops_.rows; ++r) {  // a short tile repeats its last query
          loops_.widen(query_row(head + slot, std::min(begin + row + r, last_leader)), d_, &queries[r * d_]);
          if (token == 0) {
            std::fill_n(scores_of(slot, row + r) + group * loops_.width, groups * loops_.width,
                        -std::numeric_limits<Real>::infinity());
          }
        }
        loops_.score(queries.data(), packed_of(slot), groups, group_elements(), tokens, d_,
                     scores_of(slot, row) + group * loops_.width, row_elements());
      }
    });
  }

  void select(int64_t head, int64_t count, int64_t begin, int64_t end) {
    const int64_t rows = end - begin;
    at::parallel_for(
        0, count * rows, grain(row_elements() + options_.count), [&](int64_t first, int64_t last) {
          std::vector<uint64_t> scratch(ceil_div(loops_.scratch_bytes(diagonal(end - 1) + 1), 8));
          for (int64_t i = first; i < last; ++i) {
            const int64_t slot = i / rows, row = i % rows, leader = begin + row;
            Real* const scores = scores_of(slot, row);
            int64_t own = diagonal(leader);
            for (size_t layer = 0; layer < layers_.size(); ++layer, own /= rate_) {
              if (first_token_ + leader * options_.stride < layers_[layer].first_token) {
                break;  // so are those of the layers above
              }
              const auto& [blocks, list_scores] = layers_[layer].lists;
              loops_.select(scores, own + 1, options_, scratch.data(),
                            list<int32_t>(blocks, head + slot, leader),
                            list<Real>(list_scores, head + slot, leader));
              if (layer + 1 < layers_.size()) fold(scores, own / rate_);
            }
          }
        });
  }

  // Leaves the scores of `count` blocks of the next layer in the place of those of their parts.
  void fold(Real* scores, int64_t count) const {
    for (int64_t block = 0; block < count; ++block) {
      const Real* parts = scores + block * rate_;
      scores[block] = *std::max_element(parts, parts + rate_);
    }
  }

  // Pieces of work, each of `steps` steps, that pay for handing them over.
  static int64_t grain(int64_t steps) {
    return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, steps));
  }

  const BlockRows<Stored, Real>& loops_;
  const Tensor query_, key_;
  const BlockOptions options_;
  const int64_t rate_;
  const std::vector<BlockLayer>& layers_;
  const int64_t heads_, d_, leaders_, first_token_;
  const BlockChunks chunks_;
  std::vector<Real> packed_;                       // [heads, segment, tokens, d, width]
  std::vector<Real> block_scores_;                 // [heads, rows, blocks in whole groups]
  std::pair<int64_t, int64_t> segment_in_memory_;  // first group and first token
};

}  // namespace

void select_blocks_cpu(const Tensor& index_query, const Tensor& index_key, const BlockOptions& options,
                       const BlockLists& lists) {
  select_block_layers_cpu(index_query, index_key, options, /*rate=*/1, {{lists}});
}

void select_block_layers_cpu(const Tensor& index_query, const Tensor& index_key, const BlockOptions& options,
                             int64_t rate, const std::vector<BlockLayer>& layers) {
  dispatch_dtype("select_blocks", index_query.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
    BlockSelection<T, Real>(index_query, index_key, options, rate, layers).run();
  });
}

void select_blocks_varlen_cpu(const char* op, const Tensor& index_query, const Tensor& index_key,
                              const Documents& documents, const BlockOptions& options,
                              const BlockLists& lists) {
  const auto& [blocks, scores] = lists;
  const Tensor cu_seq_q = documents.cu_seq_q.contiguous(), cu_seq_k = documents.cu_seq_k.contiguous();
  const int64_t size = cu_seq_q.size(0), num_queries = index_query.size(0), num_keys = index_key.size(0);
  const HostOffsets queries = host_offsets(cu_seq_q.const_data_ptr<int32_t>(), size, num_queries);
  const HostOffsets keys = host_offsets(cu_seq_k.const_data_ptr<int32_t>(), size, num_keys);
  refuse_offsets(op, "cu_seq_q", queries, "index_query", num_queries);
  refuse_offsets(op, "cu_seq_k", keys, "index_key", num_keys);
  for (int64_t i = 0; i + 1 < size; ++i) {
    refuse_document(op, i, queries.count(i), keys.count(i), documents, options.stride);
  }
  blocks.fill_(-1);
  scores.fill_(-std::numeric_limits<double>::infinity());
  for (int64_t i = 0; i + 1 < size && blocks.numel() > 0; ++i) {
    const int64_t first = queries.starts[i], end = queries.starts[i + 1];
    if (first == end) continue;
    const auto of_leaders = [&](const Tensor& x) {
      return x.slice(0, first, end, options.stride).unsqueeze(0);
    };
    select_blocks_cpu(index_query.slice(0, first, end).unsqueeze(0),
                      index_key.narrow(0, keys.starts[i], keys.count(i)).unsqueeze(0), options,
                      {of_leaders(blocks), of_leaders(scores)});
  }
}

}  // namespace htree::tree_attention
