// The CPU products of gated_mlp_products.h, compiled per instruction
// set after host/cpu/simd.h (csrc/instances.py).
#pragma once

#include "host/cpu/simd_products.h"
#include "ops/gated_mlp/cpu/gated_mlp_products.h"

namespace htree::HTREE_ISA {

// Steps in fp32 before a sum goes on in fp64. Shorter chains would be more exact; but with chains of 15 the
// folding takes a tenth of the time of a product of depth 1024.
constexpr int kProductChain = 32;

template <typename T>
constexpr gated_mlp::TypedProducts<T> typed_products() {
  return {widen_row<T>, multiply_rows<FloatStep<T>, kProductChain, float>,
          [](const float* from, T* to, int64_t count) {
            for_vectors<T>(count, [&](int64_t i, auto lanes) {
              store_lanes(to + i, load_lanes(from + i, lanes), lanes);
            });
          }};
}

constexpr gated_mlp::ProductKernels product_kernels() {
  return {typed_products<float>(), typed_products<Fp16>(), typed_products<Bf16>()};
}

}  // namespace htree::HTREE_ISA
