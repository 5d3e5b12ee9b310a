#include <cmath>

#include "ops/compressed_kv/decode_launch.h"
#include "ops/compressed_kv/general.cuh"

namespace htree::compressed_kv {

template <int kHeadDim>
cudaError_t launch_decode(const DecodeParams& p, int k_bits, int v_bits, QueryType pair_type,
                          int64_t num_groups, cudaStream_t stream) {
  switch (k_bits) {
    case 4:
      return launch_decode_keys<kHeadDim, 4>(p, v_bits, pair_type, num_groups, stream);
    case 8:
      return launch_decode_keys<kHeadDim, 8>(p, v_bits, pair_type, num_groups, stream);
    case 16:
      return launch_decode_keys<kHeadDim, 16>(p, v_bits, pair_type, num_groups, stream);
  }
  return cudaErrorInvalidValue;
}

template <int kHeadDim>
cudaError_t launch_general(const GeneralParams& p, int64_t num_groups, cudaStream_t stream) {
  general_kernel<kHeadDim><<<static_cast<unsigned>(num_groups * p.base.num_splits),
                             32 * GeneralShared<kHeadDim>::kWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

template <int kHeadDim>
cudaError_t launch_merge(const DecodeParams& p, int64_t num_rows, cudaStream_t stream) {
  merge_parts_kernel<kHeadDim><<<static_cast<unsigned>(num_rows), kHeadDim, 0, stream>>>(
      p.part_acc, p.part_max, p.part_sum, p.num_parts, p.out_type, p.out, p.lse);
  return cudaGetLastError();
}

template <int kHeadDim>
cudaError_t launch_transform_query(const DecodeParams& p, int64_t num_rows, float* to, cudaStream_t stream) {
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(kHeadDim) * p.num_slots));
  transform_query_kernel<kHeadDim><<<static_cast<unsigned>(num_rows), kHeadDim, 0, stream>>>(
      p.q, p.q_type, p.num_heads, p.heads_per_kv(), p.num_slots, factor, to);
  return cudaGetLastError();
}

template cudaError_t launch_decode<64>(const DecodeParams&, int, int, QueryType, int64_t, cudaStream_t);
template cudaError_t launch_decode<128>(const DecodeParams&, int, int, QueryType, int64_t, cudaStream_t);
template cudaError_t launch_decode<256>(const DecodeParams&, int, int, QueryType, int64_t, cudaStream_t);
template cudaError_t launch_general<64>(const GeneralParams&, int64_t, cudaStream_t);
template cudaError_t launch_general<128>(const GeneralParams&, int64_t, cudaStream_t);
template cudaError_t launch_general<256>(const GeneralParams&, int64_t, cudaStream_t);
template cudaError_t launch_merge<64>(const DecodeParams&, int64_t, cudaStream_t);
template cudaError_t launch_merge<128>(const DecodeParams&, int64_t, cudaStream_t);
template cudaError_t launch_merge<256>(const DecodeParams&, int64_t, cudaStream_t);
template cudaError_t launch_transform_query<64>(const DecodeParams&, int64_t, float*, cudaStream_t);
template cudaError_t launch_transform_query<128>(const DecodeParams&, int64_t, float*, cudaStream_t);
template cudaError_t launch_transform_query<256>(const DecodeParams&, int64_t, float*, cudaStream_t);

}  // namespace htree::compressed_kv
