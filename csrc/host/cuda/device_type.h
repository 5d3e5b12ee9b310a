// The names of torch's element types in CUDA kernels.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace htree {

template <typename T>
struct DeviceTypeOf {
  using type = T;
};
template <>
struct DeviceTypeOf<c10::Half> {
  using type = __half;
};
template <>
struct DeviceTypeOf<c10::BFloat16> {
  using type = __nv_bfloat16;
};

// The kernels' type for tensors of T: __half for c10::Half, __nv_bfloat16 for c10::BFloat16, else T.
template <typename T>
using DeviceType = typename DeviceTypeOf<T>::type;

}  // namespace htree
