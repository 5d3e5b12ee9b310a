// CPU decode attention: a task is a (sequence, kv head, split of the tokens); the splits are
// merged in their order.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "host/dispatch.h"
#include "ops/compressed_kv/compressed_kv.h"
#include "ops/compressed_kv/cpu_kernels.h"

namespace htree::compressed_kv {
namespace {

// x [n] times the orthonormal H_n in Sylvester order, in place.
void hadamard_row(float* x, int n) {
  for (int distance = 1; distance < n; distance *= 2) {
    for (int i = 0; i < n; ++i) {
      if ((i & distance) == 0) {
        const float low = x[i];
        const float high = x[i + distance];
        x[i] = low + high;
        x[i + distance] = low - high;
      }
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(n));
  for (int i = 0; i < n; ++i) {
    x[i] *= scale;
  }
}

// From q [B, H, D], in which the queries of a head are heads of their own, to [G, B, H, D], times the scale of the scores: one query for each slot, which is a place
// in a group of G kv heads, and q alone for G = 0 and 1. Slot j of the expanded query of kv head g is H_G[j,
// g] / sqrt(G) * (q H_D).
std::vector<float> transformed_queries(const DecodeProblem& p, std::vector<float> q) {
  const int64_t rows = p.batch * p.num_heads;
  const int64_t group = p.hadamard_group > 1 ? p.hadamard_group : 1;
  if (p.hadamard_group > 0) {
    for (int64_t row = 0; row < rows; ++row) {
      hadamard_row(q.data() + row * p.key_dim, p.key_dim);
    }
  }
  std::vector<float> slots(static_cast<size_t>(group * rows * p.key_dim));
  const auto factor = static_cast<float>(p.scale / std::sqrt(static_cast<double>(group)));
  for (int64_t slot = 0; slot < group; ++slot) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = row % p.num_heads / p.heads_per_kv() % group;
      const bool negative = (__builtin_popcountll(static_cast<uint64_t>(slot & own)) & 1) != 0;
      const float sign = negative ? -factor : factor;
      for (int64_t d = 0; d < p.key_dim; ++d) {
        slots[static_cast<size_t>((slot * rows + row) * p.key_dim + d)] =
            sign * q[static_cast<size_t>(row * p.key_dim + d)];
      }
    }
  }
  return slots;
}

// Tokens of a split where the caller fixes none. It depends neither on the batch nor on the threads, so that
// results do not depend on them either.
constexpr int64_t kSplitTokens = 1024;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t length_of(const OptionalTensor& lengths, int64_t sequence, int64_t capacity) {
  return lengths.has_value() ? std::clamp<int64_t>(lengths->const_data_ptr<int32_t>()[sequence], 0, capacity)
                             : capacity;
}

template <typename Storage>
class Decoder {
 public:
  Decoder(const DecodeProblem& p, const DecodeTensors& t)
      : p_(p),
        t_(t),
        keys_(t.k),
        values_(t.v),
        group_(std::max(1, p.hadamard_group)),
        split_(p.split_size > 0 ? p.split_size : kSplitTokens),
        num_comp_((p.capacity + split_ - 1) / split_),
        num_splits_(num_comp_ + (p.window + kSplitTokens - 1) / kSplitTokens),
        queries_(expand_queries(static_cast<const Storage*>(t.q.const_data_ptr()))) {
    check_pages();
    const int64_t rows = p.batch * p.num_heads * num_splits_;
    max_.resize(rows);
    sum_.resize(rows);
    acc_.resize(rows * p.value_dim);
  }

  void run() {
    const int64_t num_tasks = p_.batch * p_.num_kv_heads * num_splits_;
    at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> k(static_cast<size_t>(kTileTokens * p_.key_dim));
      std::vector<float> v(static_cast<size_t>(kTileTokens * p_.value_dim));
      std::vector<float> scores(static_cast<size_t>(p_.heads_per_kv() * kTileTokens));
      for (int64_t task = begin; task < end; ++task) {
        attend(task, k.data(), v.data(), scores.data());
      }
    });
  }

  // Merges as docs/semantics/tree_attention.md §1.7 says, in the order of the splits.
  void merge(Storage* out, float* lse) const {
    const int64_t head_dim = p_.value_dim;
    at::parallel_for(0, p_.batch * p_.num_heads, 8, [&](int64_t begin, int64_t end) {
      std::vector<float> total(static_cast<size_t>(head_dim));
      for (int64_t row = begin; row < end; ++row) {
        const float* max = max_.data() + row * num_splits_;
        float top = -kInfinity;
        for (int64_t s = 0; s < num_splits_; ++s) {
          top = std::max(top, max[s]);
        }
        float sum = 0;
        std::fill(total.begin(), total.end(), 0.0f);
        for (int64_t s = 0; s < num_splits_; ++s) {
          const float part = sum_[row * num_splits_ + s];
          if (part == 0) {
            continue;  // no token of the split takes part
          }
          const float factor = max[s] == -kInfinity ? 1.0f : std::exp(max[s] - top);
          sum += factor * part;
          const float* acc = acc_.data() + (row * num_splits_ + s) * head_dim;
          for (int64_t d = 0; d < head_dim; ++d) {
            total[d] += factor * acc[d];
          }
        }
        for (int64_t d = 0; d < head_dim; ++d) {
          total[d] = sum == 0 ? 0.0f : total[d] / sum;
        }
        narrow_row(total.data(), head_dim, out + row * head_dim);
        lse[row] = sum == 0 ? -kInfinity : (std::isnan(sum) ? sum : top + std::log(sum));
      }
    });
  }

 private:
  static void narrow_row(const float* x, int64_t count, Storage* to) {
    using Torch = std::conditional_t<std::is_same_v<Storage, Fp16>, c10::Half,
                                     std::conditional_t<std::is_same_v<Storage, Bf16>, c10::BFloat16, float>>;
    auto* out = reinterpret_cast<Torch*>(to);
    for (int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<Torch>(x[i]);
    }
  }

  std::vector<float> expand_queries(const Storage* q) const {
    std::vector<float> wide(static_cast<size_t>(p_.batch * p_.num_heads * p_.key_dim));
    for (int64_t row = 0; row < p_.batch * p_.num_heads; ++row) {
      loops_of<Storage>(row_kernels())
          .widen(q + row * p_.key_dim, p_.key_dim, wide.data() + row * p_.key_dim);
    }
    return transformed_queries(p_, wide);
  }

  void check_pages() const {
    if (!t_.block_table.has_value()) {
      return;
    }
    const int32_t* table = t_.block_table->const_data_ptr<int32_t>();
    for (int64_t b = 0; b < p_.batch; ++b) {
      const int64_t used = (length_of(t_.comp_len, b, p_.capacity) + p_.page - 1) / p_.page;
      for (int64_t i = 0; i < used; ++i) {
        const int64_t page = table[b * p_.max_pages + i];
        TORCH_CHECK_INDEX(page >= 0 && page < p_.num_pages, "kv_decode_attention: block_table[", b, ", ", i,
                          "] must be between 0 and ", p_.num_pages - 1, ", got ", page);
      }
    }
  }

  // The number of a token's row in the compressed tensors.
  int64_t row_of(int64_t sequence, int64_t kv_head, int64_t token) const {
    if (p_.page == 0) {
      return (sequence * p_.num_kv_heads + kv_head) * p_.capacity + token;
    }
    const int64_t page = t_.block_table->const_data_ptr<int32_t>()[sequence * p_.max_pages + token / p_.page];
    return (page * p_.num_kv_heads + kv_head) * p_.page + token % p_.page;
  }

  void attend(int64_t task, float* k, float* v, float* scores) {
    const int64_t split = task % num_splits_;
    const int64_t kv_head = task / num_splits_ % p_.num_kv_heads;
    const int64_t sequence = task / num_splits_ / p_.num_kv_heads;
    const int64_t heads = p_.heads_per_kv();
    const int64_t first_row = sequence * p_.num_heads + kv_head * heads;
    std::vector<float> max(heads, -kInfinity);
    std::vector<float> sum(heads, 0.0f);
    std::vector<float> acc(heads * p_.value_dim, 0.0f);
    const bool window = split >= num_comp_;
    const int64_t step = window ? kSplitTokens : split_;
    const int64_t begin = (window ? split - num_comp_ : split) * step;
    const int64_t length =
        window ? length_of(t_.win_len, sequence, p_.window) : length_of(t_.comp_len, sequence, p_.capacity);
    const int64_t end = std::min(begin + step, length);
    const bool causal = window && p_.num_queries > 1;
    std::vector<int> seen(causal ? heads : 0);
    for (int64_t token = begin; token < end; token += kTileTokens) {
      const Tile tile{static_cast<int>(std::min<int64_t>(kTileTokens, end - token)), p_.key_dim, p_.value_dim,
                      static_cast<int>(heads), causal ? seen.data() : nullptr};
      for (size_t h = 0; h < seen.size(); ++h) {
        const int64_t hidden = p_.num_queries - 1 - static_cast<int64_t>(h) % p_.num_queries;
        seen[h] = static_cast<int>(std::clamp<int64_t>(length - hidden - token, 0, tile.num_tokens));
      }
      std::fill(scores, scores + heads * kTileTokens, 0.0f);
      const int64_t group_head = kv_head / group_ * group_;
      for (int64_t slot = 0; slot < group_; ++slot) {
        load_tile(tile, sequence, group_head + slot, token, window, /*of_keys=*/true, k);
        const float* q = queries_.data() + (slot * p_.batch * p_.num_heads + first_row) * p_.key_dim;
        row_kernels().add_scores(tile, q, k, scores);
      }
      load_tile(tile, sequence, kv_head, token, window, /*of_keys=*/false, v);
      row_kernels().accumulate(tile, v, scores, max.data(), sum.data(), acc.data());
    }
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = (first_row + h) * num_splits_ + split;
      max_[at] = max[h];
      sum_[at] = sum[h];
      std::copy_n(acc.data() + h * p_.value_dim, p_.value_dim, acc_.data() + at * p_.value_dim);
    }
  }

  void load_tile(const Tile& tile, int64_t sequence, int64_t kv_head, int64_t token, bool window,
                 bool of_keys, float* to) const {
    const auto& kernels = loops_of<Storage>(row_kernels());
    const Compressed& from = of_keys ? t_.k : t_.v;
    const CompressedRows& rows = of_keys ? keys_ : values_;
    const auto* dense =
        static_cast<const Storage*>(of_keys ? t_.k_win.const_data_ptr() : t_.v_win.const_data_ptr());
    const int head_dim = from.format.head_dim;
    for (int i = 0; i < tile.num_tokens; ++i, to += head_dim) {
      if (window) {
        const int64_t row = (sequence * p_.num_kv_heads + kv_head) * p_.window + token + i;
        kernels.widen(dense + row * head_dim, head_dim, to);
      } else {
        const int64_t row = row_of(sequence, kv_head, token + i);
        kernels.expand(rows.bitmap(row), rows.values(row), rows.scale(row), from.format, to);
      }
    }
  }

  const DecodeProblem& p_;
  const DecodeTensors& t_;
  CompressedRows keys_;
  CompressedRows values_;
  int64_t group_;
  int64_t split_;
  int64_t num_comp_;
  int64_t num_splits_;
  std::vector<float> queries_;  // [G, B, H, D], transformed, times the scale
  std::vector<float> max_;      // [B, H, splits]
  std::vector<float> sum_;
  std::vector<float> acc_;  // [B, H, splits, value_dim]
};

}  // namespace

void decode_cpu(const DecodeProblem& p, const DecodeTensors& t, const at::Tensor& out,
                const at::Tensor& lse) {
  dispatch_dtype("kv_decode_attention", t.q.scalar_type(), FloatTypes{}, [&](auto tag) {
    using Storage = htree::Storage<typename decltype(tag)::type>;
    Decoder<Storage> decoder(p, t);
    decoder.run();
    decoder.merge(static_cast<Storage*>(out.mutable_data_ptr()), lse.mutable_data_ptr<float>());
  });
}

}  // namespace htree::compressed_kv
