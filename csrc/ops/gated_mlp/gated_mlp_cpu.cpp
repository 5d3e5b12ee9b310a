// CPU kernels of the gated_mlp family. What gated_mlp_fused_cpu.cpp does not take gets its products from the
// BLAS library in fp32 (fp64 for fp64), one block of the weights' rows after another, so that neither fp32
// copies of half weights nor the products ever exist whole. The elementwise part is one vectorised pass.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "host/dispatch.h"
#include "ops/gated_mlp/cpu/gated_mlp_cpu.h"

namespace htree::gated_mlp {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 1 << 13;       // elements of a task
constexpr int64_t kBlockBytes = 1 << 26;  // bytes of a block of one weight, in arithmetic precision
constexpr int64_t kLeastBlock = 256;      // rows of a weight

// Calls run(row, column, count) in parallel over runs of a [rows, columns] matrix; a run stays within a row.
template <typename Run>
void for_row_runs(int64_t rows, int64_t columns, Run&& run) {
  at::parallel_for(0, rows * columns, kGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t column = begin % columns;
      const int64_t count = std::min(end - begin, columns - column);
      run(begin / columns, column, count);
      begin += count;
    }
  });
}

// The dtype of products and sums.
at::ScalarType arithmetic_of(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Calls body(first, count) over blocks of the weights' rows.
template <typename Body>
void for_blocks(const Sizes& sizes, int64_t element_bytes, Body&& body) {
  const int64_t block = std::max(kLeastBlock, kBlockBytes / (element_bytes * sizes.hidden));
  for (int64_t first = 0; first < sizes.inner; first += block) {
    body(first, std::min(block, sizes.inner - first));
  }
}

Tensor block_of(const Tensor& weight, int64_t first, int64_t count, at::ScalarType dtype) {
  return weight.narrow(0, first, count).to(dtype);
}

template <typename T>
void gate_block(Activation activation, const Tensor& linear, const Tensor& acted, const Tensor& out,
                int64_t first) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const auto kernel = loops_of<T>(row_kernels()).forward;
  const A* linear_data = linear.const_data_ptr<A>();
  const A* acted_data = acted.const_data_ptr<A>();
  auto* out_data = reinterpret_cast<Storage<T>*>(out.mutable_data_ptr<T>()) + first;
  const int64_t columns = linear.size(1);
  const int64_t inner = out.size(1);
  for_row_runs(linear.size(0), columns, [&](int64_t row, int64_t column, int64_t count) {
    const int64_t at = row * columns + column;
    kernel(activation, count, linear_data + at, acted_data + at, out_data + row * inner + column);
  });
}

// Replaces linear and acted by their gradients.
template <typename T>
void gate_block_backward(Activation activation, const Tensor& dy, int64_t first, const Tensor& linear,
                         const Tensor& acted) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const auto kernel = loops_of<T>(row_kernels()).backward;
  A* linear_data = linear.mutable_data_ptr<A>();
  A* acted_data = acted.mutable_data_ptr<A>();
  const auto* dy_data = reinterpret_cast<const Storage<T>*>(dy.const_data_ptr<T>()) + first;
  const int64_t columns = linear.size(1);
  const int64_t inner = dy.size(1);
  for_row_runs(linear.size(0), columns, [&](int64_t row, int64_t column, int64_t count) {
    const int64_t at = row * columns + column;
    kernel(activation, count, dy_data + row * inner + column, linear_data + at, acted_data + at);
  });
}

}  // namespace

void forward_cpu(const Operands& o, at::IntArrayRef /*config*/, const Results& results) {
  if (is_fused(o)) {
    fused_forward_cpu(o, results);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = arithmetic_of(o.x);
  const Tensor x = o.x.to(dtype);
  for_blocks(o.sizes, c10::elementSize(dtype), [&](int64_t first, int64_t count) {
    const Tensor linear = at::mm(x, block_of(o.linear, first, count, dtype).t()).contiguous();
    const Tensor acted = at::mm(x, block_of(o.acted, first, count, dtype).t()).contiguous();
    dispatch_dtype("gated_mlp", o.x.scalar_type(), AllFloatTypes{}, [&](auto tag) {
      gate_block<typename decltype(tag)::type>(o.activation, linear, acted, results.out, first);
    });
    if (results.linear.defined()) {
      results.linear.narrow(1, first, count).copy_(linear);
      results.acted.narrow(1, first, count).copy_(acted);
    }
  });
}

// Whether the BLAS library multiplies bf16 faster than fp32.
bool takes_bf16() {
  return active_isa() == Isa::kAvx512Bf16 || (active_isa() == Isa::kAvx512 && has_bf16_tiles());
}

// Takes the products from the BLAS library. `dtype` is that of the sums; for bf16 it is bf16 where that is
// faster, and then dlinear and dacted are rounded to it and the weights are not copied.
void backward_cpu(const Operands& o, const BackwardOperands& b) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const auto wide = arithmetic_of(o.x);
  const bool narrow = o.x.scalar_type() == at::kBFloat16 && takes_bf16();
  const auto dtype = narrow ? at::kBFloat16 : wide;
  const Tensor x = o.x.to(dtype);
  const Tensor dy = b.dy.contiguous();
  const bool in_place = dtype == o.x.scalar_type();  // gradients are written where they belong
  Tensor dx = !b.dx.defined() || in_place ? b.dx : at::empty_like(b.dx, dtype);
  const auto body = [&](int64_t first, int64_t count) {
    const Tensor linear_weight = block_of(o.linear, first, count, dtype);
    const Tensor acted_weight = block_of(o.acted, first, count, dtype);
    // A fresh tensor, because the gradients are written over it.
    const auto product = [&](const Tensor& saved, const Tensor& weight) {
      return saved.defined() ? at::empty({o.sizes.rows, count}, x.options().dtype(wide))
                                   .copy_(saved.narrow(1, first, count))
                             : at::mm(x.to(wide), weight.to(wide).t()).contiguous();
    };
    Tensor linear = product(b.linear_product, linear_weight);
    Tensor acted = product(b.acted_product, acted_weight);
    dispatch_dtype("gated_mlp_backward", o.x.scalar_type(), AllFloatTypes{}, [&](auto tag) {
      gate_block_backward<typename decltype(tag)::type>(o.activation, dy, first, linear, acted);
    });
    linear = linear.to(dtype);
    acted = acted.to(dtype);
    if (dx.defined()) {
      first == 0 ? at::mm_out(dx, linear, linear_weight) : dx.addmm_(linear, linear_weight);
      dx.addmm_(acted, acted_weight);
    }
    const auto weight_gradient = [&](const Tensor& gradient, const Tensor& whole) {
      if (whole.defined()) {
        Tensor part = whole.narrow(0, first, count);
        in_place ? at::mm_out(part, gradient.t(), x) : part.copy_(at::mm(gradient.t(), x));
      }
    };
    weight_gradient(linear, b.dlinear);
    weight_gradient(acted, b.dacted);
  };
  if (narrow) {
    body(0, o.sizes.inner);
  } else {
    for_blocks(o.sizes, c10::elementSize(dtype), body);
  }
  if (dx.defined() && !in_place) {
    b.dx.copy_(dx);
  }
}

}  // namespace htree::gated_mlp
