// The last step of decode attention: normalised outputs and log-sum-exps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/numeric.cuh"
#include "ops/compressed_kv/decode/decode_params.h"

namespace htree::compressed_kv {

// What the weights of a part, whose maximum is `own`, count relative to `top`; both are in units of log2.
__device__ __forceinline__ float part_factor(float own, float top) {
  return own == device::negative_infinity<float>() ? 1.0f : exp2f(own - top);
}

// `value` is the weighted sum of the values of one channel, `total` the sum of the weights.
__device__ __forceinline__ void store_output(void* out, QueryType type, int64_t at, float value,
                                             float total) {
  const float result = total == 0.0f ? 0.0f : value / total;
  switch (type) {
    case QueryType::kHalf:
      static_cast<__half*>(out)[at] = __float2half_rn(result);
      break;
    case QueryType::kBfloat16:
      static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(result);
      break;
    default:
      static_cast<float*>(out)[at] = result;
      break;
  }
}

// The natural log-sum-exp of weights relative to `top`, which is in units of log2.
__device__ __forceinline__ float log_sum_exp(float top, float total) {
  constexpr float kLn2 = 0.693147180559945309f;
  return total == 0.0f    ? device::negative_infinity<float>()
         : total != total ? total
                          : top * kLn2 + logf(total);
}

}  // namespace htree::compressed_kv
