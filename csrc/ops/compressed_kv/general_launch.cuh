// Launchers of the kernels around the one for tiles: general decode, the merge of parts, transformed queries.
#pragma once

#include <cmath>

#include "host/cuda/kernel_launch.h"
#include "ops/compressed_kv/decode_launch.h"
#include "ops/compressed_kv/general.cuh"

namespace htree::compressed_kv {

template <int kHeadDim>
cudaError_t launch_general(const GeneralParams& p, int64_t num_groups, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(num_groups * p.base.num_splits);
  return launch_kernel(general_kernel<kHeadDim>, {blocks, 32 * GeneralShared<kHeadDim>::kWarps}, stream, p);
}

template <int kHeadDim>
cudaError_t launch_merge(const DecodeParams& p, int64_t num_rows, cudaStream_t stream) {
  return launch_kernel(merge_parts_kernel<kHeadDim>, {static_cast<unsigned>(num_rows), kHeadDim}, stream,
                       p.part_acc, p.part_max, p.part_sum, p.num_parts, p.out_type, p.out, p.lse);
}

template <int kHeadDim>
cudaError_t launch_transform_query(const DecodeParams& p, int64_t num_rows, float* to, cudaStream_t stream) {
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(kHeadDim) * p.num_slots));
  return launch_kernel(transform_query_kernel<kHeadDim>, {static_cast<unsigned>(num_rows), kHeadDim}, stream,
                       p.q, p.q_type, p.num_heads, p.heads_per_kv(), p.num_slots, factor, to);
}

}  // namespace htree::compressed_kv
