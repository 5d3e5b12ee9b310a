// The CPU row kernels of hadamard_rows.h, compiled per instruction
// set after host/cpu/simd.h (csrc/instances.py).
//
// A stage on bit b of the element index works inside vectors while 2^b is below their width, across
// vectors in registers for the next three bits, and for higher bits in passes of up to three bits over a
// row in scratch memory.
#pragma once

#include "ops/hadamard/hadamard_rows.h"

namespace htree::HTREE_ISA {

using hadamard::RowRun;
using hadamard::RunShape;

constexpr int kLog2Block = 3;  // vectors in registers
constexpr int kBlock = 1 << kLog2Block;

constexpr int log2_of(int64_t n) {
  return n == 1 ? 0 : 1 + log2_of(n / 2);
}
template <typename T>
constexpr int kLog2Lanes = log2_of(kLanesOf<VecOf<T>>);

template <int kDistance>
inline VecF exchange_lanes(VecF x) {
  VecI index;
  for (int i = 0; i < kLanesOf<VecF>; ++i) {
    index[i] = i ^ kDistance;
  }
  return __builtin_shuffle(x, index);
}
template <int kDistance>
inline VecD exchange_lanes(VecD x) {
  typedef int64_t Index __attribute__((vector_size(sizeof(VecD))));
  Index index;
  for (int i = 0; i < kLanesOf<VecD>; ++i) {
    index[i] = i ^ kDistance;
  }
  return __builtin_shuffle(x, index);
}

// The stages of lane bits [kBit, kLast) of every vector.
template <int kBit, int kLast, typename Vec, int kVecs>
inline __attribute__((always_inline)) void stages_inside(Vec (&x)[kVecs]) {
  if constexpr (kBit < kLast) {
    Vec sign;
    for (int i = 0; i < kLanesOf<Vec>; ++i) {
      sign[i] = (i >> kBit & 1) != 0 ? -1 : 1;
    }
    for (int v = 0; v < kVecs; ++v) {
      x[v] = x[v] * sign + exchange_lanes<1 << kBit>(x[v]);
    }
    stages_inside<kBit + 1, kLast>(x);
  }
}

// The stages of all bits of a vector's number.
template <typename Vec, int kVecs>
inline __attribute__((always_inline)) void stages_across(Vec (&x)[kVecs]) {
  for (int distance = 1; distance < kVecs; distance *= 2) {
    for (int v = 0; v < kVecs; ++v) {
      if ((v & distance) == 0) {
        const Vec low = x[v];
        const Vec high = x[v + distance];
        x[v] = low + high;
        x[v + distance] = low - high;
      }
    }
  }
}

template <typename T>
inline T* element(T* row, const RowRun<T>& run, const RunShape& shape, int64_t i) {
  return row + (i >> shape.log2_segment) * run.segment_stride +
         (i & ((int64_t{1} << shape.log2_segment) - 1));
}

// A row of kVecs vectors, in registers alone.
template <typename T, int kVecs>
void rows_in_registers(const RowRun<const T>& x, const RowRun<T>& y, const RunShape& shape, void*) {
  using Vec = VecOf<T>;
  constexpr int kWidth = kLanesOf<Vec>;
  const Vec scale = splat(static_cast<ScalarOf<T>>(shape.scale));
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    const T* from = x.data + row * x.stride;
    T* to = y.data + row * y.stride;
    Vec value[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      value[v] = load(element(from, x, shape, v * kWidth));
    }
    stages_inside<0, kLog2Lanes<T>>(value);
    stages_across(value);
    for (int v = 0; v < kVecs; ++v) {
      store(element(to, y, shape, v * kWidth), value[v] * scale);
    }
  }
}

// One pass over a row in scratch: the stages of the log2(kRadix) bits from that of `stride` on.
// `put` stores the results.
template <int kRadix, typename S, typename Put>
inline __attribute__((always_inline)) void pass(const S* row, int64_t n, int64_t stride, Put&& put) {
  using Vec = VecOf<S>;
  for (int64_t base = 0; base < n; base += kRadix * stride) {
    for (int64_t i = base; i < base + stride; i += kLanesOf<Vec>) {
      Vec value[kRadix];
      for (int v = 0; v < kRadix; ++v) {
        value[v] = load(row + i + v * stride);
      }
      stages_across(value);
      for (int v = 0; v < kRadix; ++v) {
        put(i + v * stride, value[v]);
      }
    }
  }
}

template <typename S, typename Put>
inline __attribute__((always_inline)) void pass_of(int log2_radix, const S* row, int64_t n, int64_t stride,
                                                   Put&& put) {
  if (log2_radix == 1) {
    pass<2>(row, n, stride, put);
  } else if (log2_radix == 2) {
    pass<4>(row, n, stride, put);
  } else {
    pass<8>(row, n, stride, put);
  }
}

// Longer rows: the first block of bits on the way into scratch, three more bits per pass;
// the last pass stores.
template <typename T>
void rows_in_scratch(const RowRun<const T>& x, const RowRun<T>& y, const RunShape& shape, void* scratch) {
  using Vec = VecOf<T>;
  constexpr int kWidth = kLanesOf<Vec>;
  auto* held = static_cast<ScalarOf<T>*>(scratch);
  const Vec scale = splat(static_cast<ScalarOf<T>>(shape.scale));
  const int64_t n = int64_t{1} << shape.log2_length;
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    const T* from = x.data + row * x.stride;
    T* to = y.data + row * y.stride;
    for (int64_t i = 0; i < n; i += kBlock * kWidth) {
      Vec value[kBlock];
      for (int v = 0; v < kBlock; ++v) {
        value[v] = load(element(from, x, shape, i + v * kWidth));
      }
      stages_inside<0, kLog2Lanes<T>>(value);
      stages_across(value);
      for (int v = 0; v < kBlock; ++v) {
        store(held + i + v * kWidth, value[v]);
      }
    }
    int bit = kLog2Lanes<T> + kLog2Block;
    const int left = (shape.log2_length - bit) % 3;
    if (left != 0 && shape.log2_length - bit > 3) {
      pass_of(left, held, n, int64_t{1} << bit, [&](int64_t i, Vec value) { store(held + i, value); });
      bit += left;
    }
    for (; shape.log2_length - bit > 3; bit += 3) {
      pass<8>(held, n, int64_t{1} << bit, [&](int64_t i, Vec value) { store(held + i, value); });
    }
    pass_of(shape.log2_length - bit, held, n, int64_t{1} << bit,
            [&](int64_t i, Vec value) { store(element(to, y, shape, i), value * scale); });
  }
}

// Rows no longer than a vector that lie one after another: several vectors of whole rows at a time.
template <typename T, int kLog2Length>
void dense_short_rows(const RowRun<const T>& x, const RowRun<T>& y, const RunShape& shape, void*) {
  using Vec = VecOf<T>;
  constexpr int kWidth = kLanesOf<Vec>;
  const Vec scale = splat(static_cast<ScalarOf<T>>(shape.scale));
  const int64_t total = shape.num_rows << kLog2Length;
  int64_t i = 0;
  for (; i + kBlock * kWidth <= total; i += kBlock * kWidth) {
    Vec value[kBlock];
    for (int v = 0; v < kBlock; ++v) {
      value[v] = load(x.data + i + v * kWidth);
    }
    stages_inside<0, kLog2Length>(value);
    for (int v = 0; v < kBlock; ++v) {
      store(y.data + i + v * kWidth, value[v] * scale);
    }
  }
  for (; i < total; i += kWidth) {
    const int count = static_cast<int>(total - i < kWidth ? total - i : kWidth);
    Vec value[1] = {load_partial(x.data + i, count, 0)};
    stages_inside<0, kLog2Length>(value);
    store_partial(y.data + i, value[0] * scale, count);
  }
}

template <typename T, int kLog2Length>
void dense_rows(const RowRun<const T>& x, const RowRun<T>& y, const RunShape& shape, void* scratch) {
  if constexpr (kLog2Length <= kLog2Lanes<T>) {
    dense_short_rows<T, kLog2Length>(x, y, shape, scratch);
  }
}

// Rows that fit into vectors, which transform_rows has checked.
template <typename T>
void transform_vectors(const RowRun<const T>& x, const RowRun<T>& y, const RunShape& shape, void* scratch) {
  const int64_t n = int64_t{1} << shape.log2_length;
  const bool dense = shape.log2_segment == shape.log2_length && x.stride == n && y.stride == n;
  if (shape.log2_length < kLog2Lanes<T> || (shape.log2_length == kLog2Lanes<T> && dense)) {
    constexpr hadamard::TransformRows<T> kKernels[] = {dense_rows<T, 0>, dense_rows<T, 1>, dense_rows<T, 2>,
                                                       dense_rows<T, 3>, dense_rows<T, 4>};
    kKernels[shape.log2_length](x, y, shape, scratch);
    return;
  }
  switch (shape.log2_length - kLog2Lanes<T>) {
    case 0:
      return rows_in_registers<T, 1>(x, y, shape, scratch);
    case 1:
      return rows_in_registers<T, 2>(x, y, shape, scratch);
    case 2:
      return rows_in_registers<T, 4>(x, y, shape, scratch);
    case 3:
      return rows_in_registers<T, 8>(x, y, shape, scratch);
    default:
      return rows_in_scratch<T>(x, y, shape, scratch);
  }
}

// Vectors need segments of at least one vector, and short rows must lie one after another. Any other row is
// copied element by element to the end of scratch and back.
template <typename T>
void transform_rows(const RowRun<const T>& x, const RowRun<T>& y, const RunShape& shape, void* scratch) {
  const int64_t n = int64_t{1} << shape.log2_length;
  const bool whole = shape.log2_segment == shape.log2_length;
  const bool vectors = shape.log2_length < kLog2Lanes<T> ? whole && x.stride == n && y.stride == n
                                                         : whole || shape.log2_segment >= kLog2Lanes<T>;
  if (vectors) {
    transform_vectors<T>(x, y, shape, scratch);
    return;
  }
  T* copy = reinterpret_cast<T*>(static_cast<ScalarOf<T>*>(scratch) + n);
  const RunShape one_row = {1, shape.log2_length, shape.log2_length, shape.scale};
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    const T* from = x.data + row * x.stride;
    T* to = y.data + row * y.stride;
    for (int64_t i = 0; i < n; ++i) {
      copy[i] = *element(from, x, shape, i);
    }
    transform_vectors<T>({copy, n, 0}, {copy, n, 0}, one_row, scratch);
    for (int64_t i = 0; i < n; ++i) {
      *element(to, y, shape, i) = copy[i];
    }
  }
}

constexpr hadamard::RowKernels row_kernels() {
  return {transform_rows<float>, transform_rows<Fp16>, transform_rows<Bf16>, transform_rows<double>};
}

}  // namespace htree::HTREE_ISA
