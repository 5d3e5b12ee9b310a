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

// Two channels of half or bfloat16.
__device__ __forceinline__ float2 pair_of(uint32_t bits, bool bfloat16) {
  return bfloat16 ? make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u))
                  : __half22float2(*reinterpret_cast<const __half2*>(&bits));
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

// Channels 2 * pair and the next of kTokens values of the block from token `first` on. The loads are
// unconditional, so that their latencies overlap. Where no tokens are left they take the last one.
template <int kTokens, int kHeadDim>
__device__ __forceinline__ void load_values(const DecodeParams& p, const WindowRows& rows, int first,
                                            int pair, uint32_t (&bits)[kTokens]) {
  const auto* const pairs = static_cast<const uint32_t*>(p.window.v) + rows.first * (kHeadDim / 2) + pair;
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    bits[j] = pairs[min(first + j, rows.count - 1) * (kHeadDim / 2)];
  }
}

// A token of the keys for a warp, two channels to a lane at a time.
template <int kHeadDim>
__device__ __forceinline__ void load_keys(const DecodeParams& p, const WindowRows& rows, int token, int lane,
                                          uint32_t (&bits)[kHeadDim / 64]) {
  const auto* const pairs =
      static_cast<const uint32_t*>(p.window.k) + (rows.first + token) * (kHeadDim / 2) + lane;
#pragma unroll
  for (int i = 0; i < kHeadDim / 64; ++i) {
    bits[i] = pairs[32 * i];
  }
}

// What a thread needs of the window first, loaded long before.
template <int kHeadDim>
struct EarlyWindow {
  static constexpr int kTokens = 8;  // of the values, loaded at once
  uint32_t k[kHeadDim / 64];
  uint32_t v[kTokens];

  // `warp` is the first token of the warp.
  __device__ __forceinline__ EarlyWindow(const DecodeParams& p, const WindowRows& rows, int num_heads,
                                         int warp, int lane) {
    if (warp < rows.count) {
      load_keys<kHeadDim>(p, rows, warp, lane, k);
    }
    if (rows.count > 0 && threadIdx.x < num_heads * (kHeadDim / 2)) {
      load_values<kTokens, kHeadDim>(p, rows, 0, threadIdx.x % (kHeadDim / 2), v);
    }
  }
};

// A token has a warp. `q` is the block's, [kHeadsPerBlock][D]. Every thread of the block must call, and
// __syncthreads before the scores are used.
template <int kHeads, int kHeadDim>
__device__ __forceinline__ void score_window(const DecodeParams& p, const WindowRows& rows,
                                             EarlyWindow<kHeadDim>& early,
                                             const float (&q)[kHeadsPerBlock][kHeadDim], int warp,
                                             int num_warps, int lane, WindowScores& to) {
#pragma unroll 1
  for (int token = warp; token < rows.count; token += num_warps) {
    if (token != warp) {
      load_keys<kHeadDim>(p, rows, token, lane, early.k);
    }
    float score[kHeads] = {};
#pragma unroll
    for (int i = 0; i < kHeadDim / 64; ++i) {
      const float2 k = pair_of(early.k[i], p.window.bfloat16);
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        const float2 x = *reinterpret_cast<const float2*>(&q[head][2 * (32 * i + lane)]);
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

// A head and two channels have a thread. Every thread of the block must call, and __syncthreads before `part` is
// used.
template <int kHeadDim>
__device__ __forceinline__ void weigh_window(const DecodeParams& p, const Split& s, const WindowRows& rows,
                                             EarlyWindow<kHeadDim>& early, const WindowScores& from,
                                             WindowPart<kHeadDim>& part) {
  constexpr int kAtOnce = EarlyWindow<kHeadDim>::kTokens;
#pragma unroll 1
  for (int i = threadIdx.x; i < s.num_heads * (kHeadDim / 2); i += blockDim.x) {
    const int head = i / (kHeadDim / 2);
    const int pair = i % (kHeadDim / 2);
    const int count = min(rows.count, rows.left - p.heads.hidden_from(s.first_head + head));
    float top = device::negative_infinity<float>();
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        top = fmaxf(top, from.score[min(first + j, count - 1)][head]);
      }
    }
    const float base = top == device::negative_infinity<float>() ? 0.0f : top;
    float sum = 0.0f;
    float2 value = {0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      if (first > 0 || i >= blockDim.x) {
        load_values<kAtOnce, kHeadDim>(p, rows, first, pair, early.v);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const bool present = first + j < count;
        const float score = from.score[min(first + j, count - 1)][head];
        const float weight = present ? device::exp2_flushed(score - base) : 0.0f;
        const float2 v = present ? pair_of(early.v[j], p.window.bfloat16) : float2{0.0f, 0.0f};
        sum += weight;
        value.x += weight * v.x;
        value.y += weight * v.y;
      }
    }
    *reinterpret_cast<float2*>(&part.acc[head][2 * pair]) = value;
    if (pair == 0) {
      part.max[head] = top;
      part.sum[head] = sum;
    }
  }
}

}  // namespace htree::compressed_kv
