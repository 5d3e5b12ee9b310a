// The names of torch's element types in the CPU row kernels, which include no torch.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

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

}  // namespace htree
