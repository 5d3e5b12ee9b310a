// The users of a parent, streamed into shared memory one by one: queries of the lists that hold it, with up
// to 8 rows (query, head) each. See parent_gradient.cuh.
#pragma once

#include "ops/tree_attention/attention/gradient_rows.cuh"
#include "ops/tree_attention/attention/rotated_query.cuh"

namespace htree::tree_attention {

constexpr int kParentWarps = 4;
constexpr int kParentStages = 6;
constexpr int kParentRows = 8;  // query heads of a user, at most

// One user in shared memory.
template <int kDim>
struct UserStage {
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = kParentRows * kRowBytes;
  static constexpr int kGradientOffset = kTileBytes;
  static constexpr int kTurnOffset = 2 * kTileBytes;  // fp16 cos and sin of its position, see position_turns
  static constexpr int kMetaOffset = kTurnOffset + kRowBytes;
  static constexpr int kPresentOffset = kMetaOffset + kParentRows * 16;
  static constexpr int kBytes = (kPresentOffset + 16 + 127) / 128 * 128;
  static constexpr int kWarpBytes = kParentStages * kBytes;
  static constexpr int kSharedBytes = kParentWarps * kWarpBytes;
  static_assert(ParentBlock<kDim, kDim>::kBytes <= kWarpBytes);
  static constexpr int kSumBytes = 2 * kBlockRows * kDim * 4;  // of a warp
  static_assert(kSumBytes <= kWarpBytes);
};

// Users of a parent in the window of lists [first_list, end_list): of entries or, where every list holds all
// parents up to its own, of lists [begin, ...), stride queries each.
struct WindowUsers {
  uint32_t begin, num_users;

  __device__ __forceinline__ WindowUsers(const KeyGradientParams& params, int64_t parent) {
    const GatherParams& p = params.common.gather;
    uint32_t end;
    if (params.entries) {
      const uint32_t* offset = params.offsets + int64_t{blockIdx.y} * (p.num_parents + 1) + parent;
      begin = first_of(params, offset[0], offset[1], params.first_list);
      end = first_of(params, begin, offset[1], params.end_list);
    } else {
      // lists whose own parent comes before this one do not hold it, and at upper layers lists that refine
      // everything do not use it
      int64_t token = parent * kBlockRows * p.node_span;
      if (params.common.selected) {
        token = max(token, p.list_width * p.node_span);
      }
      const int64_t first = max((token - p.t0 + p.stride - 1) / p.stride, int64_t{params.first_list});
      end = params.end_list;
      begin = static_cast<uint32_t>(min(first, int64_t{end}));
    }
    num_users = (end - begin) * p.stride;
  }

  // First entry of [low, high) whose list is not before `list`.
  __device__ __forceinline__ static uint32_t first_of(const KeyGradientParams& params, uint32_t low,
                                                      uint32_t high, uint32_t list) {
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (params.entries[middle] / params.common.gather.list_width < list) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Copies of a warp's users [begin, end) of those of its parent. Lane i knows user begin + 32 j + i.
template <int kDim>
class UserStream {
 public:
  using Stage = UserStage<kDim>;

  __device__ __forceinline__ UserStream(const KeyGradientParams& params, const WindowUsers& users,
                                        int64_t parent, uint32_t begin, uint32_t end, uint32_t ring)
      : params_(params),
        users_(users),
        parent_(parent),
        begin_(begin),
        end_(end),
        ring_(ring),
        lane_(threadIdx.x % 32),
        next_(begin) {
    entry_ = read_entry(begin);
    for (int i = 0; i < kParentStages - 1; ++i) {
      issue();
    }
  }

  // Stage of user `user`; users are waited for in their order.
  __device__ __forceinline__ uint32_t wait(uint32_t user) {
    device::wait_copies<kParentStages - 2>();
    __syncwarp();
    issue();  // into the stage of the user before this one, which all lanes have left
    return ring_ + (user - begin_) % kParentStages * Stage::kBytes;
  }

 private:
  // Entry of user first + lane.
  __device__ __forceinline__ uint32_t read_entry(uint32_t first) const {
    const GatherParams& p = params_.common.gather;
    const uint32_t user = first + lane_;
    if (user >= end_) {
      return 0;
    }
    const uint32_t at = users_.begin + user / p.stride;
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
    query_ = list_row * p.stride + user % p.stride;
    present_ = 0;
    position_ = 0;
    if (user >= end_ || query_ >= static_cast<uint32_t>(p.num_queries)) {
      query_ = 0;
      return;
    }
    const int batch = blockIdx.y / p.num_kv_heads, kv_head = blockIdx.y % p.num_kv_heads;
    const int64_t list_idx = (batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + kv_head;
    const int64_t rightmost = (p.t0 + query_) / p.node_span;
    const int count =
        params_.entries ? params_.counts[list_idx] : static_cast<int>(rightmost / kBlockRows) + 1;
    const int position = (count - 1 - slot) * kBlockRows + static_cast<int>(rightmost % kBlockRows);
    // at upper layers the query's own node is always refined
    const int64_t rows =
        min(static_cast<int64_t>(position) + (common.selected ? 0 : 1), rightmost + 1 - parent_ * kBlockRows);
    present_ = rows >= kBlockRows ? 0xffffu : (1u << max(static_cast<int>(rows), 0)) - 1u;
    if (common.selected) {
      present_ &= ~static_cast<unsigned>(
          reinterpret_cast<const uint16_t*>(common.selected + list_idx * common.mask_words)[slot]);
    }
    position_ = max(position, 0);
  }

  __device__ __forceinline__ void issue() {
    if (next_ < end_) {
      if ((next_ - begin_) % 32 == 0) {
        look_up();
      }
      const GatherParams& p = params_.common.gather;
      const int from = static_cast<int>((next_ - begin_) % 32);
      const unsigned query = __shfl_sync(device::kFullMask, query_, from);
      const unsigned present = __shfl_sync(device::kFullMask, present_, from);
      const int position = __shfl_sync(device::kFullMask, position_, from);
      const uint32_t stage = ring_ + (next_ - begin_) % kParentStages * Stage::kBytes;
      const int64_t row = (int64_t{blockIdx.y} * p.num_queries + query) * p.group;
      copy_rows(stage, params_.common.records + row * (4 * kDim), p.group);
      constexpr int kTurnChunks = kDim / 8;
      if (lane_ < kTurnChunks) {
        device::copy_async_16(stage + Stage::kTurnOffset + lane_ * 16,
                              params_.turns + int64_t{position} * (kDim / 2) + lane_ * 4);
      } else if (lane_ - 16 >= 0 && lane_ - 16 < p.group) {
        device::copy_async_16(stage + Stage::kMetaOffset + (lane_ - 16) * 16,
                              params_.common.meta + row + lane_ - 16);
      }
      if (lane_ == 0) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(stage + Stage::kPresentOffset), "r"(present) : "memory");
      }
    }
    device::commit_copies();
    ++next_;
  }

  // Records [G][q, dO] into two tiles of 8 rows.
  __device__ __forceinline__ void copy_rows(uint32_t stage, const char* records, int group) const {
    constexpr int kChunks = kDim / 8, kRowChunks = 2 * kChunks;
#pragma unroll
    for (int i = 0; i < kParentRows * kRowChunks / 32; ++i) {
      const int at = i * 32 + lane_;
      const int row = at / kRowChunks, chunk = at % kRowChunks;
      if (row < group) {
        const uint32_t tile = chunk < kChunks ? 0 : Stage::kGradientOffset;
        device::copy_async_16(stage + tile + chunk_offset<kDim>(row, chunk % kChunks), records + at * 16);
      }
    }
  }

  const KeyGradientParams& params_;
  const WindowUsers& users_;
  int64_t parent_;
  uint32_t begin_, end_, ring_;
  int lane_;
  uint32_t next_, entry_ = 0;
  unsigned query_ = 0, present_ = 0;
  int position_ = 0;
};

}  // namespace htree::tree_attention
