// The names of torch's element types in the CPU row kernels, which include no torch.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "host/cpu/simd_prelude.h"

namespace htree {

template <typename T>
struct StorageOf {
  using type = T;
};
template <>
struct StorageOf<c10::Half> {
  using type = Fp16;
};
template <>
struct StorageOf<c10::BFloat16> {
  using type = Bf16;
};

template <typename T>
using Storage = typename StorageOf<T>::type;

// The loops for an element type, torch's or that of Storage, in a table that has them for_float, for_half, for_bfloat16 and
// for_double.
template <typename T, typename Tables>
const auto& loops_of(const Tables& tables) {
  if constexpr (std::is_same_v<T, float>) {
    return tables.for_float;
  } else if constexpr (std::is_same_v<Storage<T>, Fp16>) {
    return tables.for_half;
  } else if constexpr (std::is_same_v<Storage<T>, Bf16>) {
    return tables.for_bfloat16;
  } else {
    static_assert(std::is_same_v<T, double>);
    return tables.for_double;
  }
}

}  // namespace htree
