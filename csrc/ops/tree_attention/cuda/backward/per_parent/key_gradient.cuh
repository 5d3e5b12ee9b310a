// dK and dV of a layer, docs/semantics/tree_attention.md §1.10: one block per (batch, kv head, parent) walks
// the parent's users.
//
// A user is a list that holds the parent; with it come stride * G rows (query, head). The four warps take a
// quarter of the rows each, 16 at a time: S^T = K' q^T and dP^T = V dO^T with the parent's children as rows,
// then dV += P^T dO and dK' += dS^T q from the same registers. Their sums are added in warp order at the end,
// so the result depends on the lists alone.
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/cuda/backward/per_parent/parent_gradient.h"
#include "ops/tree_attention/cuda/backward/per_parent/parent_users.cuh"
#include "ops/tree_attention/cuda/rotated_query.cuh"

namespace htree::tree_attention {

// Rotates the 16 query rows of a stage to their positions, in place.
template <int kKeyDim, int kValueDim>
__device__ __forceinline__ void rotate_rows(uint32_t stage, const float2* rope) {
  using Stage = KeyGradientStage<kKeyDim, kValueDim>;
  constexpr int kHalfChunks = kKeyDim / 16;
#pragma unroll
  for (int i = 0; i < kParentRows * kHalfChunks / 32; ++i) {
    const int unit = i * 32 + threadIdx.x % 32;
    const int row = unit / kHalfChunks, chunk = unit % kHalfChunks;
    int position;
    asm volatile("ld.shared.s32 %0, [%1];"
                 : "=r"(position)
                 : "r"(stage + Stage::kViewOffset + row * 8 + 4)
                 : "memory");
    const float4* rotations =
        reinterpret_cast<const float4*>(rope + static_cast<int64_t>(position) * (kKeyDim / 2) + chunk * 8);
    const uint32_t low_at = stage + chunk_offset<kKeyDim>(row, chunk);
    const uint32_t high_at = stage + chunk_offset<kKeyDim>(row, chunk + kHalfChunks);
    uint32_t low[4], high[4];
    const auto load = [](uint32_t(&x)[4], uint32_t at) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(at)
                   : "memory");
    };
    const auto store = [](const uint32_t(&x)[4], uint32_t at) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                   "r"(x[3])
                   : "memory");
    };
    load(low, low_at);
    load(high, high_at);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float4 rotation = rotations[pair];  // cos, sin of two dims
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(low[pair]));
      const float2 y = __half22float2(reinterpret_cast<const __half2&>(high[pair]));
      low[pair] =
          device::pack_pair<__half>(x.x * rotation.x - y.x * rotation.y, x.y * rotation.z - y.y * rotation.w);
      high[pair] =
          device::pack_pair<__half>(x.x * rotation.y + y.x * rotation.x, x.y * rotation.w + y.y * rotation.z);
    }
    store(low, low_at);
    store(high, high_at);
  }
  __syncwarp();
}

// s[tile] += rows of A (16 children) times rows of B (8 tile + ...), both [16, kDim] tiles in shared memory.
template <typename T, int kDim>
__device__ __forceinline__ void rows_times_rows(float (&s)[2][4], uint32_t a_tile, uint32_t b_tile,
                                                const TileAddress<kDim>& at) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4], b[4];
    device::load_matrices(a, a_tile + at.plain(step));
    device::load_matrices(b, b_tile + at.transposed(step));
    device::mma_16x8x16<T>(s[0], a, b[0], b[1]);
    device::mma_16x8x16<T>(s[1], a, b[2], b[3]);
  }
}

// sum[8 dims each] += weights (16 children x 16 rows) times the tile [16 rows, kDim].
template <typename T, int kDim>
__device__ __forceinline__ void weights_times_rows(float (&sum)[kDim / 8][4], const uint32_t (&weights)[4],
                                                   uint32_t tile, const TileAddress<kDim>& at) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t b[4];
    device::load_matrices_transposed(b, tile + at.plain(step));
    device::mma_16x8x16<T>(sum[2 * step], weights, b[0], b[1]);
    device::mma_16x8x16<T>(sum[2 * step + 1], weights, b[2], b[3]);
  }
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(at)
               : "memory");
  return x;
}

// Grid: x = parents, the most used ones first, y = batch * kv head.
template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kKeyGradientWarps * 32, 2) key_gradient_kernel(KeyGradientParams params) {
  using Block = PackedParent<kKeyDim, kValueDim>;
  using Stage = KeyGradientStage<kKeyDim, kValueDim>;
  extern __shared__ __align__(128) char shared[];
  const GradientParams& common = params.common;
  const GatherParams& p = common.gather;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const ParentUsers users(params);
  if (users.num_rows == 0 && params.add) {
    return;
  }
  const uint32_t block = device::shared_address(shared);
  const char* from = p.packed + (int64_t{blockIdx.y} * p.num_parents + users.parent) * Block::kBytes;
  for (int at = threadIdx.x * 16; at < Block::kBytes; at += kKeyGradientWarps * 32 * 16) {
    device::copy_async_16(block + at, from + at);
  }
  device::commit_copies();
  device::wait_copies<0>();
  __syncthreads();

  const KeyBounds key_bounds = common.key_bounds[blockIdx.y];
  const QueryBounds query_bounds = common.query_bounds[blockIdx.y];
  const PowerOfTwo power = score_gradient_scale(__uint_as_float(query_bounds.gradient_norm),
                                                __uint_as_float(key_bounds.value_norm),
                                                __uint_as_float(query_bounds.query_unscale));
  float key_sum[kKeyDim / 8][4] = {}, value_sum[kValueDim / 8][4] = {};
  const uint32_t num_steps = (users.num_rows + kParentRows - 1) / kParentRows;
  const uint32_t steps_per_warp = (num_steps + kKeyGradientWarps - 1) / kKeyGradientWarps;
  const uint32_t begin = min(warp * steps_per_warp, num_steps), end = min(begin + steps_per_warp, num_steps);
  if (begin < end) {
    RowStream<kKeyDim, kValueDim> stream(params, users, begin, end,
                                         block + Stage::kBlockBytes + warp * Stage::kWarpBytes);
    const TileAddress<kKeyDim> key_at;
    const TileAddress<kValueDim> value_at;
    float row_unscale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_unscale[i] = *reinterpret_cast<const float*>(shared + Block::kScaleOffset + (lane / 4 + 8 * i) * 4);
    }
    for (uint32_t step = begin; step < end; ++step) {
      const uint32_t stage = stream.wait(step);
      rotate_rows<kKeyDim, kValueDim>(stage, p.rope);
      float s[2][4] = {}, dp[2][4] = {};
      rows_times_rows<__half>(s, block, stage, key_at);
      if (params.keys) {
        rows_times_rows<T>(dp, block + Block::kValueOffset, stage + Stage::kQueryBytes, value_at);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = tile * 8 + lane % 4 * 2 + i;
          const float4 meta = load_shared_float4(stage + Stage::kMetaOffset + row * 16);  // RowMeta
          unsigned present;
          asm volatile("ld.shared.u32 %0, [%1];"
                       : "=r"(present)
                       : "r"(stage + Stage::kViewOffset + row * 8)
                       : "memory");
          const float score_scale = meta.z * p.score_scale;
          const float gradient_scale = meta.z * power.scale;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int e = i + 2 * half;
            const bool here = present >> (lane / 4 + 8 * half) & 1;
            const float score = s[tile][e] * row_unscale[half] * score_scale;
            const float weight = here ? device::exp2_flushed(score - meta.x) : 0.f;
            s[tile][e] = weight;
            dp[tile][e] = here ? weight * (dp[tile][e] - meta.y) * gradient_scale : 0.f;
          }
        }
      }
      if (params.values) {
        const uint32_t weights[4] = {
            device::pack_pair<T>(s[0][0], s[0][1]), device::pack_pair<T>(s[0][2], s[0][3]),
            device::pack_pair<T>(s[1][0], s[1][1]), device::pack_pair<T>(s[1][2], s[1][3])};
        weights_times_rows<T>(value_sum, weights, stage + Stage::kQueryBytes, value_at);
      }
      if (params.keys) {
        const uint32_t weights[4] = {
            device::pack_pair<__half>(dp[0][0], dp[0][1]), device::pack_pair<__half>(dp[0][2], dp[0][3]),
            device::pack_pair<__half>(dp[1][0], dp[1][1]), device::pack_pair<__half>(dp[1][2], dp[1][3])};
        weights_times_rows<__half>(key_sum, weights, stage, key_at);
      }
      stream.release();
    }
    device::wait_copies<0>();
  }
  __syncthreads();

  // [warp][tile][lane] sums of the warps
  float4* sums = reinterpret_cast<float4*>(shared + Stage::kBlockBytes);
  const auto sum_at = [&](int of_warp, int tile) -> float4& {
    return sums[(of_warp * Stage::kSumTiles + tile) * 32 + lane];
  };
#pragma unroll
  for (int tile = 0; tile < kKeyDim / 8; ++tile) {
    sum_at(warp, tile) = make_float4(key_sum[tile][0], key_sum[tile][1], key_sum[tile][2], key_sum[tile][3]);
  }
#pragma unroll
  for (int tile = 0; tile < kValueDim / 8; ++tile) {
    sum_at(warp, kKeyDim / 8 + tile) =
        make_float4(value_sum[tile][0], value_sum[tile][1], value_sum[tile][2], value_sum[tile][3]);
  }
  __syncthreads();
  const auto total = [&](int tile, float(&x)[4]) {
    float4 all = sum_at(0, tile);
#pragma unroll
    for (int i = 1; i < kKeyGradientWarps; ++i) {
      const float4 other = sum_at(i, tile);
      all.x += other.x, all.y += other.y, all.z += other.z, all.w += other.w;
    }
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
  };
  const int64_t first_row = (int64_t{blockIdx.y} * p.num_parents + users.parent) * kParentRows;
  const auto write = [&](float* to, float x, float y) {
    float2* at = reinterpret_cast<float2*>(to);
    const float2 old = params.add ? *at : make_float2(0.f, 0.f);
    *at = make_float2(old.x + x, old.y + y);
  };
  if (params.keys) {
    for (int tile = warp; tile < kKeyDim / 16; tile += kKeyGradientWarps) {
      float low[4], high[4];
      total(tile, low);
      total(tile + kKeyDim / 16, high);
      const int dim = tile * 8 + lane % 4 * 2;
      const float factor = power.inverse * common.scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        float a[2], b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // back by the child's place: keys were rotated when they were packed
          const float2 rotation = p.rope[row * (kKeyDim / 2) + dim + i];
          a[i] = (low[2 * half + i] * rotation.x + high[2 * half + i] * rotation.y) * factor;
          b[i] = (high[2 * half + i] * rotation.x - low[2 * half + i] * rotation.y) * factor;
        }
        float* to = params.keys + (first_row + row) * kKeyDim + dim;
        write(to, a[0], a[1]);
        write(to + kKeyDim / 2, b[0], b[1]);
      }
    }
  }
  if (params.values) {
    for (int tile = warp; tile < kValueDim / 8; tile += kKeyGradientWarps) {
      float x[4];
      total(kKeyDim / 8 + tile, x);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        write(params.values + (first_row + lane / 4 + 8 * half) * kValueDim + tile * 8 + lane % 4 * 2,
              x[2 * half], x[2 * half + 1]);
      }
    }
  }
}

template <typename T, int kDim>
cudaError_t launch_key_gradient(const KeyGradientParams& params, cudaStream_t stream) {
  const GatherParams& p = params.common.gather;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(p.num_parents), p.num_batches * p.num_kv_heads),
                          .threads = kKeyGradientWarps * 32,
                          .shared_bytes = KeyGradientStage<kDim, kDim>::kSharedBytes};
  return launch_kernel(key_gradient_kernel<T, kDim, kDim>, shape, stream, params);
}

}  // namespace htree::tree_attention
