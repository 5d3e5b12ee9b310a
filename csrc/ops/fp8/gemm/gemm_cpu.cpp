// CPU kernel of fp8_gemm: the library's fp32 product, in which products of e4m3 codes are exact, over blocks
// of columns, so that the fp32 copy of b is never whole.
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "ops/fp8/gemm/gemm.h"

namespace htree::fp8 {
namespace {

constexpr int64_t kBlockBytes = 1 << 26;  // of a block of b in fp32
constexpr int64_t kLeastBlock = 256;      // columns

}  // namespace

void exact_gemm_cpu(const GemmArguments& g, const at::Tensor& c) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const int64_t columns = g.b.size(1);
  const int64_t block = std::max(kLeastBlock, kBlockBytes / (4 * g.b.size(0)));
  const at::Tensor a = g.a.to(at::kFloat);
  for (int64_t first = 0; first < columns; first += block) {
    const int64_t count = std::min(block, columns - first);
    const at::Tensor scale = g.b_scale.dim() == 0 ? g.b_scale : g.b_scale.narrow(1, first, count);
    at::Tensor sums = at::mm(a, g.b.narrow(1, first, count).to(at::kFloat));
    c.narrow(1, first, count).copy_(sums.div_(product_of_scales(g.a_scale, scale)));
  }
}

void gemm_cpu(const GemmArguments& g, at::IntArrayRef /*config*/, const at::Tensor& c) {
  exact_gemm_cpu(g, c);
}

}  // namespace htree::fp8
