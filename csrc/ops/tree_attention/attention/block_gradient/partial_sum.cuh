// dK and dV of a parent's children as the sum of what the blocks of block_gradient.cuh left, in the order of
// the lists: docs/semantics.md §0.6, §1.10. Bound by the bytes of the partial sums.
//
// A partial sum is in the order of wgmma's accumulators of a warp, 16 children by all dims in bf16: 16 bytes
// of lane i at (32 c + i) * 16 are children i / 4 and i / 4 + 8, dims 16 c + 2 (i % 4) and the next, and both
// 8 dims further. Dims d and d + K/2 are in one lane, so turning back the slot's position is local.
#pragma once

#include "ops/tree_attention/attention/block_gradient/gradient_task.cuh"

namespace htree::tree_attention {

// Warps of a block: two or one for dK, as many for dV; each takes its share of the lower dims and their
// partners in the upper half.
template <int kDim>
struct SumShape {
  static constexpr int kShares = kDim >= 64 ? 2 : 1;
  static constexpr int kThreads = 64 * kShares;
  static constexpr int kLow = kDim / 32 / kShares;  // 16-byte pieces of the lower half that a lane sums
  static constexpr int kUpper = kDim / 32;          // pieces from a lower one to its partner
  static constexpr int kMatrixBytes = kBlockRows * kDim * 2;
  static constexpr int kInFlight = 4;  // partial sums loaded before the first is added
};

template <int kDim>
struct PartialPieces {
  uint4 low[SumShape<kDim>::kLow], high[SumShape<kDim>::kLow];
};

// The partial sums of one parent among those of the launch.
struct PartialUsers {
  const uint32_t* entries;  // of the parent; null: list i of the head holds it in slot `parent`
  uint32_t begin, end;      // entries or lists, whose lists' partials are here
  int first_list;           // of the head that the parent belongs to, whose partials are here
  int64_t first_partial;    // of that list
};

// First entry of [begin, end) whose list is not before `list`.
__device__ __forceinline__ uint32_t first_entry(const uint32_t* entries, uint32_t begin, uint32_t end,
                                                uint32_t list, uint32_t width) {
  while (begin < end) {
    const uint32_t middle = (begin + end) / 2;
    if (entries[middle] / width < list) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

__device__ __forceinline__ PartialUsers partial_users(const PartialSumParams& params, int head_index,
                                                      int parent) {
  const BlockGradientParams& b = params.blocks;
  const GatherParams& p = b.gather;
  const int64_t per_head = int64_t{p.num_lists} * blocks_per_list(p);
  const int64_t first_task = max(b.first_task, head_index * per_head);
  const int64_t end_task = min(b.first_task + b.num_tasks, (head_index + 1) * per_head);
  PartialUsers users;
  users.first_list = static_cast<int>((first_task - head_index * per_head) / blocks_per_list(p));
  const int end_list = static_cast<int>((end_task - head_index * per_head) / blocks_per_list(p));
  users.first_partial = (first_task - b.first_task) * b.partial_slots;
  if (params.entries) {
    const uint32_t* offsets = params.offsets + head_index * (p.num_parents + 1) + parent;
    users.entries = params.entries;
    users.begin = first_entry(params.entries, offsets[0], offsets[1], users.first_list, p.list_width);
    users.end = first_entry(params.entries, users.begin, offsets[1], end_list, p.list_width);
  } else {
    // lists whose own parent comes before this one do not hold it
    const int64_t token = parent * int64_t{kBlockRows} * p.node_span - p.t0;
    const int64_t first = max((token + p.stride - 1) / p.stride, int64_t{users.first_list});
    users.entries = nullptr;
    users.begin = static_cast<uint32_t>(min(first, int64_t{end_list}));
    users.end = static_cast<uint32_t>(end_list);
  }
  return users;
}

template <int kDim>
class PartialSum {
 public:
  using Shape = SumShape<kDim>;
  using Pieces = PartialPieces<kDim>;

  __device__ __forceinline__ PartialSum(const PartialSumParams& params, const PartialUsers& users,
                                        int head_index, int parent)
      : params_(params),
        users_(users),
        head_index_(head_index),
        parent_(parent),
        lane_(threadIdx.x % 32),
        share_(threadIdx.x / 32 % Shape::kShares),
        is_value_(threadIdx.x / 32 >= Shape::kShares) {
#pragma unroll
    for (int i = 0; i < 16 * Shape::kLow; ++i) {
      sum_[i] = 0.f;
    }
  }

  // All lanes of a warp.
  __device__ __forceinline__ void run() {
    const uint32_t blocks = blocks_per_list(params_.blocks.gather);
    const uint32_t num_partials = (users_.end - users_.begin) * blocks;
    for (uint32_t first = 0; first < num_partials; first += 32) {
      const uint32_t count = min(32u, num_partials - first);
      uint32_t place = kAbsent, slot = 0;
      if (static_cast<uint32_t>(lane_) < count) {
        find(first + lane_, blocks, place, slot);
      }
      if (__any_sync(0xffffffffu, place == kAbsent && static_cast<uint32_t>(lane_) < count)) {
        add_present(place, slot, count);
      } else {
        add_all(place, slot, count);
      }
    }
  }

  // Adds what was summed to the running sums in memory, dK turned back by the child's place.
  template <typename T>
  __device__ __forceinline__ void store() const {
    const HeadPowers<T> powers(params_.blocks, head_index_);
    const GatherParams& p = params_.blocks.gather;
    const int64_t first_row = (int64_t{head_index_} * p.num_parents + parent_) * kBlockRows;
    const float factor = is_value_ ? (HeadPowers<T>::kWeightShift == 0.f ? 1.f : 0x1p-14f)
                                   : powers.key_factor(params_.blocks.scale);
    float* sums = is_value_ ? params_.values : params_.keys;
#pragma unroll
    for (int i = 0; i < 2 * Shape::kLow; ++i) {
      const int dim = (share_ * 2 * Shape::kLow + i) * 8 + lane_ % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_ / 4 + 8 * half;
        const float* low = sum_ + 4 * i + 2 * half;
        const float* high = low + 8 * Shape::kLow;
        float4 turn = make_float4(1.f, 0.f, 1.f, 0.f);
        if (!is_value_) {
          turn = *reinterpret_cast<const float4*>(p.rope + row * (kDim / 2) + dim);
        }
        float2* to = reinterpret_cast<float2*>(sums + (first_row + row) * kDim + dim);
        const float2 old_low = to[0], old_high = to[kDim / 4];
        to[0] = make_float2(old_low.x + (low[0] * turn.x + high[0] * turn.y) * factor,
                            old_low.y + (low[1] * turn.z + high[1] * turn.w) * factor);
        to[kDim / 4] = make_float2(old_high.x + (high[0] * turn.x - low[0] * turn.y) * factor,
                                   old_high.y + (high[1] * turn.z - low[1] * turn.w) * factor);
      }
    }
  }

 private:
  static constexpr uint32_t kAbsent = 0xffffffffu;

  // Place of partial sum `index` of the parent and the slot it stands for.
  __device__ __forceinline__ void find(uint32_t index, uint32_t blocks, uint32_t& place,
                                       uint32_t& slot) const {
    const BlockGradientParams& b = params_.blocks;
    const GatherParams& p = b.gather;
    const uint32_t user = users_.begin + index / blocks;
    uint32_t list = user;
    slot = parent_;
    if (users_.entries) {
      const uint32_t entry = users_.entries[user];
      list = entry / p.list_width;
      slot = entry % p.list_width;
    }
    // what a list holds behind its end, and lists that refine everything, left no sum
    const int count = taking_part(b, head_index_ / p.num_kv_heads, head_index_ % p.num_kv_heads, list);
    if (static_cast<int>(slot) < count) {
      place = static_cast<uint32_t>(
          users_.first_partial +
          ((list - users_.first_list) * int64_t{blocks} + index % blocks) * b.partial_slots + slot);
    }
  }

  __device__ __forceinline__ void load(uint32_t place, Pieces& pieces) const {
    const uint4* from =
        reinterpret_cast<const uint4*>(params_.blocks.partials + place * int64_t{2 * Shape::kMatrixBytes} +
                                       (is_value_ ? Shape::kMatrixBytes : 0)) +
        share_ * Shape::kLow * 32 + lane_;
#pragma unroll
    for (int i = 0; i < Shape::kLow; ++i) {
      pieces.low[i] = __ldcs(from + 32 * i);
      pieces.high[i] = __ldcs(from + 32 * (i + Shape::kUpper));
    }
  }

  __device__ __forceinline__ static float2 unpack(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }

  __device__ __forceinline__ void add(uint32_t slot, const Pieces& pieces) {
    const float2* turns = params_.blocks.gather.rope + int64_t{slot} * (kBlockRows * kDim / 2) +
                          share_ * Shape::kLow * 16 + lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < Shape::kLow; ++i) {
      const uint32_t low[4] = {pieces.low[i].x, pieces.low[i].y, pieces.low[i].z, pieces.low[i].w};
      const uint32_t high[4] = {pieces.high[i].x, pieces.high[i].y, pieces.high[i].z, pieces.high[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = unpack(low[j]), y = unpack(high[j]);
        float* x_sum = sum_ + 8 * i + 2 * j;
        float* y_sum = x_sum + 8 * Shape::kLow;
        if (is_value_) {
          x_sum[0] += x.x, x_sum[1] += x.y, y_sum[0] += y.x, y_sum[1] += y.y;
        } else {
          const float4 turn = __ldg(reinterpret_cast<const float4*>(turns + 16 * i + j / 2 * 8));
          x_sum[0] += x.x * turn.x + y.x * turn.y;
          x_sum[1] += x.y * turn.z + y.y * turn.w;
          y_sum[0] += y.x * turn.x - x.x * turn.y;
          y_sum[1] += y.y * turn.z - x.y * turn.w;
        }
      }
    }
  }

  __device__ __forceinline__ void add_one(uint32_t place, uint32_t slot) {
    Pieces pieces;
    load(place, pieces);
    add(slot, pieces);
  }

  __device__ __forceinline__ void add_all(uint32_t place, uint32_t slot, uint32_t count) {
    constexpr int kInFlight = Shape::kInFlight;
    uint32_t i = 0;
    for (; i + kInFlight <= count; i += kInFlight) {
      Pieces pieces[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        load(__shfl_sync(0xffffffffu, place, i + j), pieces[j]);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        add(__shfl_sync(0xffffffffu, slot, i + j), pieces[j]);
      }
    }
    for (; i < count; ++i) {
      add_one(__shfl_sync(0xffffffffu, place, i), __shfl_sync(0xffffffffu, slot, i));
    }
  }

  __device__ __forceinline__ void add_present(uint32_t place, uint32_t slot, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t at = __shfl_sync(0xffffffffu, place, i), of = __shfl_sync(0xffffffffu, slot, i);
      if (at != kAbsent) {
        add_one(at, of);
      }
    }
  }

  const PartialSumParams& params_;
  const PartialUsers& users_;
  int head_index_, parent_, lane_, share_;
  bool is_value_;
  float sum_[16 * Shape::kLow];  // lower dims, then their partners
};

// Grid: x = parents, y = heads that the tasks touch.
template <typename T, int kDim>
__global__ void __launch_bounds__(SumShape<kDim>::kThreads)
    partial_sum_kernel(const __grid_constant__ PartialSumParams params) {
  const GatherParams& p = params.blocks.gather;
  const int first_head =
      static_cast<int>(params.blocks.first_task / (int64_t{p.num_lists} * blocks_per_list(p)));
  const int head_index = first_head + blockIdx.y, parent = blockIdx.x;
  if (!(threadIdx.x / 32 >= SumShape<kDim>::kShares ? params.values : params.keys)) {
    return;
  }
  const PartialUsers users = partial_users(params, head_index, parent);
  if (users.begin >= users.end) {
    return;
  }
  PartialSum<kDim> sum(params, users, head_index, parent);
  sum.run();
  sum.template store<T>();
}

}  // namespace htree::tree_attention
