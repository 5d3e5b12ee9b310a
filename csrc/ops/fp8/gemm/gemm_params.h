// Arguments of the FP8 matrix product kernels. Torch-free. docs/semantics/fp8.md §3.3
#pragma once

#include <cstdint>

namespace htree::fp8 {

// c[m, n] = sum over k of a[m, k] b[n, k], divided by both scales.
struct GemmSizes {
  int64_t m;
  int64_t n;
  int64_t k;
};

// One scale for the whole operand (stride 0), or one per row of a or column of b, `stride` elements apart.
struct GemmScale {
  const float* data;
  int64_t stride;
};

// Codes in rows that stand `pitch` bytes apart, a multiple of 16, aligned to 16 bytes.
struct GemmOperand {
  const void* data;
  int64_t pitch;
};

template <typename Out>
struct GemmParams {
  GemmSizes sizes;
  GemmOperand a;  // [m, k]
  GemmOperand b;  // [n, k]
  GemmScale a_scale;
  GemmScale b_scale;
  Out* c;  // [m, n], contiguous
};

}  // namespace htree::fp8
