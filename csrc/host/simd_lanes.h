// Vectors by storage type, so that one row kernel serves fp32, fp16, bf16 (float lanes) and fp64 (double
// lanes). Include after a host/simd_*.h.
#pragma once

namespace htree::HTREE_ISA {

typedef double VecD __attribute__((vector_size(4 * HTREE_LANES)));

inline VecD load(const double* p) {
  VecD x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(double* p, VecD x) {
  std::memcpy(p, &x, sizeof x);
}

inline VecD load_partial(const double* p, int count, double fill) {
  VecD x = fill - VecD{};
  std::memcpy(&x, p, sizeof(double) * static_cast<size_t>(count));
  return x;
}
inline void store_partial(double* p, VecD x, int count) {
  std::memcpy(p, &x, sizeof(double) * static_cast<size_t>(count));
}

inline double horizontal_sum(VecD x) {
  double sum = x[0];
  for (int i = 1; i < kLanes / 2; ++i) {
    sum += x[i];
  }
  return sum;
}

// Arithmetic type of a storage type: fp32, and fp64 for fp64.
template <typename T>
struct Arithmetic {
  using Real = float;
  using Vec = VecF;
  static constexpr int kWidth = kLanes;
};
template <>
struct Arithmetic<double> {
  using Real = double;
  using Vec = VecD;
  static constexpr int kWidth = kLanes / 2;
};
template <typename T>
using Real = typename Arithmetic<T>::Real;
template <typename T>
using Vec = typename Arithmetic<T>::Vec;

// How much of a vector a step touches: all of it, or `count` elements at the end of a row.
struct AllLanes {};
struct SomeLanes {
  int count;
};

template <typename T>
inline Vec<T> load_lanes(const T* p, AllLanes) {
  return load(p);
}
template <typename T>
inline Vec<T> load_lanes(const T* p, SomeLanes lanes) {
  return load_partial(p, lanes.count, 0);  // missing lanes are 0
}
template <typename T>
inline void store_lanes(T* p, Vec<T> x, AllLanes) {
  store(p, x);
}
template <typename T>
inline void store_lanes(T* p, Vec<T> x, SomeLanes lanes) {
  store_partial(p, x, lanes.count);
}

// Calls step(i, lanes) for the vectors of a row of `width` elements of type T.
template <typename T, typename Step>
inline void for_vectors(int64_t width, Step&& step) {
  constexpr int kWidth = Arithmetic<T>::kWidth;
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) {
    step(i, AllLanes{});
  }
  if (i < width) {
    step(i, SomeLanes{static_cast<int>(width - i)});
  }
}

}  // namespace htree::HTREE_ISA
