// dQ of a layer on Hopper (sm_90a), docs/semantics/tree_attention.md §1.10: as
// backward/per_query/query_gradient.cuh, but neighbouring queries of a kv head share one
// gather, as in forward/shared_gather/.
//
// The data path of shared memory bounds it: the keys of a slot pass through it in both directions, its
// values once. Twelve warps of 160 registers each hold a query, its dO, its dQ and the rotation
// factors of two slots. Where records are paired and a list serves several queries, a warp holds two neighbours: the heads
// of the second are the columns behind those of the first.
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/rotations.h"
#include "ops/sparse_attention/cuda/sm80/backward/per_query/query_gradient.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/shared_gather/attend.cuh"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

template <int kDim>
struct SharedGatherGradientShape {
  using Block = PackedParent<kDim, kDim>;
  static constexpr int kWarps = 12;
  static constexpr int kThreads = (kWarps + 4) * 32;  // and a warpgroup, one warp of which copies
  static constexpr int kRegisters = 160;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kWarps * 32 * kRegisters + 128 * kProducerRegisters <= kThreads * kLaunchRegisters,
                "raise_registers would wait for ever");
  using Shared = UnionShared<Block, kWarps>;
  static_assert(sizeof(Shared) <= device::kHopperSharedBytes);
};

// The query of one warp, or two, on the way along their list.
template <typename T, int kDim, bool kSelected, bool kRotates, bool kPaired>
class SharedGatherGradientQuery {
 public:
  using Block = PackedParent<kDim, kDim>;
  static constexpr int kSteps = kDim / 16;

  // `selected`: 16 bits per slot of the list. The warp has `queries` queries, of which `task` is that of the first.
  __device__ __forceinline__ SharedGatherGradientQuery(const SharedGatherGradientParams& params,
                                                       const GatherTask& task, int64_t query, int queries,
                                                       int64_t rightmost, const uint16_t* selected)
      : sum_(params.query.common.gather.rope),
        rotations_(kRotates ? params.rotations + RotationFactors<kDim>::lane_offset() : nullptr),
        selected_(selected),
        rows_left_(task.num_candidates - (kSelected ? 1 : 0)),  // its diagonal block is always selected
        rightmost_(static_cast<int>(rightmost)) {
    if (task.num_slots == 0) {
      return;
    }
    const GradientParams& common = params.query.common;
    const GatherParams& p = common.gather;
    const int lane = threadIdx.x % 32;
    const int64_t record_idx = (int64_t{blockIdx.y} * p.num_queries + query) * p.group;
    const int columns = columns_of(p, queries);
    const int own = kPaired ? min(lane / 4 / kPairedGroup, queries - 1) : 0;  // the query of column lane / 4
    const RecordRows<kDim, kRotates> record(common, blockIdx.y, query + own);
    const auto row = [](int column) { return kPaired ? column % kPairedGroup : column; };
    q_.load([&](int column, int dim) { return __half2float(*record.query(row(column), dim)); }, columns,
            p.score_scale, p.rope, task.num_candidates - 1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = lane / 4, dim = step * 16 + i * 8 + lane % 4 * 2;
        gradient_[step][i] =
            column < columns ? *reinterpret_cast<const uint32_t*>(record.gradient(row(column), dim)) : 0u;
      }
    }
    const KeyBound bound = common.list_bounds[int64_t{blockIdx.y} * p.num_lists + list_of(p, query)];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = lane % 4 * 2 + i;
      // The numbers of the second query follow those of the first.
      const RowMeta meta = column < columns ? common.meta[record_idx + column] : RowMeta{0.f, 0.f, 1.f, 0.f};
      log_sum_[i] = meta.log_sum;
      delta_[i] = meta.delta;
      // load() scaled the record's row once more; here the record's own power of two is undone.
      q_.unscale[0][i] *= meta.unscale;
      power_[i] = score_gradient_scale(meta.gradient_norm, meta.delta, bound.value, bound.unscale).scale;
    }
    if constexpr (kRotates) {
      factors_.load(rotations_);
    }
    if constexpr (kSelected) {
      next_selected_ = selected_[0];
    }
    if constexpr (kSeesMore) {
      const int64_t list = list_number(p, task.batch, list_of(p, query), task.kv_head);
      more_rows_ = last_place(p, rightmost_ + 1, list) - last_place(p, rightmost_, list);
    }
  }

  // Works on the next slot of the list: `parent`, which lies in shared memory at `block`.
  __device__ __forceinline__ void take(uint32_t block, int parent) {
    // Whatever list the caller gave, nothing past the query's diagonal block takes part.
    const unsigned exist = first_rows(min(rows_left_, rightmost_ + 1 - parent * kParentRows));
    unsigned present = exist, exist_second = exist;
    if constexpr (kSeesMore) {
      exist_second = first_rows(min(rows_left_ + more_rows_, rightmost_ + 2 - parent * kParentRows));
      present = exist_second;
    }
    if constexpr (kSelected) {
      present &= ~next_selected_;
    }
    float s[1][4];
    q_.template scores<kRotates>(factors_, at_, block, s);
    rows_left_ -= kParentRows;
    if constexpr (kSelected) {
      ++selected_;
      next_selected_ = rows_left_ > 0 ? *selected_ : 0;
    }
    if constexpr (kRotates) {  // factors for the next slot; the table has one slot more than the longest list
      rotations_ += RotationSlots<kDim>::kSlotPairs;
      factors_.load(rotations_);
      sum_.step_back();
    }
    if (present == 0) {
      return;
    }
    uint32_t gradients[2];
    if constexpr (kSeesMore) {
      score_gradients(s[0], block, in_second() ? exist_second : exist, gradients);
      if (exist != exist_second) {
        return add_keys_of_each(block, gradients, exist, exist_second);
      }
    } else {
      score_gradients(s[0], block, present, gradients);
    }
    if (exist == 0xffffu) {
      add_keys<false>(block, gradients, exist);
    } else {
      add_keys<true>(block, gradients, exist);
    }
  }

  // Rotates dQ back by the query's place under its parent and adds it to dQ of the layers above.
  __device__ __forceinline__ void store(const QueryGradientParams& params, const GatherTask& task,
                                        int64_t query, int queries) {
    const GradientParams& common = params.common;
    const GatherParams& p = common.gather;
    const int lane = threadIdx.x % 32;
    const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
    const int place = rightmost_ % kParentRows;
    const int columns = columns_of(p, queries);
    const int own = kPaired && in_second() ? kPairedGroup : 0;  // the first column of this lane's query
    query += own / kPairedGroup;
    float* partial = params.partial + (task.batch * int64_t{p.num_queries} + query) * num_heads * kDim;
    T* out = static_cast<T*>(params.gradient) + task.batch * params.gradient_batch + query * num_heads * kDim;
    const auto place_of = [&](int i, int e) {
      const int64_t head = int64_t{task.kv_head} * p.group + lane % 4 * 2 + (e & 1) - own;
      return head * kDim + i * 16 + e / 2 * 8 + lane / 4;
    };
    // All loads come before the first store, which might go to the same address.
    float2 rotations[kSteps / 2][2];
    float old[kSteps / 2][4][2] = {};
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        rotations[i][j] = p.rope[place * (kDim / 2) + i * 16 + j * 8 + lane / 4];
      }
    }
    if (!params.first) {
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (lane % 4 * 2 + (e & 1) < columns) {
            old[i][e][0] = partial[place_of(i, e)];
            old[i][e][1] = partial[place_of(i, e) + kDim / 2];
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (lane % 4 * 2 + (e & 1) >= columns) {
          continue;
        }
        sum_.rotate_back(0, i, e, rotations[i][e / 2].x, rotations[i][e / 2].y);
        // A query without slots has no power of two; its sum is 0.
        const float factor = task.num_slots > 0 ? common.scale / power_[e & 1] : 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t at = place_of(i, e) + half * (kDim / 2);
          float value = sum_.x[0][i + half * (kDim / 32)][e] * factor;
          if (!params.first) {
            value += old[i][e][half];
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

 private:
  // Above the tokens two neighbours see the same nodes. Their tokens share a parent too, but the second sees one more.
  static constexpr bool kSeesMore = kPaired && !kSelected;

  // The query heads of a warp.
  __device__ __forceinline__ static int columns_of(const GatherParams& p, int queries) {
    return kPaired ? queries * kPairedGroup : p.group;
  }
  __device__ __forceinline__ static unsigned first_rows(int rows) {
    return rows >= kParentRows ? 0xffffu : (1u << max(rows, 0)) - 1u;
  }
  // Whether the columns of this lane, in what products return, are those of the second query.
  __device__ __forceinline__ static bool in_second() {
    return threadIdx.x % 4 * 2 >= kPairedGroup;
  }

  // dS of the 16 children, in fp16, as the B operand of dQ^T += K'^T dS.
  __device__ __forceinline__ void score_gradients(float (&s)[4], uint32_t block, unsigned present,
                                                  uint32_t (&gradients)[2]) const {
    const int lane = threadIdx.x % 32;
    float dp[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      device::load_matrices(a,
                            block + Block::kValueOffset + at_.plain[step % at_.kSteps] + at_.further(step));
      device::mma_16x8x16<T>(dp[step % 2], a, gradient_[step][0], gradient_[step][1]);
    }
    float row_unscale[2];
    load_row_scales(block + Block::kScaleOffset, row_unscale);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float weight = device::exp2_flushed(s[e] - log_sum_[e & 1]);
      const bool here = present >> (lane / 4 + e / 2 * 8) & 1;
      s[e] =
          here ? weight * (dp[0][e] + dp[1][e] - delta_[e & 1]) * (power_[e & 1] * row_unscale[e / 2]) : 0.f;
    }
    device::pack_transposed<__half>(s, gradients);
  }

  // `keep` marks the rows whose keys exist for this query, as in add_values().
  template <bool kPartial>
  __device__ __forceinline__ void add_keys(uint32_t block, const uint32_t (&gradients)[2], unsigned keep) {
    const RowMask<kPartial> kept(keep);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      device::load_matrices_transposed(a, block + at_.transposed[step % at_.kSteps] + at_.further(step));
      kept.apply(a);
      device::mma_16x8x16<__half>(sum_.x[0][step], a, gradients[0], gradients[1]);
    }
  }

  // The same where the second query sees a key that the first does not. The first has a weight of 0 for it, which does
  // not silence a NaN, so each has products of its own.
  __device__ __forceinline__ void add_keys_of_each(uint32_t block, const uint32_t (&gradients)[2],
                                                   unsigned keep, unsigned keep_second) {
    const RowMask<true> kept(keep), kept_second(keep_second);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4], b[4];
      device::load_matrices_transposed(a, block + at_.transposed[step % at_.kSteps] + at_.further(step));
      float(&sum)[4] = sum_.x[0][step];
      float second[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[i] = a[i];
        second[i] = sum[i];
      }
      kept.apply(a);
      kept_second.apply(b);
      device::mma_16x8x16<__half>(sum, a, gradients[0], gradients[1]);
      device::mma_16x8x16<__half>(second, b, gradients[0], gradients[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[i] = in_second() ? second[i] : sum[i];
      }
    }
  }

  RotatedHalfQuery<kDim, 1> q_;
  RotationFactors<kDim> factors_;
  RotatingSum<kDim, 1> sum_;
  uint32_t gradient_[kSteps][2];  // dO^T as a B operand
  float log_sum_[2], delta_[2];
  float power_[2];        // power of two of dS
  StepOffsets<kDim> at_;  // offsets of keys and of values
  const __half2* rotations_;
  const uint16_t* selected_;
  unsigned next_selected_ = 0;
  int rows_left_;  // candidates from the next slot on
  int rightmost_;
  int more_rows_ = 0;  // candidates that the second query has beyond those of the first
};

// Grid: x = runs of a query for each warp, or of two where they are paired, the longest lists first, y = batch * kv head.
template <typename T, int kDim, bool kSelected, bool kRotates, bool kPaired>
__global__ void __launch_bounds__(SharedGatherGradientShape<kDim>::kThreads, 1)
    shared_gather_gradient_kernel(const __grid_constant__ SharedGatherGradientParams params) {
#if HTREE_SM90A
  using Shape = SharedGatherGradientShape<kDim>;
  using Block = typename Shape::Block;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(shared_bytes);
  const QueryGradientParams& gradient = params.query;
  const GatherParams& p = gradient.common.gather;
  const int warp = __shfl_sync(device::kFullMask, threadIdx.x / 32, 0);
  constexpr int kQueries = kPaired ? 2 : 1;  // of a warp
  const int64_t first_query = int64_t{gridDim.x - 1 - blockIdx.x} * (Shape::kWarps * kQueries);
  const int64_t last_query = min(first_query + Shape::kWarps * kQueries, int64_t{p.num_queries}) - 1;
  if (p.t0 + first_query < gradient.masked_end &&
      all_masked_rows(p, blockIdx.y, min(first_query + warp * kQueries, last_query), Shape::kWarps)) {
    return;  // another kernel writes them
  }
  const int num_parents = static_cast<int>(node_of(p, p.t0 + last_query) / kParentRows) + 1;
  const char* packed = p.packed + int64_t{blockIdx.y} * p.num_parents * Block::kBytes;
  if (threadIdx.x == 0) {
    shared.ring.init(Shape::kWarps);
  }

  if (warp >= Shape::kWarps) {
    device::lower_registers<Shape::kProducerRegisters>();
    load_unions(shared, num_parents, packed, warp);
    return;
  }
  device::raise_registers<Shape::kRegisters>();

  const int64_t query = min(first_query + warp * kQueries, last_query);
  const bool exists = first_query + warp * kQueries <= last_query;
  const int64_t list_row = list_of(p, query);
  GatherTask task = gather_task(p, blockIdx.y, query, list_row);
  const uint16_t* selected = nullptr;
  if constexpr (kSelected) {
    const int64_t row = (task.batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + task.kv_head;
    selected = reinterpret_cast<const uint16_t*>(gradient.common.selected + row * gradient.common.mask_words);
    if (task.num_candidates <= p.list_width) {
      task.num_slots = 0;  // everything is selected
    }
  }
  if (!exists) {
    task.num_slots = 0;
  }
  const int queries = kPaired && query < last_query ? 2 : 1;
  SharedGatherGradientQuery<T, kDim, kSelected, kRotates, kPaired> own(params, task, query, queries,
                                                                       node_of(p, task.token), selected);
  walk_unions(shared, ListCursor(task.list, task.num_slots, p.num_parents), num_parents, warp,
              [&](uint32_t block, int parent) { own.take(block, parent); });
  if (exists && (task.num_slots > 0 || gradient.first || gradient.last)) {
    own.store(gradient, task, query, queries);
  }
#else
  __trap();  // chosen for sm_90a alone, see plan/
#endif
}

template <typename T, int kDim, bool kSelected>
cudaError_t launch_shared_gather_gradient_as(const SharedGatherGradientParams& params, cudaStream_t stream) {
  using Shape = SharedGatherGradientShape<kDim>;
  const GatherParams& p = params.query.common.gather;
  // From stride 2 on, a power of two, queries 2 i and 2 i + 1 share a list.
  const bool paired = params.query.common.tile_rows == kPairedGroup && p.stride > 1;
  const LaunchShape shape{.grid = dim3(num_blocks(p.num_queries, Shape::kWarps * (paired ? 2 : 1)),
                                       p.num_batches * p.num_kv_heads),
                          .threads = Shape::kThreads,
                          .shared_bytes = sizeof(typename Shape::Shared)};
  if (paired) {
    return launch_kernel(shared_gather_gradient_kernel<T, kDim, kSelected, false, /*kPaired=*/true>, shape,
                         stream, params);
  }
  return dispatch_rotations(params.rotations, [&](auto rotates) {
    return launch_kernel(shared_gather_gradient_kernel<T, kDim, kSelected, rotates.value, false>, shape,
                         stream, params);
  });
}

template <typename T, int kDim>
cudaError_t launch_shared_gather_gradient(const SharedGatherGradientParams& params, cudaStream_t stream) {
  return params.query.common.selected ? launch_shared_gather_gradient_as<T, kDim, true>(params, stream)
                                      : launch_shared_gather_gradient_as<T, kDim, false>(params, stream);
}

}  // namespace htree::tree_attention
