// Vectors by storage type, so that one row kernel serves fp32, fp16, bf16 (float lanes) and fp64 (double
// lanes). Include after a host/simd_*.h.
#pragma once

namespace htree::HTREE_ISA {

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
