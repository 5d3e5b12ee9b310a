// The decode kernel: a warp's loop over its tiles, the online softmax, and the merge of a block's warps.
#pragma once

#include "ops/compressed_kv/decode.cuh"

namespace htree::compressed_kv {

constexpr float kMinusInfinity = -INFINITY;

// What a block works on.
struct Split {
  int index;
  int sequence;
  int kv_head;
  int first_head;  // of the query, counted over the batch
  int num_heads;   // at most kHeadsPerBlock
  int64_t begin;   // tokens [begin, end), begin a multiple of 16
  int64_t end;
};

__device__ __forceinline__ Split split_of(const DecodeParams& p) {
  Split s;
  s.index = static_cast<int>(blockIdx.x % p.num_splits);
  int index = static_cast<int>(blockIdx.x / p.num_splits);
  const int chunk = index % p.head_chunks;
  index /= p.head_chunks;
  s.kv_head = index % p.num_kv_heads;
  s.sequence = index / p.num_kv_heads;
  const int heads_per_kv = p.num_heads / p.num_kv_heads;
  s.first_head = s.sequence * p.num_heads + s.kv_head * heads_per_kv + chunk * kHeadsPerBlock;
  s.num_heads = min(kHeadsPerBlock, heads_per_kv - chunk * kHeadsPerBlock);
  int64_t length = p.capacity;
  if (p.comp_len != nullptr) {
    length = min(length, static_cast<int64_t>(max(p.comp_len[s.sequence], 0)));
  }
  s.begin = min(s.index * p.split_size, length);
  s.end = min(s.begin + p.split_size, length);
  return s;
}

// Row of the first token of a tile in the compressed tensors; pages hold whole tiles.
__device__ __forceinline__ int64_t row_of_tile(const DecodeParams& p, const Split& s, int64_t token) {
  if (p.block_table == nullptr) {
    return (static_cast<int64_t>(s.sequence) * p.num_kv_heads + s.kv_head) * p.capacity + token;
  }
  const int in_sequence = static_cast<int>(token / p.page);
  const int page = p.block_table[static_cast<int64_t>(s.sequence) * p.max_pages + in_sequence];
  const int64_t known = min(max(page, 0), p.num_pages - 1);  // a wrong page must not be an illegal address
  return (known * p.num_kv_heads + s.kv_head) * p.page + token % p.page;
}

// Softmax state of a warp: heads t and t + 4 of the lanes (g, t). The maxima are alike in all lanes of a t,
// the sums are those of the lane's own tokens.
struct WarpState {
  float max[2] = {kMinusInfinity, kMinusInfinity};
  float sum[2] = {0.0f, 0.0f};
  float unit = 0.0f;  // power of two that no scale of V so far exceeds; accumulators count in it
};

template <int kTiles>
__device__ __forceinline__ void rescale(float (&acc)[kTiles][4], float even, float odd) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    acc[i][0] *= even;
    acc[i][1] *= odd;
    acc[i][2] *= even;
    acc[i][3] *= odd;
  }
}

// Raises the maxima where a score exceeds them by more than the slack.
template <int kTiles>
__device__ __forceinline__ void raise_max(const float (&score)[2][2], WarpState& state,
                                          float (&acc)[kTiles][4]) {
  const bool low = score[0][0] > state.max[0] + kSlack || score[1][0] > state.max[0] + kSlack;
  const bool high = score[0][1] > state.max[1] + kSlack || score[1][1] > state.max[1] + kSlack;
  if (!__any_sync(0xffffffffu, low || high)) {
    return;
  }
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float largest = fmaxf(score[0][i], score[1][i]);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    const float raised = fmaxf(state.max[i], largest);
    factor[i] = raised == kMinusInfinity ? 1.0f : device::exp2_flushed(state.max[i] - raised);
    state.max[i] = raised;
    state.sum[i] *= factor[i];
  }
  rescale(acc, factor[0], factor[1]);
}

// The smallest power of two that is at least x > 0, an fp16 value.
__device__ __forceinline__ float power_above(float x) {
  const int bits = __float_as_int(x);
  return __int_as_float((bits & 0x7f800000) + ((bits & 0x007fffff) != 0 ? 0x00800000 : 0));
}

template <int kTiles>
__device__ __forceinline__ void raise_unit(const float (&scale)[2], WarpState& state,
                                           float (&acc)[kTiles][4]) {
  const float own = fmaxf(scale[0], scale[1]);
  if (!__any_sync(0xffffffffu, own > state.unit)) {
    return;
  }
  float largest = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  const float raised = power_above(largest);
  const float factor = state.unit / raised;
  state.unit = raised;
  rescale(acc, factor, factor);
}

template <typename Tr>
struct WarpResult {
  WarpState state;
  float acc[2 * Tr::kGroups][4];
  uint32_t poison[Tr::kWords];  // this lane's channels that a value row with a NaN scale keeps
};

// One tile in shared memory, whose first row is `row` of the compressed tensors.
template <typename Tr>
__device__ __forceinline__ void attend_tile(const DecodeParams& p, const StageLayout& layout, uint32_t stage,
                                            int64_t row, int num_tokens, int lane, uint32_t k_table,
                                            uint32_t v_table, bool many_heads,
                                            const QueryFragments<Tr::kD, Tr::kK != 16>& q,
                                            WarpResult<Tr>& result) {
  constexpr int kBitmapBytes = Tr::kD / 8;
  const int g = lane >> 2;
  const uint32_t bitmap_before = static_cast<uint32_t>(row * kBitmapBytes) & 15;
  const uint32_t scale_before = static_cast<uint32_t>(row * 2) & 15;
  const auto values_at = [&](int part, int row_bytes) {
    return stage + part + (static_cast<uint32_t>(row * row_bytes) & 15);
  };
  WarpState& state = result.state;
  float score[2][2];
  {
    RowPair<Tr> rows =
        load_row_pair<Tr>(stage + layout.k_bitmap + bitmap_before, values_at(layout.k_values, p.k.row_bytes),
                          p.k.row_bytes, Tr::kK, num_tokens, lane);
    score_tile<Tr>(rows, k_table, many_heads, q, score);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = g + 8 * half;
    const float scale =
        Tr::kK == 16 ? 1.0f : load_shared_half(stage + layout.k_scales + scale_before + 2 * token);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      score[half][i] = token < num_tokens ? score[half][i] * scale : kMinusInfinity;
    }
  }
  raise_max(score, state, result.acc);
  RowPair<Tr> rows =
      load_row_pair<Tr>(stage + layout.v_bitmap + bitmap_before, values_at(layout.v_values, p.v.row_bytes),
                        p.v.row_bytes, Tr::kV, num_tokens, lane);
  float unit[2] = {1.0f, 1.0f};
  if constexpr (Tr::kV != 16) {
    float scale[2];
    bool bad = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = g + 8 * half;
      scale[half] = load_shared_half(stage + layout.v_scales + scale_before + 2 * token);
      scale[half] = token < num_tokens ? scale[half] : 0.0f;
      bad |= !(fabsf(scale[half]) <= 65504.0f);
    }
    if (__any_sync(0xffffffffu, bad)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!(fabsf(scale[half]) <= 65504.0f)) {
          scale[half] = 0.0f;
#pragma unroll
          for (int i = 0; i < Tr::kWords; ++i) {
            result.poison[i] |= rows.word[half][i];
          }
        }
      }
    }
    raise_unit(scale, state, result.acc);
    // A unit of 0 means that all scales are 0 so far.
    const float inverse = state.unit > 0.0f ? 1.0f / state.unit : 0.0f;
    unit[0] = scale[0] * inverse;
    unit[1] = scale[1] * inverse;
  }
  uint32_t weight[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float w[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float base = state.max[i] == kMinusInfinity ? 0.0f : state.max[i];
      w[i] = device::exp2_flushed(score[half][i] - base);
      state.sum[i] += w[i];
      w[i] *= unit[half];
    }
    weight[half] = device::transpose_matrix(device::pack_pair<typename Tr::Weight>(w[0], w[1]));
  }
  weigh_tile<Tr>(rows, v_table, weight[0], weight[1], result.acc);
}

// Sums of the warps of a block, in their order, and the block's part of the result.
template <typename Tr>
struct BlockMerge {
  float acc[Tr::kMaxWarps][kHeadsPerBlock][Tr::kD];
  float max[Tr::kMaxWarps][kHeadsPerBlock];
  float sum[Tr::kMaxWarps][kHeadsPerBlock];
  uint32_t poison[Tr::kMaxWarps][4][Tr::kWords];
};

template <typename Tr>
__device__ __forceinline__ void merge_warps(const DecodeParams& p, const Split& s, BlockMerge<Tr>& shared,
                                            WarpResult<Tr>& result, int warp, int num_warps, int lane) {
  const int g = lane >> 2;
  const int t = lane & 3;
  WarpState& state = result.state;
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    state.sum[0] += __shfl_xor_sync(0xffffffffu, state.sum[0], offset);
    state.sum[1] += __shfl_xor_sync(0xffffffffu, state.sum[1], offset);
#pragma unroll
    for (int i = 0; i < Tr::kWords; ++i) {
      result.poison[i] |= __shfl_xor_sync(0xffffffffu, result.poison[i], offset);
    }
  }
  if (g == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.max[warp][t + 4 * i] = state.max[i];
      shared.sum[warp][t + 4 * i] = state.sum[i];
    }
#pragma unroll
    for (int i = 0; i < Tr::kWords; ++i) {
      shared.poison[warp][t][i] = result.poison[i];
    }
  }
  __syncthreads();
  const float code_unit = Tr::kV == 16 ? 1.0f : kCodeUnit<Tr::kV> * state.unit;
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float top = kMinusInfinity;
    for (int w = 0; w < num_warps; ++w) {
      top = fmaxf(top, shared.max[w][t + 4 * i]);
    }
    factor[i] = state.max[i] == kMinusInfinity ? 1.0f : device::exp2_flushed(state.max[i] - top);
    factor[i] *= code_unit;
  }
#pragma unroll
  for (int index = 0; index < 2 * Tr::kGroups; ++index) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int head = t + 4 * (c & 1);
      shared.acc[warp][head][channel_of<Tr>(g, index, c)] = result.acc[index][c] * factor[c & 1];
    }
  }
  __syncthreads();
  const int64_t part = p.first_part + s.index;
  for (int i = threadIdx.x; i < s.num_heads * Tr::kD; i += blockDim.x) {
    const int head = i / Tr::kD;
    const int channel = i % Tr::kD;
    constexpr int kChannels = Tr::kD / 4;
    float sum = 0;
    uint32_t poison = 0;
    for (int w = 0; w < num_warps; ++w) {
      sum += shared.acc[w][head][channel];
      poison |= shared.poison[w][channel / kChannels][channel % kChannels / 32] >> (channel % kChannels % 32);
    }
    const int64_t out = (s.first_head + head) * static_cast<int64_t>(p.num_parts) + part;
    p.part_acc[out * Tr::kD + channel] = (poison & 1) != 0 ? NAN : sum;
    if (channel == 0) {
      float top = kMinusInfinity;
      float total = 0;
      for (int w = 0; w < num_warps; ++w) {
        top = fmaxf(top, shared.max[w][head]);
      }
      for (int w = 0; w < num_warps; ++w) {
        const float max = shared.max[w][head];
        total += shared.sum[w][head] * (max == kMinusInfinity ? 1.0f : device::exp2_flushed(max - top));
      }
      p.part_max[out] = top;
      p.part_sum[out] = total;
    }
  }
}

// Grid: B * H_kv * head_chunks * num_splits, splits innermost; blocks of at most kMaxWarps warps. Shared
// memory: the selector tables, then the rings of num_stages stages per warp and their padding, or BlockMerge
// where that is larger.
template <typename Tr>
__global__ void __launch_bounds__(32 * Tr::kMaxWarps, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, int num_stages) {
  extern __shared__ __align__(128) unsigned char memory[];
  const Split s = split_of(p);
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int num_warps = blockDim.x >> 5;
  if (s.begin >= s.end) {
    for (int head = threadIdx.x; head < s.num_heads; head += blockDim.x) {
      const int64_t out = (s.first_head + head) * static_cast<int64_t>(p.num_parts) + p.first_part + s.index;
      p.part_max[out] = kMinusInfinity;
      p.part_sum[out] = 0.0f;  // the accumulators of an empty part are never read
    }
    return;
  }
  const StageLayout layout(Tr::kD, p.k.row_bytes, p.v.row_bytes);
  const uint32_t ring = device::shared_address(memory) + Tr::kTableBytes + warp * num_stages * layout.bytes;
  const int64_t stride = num_warps * kTileRows;
  const int64_t first = s.begin + warp * kTileRows;

  for (int stage = 0; stage < num_stages - 1; ++stage) {
    const int64_t token = first + stage * stride;
    if (token < s.end) {
      copy_tile<Tr::kD>(p, layout, ring + stage * layout.bytes, row_of_tile(p, s, token), lane);
    }
    device::commit_copies();
  }

  uint32_t* tables = reinterpret_cast<uint32_t*>(memory);
  fill_selectors<Tr::kK>(tables);
  if constexpr (Tr::kTwoTables) {
    fill_selectors<Tr::kV>(tables + kSelectorBytes / 4);
  }
  QueryFragments<Tr::kD, Tr::kK != 16> q;
  if constexpr (Tr::kK == 16) {
    load_half_query<typename Tr::Pair, Tr::kD>(p, s.first_head, s.num_heads, lane, q);
  } else {
    load_integer_query<Tr::kD>(p, s.first_head, s.num_heads, lane, Tr::kK == 4 ? 0.0625f : 1.0f, q);
  }
  WarpResult<Tr> result;
#pragma unroll
  for (int i = 0; i < 2 * Tr::kGroups; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      result.acc[i][c] = 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < Tr::kWords; ++i) {
    result.poison[i] = 0;
  }
  __syncthreads();

  const uint32_t k_table = device::shared_address(memory) + 4 * lane;
  const uint32_t v_table = k_table + (Tr::kTwoTables ? kSelectorBytes : 0);
  const bool many_heads = s.num_heads > 4;
  int stage = 0;
  for (int64_t token = first; token < s.end; token += stride) {
    const int64_t ahead = token + (num_stages - 1) * stride;
    if (ahead < s.end) {
      const int into = stage == 0 ? num_stages - 1 : stage - 1;
      copy_tile<Tr::kD>(p, layout, ring + into * layout.bytes, row_of_tile(p, s, ahead), lane);
    }
    device::commit_copies();
    wait_pending(num_stages - 1);
    __syncwarp();
    const int num_tokens = static_cast<int>(min(s.end - token, static_cast<int64_t>(kTileRows)));
    attend_tile<Tr>(p, layout, ring + stage * layout.bytes, row_of_tile(p, s, token), num_tokens, lane,
                    k_table, v_table, many_heads, q, result);
    __syncwarp();  // the stage is free for the next copy
    stage = stage + 1 == num_stages ? 0 : stage + 1;
  }
  device::wait_copies<0>();
  __syncthreads();
  auto& shared = *reinterpret_cast<BlockMerge<Tr>*>(memory + Tr::kTableBytes);
  merge_warps(p, s, shared, result, warp, num_warps, lane);
}

}  // namespace htree::compressed_kv
