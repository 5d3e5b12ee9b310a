// CPU kernels of index_loss (docs/semantics/index_loss.md §9.3), parallel over positions and, for the gradient of keys, over
// blocks. What a call holds beside arguments and results does not grow with the sequence: the forward goes twice through
// pieces of a position's tokens, the backward through ranges of blocks.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "host/dispatch.h"
#include "ops/index_loss/index_loss.h"
#include "ops/index_loss/index_rows.h"
#include "ops/tree/documents.h"

namespace htree::index_loss {
namespace {

// A drawn position: row `row` of batch `batch`, whose document begins at token `start`.
struct Position {
  int64_t batch, row, token, start, blocks;
};

std::vector<int64_t> document_starts(const Call& call) {
  if (!call.cu_seqlens.defined()) return {0, call.tokens()};
  const auto* given = call.cu_seqlens.const_data_ptr<int32_t>();
  const tree_attention::HostOffsets offsets =
      tree_attention::host_offsets(given, call.cu_seqlens.size(0), call.tokens());
  tree_attention::refuse_offsets(call.op, "cu_seqlens", offsets, "query", call.tokens());
  return offsets.starts;
}

// All positions of the call; one that nothing comes before is a ValueError.
std::vector<Position> resolve_positions(const Call& call) {
  const std::vector<int64_t> starts = document_starts(call);
  const int64_t* tokens = call.positions.const_data_ptr<int64_t>();
  std::vector<Position> positions;
  positions.reserve(call.batch() * call.rows());
  for (int64_t i = 0; i < call.batch() * call.rows(); ++i) {
    const int64_t token = tokens[i];
    const auto behind = std::upper_bound(starts.begin(), starts.end(), token);
    TORCH_CHECK_VALUE(token >= 0 && behind != starts.begin() && behind != starts.end(), call.op,
                      ": positions must be tokens of ", call.cu_seqlens.defined() ? "the documents" : "query",
                      ", from 0 to ", starts.back() - 1, ", got ", token);
    const int64_t start = behind[-1], blocks = (token - start) / call.block_size;
    TORCH_CHECK_VALUE(blocks > 0, call.op, ": positions must have a whole block of ", call.block_size,
                      " tokens before their own block, got ", token,
                      call.cu_seqlens.defined() ? " in the document from token " : "",
                      call.cu_seqlens.defined() ? std::to_string(start) : "");
    positions.push_back({i / call.rows(), i % call.rows(), token, start, blocks});
  }
  return positions;
}

// Pieces of work, each of `steps` steps, that pay for handing them over.
int64_t grain(int64_t steps) {
  return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, steps));
}

constexpr int64_t kPieceTokens = 256;  // products of a piece and a group of heads stay in an inner cache
constexpr int64_t kRangeBytes = int64_t{64} << 20;  // gradients of scores that are held at once

// What a block of a position's tokens comes to.
template <typename Real>
struct Block {
  Real mass = 0;      // of the attention, mean over heads
  Real score = 0;     // the largest product of the index; NaN where one is
  int64_t token = 0;  // that has it first
};

template <typename T, typename Real>
class Loss {
 public:
  using Stored = Storage<T>;

  explicit Loss(const Call& call)
      : loops_(loops_of<T>(HTREE_PICK_ISA(kIndexTables))),
        call_(call),
        positions_(resolve_positions(call)),
        kv_per_index_(call.kv_heads() / call.index_heads()) {}

  void forward(const Results& results) const {
    const auto& [loss, lse, index_lse] = results;
    const int64_t heads = call_.index_heads(), tasks = static_cast<int64_t>(positions_.size()) * heads;
    std::vector<double> divergences(tasks);
    at::parallel_for(0, tasks, grain(call_.tokens() * call_.key_dim()), [&](int64_t first, int64_t last) {
      Scratch scratch(*this);
      for (int64_t i = first; i < last; ++i) {
        const Position& position = positions_[i / heads];
        Real* of_heads = lse.template mutable_data_ptr<Real>() + (i / heads) * call_.heads();
        scratch.load(position, i % heads);
        scratch.attend(of_heads);
        divergences[i] = scratch.diverge(of_heads, index_lse.template mutable_data_ptr<Real>()[i]);
      }
    });
    double sum = 0;
    for (double divergence : divergences)
      sum += divergence;
    loss.fill_(sum / static_cast<double>(tasks));
  }

  void backward(const Tensor& lse, const Tensor& index_lse, const Tensor& dloss,
                const Gradients& gradients) const {
    const auto& [of_query, of_key] = gradients;
    fill_zeros({of_query, of_key});
    const int64_t rows = static_cast<int64_t>(positions_.size());
    const double factor = dloss.item<double>() / static_cast<double>(rows * call_.index_heads());
    // Positions ascend, so that those of a document lie side by side.
    for (int64_t first = 0; first < rows;) {
      int64_t last = first + 1;
      while (last < rows && positions_[last].batch == positions_[first].batch &&
             positions_[last].start == positions_[first].start) {
        ++last;
      }
      for (int64_t head = 0; head < call_.index_heads(); ++head) {
        differentiate({first, last, head}, lse, index_lse, static_cast<Real>(factor), gradients);
      }
      first = last;
    }
  }

 private:
  // Positions [first, last) of one document and an index head.
  struct Rows {
    int64_t first, last, head;
    int64_t count() const { return last - first; }
  };

  static const Stored* row_of(const Tensor& x, int64_t batch, int64_t token, int64_t head) {
    return reinterpret_cast<const Stored*>(x.const_data_ptr<T>()) + batch * x.stride(0) +
           token * x.stride(1) + head * x.stride(2);
  }

  // A thread's copy of a position's queries, and the products of a piece.
  class Scratch {
   public:
    explicit Scratch(const Loss& loss)
        : loss_(loss),
          call_(loss.call_),
          heads_(call_.heads() / call_.index_heads()),
          queries_(heads_ * call_.key_dim()),
          index_query_(call_.index_dim()),
          products_(call_.group() * kPieceTokens),
          scores_(kPieceTokens) {}

    void load(const Position& position, int64_t head) {
      position_ = &position;
      head_ = head;
      for (int64_t h = 0; h < heads_; ++h) {
        loss_.loops_.widen(row_of(call_.query, position.batch, position.token, head * heads_ + h),
                           call_.key_dim(), static_cast<Real>(call_.scale), &queries_[h * call_.key_dim()]);
      }
      loss_.loops_.widen(row_of(call_.index_query, position.batch, position.token, head), call_.index_dim(),
                         Real{1}, index_query_.data());
    }

    // lse[h] of the heads of this index head, over all tokens before the diagonal block.
    void attend(Real* lse) {
      const int64_t tokens = position_->blocks * call_.block_size;
      std::vector<Real> largest(heads_, -std::numeric_limits<Real>::max()), sums(heads_, 0);
      for (int64_t first = 0; first < tokens; first += kPieceTokens) {
        const int64_t count = std::min(kPieceTokens, tokens - first);
        for_products(first, count, [&](int64_t h, const Real* products) {
          // A NaN does not raise the maximum; the sum keeps it.
          const Real best = std::max(largest[h], *std::max_element(products, products + count));
          sums[h] *= std::exp(largest[h] - best);
          largest[h] = best;
          sums[h] += loss_.loops_.sum_exponentials(products, count, best);
        });
      }
      for (int64_t h = 0; h < heads_; ++h) {
        lse[head_ * heads_ + h] = largest[h] + std::log(sums[h]);
      }
    }

    // The divergence of the block scores from the masses.
    double diverge(const Real* lse, Real& index_lse) {
      // About the largest score so far, which keeps sums of large products exact.
      double largest = -std::numeric_limits<double>::infinity(), sum = 0, cross = 0, mass = 0;
      const auto reference = [](double x) { return std::isinf(x) && x < 0 ? 0.0 : x; };
      for_blocks(lse, 0, position_->blocks, [&](int64_t, const Block<Real>& block) {
        const double score = static_cast<double>(block.score), p = static_cast<double>(block.mass);
        if (score > largest) {
          sum = sum * std::exp(largest - score) + 1;
          cross += mass == 0 ? 0 : mass * (score - reference(largest));
          largest = score;
        } else {
          sum += score == largest ? 1 : std::exp(score - largest);
        }
        mass += p;
        cross += p == 0 ? 0 : p * (std::log(p) - (score - reference(largest)));
      });
      const double above =
          largest - reference(largest) + std::log(sum);  // of the log-sum-exp, over the reference
      index_lse = static_cast<Real>(reference(largest) + above);
      return cross + mass * above;
    }

    // visit(block, Block) for blocks [first, last) in order.
    template <typename Visit>
    void for_blocks(const Real* lse, int64_t first, int64_t last, const Visit& visit) {
      const int64_t size = call_.block_size, per_piece = std::max<int64_t>(1, kPieceTokens / size);
      std::vector<Block<Real>> blocks(per_piece);
      for (int64_t block = first; block < last; block += per_piece) {
        const int64_t count = std::min(per_piece, last - block);
        std::fill(blocks.begin(), blocks.end(), Block<Real>{0, -std::numeric_limits<Real>::infinity(), -1});
        for (int64_t token = block * size; token < (block + count) * size; token += kPieceTokens) {
          const int64_t tokens = std::min(kPieceTokens, (block + count) * size - token);
          add_masses(lse, token, tokens, block, blocks.data());
          add_scores(token, tokens, block, blocks.data());
        }
        for (int64_t i = 0; i < count; ++i)
          visit(block + i, blocks[i]);
      }
    }

   private:
    const Stored* key_of(const Tensor& x, int64_t token, int64_t head) const {
      return row_of(x, position_->batch, position_->start + token, head);
    }

    // visit(h, products) for each head of the index head; tokens count from the document's first one.
    template <typename Visit>
    void for_products(int64_t first, int64_t count, const Visit& visit) {
      const int64_t group = call_.group();
      for (int64_t kv = 0; kv < loss_.kv_per_index_; ++kv) {
        loss_.loops_.multiply(&queries_[kv * group * call_.key_dim()], group,
                              key_of(call_.key, first, head_ * loss_.kv_per_index_ + kv), call_.key.stride(1),
                              count, call_.key_dim(), products_.data(), kPieceTokens);
        for (int64_t g = 0; g < group; ++g)
          visit(kv * group + g, &products_[g * kPieceTokens]);
      }
    }

    void add_masses(const Real* lse, int64_t first, int64_t count, int64_t first_block, Block<Real>* blocks) {
      const Real share = Real{1} / static_cast<Real>(heads_);
      for_products(first, count, [&](int64_t h, const Real* products) {
        for (int64_t i = 0; i < count;) {
          const int64_t block = (first + i) / call_.block_size;
          const int64_t end = std::min(count, (block + 1) * call_.block_size - first);
          const Real sum = loss_.loops_.sum_exponentials(products + i, end - i, lse[head_ * heads_ + h]);
          blocks[block - first_block].mass += share * sum;
          i = end;
        }
      });
    }

    void add_scores(int64_t first, int64_t count, int64_t first_block, Block<Real>* blocks) {
      loss_.loops_.multiply(index_query_.data(), 1, key_of(call_.index_key, first, head_),
                            call_.index_key.stride(1), count, call_.index_dim(), scores_.data(),
                            kPieceTokens);
      for (int64_t i = 0; i < count; ++i) {
        Block<Real>& block = blocks[(first + i) / call_.block_size - first_block];
        if (block.token < 0 || scores_[i] > block.score || std::isnan(scores_[i])) {
          block.score = scores_[i];
          block.token = first + i;
        }
      }
    }

    const Loss& loss_;
    const Call& call_;
    const int64_t heads_;  // of the attention for each index head
    const Position* position_ = nullptr;
    int64_t head_ = 0;
    std::vector<Real> queries_, index_query_;  // [heads, K], times the scale; [d]
    std::vector<Real> products_, scores_;      // [group, tokens], [tokens]
  };

  // Gradients of `rows`: for each range of blocks those of the scores, then what they give to keys.
  void differentiate(const Rows& rows, const Tensor& lse, const Tensor& index_lse, Real factor,
                     const Gradients& gradients) const {
    const auto& [of_query, of_key] = gradients;
    const int64_t d = call_.index_dim(), blocks = positions_[rows.last - 1].blocks;
    const int64_t entry = rows.count() * static_cast<int64_t>(sizeof(Real) + sizeof(int64_t));
    const int64_t range = std::clamp<int64_t>(kRangeBytes / entry, 1, blocks);
    std::vector<Real> of_scores(rows.count() * range), of_rows(rows.count() * d, 0);
    std::vector<int64_t> tokens(rows.count() * range);
    const Real* lse_data = lse.const_data_ptr<Real>();
    const Real* index_lse_data = index_lse.const_data_ptr<Real>();
    for (int64_t first = 0; first < blocks; first += range) {
      const int64_t last = std::min(first + range, blocks);
      at::parallel_for(0, rows.count(), grain(range * call_.key_dim()), [&](int64_t begin, int64_t end) {
        Scratch scratch(*this);
        for (int64_t i = begin; i < end; ++i) {
          const Position& position = positions_[rows.first + i];
          const int64_t index = (rows.first + i) * call_.index_heads() + rows.head;
          scratch.load(position, rows.head);
          scratch.for_blocks(lse_data + (rows.first + i) * call_.heads(), first,
                             std::min(last, position.blocks), [&](int64_t block, const Block<Real>& x) {
                               const Real guess = std::exp(x.score - index_lse_data[index]);
                               const Real gradient = factor * (guess - x.mass);
                               of_scores[i * range + block - first] = gradient;
                               tokens[i * range + block - first] = x.token;
                               loops_.add_scaled(row_of(call_.index_key, position.batch,
                                                        position.start + x.token, rows.head),
                                                 d, gradient, &of_rows[i * d]);
                             });
        }
      });
      if (of_key.defined()) {
        add_to_keys(rows, first, last, range, of_scores, tokens, of_key);
      }
    }
    if (of_query.defined()) {
      store_queries(rows, of_rows, of_query);
    }
  }

  // The keys of blocks [first, last), which no other range has.
  void add_to_keys(const Rows& rows, int64_t first, int64_t last, int64_t range,
                   const std::vector<Real>& of_scores, const std::vector<int64_t>& tokens,
                   const Tensor& of_key) const {
    const int64_t d = call_.index_dim();
    at::parallel_for(first, last, grain(rows.count() * d), [&](int64_t begin, int64_t end) {
      // A block may be as long as the document, but no more of its tokens have a maximum than there are rows.
      std::vector<Real> sum(d);
      std::vector<std::pair<int64_t, int64_t>> found;  // (token, row)
      for (int64_t block = begin; block < end; ++block) {
        found.clear();
        for (int64_t i = 0; i < rows.count(); ++i) {
          if (block < positions_[rows.first + i].blocks)
            found.emplace_back(tokens[i * range + block - first], i);
        }
        std::sort(found.begin(), found.end());
        for (size_t i = 0; i < found.size();) {
          const int64_t token = found[i].first;
          std::fill(sum.begin(), sum.end(), Real{0});
          for (; i < found.size() && found[i].first == token; ++i) {
            const Position& position = positions_[rows.first + found[i].second];
            loops_.add_scaled(row_of(call_.index_query, position.batch, position.token, rows.head), d,
                              of_scores[found[i].second * range + block - first], sum.data());
          }
          const Position& position = positions_[rows.first];
          loops_.narrow(sum.data(), d,
                        mutable_row(of_key, position.batch, position.start + token, rows.head));
        }
      }
    });
  }

  // Positions that were drawn twice lie side by side.
  void store_queries(const Rows& rows, std::vector<Real>& of_rows, const Tensor& of_query) const {
    const int64_t d = call_.index_dim();
    for (int64_t i = 0; i < rows.count();) {
      const Position& position = positions_[rows.first + i];
      Real* sum = &of_rows[i * d];
      for (++i; i < rows.count() && positions_[rows.first + i].token == position.token; ++i) {
        for (int64_t c = 0; c < d; ++c)
          sum[c] += of_rows[i * d + c];
      }
      loops_.narrow(sum, d, mutable_row(of_query, position.batch, position.token, rows.head));
    }
  }

  static Stored* mutable_row(const Tensor& x, int64_t batch, int64_t token, int64_t head) {
    return reinterpret_cast<Stored*>(x.mutable_data_ptr<T>()) + batch * x.stride(0) + token * x.stride(1) +
           head * x.stride(2);
  }

  const IndexRows<Stored, Real>& loops_;
  const Call& call_;
  const std::vector<Position> positions_;
  const int64_t kv_per_index_;
};

template <typename F>
void with_loss(const Call& call, F&& f) {
  dispatch_dtype(call.op, call.query.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    f(Loss<T, std::conditional_t<std::is_same_v<T, double>, double, float>>(call));
  });
}

}  // namespace

void forward_cpu(const Call& call, const Results& results) {
  with_loss(call, [&](const auto& loss) { loss.forward(results); });
}

void backward_cpu(const Call& call, const Tensor& lse, const Tensor& index_lse, const Tensor& dloss,
                  const Gradients& gradients) {
  with_loss(call, [&](const auto& loss) { loss.backward(lse, index_lse, dloss, gradients); });
}

}  // namespace htree::index_loss
