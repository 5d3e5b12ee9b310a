// CPU kernels of quantisation, parallel over runs of rows, each run vectorised.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "host/dispatch.h"
#include "ops/fp8/e4m3.h"
#include "ops/fp8/quantize/quantize.h"
#include "ops/fp8/quantize/quantize_rows.h"
#include "ops/fp8/scale_values.h"

namespace htree::fp8 {
namespace {

// Elements of a task: enough to pay for handing it over.
constexpr int64_t kGrain = 1 << 15;

const RowKernels& kernels() {
  return HTREE_PICK_ISA(kRowKernels);
}

// Calls f(storage tag, kernels) for the dtype.
template <typename F>
void dispatch(const char* op, at::ScalarType dtype, F&& f) {
  dispatch_dtype(op, dtype, FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    f(Type<Storage<T>>{}, loops_of<T>(kernels()));
  });
}

template <typename T>
const T* input(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
T* output(const at::Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// A run of elements that lie one after another in x and in the contiguous output, with its scales.
struct Run {
  int64_t x_offset;
  int64_t offset;
  int64_t scale_idx;
  int64_t length;
};

// Calls f(run) in parallel for runs that cover the matrix: parts of the tensor, groups of a row, or rows.
template <typename F>
void for_each_run(const MatrixInput& x, F&& f) {
  const MatrixShape& s = x.shape;
  if (s.layout == ScaleLayout::kTensor) {
    at::parallel_for(0, s.cols, kGrain, [&](int64_t begin, int64_t end) {
      f(Run{begin, begin, 0, end - begin});
    });
    return;
  }
  const bool by_columns = s.layout == ScaleLayout::kColumns;
  const int64_t length = by_columns ? s.cols : s.group;
  const int64_t per_row = ceil_div(s.cols, length);
  const int64_t num_groups = by_columns ? ceil_div(s.length, s.group) : 0;
  const int64_t grain = std::max<int64_t>(1, kGrain / length);
  at::parallel_for(0, s.rows * per_row, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / per_row;
      const int64_t col = i % per_row * length;
      const int64_t scale_idx =
          by_columns ? (row / s.length * num_groups + row % s.length / s.group) * s.cols : i;
      f(Run{row * x.row_stride + col, row * s.cols + col, scale_idx, std::min(length, s.cols - col)});
    }
  });
}

RunScale scale_of_run(const MatrixInput& x, const float* scale, const Run& run) {
  return {scale + run.scale_idx, x.shape.layout == ScaleLayout::kColumns ? 1 : 0};
}

template <typename T>
void largest_of_tensor(const MatrixInput& x, const RunKernels<T>& kernels, float* scale) {
  const T* data = input<T>(x.data);
  std::vector<float> largest(static_cast<size_t>(ceil_div(x.shape.cols, kGrain)));
  at::parallel_for(0, static_cast<int64_t>(largest.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = part * kGrain;
      largest[part] = kernels.largest(data + first, std::min(kGrain, x.shape.cols - first));
    }
  });
  *scale = scale_of(*std::max_element(largest.begin(), largest.end()));
}

// Columns in stripes: each thread has a stripe over all rows of a group.
template <typename T>
void largest_of_columns(const MatrixInput& x, const RunKernels<T>& kernels, float* scale) {
  constexpr int64_t kStripe = 512;
  const MatrixShape& s = x.shape;
  const T* data = input<T>(x.data);
  const int64_t num_groups = ceil_div(s.length, s.group);
  const int64_t num_stripes = ceil_div(s.cols, kStripe);
  const int64_t grain = std::max<int64_t>(1, kGrain / (s.group * std::min(s.cols, kStripe)));
  at::parallel_for(0, s.rows / s.length * num_groups * num_stripes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i / num_stripes;
      const int64_t col = i % num_stripes * kStripe;
      const int64_t width = std::min(kStripe, s.cols - col);
      const int64_t first = group / num_groups * s.length + group % num_groups * s.group;
      const int64_t count = std::min(s.group, s.length - group % num_groups * s.group);
      float* to = scale + group * s.cols + col;
      std::fill_n(to, width, 0.0f);
      for (int64_t row = first; row < first + count; ++row) {
        kernels.fold_largest(data + row * x.row_stride + col, to, width);
      }
      std::transform(to, to + width, to, scale_of);
    }
  });
}

}  // namespace

void quantize_cpu(const MatrixInput& x, const at::Tensor& scale, bool given, const QuantizeOutputs& out) {
  const char* op = out.values.defined() ? "fp8_fake_quant" : "fp8_quantize";
  if (given) {
    check_scale_values(op, "scale", scale);
  }
  std::atomic<int64_t> num_overflow{0};
  dispatch(op, x.data.scalar_type(), [&](auto tag, const auto& kernels) {
    using T = typename decltype(tag)::type;
    const T* data = input<T>(x.data);
    // Rows are done in one go, while each is in the cache. The scale of a tensor or a column
    // must be known before.
    const bool in_passing = !given && x.shape.layout == ScaleLayout::kRowGroups;
    float* computed = given ? nullptr : output<float>(scale);
    if (!given && x.shape.layout == ScaleLayout::kTensor) {
      largest_of_tensor<T>(x, kernels, computed);
    } else if (!given && x.shape.layout == ScaleLayout::kColumns) {
      largest_of_columns<T>(x, kernels, computed);
    }
    if (!in_passing && !out.codes.defined() && !out.values.defined()) {
      return;
    }
    const float* scales = given ? input<float>(scale) : computed;
    uint8_t* codes = out.codes.defined() ? output<uint8_t>(out.codes) : nullptr;
    T* values = out.values.defined() ? output<T>(out.values) : nullptr;
    for_each_run(x, [&](const Run& run) {
      const T* from = data + run.x_offset;
      if (in_passing) {
        computed[run.scale_idx] = scale_of(kernels.largest(from, run.length));
      }
      const RunScale run_scale = scale_of_run(x, scales, run);
      if (codes != nullptr) {
        const int64_t count = kernels.encode(from, run_scale, codes + run.offset, run.length);
        if (count != 0) {
          num_overflow += count;
        }
      }
      if (values != nullptr) {
        kernels.round(from, run_scale, values + run.offset, run.length);
      }
    });
  });
  if (out.num_overflow.defined()) {
    *output<int32_t>(out.num_overflow) =
        static_cast<int32_t>(std::min<int64_t>(num_overflow.load(), INT32_MAX));
  }
}

void dequantize_cpu(const MatrixInput& codes, const at::Tensor& scale, const at::Tensor& out) {
  constexpr const char* kOp = "fp8_dequantize";
  check_scale_values(kOp, "scale", scale);
  dispatch(kOp, out.scalar_type(), [&](auto tag, const auto& kernels) {
    using T = typename decltype(tag)::type;
    const uint8_t* data = input<uint8_t>(codes.data);
    const float* scales = input<float>(scale);
    T* to = output<T>(out);
    for_each_run(codes, [&](const Run& run) {
      kernels.decode(data + run.x_offset, scale_of_run(codes, scales, run), to + run.offset, run.length);
    });
  });
}

void fake_backward_cpu(const at::Tensor& dy, const MatrixInput& x, const at::Tensor& scale,
                       const at::Tensor& dx) {
  constexpr const char* kOp = "fp8_fake_quant_backward";
  check_scale_values(kOp, "scale", scale);
  dispatch(kOp, dx.scalar_type(), [&](auto tag, const auto& kernels) {
    using T = typename decltype(tag)::type;
    const T* data = input<T>(x.data);
    const T* upstream = input<T>(dy);
    const float* scales = input<float>(scale);
    T* to = output<T>(dx);
    for_each_run(x, [&](const Run& run) {
      kernels.round_backward(upstream + run.offset, data + run.x_offset, scale_of_run(x, scales, run),
                             to + run.offset, run.length);
    });
  });
}

}  // namespace htree::fp8
