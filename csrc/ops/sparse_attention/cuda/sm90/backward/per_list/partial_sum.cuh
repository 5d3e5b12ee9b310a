// dK and dV of a parent's children: the sum of what the blocks of gradient.cuh left, in the order of the
// lists (docs/semantics/conventions.md §0.6, docs/semantics/tree_attention.md §1.10). The bytes of the
// partial sums bound it. Every warp keeps a ring of copies of its share on their way, so that a few parents
// with many partial sums each keep the memory busy too.
//
// A partial sum lies in the order of a warp's wgmma accumulators, 16 children by all dims in bf16. The 16
// bytes of lane i at (32 c + i) * 16 belong to children i / 4 and i / 4 + 8, to dims 16 c + 2 (i % 4) and the
// next, and to the two dims 8 further on. Dims d and d + K/2 are in one lane, so no exchange is needed to
// rotate dK back by the slot's position.
#pragma once

#include "device/mma.cuh"
#include "device/shared_memory.cuh"
#include "device/sm90/wgmma.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/rotations.h"
#include "ops/sparse_attention/cuda/sm80/backward/gradient_rows.cuh"
#include "ops/sparse_attention/cuda/sm90/backward/per_list/task.cuh"

namespace htree::tree_attention {

// The lists in the inverted list of one parent that left partial sums in this launch.
struct PartialList {
  const uint32_t* entries;  // of the head; null: implicit lists, which hold the parent in slot `parent`
  uint32_t begin, end;      // of entries or, without them, of lists
  int first_list;           // the head's first list in this launch
  int64_t first_partial;    // number of that list's first partial sum
};

// A whole warp calls.
__device__ __forceinline__ PartialList partial_list(const PartialSumParams& params, int head_index,
                                                    int parent) {
  const PerListGradientParams& b = params.tasks;
  const GatherParams& p = b.gather;
  const uint32_t per_head = p.num_lists * tasks_per_list(p);
  const uint32_t first_task = max(b.run.first_task, head_index * per_head);
  const uint32_t end_task = min(b.run.first_task + b.run.num_tasks, (head_index + 1) * per_head);
  PartialList list;
  list.first_list = static_cast<int>((first_task - head_index * per_head) / tasks_per_list(p));
  const int end_list = static_cast<int>((end_task - head_index * per_head) / tasks_per_list(p));
  list.first_partial = int64_t{first_task - b.run.first_task} * b.run.slots;
  if (params.entries) {
    const uint32_t* offsets = params.offsets + head_index * (p.num_parents + 1) + parent;
    list.entries = params.entries;
    list.begin = first_entry(params.entries, offsets[0], offsets[1], list.first_list, p.list_width);
    list.end = first_entry(params.entries, list.begin, offsets[1], end_list, p.list_width);
  } else {
    // Lists whose diagonal parent comes before this one do not hold it.
    const int64_t token = parent * int64_t{kParentRows} * p.node_span - (p.t0 - b.lead);
    const int64_t first = max(list_of(p, token + p.stride - 1), int64_t{list.first_list});
    list.entries = nullptr;
    list.begin = static_cast<uint32_t>(min(first, int64_t{end_list}));
    list.end = static_cast<uint32_t>(end_list);
  }
  return list;
}

// Finds the partial sums of a parent, 32 at a time. All lanes of a warp call.
class PartialPlaces {
 public:
  uint32_t place = 0, slot = 0;  // of the partial sum that this lane looked up
  float factor = 0.f;            // of its dK, key_factor()

  __device__ __forceinline__ PartialPlaces(const PartialSumParams& params, int head_index, int parent)
      : params_(params),
        list_(partial_list(params, head_index, parent)),
        head_index_(head_index),
        parent_(parent),
        tasks_(tasks_per_list(params.tasks.gather)),
        powers_(params.tasks.powers + int64_t{head_index} * params.tasks.gather.num_lists * tasks_),
        query_power_(query_power(params.tasks, head_index)),
        num_partials_((list_.end - list_.begin) * tasks_),
        index_(threadIdx.x % 32) {
    entry_ = read_entry(index_);
  }

  // Looks up the next 32 and tells in `here` which of them exist; false at the end.
  __device__ __forceinline__ bool next(unsigned& here) {
    if (index_ - threadIdx.x % 32 >= num_partials_) {
      return false;
    }
    const uint32_t entry = entry_;
    entry_ = read_entry(index_ + 32);
    here = __ballot_sync(device::kFullMask, find(entry));
    index_ += 32;
    return true;
  }

 private:
  __device__ __forceinline__ uint32_t read_entry(uint32_t index) const {
    return list_.entries && index < num_partials_ ? list_.entries[list_.begin + index / tasks_] : 0;
  }

  __device__ __forceinline__ bool find(uint32_t entry) {
    if (index_ >= num_partials_) {
      return false;
    }
    const PerListGradientParams& b = params_.tasks;
    const GatherParams& p = b.gather;
    const uint32_t list = list_.entries ? entry / p.list_width : list_.begin + index_ / tasks_;
    slot = list_.entries ? entry % p.list_width : parent_;
    place = static_cast<uint32_t>(
        list_.first_partial + ((list - list_.first_list) * int64_t{tasks_} + index_ % tasks_) * b.run.slots +
        slot);
    factor =
        key_factor(b.scale, query_power_, powers_[int64_t{list} * tasks_ + index_ % tasks_].score_gradient);
    // Entries past the end of a list, and lists that refine everything, left no sum.
    const int count = taking_part(b, head_index_ / p.num_kv_heads, head_index_ % p.num_kv_heads, list);
    return static_cast<int>(slot) < count;
  }

  const PartialSumParams& params_;
  PartialList list_;
  int head_index_, parent_;
  uint32_t tasks_;
  const TaskPowers* powers_;  // of the head
  float query_power_;
  uint32_t num_partials_, index_, entry_;
};

// A warp adds 16 of the lower dims of dK and their 16 partners in the upper half; as many warps do the same
// for dV.
// A warp for every 16 of the lower dims of dK, with their partners in the upper half; as many for dV.
template <int kDim>
struct SumShape {
  static constexpr int kShares = kDim / 32;
  static constexpr int kWarps = 2 * kShares;
  static constexpr int kMatrixBytes = kParentRows * kDim * 2;
  // A stage of a warp's ring holds its lower dims, their partners, the cos and sin that rotate them back, and the factor of
  // the partial sum.
  static constexpr int kHighOffset = 512;
  static constexpr int kRotationOffset = 1024;
  static constexpr int kFactorOffset = kRotationOffset + 128;
  static constexpr int kStageBytes = kFactorOffset + 16;
  // Copies come and are added in pairs: what one waits for, the other hides.
  static constexpr int kPairs = 3;
  static constexpr int kPairBytes = 2 * kStageBytes;
  static constexpr int kWarpBytes = kPairs * kPairBytes;
  static constexpr int kBytes = kWarps * kWarpBytes;
};

// kValue: for dV, else for dK, whose parts are rotated back where keys were rotated.
template <int kDim, bool kValue, bool kRotates>
class PartialSum {
 public:
  using Shape = SumShape<kDim>;
  static constexpr int kShares = Shape::kShares;

  // `ring`: shared address of the warp's kWarpBytes.
  __device__ __forceinline__ PartialSum(const PartialSumParams& params, uint32_t ring)
      : params_(params), ring_(ring), lane_(threadIdx.x % 32), share_(threadIdx.x / 32 % kShares) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      low_[i] = high_[i] = 0.f;
    }
  }

  // All lanes of a warp call. Returns whether there was a partial sum.
  __device__ __forceinline__ bool run(PartialPlaces& places) {
    unsigned here;
    int pairs = 0;  // on their way
    bool any = false, half = false;
    while (places.next(here)) {
      for (; here; here &= here - 1) {
        const int from = __ffs(here) - 1;
        if (!half && params_.keys && params_.values) {
          device::named_barrier_sync(1, Shape::kWarps * 32);  // warps in step read whole pages of memory
        }
        issue(half, __shfl_sync(device::kFullMask, places.place, from),
              __shfl_sync(device::kFullMask, places.slot, from),
              __shfl_sync(device::kFullMask, places.factor, from));
        any = true;
        half = !half;
        if (half) {
          continue;
        }
        end_pair();
        if (++pairs > kAhead) {
          device::wait_copies<kAhead>();
          add_pair();
          --pairs;
        }
      }
    }
    if (half) {
      end_pair();
    }
    device::wait_copies<0>();
    for (; pairs > 0; --pairs) {
      add_pair();
    }
    if (half) {
      __syncwarp();
      add(load(ring_ + read_));
    }
    return any;
  }

  // Adds the result to the running sums in memory. dK is rotated back by the child's place under its parent.
  template <typename T>
  __device__ __forceinline__ void store(int head_index, int parent) const {
    float* sums = kValue ? params_.values : params_.keys;
    const GatherParams& p = params_.tasks.gather;
    const int64_t first_row = (int64_t{head_index} * p.num_parents + parent) * kParentRows;
    const float factor = kValue && OperandPowers<T>::kWeightShift != 0.f ? 0x1p-14f : 1.f;
    // All loads come before the first store, which might go to the same address.
    float4 rotation[2][2];
    float2 old[2][2][2];
    const auto sum_of = [&](int i, int half) {
      const int dim = (share_ * 2 + i) * 8 + lane_ % 4 * 2, row = lane_ / 4 + 8 * half;
      return reinterpret_cast<float2*>(sums + (first_row + row) * kDim + dim);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        old[i][half][0] = sum_of(i, half)[0];
        old[i][half][1] = sum_of(i, half)[kDim / 4];
        rotation[i][half] = make_float4(1.f, 0.f, 1.f, 0.f);
        if constexpr (!kValue) {
          const int dim = (share_ * 2 + i) * 8 + lane_ % 4 * 2, row = lane_ / 4 + 8 * half;
          rotation[i][half] = *reinterpret_cast<const float4*>(p.rope + row * (kDim / 2) + dim);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* low = low_ + 4 * i + 2 * half;
        const float* high = high_ + 4 * i + 2 * half;
        const float4 c = rotation[i][half];
        const float2 old_low = old[i][half][0], old_high = old[i][half][1];
        float2* to = sum_of(i, half);
        to[0] = make_float2(old_low.x + (low[0] * c.x + high[0] * c.y) * factor,
                            old_low.y + (low[1] * c.z + high[1] * c.w) * factor);
        to[kDim / 4] = make_float2(old_high.x + (high[0] * c.x - low[0] * c.y) * factor,
                                   old_high.y + (high[1] * c.z - low[1] * c.w) * factor);
      }
    }
  }

 private:
  __device__ __forceinline__ static float2 unpack(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }

  // While one pair is added, the newest copies may already go into the stages of the pair that was added before it.
  static constexpr int kAhead = Shape::kPairs - 2;

  __device__ __forceinline__ static uint32_t following(uint32_t pair) {
    return pair == (Shape::kPairs - 1) * Shape::kPairBytes ? 0 : pair + Shape::kPairBytes;
  }

  // Asks for a partial sum, the second of a pair or the first.
  __device__ __forceinline__ void issue(bool second, uint32_t place, uint32_t slot, float factor) {
    const uint32_t stage = ring_ + write_ + (second ? Shape::kStageBytes : 0);
    const uint32_t to = stage + lane_ * 16;
    const char* from = params_.tasks.run.partials + place * int64_t{2 * Shape::kMatrixBytes} +
                       (kValue ? Shape::kMatrixBytes : 0) + (share_ * 32 + lane_) * 16;
    device::copy_async_16(to, from);
    device::copy_async_16(to + Shape::kHighOffset, from + kShares * 512);
    if (kRotates && !kValue && lane_ < 8) {
      device::copy_async_16(
          to + Shape::kRotationOffset,
          params_.tasks.gather.rope + int64_t{slot} * (kParentRows * kDim / 2) + share_ * 16 + lane_ * 2);
    }
    if (!kValue && lane_ == 0) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(stage + Shape::kFactorOffset), "f"(factor) : "memory");
    }
  }
  __device__ __forceinline__ void end_pair() {
    device::commit_copies();
    write_ = following(write_);
  }

  // This lane's part of a partial sum that has arrived.
  struct Part {
    uint4 low, high, rotations[2];
    float factor;
  };
  __device__ __forceinline__ Part load(uint32_t stage) const {
    Part part;
    part.low = device::load_shared_16(stage + lane_ * 16);
    part.high = device::load_shared_16(stage + Shape::kHighOffset + lane_ * 16);
    if constexpr (!kValue && kRotates) {
      const uint32_t rotations = stage + Shape::kRotationOffset + lane_ % 4 * 16;
      part.rotations[0] = device::load_shared_16(rotations);
      part.rotations[1] = device::load_shared_16(rotations + 64);
    }
    if constexpr (!kValue) {
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(part.factor)
                   : "r"(stage + Shape::kFactorOffset)
                   : "memory");
    }
    return part;
  }

  // Adds the oldest pair of the copies on their way, which has arrived, in its order.
  __device__ __forceinline__ void add_pair() {
    __syncwarp();
    const uint32_t stage = ring_ + read_;
    read_ = following(read_);
    const Part first = load(stage), second = load(stage + Shape::kStageBytes);
    add(first);
    add(second);
  }
  __device__ __forceinline__ void add(const Part& part) {
    const uint32_t low[4] = {part.low.x, part.low.y, part.low.z, part.low.w};
    const uint32_t high[4] = {part.high.x, part.high.y, part.high.z, part.high.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float cos[2], sin[2];
      if constexpr (!kValue && kRotates) {
        const uint4 rotation = part.rotations[i];
        cos[0] = __uint_as_float(rotation.x) * part.factor;
        cos[1] = __uint_as_float(rotation.z) * part.factor;
        sin[0] = __uint_as_float(rotation.y) * part.factor;
        sin[1] = __uint_as_float(rotation.w) * part.factor;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 x = unpack(low[2 * i + j]), y = unpack(high[2 * i + j]);
        float* x_sum = low_ + 4 * i + 2 * j;
        float* y_sum = high_ + 4 * i + 2 * j;
        if constexpr (kValue) {
          x_sum[0] += x.x, x_sum[1] += x.y, y_sum[0] += y.x, y_sum[1] += y.y;
        } else if constexpr (!kRotates) {
          // As with a rotation by nothing: the product is rounded, then the sum.
          x_sum[0] += __fmul_rn(x.x, part.factor), x_sum[1] += __fmul_rn(x.y, part.factor);
          y_sum[0] += __fmul_rn(y.x, part.factor), y_sum[1] += __fmul_rn(y.y, part.factor);
        } else {
          x_sum[0] += x.x * cos[0] + y.x * sin[0];
          x_sum[1] += x.y * cos[1] + y.y * sin[1];
          y_sum[0] += y.x * cos[0] - x.x * sin[0];
          y_sum[1] += y.y * cos[1] - x.y * sin[1];
        }
      }
    }
  }

  const PartialSumParams& params_;
  uint32_t ring_, read_ = 0, write_ = 0;
  int lane_, share_;
  float low_[8], high_[8];  // lower dims and their partners in the upper half
};

// Grid: x = parents, y = the heads that the tasks touch.
template <typename T, int kDim, bool kRotates>
__global__ void __launch_bounds__(SumShape<kDim>::kWarps * 32)
    partial_sum_kernel(const __grid_constant__ PartialSumParams params) {
  using Shape = SumShape<kDim>;
  extern __shared__ __align__(128) char rings[];
  const GatherParams& p = params.tasks.gather;
  const int first_head = static_cast<int>(params.tasks.run.first_task /
                                          (static_cast<uint32_t>(p.num_lists) * tasks_per_list(p)));
  const int head_index = first_head + blockIdx.y, parent = blockIdx.x;
  const int warp = threadIdx.x / 32;
  if (!(warp >= Shape::kShares ? params.values : params.keys)) {
    return;
  }
  PartialPlaces places(params, head_index, parent);
  const uint32_t ring = device::shared_address(rings) + warp * Shape::kWarpBytes;
  const auto add = [&](auto sum) {
    if (sum.run(places)) {
      sum.template store<T>(head_index, parent);
    }
  };
  if (warp >= Shape::kShares) {
    add(PartialSum<kDim, true, kRotates>(params, ring));
  } else {
    add(PartialSum<kDim, false, kRotates>(params, ring));
  }
}

template <typename T, int kDim>
cudaError_t launch_partial_sums(const PartialSumParams& params, cudaStream_t stream) {
  const PerListGradientParams& b = params.tasks;
  const int64_t per_head = int64_t{b.gather.num_lists} * tasks_per_list(b.gather);
  const int64_t heads = (b.run.first_task + b.run.num_tasks - 1) / per_head - b.run.first_task / per_head + 1;
  // Only parents up to the last list's own have partial sums.
  const int64_t last_list = (b.run.first_task + b.run.num_tasks - 1) % per_head / tasks_per_list(b.gather);
  const int64_t reached =
      heads > 1 ? b.gather.num_parents
                : (b.gather.t0 - b.lead + last_list * b.gather.stride) / b.gather.node_span / kParentRows + 1;
  const dim3 grid(static_cast<unsigned>(reached), static_cast<unsigned>(heads));
  const LaunchShape shape{
      .grid = grid, .threads = SumShape<kDim>::kWarps * 32, .shared_bytes = SumShape<kDim>::kBytes};
  return dispatch_rotations(b.rotations, [&](auto rotates) {
    return launch_kernel(partial_sum_kernel<T, kDim, rotates.value>, shape, stream, params);
  });
}

}  // namespace htree::tree_attention
