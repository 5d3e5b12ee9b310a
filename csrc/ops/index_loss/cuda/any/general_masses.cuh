// Statistics and masses of the attention for every dtype, width and block size: a thread block has a position and up to
// kGeneralHeads heads of a K/V head, and its lanes take tokens.
#pragma once

#include <cfloat>

#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/index_loss/cuda/any/loss_rows.cuh"
#include "ops/index_loss/cuda/any/row_products.cuh"
#include "ops/index_loss/index_loss_plan.h"

namespace htree::index_loss {

struct GeneralTraits {
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / device::kWarpSize;
  static constexpr int kHeads = static_cast<int>(kGeneralHeads);
};

// The maximum of scores in base 2 so far, and the sum of powers above it.
struct Statistics {
  float max = -FLT_MAX;  // finite, so that no difference of infinities is formed
  float sum = 0.0f;

  __device__ __forceinline__ void add(float score) {
    if (score > max) {
      sum *= exp2f(max - score);
      max = score;
    }
    sum += exp2f(score - max);
  }
  __device__ __forceinline__ void merge(float other_max, float other_sum) {
    const float largest = fmaxf(max, other_max);
    sum = sum * exp2f(max - largest) + other_sum * exp2f(other_max - largest);
    max = largest;
  }
};

// Where a thread block works.
struct GeneralPlace {
  int32_t batch, row, split;
  int32_t kv_head, part;          // the part of all K/V heads
  int32_t first_head, num_heads;  // of the part
};

template <typename T>
__device__ __forceinline__ GeneralPlace general_place(const MassParams<T>& params) {
  const int32_t all = params.kv_heads * params.parts;
  const int32_t part = static_cast<int32_t>(blockIdx.z) % all;
  const int32_t group = params.heads / params.kv_heads, first = part % params.parts * params.part_heads;
  return {static_cast<int32_t>(blockIdx.z) / all,
          static_cast<int32_t>(blockIdx.x),
          static_cast<int32_t>(blockIdx.y),
          part / params.parts,
          part,
          part / params.parts * group + first,
          min(params.part_heads, group - first)};
}

// Statistics of the heads over the threads of the block, to `partials`.
template <typename T>
__device__ __forceinline__ void store_statistics(const MassParams<T>& params, const GeneralPlace& place,
                                                 Statistics (&found)[GeneralTraits::kHeads]) {
  using Tr = GeneralTraits;
  __shared__ float2 of_warps[Tr::kWarps][Tr::kHeads];
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
#pragma unroll
  for (int h = 0; h < Tr::kHeads; ++h) {
    for (int offset = device::kWarpSize / 2; offset > 0; offset /= 2) {
      const float max = __shfl_xor_sync(device::kFullMask, found[h].max, offset);
      const float sum = __shfl_xor_sync(device::kFullMask, found[h].sum, offset);
      found[h].merge(max, sum);
    }
    if (threadIdx.x % device::kWarpSize == 0) {
      of_warps[warp][h] = make_float2(found[h].max, found[h].sum);
    }
  }
  __syncthreads();
  const int h = static_cast<int>(threadIdx.x);
  if (h < place.num_heads) {
    Statistics merged;
    for (int w = 0; w < Tr::kWarps; ++w) {
      merged.merge(of_warps[w][h].x, of_warps[w][h].y);
    }
    const int64_t rows = static_cast<int64_t>(params.span.num_batches) * params.span.rows;
    const int64_t row = place.split * rows + static_cast<int64_t>(place.batch) * params.span.rows + place.row;
    params.partials[row * params.heads + place.first_head + h] = make_float2(merged.max, merged.sum);
  }
}

// Grid: x = positions, y = splits of the columns, z = batches and parts of K/V heads. `lanes` lanes, a power of two, share
// a block of tokens.
template <typename T, bool kMasses>
__global__ void __launch_bounds__(GeneralTraits::kThreads)
    general_masses_kernel(const MassParams<T> params, int lanes) {
  using Tr = GeneralTraits;
  extern __shared__ __align__(16) float general_queries[];
  auto* queries = reinterpret_cast<float(*)[Tr::kHeads]>(general_queries);
  const LossSpan& span = params.span;
  const GeneralPlace place = general_place(params);
  const LossRow row = table_of(span, place.batch)[place.row];
  const int64_t batch = span.first_batch + place.batch;
  const T* query = params.query.data + batch * params.query.batch + row.token * params.query.row +
                   place.first_head * params.query.head;
  for (int item = threadIdx.x; item < params.key_dim * Tr::kHeads; item += Tr::kThreads) {
    const int c = item % params.key_dim, h = item / params.key_dim;
    const bool present = h < place.num_heads && row.units > 0;
    queries[c][h] = present ? params.scale * device::to_acc(query[h * params.query.head + c]) : 0.0f;
  }
  __syncthreads();
  const UnitRange units = units_of_split(span, row.start, row.units, place.split);
  const T* keys = params.key.data + batch * params.key.batch + row.start * params.key.row +
                  place.kv_head * params.key.head;
  if constexpr (!kMasses) {
    Statistics found[Tr::kHeads];
    const int64_t last = static_cast<int64_t>(units.end) * span.unit;
    for (int64_t token = static_cast<int64_t>(units.begin) * span.unit + threadIdx.x; token < last;
         token += Tr::kThreads) {
      float sums[Tr::kHeads] = {};
      multiply_key(keys + token * params.key.row, params.key_dim, queries, sums);
#pragma unroll
      for (int h = 0; h < Tr::kHeads; ++h) {
        found[h].add(sums[h]);
      }
    }
    store_statistics(params, place, found);
  } else {
    const int64_t held = static_cast<int64_t>(place.batch) * span.rows + place.row;
    const float* lse = params.lse + (batch * span.rows + place.row) * params.heads + place.first_head;
    float reference[Tr::kHeads];
#pragma unroll
    for (int h = 0; h < Tr::kHeads; ++h) {
      reference[h] = h < place.num_heads ? lse[h] * 1.4426950408889634f : 0.0f;
    }
    float* masses = params.masses + (held * params.kv_heads * params.parts + place.part) * span.num_columns;
    const int groups = Tr::kThreads / lanes;
    const int group = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
    for (int32_t first = units.begin; first < units.end; first += groups) {
      const int32_t unit = first + group;
      float mass = 0.0f;
      for (int32_t i = lane; unit < units.end && i < span.unit; i += lanes) {
        const int64_t token = static_cast<int64_t>(unit) * span.unit + i;
        float sums[Tr::kHeads] = {};
        multiply_key(keys + token * params.key.row, params.key_dim, queries, sums);
#pragma unroll
        for (int h = 0; h < Tr::kHeads; ++h) {
          mass += h < place.num_heads ? exp2f(sums[h] - reference[h]) : 0.0f;
        }
      }
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        mass += __shfl_xor_sync(device::kFullMask, mass, offset);
      }
      if (lane == 0 && unit < units.end) {
        masses[units.column + unit] = mass;
      }
    }
  }
}

template <typename T, bool kMasses>
cudaError_t launch_general_masses(const MassParams<T>& params, cudaStream_t stream) {
  using Tr = GeneralTraits;
  const LossSpan& span = params.span;
  int lanes = 1;
  while (lanes < span.unit && lanes < device::kWarpSize) {
    lanes *= 2;
  }
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(span.rows),
                   static_cast<unsigned>(ceil_div(span.num_columns, span.split_columns)),
                   static_cast<unsigned>(span.num_batches * params.kv_heads * params.parts)),
      .threads = Tr::kThreads,
      .shared_bytes =
          static_cast<int64_t>(params.key_dim) * Tr::kHeads * static_cast<int64_t>(sizeof(float))};
  return launch_kernel(general_masses_kernel<T, kMasses>, shape, stream, params, lanes);
}

}  // namespace htree::index_loss
