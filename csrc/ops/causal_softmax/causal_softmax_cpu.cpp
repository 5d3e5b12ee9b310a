// CPU kernels of causal_softmax, parallel over rows, each row vectorised. Arithmetic is in float,
// for double in double.
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "host/dispatch.h"
#include "ops/causal_softmax/causal_softmax.h"
#include "ops/causal_softmax/causal_softmax_rows.h"

namespace htree::causal_softmax {
namespace {

// Elements of a task: few enough to balance the triangle of visible columns, enough to pay for
// handing the task over.
constexpr int64_t kGrain = 1 << 15;

const RowKernels& kernels() {
  return HTREE_PICK_ISA(kRowKernels);
}

// The first `count` elements of a row as a unit-stride array: the row itself, or a copy in `buffer`.
template <typename T>
const T* unit_stride(const T* row, int64_t stride, int64_t count, std::vector<T>& buffer) {
  if (stride == 1) {
    return row;
  }
  for (int64_t i = 0; i < count; ++i) {
    buffer[i] = row[i * stride];
  }
  return buffer.data();
}

// Calls f(batch_idx, row_idx, visible) for every row, in parallel, in tasks of about kGrain elements.
template <typename F>
void for_each_row(const Problem& p, F&& make_task) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, p.cols));
  at::parallel_for(0, p.batch * p.rows, grain, [&](int64_t begin, int64_t end) {
    auto task = make_task();
    for (int64_t i = begin; i < end; ++i) {
      // Long rows alternate with short ones; otherwise the thread with the last rows would have
      // most of the triangle.
      const int64_t turn = i % p.rows;
      const int64_t row = turn % 2 == 0 ? turn / 2 : p.rows - 1 - turn / 2;
      task(i / p.rows, row, p.cols - p.rows + 1 + row);
    }
  });
}

template <typename T>
void forward_typed(const Problem& p, const T* x, Strides xs, T* y, Strides ys) {
  const auto row_kernel = loops_of<T>(kernels()).forward;
  for_each_row(p, [&] {
    return [&, in = std::vector<T>(xs.col == 1 ? 0 : p.cols), out = std::vector<T>(ys.col == 1 ? 0 : p.cols),
            scratch = std::vector<std::conditional_t<std::is_same_v<T, double>, double, float>>(p.cols)](
               int64_t b, int64_t row, int64_t visible) mutable {
      const T* x_row = unit_stride(x + b * xs.batch + row * xs.row, xs.col, visible, in);
      T* y_row = y + b * ys.batch + row * ys.row;
      T* target = ys.col == 1 ? y_row : out.data();
      row_kernel(reinterpret_cast<const Storage<T>*>(x_row), reinterpret_cast<Storage<T>*>(target), visible,
                 p.cols, scratch.data());
      for (int64_t i = 0; ys.col != 1 && i < p.cols; ++i) {
        y_row[i * ys.col] = target[i];
      }
    };
  });
}

template <typename T>
void backward_typed(const Problem& p, const T* dy, Strides dys, const T* y, Strides ys, T* dx, Strides dxs) {
  const auto row_kernel = loops_of<T>(kernels()).backward;
  for_each_row(p, [&] {
    return
        [&, dy_copy = std::vector<T>(dys.col == 1 ? 0 : p.cols),
         y_copy = std::vector<T>(ys.col == 1 ? 0 : p.cols)](int64_t b, int64_t row, int64_t visible) mutable {
          const T* dy_row = unit_stride(dy + b * dys.batch + row * dys.row, dys.col, visible, dy_copy);
          const T* y_row = unit_stride(y + b * ys.batch + row * ys.row, ys.col, visible, y_copy);
          row_kernel(reinterpret_cast<const Storage<T>*>(dy_row), reinterpret_cast<const Storage<T>*>(y_row),
                     reinterpret_cast<Storage<T>*>(dx + b * dxs.batch + row * dxs.row), visible, p.cols);
        };
  });
}

}  // namespace

void forward_cpu(const at::Tensor& x, int64_t block_size, const at::Tensor& out) {
  const Problem p = problem_of(x, block_size);
  if (x.numel() == 0) {
    return;
  }
  dispatch_dtype("causal_softmax", x.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    forward_typed<T>(p, x.const_data_ptr<T>(), strides_of(x), out.mutable_data_ptr<T>(), strides_of(out));
  });
}

void backward_cpu(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& dx) {
  const Problem p = problem_of(y, /*block_size=*/0);
  if (y.numel() == 0) {
    return;
  }
  dispatch_dtype("causal_softmax_backward", y.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    backward_typed<T>(p, dy.const_data_ptr<T>(), strides_of(dy), y.const_data_ptr<T>(), strides_of(y),
                      dx.mutable_data_ptr<T>(), strides_of(dx));
  });
}

}  // namespace htree::causal_softmax
