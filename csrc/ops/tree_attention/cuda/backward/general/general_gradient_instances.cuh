#pragma once

#include "ops/tree_attention/cuda/backward/general/general_gradient.cuh"
#include "ops/tree_attention/attention/shared_bytes.h"

namespace htree::tree_attention {

inline unsigned general_blocks(int64_t rows) {
  return static_cast<unsigned>((rows + kGeneralWarps - 1) / kGeneralWarps);
}

template <typename T>
void launch_general_delta(const GeneralGradientParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_batches} * params.num_queries * params.num_kv_heads * params.group;
  general_delta_kernel<T><<<general_blocks(rows), kGeneralWarps * 32, 0, stream>>>(params);
}

template <typename T>
void launch_general_query_gradient(const GeneralGradientParams& params, const GeneralQueryGradient& query,
                                   cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_batches} * params.num_queries * params.num_kv_heads * params.group;
  const int64_t bytes = int64_t{kGeneralWarps} * (2 * params.key_dim + params.value_dim) * 4;
  allow_shared_bytes(general_query_gradient_kernel<T>, bytes);
  general_query_gradient_kernel<T>
      <<<general_blocks(rows), kGeneralWarps * 32, bytes, stream>>>(params, query);
}

template <typename T>
void launch_general_key_gradient(const GeneralGradientParams& params, const GeneralKeyGradient& key,
                                 cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_batches} * params.num_kv_heads * key.num_parents * params.rate;
  const int64_t bytes = int64_t{kGeneralWarps} * 2 * (params.key_dim + params.value_dim) * 4;
  allow_shared_bytes(general_key_gradient_kernel<T>, bytes);
  general_key_gradient_kernel<T><<<general_blocks(rows), kGeneralWarps * 32, bytes, stream>>>(params, key);
}

#define HTREE_GENERAL_GRADIENT_INSTANCES(T)                                                                 \
  template void launch_general_delta<T>(const GeneralGradientParams&, cudaStream_t);                        \
  template void launch_general_query_gradient<T>(const GeneralGradientParams&, const GeneralQueryGradient&, \
                                                 cudaStream_t);                                             \
  template void launch_general_key_gradient<T>(const GeneralGradientParams&, const GeneralKeyGradient&,     \
                                               cudaStream_t);

}  // namespace htree::tree_attention
