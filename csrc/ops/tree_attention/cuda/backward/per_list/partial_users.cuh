// The partial sums of a parent among those of a launch, in the order of the lists. See partial_sum.cuh.
#pragma once

#include "ops/tree_attention/cuda/backward/entry_search.cuh"
#include "ops/tree_attention/cuda/backward/per_list/gradient_task.cuh"

namespace htree::tree_attention {

// The users of one parent whose partial sums are those of the launch.
struct PartialUsers {
  const uint32_t* entries;  // of the head; null: list i of the head holds the parent in slot `parent`
  uint32_t begin, end;      // entries or lists, whose lists' partials are here
  int first_list;           // of the head that the parent belongs to, whose partials are here
  int64_t first_partial;    // of that list
};

// A whole warp.
__device__ __forceinline__ PartialUsers partial_users(const PartialSumParams& params, int head_index,
                                                      int parent) {
  const PerListGradientParams& b = params.tasks;
  const GatherParams& p = b.gather;
  const uint32_t per_head = p.num_lists * tasks_per_list(p);
  const uint32_t first_task = max(b.first_task, head_index * per_head);
  const uint32_t end_task = min(b.first_task + b.num_tasks, (head_index + 1) * per_head);
  PartialUsers users;
  users.first_list = static_cast<int>((first_task - head_index * per_head) / tasks_per_list(p));
  const int end_list = static_cast<int>((end_task - head_index * per_head) / tasks_per_list(p));
  users.first_partial = int64_t{first_task - b.first_task} * b.partial_slots;
  if (params.entries) {
    const uint32_t* offsets = params.offsets + head_index * (p.num_parents + 1) + parent;
    users.entries = params.entries;
    users.begin = first_entry(params.entries, offsets[0], offsets[1], users.first_list, p.list_width);
    users.end = first_entry(params.entries, users.begin, offsets[1], end_list, p.list_width);
  } else {
    // lists whose own parent comes before this one do not hold it
    const int64_t token = parent * int64_t{kParentRows} * p.node_span - (p.t0 - b.lead);
    const int64_t first = max(list_of(p, token + p.stride - 1), int64_t{users.first_list});
    users.entries = nullptr;
    users.begin = static_cast<uint32_t>(min(first, int64_t{end_list}));
    users.end = static_cast<uint32_t>(end_list);
  }
  return users;
}

// Where the partial sums of a parent are, 32 at a time. All lanes of a warp call.
class PartialPlaces {
 public:
  uint32_t place = 0, slot = 0;  // of partial sum 32 i + lane

  __device__ __forceinline__ PartialPlaces(const PartialSumParams& params, int head_index, int parent)
      : params_(params),
        users_(partial_users(params, head_index, parent)),
        head_index_(head_index),
        parent_(parent),
        tasks_(tasks_per_list(params.tasks.gather)),
        num_partials_((users_.end - users_.begin) * tasks_),
        index_(threadIdx.x % 32) {
    entry_ = read_entry(index_);
  }

  // Looks up the next 32 and says which of them are there; false at the end.
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
    return users_.entries && index < num_partials_ ? users_.entries[users_.begin + index / tasks_] : 0;
  }

  __device__ __forceinline__ bool find(uint32_t entry) {
    if (index_ >= num_partials_) {
      return false;
    }
    const PerListGradientParams& b = params_.tasks;
    const GatherParams& p = b.gather;
    const uint32_t list = users_.entries ? entry / p.list_width : users_.begin + index_ / tasks_;
    slot = users_.entries ? entry % p.list_width : parent_;
    place = static_cast<uint32_t>(
        users_.first_partial +
        ((list - users_.first_list) * int64_t{tasks_} + index_ % tasks_) * b.partial_slots + slot);
    // what a list holds behind its end, and lists that refine everything, left no sum
    const int count = taking_part(b, head_index_ / p.num_kv_heads, head_index_ % p.num_kv_heads, list);
    return static_cast<int>(slot) < count;
  }

  const PartialSumParams& params_;
  PartialUsers users_;
  int head_index_, parent_;
  uint32_t tasks_, num_partials_, index_, entry_;
};

}  // namespace htree::tree_attention
