#if defined(__x86_64__)
#define HTREE_AVX512_BF16
#include "host/cpu/simd.h"
// The body is compiled for the instruction set chosen above.
#include "host/cpu/simd_products.h"
#include "ops/gated_mlp/cpu/gated_mlp_products.h"

namespace htree {
namespace HTREE_ISA {

// A step takes two elements per lane.
struct Bf16PairStep {
  using Row = Bf16;
  using Column = Bf16;
  using Pairs = __m512bh;
  static constexpr int kElements = 2 * kLanes;
  static Pairs row(const Bf16* x) { return (Pairs)_mm512_loadu_si512(x); }
  static Pairs column(const Bf16* w) { return row(w); }
  static Pairs column(const Bf16* w, int count) {
    Bf16 elements[kElements] = {};
    std::memcpy(elements, w, sizeof(Bf16) * static_cast<size_t>(count));
    return row(elements);
  }
  static VecF add(VecF sum, Pairs row, Pairs column) {
    return (VecF)_mm512_dpbf16_ps((__m512)sum, row, column);
  }
};
static_assert(Bf16PairStep::kElements <= kRowPadding, "rows are padded to a multiple of a step");

}  // namespace HTREE_ISA

namespace gated_mlp {

void multiply_bf16_pairs(const RowProducts<Bf16, Bf16, float>& products) {
  constexpr int kChain = 32;  // steps of 32 elements
  HTREE_ISA::multiply_rows<HTREE_ISA::Bf16PairStep, kChain>(products);
}

}  // namespace gated_mlp
}  // namespace htree
#endif
