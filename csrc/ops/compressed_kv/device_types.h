// Torch's half types as CUDA's.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace htree::compressed_kv {

template <typename T>
using DeviceTypeOf =
    std::conditional_t<std::is_same_v<T, c10::Half>, __half,
                       std::conditional_t<std::is_same_v<T, c10::BFloat16>, __nv_bfloat16, T>>;

}  // namespace htree::compressed_kv
