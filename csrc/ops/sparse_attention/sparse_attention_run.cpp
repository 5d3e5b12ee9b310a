// From checked arguments to the kernels of sparse_attention: what any device needs before and after them.
// docs/semantics/sparse_attention.md §8
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "ops/sparse_attention/sparse_attention.h"

namespace htree::tree_attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The kernels rotate pairs, here by nothing: a last element without a partner gets a 0, which adds nothing to a product.
Tensor even_width(const Tensor& x) {
  // What padding gives keeps the order of the dimensions in memory.
  return unit_last(x.size(-1) % 2 == 0 ? x : at::constant_pad_nd(x, {0, 1}));
}

SparseCall call_of(const SparseInputs& x, const SparseOptions& options) {
  SparseCall call;
  call.x = {even_width(x.query), even_width(x.key), unit_last(x.value), x.blocks.contiguous(), {}};
  if (x.sinks.defined()) {
    // Beside the largest finite sink all weights are 0, as beside an infinite one.
    const at::ScalarType dtype = state_dtype(x.query);
    const double most =
        dtype == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
    call.x.sinks = x.sinks.to(dtype).clamp_max(most).contiguous();
  }
  // A block longer than the sequence is all of it.
  call.block_size = std::min(options.block_size, x.key.size(1));
  call.given_block_size = options.block_size;
  call.stride = options.selection_stride;
  call.scale = resolve_scale(options.scale, x.query.size(3));
  call.packed = options.packed;
  return call;
}

bool is_empty(const SparseInputs& x) {
  return x.query.numel() == 0;
}

// What the gradient is of sinks: -sum over rows of e^sink / (e^lse + e^sink) D, D = dO O. Summed in one order, in double
// on the CPU, so that the bits are the same on any number of threads.
void sink_gradient(const SparseCall& call, const SparseResults& results, const Tensor& dout,
                   const Tensor& gradient) {
  const auto& [out, lse] = results;
  const at::ScalarType state = state_dtype(out);
  const Tensor sinks = call.x.sinks;
  // A row that sees nothing, with lse -inf, gives nothing, whatever its upstream gradient.
  const Tensor share = sinks.sub(lse).sigmoid_();
  const Tensor rows =
      dout.to(state).mul(out.to(state)).sum(-1).mul_(share).masked_fill_(lse.eq(-kInfinity), 0);
  if (rows.is_cuda()) {
    gradient.copy_(rows.sum(c10::IntArrayRef{0, 1}).neg_());
    return;
  }
  const Tensor sums = at::empty({call.heads()}, rows.options().dtype(at::kDouble));
  const Tensor terms = rows.to(at::kDouble).reshape({-1, call.heads()});
  const double* from = terms.const_data_ptr<double>();
  double* to = sums.mutable_data_ptr<double>();
  at::parallel_for(0, call.heads(), 1, [&](int64_t first, int64_t last) {
    for (int64_t head = first; head < last; ++head) {
      double sum = 0;
      for (int64_t row = 0; row < terms.size(0); ++row) {
        sum -= from[row * call.heads() + head];
      }
      to[head] = sum;
    }
  });
  gradient.copy_(sums);
}

}  // namespace

void run_sparse_forward(const SparseKernels& kernels, const SparseInputs& x, const SparseOptions& options,
                        const SparseResults& results) {
  if (is_empty(x)) return;
  kernels.forward(call_of(x, options), std::get<0>(results), std::get<1>(results));
}

void run_sparse_backward(const SparseKernels& kernels, const SparseInputs& x, const SparseOptions& options,
                         const SparseResults& results, const OptionalTensor& dout, const OptionalTensor& dlse,
                         const SparseGradients& gradients) {
  const auto& [dq, dk, dv, dsinks] = gradients;
  if (is_empty(x)) {
    return fill_zeros({dq, dk, dv, dsinks});  // without a query nothing has a gradient
  }
  const SparseCall call = call_of(x, options);
  const SparseResults of_forward = {std::get<0>(results).contiguous(), std::get<1>(results).contiguous()};
  const Tensor upstream = dout.has_value() ? unit_last(*dout) : at::zeros_like(std::get<0>(of_forward));
  if (dsinks.defined()) {
    if (dout.has_value()) {
      sink_gradient(call, of_forward, upstream, dsinks);
    } else {
      dsinks.zero_();
    }
  }
  if (!dq.defined() && !dk.defined() && !dv.defined()) return;
  const Tensor of_lse = dlse.has_value() ? dlse->contiguous() : Tensor();
  const auto padded = [](const Tensor& gradient, const Tensor& like) {
    return gradient.defined() && gradient.size(-1) != like.size(-1)
               ? at::empty(like.sizes(), gradient.options())
               : gradient;
  };
  const SparseGradients wide = {padded(dq, call.x.query), padded(dk, call.x.key), dv, {}};
  kernels.backward(call, of_forward, upstream, of_lse, wide);
  const auto cut = [](const Tensor& gradient, const Tensor& from) {
    if (gradient.defined() && !gradient.is_same(from)) gradient.copy_(from.narrow(-1, 0, gradient.size(-1)));
  };
  cut(dq, std::get<0>(wide));
  cut(dk, std::get<1>(wide));
}

// ---- documents: one sequence in which each begins with a block of its own, so that nothing of them is read on the host

namespace {

// Which rows of the sequence are whose. `rows` of [sequence], `places` of the packed rows; int64.
struct PackedRows {
  Tensor rows, none;       // the packed row of each row of the sequence, and which have none
  Tensor places, nowhere;  // the row of the sequence of each packed row, and which have none
  Tensor broken;           // packed rows of documents that break the contract
};

// A ValueError for documents on the host that break the contract.
void refuse_documents(const char* op, const SparseInputs& x, const Documents& documents, int64_t stride) {
  const int64_t num_queries = x.query.size(0), num_keys = x.key.size(0);
  const Tensor of_queries = documents.cu_seq_q.contiguous(), of_keys = documents.cu_seq_k.contiguous();
  const int64_t size = of_queries.size(0);
  const HostOffsets queries = host_offsets(of_queries.const_data_ptr<int32_t>(), size, num_queries);
  const HostOffsets keys = host_offsets(of_keys.const_data_ptr<int32_t>(), size, num_keys);
  refuse_offsets(op, "cu_seq_q", queries, "query", num_queries);
  refuse_offsets(op, "cu_seq_k", keys, "key", num_keys);
  for (int64_t i = 0; i + 1 < size; ++i) {
    refuse_document(op, i, queries.count(i), keys.count(i), documents, stride);
  }
}

// Of at least one document.
class DocumentRows {
 public:
  DocumentRows(const SparseInputs& x, const SparseOptions& options, const Documents& documents, bool on_host,
               const char* op)
      : x_(x), options_(options) {
    options_.packed = true;
    const int64_t num_queries = x.query.size(0), num_keys = x.key.size(0);
    // No document is longer than all keys, so longer blocks and strides are the same as such that just cover them.
    const int64_t longest = std::max<int64_t>(num_keys, 1);
    while (options_.selection_stride / 2 >= longest)
      options_.selection_stride /= 2;
    // In whole sixteens where they were asked for: the kernel must not follow from the number of keys.
    const int64_t unit = std::max<int64_t>(options_.selection_stride, options.block_size % 16 == 0 ? 16 : 1);
    options_.block_size = std::min(options.block_size, ceil_div(longest, unit) * unit);
    const DeviceOffsets offsets = device_offsets(documents, num_queries, num_keys, options.selection_stride);
    const auto counts = [&](const Tensor& starts) {
      return starts.diff().to(at::kLong).masked_fill_(offsets.broken, 0);
    };
    const Tensor queries = counts(offsets.starts_q), keys = counts(offsets.starts_k);
    const int64_t size = options_.block_size;
    const Tensor ends = keys.add(size - 1).floor_divide(size).mul_(size).cumsum(0);  // in the sequence
    const int64_t documents_here = std::min(offsets.broken.size(0), num_keys);
    num_rows_ =
        on_host ? ends[-1].item<int64_t>() : ceil_div(num_keys + documents_here * (size - 1), size) * size;
    TORCH_CHECK_VALUE(num_rows_ < kIndexLimit, op,
                      ": key must have less than 2^31 rows when every document is ",
                      "filled up to whole blocks, got ", num_rows_, " in ", x.key.sizes());
    const Tensor begins = at::cat({ends.new_zeros({1}), ends.slice(0, 0, ends.size(0) - 1)});
    const Tensor before = keys.sub(queries);
    const Tensor all = at::arange(num_rows_, ends.options());
    // Behind the last document stands no row, whatever the document that is looked up there says.
    const Tensor document = at::searchsorted(ends, all, /*out_int32=*/false, /*right=*/true);
    const Tensor behind = document.ge(ends.size(0));
    const Tensor at = document.clamp_max(ends.size(0) - 1);
    const auto of = [&](const Tensor& numbers) { return numbers.index_select(0, at); };
    const Tensor place = all.sub(of(begins)), own_keys = of(keys), skipped = of(before);
    first_block_ = of(begins).floor_divide(size);
    const Tensor token = place.minimum(own_keys.sub(1));
    repeated_.rows = token.sub(skipped).add_(of(offsets.starts_q));
    repeated_.none = behind.logical_or(token.lt(skipped));
    keys_.rows = place.add(of(offsets.starts_k));
    keys_.none = behind.logical_or(place.ge(own_keys));
    queries_.rows = repeated_.rows;
    queries_.none = repeated_.none.logical_or(keys_.none);
    find_places(queries_, offsets.starts_q, offsets.broken, begins.add(before), num_queries);
    find_places(keys_, offsets.starts_k, offsets.broken, begins, num_keys);
  }

  const SparseOptions& options() const { return options_; }
  const PackedRows& queries() const { return queries_; }
  // The queries, of each document with its last one again and again up to the end of its block. Rows there can have a
  // leader's list, and so meet what that one meets: with dO = 0 they give 0 to every gradient, or NaN where it does too.
  const PackedRows& repeated_queries() const { return repeated_; }
  const PackedRows& keys() const { return keys_; }

  // Packed rows as a batch of one; rows that have none hold `empty`.
  Tensor take(const Tensor& packed, const PackedRows& side, double empty = 0) const {
    if (packed.size(0) == 0) return place(packed).fill_(empty);
    return choose(packed.index_select(0, side.rows.clamp(0, packed.size(0) - 1)), side.none, empty)
        .unsqueeze(0);
  }

  // Memory for a batch of one with rows like those of `packed`.
  Tensor place(const Tensor& packed) const {
    std::vector<int64_t> shape = packed.sizes().vec();
    shape[0] = num_rows_;
    shape.insert(shape.begin(), 1);
    return at::empty(shape, packed.options());
  }

  // Writes the rows of a batch of one back. NaN in broken documents, `empty` where no document is.
  void put(const Tensor& batch, const PackedRows& side, double empty, const Tensor& packed) const {
    const Tensor rows =
        num_rows_ > 0 ? batch.squeeze(0).index_select(0, side.places) : at::zeros_like(packed);
    packed.copy_(choose(choose(rows, side.nowhere, empty), side.broken, kNan));
  }

  SparseInputs inputs() const {
    const int64_t stride = options_.selection_stride;
    const auto of_leaders = [&](const Tensor& rows) { return rows.slice(0, 0, rows.size(0), stride); };
    const Tensor leaders = of_leaders(queries_.rows);
    const Tensor lists = x_.blocks.size(0) > 0
                             ? x_.blocks.index_select(0, leaders.clamp(0, x_.blocks.size(0) - 1))
                             : x_.blocks.new_empty({leaders.size(0), x_.blocks.size(1), x_.blocks.size(2)});
    const Tensor first = of_leaders(first_block_).view({-1, 1, 1});
    const Tensor absent = lists.lt(0)
                              .logical_or_(lists.gt(num_rows_ / options_.block_size))
                              .logical_or_(of_leaders(queries_.none).view({-1, 1, 1}));
    const Tensor blocks = lists.add(first.to(at::kInt)).masked_fill_(absent, -1);
    return {take(x_.query, repeated_), take(x_.key, keys_), take(x_.value, keys_), blocks.unsqueeze(0),
            x_.sinks};
  }

 private:
  static Tensor choose(Tensor rows, const Tensor& where, double value) {
    std::vector<int64_t> shape(rows.dim(), 1);
    shape[0] = -1;
    return rows.masked_fill_(where.view(shape), value);
  }

  // `firsts`: the row of the sequence of each document's first packed row.
  static void find_places(PackedRows& side, const Tensor& starts, const Tensor& broken, const Tensor& firsts,
                          int64_t num_packed) {
    const Tensor begins = starts.slice(0, 0, starts.size(0) - 1).to(at::kLong);
    const Tensor ends = starts.slice(0, 1).to(at::kLong).contiguous();
    const Tensor all = at::arange(num_packed, ends.options());
    const Tensor document = at::searchsorted(ends, all, /*out_int32=*/false, /*right=*/true);
    const Tensor behind = document.ge(ends.size(0));
    const Tensor at = document.clamp_max(ends.size(0) - 1);
    side.broken = broken.index_select(0, at).logical_and_(behind.logical_not());
    side.nowhere = behind.logical_or(side.broken);
    side.places =
        all.sub(begins.index_select(0, at)).add_(firsts.index_select(0, at)).masked_fill_(side.nowhere, 0);
  }

  const SparseInputs& x_;
  SparseOptions options_;
  int64_t num_rows_;
  Tensor first_block_;  // of each row's document
  PackedRows queries_, repeated_, keys_;
};

// Fills what calls without a document leave, and says whether this is one.
bool has_no_document(const SparseKernels& kernels, const char* op, const SparseInputs& x,
                     const Documents& documents, const SparseOptions& options,
                     std::initializer_list<std::pair<Tensor, double>> results) {
  if (kernels.on_host) refuse_documents(op, x, documents, options.selection_stride);
  if (documents.cu_seq_q.size(0) > 1) return false;
  for (const auto& [tensor, empty] : results) {
    if (tensor.defined()) tensor.fill_(empty);
  }
  return true;
}

}  // namespace

void run_sparse_varlen(const SparseKernels& kernels, const char* op, const SparseInputs& x,
                       const Documents& documents, const SparseOptions& options,
                       const SparseResults& results) {
  const auto& [out, lse] = results;
  if (has_no_document(kernels, op, x, documents, options, {{out, 0}, {lse, -kInfinity}})) return;
  const DocumentRows rows(x, options, documents, kernels.on_host, op);
  const SparseResults found = {rows.place(out), rows.place(lse)};
  run_sparse_forward(kernels, rows.inputs(), rows.options(), found);
  rows.put(std::get<0>(found), rows.queries(), 0, out);
  rows.put(std::get<1>(found), rows.queries(), -kInfinity, lse);
}

void run_sparse_varlen_backward(const SparseKernels& kernels, const char* op, const SparseInputs& x,
                                const Documents& documents, const SparseOptions& options,
                                const SparseResults& results, const OptionalTensor& dout,
                                const OptionalTensor& dlse, const SparseGradients& gradients) {
  const auto& [dq, dk, dv, dsinks] = gradients;
  if (has_no_document(kernels, op, x, documents, options, {{dq, 0}, {dk, 0}, {dv, 0}, {dsinks, 0}})) return;
  const DocumentRows rows(x, options, documents, kernels.on_host, op);
  const auto upstream = [&](const OptionalTensor& gradient) {
    return gradient.has_value() ? OptionalTensor(rows.take(*gradient, rows.queries())) : std::nullopt;
  };
  const auto place = [&](const Tensor& gradient) {
    return gradient.defined() ? rows.place(gradient) : Tensor();
  };
  const SparseGradients found = {place(dq), place(dk), place(dv), dsinks};
  run_sparse_backward(kernels, rows.inputs(), rows.options(),
                      {rows.take(std::get<0>(results), rows.queries()),
                       rows.take(std::get<1>(results), rows.repeated_queries(), -kInfinity)},
                      upstream(dout), upstream(dlse), found);
  const auto put = [&](const Tensor& batch, const PackedRows& side, const Tensor& gradient) {
    if (gradient.defined()) rows.put(batch, side, 0, gradient);
  };
  put(std::get<0>(found), rows.queries(), dq);
  put(std::get<1>(found), rows.keys(), dk);
  put(std::get<2>(found), rows.keys(), dv);
}

}  // namespace htree::tree_attention
