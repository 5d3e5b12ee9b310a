// CPU kernels of rmsnorm_rope, parallel over rows, each row vectorised. Arithmetic is in float,
// for double in double.
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "host/dispatch.h"
#include "ops/rmsnorm_rope/rmsnorm_rope.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_rows.h"

namespace htree::rmsnorm_rope {
namespace {

// Elements of a task: enough to pay for handing it over.
constexpr int64_t kGrain = 1 << 15;
// The rows are cut into at most this many parts, each with its sum of dweight. Their number depends on the
// problem alone, so that the result does not depend on the number of threads.
constexpr int64_t kMaxParts = 64;

const RowKernels& kernels() {
  return HTREE_PICK_ISA(kRowKernels);
}

// `count` elements of any dtype at unit stride, converted to A. `buffer` is used unless they are A already.
template <typename A>
const A* as_arithmetic(const at::Tensor& t, int64_t offset, int64_t count, std::vector<A>& buffer) {
  const A* result = nullptr;
  dispatch_dtype("rmsnorm_rope", t.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using Source = typename decltype(tag)::type;
    const Source* source = t.const_data_ptr<Source>() + offset;
    if constexpr (std::is_same_v<Source, A>) {
      result = source;
    } else {
      buffer.resize(count);
      for (int64_t i = 0; i < count; ++i) {
        buffer[i] = static_cast<A>(source[i]);
      }
      result = buffer.data();
    }
  });
  return result;
}

// The rows of the tables for one token after another, converted once per row.
template <typename A>
class Tables {
 public:
  explicit Tables(const Operands& o) : o_(o) {}

  const TableRow<A>& at(int64_t batch, int64_t position) {
    const int64_t table = o_.problem.batched_tables ? batch : 0;
    if (position != position_ || table != table_) {
      const A* cos = load(o_.cos, table, position, cos_);
      const A* sin = load(o_.sin, table, position, sin_);
      const int64_t upper = o_.problem.half_tables ? 0 : o_.problem.head_dim / 2;
      row_ = {cos, cos + upper, sin, sin + upper};
      table_ = table;
      position_ = position;
    }
    return row_;
  }

 private:
  static const A* load(const at::Tensor& t, int64_t table, int64_t position, std::vector<A>& buffer) {
    const int64_t offset = table * table_batch_stride(t) + position * t.stride(-2);
    return as_arithmetic<A>(t, offset, t.size(-1), buffer);
  }

  const Operands& o_;
  std::vector<A> cos_;
  std::vector<A> sin_;
  TableRow<A> row_{};
  int64_t table_ = -1;
  int64_t position_ = -1;
};

template <typename T>
T* row_of(T* data, const at::Tensor& t, int64_t batch, int64_t position, int64_t head) {
  return data + batch * t.stride(0) + position * t.stride(1) + head * t.stride(2);
}

// Calls row(batch, position, head) for rows [begin, end); heads change fastest, then batch, then position.
template <typename F>
void for_rows(const Problem& p, int64_t begin, int64_t end, F&& row) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t token = i / p.heads;
    row(token % p.batch, token / p.batch, i % p.heads);
  }
}

template <typename T>
void forward_typed(const Operands& o, const at::Tensor& out) {
  using A = ArithmeticOf<T>;
  const Problem& p = o.problem;
  std::vector<A> weight;
  const RowShape<A> shape{p.width / p.head_dim, p.head_dim, static_cast<A>(p.eps),
                          as_arithmetic<A>(o.weight, 0, p.width, weight)};
  const auto kernel = loops_of<T>(kernels()).forward;
  const T* x = o.x.const_data_ptr<T>();
  T* y = out.mutable_data_ptr<T>();
  at::parallel_for(0, p.num_rows(), std::max<int64_t>(1, kGrain / p.width), [&](int64_t begin, int64_t end) {
    Tables<A> tables(o);
    for_rows(p, begin, end, [&](int64_t batch, int64_t position, int64_t head) {
      kernel(reinterpret_cast<const Storage<T>*>(row_of(x, o.x, batch, position, head)),
             reinterpret_cast<Storage<T>*>(row_of(y, out, batch, position, head)), shape,
             tables.at(batch, position));
    });
  });
}

template <typename T>
void backward_typed(const Operands& o, const at::Tensor& dy, const Gradients& gradients) {
  using A = ArithmeticOf<T>;
  const Problem& p = o.problem;
  const auto& [dx, dweight] = gradients;
  std::vector<A> weight;
  const RowShape<A> shape{p.width / p.head_dim, p.head_dim, static_cast<A>(p.eps),
                          as_arithmetic<A>(o.weight, 0, p.width, weight)};
  const auto kernel = loops_of<T>(kernels()).backward;
  const T* dy_data = dy.const_data_ptr<T>();
  const T* x_data = o.x.const_data_ptr<T>();
  T* dx_data = dx.defined() ? dx.mutable_data_ptr<T>() : nullptr;

  const int64_t rows = p.num_rows();
  const int64_t num_parts = std::clamp<int64_t>(rows * p.width / kGrain, 1, std::min(kMaxParts, rows));
  std::vector<A> sums(dweight.defined() ? num_parts * p.width : 0);
  at::parallel_for(0, num_parts, 1, [&](int64_t first, int64_t last) {
    Tables<A> tables(o);
    std::vector<A> scratch(p.width);
    for (int64_t part = first; part < last; ++part) {
      A* dw = dweight.defined() ? sums.data() + part * p.width : nullptr;
      for_rows(p, rows * part / num_parts, rows * (part + 1) / num_parts,
               [&](int64_t batch, int64_t position, int64_t head) {
                 kernel(reinterpret_cast<const Storage<T>*>(row_of(dy_data, dy, batch, position, head)),
                        reinterpret_cast<const Storage<T>*>(row_of(x_data, o.x, batch, position, head)),
                        dx_data ? reinterpret_cast<Storage<T>*>(row_of(dx_data, dx, batch, position, head))
                                : nullptr,
                        dw, shape, tables.at(batch, position), scratch.data());
               });
    }
  });
  if (!dweight.defined()) {
    return;
  }
  for (int64_t part = 1; part < num_parts; ++part) {
    for (int64_t i = 0; i < p.width; ++i) {
      sums[i] += sums[part * p.width + i];
    }
  }
  dispatch_dtype("rmsnorm_rope_backward", dweight.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using W = typename decltype(tag)::type;
    std::transform(sums.begin(), sums.begin() + p.width, dweight.mutable_data_ptr<W>(),
                   [](A value) { return static_cast<W>(value); });
  });
}

}  // namespace

void forward_cpu(const Operands& operands, at::IntArrayRef, const at::Tensor& out) {
  if (out.numel() == 0) {
    return;
  }
  dispatch_dtype("rmsnorm_rope", out.scalar_type(), AllFloatTypes{},
                 [&](auto tag) { forward_typed<typename decltype(tag)::type>(operands, out); });
}

void backward_cpu(const Operands& operands, const at::Tensor& dy, const Gradients& gradients) {
  const auto& [dx, dweight] = gradients;
  if (operands.x.numel() == 0) {
    if (dweight.defined()) {
      dweight.zero_();
    }
    return;
  }
  dispatch_dtype("rmsnorm_rope_backward", dy.scalar_type(), AllFloatTypes{},
                 [&](auto tag) { backward_typed<typename decltype(tag)::type>(operands, dy, gradients); });
}

}  // namespace htree::rmsnorm_rope
