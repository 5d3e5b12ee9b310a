// The users of a parent, streamed into shared memory one by one: queries of the lists that hold it, with up
// to 8 rows (query, head) each. See parent_gradient.cuh.
#pragma once

#include "ops/tree_attention/cuda/backward/entry_search.cuh"
#include "ops/tree_attention/cuda/backward/gradient_rows.cuh"
#include "ops/tree_attention/cuda/backward/per_parent/parent_gradient.h"
#include "ops/tree_attention/cuda/gather_task.cuh"
#include "ops/tree_attention/cuda/rotated_query.cuh"

namespace htree::tree_attention {

constexpr int kSharedParentWarps = 4;  // that share the users of a parent
constexpr int kParentStages = 6;

// One user in shared memory: a tiled record, what rotates its queries and what of the parent they see.
template <int kDim>
struct UserStage {
  using Record = TiledRecord<kDim>;
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kGradientOffset = Record::kGradientOffset;
  static constexpr int kMetaOffset = Record::kMetaOffset;
  static constexpr int kRotationOffset =
      Record::kBytes;  // fp16 cos and sin of its position, see position_rotations
  static constexpr int kPresentOffset = kRotationOffset + kRowBytes;
  static constexpr int kBytes = (kPresentOffset + 16 + 127) / 128 * 128;
  static constexpr int kWarpBytes = kParentStages * kBytes;
  static_assert(PackedParent<kDim, kDim>::kBytes <= kWarpBytes);
  static constexpr int kSumBytes = 2 * kParentRows * kDim * 4;  // of a warp
  static_assert(kSumBytes <= kWarpBytes);
};

// Users of a parent in the window of lists [first_list, end_list): of entries or, where every list holds all
// parents up to its own, of lists [begin, ...), stride queries each.
struct WindowUsers {
  uint32_t begin, num_users;

  // A whole warp.
  __device__ __forceinline__ WindowUsers(const KeyGradientParams& params, int64_t parent) {
    const GatherParams& p = params.common.gather;
    uint32_t end;
    if (params.entries) {
      const uint32_t* offset = params.offsets + int64_t{blockIdx.y} * (p.num_parents + 1) + parent;
      begin = first_entry(params.entries, offset[0], offset[1], params.first_list, p.list_width);
      end = first_entry(params.entries, begin, offset[1], params.end_list, p.list_width);
    } else {
      // lists whose own parent comes before this one do not hold it, and at upper layers lists that refine
      // everything do not use it
      int64_t token = parent * kParentRows * p.node_span;
      if (params.common.selected) {
        token = max(token, p.list_width * p.node_span);
      }
      const int64_t first = max(list_of(p, token - p.t0 + p.stride - 1), int64_t{params.first_list});
      end = params.end_list;
      begin = static_cast<uint32_t>(min(first, int64_t{end}));
    }
    num_users = (end - begin) * p.stride;
  }
};

// Copies of a warp's users [begin, end) of those of its parent. Lane i knows user begin + 32 j + i.
template <int kDim>
class UserStream {
 public:
  using Stage = UserStage<kDim>;
  using Record = TiledRecord<kDim>;

  __device__ __forceinline__ UserStream(const KeyGradientParams& params, const WindowUsers& users,
                                        int64_t parent, uint32_t begin, uint32_t end, uint32_t ring)
      : params_(params),
        users_(users),
        parent_(parent),
        begin_(begin),
        end_(end),
        lane_(threadIdx.x % 32),
        ring_(ring),
        next_(begin) {
    const GatherParams& p = params.common.gather;
    records_ = params.common.records + int64_t{blockIdx.y} * p.num_queries * Record::kBytes + lane_ * 16;
    const bool meta = lane_ < kRecordRows;
    rest_ = meta ? records_ + Record::kMetaOffset
                 : reinterpret_cast<const char*>(params.rotations) + (lane_ - kRecordRows) * 16;
    entry_ = read_entry(begin);
#pragma unroll 1
    for (uint32_t i = 0; i < kParentStages - 1; ++i) {
      issue(ring + i * Stage::kBytes);
    }
  }

  // Stage of the next user.
  __device__ __forceinline__ uint32_t wait() {
    const uint32_t stage = ring_ + read_;
    const uint32_t last = ring_ + (read_ == 0 ? (kParentStages - 1) * Stage::kBytes : read_ - Stage::kBytes);
    device::wait_copies<kParentStages - 2>();
    __syncwarp();
    issue(last);  // all lanes have left the user before this one
    read_ = read_ == (kParentStages - 1) * Stage::kBytes ? 0 : read_ + Stage::kBytes;
    return stage;
  }

 private:
  // Entry of user first + lane.
  __device__ __forceinline__ uint32_t read_entry(uint32_t first) const {
    const GatherParams& p = params_.common.gather;
    const uint32_t user = first + lane_;
    if (user >= end_) {
      return 0;
    }
    const uint32_t at = users_.begin + static_cast<uint32_t>(list_of(p, user));
    return params_.entries ? params_.entries[at] : at * p.list_width + static_cast<uint32_t>(parent_);
  }

  // What this lane's user of the next 32 sees of the parent, its position and its query.
  __device__ __forceinline__ void look_up() {
    const GradientParams& common = params_.common;
    const GatherParams& p = common.gather;
    const uint32_t user = next_ + lane_;
    const uint32_t entry = entry_;
    entry_ = read_entry(next_ + 32);
    const uint32_t list_row = entry / p.list_width;
    const int slot = static_cast<int>(entry % p.list_width);
    query_ = list_row * p.stride + (user & (p.stride - 1));
    present_ = 0;
    position_ = 0;
    if (user >= end_ || query_ >= static_cast<uint32_t>(p.num_queries)) {
      query_ = 0;
      return;
    }
    const int batch = blockIdx.y / p.num_kv_heads, kv_head = blockIdx.y % p.num_kv_heads;
    const int64_t list_idx = (batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + kv_head;
    const int64_t rightmost = node_of(p, p.t0 + query_);
    const int count =
        params_.entries ? params_.counts[list_idx] : static_cast<int>(rightmost / kParentRows) + 1;
    const int position = (count - 1 - slot) * kParentRows + static_cast<int>(rightmost % kParentRows);
    // at upper layers the query's own node is always refined
    const int64_t rows = min(static_cast<int64_t>(position) + (common.selected ? 0 : 1),
                             rightmost + 1 - parent_ * kParentRows);
    present_ = rows >= kParentRows ? 0xffffu : (1u << max(static_cast<int>(rows), 0)) - 1u;
    if (common.selected) {
      present_ &= ~static_cast<unsigned>(
          reinterpret_cast<const uint16_t*>(common.selected + list_idx * common.mask_words)[slot]);
    }
    position_ = static_cast<unsigned>(max(position, 0));
  }

  __device__ __forceinline__ void issue(uint32_t stage) {
    if (next_ < end_) {
      const int from = static_cast<int>((next_ - begin_) % 32);
      if (from == 0) {
        look_up();
      }
      const unsigned query = __shfl_sync(device::kFullMask, query_, from);
      const unsigned present = __shfl_sync(device::kFullMask, present_, from);
      const unsigned position = __shfl_sync(device::kFullMask, position_, from);
      const uint32_t to = stage + lane_ * 16;
      const char* record = records_ + uint64_t{query} * Record::kBytes;
#pragma unroll
      for (int at = 0; at < Record::kMetaOffset; at += 512) {
        device::copy_async_16(to + at, record + at);
      }
      // the numbers of the rows, and behind them their rotations
      const bool meta = lane_ < kRecordRows;
      if (lane_ < kRecordRows + kDim / 8) {
        device::copy_async_16(
            to + Record::kMetaOffset,
            rest_ + uint64_t{meta ? query : position} * (meta ? Record::kBytes : Stage::kRowBytes));
      }
      if (lane_ == 0) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + Stage::kPresentOffset), "r"(present) : "memory");
      }
      ++next_;
    }
    device::commit_copies();
  }

  const KeyGradientParams& params_;
  const WindowUsers& users_;
  int64_t parent_;
  uint32_t begin_, end_;
  int lane_;
  uint32_t ring_;
  const char* records_;  // of the head, at this lane's chunk
  const char* rest_;     // what the lane copies behind the tiles: of record 0 or of position 0
  uint32_t next_, entry_ = 0;
  uint32_t read_ = 0;  // stage
  unsigned query_ = 0, present_ = 0, position_ = 0;
};

}  // namespace htree::tree_attention
