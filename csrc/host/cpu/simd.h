// Vectors of one instruction set, in a namespace of its own (HTREE_ISA), written with the compiler's vector
// extensions so that one source serves every instruction set. It is not at::vec, whose width is fixed by
// torch's own build macros, so that an extension cannot choose it at run time.
//
// This is the first include of a file of CPU kernels, which defines HTREE_BASELINE, HTREE_AVX2, HTREE_AVX512
// or HTREE_AVX512_BF16 above it. From here to the end of the file the compiler may use those instructions.
// Standard headers come before the pragma, and the kernels use none of their inline functions: otherwise the
// linker could keep an AVX-512 copy of a shared inline function for the whole process.
#pragma once

#include "host/cpu/simd_prelude.h"

#if defined(HTREE_AVX512_BF16)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#define HTREE_ISA isa_avx512_bf16
#define HTREE_LANES 16
#elif defined(HTREE_AVX512)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define HTREE_ISA isa_avx512
#define HTREE_LANES 16
#elif defined(HTREE_AVX2)
#pragma GCC target("avx2,fma,f16c")
#define HTREE_ISA isa_avx2
#define HTREE_LANES 8
#elif defined(HTREE_BASELINE)  // what the compiler targets by default (SSE2, NEON, ...)
#define HTREE_ISA isa_baseline
#define HTREE_LANES 4
#else
#error "define the instruction set above host/cpu/simd.h"
#endif

namespace htree::HTREE_ISA {

constexpr int kLanes = HTREE_LANES;
typedef float VecF __attribute__((vector_size(4 * HTREE_LANES)));
typedef int32_t VecI __attribute__((vector_size(4 * HTREE_LANES)));
typedef uint32_t VecU __attribute__((vector_size(4 * HTREE_LANES)));  // for additions that may wrap around
typedef uint16_t VecH __attribute__((vector_size(2 * HTREE_LANES)));
// The same registers as doubles, with half as many lanes.
typedef double VecD __attribute__((vector_size(4 * HTREE_LANES)));
typedef uint64_t VecL __attribute__((vector_size(4 * HTREE_LANES)));

// The arithmetic of a storage type: VecF and float, for double VecD and double.
template <typename T>
struct Lane {
  using Scalar = float;
  using Vec = VecF;
};
template <>
struct Lane<double> {
  using Scalar = double;
  using Vec = VecD;
};
template <typename T>
using VecOf = typename Lane<T>::Vec;
template <typename T>
using ScalarOf = typename Lane<T>::Scalar;
template <typename V>
constexpr int kLanesOf = sizeof(V) / sizeof(V{}[0]);

inline VecF splat(float x) {
  return x - VecF{};
}
inline VecD splat(double x) {
  return x - VecD{};
}
inline VecF as_float(VecI x) {
  return (VecF)x;
}
inline VecI as_int(VecF x) {
  return (VecI)x;
}
inline VecF max(VecF a, VecF b) {
  return a > b ? a : b;
}
inline VecD max(VecD a, VecD b) {
  return a > b ? a : b;
}

template <typename V>
inline auto horizontal_sum(V x) {
  constexpr int kCount = kLanesOf<V>;
  decltype(x[0] + x[0]) sum[kCount];
  std::memcpy(sum, &x, sizeof x);
  for (int width = kCount / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      sum[i] += sum[i + width];
    }
  }
  return sum[0];
}

template <typename V>
inline auto horizontal_max(V x) {
  constexpr int kCount = kLanesOf<V>;
  decltype(x[0] + x[0]) best[kCount];
  std::memcpy(best, &x, sizeof x);
  for (int width = kCount / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      best[i] = best[i] > best[i + width] ? best[i] : best[i + width];
    }
  }
  return best[0];
}

// e^x to about 1 ulp: x = n ln2 + r with |r| <= ln2/2, a polynomial of degree 6 for e^r, and n added to the
// exponent. The result is 0 below the smallest normal number, +inf above the largest, NaN for NaN.
inline VecF exp(VecF x) {
  const VecF shifter =
      splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const VecF shifted = x * 1.44269504088896341f + shifter;
  const VecF n = shifted - shifter;
  const VecF r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  VecF p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const VecU exponent = ((VecU)shifted - (VecU)shifter) << 23;
  VecF y = (VecF)((VecU)p + exponent);  // wraps only in lanes that are replaced below
  y = x < -87.33654f ? VecF{} : y;
  y = x > 88.37626f ? splat(std::numeric_limits<float>::infinity()) : y;
  return x == x ? y : x;
}

// The same for doubles: the Taylor series of e^r to degree 13 leaves an error of 5e-18 at |r| = ln2/2.
inline VecD exp(VecD x) {
  const VecD shifter = splat(6755399441055744.0);  // 1.5 * 2^52
  const VecD shifted = x * 1.4426950408889634 + shifter;
  const VecD n = shifted - shifter;
  const VecD r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  VecD p = splat(1.0 / 6227020800.0);
  constexpr double kFactorials[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0,
                                    720.0,       120.0,      24.0,      6.0,      2.0,     1.0};
  for (double factorial : kFactorials) {
    p = p * r + 1.0 / factorial;
  }
  p = p * r + 1.0;
  const VecL exponent = ((VecL)shifted - (VecL)shifter) << 52;
  VecD y = (VecD)((VecL)p + exponent);
  y = x < -708.3964185322641 ? VecD{} : y;
  y = x > 709.08 ? splat(std::numeric_limits<double>::infinity()) : y;
  return x == x ? y : x;
}

// ---- storage: from fp32, fp16 and bf16 in memory to fp32 lanes and back (round to nearest even)

// One instruction, where GCC 12 makes several of __builtin_convertvector.
inline VecI widen(VecH bits) {
#if HTREE_LANES == 16
  return (VecI)_mm512_cvtepu16_epi32((__m256i)bits);
#elif HTREE_LANES == 8
  return (VecI)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, VecI);
#endif
}
inline VecH narrow(VecI bits) {
#if HTREE_LANES == 16
  return (VecH)_mm512_cvtepi32_epi16((__m512i)bits);
#else
  return __builtin_convertvector(bits, VecH);
#endif
}

inline VecF load(const float* p) {
  VecF x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, VecF x) {
  std::memcpy(p, &x, sizeof x);
}

inline VecD load(const double* p) {
  VecD x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(double* p, VecD x) {
  std::memcpy(p, &x, sizeof x);
}

inline VecF load(const Bf16* p) {
  VecH bits;
  std::memcpy(&bits, p, sizeof bits);
  return as_float(widen(bits) << 16);
}
inline void store(Bf16* p, VecF x) {
  const VecI bits = as_int(x);
  const VecI rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const VecI chosen = x == x ? rounded : ((bits >> 16) | 0x40);  // a NaN must not round to infinity
  const VecH out = narrow(chosen);
  std::memcpy(p, &out, sizeof out);
}

inline VecF load(const Fp16* p) {
#if HTREE_LANES == 16
  return (VecF)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif HTREE_LANES == 8
  return (VecF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  VecH half;
  std::memcpy(&half, p, sizeof half);
  const VecI bits = widen(half);
  const VecI magnitude = (bits & 0x7fff) << 13;
  // Scaling by 2^112 moves the exponent to fp32's bias and normalises subnormals; Inf and
  // NaN keep all exponent bits.
  const VecF scaled = as_float(magnitude) * 5.192296858534828e+33f;
  const VecI special = magnitude | 0x7f800000;
  const VecI value = (bits & 0x7c00) == 0x7c00 ? special : as_int(scaled);
  return as_float(value | ((bits & 0x8000) << 16));
#endif
}

inline void store(Fp16* p, VecF x) {
#if HTREE_LANES == 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif HTREE_LANES == 8
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  const VecI bits = as_int(x);
  const VecI sign = (bits >> 16) & 0x8000;
  const VecF magnitude = as_float(bits & 0x7fffffff);
  // Normal results: round the mantissa to 10 bits, then re-bias the exponent by 112.
  const VecI raw = as_int(magnitude);
  const VecI normal = ((raw + 0xfff + ((raw >> 13) & 1)) >> 13) - (112 << 10);
  // Subnormal results: adding 0.5 puts the half's last bit at the end of the fp32 mantissa, and rounds.
  const VecI subnormal = as_int(magnitude + 0.5f) - as_int(splat(0.5f));
  VecI out = magnitude < 6.103515625e-05f ? subnormal : normal;
  out = magnitude >= 65520.0f ? (VecI{} + 0x7c00) : out;
  out = x == x ? out : (VecI{} + 0x7e00);
  const VecH half = narrow(out | sign);
  std::memcpy(p, &half, sizeof half);
#endif
}

// Partial accesses touch `count` elements, fewer than a vector has. Missing lanes read as `fill`.
template <typename T>
inline VecOf<T> load_partial(const T* p, int count, ScalarOf<T> fill) {
  T lanes[kLanesOf<VecOf<T>>] = {};
  std::memcpy(lanes, p, sizeof(T) * static_cast<size_t>(count));
  VecOf<T> x = load(lanes);
  for (int i = count; i < kLanesOf<VecOf<T>>; ++i) {
    x[i] = fill;
  }
  return x;
}

template <typename T>
inline void store_partial(T* p, VecOf<T> x, int count) {
  T lanes[kLanesOf<VecOf<T>>];
  store(lanes, x);
  std::memcpy(p, lanes, sizeof(T) * static_cast<size_t>(count));
}

inline float to_float(float x) {
  return x;
}
inline float to_float(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
inline float to_float(Fp16 x) {
  return load_partial(&x, 1, 0.0f)[0];
}

template <typename T>
inline T from_float(float x) {
  T y;
  store_partial(&y, splat(x), 1);
  return y;
}

// ---- by storage type: one row kernel serves fp32, fp16, bf16 (float lanes) and fp64 (double lanes)

// How much of a vector a step touches: all of it, or `count` elements at the end of a row.
struct AllLanes {};
struct SomeLanes {
  int count;
};

template <typename T>
inline VecOf<T> load_lanes(const T* p, AllLanes) {
  return load(p);
}
template <typename T>
inline VecOf<T> load_lanes(const T* p, SomeLanes lanes) {
  return load_partial(p, lanes.count, 0);  // missing lanes are 0
}
template <typename T>
inline void store_lanes(T* p, VecOf<T> x, AllLanes) {
  store(p, x);
}
template <typename T>
inline void store_lanes(T* p, VecOf<T> x, SomeLanes lanes) {
  store_partial(p, x, lanes.count);
}

// Calls step(i, lanes) for the vectors of a row of `width` elements of type T.
template <typename T, typename Step>
inline void for_vectors(int64_t width, Step&& step) {
  constexpr int kWidth = kLanesOf<VecOf<T>>;
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) {
    step(i, AllLanes{});
  }
  if (i < width) {
    step(i, SomeLanes{static_cast<int>(width - i)});
  }
}

}  // namespace htree::HTREE_ISA
