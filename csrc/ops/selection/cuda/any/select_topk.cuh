// Selection kernel: a block has one row of scores. Integer keys order the candidates
// (docs/semantics/tree_attention.md §1.6), a radix select finds the smallest key that is chosen, and a scan
// in the order of positions takes the first of those that are equal to it.
//
// The IO-only variant reads the scores in the same two passes and writes
// hashed positions (docs/semantics/io_only.md §2.3).
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "device/online_softmax.cuh"
#include "device/select.cuh"
#include "device/work.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/any/select_plan.h"
#include "ops/selection/cuda/any/select_topk.h"
#include "ops/tree/cuda/any/lists.cuh"
#include "ops/tree/io_formulas.h"

namespace htree::tree_attention {

struct SelectTraits {
  static constexpr int kThreads = 256;
  static constexpr int kMaxHeads = 8;
  // Above the bits of every float >= 0. The two in the middle are keys that raise_neighbours() writes.
  static constexpr uint32_t kRightmost = 0xffffffffu;
  static constexpr uint32_t kBest = 0xfffffffeu;
  static constexpr uint32_t kNeighbour = 0xfffffffdu;
  static constexpr uint32_t kNan = 0xfffffffcu;
};

struct SelectShared {
  device::RadixScratch radix;
  device::OnlineSum sums[SelectTraits::kThreads / device::kWarpSize];
  float maxima[SelectTraits::kThreads / device::kWarpSize];
  uint32_t counts[SelectTraits::kThreads / device::kWarpSize];
};

// The buffers of a row besides SelectShared. They stand in shared memory or in device scratch.
struct SelectBuffers {
  uint32_t* keys;     // [capacity]
  uint64_t* sorting;  // [sort_size], for the order by key
  float* normalizer;  // [G]: the LSE of each head, or the joint maximum of all heads G times
};

struct Xor {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return a ^ b; }
};

template <int kHeads>
__device__ __forceinline__ void fold_bits(const float (&values)[kHeads], uint32_t& fold) {
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    fold ^= __float_as_uint(values[head]);
  }
}

// normalizer[g] = the log-sum-exp of head g over the first `num` candidates. The IO-only variant folds what it reads.
template <typename Work, int kHeads>
__device__ __forceinline__ void make_lse(const float* scores, int64_t num, int64_t group, float* normalizer,
                                         SelectShared& shared, uint32_t& fold) {
  for (int64_t first = 0; first < group; first += kHeads) {
    const int64_t num_heads = min(static_cast<int64_t>(kHeads), group - first);
    device::OnlineSum sums[kHeads];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      sums[head] = device::OnlineSum::empty();
    }
    for (int64_t p = threadIdx.x; p < num; p += SelectTraits::kThreads) {
      float values[kHeads];
      load_head_scores(scores + p * group + first, num_heads, values);
      if constexpr (Work::kIoOnly) {
        fold_bits(values, fold);
      } else {
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          sums[head].add(values[head]);
        }
      }
    }
    if constexpr (!Work::kIoOnly) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        const float lse = device::block_merge<SelectTraits::kThreads>(sums[head], shared.sums).log_sum();
        if (threadIdx.x == 0 && head < num_heads) {
          normalizer[first + head] = lse;
        }
      }
    }
  }
}

// normalizer[g] = the maximum over the first `num` candidates and all heads; NaN if one of them is NaN.
template <typename Work>
__device__ __forceinline__ void make_joint_maximum(const float* scores, int64_t num, int64_t group,
                                                   float* normalizer, SelectShared& shared, uint32_t& fold) {
  float maximum = device::negative_infinity<float>();
  for (int64_t i = threadIdx.x; i < num * group; i += SelectTraits::kThreads) {
    if constexpr (Work::kIoOnly) {
      fold ^= __float_as_uint(scores[i]);
    } else {
      maximum = device::MaxNan{}(maximum, scores[i]);
    }
  }
  if constexpr (!Work::kIoOnly) {
    maximum = device::block_reduce<SelectTraits::kThreads, device::MaxNan>(maximum, shared.maxima);
    for (int64_t head = threadIdx.x; head < group; head += SelectTraits::kThreads) {
      normalizer[head] = maximum;
    }
  }
}

// The key of every candidate: the bits of its importance, which order as the floats do because
// they are not negative.
template <typename Work, int kHeads>
__device__ __forceinline__ void make_keys(const float* scores, int64_t num, int64_t rightmost, int64_t group,
                                          const float* normalizer, uint32_t* keys, uint32_t& fold) {
  constexpr float kSmallestNormal = 1.17549435e-38f;
  for (int64_t p = threadIdx.x; p < num; p += SelectTraits::kThreads) {
    float importance = 0.0f;
    for (int64_t first = 0; first < group; first += kHeads) {
      const int64_t num_heads = min(static_cast<int64_t>(kHeads), group - first);
      float values[kHeads];
      load_head_scores(scores + p * group + first, num_heads, values);
      if constexpr (Work::kIoOnly) {
        fold_bits(values, fold);
      } else {
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          if (head < num_heads) {
            const float base = normalizer[first + head];
            float weight = expf(values[head] - base);
            weight = weight < kSmallestNormal || base == device::negative_infinity<float>() ? 0.0f : weight;
            importance += weight;
          }
        }
      }
    }
    if constexpr (!Work::kIoOnly) {
      keys[p] = p == rightmost             ? SelectTraits::kRightmost
                : importance != importance ? SelectTraits::kNan
                                           : __float_as_uint(importance);
    }
  }
}

// Calls emit(rank, p) for the `count` chosen positions; rank counts them in ascending order of p.
template <typename Emit>
__device__ __forceinline__ void for_each_selected(const uint32_t* keys, int64_t num, int64_t count,
                                                  SelectShared& shared, Emit&& emit) {
  if (count == num) {
    for (int64_t p = threadIdx.x; p < num; p += SelectTraits::kThreads) {
      emit(p, p);
    }
    return;
  }
  const device::Threshold threshold = device::block_radix_select<SelectTraits::kThreads>(
      keys, num, static_cast<uint32_t>(count), shared.radix);
  uint32_t larger_before = 0;
  uint32_t equal_before = 0;
  for (int64_t tile = 0; tile < num; tile += SelectTraits::kThreads) {
    const int64_t p = tile + threadIdx.x;
    const uint32_t key = p < num ? keys[p] : 0;
    const bool larger = p < num && key > threshold.key;
    const bool equal = p < num && key == threshold.key;
    uint32_t total;
    const uint32_t packed =
        (larger ? 1u << 16 : 0u) | (equal ? 1u : 0u);  // a tile has 256 candidates: the fields cannot meet
    const uint32_t before = device::block_exclusive_sum<SelectTraits::kThreads>(packed, shared.counts, total);
    const uint32_t larger_rank = larger_before + (before >> 16);
    const uint32_t equal_rank = equal_before + (before & 0xffffu);
    if (larger || (equal && equal_rank < threshold.equal)) {
      emit(static_cast<int64_t>(larger_rank) + min(equal_rank, threshold.equal), p);
    }
    larger_before += total >> 16;
    equal_before += total & 0xffffu;
  }
}

// Raises the keys of the `best` candidates of largest key above all others, and those of the candidates behind
// them above the rest (§1.6, open_next). Begins and ends with a __syncthreads.
__device__ __forceinline__ void raise_neighbours(uint32_t* keys, int64_t num, int64_t best,
                                                 SelectShared& shared) {
  using Traits = SelectTraits;
  __syncthreads();
  // A candidate's key is read before its place is known, and no other thread reads it then.
  for_each_selected(keys, num, best, shared, [&](int64_t, int64_t p) {
    if (p != num - 1) {
      keys[p] = Traits::kBest;
    }
  });
  __syncthreads();
  for (int64_t tile = 0; tile < num - 1; tile += Traits::kThreads) {
    const int64_t p = tile + threadIdx.x;
    const bool behind = p > 0 && p < num - 1 && keys[p] != Traits::kBest && keys[p - 1] == Traits::kBest;
    __syncthreads();
    if (behind) {
      keys[p] = Traits::kNeighbour;
    }
    __syncthreads();
  }
}

// Stores the row of the IO-only variant: its positions plus every score that was read, masked to nothing.
__device__ __forceinline__ void store_io_positions(const SelectParams& params, const RowIndex& row,
                                                   int64_t num, uint32_t fold, SelectShared& shared,
                                                   int32_t* out) {
  const uint32_t nothing =
      device::block_reduce<SelectTraits::kThreads, Xor>(fold, shared.counts) & params.io.fold_mask;
  const int64_t count = params.io.bottom ? 0 : min(num, params.top_k);
  const uint32_t seed = io_position_seed(row.batch, params.io.t0 + row.query * params.query_step, row.list);
  for (int64_t i = threadIdx.x; i < params.top_k; i += SelectTraits::kThreads) {
    const int32_t position = i < count ? io_position(i, count, num, seed, params.io.stratified) : -1;
    out[i] = position + static_cast<int32_t>(nothing);
  }
}

template <typename Work, int kHeads>
__device__ __forceinline__ void select_row(const SelectParams& params, const SelectPlan& plan,
                                           const SelectBuffers& buffers, int64_t row_idx,
                                           SelectShared& shared) {
  const RowIndex row = row_index(row_idx, params.num_queries, params.num_lists);
  const int64_t score_row =
      (row.batch * params.score_queries + row.query * params.query_step) * params.num_lists + row.list;
  const float* scores = params.scores + score_row * params.capacity * params.group;
  // A count outside [0, capacity] can only come from a caller of the op.
  const int64_t num =
      max(int64_t{0}, min(static_cast<int64_t>(params.num_candidates[score_row]), params.capacity));
  const int64_t rightmost = num - 1;
  const int64_t counted = params.selection.importance == Importance::kLse ? num : max(int64_t{0}, rightmost);
  const int64_t count = min(num, params.top_k);
  const bool by_key = params.order == SelectionOrder::kByKey;
  int32_t* out = params.positions + row_idx * params.top_k;
  uint32_t fold = 0;

  if (count < num || by_key) {
    if (params.selection.importance == Importance::kExpJoint) {
      make_joint_maximum<Work>(scores, counted, params.group, buffers.normalizer, shared, fold);
    } else {
      make_lse<Work, kHeads>(scores, counted, params.group, buffers.normalizer, shared, fold);
    }
    __syncthreads();
    fold = __funnelshift_l(fold, fold, 1);  // without it the second pass would cancel the first
    make_keys<Work, kHeads>(scores, num, rightmost, params.group, buffers.normalizer, buffers.keys, fold);
    __syncthreads();
    if constexpr (!Work::kIoOnly) {
      if (const int64_t best = best_with_neighbours(params.selection, params.top_k, num); best > 0) {
        raise_neighbours(buffers.keys, num, best, shared);
      }
    }
  }
  if constexpr (Work::kIoOnly) {
    store_io_positions(params, row, num, fold, shared, out);
    return;
  }
  if (by_key) {
    // The complement ascends where the key descends: larger key first, then smaller position. The padding is
    // larger than any.
    for_each_selected(buffers.keys, num, count, shared, [&](int64_t rank, int64_t p) {
      buffers.sorting[rank] = static_cast<uint64_t>(~buffers.keys[p]) << 32 | static_cast<uint32_t>(p);
    });
    int64_t size = 1;
    while (size < count) {
      size *= 2;
    }
    for (int64_t i = count + threadIdx.x; i < size; i += SelectTraits::kThreads) {
      buffers.sorting[i] = ~uint64_t{0};
    }
    __syncthreads();
    device::block_sort(buffers.sorting, size);
    for (int64_t i = threadIdx.x; i < count; i += SelectTraits::kThreads) {
      out[i] = static_cast<int32_t>(static_cast<uint32_t>(buffers.sorting[i]));
    }
  } else {
    for_each_selected(buffers.keys, num, count, shared,
                      [&](int64_t rank, int64_t p) { out[rank] = static_cast<int32_t>(p); });
  }
  for (int64_t i = count + threadIdx.x; i < params.top_k; i += SelectTraits::kThreads) {
    out[i] = -1;
  }
}

template <typename Work, int kHeads>
__global__ void __launch_bounds__(SelectTraits::kThreads)
    select_topk_kernel(const SelectParams params, const SelectPlan plan) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ SelectShared shared;
  unsigned char* in_shared = shared_bytes;
  unsigned char* in_scratch = static_cast<unsigned char*>(params.scratch) + blockIdx.x * plan.scratch_bytes;
  const auto take = [&](bool from_shared, int64_t bytes) {
    unsigned char*& next = from_shared ? in_shared : in_scratch;
    unsigned char* taken = next;
    next += bytes;
    return taken;
  };
  SelectBuffers buffers;
  buffers.sorting = reinterpret_cast<uint64_t*>(take(plan.sorting_shared, plan.sort_size * 8));
  buffers.normalizer = reinterpret_cast<float*>(take(plan.normalizer_shared, params.group * 4));
  buffers.keys = reinterpret_cast<uint32_t*>(take(plan.keys_shared, params.capacity * 4));
  for (int64_t row = blockIdx.x; row < params.num_rows(); row += gridDim.x) {
    select_row<Work, kHeads>(params, plan, buffers, row, shared);
    __syncthreads();
  }
}

template <typename Work, int kHeads>
cudaError_t launch_select_for(const SelectParams& params, const SelectPlan& plan, cudaStream_t stream) {
  const LaunchShape shape{.grid = static_cast<unsigned>(plan.num_blocks),
                          .threads = SelectTraits::kThreads,
                          .shared_bytes = plan.shared_bytes};
  return launch_kernel(select_topk_kernel<Work, kHeads>, shape, stream, params, plan);
}

template <typename Work>
cudaError_t launch_select_topk(const SelectParams& params, cudaStream_t stream) {
  if (params.num_rows() == 0 || params.top_k == 0) {
    return cudaSuccess;
  }
  const SelectPlan plan = select_plan(params);
  if (params.group == 1) {
    return launch_select_for<Work, 1>(params, plan, stream);
  }
  if (params.group == 2) {
    return launch_select_for<Work, 2>(params, plan, stream);
  }
  if (params.group <= 4) {
    return launch_select_for<Work, 4>(params, plan, stream);
  }
  return launch_select_for<Work, SelectTraits::kMaxHeads>(params, plan, stream);
}

}  // namespace htree::tree_attention
