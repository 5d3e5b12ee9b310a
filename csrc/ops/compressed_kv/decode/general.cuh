// Decode attention for what the tensor-core kernel does not take: the dense window, fp32 queries, expanded
// queries of a group of kv heads, pages that hold no whole tiles, and head sizes without such a kernel. A token
// has one warp, and all arithmetic is in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/compressed_kv/compress/unpack.cuh"
#include "ops/compressed_kv/decode/decode_result.cuh"
#include "ops/compressed_kv/decode/general.h"
#include "ops/compressed_kv/decode/query_fragments.cuh"

namespace htree::compressed_kv {

__device__ __forceinline__ bool is_dense(RowKind kind) {
  return kind == RowKind::kFloat || kind == RowKind::kHalf || kind == RowKind::kBfloat16;
}

// Loads the lane's part (LaneChannels) of kChannels channels from channel `first` on, of a row of `row_dim`, as
// floats. The channels before have `before` codes; returns that of the channels behind. All 32 lanes must call
// with the same row.
template <int kChannels>
__device__ __forceinline__ int load_channels(const RowsView& rows, const void* dense, RowKind kind,
                                             int64_t row, int row_dim, int first, int before, int lane,
                                             float (&x)[kChannels / 32]) {
  using Lane = LaneChannels<kChannels>;
  if (is_dense(kind)) {
#pragma unroll
    for (int c = 0; c < Lane::kCount; ++c) {
      const int64_t at = row * row_dim + first + Lane::channel_at(lane, c);
      x[c] = kind == RowKind::kFloat  ? static_cast<const float*>(dense)[at]
             : kind == RowKind::kHalf ? __half2float(static_cast<const __half*>(dense)[at])
                                      : __bfloat162float(static_cast<const __nv_bfloat16*>(dense)[at]);
    }
    return 0;
  }
  const uint32_t* words = reinterpret_cast<const uint32_t*>(rows.bitmap + row * (row_dim / 8) + first / 8);
  const uint8_t* values = rows.values + row * rows.row_bytes;
  const float scale = rows.scales == nullptr ? 1.0f : __half2float(__ushort_as_half(rows.scales[row]));
#pragma unroll
  for (int c = 0; c < Lane::kCount; ++c) {
    x[c] = 0.0f;
  }
  return for_kept_channels<kChannels>(words, rows.keep, before, lane, [&](int c, int at) {
    switch (kind) {
      case RowKind::kPackedHalf:
        x[c] = __half2float(reinterpret_cast<const __half*>(values)[at]);
        break;
      case RowKind::kPackedBfloat16:
        x[c] = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(values)[at]);
        break;
      case RowKind::kBytes:
        x[c] = scale * static_cast<float>(byte_code(values, at));
        break;
      default:
        x[c] = scale * static_cast<float>(nibble_code(values, at));
        break;
    }
  });
}

// The number of a token's row in its tensors. Pages may have any size.
__device__ __forceinline__ int64_t row_of_token(const GeneralParams& p, int sequence, int kv_head,
                                                int64_t token) {
  const DecodeParams& d = p.base;
  if (d.tables.block_table == nullptr || is_dense(p.k_kind)) {
    return (static_cast<int64_t>(sequence) * d.heads.kv + kv_head) * d.capacity + token;
  }
  const int page = d.tables.block_table[static_cast<int64_t>(sequence) * d.pages.per_sequence +
                                        static_cast<int>(token / d.pages.tokens)];
  const int64_t known = min(max(page, 0), d.pages.all - 1);
  return (known * d.heads.kv + kv_head) * d.pages.tokens + token % d.pages.tokens;
}

template <int kHeadDim>
struct GeneralShared {
  static constexpr int kWarps = kHeadDim <= 128 ? 8 : kHeadDim <= 256 ? 4 : 2;
  float acc[kWarps][kHeadsPerBlock][kHeadDim];
  float max[kWarps][kHeadsPerBlock];
  float sum[kWarps][kHeadsPerBlock];
};
static_assert(sizeof(GeneralShared<128>) <= 48 * 1024 && sizeof(GeneralShared<256>) <= 48 * 1024 &&
              sizeof(GeneralShared<512>) <= 48 * 1024);  // it is static

// Adds the sums of the warps of a block in their order and stores them as split `split` of heads `first_head`
// to first_head + num_heads - 1. Every thread of the block must call.
template <int kHeadDim>
__device__ __forceinline__ void store_part(const GeneralShared<kHeadDim>& shared, const DecodeParams& d,
                                           int first_head, int num_heads, int split) {
  using Shared = GeneralShared<kHeadDim>;
  for (int i = threadIdx.x; i < num_heads * kHeadDim; i += blockDim.x) {
    const int head = i / kHeadDim;
    float top = device::negative_infinity<float>();
    for (int w = 0; w < Shared::kWarps; ++w) {
      top = fmaxf(top, shared.max[w][head]);
    }
    float total = 0;
    float value = 0;
    for (int w = 0; w < Shared::kWarps; ++w) {
      const float own = shared.max[w][head];
      const float factor = part_factor(own, top);
      total += shared.sum[w][head] * factor;
      value += shared.acc[w][head][i % kHeadDim] * factor;
    }
    const int64_t out =
        (first_head + head) * static_cast<int64_t>(d.splits.parts) + d.splits.first_part + split;
    d.parts.acc[out * kHeadDim + i % kHeadDim] = value;
    if (i % kHeadDim == 0) {
      d.parts.max[out] = top;
      d.parts.sum[out] = total;
    }
  }
}

// Adds the lane's products of the keys' channels kChannels from `first` on with those of each head.
template <int kChannels>
__device__ __forceinline__ void add_products(const DecodeParams& d, const float (&x)[kChannels / 32],
                                             int64_t first_query, int num_heads, int key_dim, int first,
                                             int lane, float (&score)[kHeadsPerBlock]) {
#pragma unroll
  for (int h = 0; h < kHeadsPerBlock; ++h) {
    if (h < num_heads) {
      const int64_t at = (first_query + h) * key_dim + first;
#pragma unroll
      for (int c = 0; c < kChannels / 32; ++c) {
        score[h] += load_query(d.q.data, d.q.type, at + LaneChannels<kChannels>::channel_at(lane, c)) * x[c];
      }
    }
  }
}

// The lane's part of the scores of one key row. With kKeyDim 0 the size of the keys is known at run time only,
// and 64 channels are taken at a time.
template <int kKeyDim>
__device__ __forceinline__ void score_key(const GeneralParams& p, int64_t row, int64_t first_query,
                                          int num_heads, int lane, float (&score)[kHeadsPerBlock]) {
  const DecodeParams& d = p.base;
  if constexpr (kKeyDim > 0) {
    float x[kKeyDim / 32];
    load_channels<kKeyDim>(d.k, p.k_dense, p.k_kind, row, kKeyDim, 0, 0, lane, x);
    add_products<kKeyDim>(d, x, first_query, num_heads, kKeyDim, 0, lane, score);
  } else {
    int before = 0;
    for (int first = 0; first < p.key_dim; first += 64) {
      float x[2];
      before = load_channels<64>(d.k, p.k_dense, p.k_kind, row, p.key_dim, first, before, lane, x);
      add_products<64>(d, x, first_query, num_heads, p.key_dim, first, lane, score);
    }
  }
}

// Grid: B * H_kv * head_chunks * num_splits, splits innermost; blocks of GeneralShared::kWarps warps.
// comp_len, capacity and split_size are those of the part that is attended to. kKeyDim as in score_key.
template <int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(32 * GeneralShared<kValueDim>::kWarps)
    general_kernel(const __grid_constant__ GeneralParams p) {
  using Shared = GeneralShared<kValueDim>;
  using Lane = LaneChannels<kValueDim>;
  __shared__ Shared shared;
  const DecodeParams& d = p.base;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int split = static_cast<int>(blockIdx.x % d.splits.launched);
  const int group = static_cast<int>(blockIdx.x / d.splits.launched);
  const int chunk = group % d.heads.chunks;
  const int kv_head = group / d.heads.chunks % d.heads.kv;
  const int sequence = group / d.heads.chunks / d.heads.kv;
  const int heads_per_kv = d.heads.per_kv();
  const int first_head = sequence * d.heads.query + kv_head * heads_per_kv + chunk * kHeadsPerBlock;
  const int num_heads = min(kHeadsPerBlock, heads_per_kv - chunk * kHeadsPerBlock);
  int64_t length = d.capacity;
  if (d.tables.comp_len != nullptr) {
    length = min(length, static_cast<int64_t>(max(d.tables.comp_len[sequence], 0)));
  }
  const int64_t begin = min(split * d.split_size, length);
  const int64_t end = min(begin + d.split_size, length);

  float max[kHeadsPerBlock];
  float sum[kHeadsPerBlock];
  float acc[kHeadsPerBlock][Lane::kCount];
#pragma unroll
  for (int h = 0; h < kHeadsPerBlock; ++h) {
    max[h] = device::negative_infinity<float>();
    sum[h] = 0.0f;
#pragma unroll
    for (int c = 0; c < Lane::kCount; ++c) {
      acc[h][c] = 0.0f;
    }
  }
  int64_t seen[kHeadsPerBlock];  // each head sees the tokens before this one
#pragma unroll
  for (int h = 0; h < kHeadsPerBlock; ++h) {
    seen[h] = h >= num_heads ? 0 : length - (is_dense(p.k_kind) ? d.heads.hidden_from(first_head + h) : 0);
  }
  const int group_head = kv_head / d.num_slots * d.num_slots;
  for (int64_t token = begin + warp; token < end; token += Shared::kWarps) {
    // Loaded first, so that it is on its way while the scores are summed.
    float value[Lane::kCount];
    load_channels<kValueDim>(d.v, p.v_dense, p.v_kind, row_of_token(p, sequence, kv_head, token), kValueDim,
                             0, 0, lane, value);
    float score[kHeadsPerBlock] = {};
    for (int slot = 0; slot < d.num_slots; ++slot) {
      const int64_t row = row_of_token(p, sequence, group_head + slot, token);
      score_key<kKeyDim>(p, row, slot * d.num_queries + first_head, num_heads, lane, score);
    }
#pragma unroll
    for (int h = 0; h < kHeadsPerBlock; ++h) {
      if (token < seen[h]) {
        const float s = device::warp_reduce<device::Sum>(score[h]) * d.score_scale;
        const float raised = fmaxf(max[h], s);
        const float base = raised == device::negative_infinity<float>() ? 0.0f : raised;
        const float factor = exp2f(max[h] - base);
        const float weight = exp2f(s - base);
        max[h] = raised;
        sum[h] = sum[h] * factor + weight;
#pragma unroll
        for (int c = 0; c < Lane::kCount; ++c) {
          acc[h][c] = acc[h][c] * factor + weight * value[c];
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeadsPerBlock; ++h) {
    if (lane == 0) {
      shared.max[warp][h] = max[h];
      shared.sum[warp][h] = sum[h];
    }
#pragma unroll
    for (int c = 0; c < Lane::kCount; ++c) {
      shared.acc[warp][h][Lane::channel_at(lane, c)] = acc[h][c];
    }
  }
  __syncthreads();
  store_part(shared, d, first_head, num_heads, split);
}

// Writes out [rows, D] and lse [rows] from the parts in their order. Grid: rows; blocks of D threads.
template <int kHeadDim>
__global__ void __launch_bounds__(kHeadDim)
    merge_parts_kernel(const float* __restrict__ acc, const float* __restrict__ max,
                       const float* __restrict__ sum, int num_parts, QueryType type, void* out, float* lse) {
  const int64_t row = blockIdx.x;
  const int64_t first = row * num_parts;
  float top = device::negative_infinity<float>();
  for (int i = 0; i < num_parts; ++i) {
    top = fmaxf(top, max[first + i]);
  }
  float total = 0;
  float value = 0;
  for (int i = 0; i < num_parts; ++i) {
    const float part = sum[first + i];
    if (part != 0.0f) {  // the accumulators of a part without tokens were never written
      const float own = max[first + i];
      const float factor = part_factor(own, top);
      total += part * factor;
      value += acc[(first + i) * kHeadDim + threadIdx.x] * factor;
    }
  }
  store_output(out, type, row * kHeadDim + threadIdx.x, value, total);
  if (threadIdx.x == 0) {
    lse[row] = log_sum_exp(top, total);
  }
}

// The query in the space of the keys: q [B, H, D] times the orthonormal H_D, once per slot of a group
// of kv heads, with the sign and the factor of §4.2. Grid: B * H; blocks of D threads; it writes to
// [slots, B, H, D].
template <int kHeadDim>
__global__ void __launch_bounds__(kHeadDim)
    transform_query_kernel(const void* q, QueryType type, int num_heads, int heads_per_kv, int num_slots,
                           float factor, float* to) {
  __shared__ float row[2][kHeadDim];
  const int64_t index = blockIdx.x;
  const int channel = threadIdx.x;
  row[0][channel] = load_query(q, type, index * kHeadDim + channel);
  int from = 0;
#pragma unroll
  for (int distance = 1; distance < kHeadDim; distance *= 2) {
    __syncthreads();
    const float own = row[from][channel];
    const float other = row[from][channel ^ distance];
    row[1 - from][channel] = (channel & distance) == 0 ? own + other : other - own;
    from = 1 - from;
  }
  const float value = row[from][channel] * factor;  // this thread wrote it
  const int own_slot = static_cast<int>(index % num_heads) / heads_per_kv % num_slots;
  for (int slot = 0; slot < num_slots; ++slot) {
    const bool negative = (__popc(slot & own_slot) & 1) != 0;
    to[(slot * static_cast<int64_t>(gridDim.x) + index) * kHeadDim + channel] = negative ? -value : value;
  }
}

template <int kValueDim>
cudaError_t launch_general(const GeneralParams& p, int64_t num_groups, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(num_groups * p.base.splits.launched);
  constexpr int kThreads = 32 * GeneralShared<kValueDim>::kWarps;
  return p.key_dim == kValueDim
             ? launch_kernel(general_kernel<kValueDim, kValueDim>, {blocks, kThreads}, stream, p)
             : launch_kernel(general_kernel<0, kValueDim>, {blocks, kThreads}, stream, p);
}

template <int kHeadDim>
cudaError_t launch_merge(const DecodeParams& p, int64_t num_rows, cudaStream_t stream) {
  return launch_kernel(merge_parts_kernel<kHeadDim>, {static_cast<unsigned>(num_rows), kHeadDim}, stream,
                       p.parts.acc, p.parts.max, p.parts.sum, p.splits.parts, p.output.type, p.output.out,
                       p.output.lse);
}

template <int kHeadDim>
cudaError_t launch_transform_query(const DecodeParams& p, int64_t num_rows, float* to, cudaStream_t stream) {
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(kHeadDim) * p.num_slots));
  return launch_kernel(transform_query_kernel<kHeadDim>, {static_cast<unsigned>(num_rows), kHeadDim}, stream,
                       p.q.data, p.q.type, p.heads.query, p.heads.per_kv(), p.num_slots, factor, to);
}

}  // namespace htree::compressed_kv
