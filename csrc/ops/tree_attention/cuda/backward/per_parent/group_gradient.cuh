// dK and dV of a layer, docs/semantics/tree_attention.md §1.10, for 4 to 8 query heads per K/V head: a thread
// block walks the users of kGroupParents neighbouring parents in a window of lists. Hopper (sm_90a).
//
// A warp owns a parent and adds its users two at a time, as in parent_gradient.cuh. Neighbouring parents have
// many users in common, so a user's rows come to shared memory once, for all parents of the block that have it:
//
//   planner  a warp that merges the users of the parents, 32 lists at a time, into plans
//   copiers  three warps that bring the planned users into a ring of stages by bulk copies
//   owners   eight warps, each of which reads the stages of its parent's users and passes over the others
//
// A user's stage has a number, counted from the first of the window on; its place in the ring is the number modulo
// kUserStages. Owners know from a plan alone which numbers are theirs. An owner may hold one user while it waits for
// the next, if the ring has room for both; then it cannot stop the copiers for ever.
#pragma once

#include "device/divmod.cuh"
#include "device/hopper/mbarrier.cuh"
#include "device/hopper/tma.cuh"
#include "device/hopper/wgmma.cuh"
#include "ops/tree_attention/cuda/backward/per_parent/parent_gradient.cuh"

namespace htree::tree_attention {

constexpr int kGroupParents = 8;  // and warps that own one
constexpr int kCopiers = 3;
constexpr int kGroupThreads = (1 + kCopiers + kGroupParents) * 32;
constexpr int kOwnerRegisters = 232, kHelperRegisters = 40;
static_assert(128 * kHelperRegisters + 32 * kGroupParents * kOwnerRegisters <= 65536);
static_assert((1 + kCopiers) * 32 == 128);  // a warpgroup
constexpr int kGroupBarrier = 1;
constexpr uint32_t kUserStages = 30, kPlans = 4;
// So one copier fills a stage every time: it knows each of its phases, and the parity of one tells it from the others.
static_assert(kUserStages % kCopiers == 0);

struct GroupGradientParams {
  KeyGradientParams key;
  device::FastDivisor list_width;
};

// One user, of which each parent sees something else and to which it has another distance.
template <int kDim>
struct alignas(128) GroupStage {
  static constexpr int kRowBytes = kDim * 2;
  char record[TiledRecord<kDim>::kBytes];
  char rotations[kGroupParents][kRowBytes];  // fp16 cos and sin of its position, from launch_position_rotations()
  uint32_t present[kGroupParents];
};

// The users among 32 lists, lists that no parent has left out.
struct UserPlan {
  uint32_t masks[kGroupParents];  // bit i: the parent has list first_list + i
  uint32_t all;                   // of any parent; 0: the end
  uint32_t first_list;
  uint32_t first_stage;                // number of the first user
  uint8_t lists[32];                   // the bits of `all`, in their order
  uint32_t places[32][kGroupParents];  // of a list and parent: parents of the list behind it, what is selected of it << 16

  // The number of the first user of list first_list + i.
  __device__ __forceinline__ static uint32_t stage_of(uint32_t first, uint32_t all, int i, int stride_log2) {
    return first + (__popc(all & ((1u << i) - 1)) << stride_log2);
  }
};

template <int kDim>
struct GroupShared {
  GroupStage<kDim> stages[kUserStages];
  char values[kGroupParents][kParentRows * kDim * 2];  // of the parents
  UserPlan plans[kPlans];
  uint32_t numbers[kUserStages];  // of the users that are or will be in the stages
  uint2 users[kGroupParents];     // first and last + 1 of the entries in the window
  device::Barrier full[kUserStages], empty[kUserStages];
  device::Barrier plan_full[kPlans], plan_empty[kPlans];

  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < kUserStages; ++i) {
        device::barrier_init(&full[i], 1);
        device::barrier_init(&empty[i], kGroupParents);
        numbers[i] = ~0u;
      }
      for (uint32_t i = 0; i < kPlans; ++i) {
        device::barrier_init(&plan_full[i], 1);
        device::barrier_init(&plan_empty[i], kCopiers + kGroupParents);
      }
      device::fence_barrier_init();
    }
  }
  __device__ __forceinline__ bool has_users() const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kGroupParents; ++i) {
      any |= users[i].x < users[i].y;
    }
    return any;
  }
};

using PlanPlace = device::RingPlace<kPlans>;

// ---- the planner

template <int kDim>
class UserPlanner {
 public:
  __device__ __forceinline__ UserPlanner(const GroupGradientParams& params, GroupShared<kDim>& shared)
      : params_(params), shared_(shared), lane_(threadIdx.x % 32) {
    const uint2 users = shared.users[lane_ % kGroupParents];
    next_ = users.x;
    end_ = users.y;
  }

  __device__ __forceinline__ void run() {
    const GatherParams& p = params_.key.common.gather;
    const int stride_log2 = __ffs(p.stride) - 1;
    PlanPlace place;
    uint32_t number = 0, entries[kGroupParents];
    read(entries);
    for (;; place.advance()) {
      UserPlan& plan = shared_.plans[place.stage];
      uint32_t first = kNone;
#pragma unroll
      for (int i = 0; i < kGroupParents; ++i) {
        first = min(first, list_of_entry(entries[i]));
      }
      first = __reduce_min_sync(device::kFullMask, first);
      device::barrier_wait(&shared_.plan_empty[place.stage], place.parity ^ 1);
      uint32_t masks[kGroupParents], all = 0;
#pragma unroll
      for (int i = 0; i < kGroupParents; ++i) {
        const uint32_t at = list_of_entry(entries[i]) - first;
        masks[i] = __reduce_or_sync(device::kFullMask, entries[i] != kNone && at < 32 ? 1u << at : 0u);
        next_ += lane_ == i ? __popc(masks[i]) : 0;
        all |= masks[i];
      }
      uint32_t following[kGroupParents];
      read(following);  // on the way while this plan is written
      write(plan, entries, masks, first);
      if (lane_ == 0) {
        plan.all = all;
        plan.first_list = first;
        plan.first_stage = number;
      }
      if (all >> lane_ & 1) {
        plan.lists[__popc(all & ((1u << lane_) - 1))] = static_cast<uint8_t>(lane_);
      }
      __syncwarp();
      if (lane_ == 0) {
        device::barrier_arrive(&shared_.plan_full[place.stage]);
      }
      if (all == 0) {
        return;
      }
      number += __popc(all) << stride_log2;
#pragma unroll
      for (int i = 0; i < kGroupParents; ++i) {
        entries[i] = following[i];
      }
    }
  }

 private:
  static constexpr uint32_t kNone = ~0u;

  // Of each parent the next entry but as many as the lane's number, or kNone.
  __device__ __forceinline__ void read(uint32_t (&entries)[kGroupParents]) const {
    const KeyGradientParams& key = params_.key;
#pragma unroll
    for (int i = 0; i < kGroupParents; ++i) {
      const uint32_t at = __shfl_sync(device::kFullMask, next_, i) + lane_;
      entries[i] = kNone;
      if (at < __shfl_sync(device::kFullMask, end_, i)) {
        entries[i] =
            key.entries ? key.entries[at] : at * key.common.gather.list_width + blockIdx.x * kGroupParents + i;
      }
    }
  }
  __device__ __forceinline__ uint32_t list_of_entry(uint32_t entry) const {
    return entry == kNone ? kNone : params_.list_width.quotient(entry);
  }

  // What the copiers must know of this lane's list.
  __device__ __forceinline__ void write(UserPlan& plan, const uint32_t (&entries)[kGroupParents],
                                        const uint32_t (&masks)[kGroupParents], uint32_t first) const {
    const GradientParams& common = params_.key.common;
    const GatherParams& p = common.gather;
    const int batch = blockIdx.y / p.num_kv_heads, kv_head = blockIdx.y % p.num_kv_heads;
    const uint32_t list = min(first + lane_, static_cast<uint32_t>(p.num_lists - 1));
    const int64_t index = (batch * int64_t{p.num_lists} + list) * p.num_kv_heads + kv_head;
    const int count = params_.key.entries ? params_.key.counts[index] : 0;
    const uint16_t* selected = reinterpret_cast<const uint16_t*>(common.selected + index * common.mask_words);
#pragma unroll
    for (int i = 0; i < kGroupParents; ++i) {
      const uint32_t entry =
          __shfl_sync(device::kFullMask, entries[i], __popc(masks[i] & ((1u << lane_) - 1)));
      uint32_t place = 0;
      if (masks[i] >> lane_ & 1) {
        const uint32_t slot = params_.list_width.remainder(entry, params_.list_width.quotient(entry));
        place = ((count - 1 - slot) & 0xffffu) | (common.selected ? uint32_t{selected[slot]} << 16 : 0u);
      }
      plan.places[lane_][i] = place;
      if (lane_ == 0) {
        plan.masks[i] = masks[i];
      }
    }
  }

  const GroupGradientParams& params_;
  GroupShared<kDim>& shared_;
  const int lane_;
  uint32_t next_, end_;  // of parent lane % kGroupParents: the entries that no plan has yet
};

// ---- the copiers

// Copier `copier` takes every kCopiers-th user.
template <int kDim>
__device__ __forceinline__ void copy_users(const GroupGradientParams& params, GroupShared<kDim>& shared,
                                           uint32_t copier) {
  using Stage = GroupStage<kDim>;
  using Record = TiledRecord<kDim>;
  const KeyGradientParams& key = params.key;
  const GatherParams& p = key.common.gather;
  const int lane = threadIdx.x % 32, stride_log2 = __ffs(p.stride) - 1;
  const int64_t parent = int64_t{blockIdx.x} * kGroupParents + lane;
  const char* records = key.common.records + int64_t{blockIdx.y} * p.num_queries * Record::kBytes;
  for (PlanPlace place;; place.advance()) {
    device::barrier_wait(&shared.plan_full[place.stage], place.parity);
    const UserPlan& plan = shared.plans[place.stage];
    const uint32_t all = plan.all, first = plan.first_stage, first_list = plan.first_list;
    if (all == 0) {
      return;
    }
    const uint32_t mask = lane < kGroupParents ? plan.masks[lane] : 0;
    const uint32_t end = first + (__popc(all) << stride_log2);
    for (uint32_t n = first + (copier + kCopiers - first % kCopiers) % kCopiers; n < end; n += kCopiers) {
      const uint32_t row = plan.lists[(n - first) >> stride_log2];
      const bool holds = mask >> row & 1;
      const int holders = __popc(__ballot_sync(device::kFullMask, holds));
      const uint32_t asked = ((first_list + row) << stride_log2) + ((n - first) & (p.stride - 1));
      const uint32_t query = min(asked, static_cast<uint32_t>(p.num_queries - 1));
      const uint32_t seen = holds ? plan.places[row][lane] : 0;
      const int64_t rightmost = node_of(p, p.t0 + query);
      const int behind = key.entries ? static_cast<int>(seen & 0xffffu)
                                     : static_cast<int>(rightmost / kParentRows - parent);
      const int position = behind * kParentRows + static_cast<int>(rightmost % kParentRows);
      // Above the bottom a query's own node is always refined.
      const int64_t rows =
          min(int64_t{position} + (key.common.selected ? 0 : 1), rightmost + 1 - parent * kParentRows);
      const unsigned present = rows >= kParentRows ? 0xffffu : (1u << max(static_cast<int>(rows), 0)) - 1u;

      const uint32_t at = n % kUserStages;
      Stage& stage = shared.stages[at];
      device::Barrier* full = &shared.full[at];
      if (n >= kUserStages) {
        device::barrier_wait(&shared.empty[at], (n / kUserStages - 1) & 1);
      }
      if (holds) {
        stage.present[lane] = asked == query ? present & ~(seen >> 16) : 0u;
      }
      __syncwarp();
      if (lane == 0) {
        *const_cast<volatile uint32_t*>(&shared.numbers[at]) = n;
        if (holders < kGroupParents) {
          device::barrier_arrive(&shared.empty[at], kGroupParents - holders);
        }
        device::barrier_arrive_expect(full, Record::kBytes + holders * Stage::kRowBytes);
        device::bulk_load(stage.record, records + uint64_t{query} * Record::kBytes, Record::kBytes, full);
      }
      __syncwarp();
      if (holds) {
        device::bulk_load(
            stage.rotations[lane],
            reinterpret_cast<const char*>(key.rotations) + int64_t{max(position, 0)} * Stage::kRowBytes,
            Stage::kRowBytes, full);
      }
    }
    __syncwarp();
    if (lane == 0) {
      device::barrier_arrive(&shared.plan_empty[place.stage]);
    }
  }
}

// ---- the owners

// The users of parent `owner` of the block, by the numbers of their stages, in order.
template <int kDim>
class OwnUsers {
 public:
  __device__ __forceinline__ OwnUsers(GroupShared<kDim>& shared, int owner, int stride_log2)
      : shared_(shared), owner_(owner), stride_log2_(stride_log2) {}

  static constexpr uint32_t kNone = ~0u;

  // The next user, or kNone at the end.
  __device__ __forceinline__ uint32_t next() {
    while (mask_ == 0) {
      if (!read_plan()) {
        return kNone;
      }
    }
    return take();
  }
  // The next user if its stage can be filled before that of `held` is empty. Else kNone, also where only a plan to come
  // could tell: the copiers must be able to finish this one.
  __device__ __forceinline__ uint32_t next_beside(uint32_t held) {
    while (mask_ == 0) {
      if (ended_ || end_ - held >= kUserStages || !read_plan()) {
        return kNone;
      }
    }
    return number() - held < kUserStages ? take() : kNone;
  }

 private:
  __device__ __forceinline__ uint32_t number() const {
    return UserPlan::stage_of(first_, all_, __ffs(mask_) - 1, stride_log2_) + query_;
  }
  __device__ __forceinline__ uint32_t take() {
    const uint32_t result = number();
    if (++query_ == 1u << stride_log2_) {
      query_ = 0;
      mask_ &= mask_ - 1;
    }
    return result;
  }
  // Whether there was one.
  __device__ __forceinline__ bool read_plan() {
    if (ended_) {
      return false;
    }
    device::barrier_wait(&shared_.plan_full[place_.stage], place_.parity);
    const UserPlan& plan = shared_.plans[place_.stage];
    mask_ = plan.masks[owner_];
    all_ = plan.all;
    first_ = plan.first_stage;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      device::barrier_arrive(&shared_.plan_empty[place_.stage]);
    }
    place_.advance();
    ended_ = all_ == 0;
    end_ = first_ + (__popc(all_) << stride_log2_);
    return !ended_;
  }

  GroupShared<kDim>& shared_;
  const int owner_, stride_log2_;
  PlanPlace place_;
  uint32_t mask_ = 0, all_ = 0, first_ = 0, end_ = 0;
  uint32_t query_ = 0;  // of the list
  bool ended_ = false;
};

// Returns when the user is in its stage. The parity alone cannot tell: an owner that had nothing of the last round of the
// ring may come before its copies have begun.
template <int kDim>
__device__ __forceinline__ void await_user(GroupShared<kDim>& shared, uint32_t number) {
  const uint32_t at = number % kUserStages;
  while (*const_cast<volatile uint32_t*>(&shared.numbers[at]) != number) {
  }
  device::barrier_wait(&shared.full[at], number / kUserStages & 1);
}

template <int kDim>
__device__ __forceinline__ UserRows rows_of(const GroupShared<kDim>& shared, uint32_t number, int owner) {
  const GroupStage<kDim>& stage = shared.stages[number % kUserStages];
  return {device::shared_address(stage.record), device::shared_address(stage.rotations[owner]),
          device::shared_address(&stage.present[owner])};
}

template <typename T, int kDim>
__device__ __forceinline__ void own_parent(const KeyGradientParams& params, GroupShared<kDim>& shared, int owner) {
  const GatherParams& p = params.common.gather;
  using Packed = PackedParent<kDim, kDim>;
  static_assert(kGroupParents * Packed::kBytes <= sizeof(shared.stages));
  const int64_t parent = int64_t{blockIdx.x} * kGroupParents + owner;
  const bool exists = parent < p.num_parents;
  ParentGradient<T, kDim, /*kValuesShared=*/true> sums;
  bool used = false;
  if (exists) {
    const WindowUsers users(params, parent);
    used = users.num_users > 0;
    if (threadIdx.x % 32 == 0) {
      shared.users[owner] = make_uint2(users.begin, users.begin + users.num_users / p.stride);
    }
  } else if (threadIdx.x % 32 == 0) {
    shared.users[owner] = make_uint2(0, 0);
  }
  sums.load(p.packed + (int64_t{blockIdx.y} * p.num_parents + (exists ? parent : 0)) * Packed::kBytes,
            device::shared_address(reinterpret_cast<char*>(shared.stages) + owner * Packed::kBytes),
            device::shared_address(shared.values[owner]));
  device::fence_async_shared();  // bulk copies follow in the place of the parents
  device::named_barrier_sync(kGroupBarrier, kGroupThreads);
  if (!shared.has_users() && params.add) {
    return;
  }
  const PowerOfTwo power = parent_power(params.common, exists ? parent : 0);
  OwnUsers<kDim> users(shared, owner, __ffs(p.stride) - 1);
  uint32_t first = users.next();
  while (first != users.kNone) {
    const uint32_t second = users.next_beside(first);
    const bool alone = second == users.kNone;
    await_user(shared, first);
    UserRows rows[2] = {rows_of(shared, first, owner), rows_of(shared, first, owner)};
    if (!alone) {
      await_user(shared, second);
      rows[1] = rows_of(shared, second, owner);
    }
    sums.add_pair(rows, alone, p.score_scale, power.scale);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      device::barrier_arrive(&shared.empty[first % kUserStages]);
      if (!alone) {
        device::barrier_arrive(&shared.empty[second % kUserStages]);
      }
    }
    first = users.next();
  }
  if (exists && (used || !params.add)) {
    sums.store(params, parent, power.inverse * params.common.scale);
  }
}

// Grid: x = runs of kGroupParents parents, y = batch * kv head.
template <typename T, int kDim>
__global__ void __launch_bounds__(kGroupThreads, 1)
    group_gradient_kernel(const __grid_constant__ GroupGradientParams params) {
#if HTREE_SM90A
  extern __shared__ __align__(128) char raw[];
  GroupShared<kDim>& shared = *reinterpret_cast<GroupShared<kDim>*>(raw);
  shared.init();
  const int warp = device::uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp > kCopiers) {
    device::raise_registers<kOwnerRegisters>();
    own_parent<T, kDim>(params.key, shared, warp - kCopiers - 1);
    return;
  }
  device::lower_registers<kHelperRegisters>();
  device::named_barrier_sync(kGroupBarrier, kGroupThreads);
  if (!shared.has_users() && params.key.add) {
    return;
  }
  if (warp == 0) {
    UserPlanner<kDim>(params, shared).run();
  } else {
    copy_users(params, shared, static_cast<uint32_t>(warp - 1));
  }
#else
  __trap();
#endif
}

template <typename T, int kDim>
cudaError_t launch_group_gradient(const KeyGradientParams& params, cudaStream_t stream) {
  static_assert(sizeof(GroupShared<kDim>) <= device::kHopperSharedBytes);
  const GatherParams& p = params.common.gather;
  const LaunchShape shape{
      .grid = dim3(num_blocks(p.num_parents, kGroupParents), p.num_batches * p.num_kv_heads),
      .threads = kGroupThreads,
      .shared_bytes = sizeof(GroupShared<kDim>)};
  return launch_kernel(group_gradient_kernel<T, kDim>, shape, stream,
                       GroupGradientParams{params, device::FastDivisor(p.list_width)});
}

}  // namespace htree::tree_attention
