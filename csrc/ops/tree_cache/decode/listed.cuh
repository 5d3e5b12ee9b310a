// Attention of rows whose lists are all there before it, without rotations: what an index chose. Nothing is selected, so a
// pass over the cut is enough, and no part of it waits for another. A thread block has a part of a row and K/V head, the
// children of 32 parents in one layer; its warps keep a softmax each over their tiles of 16 children, which come through a
// ring of their own. Parts are merged by merge_parts_kernel. docs/semantics/tree_cache.md §7.7
//
// Scores are as exact as fp32: queries and keys are multiplied as they are, and scaled behind. Weights are rounded to T.
#pragma once

#include "device/mma.cuh"
#include "device/reduce.cuh"
#include "device/shared_memory.cuh"
#include "device/sm90/pdl.cuh"
#include "ops/sparse_attention/cuda/sm80/forward/running_softmax.cuh"
#include "ops/tree_cache/decode/listed_plan.h"
#include "ops/tree_cache/rows.cuh"

namespace htree::tree_cache {

constexpr uint32_t kNoRow = 0xffffffffu;

template <typename T_, int kDim_, int kHeadTiles_>
struct ListedTraits {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr int kHeadTiles = kHeadTiles_;  // of eight query heads
  static constexpr int kHeads = 8 * kHeadTiles;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kStages = 2;
  static constexpr int kChunks = kDim / 8;  // of 16 bytes in a row
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kTileBytes = kDecodeRate * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;  // keys and values
  static constexpr int kMergeStride = kDim + 4;
};

template <class Tr>
struct ListedShared {
  alignas(128) uint8_t ring[Tr::kWarps][Tr::kStages][Tr::kStageBytes];
  uint32_t rows[kListedSlots * kDecodeRate];  // of the pools; kNoRow: the child takes no part
  int32_t parents[kListedSlots];              // those that are none lie behind all
  float max[Tr::kWarps][Tr::kHeads];
  float sum[Tr::kWarps][Tr::kHeads];
};

template <typename T>
struct ListedParams {
  AttendParams<T> attend;
  int parts = 0;   // of a row and K/V head
  int splits = 0;  // of a layer, as merge_parts_kernel counts them
};

// A part of a row's cut.
struct ListedPart {
  int layer = -1;  // -1: the row has no such part
  int split = 0;
  int num = 0;  // candidates of the layer
};

// Parts are numbered from the row's top downwards.
template <typename T>
__device__ __forceinline__ ListedPart listed_part(const AttendParams<T>& attend, const WalkRow& walk,
                                                  int part) {
  constexpr int kPart = kListedSlots * kDecodeRate;
  static_assert(kPart == kSplit);
  const int top_k = attend.options.top_k;
  for (int layer = walk.query.top; layer >= 0; --layer) {
    const int num = num_candidates(attend.layout, walk.query, top_k, layer);
    const int parts = merges(layer, num, top_k) ? (num + kPart - 1) / kPart : 0;
    if (part < parts) {
      return {layer, part, num};
    }
    part -= parts;
  }
  return {};
}

// Finds the rows of the part's children. Lists may be those of the kernel before. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void find_listed_rows(const AttendParams<typename Tr::T>& attend,
                                                 const WalkRow& walk, const ListedPart& part,
                                                 ListedShared<Tr>& shared) {
  constexpr int kRows = kListedSlots * kDecodeRate;
  const int top_k = attend.options.top_k, first = part.split * kListedSlots;
  const int slots = (part.num + kDecodeRate - 1) / kDecodeRate;
  const int32_t* list = list_or_null(attend, walk, part.layer);
  device::pdl_wait();
  if (const int i = threadIdx.x; i < kListedSlots) {
    const int slot = first + i;
    const int32_t parent = slot >= slots ? -1 : list == nullptr ? slot : list[slot];
    shared.parents[i] = parent < 0 ? INT32_MAX : parent;
  }
  __syncthreads();
  // Above the tokens the rightmost candidate is opened whatever its score, and may be unfinished: it is not read.
  const int readable = part.num - (part.layer > 0 ? 1 : 0);
  const int64_t page_rows = attend.layout.key_rows();
#pragma unroll
  for (int i = threadIdx.x; i < kRows; i += Tr::kThreads) {
    const int32_t parent = shared.parents[i / kDecodeRate];
    const bool present = parent != INT32_MAX && first * kDecodeRate + i < readable;
    const int64_t node = present ? int64_t{parent} * kDecodeRate + i % kDecodeRate : -1;
    const int64_t row = row_of(attend, walk, part.layer, node, page_rows, 1);
    shared.rows[i] = row < 0 ? kNoRow : static_cast<uint32_t>(row);
  }
  __syncthreads();
  if (part.layer > 0) {  // what the layer below opens is not read here
    const int32_t* opened = list_of(attend, walk, part.layer - 1);
    for (int i = threadIdx.x; i < top_k; i += Tr::kThreads) {
      const int32_t node = opened[i];
      const int p = node < 0 ? -1 : candidate_of(shared.parents, kListedSlots, node, kDecodeRate);
      if (p >= 0) {
        shared.rows[p] = kNoRow;
      }
    }
    __syncthreads();
  }
}

// Where chunk `chunk` of 16 bytes of a row of a tile stands: eight rows of one chunk meet all banks.
template <class Tr>
__device__ __forceinline__ int listed_offset(int row, int chunk) {
  return row * Tr::kRowBytes + (chunk ^ (row & 7)) * 16;
}

// A warp and its softmax. Lane i has scores of children i / 4 and 8 further on, and of the sums dims 16 m + i / 4 and 8
// further on.
template <class Tr>
class ListedWarp {
 public:
  using T = typename Tr::T;

  __device__ __forceinline__ ListedWarp(const AttendParams<T>& attend, const WalkRow& walk,
                                        ListedShared<Tr>& shared)
      : attend_(attend),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        scale_(attend.options.scale * 1.44269504088896340736f),
        keys_(reinterpret_cast<const char*>(attend.keys) + lane_ % Tr::kChunks * 16),
        values_(reinterpret_cast<const char*>(attend.values) + lane_ % Tr::kChunks * 16) {
    load_queries(walk);
  }

  // Takes the warp's slots of the part.
  __device__ __forceinline__ void run(int slots) {
    issue(warp_, slots, 0);
    int stage = 0;
    for (int slot = warp_; slot < slots; slot += Tr::kWarps, stage ^= 1) {
      issue(slot + Tr::kWarps, slots, stage ^ 1);
      device::wait_copies<1>();
      __syncwarp();
      add(slot, stage);
      __syncwarp();
    }
    device::wait_copies<0>();
  }

  // Leaves the sums in the place of the ring. A __syncthreads has to follow.
  __device__ __forceinline__ void leave() {
    static_assert(Tr::kHeads * Tr::kMergeStride * 4 <= Tr::kStages * Tr::kStageBytes);
    softmax_.finish();
    __syncwarp();
    float* to = sums_of(shared_, warp_);
#pragma unroll
    for (int tile = 0; tile < Tr::kHeadTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = tile * 8 + lane_ % 4 * 2 + j;
        if (lane_ < 4) {
          shared_.max[warp_][head] = softmax_.largest[tile][j];
          shared_.sum[warp_][head] = softmax_.sum[tile][j];
        }
#pragma unroll
        for (int m = 0; m < Tr::kDim / 16; ++m) {
          to[head * Tr::kMergeStride + 16 * m + lane_ / 4] = softmax_.out[tile][m][j];
          to[head * Tr::kMergeStride + 16 * m + lane_ / 4 + 8] = softmax_.out[tile][m][2 + j];
        }
      }
    }
  }

  __device__ __forceinline__ static float* sums_of(ListedShared<Tr>& shared, int warp) {
    return reinterpret_cast<float*>(shared.ring[warp]);
  }

 private:
  // The queries as B operands: dims 16 step + 2 * (lane % 4) and the next of head lane / 4, then 8 dims further on.
  __device__ __forceinline__ void load_queries(const WalkRow& walk) {
    const auto* q =
        attend_.q + walk.row * attend_.q_row + int64_t{walk.head} * attend_.group * attend_.q_head;
#pragma unroll
    for (int tile = 0; tile < Tr::kHeadTiles; ++tile) {
      const int head = tile * 8 + lane_ / 4;
      const auto* row = reinterpret_cast<const uint16_t*>(q + head * attend_.q_head) + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < Tr::kDim / 8; ++i) {
        uint32_t pair = 0;
        if (head < attend_.group) {
          pair = row[8 * i] | static_cast<uint32_t>(row[8 * i + 1]) << 16;
        }
        queries_[tile][i] = pair;
      }
    }
  }

  // Asks for the keys and values of a slot; those of children that take no part become zeros.
  __device__ __forceinline__ void issue(int slot, int slots, int stage) const {
    constexpr int kRowsAtOnce = 32 / Tr::kChunks;
    if (slot < slots) {
      const int chunk = lane_ % Tr::kChunks, child = lane_ / Tr::kChunks;
      const uint32_t keys = stage_address(stage) + child * Tr::kRowBytes;
      const uint32_t swizzled = static_cast<uint32_t>(chunk ^ child) * 16;
      const uint32_t* rows = shared_.rows + slot * kDecodeRate + child;
#pragma unroll
      for (int first = 0; first < kDecodeRate; first += kRowsAtOnce) {
        const uint32_t row = rows[first];
        const int bytes = row != kNoRow ? 16 : 0;
        const uint64_t from = uint64_t{bytes > 0 ? row : 0} * Tr::kRowBytes;
        // listed_offset() of child first + child, of which the bits have nothing in common.
        const uint32_t to = keys + first * Tr::kRowBytes + (swizzled ^ (first & 7) * 16);
        device::copy_async_16_prefix(to, keys_ + from, bytes);
        device::copy_async_16_prefix(to + Tr::kTileBytes, values_ + from, bytes);
      }
    }
    device::commit_copies();
  }

  __device__ __forceinline__ uint32_t stage_address(int stage) const {
    return device::shared_address(shared_.ring[warp_][stage]);
  }

  // Adds the tile of a slot.
  __device__ __forceinline__ void add(int slot, int stage) {
    const uint32_t keys = stage_address(stage), values = keys + Tr::kTileBytes;
    const unsigned present = __ballot_sync(
        device::kFullMask,
        lane_ < kDecodeRate && shared_.rows[slot * kDecodeRate + lane_ % kDecodeRate] != kNoRow);
    if (present == 0) {
      return;
    }
    float scores[Tr::kHeadTiles][4] = {};
    // Matrix i of four: children 8 (i % 2) and the next seven, dims 8 (i / 2) and the next seven.
    const int matrix = lane_ / 8;
#pragma unroll
    for (int step = 0; step < Tr::kDim / 16; ++step) {
      uint32_t a[4];
      device::load_matrices(a, keys + listed_offset<Tr>(lane_ % 8 + matrix % 2 * 8, 2 * step + matrix / 2));
#pragma unroll
      for (int tile = 0; tile < Tr::kHeadTiles; ++tile) {
        device::mma_16x8x16<T>(scores[tile], a, queries_[tile][2 * step], queries_[tile][2 * step + 1]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < Tr::kHeadTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[tile][i] = __fmul_rn(scores[tile][i], scale_);  // the largest has to equal its reference
      }
    }
    tree_attention::hide_rows(scores, present);
    softmax_.weigh(scores);
    uint32_t weights[Tr::kHeadTiles][2];
#pragma unroll
    for (int tile = 0; tile < Tr::kHeadTiles; ++tile) {
      device::pack_transposed<T>(scores[tile], weights[tile]);
    }
    // Matrix i of four: children 8 (i / 2) and the next seven, columns 8 (i % 2) and the next seven.
#pragma unroll
    for (int m = 0; m < Tr::kDim / 16; ++m) {
      uint32_t columns[4];
      device::load_matrices_transposed(
          columns, values + listed_offset<Tr>(lane_ % 8 + matrix / 2 * 8, 2 * m + matrix % 2));
#pragma unroll
      for (int tile = 0; tile < Tr::kHeadTiles; ++tile) {
        device::mma_16x8x16<T>(softmax_.out[tile][m], columns, weights[tile][0], weights[tile][1]);
      }
    }
  }

  const AttendParams<T>& attend_;
  ListedShared<Tr>& shared_;
  const int warp_, lane_;
  const float scale_;           // to units of log2
  const char *keys_, *values_;  // this lane's chunk of row 0 of the pools
  uint32_t queries_[Tr::kHeadTiles][Tr::kDim / 8];
  tree_attention::RunningSoftmax<Tr::kDim, Tr::kHeadTiles> softmax_;
};

// Merges the warps in their order and stores the part.
template <class Tr>
__device__ __forceinline__ void store_part(const ListedParams<typename Tr::T>& params, const WalkRow& walk,
                                           const ListedPart& part, ListedShared<Tr>& shared) {
  const auto& attend = params.attend;
  constexpr int kQuads = Tr::kDim / 4;
  const int64_t layers = attend.layout.num_layers;
  const int64_t first = ((walk.at * layers + part.layer) * params.splits + part.split) * attend.group;
  for (int item = threadIdx.x; item < attend.group * kQuads; item += Tr::kThreads) {
    const int head = item / kQuads, quad = item % kQuads;
    float max = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < Tr::kWarps; ++warp) {
      max = fmaxf(max, shared.max[warp][head]);
    }
    const float base = max == -INFINITY ? 0.0f : max;
    float sum = 0.0f;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < Tr::kWarps; ++warp) {
      const float factor = device::exp2_flushed(shared.max[warp][head] - base);
      const float4 own = *reinterpret_cast<const float4*>(ListedWarp<Tr>::sums_of(shared, warp) +
                                                          head * Tr::kMergeStride + quad * 4);
      sum += shared.sum[warp][head] * factor;
      out.x = fmaf(own.x, factor, out.x);
      out.y = fmaf(own.y, factor, out.y);
      out.z = fmaf(own.z, factor, out.z);
      out.w = fmaf(own.w, factor, out.w);
    }
    // Parts begin at a multiple of 8 bytes.
    auto* to = reinterpret_cast<float2*>(attend.chunk.part_out + (first + head) * Tr::kDim + quad * 4);
    to[0] = make_float2(out.x, out.y);
    to[1] = make_float2(out.z, out.w);
    if (quad == 0) {
      attend.chunk.part_max[first + head] = max * 0.69314718055994530942f;
      attend.chunk.part_sum[first + head] = sum;
    }
  }
}

// Grid: rows and K/V heads of the chunk, times parts, which vary fastest.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads) listed_kernel(const ListedParams<typename Tr::T> params) {
  extern __shared__ __align__(128) uint8_t listed_bytes[];
  auto& shared = *reinterpret_cast<ListedShared<Tr>*>(listed_bytes);
  const auto& attend = params.attend;
  if (threadIdx.x == 0) {
    device::pdl_launch_dependents();  // the merge
  }
  const int64_t at = blockIdx.x / params.parts;
  const WalkRow walk = row_or_described<Tr::kThreads>(attend, at);
  ListedPart part;
  if (counts(walk.query)) {
    part = listed_part(attend, walk, static_cast<int>(blockIdx.x - at * params.parts));
  }
  if (part.layer < 0) {
    device::pdl_wait();  // what comes behind this kernel does not wait for the one before it
    return;
  }
  ListedWarp<Tr> warp(attend, walk, shared);
  find_listed_rows<Tr>(attend, walk, part, shared);
  const int slots = (part.num + kDecodeRate - 1) / kDecodeRate - part.split * kListedSlots;
  warp.run(min(slots, kListedSlots));
  warp.leave();
  __syncthreads();
  store_part<Tr>(params, walk, part, shared);
}

template <class Tr>
cudaError_t launch_listed_rows(const ListedParams<typename Tr::T>& params, cudaStream_t stream) {
  const int64_t rows = params.attend.chunk.num * params.attend.layout.num_kv_heads;
  return launch_kernel(listed_kernel<Tr>,
                       {.grid = static_cast<unsigned>(rows * params.parts),
                        .threads = Tr::kThreads,
                        .shared_bytes = sizeof(ListedShared<Tr>),
                        .pdl = params.attend.options.lists_follow},
                       stream, params);
}

template <typename T, int kDim>
cudaError_t launch_listed(const AttendParams<T>& attend, int64_t parts, bool pdl, cudaStream_t stream) {
  ListedParams<T> params{attend, static_cast<int>(parts)};
  params.splits = num_splits(most_candidates(attend.layout, attend.options));
  const cudaError_t error = attend.group <= 8 ? launch_listed_rows<ListedTraits<T, kDim, 1>>(params, stream)
                                              : launch_listed_rows<ListedTraits<T, kDim, 2>>(params, stream);
  return error != cudaSuccess ? error : launch_merge(attend, pdl, stream);
}

}  // namespace htree::tree_cache
