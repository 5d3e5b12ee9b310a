// Where a warp finds its query, list and keys (docs/semantics/tree_attention.md §1.3), and how the packed
// parents of a list reach it: in a ring of shared memory, a few slots ahead.
#pragma once

#include "device/mma.cuh"
#include "device/reduce.cuh"
#include "ops/tree/cuda/launch_params.h"
#include "ops/tree/cuda/sm80/packed_layer.cuh"

namespace htree::tree_attention {

// The number of a list's entries before the first negative one. In a list that keeps the rules these are its
// parents; what stands behind them in a caller's list is never used as an address. All lanes call and get the
// result. Lists of up to 1024 entries cost two dependent loads.
__device__ __forceinline__ int count_entries(const int32_t* list, int width) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = width;  // all entries below `low` are parents, the one at `high` is not
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int at = low + lane * step;
    const unsigned ended = __ballot_sync(device::kFullMask, at >= high || list[at] < 0);
    const int first = ended ? __ffs(ended) - 1 : 32;
    const int base = low;
    high = min(high, base + first * step);
    low = first == 0 ? high : base + (first - 1) * step + 1;
  }
  return low;
}

// A ring of kStages stages of kStageBytes each. A stage takes the first kCopyBytes of a packed parent. `ring`
// is aligned to 128 bytes. Slot j of the list lies in stage j mod kStages from wait(j) until release(j).
template <int kCopyBytes, int kStageBytes, int kStages>
class ParentStream {
 public:
  static_assert(kCopyBytes % 16 == 0 && kStageBytes % 128 == 0 && kCopyBytes <= kStageBytes);

  // Streams slots begin ... end - 1. A null `list` stands for the list 0, 1, 2, ... Ids past the
  // last parent are clamped.
  __device__ __forceinline__ ParentStream(const char* packed, int64_t parent_bytes, int64_t num_parents,
                                          const int32_t* list, int begin, int end, uint32_t ring)
      : packed_(packed),
        parent_bytes_(parent_bytes),
        last_parent_(static_cast<int>(num_parents - 1)),
        list_(list),
        end_(end),
        next_(begin),
        ring_(ring),
        lane_(threadIdx.x % 32) {
    ids_ = read_ids(begin);
    later_ids_ = read_ids(begin + 32);
    chunk_ = begin;
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      issue();
    }
  }

  // Waits for the slot and returns its shared address. It waits for copies of this warp only.
  __device__ __forceinline__ uint32_t wait(int slot) const {
    device::wait_copies<kStages - 1>();
    __syncwarp();
    return ring_ + slot % kStages * kStageBytes;
  }

  // To be called after the last read of the slot that wait() gave: its stage is filled with the next parent.
  __device__ __forceinline__ void release() {
    __syncwarp();
    issue();
  }

 private:
  __device__ __forceinline__ int read_ids(int first) const {
    const int at = first + lane_;
    return at >= end_ ? 0 : list_ ? min(max(list_[at], 0), last_parent_) : min(at, last_parent_);
  }

  __device__ __forceinline__ void issue() {
    if (next_ < end_) {
      if (next_ - chunk_ == 32) {
        ids_ = later_ids_;
        chunk_ += 32;
        later_ids_ = read_ids(chunk_ + 32);
      }
      const int64_t id = __shfl_sync(device::kFullMask, ids_, next_ - chunk_);
      const char* from = packed_ + id * parent_bytes_ + lane_ * 16;
      const uint32_t to = ring_ + next_ % kStages * kStageBytes + lane_ * 16;
#pragma unroll
      for (int at = 0; at < kCopyBytes / 512 * 512; at += 512) {
        device::copy_async_16(to + at, from + at);
      }
      if (kCopyBytes % 512 != 0 && lane_ * 16 < kCopyBytes % 512) {
        device::copy_async_16(to + kCopyBytes / 512 * 512, from + kCopyBytes / 512 * 512);
      }
    }
    device::commit_copies();  // an empty group keeps the number of pending groups right
    ++next_;
  }

  const char* packed_;
  int64_t parent_bytes_;
  int last_parent_;
  const int32_t* list_;
  int end_, next_, chunk_;
  uint32_t ring_;
  int lane_;
  int ids_, later_ids_;
};

// The node of the layer that holds `token`, and below it the list of a query. Spans are powers of 16 and
// strides powers of 2, so both are shifts: a division of 64 bits would be a call, and a kernel with calls
// keeps nothing in uniform registers.
__device__ __forceinline__ int64_t node_of(const GatherParams& p, int64_t token) {
  return token >> (__ffsll(p.node_span) - 1);
}
__device__ __forceinline__ int64_t list_of(const GatherParams& p, int64_t query) {
  return query >> (__ffs(p.stride) - 1);
}

// The number of list `list_row` of a K/V head among those of list_sizes.
__device__ __forceinline__ int64_t list_number(const GatherParams& p, int batch, int64_t list_row,
                                               int kv_head) {
  return (batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + kv_head;
}
__device__ __forceinline__ int list_entries(int size) {
  return size < 0 ? ~size : size;
}
// The place, in its list's last parent, of the last child that a query sees, whose own is `node`: all children of a
// parent that is not the diagonal one.
__device__ __forceinline__ int last_place(const GatherParams& p, int64_t node, int64_t list_number) {
  return p.list_sizes && p.list_sizes[list_number] < 0 ? kParentRows - 1
                                                       : static_cast<int>(node % kParentRows);
}

struct GatherTask {
  int batch, kv_head;
  int64_t token;
  const int32_t* list;   // null: 0, 1, 2, ...
  int num_slots;         // m
  int num_candidates;    // n
  int64_t first_parent;  // index of the kv head's first packed parent
};

// All lanes of a warp call with the same arguments. `query` counts from the first of the chunk; `list_row` is
// the row of its list.
__device__ __forceinline__ GatherTask gather_task(const GatherParams& p, int head_index, int64_t query,
                                                  int64_t list_row) {
  GatherTask task;
  task.batch = head_index / p.num_kv_heads;
  task.kv_head = head_index % p.num_kv_heads;
  task.token = p.t0 + query;
  task.first_parent = static_cast<int64_t>(head_index) * p.num_parents;
  const int64_t rightmost = node_of(p, task.token);
  if (p.lists) {
    task.list =
        p.lists + task.batch * p.list_batch + (list_row * p.num_kv_heads + task.kv_head) * p.list_width;
    task.num_slots = p.list_sizes
                         ? list_entries(p.list_sizes[list_number(p, task.batch, list_row, task.kv_head)])
                         : count_entries(task.list, p.list_width);
  } else {
    task.list = nullptr;
    task.num_slots = static_cast<int>(rightmost / kParentRows) + 1;
  }
  const int last = last_place(p, rightmost, list_number(p, task.batch, list_row, task.kv_head));
  task.num_candidates = task.num_slots > 0 ? (task.num_slots - 1) * kParentRows + last + 1 : 0;
  return task;
}

// The first row of the query's [G, K] for the task's kv head.
template <typename T>
__device__ __forceinline__ const T* query_rows(const GatherParams& p, const GatherTask& task, int64_t query) {
  return static_cast<const T*>(p.queries.data) + task.batch * p.queries.batch + query * p.queries.row +
         static_cast<int64_t>(task.kv_head) * p.group * p.queries.head;
}

}  // namespace htree::tree_attention
