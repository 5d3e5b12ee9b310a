// What a block of gradient.cuh works on: its list and rows, the powers of two of its operands, and its
// shared memory (docs/semantics/tree_attention.md §1.3, §1.10, §1.12). A tile is 8 parents, 128 keys,
// against 128 query rows.
#pragma once

#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/sm80/backward/gradient_rows.cuh"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/cuda/sm80/packed_layer.cuh"
#include "ops/tree/cuda/sm80/query_row.cuh"

namespace htree::tree_attention {

constexpr int kGradientSlots = 8;  // parents in a tile
constexpr int kGradientKeys = kGradientSlots * kParentRows;

// A list and 128 of its (query, head) pairs. The queries of a list all have the same diagonal parent.
struct GradientTask {
  int head_index;  // batch * kv heads + kv head
  int batch, kv_head;
  int list_row;
  int first_pair;                // of this task, among the pairs of the list
  int first_query, num_queries;  // of the list, counted in the chunk
  int num_slots;                 // m; 0 when everything is selected and nothing takes part
  int num_tiles;
  int64_t diagonal_parent;
  // Children of the last parent, which is the diagonal one or seen whole, that take part for the first and for the last
  // query of the list.
  int own_first, own_last;
};

struct PairPlace {
  bool exists;
  int query;  // counted in the chunk
  int head;   // among the G heads of the kv head
};

__host__ __device__ inline int tasks_per_list(const GatherParams& p) {
  return (p.stride * p.group + kGradientRows - 1) / kGradientRows;
}

// Number of parents that add to the softmax of a list's queries. `counts` is [num_lists, H_kv] per batch.
__device__ __forceinline__ int taking_part(const PerListGradientParams& params, int batch, int kv_head,
                                           int list_row) {
  const GatherParams& p = params.gather;
  const int64_t rightmost = node_of(p, p.t0 - params.lead + int64_t{list_row} * p.stride);
  const int count = params.counts
                        ? params.counts[(batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + kv_head]
                        : static_cast<int>(rightmost / kParentRows) + 1;
  const int64_t candidates = (count - 1) * int64_t{kParentRows} + rightmost % kParentRows + 1;
  return params.selected && candidates <= p.list_width ? 0 : count;
}

__device__ __forceinline__ GradientTask gradient_task(const PerListGradientParams& params,
                                                      uint32_t task_idx) {
  const GatherParams& p = params.gather;
  const uint32_t per_list = tasks_per_list(p), num_lists = p.num_lists;
  const uint32_t list_idx = task_idx / per_list;
  GradientTask task;
  task.first_pair = static_cast<int>(task_idx % per_list) * kGradientRows;
  task.list_row = static_cast<int>(list_idx % num_lists);
  task.head_index = static_cast<int>(list_idx / num_lists);
  task.batch = task.head_index / p.num_kv_heads;
  task.kv_head = task.head_index % p.num_kv_heads;
  const int begin = task.list_row * p.stride - params.lead;
  task.first_query = max(begin, 0);
  task.num_queries = min(begin + p.stride, p.num_queries) - task.first_query;
  const int64_t first = node_of(p, p.t0 + task.first_query);
  const int64_t last = node_of(p, p.t0 + task.first_query + task.num_queries - 1);
  task.diagonal_parent = first / kParentRows;
  const int excluded = params.selected ? 1 : 0;  // the query's diagonal block is always selected
  const int64_t number = list_number(p, task.batch, task.list_row, task.kv_head);
  task.own_first = last_place(p, first, number) + 1 - excluded;
  task.own_last = last_place(p, last, number) + 1 - excluded;
  task.num_slots = taking_part(params, task.batch, task.kv_head, task.list_row);
  task.num_tiles = (task.num_slots + kGradientSlots - 1) / kGradientSlots;
  return task;
}

__device__ __forceinline__ PairPlace pair_place(const GatherParams& p, const GradientTask& task, int row) {
  const int pair = task.first_pair + row;
  const int local = pair / p.group;
  return {local < task.num_queries, task.first_query + local, pair - local * p.group};
}

// Whether the queries of a task have masks of their own.
__device__ __forceinline__ bool query_masks(const PerListGradientParams& params) {
  return params.selected && params.mask_stride != params.gather.stride;
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(min(max(exponent, -126), 127) + 127) << 23);
}
__device__ __forceinline__ int exponent_of(float power) {
  return static_cast<int>(__float_as_uint(power) >> 23 & 0xff) - 127;
}

__device__ __forceinline__ float inverse_power(float power) {
  return power_of_two(-exponent_of(power));
}

// The power of two that brings the queries of a (batch, kv head) of the chunk to at most 2^14.
__device__ __forceinline__ float query_power(const PerListGradientParams& params, int head_index) {
  const unsigned unscale = params.query_bounds[head_index].query_unscale;
  return unscale ? power_of_two(6 - exponent_of(__uint_as_float(unscale))) : 1.f;
}
// What a sum dS^T Q still has to be multiplied by, where dS was multiplied by `score_gradient`.
__device__ __forceinline__ float key_factor(float scale, float query, float score_gradient) {
  return fabsf(scale) * inverse_power(query) * inverse_power(score_gradient);
}

// Powers of two that the rows and keys of a task have in common, that of the queries with all of their (batch, kv head)
// in the chunk. One fp16 copy of dS can then serve both dQ += dS K and dK += dS^T Q; a power that a row or a key had of
// its own would have to be undone inside one of the two sums.
template <typename T>
struct OperandPowers {
  float key;             // brings keys into fp16's range
  float query;           // query_power()
  float score_gradient;  // keeps dS below 2^14
  // log2 of what weights are multiplied by, since fp16 has too few small numbers for them.
  static constexpr float kWeightShift = __is_same(T, __half) ? 14.f : 0.f;

  __device__ __forceinline__ OperandPowers(const PerListGradientParams& params, uint32_t task_idx,
                                           int head_index)
      : key(params.powers[task_idx].key),
        query(query_power(params, head_index)),
        score_gradient(params.powers[task_idx].score_gradient) {}

  // Factor of dP and delta, which are multiplied by the shifted weights.
  __device__ __forceinline__ float weighted_gradient() const {
    return score_gradient * (kWeightShift == 0.f ? 1.f : 0x1p-14f);
  }
  // The sign of the scale goes with the queries; its size goes into score_factor(), which is never 0: a score
  // of -inf stands for a key that takes no part and must stay -inf.
  __device__ __forceinline__ float signed_query(float scale) const { return scale < 0.f ? -query : query; }
  // Brings scores to log2 units.
  __device__ __forceinline__ float score_factor(float score_scale) const {
    return fmaxf(fabsf(score_scale) * inverse_power(query) * inverse_power(key), 0x1p-126f);
  }
  // What sum dS K' still has to be multiplied by.
  __device__ __forceinline__ float query_factor(float scale) const {
    return scale * inverse_power(key) * inverse_power(score_gradient);
  }
};

// What a consumer must know of a slot beyond its keys and values. Bit c: child c takes part for some query.
constexpr uint32_t kWholeSlot = 0xffff;
constexpr uint32_t kOwnSlot = 0x10000;    // queries see different numbers of its children
constexpr uint32_t kQuerySlot = 0x20000;  // queries have masks of their own

template <int kDim_>
struct GradientTile {
  static constexpr int kDim = kDim_;  // of keys and of values
  static constexpr int kProducerWarps = 4;
  static constexpr int kThreads = 128 * 3;  // one warpgroup of producers, two of consumers with 64 keys each
  // The launch gives 168 registers to a thread. The accumulators of three products and the weights fill 224.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(128 * (kProducerRegisters + 2 * kConsumerRegisters) <= kThreads * kLaunchRegisters,
                "raise_registers would wait for ever");

  static constexpr int kStages = 2;
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kSlotBytes = kParentRows * kRowBytes;
  static constexpr int kTileBytes = kGradientKeys * kRowBytes;
  static constexpr int kQueryBytes = kGradientRows * kRowBytes;
  // dS^T as [64 query rows][key][64 rows]: rows of 128 bytes, with the swizzle of that width.
  static constexpr int kScoreHalfBytes = kGradientKeys * 128;
};

template <typename Tile>
struct GradientShared {
  char query[Tile::kQueryBytes];     // rotated to their positions, fp16
  char gradient[Tile::kQueryBytes];  // of the output: dO
  char score_gradient[2 * Tile::kScoreHalfBytes];
  char keys[Tile::kStages][Tile::kTileBytes];
  char values[Tile::kStages][Tile::kTileBytes];
  float log_sum[kGradientRows];      // log2 of the sum of e^score, less the shift of the weights
  float delta[kGradientRows];        // in the units of dS
  uint8_t own_limit[kGradientRows];  // children of the diagonal parent that the row sees
  uint32_t slots[Tile::kStages][kGradientSlots];
  // Bit c: child c takes part for the query, counted from the first of the block.
  uint16_t query_masks[Tile::kStages][kGradientSlots][kGradientRun];
  device::Barrier keys_landed[Tile::kStages][Tile::kProducerWarps];  // copies of one producer warp
  device::Barrier keys_full[Tile::kStages];                          // rotated keys of all warps
  device::Barrier keys_empty[Tile::kStages];
  device::Barrier values_full[Tile::kStages];
  device::Barrier values_empty[Tile::kStages];
};

enum GradientBarrier : int {
  kRowsMeet = 1,
  kGroupWrote = 2,   // + warpgroup: its warps have written dS
  kOtherWrote = 4,   // + warpgroup: the other one can read its dS
  kDoneReading = 6,  // + warpgroup: it no longer reads dS
};

// Stage of the ring and phase of its barriers for tile `tile_idx`, counted over all tasks
// of this thread block.
template <typename Tile>
__device__ __forceinline__ int gradient_stage(unsigned tile_idx) {
  return static_cast<int>(tile_idx % Tile::kStages);
}
template <typename Tile>
__device__ __forceinline__ uint32_t gradient_phase(unsigned tile_idx) {
  return tile_idx / Tile::kStages & 1;
}

__device__ __forceinline__ int position_of(const GatherParams& p, const GradientTask& task, int query) {
  const int64_t number = list_number(p, task.batch, task.list_row, task.kv_head);
  return max(task.num_slots - 1, 0) * kParentRows + last_place(p, node_of(p, p.t0 + query), number);
}

// Loads the query side of a block into shared memory: queries rotated to their positions, dO and their
// numbers. kThreads threads call, `thread` in 0 ... kThreads - 1. Rows that stand for no query are zero, and
// so are their weights.
template <typename T, typename Tile, int kThreads>
__device__ __forceinline__ void load_gradient_rows(const PerListGradientParams& params,
                                                   const GradientTask& task, const OperandPowers<T>& powers,
                                                   GradientShared<Tile>& shared, int thread) {
  constexpr int kHalf = Tile::kDim / 2;
  constexpr int kLanes = kHalf / 8;  // lanes on one row: each has 8 dims of the lower half and their partners
  constexpr int kRowsPerPass = kThreads / kLanes;
  static_assert(kGradientRows % kRowsPerPass == 0);
  const GatherParams& p = params.gather;
  const auto head_rows = [&](const TensorView& view) {
    return static_cast<const T*>(view.data) + task.batch * view.batch +
           int64_t{task.kv_head} * p.group * view.head;
  };
  const T* queries = head_rows(p.queries);
  const T* gradients = head_rows(params.gradients);
  const int chunk = thread % kLanes, dim = chunk * 8;
  const float power = powers.signed_query(params.scale);
  constexpr int kPasses = kGradientRows / kRowsPerPass;
  // All loads are issued before the first result is used.
  uint4 query_low[kPasses], query_high[kPasses], gradient_low[kPasses], gradient_high[kPasses];
  float4 rotations[kPasses][4];
  RowMeta meta[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const PairPlace at = pair_place(p, task, pass * kRowsPerPass + thread / kLanes);
    query_low[pass] = query_high[pass] = gradient_low[pass] = gradient_high[pass] = uint4{};
    if (at.exists) {
      const T* query = queries + at.query * p.queries.row + at.head * p.queries.head + dim;
      query_low[pass] = load_eight(query, p.queries.aligned);
      query_high[pass] = load_eight(query + kHalf, p.queries.aligned);
      const T* gradient = gradients + at.query * params.gradients.row + at.head * params.gradients.head + dim;
      const bool aligned = reinterpret_cast<uintptr_t>(gradient) % 16 == 0;
      gradient_low[pass] = load_eight(gradient, aligned);
      gradient_high[pass] = load_eight(gradient + kHalf, aligned);
      const int64_t first = int64_t{task.head_index} * p.num_queries;
      meta[pass] = params.meta[(first + at.query) * p.group + at.head];
    }
    const int position = at.exists ? position_of(p, task, at.query) : 0;
    const float4* table = reinterpret_cast<const float4*>(p.rope + int64_t{position} * kHalf + dim);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rotations[pass][i] = __ldg(table + i);
    }
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRowsPerPass + thread / kLanes;
    const PairPlace at = pair_place(p, task, row);
    const int position = at.exists ? position_of(p, task, at.query) : 0;
    float x[8], y[8];
    widen_eight<T>(query_low[pass], x);
    widen_eight<T>(query_high[pass], y);
    uint4 low, high;
    rotate_eight(x, y, power, rotations[pass], low, high);
    const int low_at = chunk_offset<Tile::kDim>(row, chunk),
              high_at = chunk_offset<Tile::kDim>(row, chunk + kLanes);
    *reinterpret_cast<uint4*>(shared.query + low_at) = low;
    *reinterpret_cast<uint4*>(shared.query + high_at) = high;
    *reinterpret_cast<uint4*>(shared.gradient + low_at) = gradient_low[pass];
    *reinterpret_cast<uint4*>(shared.gradient + high_at) = gradient_high[pass];
    if (chunk == 0) {
      float log_sum = INFINITY, delta = 0.f;
      int limit = 0;
      if (at.exists) {
        log_sum = meta[pass].log_sum - OperandPowers<T>::kWeightShift;
        delta = meta[pass].delta * powers.weighted_gradient();
        limit = position % kParentRows + (params.selected ? 0 : 1);
      }
      shared.log_sum[row] = log_sum;
      shared.delta[row] = delta;
      shared.own_limit[row] = static_cast<uint8_t>(limit);
    }
  }
  device::fence_async_shared();
}

}  // namespace htree::tree_attention
