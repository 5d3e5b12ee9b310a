// The product with sums in fp64, by the BLAS library or cuBLAS. Products of e4m3 codes are multiples of 2^-18
// below 2^18, so every sum of up to 2^17 of them is exact in fp64, whatever its order: the bits depend
// neither on the library nor on the number of threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "ops/fp8/gemm/gemm.h"

namespace htree::fp8 {

// c = sums / a_scale / b_scale. fp64 holds every quotient on the way, and the product of the scales too.
inline void store_quotients(const at::Tensor& sums, const at::Tensor& a_scale, const at::Tensor& b_scale,
                            const at::Tensor& c) {
  c.copy_(sums.div_(a_scale.to(at::kDouble)).div_(b_scale.to(at::kDouble)));
}

// Works in blocks of rows of a and columns of b, so that their fp64 copies take at most `block_bytes` each,
// or 256 rows or columns. widen(codes) makes the copies.
template <class Widen>
void multiply_in_double(const GemmArguments& g, int64_t block_bytes, const at::Tensor& c, Widen&& widen) {
  constexpr int64_t kLeastBlock = 256;
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const int64_t block = std::max(kLeastBlock, block_bytes / (8 * g.a.size(1)));
  const auto part = [](const at::Tensor& t, int64_t dim, int64_t first, int64_t count) {
    return t.dim() == 0 ? t : t.narrow(dim, first, count);
  };
  for (int64_t row = 0; row < c.size(0); row += block) {
    const int64_t rows = std::min(block, c.size(0) - row);
    const at::Tensor a = widen(g.a.narrow(0, row, rows));
    for (int64_t column = 0; column < c.size(1); column += block) {
      const int64_t columns = std::min(block, c.size(1) - column);
      store_quotients(at::mm(a, widen(g.b.narrow(1, column, columns))), part(g.a_scale, 0, row, rows),
                      part(g.b_scale, 1, column, columns), c.narrow(0, row, rows).narrow(1, column, columns));
    }
  }
}

}  // namespace htree::fp8
