// The CPU kernels of gemm_rows.h, compiled per instruction set after host/cpu/simd.h (csrc/instances.py).
#pragma once

#include "host/cpu/simd_products.h"
#include "ops/fp8/e4m3_lanes.h"
#include "ops/fp8/gemm/cpu/gemm_rows.h"

namespace htree::HTREE_ISA {
// A product of two codes is exact in fp32, so a chain of n products has n - 1 roundings,
// and folding adds one: a sum errs by at most 15 units of 2^-24 of the sum of magnitudes.
// P4 of docs/semantics/fp8.md allows 16.
constexpr int kCodeChain = 15;

struct CodeStep {
  using Row = float;
  using Column = uint8_t;
  static constexpr int kElements = kLanes;
  static VecF row(const float* x) { return load(x); }
  static VecF column(const uint8_t* codes) { return decode(load_codes(codes, AllLanes{})); }
  static VecF column(const uint8_t* codes, int count) { return decode(load_codes(codes, SomeLanes{count})); }
  static VecF add(VecF sum, VecF row, VecF column) { return sum + row * column; }
};

inline void widen_codes(const uint8_t* codes, int64_t count, float* to, int64_t width) {
  for_vectors<float>(count, [&](int64_t i, auto lanes) {
    store_lanes(to + i, decode(load_codes(codes + i, lanes)), lanes);
  });
  std::memset(to + count, 0, sizeof(float) * static_cast<size_t>(width - count));
}

// The lanes of two vectors of doubles, rounded to fp32.
inline VecF narrow_doubles(VecD low, VecD high) {
  const VecHalf halves[2] = {__builtin_convertvector(low, VecHalf), __builtin_convertvector(high, VecHalf)};
  VecF x;
  std::memcpy(&x, halves, sizeof x);
  return x;
}

template <typename T>
void store_quotients(const double* sums, int64_t count, double a_scale, const double* b_scale, T* out) {
  constexpr int kHalf = kLanesOf<VecD>;
  const VecD by_row = splat(a_scale);
  for_vectors<float>(count, [&](int64_t i, auto lanes) {
    const VecD low = load(sums + i) / by_row / load(b_scale + i);
    const VecD high = load(sums + i + kHalf) / by_row / load(b_scale + i + kHalf);
    store_lanes(out + i, narrow_doubles(low, high), lanes);
  });
}

constexpr fp8::GemmKernels gemm_kernels() {
  return {widen_codes,
          multiply_rows<CodeStep, kCodeChain, double>,
          multiply_rows<FloatStep<float>, kCodeChain, double>,
          store_quotients<float>,
          store_quotients<Fp16>,
          store_quotients<Bf16>};
}

}  // namespace htree::HTREE_ISA
