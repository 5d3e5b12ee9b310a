// The queries that use a parent, streamed into shared memory 16 rows (query, head) at a time.
#pragma once

#include "ops/tree_attention/cuda/backward/gradient_rows.cuh"
#include "ops/tree_attention/cuda/backward/per_parent/parent_gradient.h"
#include "ops/tree_attention/cuda/gather_task.cuh"

namespace htree::tree_attention {

constexpr int kKeyGradientWarps = 4;
constexpr int kKeyGradientStages = 3;

// Shared memory of one step of a warp: 16 rows of queries and of dO, their numbers and what of the parent
// they see.
struct RowView {
  unsigned present;  // bit c: the row's softmax holds child c
  int position;      // of the query for this slot: n - 1 - 16 slot
};

template <int kKeyDim, int kValueDim>
struct KeyGradientStage {
  static constexpr int kQueryBytes = kParentRows * kKeyDim * 2;
  static constexpr int kGradientBytes = kParentRows * kValueDim * 2;
  static constexpr int kMetaOffset = kQueryBytes + kGradientBytes;
  static constexpr int kViewOffset = kMetaOffset + kParentRows * 16;
  static constexpr int kBytes = kViewOffset + kParentRows * 8;
  static constexpr int kBlockBytes = (PackedParent<kKeyDim, kValueDim>::kBytes + 127) / 128 * 128;
  static constexpr int kWarpBytes = kKeyGradientStages * kBytes;
  // the sums of the warps lie over the stages
  static constexpr int kSumTiles = kKeyDim / 8 + kValueDim / 8;
  static constexpr int kSharedBytes = kBlockBytes + kKeyGradientWarps * kWarpBytes;
  static_assert(kBytes % 128 == 0 && kSumTiles * 512 <= kWarpBytes);
};

// The rows that use a parent.
struct ParentUsers {
  const uint32_t* entries;  // null: lists from `first_list` on, slot = parent
  uint32_t first_list;
  uint32_t num_rows;
  uint32_t rows_per_list;
  int64_t parent;
  int head_idx, batch, kv_head;
  int span_shift;

  __device__ __forceinline__ ParentUsers(const KeyGradientParams& params) {
    const GatherParams& p = params.common.gather;
    parent = blockIdx.x;
    head_idx = blockIdx.y;
    batch = head_idx / p.num_kv_heads;
    kv_head = head_idx % p.num_kv_heads;
    rows_per_list = static_cast<uint32_t>(p.stride * p.group);
    span_shift = __ffsll(p.node_span) - 1;
    uint32_t num_lists;
    if (params.entries) {
      const uint32_t* offset = params.offsets + head_idx * (p.num_parents + 1) + parent;
      entries = params.entries + offset[0];
      num_lists = offset[1] - offset[0];
      first_list = 0;
    } else {
      entries = nullptr;
      // lists whose last parent comes before this one, and at upper layers lists that refine everything, do
      // not use it
      int64_t first_token = parent * kParentRows * p.node_span;
      if (params.common.selected) {
        first_token = max(first_token, p.list_width * p.node_span);
      }
      const int64_t first = max((first_token - p.t0 + p.stride - 1) / p.stride, int64_t{0});
      first_list = static_cast<uint32_t>(min(first, int64_t{p.num_lists}));
      num_lists = p.num_lists - first_list;
    }
    num_rows = num_lists * rows_per_list;
  }
};

// Copies of one warp's steps: lane i and i + 16 look after row i.
template <int kKeyDim, int kValueDim>
class RowStream {
 public:
  using Stage = KeyGradientStage<kKeyDim, kValueDim>;

  __device__ __forceinline__ RowStream(const KeyGradientParams& params, const ParentUsers& users,
                                       uint32_t begin, uint32_t end, uint32_t ring)
      : params_(params),
        users_(users),
        next_(begin),
        end_(end),
        begin_(begin),
        ring_(ring),
        lane_(threadIdx.x % 32) {
    entry_ = read_entry(begin);
#pragma unroll
    for (int i = 0; i < kKeyGradientStages; ++i) {
      issue();
    }
  }

  __device__ __forceinline__ uint32_t wait(uint32_t step) {
    device::wait_copies<kKeyGradientStages - 1>();
    __syncwarp();
    return ring_ + (step - begin_) % kKeyGradientStages * Stage::kBytes;
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    issue();
  }

 private:
  __device__ __forceinline__ uint32_t row_of(uint32_t step) const {
    return step * kParentRows + lane_ % kParentRows;
  }

  __device__ __forceinline__ uint32_t read_entry(uint32_t step) const {
    const uint32_t row = row_of(step);
    if (step >= end_ || row >= users_.num_rows) {
      return 0;
    }
    const uint32_t list = row / users_.rows_per_list;
    return users_.entries ? users_.entries[list]
                          : (users_.first_list + list) * params_.common.gather.list_width +
                                static_cast<uint32_t>(users_.parent);
  }

  // The numbers of the rows of the step issued last: read then, stored now, so that nobody waits for them.
  __device__ __forceinline__ void store_views() {
    if (next_ > begin_ && next_ - 1 < end_ && lane_ < kParentRows) {
      const GradientParams& common = params_.common;
      const int64_t rightmost = token_ >> users_.span_shift;
      const int place = static_cast<int>(rightmost % kParentRows);
      const int count = params_.entries ? count_ : static_cast<int>(rightmost / kParentRows) + 1;
      const int position = (count - 1 - slot_) * kParentRows + place;
      // at upper layers the query's own node is always refined
      const int64_t rows = min(static_cast<int64_t>(position) + (common.selected ? 0 : 1),
                               rightmost + 1 - users_.parent * kParentRows);
      const unsigned inside = rows >= kParentRows ? 0xffffu : (1u << max(static_cast<int>(rows), 0)) - 1u;
      const uint32_t at =
          ring_ + (next_ - 1 - begin_) % kKeyGradientStages * Stage::kBytes + Stage::kViewOffset;
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + lane_ * 8),
                   "r"(exists_ ? inside & ~mask_ : 0u), "r"(exists_ ? max(position, 0) : 0)
                   : "memory");
    }
  }

  __device__ __forceinline__ void issue() {
    store_views();
    if (next_ < end_) {
      const GradientParams& common = params_.common;
      const GatherParams& p = common.gather;
      const uint32_t row = row_of(next_);
      const uint32_t list_row = entry_ / p.list_width;
      const uint32_t in_list = row % users_.rows_per_list;
      const uint32_t query = list_row * p.stride + in_list / p.group;
      exists_ = row < users_.num_rows && query < static_cast<uint32_t>(p.num_queries);
      slot_ = static_cast<int>(entry_ % p.list_width);
      token_ = p.t0 + query;
      const int64_t list_idx =
          (users_.batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + users_.kv_head;
      count_ = params_.entries && exists_ ? params_.counts[list_idx] : 0;
      mask_ = common.selected && exists_
                  ? reinterpret_cast<const uint16_t*>(common.selected + list_idx * common.mask_words)[slot_]
                  : 0;
      const uint32_t record = exists_ ? query * p.group + in_list % p.group : 0u;
      const int64_t first_record = int64_t{users_.head_idx} * p.num_queries * p.group;
      const uint32_t stage = ring_ + (next_ - begin_) % kKeyGradientStages * Stage::kBytes;
      constexpr int kQueryChunks = kKeyDim / 8, kChunks = (kKeyDim + kValueDim) / 8;
#pragma unroll
      for (int i = 0; i < kParentRows * kChunks / 32; ++i) {
        const int at = i * 32 + lane_;
        const int to_row = at / kChunks, chunk = at % kChunks;
        const uint32_t from = __shfl_sync(device::kFullMask, record, to_row);
        const int bytes = __shfl_sync(device::kFullMask, exists_ ? 16 : 0, to_row);
        const uint32_t to = chunk < kQueryChunks
                                ? chunk_offset<kKeyDim>(to_row, chunk)
                                : Stage::kQueryBytes + chunk_offset<kValueDim>(to_row, chunk - kQueryChunks);
        copy_or_zero(stage + to,
                     common.records + (first_record + from) * (2 * (kKeyDim + kValueDim)) + chunk * 16,
                     bytes);
      }
      if (lane_ < kParentRows) {
        copy_or_zero(stage + Stage::kMetaOffset + lane_ * 16, common.meta + first_record + record,
                     exists_ ? 16 : 0);
      }
      entry_ = read_entry(next_ + 1);
    }
    device::commit_copies();
    ++next_;
  }

  __device__ __forceinline__ static void copy_or_zero(uint32_t shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
  }

  const KeyGradientParams& params_;
  const ParentUsers& users_;
  uint32_t next_, end_, begin_, ring_;
  int lane_;
  uint32_t entry_;
  bool exists_ = false;
  int slot_ = 0, count_ = 0;
  unsigned mask_ = 0;
  int64_t token_ = 0;
};

}  // namespace htree::tree_attention
