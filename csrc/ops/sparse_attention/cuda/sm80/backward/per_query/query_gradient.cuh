// dQ of a layer, docs/semantics/tree_attention.md §1.10: one warp per (token, kv head), on
// the walk of forward/per_query/attend.cuh.
//
// dq = scale * R^-1_{n-1} sum_j R_{16 j} K'_j^T dS_j. Slot by slot, the sum is rotated back by 16 positions,
// as the query is. At the end only the rotation by the query's place under its parent is left.
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/sm80/backward/gradient_rows.cuh"
#include "ops/sparse_attention/cuda/sm80/forward/per_query/attend.cuh"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

constexpr int kQueryGradientWarps = 4;

template <int kKeyDim, int kValueDim>
struct QueryGradientRing {
  static constexpr int kCopyBytes = PackedParent<kKeyDim, kValueDim>::kBytes;
  static constexpr int kStageBytes = (kCopyBytes + 127) / 128 * 128;
  static constexpr int kStages = kStageBytes > 6144 ? 3 : 4;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kQueryGradientWarps * kWarpBytes;
};

// The sum over slots as an accumulator: rows are key dims 16 i + lane / 4 (+ 8), columns are query heads.
template <int kKeyDim, int kTiles>
struct RotatingSum {
  static constexpr int kSteps = kKeyDim / 16;
  float x[kTiles][kSteps][4];
  float cos_step[kSteps / 2][2],
      sin_step[kSteps / 2][2];  // dims 16 i + lane / 4 and 8 further on

  __device__ __forceinline__ explicit RotatingSum(const float2* rope) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 rotation = rope[16 * (kKeyDim / 2) + i * 16 + half * 8 + lane / 4];
        cos_step[i][half] = rotation.x;
        sin_step[i][half] = rotation.y;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[tile][i][e] = 0.f;
        }
      }
    }
  }

  __device__ __forceinline__ void step_back() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          rotate_back(tile, i, e, cos_step[i][e / 2], sin_step[i][e / 2]);
        }
      }
    }
  }

  __device__ __forceinline__ void rotate_back(int tile, int i, int e, float cosine, float sine) {
    const float low = x[tile][i][e], high = x[tile][i + kSteps / 2][e];
    x[tile][i][e] = low * cosine + high * sine;
    x[tile][i + kSteps / 2][e] = high * cosine - low * sine;
  }
};

// What a warp keeps of its query's record beside the query itself.
template <int kDim, int kTiles>
struct QueryGradientRows {
  uint32_t gradient[kTiles][kDim / 16][2];  // dO^T as a B operand
  RowMeta meta[kTiles][2];
};

// Loads both, chooses the powers of two of dS, and undoes the record's power of two in the query.
template <int kDim, int kTiles>
__device__ __forceinline__ void load_rows(int lane, const GradientParams& common,
                                          const RecordRows<kDim, false>& record, int64_t record_idx,
                                          KeyBound bound, QueryGradientRows<kDim, kTiles>& of,
                                          RotatedQuery<kDim, kTiles>& q, PowerOfTwo (&power)[kTiles][2]) {
  const GatherParams& p = common.gather;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int head = tile * 8 + lane / 4;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int dim = step * 16 + i * 8 + lane % 4 * 2;
        of.gradient[tile][step][i] =
            head < p.group ? *reinterpret_cast<const uint32_t*>(record.gradient(head, dim)) : 0u;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = tile * 8 + lane % 4 * 2 + i;
      of.meta[tile][i] = column < p.group ? common.meta[record_idx + column] : RowMeta{0.f, 0.f, 1.f, 0.f};
      // RotatedQuery scaled the record's row once more; here the record's own power of two is undone.
      q.unscale[tile][i] *= of.meta[tile][i].unscale;
      power[tile][i] = score_gradient_scale(of.meta[tile][i].gradient_norm, of.meta[tile][i].delta,
                                            bound.value, bound.unscale);
    }
  }
}

// Adds to dQ what the children of a slot contribute. `rows` of them exist, and those in `present` take part.
template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void add_slot(int lane, const QueryGradientRows<kDim, kTiles>& of,
                                         const PowerOfTwo (&power)[kTiles][2], uint32_t block, int64_t rows,
                                         unsigned present, const TileAddress<kDim>& key_at,
                                         const TileAddress<kDim>& value_at, RotatedQuery<kDim, kTiles>& q,
                                         RotatingSum<kDim, kTiles>& sum) {
  using Block = PackedParent<kDim, kDim>;
  if (rows < kParentRows) {
    clear_value_rows<kDim>(block, static_cast<int>(rows));
  }
  float s[kTiles][4], dp[kTiles][4] = {};
  slot_scores(q, key_at, block, s);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4];
    device::load_matrices(a, block + Block::kValueOffset + value_at.plain(step));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      device::mma_16x8x16<T>(dp[tile], a, of.gradient[tile][step][0], of.gradient[tile][step][1]);
    }
  }
  float row_unscale[2];
  load_row_scales(block + Block::kScaleOffset, row_unscale);
  uint32_t ds[kTiles][2];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const RowMeta& m = of.meta[tile][e & 1];
      const float weight = device::exp2_flushed(s[tile][e] - m.log_sum);
      const bool here = present >> (lane / 4 + e / 2 * 8) & 1;
      s[tile][e] =
          here ? weight * (dp[tile][e] - m.delta) * (power[tile][e & 1].scale * row_unscale[e / 2]) : 0.f;
    }
    device::pack_transposed<__half>(s[tile], ds[tile]);
  }
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4];
    device::load_matrices_transposed(a, block + key_at.transposed(step));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      device::mma_16x8x16<__half>(sum.x[tile][step], a, ds[tile][0], ds[tile][1]);
    }
  }
}

// Rotates dQ back by the query's place under its parent and adds it to dQ of the layers above.
template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void store_query_gradient(int lane, const QueryGradientParams& params,
                                                     const GatherTask& task, int64_t query, int64_t rightmost,
                                                     const PowerOfTwo (&power)[kTiles][2],
                                                     RotatingSum<kDim, kTiles>& sum) {
  const GradientParams& common = params.common;
  const GatherParams& p = common.gather;
  const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
  const int64_t place = rightmost % kParentRows;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int dim = i * 16 + e / 2 * 8 + lane / 4;
        const int column = tile * 8 + lane % 4 * 2 + (e & 1);
        if (column >= p.group) {
          continue;
        }
        const float2 rotation = p.rope[place * (kDim / 2) + dim];
        sum.rotate_back(tile, i, e, rotation.x, rotation.y);
        const int64_t head = int64_t{task.kv_head} * p.group + column;
        float* partial =
            params.partial + ((task.batch * int64_t{p.num_queries} + query) * num_heads + head) * kDim;
        T* out = static_cast<T*>(params.gradient) + task.batch * params.gradient_batch +
                 (query * num_heads + head) * kDim;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = dim + half * (kDim / 2);
          float value = sum.x[tile][i + half * (kDim / 32)][e] * (power[tile][e & 1].inverse * common.scale);
          if (!params.first) {
            value += partial[at];
          }
          if (params.last) {
            out[at] = device::from_acc<T>(value);
          } else {
            partial[at] = value;
          }
        }
      }
    }
  }
}

// Grid: x = runs of kQueryGradientWarps queries, the longest lists first, y = batch * kv head.
template <typename T, int kKeyDim, int kValueDim, int kTiles>
__global__ void __launch_bounds__(kQueryGradientWarps * 32, 2)
    query_gradient_kernel(QueryGradientParams params) {
  using Block = PackedParent<kKeyDim, kValueDim>;
  using Ring = QueryGradientRing<kKeyDim, kValueDim>;
  extern __shared__ __align__(128) char shared[];
  const GradientParams& common = params.common;
  const GatherParams& p = common.gather;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t query = int64_t{gridDim.x - 1 - blockIdx.x} * kQueryGradientWarps + warp;
  if (query >= p.num_queries) {
    return;
  }
  const int64_t list_row = list_of(p, query);
  GatherTask task = gather_task(p, blockIdx.y, query, list_row);
  const int64_t rightmost = node_of(p, task.token);
  const uint16_t* selected = nullptr;
  int last_candidate = task.num_candidates;
  if (common.selected) {
    selected = reinterpret_cast<const uint16_t*>(
        common.selected +
        ((task.batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + task.kv_head) * common.mask_words);
    --last_candidate;
    if (task.num_candidates <= p.list_width) {
      task.num_slots = 0;
    }
  }
  RotatingSum<kKeyDim, kTiles> sum(p.rope);
  PowerOfTwo power[kTiles][2] = {};
  if (task.num_slots > 0) {
    ParentStream<Ring::kCopyBytes, Ring::kStageBytes, Ring::kStages> stream(
        p.packed + task.first_parent * Block::kBytes, Block::kBytes, p.num_parents, task.list, 0,
        task.num_slots, device::shared_address(shared) + warp * Ring::kWarpBytes);
    const int64_t record_idx = (int64_t{blockIdx.y} * p.num_queries + query) * p.group;
    static_assert(kKeyDim == kValueDim);
    const RecordRows<kKeyDim, false> record(common, blockIdx.y, query);
    RotatedQuery<kKeyDim, kTiles> q;
    q.load([&](int head, int dim) { return __half2float(*record.query(head, dim)); }, p.group, p.score_scale,
           p.rope, task.num_candidates - 1);
    QueryGradientRows<kKeyDim, kTiles> of;
    const KeyBound bound = common.list_bounds[int64_t{blockIdx.y} * p.num_lists + list_row];
    load_rows(lane, common, record, record_idx, bound, of, q, power);
    const TileAddress<kKeyDim> key_at;
    const TileAddress<kValueDim> value_at;
    unsigned next_selected = selected ? selected[0] : 0;
    int64_t next_parent = task.list ? task.list[0] : 0;
    for (int slot = 0; slot < task.num_slots; ++slot) {
      // The children that exist: they are candidates and, whatever list the caller gave, not past
      // the query's diagonal block.
      const int64_t rows = min(static_cast<int64_t>(last_candidate) - slot * kParentRows,
                               rightmost + 1 - next_parent * kParentRows);
      const unsigned present =
          ~next_selected & (rows >= kParentRows ? 0xffffu : (1u << max(static_cast<int>(rows), 0)) - 1u);
      const bool more = slot + 1 < task.num_slots;
      next_selected = selected && more ? selected[slot + 1] : 0;
      next_parent = !task.list ? slot + 1 : more ? task.list[slot + 1] : 0;
      const uint32_t block = stream.wait(slot);
      sum.step_back();
      if (present) {
        add_slot<T>(lane, of, power, block, rows, present, key_at, value_at, q, sum);
      }
      q.step_back();
      stream.release();
    }
    device::wait_copies<0>();
  } else if (!params.first && !params.last) {
    return;
  }

  store_query_gradient<T>(lane, params, task, query, rightmost, power, sum);
}

template <typename T, int kDim>
cudaError_t launch_query_gradient(const QueryGradientParams& params, cudaStream_t stream) {
  const GatherParams& p = params.common.gather;
  const LaunchShape shape{
      .grid = dim3(num_blocks(p.num_queries, kQueryGradientWarps), p.num_batches * p.num_kv_heads),
      .threads = kQueryGradientWarps * 32,
      .shared_bytes = QueryGradientRing<kDim, kDim>::kSharedBytes};
  return dispatch_head_tiles(p.group, [&](auto tiles) {
    return launch_kernel(query_gradient_kernel<T, kDim, kDim, tiles.value>, shape, stream, params);
  });
}

}  // namespace htree::tree_attention
