// Sorts lists, drops repetitions and what cannot be seen. A warp has one list. Most callers' lists ascend already, and are
// copied. Of another one the blocks become bits in shared memory, a window of them at a time, and what is set is written in
// order. Either way what is written follows from the set of blocks alone.
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/any/visible_lists.h"

namespace htree::tree_attention {
namespace {

constexpr int kWarps = 4;
constexpr int kWords = 1024;  // of a window: 32 768 blocks

// Exclusive sum of `count` over the lanes of a warp, and the sum of all. Every lane calls.
__device__ __forceinline__ int exclusive_sum(int count, int& all) {
  const int lane = threadIdx.x % device::kWarpSize;
  int inclusive = count;
#pragma unroll
  for (int offset = 1; offset < device::kWarpSize; offset *= 2) {
    const int other = __shfl_up_sync(device::kFullMask, inclusive, offset);
    inclusive += lane >= offset ? other : 0;
  }
  all = __shfl_sync(device::kFullMask, inclusive, device::kWarpSize - 1);
  return inclusive - count;
}

// One list of the caller. All lanes of its warp call every function.
class CallerList {
 public:
  // List `row` of all batches and list head `head`.
  __device__ __forceinline__ CallerList(const VisibleListParams& p, int64_t row, int head)
      : p_(p), row_(row), head_(head), lane_(threadIdx.x % device::kWarpSize) {
    const int64_t list = row % p.num_lists;
    batch_ = row / p.num_lists;
    from_ = p.blocks + batch_ * p.blocks_batch + (list * p.num_list_heads + head) * p.width;
    token_ = p.t0 + list * p.stride;
    diagonal_ = static_cast<int>(token_ / p.block_size);
    // Of the diagonal block the parts up to the queries' own are written.
    own_part_ = static_cast<int>(token_ % p.block_size / (p.block_size / p.parts));
  }

  __device__ __forceinline__ void write(uint32_t (&words)[kWords]) const {
    int count;
    bool holds_diagonal;
    if (ascends(count, holds_diagonal)) {
      const Size size{count, holds_diagonal};
      for_each_copy(size, [&](const Copy& copy) {
        for (int i = lane_; i < count; i += device::kWarpSize) {
          put(copy, i, from_[i]);
        }
      });
    } else {
      sort(words);
    }
  }

 private:
  // How many blocks the queries see of the list, and whether the diagonal one is among them.
  struct Size {
    int blocks;
    bool holds_diagonal;
  };
  // What is written for a K/V head.
  struct Copy {
    int32_t* to;
    bool masked;
  };

  __device__ __forceinline__ bool sees(int block) const { return block >= 0 && block <= diagonal_; }

  // Whether the list begins with the blocks that are seen, each larger than the one before it.
  __device__ __forceinline__ bool ascends(int& count, bool& holds_diagonal) const {
    bool ascends = true, diagonal = false;
    int seen = 0;
    for (int64_t i = lane_; i < p_.width; i += device::kWarpSize) {
      const int block = from_[i];
      if (sees(block)) {
        const int before = i > 0 ? from_[i - 1] : -1;
        ascends &= before < block && (i == 0 || before >= 0);
        diagonal |= block == diagonal_;
        ++seen;
      }
    }
    count = __reduce_add_sync(device::kFullMask, seen);
    holds_diagonal = __any_sync(device::kFullMask, diagonal);
    return __all_sync(device::kFullMask, ascends);
  }

  __device__ __forceinline__ void sort(uint32_t (&words)[kWords]) const {
    Size size{0, false};
    for (int64_t base = 0; base <= diagonal_; base += int64_t{kWords} * 32) {
      const int64_t end = min(int64_t{diagonal_} + 1, base + int64_t{kWords} * 32);
      const int used = static_cast<int>((end - base + 31) / 32);
      __syncwarp();  // the window before has been read
      for (int i = lane_; i < used; i += device::kWarpSize) {
        words[i] = 0;
      }
      __syncwarp();
      for (int64_t i = lane_; i < p_.width; i += device::kWarpSize) {
        const int64_t block = from_[i];
        if (block >= base && block < end) {
          atomicOr(&words[(block - base) / 32], 1u << (block - base) % 32);
        }
      }
      __syncwarp();
      const int per_lane = (used + device::kWarpSize - 1) / device::kWarpSize;
      const int first = lane_ * per_lane, last = min(first + per_lane, used);
      int count = 0;
      for (int i = first; i < last; ++i) {
        count += __popc(words[i]);
      }
      int all = 0;
      const int before = size.blocks + exclusive_sum(count, all);
      size.blocks += all;
      const bool ends = end == int64_t{diagonal_} + 1;
      if (ends) {
        size.holds_diagonal = words[(diagonal_ - base) / 32] >> (diagonal_ - base) % 32 & 1;
      }
      const auto put_window = [&](const Copy& copy) {
        int at = before;
        for (int i = first; i < last; ++i) {
          for (uint32_t bits = words[i]; bits != 0; bits &= bits - 1) {
            put(copy, at++, static_cast<int>(base) + i * 32 + __ffs(bits) - 1);
          }
        }
      };
      if (ends) {  // a masked list has a single window
        for_each_copy(size, put_window);
      } else {
        for (int copy = 0; copy < copies(); ++copy) {
          put_window({to(copy), false});
        }
      }
    }
  }

  // One list for all K/V heads is written once for each of them.
  __device__ __forceinline__ int copies() const { return p_.num_list_heads == 1 ? p_.num_kv_heads : 1; }
  __device__ __forceinline__ int64_t number(int copy) const { return row_ * p_.num_kv_heads + head_ + copy; }
  __device__ __forceinline__ int32_t* to(int copy) const {
    return p_.lists + number(copy) * p_.visible_width;
  }

  // Writes sizes and what stands behind the entries; put_entries(copy) writes the last ones.
  template <typename F>
  __device__ __forceinline__ void for_each_copy(const Size& size, F&& put_entries) const {
    const int parts = static_cast<int>(p_.parts);
    const int entries = size.blocks * parts - (size.holds_diagonal ? parts - 1 - own_part_ : 0);
    const bool lacks_diagonal = size.blocks > 0 && !size.holds_diagonal;
    const bool marks = !p_.sizes && lacks_diagonal;
    for (int i = 0; i < copies(); ++i) {
      const Copy copy{to(i), is_masked(entries, head_ + i)};
      put_entries(copy);
      if (lane_ == 0 && p_.sizes) {
        const int listed = copy.masked ? 0 : entries;
        p_.sizes[number(i)] = lacks_diagonal ? ~listed : listed;
      }
      if (lane_ == 0 && marks) {
        copy.to[entries] = static_cast<int32_t>(p_.num_blocks);
      }
      for (int64_t at = entries + marks + lane_; at < p_.visible_width; at += device::kWarpSize) {
        copy.to[at] = -1;
      }
    }
  }

  // Writes the parts of a block, the one with number `at` of the list.
  __device__ __forceinline__ void put(const Copy& copy, int at, int block) const {
    const int parts = static_cast<int>(p_.parts), written = block == diagonal_ ? own_part_ + 1 : parts;
    for (int part = 0; part < written; ++part) {
      const int32_t parent = block * parts + part;
      copy.to[at * parts + part] = copy.masked ? masked_entry(parent) : parent;
    }
  }

  // Whether the rows of the list multiply masked tiles of this K/V head.
  __device__ __forceinline__ bool is_masked(int entries, int kv_head) const {
    const MaskedLists& masked = p_.masked;
    if (token_ >= masked.end_token || token_ / 16 >= masked.factor * entries) {
      return false;
    }
    const uint16_t* wild = masked.wild + (batch_ * p_.num_kv_heads + kv_head) * masked.wild_parents;
    const int64_t last = min(token_ + p_.stride, masked.end_query_token) - 1;  // of the list's queries
    const int parts = static_cast<int>(p_.parts);
    unsigned any = 0;
    for (int64_t i = lane_; i < p_.width; i += device::kWarpSize) {
      const int block = from_[i];
      for (int part = 0; sees(block) && part < (block == diagonal_ ? own_part_ + 1 : parts); ++part) {
        const int parent = block * parts + part;
        const unsigned seen = parent == token_ / 16 ? (2u << last % 16) - 1 : 0xffffu;
        any |= wild[parent] & seen;
      }
    }
    return !__any_sync(device::kFullMask, any != 0);
  }

  const VisibleListParams& p_;
  const int64_t row_;
  const int head_, lane_;
  int64_t batch_, token_;
  const int32_t* from_;
  int diagonal_, own_part_;
};

// Grid: x = runs of kWarps lists, the head fastest.
__global__ void __launch_bounds__(kWarps* device::kWarpSize)
    visible_lists_kernel(const __grid_constant__ VisibleListParams p) {
  __shared__ uint32_t words[kWarps][kWords];
  const int warp = threadIdx.x / device::kWarpSize;
  const int64_t number = int64_t{blockIdx.x} * kWarps + warp;
  if (number < p.num_batches * p.num_lists * p.num_list_heads) {
    CallerList(p, number / p.num_list_heads, static_cast<int>(number % p.num_list_heads)).write(words[warp]);
  }
}

}  // namespace

cudaError_t launch_visible_lists(const VisibleListParams& params, cudaStream_t stream) {
  const int64_t lists = params.num_batches * params.num_lists * params.num_list_heads;
  if (lists == 0) {
    return cudaSuccess;
  }
  return launch_kernel(
      visible_lists_kernel,
      {.grid = static_cast<unsigned>((lists + kWarps - 1) / kWarps), .threads = kWarps * device::kWarpSize},
      stream, params);
}

}  // namespace htree::tree_attention
