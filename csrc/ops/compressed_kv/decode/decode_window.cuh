// The dense window in the tensor-core kernel. A block attends to its share of the window in fp32, while the
// first tiles are on their way, and keeps the sums for the merge of its warps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "ops/compressed_kv/decode/decode_result.cuh"
#include "ops/compressed_kv/decode/decode_split.cuh"

namespace htree::compressed_kv {

// Sums over a block's tokens of the window, for each head of the block.
template <int kHeadDim>
struct WindowPart {
  float acc[kHeadsPerBlock][kHeadDim];
  float max[kHeadsPerBlock];  // in units of log2
  float sum[kHeadsPerBlock];
};

// Scores of a block's tokens of the window, in units of log2.
struct WindowScores {
  float score[kMostWindowTokens][kHeadsPerBlock];
};

// A block's rows of the window: `count` rows from row `first` of [B * H_kv * capacity, D] on. `left` is how many
// the sequence has from there on.
struct WindowRows {
  int64_t first;
  int count;
  int left;
};

__device__ __forceinline__ WindowRows window_rows(const DecodeParams& p, const Split& s) {
  const WindowView& window = p.window;
  if (window.per_split == 0) {
    return {0, 0, 0};
  }
  int length = window.capacity;
  if (window.len != nullptr) {
    length = min(length, max(window.len[s.sequence], 0));
  }
  const int begin = min(s.index * window.per_split, length);
  const int64_t row = static_cast<int64_t>(s.sequence) * p.heads.kv + s.kv_head;
  return {row * window.capacity + begin, min(window.per_split, length - begin), length - begin};
}

__device__ __forceinline__ float2 load_pair(const void* pairs, int64_t index, bool bfloat16) {
  const uint32_t bits = static_cast<const uint32_t*>(pairs)[index];
  return bfloat16 ? make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u))
                  : __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

__device__ __forceinline__ float to_float(uint16_t bits, bool bfloat16) {
  return bfloat16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// Brings `bytes` bytes into the L2, 128 of them per thread.
__device__ __forceinline__ void prefetch_bytes(const void* from, int64_t bytes) {
  for (int64_t at = 128 * threadIdx.x; at < bytes; at += 128 * blockDim.x) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + at));
  }
}

// Every thread of the block may call.
template <int kHeadDim>
__device__ __forceinline__ void prefetch_window(const DecodeParams& p, const WindowRows& rows) {
  if (rows.count > 0) {
    const int64_t first = 2 * rows.first * kHeadDim;
    prefetch_bytes(static_cast<const char*>(p.window.k) + first, 2 * rows.count * kHeadDim);
    prefetch_bytes(static_cast<const char*>(p.window.v) + first, 2 * rows.count * kHeadDim);
  }
}

// A token has a warp. `q` is the block's, [kHeadsPerBlock][D]. Every thread of the block must call, and
// __syncthreads before the scores are used.
template <int kHeads, int kHeadDim>
__device__ __forceinline__ void score_window(const DecodeParams& p, const WindowRows& rows,
                                             const float (&q)[kHeadsPerBlock][kHeadDim], int warp,
                                             int num_warps, int lane, WindowScores& to) {
  for (int token = warp; token < rows.count; token += num_warps) {
    const int64_t row = rows.first + token;
    float score[kHeads] = {};
#pragma unroll
    for (int i = 0; i < kHeadDim / 64; ++i) {
      const int pair = 32 * i + lane;
      const float2 k = load_pair(p.window.k, row * (kHeadDim / 2) + pair, p.window.bfloat16);
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        const float2 x = *reinterpret_cast<const float2*>(&q[head][2 * pair]);
        score[head] += x.x * k.x + x.y * k.y;
      }
    }
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float sum = device::warp_reduce<device::Sum>(score[head]) * p.score_scale;
      if (lane == head) {
        to.score[token][head] = sum;
      }
    }
  }
}

// A head and channel have a thread. Every thread of the block must call, and __syncthreads
// before `part` is used.
template <int kHeadDim>
__device__ __forceinline__ void weigh_window(const DecodeParams& p, const Split& s, const WindowRows& rows,
                                             const WindowScores& from, WindowPart<kHeadDim>& part) {
  for (int i = threadIdx.x; i < s.num_heads * kHeadDim; i += blockDim.x) {
    const int head = i / kHeadDim;
    const int channel = i % kHeadDim;
    const int count = min(rows.count, rows.left - p.heads.hidden_from(s.first_head + head));
    float top = device::negative_infinity<float>();
    for (int token = 0; token < count; ++token) {
      top = fmaxf(top, from.score[token][head]);
    }
    const float base = top == device::negative_infinity<float>() ? 0.0f : top;
    float sum = 0.0f;
    float value = 0.0f;
    // The loads are unconditional, so that their latencies overlap. Where no tokens are left they
    // take the last one.
    constexpr int kAtOnce = 8;
    const auto* const elements = static_cast<const uint16_t*>(p.window.v) + rows.first * kHeadDim + channel;
    for (int first = 0; first < count; first += kAtOnce) {
      uint16_t bits[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        bits[j] = elements[min(first + j, count - 1) * kHeadDim];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const bool present = first + j < count;
        const float score = from.score[min(first + j, count - 1)][head];
        const float weight = present ? device::exp2_flushed(score - base) : 0.0f;
        const float v = present ? to_float(bits[j], p.window.bfloat16) : 0.0f;
        sum += weight;
        value += weight * v;
      }
    }
    part.acc[head][channel] = value;
    if (channel == 0) {
      part.max[head] = top;
      part.sum[head] = sum;
    }
  }
}

}  // namespace htree::compressed_kv
