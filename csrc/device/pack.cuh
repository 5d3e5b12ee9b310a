// Typed memory access: N elements that are loaded or stored together, 16 bytes at most.
#pragma once

#include <cstdint>
#include <type_traits>

namespace htree::device {

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  static_assert(sizeof(T) * N <= 16 && (N & (N - 1)) == 0, "a pack is one load of at most 16 bytes");
  T data[N];

  __device__ __forceinline__ T& operator[](int i) { return data[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return data[i]; }
};

// How many elements of T the widest load holds.
template <typename T>
inline constexpr int kPackOf = 16 / static_cast<int>(sizeof(T));

// `p` must be aligned to the size of the pack.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}

// For data that is not read again: it leaves the caches to others.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack_streaming(const T* p) {
  static_assert(sizeof(T) * N >= 4);
  using Bits =
      std::conditional_t<sizeof(T) * N == 16, int4, std::conditional_t<sizeof(T) * N == 8, int2, int>>;
  const Bits bits = __ldcs(reinterpret_cast<const Bits*>(p));
  return *reinterpret_cast<const Pack<T, N>*>(&bits);
}

template <int N, typename T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, N>& value) {
  *reinterpret_cast<Pack<T, N>*>(p) = value;
}

// For data that is not read again soon: it leaves the caches to others.
template <int N, typename T>
__device__ __forceinline__ void store_pack_streaming(T* p, const Pack<T, N>& value) {
  if constexpr (sizeof(T) * N == 16) {
    __stcs(reinterpret_cast<int4*>(p), *reinterpret_cast<const int4*>(&value));
  } else {
    store_pack(p, value);
  }
}

}  // namespace htree::device
