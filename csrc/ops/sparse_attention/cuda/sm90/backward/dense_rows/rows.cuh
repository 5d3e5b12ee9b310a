// The query side of the dense rows, laid out once for both gradients: tiles of 64 rows, half a run each. Token and head
// of row i are i / G and i % G.
//
//   queries    R_t q in fp16, times the scale of the scores and log2(e), as the forward rotates them; masked rows have
//              no rotation
//   gradients  dO in the input's dtype
//   numbers    kRowNumbers floats of each row, RowNumber
//
// Panels are those of tree/dense_layer.cuh, of 64 rows. Rows that stand for no query are zero and have weight 0. A row of
// a query or of dO that is not finite is laid out as zeros with a log-sum of NaN: its NaN then reaches the tokens that it
// sees, and a product with a weight of 0 hands it to no other. So is a masked row of a caller's list whose D is not finite.
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/sm80/backward/gradient_rows.cuh"
#include "ops/sparse_attention/cuda/sm80/masked_lists.cuh"
#include "ops/sparse_attention/cuda/sm90/backward/dense_rows/dense_gradients.h"
#include "ops/tree/cuda/sm90/dense_layer.cuh"

namespace htree::tree_attention {

// Rows of `numbers`.
enum RowNumber : int {
  kLogSum = 0,        // log2 of the sum of e^score, less the shift of the weights
  kDelta = 1,         // row_delta()
  kQueryFactor = 2,   // undoes the power of two of the query
  kRowToken = 3,      // the token as int32, -1 for none
  kGradientNorm = 4,  // a bound of the norm of dO
};
static_assert(kGradientNorm + 1 == kRowNumbers);
constexpr int kRowNumberBytes = kRowNumbers * kRowTileRows * 4;

template <int kDim>
constexpr int kRowTileBytes = static_cast<int>(row_tile_bytes(kDim));

// log2 of what weights are multiplied by, since fp16 has too few small numbers for them.
template <typename T>
constexpr float kRowWeightShift = __is_same(T, __half) ? 14.f : 0.f;
// The power of two that undoes it.
template <typename T>
constexpr float kRowWeightUnit = __is_same(T, __half) ? 0x1p-14f : 1.f;

// K/16 lanes share a row: each has 8 dims of the lower half and their partners.
template <int kDim>
constexpr int kRowTileThreads = kDim == 32 ? 128 : 256;

template <int kCount>
__device__ __forceinline__ bool all_finite(const float (&x)[kCount]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    finite &= fabsf(x[i]) < INFINITY;
  }
  return finite;
}

// Grid: x = tiles, y = batch * kv head.
template <typename T, int kDim, bool kMasked>
__global__ void __launch_bounds__(kRowTileThreads<kDim>) row_tiles_kernel(DenseGradientParams params) {
  constexpr int kHalf = kDim / 2, kLanes = kDim / 16, kPass = kRowTileThreads<kDim> / kLanes;
  static_assert(kRowTileRows % kPass == 0);
  const GatherParams& p = params.gather;
  const int log2 = run_tokens_log2(p.group) - 1;  // of a tile, which is half a run
  const int64_t first_token = (((p.t0 >> (log2 + 1)) << 1) + blockIdx.x) << log2;
  const int batch = blockIdx.y / p.num_kv_heads, kv_head = blockIdx.y % p.num_kv_heads;
  const int64_t tile = int64_t{blockIdx.y} * params.rows.num_tiles + blockIdx.x;
  char* queries = params.rows.queries + tile * kRowTileBytes<kDim>;
  char* gradients = params.rows.gradients + tile * kRowTileBytes<kDim>;
  float* numbers = params.rows.numbers + tile * kRowNumbers * kRowTileRows;
  const int chunk = threadIdx.x % kLanes;
  float largest_norm = 0.f, largest_factor = 0.f, largest_delta = 0.f;
  bool scaled = false;
  for (int begin = 0; begin < kRowTileRows; begin += kPass) {
    const int row = begin + threadIdx.x / kLanes;
    const int64_t token = first_token + row / p.group, query = token - p.t0;
    const int64_t head = int64_t{kv_head} * p.group + row % p.group;
    bool exists = row / p.group < 1 << log2 && query >= 0 && query < p.num_queries;
    if constexpr (kMasked) {
      exists = exists && is_masked_row(p, batch, kv_head, query);
    }
    float low[8] = {}, high[8] = {};
    float g[2][8] = {}, o[2][8] = {};
    uint4 gradient[2] = {};
    float4 rotations[4] = {};
    if (exists) {
      widen_eight<T>(load_row_chunk<T>(p.queries, batch, query, head, chunk * 8), low);
      widen_eight<T>(load_row_chunk<T>(p.queries, batch, query, head, chunk * 8 + kHalf), high);
      const float4* table = reinterpret_cast<const float4*>(p.rope + token * kHalf + chunk * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rotations[i] = kMasked ? make_float4(1.f, 0.f, 1.f, 0.f) : __ldg(table + i);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        gradient[i] = load_row_chunk<T>(params.gradients, batch, query, head, chunk * 8 + i * kHalf);
        widen_eight<T>(gradient[i], g[i]);
        widen_eight<T>(load_row_chunk<T>(params.outputs, batch, query, head, chunk * 8 + i * kHalf), o[i]);
      }
    }
    const float largest = row_magnitude<kLanes>(low, high);
    float delta = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      delta += g[0][i] * o[0][i];
      delta += g[1][i] * o[1][i];
    }
    delta = sum_over_lanes<kLanes>(delta);
    const int64_t state = batch * params.states.batch + query * p.num_kv_heads * p.group + head;
    if (exists) {
      delta = row_delta(params.states, state, delta);
    }
    const float norm = fminf(row_norm<kLanes>(g[0]) + row_norm<kLanes>(g[1]), FLT_MAX);
    const bool finite = all_finite(low) && all_finite(high) && all_finite(g[0]) && all_finite(g[1]) &&
                        (!kMasked || !p.list_sizes || fabsf(delta) < INFINITY);
    const bool silent = max_over_lanes<kLanes>(finite ? 0.f : 1.f) > 0.f;
    const bool plain = fits_half(largest, p.score_scale);
    const PowerOfTwo power = half_range_scale(largest);
    const float factor = plain ? 1.f : power.inverse * p.score_scale;
    uint4 rotated_low, rotated_high;
    rotate_eight(low, high, plain ? p.score_scale : power.scale, rotations, rotated_low, rotated_high);
    if (silent) {
      rotated_low = rotated_high = gradient[0] = gradient[1] = uint4{};
    }
    *reinterpret_cast<uint4*>(queries + panel_offset(kRowTileRows, row, chunk)) = rotated_low;
    *reinterpret_cast<uint4*>(queries + panel_offset(kRowTileRows, row, kHalf / 8 + chunk)) = rotated_high;
    *reinterpret_cast<uint4*>(gradients + panel_offset(kRowTileRows, row, chunk)) = gradient[0];
    *reinterpret_cast<uint4*>(gradients + panel_offset(kRowTileRows, row, kHalf / 8 + chunk)) = gradient[1];
    largest_norm = fmaxf(largest_norm, norm);
    largest_factor = fmaxf(largest_factor, largest > 0.f ? fabsf(factor) : 0.f);
    largest_delta = fmaxf(largest_delta, finite_magnitude(delta));
    scaled |= factor != 1.f;
    if (chunk == 0) {
      float log_sum = INFINITY;
      if (exists) {
        const RowStates& states = params.states;
        log_sum = states.max[state] * 1.442695040888963f + log2f(states.sum[state]) - kRowWeightShift<T>;
      }
      numbers[kLogSum * kRowTileRows + row] = silent ? NAN : log_sum;
      numbers[kDelta * kRowTileRows + row] = kMasked && silent ? 0.f : delta;
      numbers[kQueryFactor * kRowTileRows + row] = factor;
      numbers[kRowToken * kRowTileRows + row] = __int_as_float(exists ? static_cast<int>(token) : -1);
      numbers[kGradientNorm * kRowTileRows + row] = norm;
    }
  }
  scaled = __syncthreads_or(scaled);
  if (threadIdx.x == 0) {
    params.rows.scaled[tile] = scaled;
  }
  raise_bounds(&params.query_bounds[blockIdx.y], largest_norm, largest_factor, largest_delta);
}

template <typename T, int kDim, bool kMasked>
cudaError_t launch_row_tiles_as(const DenseGradientParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const dim3 grid(static_cast<unsigned>(params.rows.num_tiles), p.num_batches * p.num_kv_heads);
  return launch_kernel(row_tiles_kernel<T, kDim, kMasked>, {.grid = grid, .threads = kRowTileThreads<kDim>},
                       stream, params);
}

template <typename T, int kDim>
cudaError_t launch_row_tiles(const DenseGradientParams& params, cudaStream_t stream) {
  return launch_row_tiles_as<T, kDim, /*kMasked=*/false>(params, stream);
}

}  // namespace htree::tree_attention
