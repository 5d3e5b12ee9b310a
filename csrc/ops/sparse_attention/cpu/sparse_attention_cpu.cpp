// CPU kernels of sparse_attention (docs/semantics/sparse_attention.md §8): the loops of tree attention over the tokens, with
// lists that a caller gave. No result depends on the number of threads.
//
// Forward: a task takes a few queries of one key/value head. Backward: one key/value head at a time, in chunks of queries;
// one thread makes P, dS and dq of a query, and one adds dk and dv of a block in the order of the queries. Temporary
// memory: copies of keys and values in fp32 (packed_layer.h), twice for gradients, about G n block_size elements per
// thread, and for gradients the chunk (gradient_chunk.h) and the sums of one head.
#include <vector>

#include "ops/sparse_attention/cpu/gradient_chunk.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace htree::tree_attention {
namespace {

constexpr int64_t kTaskQueries = 32;

// Writes the blocks of a list that a query in block `diagonal` can see, ascending and each once, and returns their number.
int64_t visible_blocks(const int32_t* list, int64_t width, int64_t diagonal, int32_t* visible) {
  int64_t count = 0;
  bool ascending = true;
  for (int64_t i = 0; i < width; ++i) {
    if (list[i] < 0 || list[i] > diagonal) continue;
    ascending = ascending && (count == 0 || visible[count - 1] < list[i]);
    visible[count++] = list[i];
  }
  if (ascending) return count;
  std::sort(visible, visible + count);
  return std::unique(visible, visible + count) - visible;
}

// What a query at `token` meets, given its visible blocks: all of their tokens up to its own.
Candidates candidates_in(const int32_t* visible, int64_t count, int64_t token, int64_t block_size) {
  Candidates candidates;
  candidates.parents = visible;
  candidates.num_parents = count;
  candidates.rightmost = token;
  const bool holds_diagonal = count > 0 && visible[count - 1] == token / block_size;
  candidates.count = holds_diagonal ? candidate_count(count, token, block_size) : count * block_size;
  candidates.regular = true;
  return candidates;
}

QueryShape shape_of(const SparseCall& call, int64_t lanes) {
  const int64_t most = std::min(call.x.blocks.size(3), call.num_blocks());
  return query_shape(call.x.query, call.kv_heads(), call.value_dim(), call.block_size,
                     std::max<int64_t>(most, 1),
                     /*selection=*/{}, lanes);
}

// The list of query row `i` and K/V head h, and its width.
const int32_t* list_of(const SparseCall& call, int64_t b, int64_t h, int64_t i) {
  const Tensor& blocks = call.x.blocks;
  const int64_t head = blocks.size(2) == 1 ? 0 : h;
  return blocks.const_data_ptr<int32_t>() + b * blocks.stride(0) + i / call.stride * blocks.stride(1) +
         head * blocks.stride(2);
}

// A softmax's sum over its keys and that with the sink, as 1 / sum and the keys' share of the whole.
template <typename Real>
struct Denominator {
  Real scale;  // of the weighted values, which are relative to `max`
  Real lse;
};
template <typename Real>
Denominator<Real> denominator(Real max, Real sum, const Real* sink) {
  const Real lse = max + std::log(sum);
  if (sink == nullptr) return {Real{1} / sum, lse};
  const Real top = std::max(max, *sink);
  const Real keys = std::exp(max - top);
  return {keys / (sum * keys + std::exp(*sink - top)), lse};
}

template <typename T, typename Real>
void forward_typed(const SparseCall& call, const Tensor& out, const Tensor& lse) {
  const auto& [q, k, v, blocks, sinks] = call.x;
  const QueryShape shape = shape_of(call, query_kernels<Real>().lanes);
  const auto layers = PackedLayers<Real>::make(k, v, shape, /*rotation=*/{}, /*gradients=*/false, Type<T>{});
  const int64_t group = call.group(), width = blocks.size(3), value_dim = call.value_dim();
  const Real* sink = sinks.defined() ? sinks.const_data_ptr<Real>() : nullptr;
  const T* q_data = q.const_data_ptr<T>();
  T* out_data = out.mutable_data_ptr<T>();
  Real* lse_data = lse.mutable_data_ptr<Real>();
  const int64_t task_queries = round_up(kTaskQueries, call.stride);
  const int64_t tasks_per_head = ceil_div(call.num_queries(), task_queries);
  parallel_tasks(call.batch() * call.kv_heads() * tasks_per_head, [&] {
    return [&, worker = QueryWorker<Real>(shape),
            visible = std::vector<int32_t>(width)](int64_t task) mutable {
      const int64_t b = task / tasks_per_head / call.kv_heads();
      const int64_t h = task / tasks_per_head % call.kv_heads();
      const int64_t begin = task % tasks_per_head * task_queries;
      const int64_t end = std::min(begin + task_queries, call.num_queries());
      const PackedLayer<Real> layer = layers.at(b, h);
      int64_t count = 0;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t token = call.first_token() + i;
        if (i % call.stride == 0) {
          count = visible_blocks(list_of(call, b, h, i), width, token / call.block_size, visible.data());
        }
        const Candidates candidates = candidates_in(visible.data(), count, token, call.block_size);
        const int64_t at = (b * call.num_queries() + i) * call.heads() + h * group;
        if (candidates.count == 0) {
          std::fill_n(out_data + at * value_dim, group * value_dim, T(0));
          std::fill_n(lse_data + at, group, -std::numeric_limits<Real>::infinity());
          continue;
        }
        worker.load_query(q_data + b * q.stride(0) + i * q.stride(1) + h * group * q.stride(2), q.stride(2),
                          call.scale);
        worker.clear_state();
        worker.score(layer, /*rotation=*/{}, candidates);
        worker.accumulate(layer, candidates, /*excluded=*/nullptr, 0);
        for (int64_t g = 0; g < group; ++g) {
          const auto [scale, log_sum] =
              denominator(worker.max()[g], worker.sum()[g], sink != nullptr ? sink + h * group + g : nullptr);
          lse_data[at + g] = log_sum;
          for (int64_t d = 0; d < value_dim; ++d) {
            out_data[(at + g) * value_dim + d] = static_cast<T>(worker.out(g)[d] * scale);
          }
        }
      }
    };
  });
}

template <typename T, typename Real>
class BackwardRun {
 public:
  BackwardRun(const SparseCall& call, const SparseResults& results, const Tensor& dout, const Tensor& dlse,
              const SparseGradients& gradients)
      : call_(call),
        out_(std::get<0>(results)),
        lse_(std::get<1>(results)),
        dout_(dout),
        dlse_(dlse),
        dq_(std::get<0>(gradients)),
        dk_(std::get<1>(gradients)),
        dv_(std::get<2>(gradients)),
        shape_(shape_of(call, query_kernels<Real>().lanes)),
        layers_(PackedLayers<Real>::make(call.x.key, call.x.value, shape_, /*rotation=*/{},
                                         /*gradients=*/true, Type<T>{})),
        chunk_(shape_, call.num_queries(), call.stride),
        visible_(ceil_div(chunk_.size(), call.stride) * call.x.blocks.size(3)),
        counts_(ceil_div(chunk_.size(), call.stride)),
        ones_(call.group(), Real{1}),
        key_sums_(dk_.defined() ? call.num_keys() * shape_.row() : 0),
        value_sums_(dv_.defined() ? call.num_keys() * shape_.value_pad : 0) {}

  void run() {
    for (int64_t b = 0; b < call_.batch(); ++b) {
      for (int64_t h = 0; h < call_.kv_heads(); ++h) {
        std::fill(key_sums_.begin(), key_sums_.end(), Real{0});
        std::fill(value_sums_.begin(), value_sums_.end(), Real{0});
        for (int64_t begin = 0; begin < call_.num_queries(); begin += chunk_.size()) {
          run_chunk(b, h, begin, std::min(chunk_.size(), call_.num_queries() - begin));
        }
        write_sums(b, h);
      }
    }
  }

 private:
  int64_t head_row(int64_t b, int64_t h, int64_t i) const {
    return (b * call_.num_queries() + i) * call_.heads() + h * call_.group();
  }

  void run_chunk(int64_t b, int64_t h, int64_t begin, int64_t count) {
    const PackedLayer<Real> layer = layers_.at(b, h);
    const Rotation<Real> none;
    const std::vector<int32_t> nothing;
    const bool scores = dq_.defined() || dk_.defined();
    chunk_.for_queries(count, [&](QueryWorker<Real>& worker, int64_t row) {
      const int64_t i = begin + row, token = call_.first_token() + i;
      const int64_t list = row / call_.stride, width = call_.x.blocks.size(3);
      int32_t* visible = visible_.data() + list * width;
      if (i % call_.stride == 0) {
        counts_[list] = visible_blocks(list_of(call_, b, h, i), width, token / call_.block_size, visible);
      }
      Candidates& candidates = chunk_.candidates(row);
      candidates = candidates_in(visible, counts_[list], token, call_.block_size);
      load(worker, b, h, i, row);
      if (candidates.count == 0) return;
      worker.score_into(layer, none, candidates, chunk_.query(row), chunk_.scores(row));
      chunk_.visit(worker, layer, none, row, nothing, 0, lse_.const_data_ptr<Real>() + head_row(b, h, i),
                   ones_.data(), scores, dq_.defined());
    });
    if (dk_.defined() || dv_.defined()) {
      chunk_.scatter(layer, none, count, dk_.defined() ? key_sums_.data() : nullptr,
                     dv_.defined() ? value_sums_.data() : nullptr);
    }
    if (dq_.defined()) {
      chunk_.for_queries(count, [&](QueryWorker<Real>&, int64_t row) {
        chunk_.write_query(row, call_.scale,
                           dq_.mutable_data_ptr<T>() + head_row(b, h, begin + row) * 2 * shape_.half);
      });
    }
  }

  // The weights P' = e^(s - lse) are those without the sink, so dO counts times the keys' share of the softmax:
  // dS = P' (share dP - share D + dlse).
  void load(QueryWorker<Real>& worker, int64_t b, int64_t h, int64_t i, int64_t row) {
    const Tensor& q = call_.x.query;
    const int64_t group = call_.group(), at = head_row(b, h, i);
    std::vector<Real> shares;
    GradientRow<T, Real> from{};
    from.q = q.const_data_ptr<T>() + b * q.stride(0) + i * q.stride(1) + h * group * q.stride(2);
    from.q_head = q.stride(2);
    from.dout =
        dout_.const_data_ptr<T>() + b * dout_.stride(0) + i * dout_.stride(1) + h * group * dout_.stride(2);
    from.dout_head = dout_.stride(2);
    from.out = out_.const_data_ptr<T>() + at * call_.value_dim();
    from.dlse = dlse_.defined() ? dlse_.const_data_ptr<Real>() + at : nullptr;
    if (call_.x.sinks.defined()) {
      const Real* sinks = call_.x.sinks.const_data_ptr<Real>() + h * group;
      for (int64_t g = 0; g < group; ++g) {
        shares.push_back(Real{1} / (Real{1} + std::exp(sinks[g] - lse_.const_data_ptr<Real>()[at + g])));
      }
      from.shares = shares.data();
    }
    chunk_.load(worker, row, from, call_.scale);
  }

  void write_sums(int64_t b, int64_t h) {
    const int64_t half = shape_.half, value_dim = call_.value_dim();
    at::parallel_for(0, call_.num_keys(), 256, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; ++token) {
        const int64_t row = (b * call_.num_keys() + token) * call_.kv_heads() + h;
        if (dk_.defined()) {
          const Real* from = key_sums_.data() + token * shape_.row();
          T* to = dk_.mutable_data_ptr<T>() + row * 2 * half;
          for (int64_t d = 0; d < half; ++d) {
            to[d] = static_cast<T>(from[d]);
            to[half + d] = static_cast<T>(from[shape_.half_pad + d]);
          }
        }
        if (dv_.defined()) {
          const Real* from = value_sums_.data() + token * shape_.value_pad;
          T* to = dv_.mutable_data_ptr<T>() + row * value_dim;
          std::transform(from, from + value_dim, to, [](Real x) { return static_cast<T>(x); });
        }
      }
    });
  }

  const SparseCall& call_;
  Tensor out_, lse_, dout_, dlse_, dq_, dk_, dv_;
  QueryShape shape_;
  PackedLayers<Real> layers_;
  GradientChunk<T, Real> chunk_;
  std::vector<int32_t> visible_;             // [chunk / stride][n]
  std::vector<int64_t> counts_;              // [chunk / stride]
  std::vector<Real> ones_;                   // [G]: the sums of states whose maximum is lse
  std::vector<Real> key_sums_, value_sums_;  // of one head: [T][row] and [T][value_pad]
};

}  // namespace

void sparse_forward_cpu(const SparseCall& call, const Tensor& out, const Tensor& lse) {
  dispatch_storage("sparse_attention", call.x.query.scalar_type(), [&](auto storage, auto real) {
    forward_typed<typename decltype(storage)::type, typename decltype(real)::type>(call, out, lse);
  });
}

void sparse_backward_cpu(const SparseCall& call, const SparseResults& results, const Tensor& dout,
                         const Tensor& dlse, const SparseGradients& gradients) {
  dispatch_storage("sparse_attention", call.x.query.scalar_type(), [&](auto storage, auto real) {
    BackwardRun<typename decltype(storage)::type, typename decltype(real)::type>(call, results, dout, dlse,
                                                                                 gradients)
        .run();
  });
}

}  // namespace htree::tree_attention
