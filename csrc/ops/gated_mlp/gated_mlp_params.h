// Constants and sizes of the gated MLP that host and device
// share. Torch-free. docs/semantics/gated_mlp.md §3.2
#pragma once

#include <cstdint>

namespace htree::gated_mlp {

enum class Activation : int { kSilu = 0, kGelu = 1 };

// Sizes of out [rows, inner] = g * act(u) with g = x Wg^T, u = x Wu^T, x [rows,
// hidden], weights [inner, hidden].
struct Sizes {
  int64_t rows;
  int64_t inner;
  int64_t hidden;
};

// erfc(t) = exp(-t q(t)), so for z <= 0 the normal distribution function is exp(-t q(t)) / 2 with t = -z /
// sqrt(2). This is the coefficient of t^power in the polynomial q, a minimax fit on 0 <= t <= 6: the relative
// error of erfc is below 3e-6 down to z = -4, and below 2e-5 to the end.
constexpr float erfc_exponent(int power) {
  constexpr float kCoefficients[] = {
      1.1283835172653198f,     0.6365540027618408f,    0.10309068858623505f,     -0.019841870293021202f,
      0.0006448433268815279f,  0.0011433365291121866f, -0.00045170303201302886f, 9.292000322602689e-05f,
      -1.138717016146984e-05f, 7.837475664018712e-07f, -2.3359566725389413e-08f};
  return kCoefficients[power];
}
inline constexpr int kErfcTerms = 11;
// Beyond t = 6, where erfc is 2e-17, it falls as exp(-t^2), so that gelu(z) goes to 0 and
// is NaN at -infinity.
inline constexpr float kErfcLimit = 6.0f;
inline constexpr float kSqrtHalf = 0.70710678118654752f;
inline constexpr float kNormalPeak = 0.39894228040143268f;  // 1 / sqrt(2 pi)

}  // namespace htree::gated_mlp
