// CPU kernels of the hadamard family, parallel over rows, each row vectorised. Arithmetic is in float, for
// double in double.
#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>

#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "host/dispatch.h"
#include "ops/hadamard/hadamard.h"
#include "ops/hadamard/hadamard_rows.h"

namespace htree::hadamard {
namespace {

// Elements of a task: enough to pay for handing it over.
constexpr int64_t kGrain = 1 << 15;
constexpr std::align_val_t kAlignment{64};

const RowKernels& kernels() {
  return HTREE_PICK_ISA(kRowKernels);
}

struct FreeAligned {
  void operator()(void* p) const { ::operator delete(p, kAlignment); }
};
using Scratch = std::unique_ptr<void, FreeAligned>;

// Offset in elements of row (outer, middle, inner).
int64_t offset_of(const std::array<int64_t, 3>& strides, int64_t outer, int64_t middle, int64_t inner) {
  return outer * strides[0] + middle * strides[1] + inner * strides[2];
}

template <typename T>
void transform_typed(const Problem& p, const Rows& rows, const T* x, T* y) {
  const auto kernel = loops_of<T>(kernels());
  const int64_t middle_size = rows.sizes[1];
  const int64_t inner_size = rows.sizes[2];
  const int64_t num_rows = rows.sizes[0] * middle_size * inner_size;
  const int64_t grain = std::max<int64_t>(1, kGrain >> p.log2_length);
  at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    const Scratch scratch(::operator new(scratch_bytes(sizeof(T), p.log2_length), kAlignment));
    // Runs of rows along the innermost dim.
    for (int64_t row = begin; row < end;) {
      const int64_t inner = row % inner_size;
      const int64_t outer = row / inner_size / middle_size;
      const int64_t middle = row / inner_size % middle_size;
      const int64_t count = std::min(end - row, inner_size - inner);
      const RowRun<const Storage<T>> from{
          reinterpret_cast<const Storage<T>*>(x + offset_of(rows.x_strides, outer, middle, inner)),
          rows.x_strides[2], rows.x_segment_stride};
      const RowRun<Storage<T>> to{
          reinterpret_cast<Storage<T>*>(y + offset_of(rows.y_strides, outer, middle, inner)),
          rows.y_strides[2], rows.y_segment_stride};
      kernel(from, to, {count, p.log2_length, p.log2_segment, p.scale}, scratch.get());
      row += count;
    }
  });
}

}  // namespace

void transform_cpu(const Problem& problem, const Rows& rows, const at::Tensor& x, const at::Tensor& y) {
  dispatch_dtype("hadamard_transform", x.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    transform_typed<T>(problem, rows, x.const_data_ptr<T>(), y.mutable_data_ptr<T>());
  });
}

}  // namespace htree::hadamard
