#include "ops/tree_attention/segments.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "ops/tree/tree_checks.h"

namespace htree::tree_attention {

int64_t first_token_of(const TreeOptions& options, int64_t layers) {
  if (layers <= 1) {
    return 0;
  }
  const int64_t span = node_span(options.compression_rate, layers - 2);
  const int64_t most =
      kIndexLimit / span < options.max_top_nodes ? kIndexLimit : options.max_top_nodes * span;
  return ceil_div(most, options.selection_stride) * options.selection_stride;
}

namespace {

// Neighbouring rows of one depth: queries [query, query + queries) over the first `keys` tokens.
struct Segment {
  int64_t query, queries, keys, layers;
  AttentionArgs args;
};

// From the deepest rows of a piece to its dense ones: the last tokens come first.
std::vector<Segment> segments_of(const TreeOptions& options, const AttentionArgs& args, int64_t num_queries,
                                 int64_t num_keys) {
  std::vector<Segment> segments;
  const int64_t pieces = static_cast<int64_t>(args.starts.size()), piece = num_queries / pieces;
  for (int64_t i = 0; i < pieces; ++i) {
    int64_t layers = 1;
    while (first_token_of(options, layers + 1) < args.starts[i] + piece) {
      ++layers;
    }
    for (int64_t end = args.starts[i] + piece; end > args.starts[i]; --layers) {
      const int64_t begin = std::max(args.starts[i], first_token_of(options, layers));
      Segment segment = {i * piece + begin - args.starts[i], end - begin,
                         std::min(num_keys, first_token_of(options, layers + 1)), layers, args};
      segment.args.starts = {begin};
      if (layers == 1) {
        segment.args.max_top_nodes = first_token_of(options, 2);
      }
      segments.push_back(segment);
      end = begin;
    }
  }
  return segments;
}

// Calls f(segment, rows, keys, lists): the last three take a tensor's part of one batch and segment. A part has one batch,
// whose rows lie one behind the other.
template <typename F>
void for_each_segment(const TreeOptions& options, const AttentionArgs& args, const Tensor& q, const Tensor& k,
                      F&& f) {
  const std::vector<Segment> segments = segments_of(options, args, q.size(1), k.size(1));
  for (int64_t batch = 0; batch < q.size(0); ++batch) {
    for (const Segment& segment : segments) {
      const auto part = [&](const Tensor& x, int64_t begin, int64_t count) {
        return x.defined() ? x.narrow(0, batch, 1).narrow(1, begin, count) : x;
      };
      const auto rows = [&](const Tensor& x) { return part(x, segment.query, segment.queries); };
      const auto keys = [&](const Tensor& x) { return part(x, 0, segment.keys); };
      const int64_t stride = options.selection_stride;
      const auto lists = [&](const std::vector<Tensor>& of_layers) {
        std::vector<Tensor> result;
        for (const Tensor& list : of_layers) {
          result.push_back(part(list, segment.query / stride, ceil_div(segment.queries, stride)));
        }
        return result;
      };
      f(batch, segment, rows, keys, lists);
    }
  }
}

// The lists of the layers that a segment has.
std::vector<Tensor> of_depth(std::vector<Tensor> lists, int64_t layers) {
  lists.resize(std::min<size_t>(lists.size(), static_cast<size_t>(layers)));
  return lists;
}

// The sum over the segments of one batch of a gradient of keys or values, rounded once.
class SegmentSum {
 public:
  SegmentSum(const Tensor& gradient, int64_t batch)
      : gradient_(gradient.defined() ? gradient.narrow(0, batch, 1) : gradient) {
    if (gradient_.defined()) {
      const at::ScalarType dtype = state_dtype(gradient_);
      sum_ = dtype == gradient_.scalar_type()
                 ? gradient_
                 : at::empty(gradient_.sizes(), gradient_.options().dtype(dtype));
    }
  }

  // Where the next segment, of `keys` tokens, writes its part.
  Tensor next(int64_t keys) {
    if (!sum_.defined()) {
      return {};
    }
    part_ = begun_ || keys < sum_.size(1) ? at::empty_like(sum_.narrow(1, 0, keys)) : sum_;
    return part_;
  }
  void add() {
    if (!sum_.defined() || part_.is_same(sum_)) {
      begun_ = true;
      return;
    }
    if (!begun_) {
      sum_.zero_();
    }
    begun_ = true;
    sum_.narrow(1, 0, part_.size(1)).add_(part_);
  }
  void finish() const {
    if (sum_.defined() && !sum_.is_same(gradient_)) {
      gradient_.copy_(sum_);
    }
  }

 private:
  Tensor gradient_, sum_, part_;
  bool begun_ = false;
};

}  // namespace

void forward_by_depth(AttentionForward* kernel, const TreeOptions& options, const AttentionArgs& args,
                      const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                      const Tensor& gmax, const Tensor& gsum, const std::vector<Tensor>& parents) {
  if (!has_open_top(options)) {
    kernel(q, k, v, args, out, gmax, gsum, parents);
    return;
  }
  for_each_segment(
      options, args, q, k,
      [&](int64_t, const Segment& segment, const auto& rows, const auto& keys, const auto& lists) {
        const std::vector<Tensor> all = lists(parents);
        kernel(rows(q), keys(k), keys(v), segment.args, rows(out), rows(gmax), rows(gsum),
               of_depth(all, segment.layers));
        for (size_t layer = segment.layers - 1; layer < all.size(); ++layer) {
          all[layer].fill_(-1);  // implied
        }
      });
}

void backward_by_depth(AttentionBackward* kernel, const TreeOptions& options, const AttentionArgs& args,
                       const Tensor& dout, const Tensor& dlse, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                       const std::vector<Tensor>& parents, const Tensor& dq, const Tensor& dk,
                       const Tensor& dv) {
  if (!has_open_top(options)) {
    kernel(dout, dlse, q, k, v, out, gmax, gsum, parents, args, dq, dk, dv);
    return;
  }
  std::vector<SegmentSum> of_keys, of_values;
  for (int64_t batch = 0; batch < q.size(0); ++batch) {
    of_keys.emplace_back(dk, batch);
    of_values.emplace_back(dv, batch);
  }
  for_each_segment(
      options, args, q, k,
      [&](int64_t batch, const Segment& segment, const auto& rows, const auto& keys, const auto& lists) {
        const Tensor part_dk = of_keys[batch].next(segment.keys);
        const Tensor part_dv = of_values[batch].next(segment.keys);
        kernel(rows(dout), rows(dlse), rows(q), keys(k), keys(v), rows(out), rows(gmax), rows(gsum),
               of_depth(lists(parents), segment.layers), segment.args, rows(dq), part_dk, part_dv);
        of_keys[batch].add();
        of_values[batch].add();
      });
  for (int64_t batch = 0; batch < q.size(0); ++batch) {
    of_keys[batch].finish();
    of_values[batch].finish();
  }
}

}  // namespace htree::tree_attention
