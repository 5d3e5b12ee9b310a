// dK and dV of a layer, docs/semantics/tree_attention.md §1.10, where up to 8 query heads share a kv head: a
// warp walks the inverted list of a (batch, kv head, parent) in a window of the lists.
//
// An inverted list holds the queries that reference the parent; with each come up to 8 rows (query, head), one tile,
// streamed through shared memory. The parent's keys stay in registers as A operands and its values in shared
// memory, so a query costs its own bytes and no more: S^T = K' q^T and dP^T = V dO^T, then dV += P^T dO and
// dK' += dS^T q', with the weights straight from the accumulators. Tiles come in pairs, so that the rows of two
// fill the 16 of the last two products, and one waits for what the other computes. A tile has the rows of one query, or of
// two queries of kPairedGroup heads that are not rotated. Queries are rotated in fp16 in registers and transposed by
// movmatrix. A window keeps the rows of its queries in the L2 while all parents of a head walk them. The sums of the
// windows are added one after another.
#pragma once

#include "device/shared_memory.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/rotations.h"
#include "ops/sparse_attention/cuda/sm80/backward/gradient_rows.cuh"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/cuda/sm80/rotated_query.cuh"

namespace htree::tree_attention {

constexpr int kSharedParentWarps = 4;  // warps that share the inverted list of a parent
constexpr int kPairStages = 2;         // of two tiles each

// A tile in shared memory, as the tiled record of kRecordRows rows: those of one query or of two. Behind it stand the
// factors that rotate its rows, and what each query sees of the parent.
template <int kDim>
struct QueryStage {
  using Record = TiledRecord<kDim>;
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kGradientOffset = Record::gradient_offset(kRecordRows);
  static constexpr int kMetaOffset = Record::meta_offset(kRecordRows);
  static constexpr int kRotationOffset =
      Record::bytes(kRecordRows);  // fp16 cos and sin of its position, from launch_position_rotations()
  // The last copy of a query takes 16 bytes of each lane: the numbers of its rows, the rotation where there is
  // one, and what nobody reads.
  static constexpr int kPresentOffset = kMetaOffset + 32 * 16;
  static_assert(kRotationOffset + kRowBytes <= kPresentOffset);
  static constexpr int kBytes = (kPresentOffset + 16 + 127) / 128 * 128;
  static constexpr int kPairBytes = 2 * kBytes;
  static constexpr int kRingBytes = kPairStages * kPairBytes;
  static constexpr int kValueBytes = kParentRows * kDim * 2;  // of the parent, behind the ring
  static constexpr int kWarpBytes = kRingBytes + kValueBytes;
  static_assert(PackedParent<kDim, kDim>::kBytes <= kRingBytes);
  static constexpr int kSumBytes = 2 * kParentRows * kDim * 4;  // sums of a warp
  static_assert(kSumBytes <= kRingBytes);
};

// The inverted list of a parent in the window of lists [first_list, end_list): numbers of entries or, for the
// implicit lists of the top, of lists; each stands for `stride` queries.
struct InvertedListWindow {
  uint32_t begin, num_queries;

  // The whole warp calls.
  __device__ __forceinline__ InvertedListWindow(const KeyGradientParams& params, int64_t parent) {
    const GatherParams& p = params.common.gather;
    uint32_t end;
    if (params.entries) {
      const uint32_t* offset = params.offsets + int64_t{blockIdx.y} * (p.num_parents + 1) + parent;
      begin = first_entry(params.entries, offset[0], offset[1], params.first_list, p.list_width);
      end = first_entry(params.entries, begin, offset[1], params.end_list, p.list_width);
    } else {
      // Lists whose diagonal parent comes before this one do not hold it, and above the bottom a list that refines
      // everything adds nothing.
      int64_t token = parent * kParentRows * p.node_span;
      if (params.common.selected) {
        token = max(token, p.list_width * p.node_span);
      }
      const int64_t first = max(list_of(p, token - p.t0 + p.stride - 1), int64_t{params.first_list});
      end = params.end_list;
      begin = static_cast<uint32_t>(min(first, int64_t{end}));
    }
    num_queries = (end - begin) * p.stride;
  }
};

// Copies queries [begin, end) of an inverted list for one warp. Lane i knows query begin + 32 j + i.
template <int kDim, bool kRotates, bool kPaired>
class QueryStream {
 public:
  using Stage = QueryStage<kDim>;
  using Record = TiledRecord<kDim>;
  static_assert(!kPaired || !kRotates);
  static constexpr uint32_t kQueries = kPaired ? 4 : 2;  // of two tiles

  __device__ __forceinline__ QueryStream(const KeyGradientParams& params, const InvertedListWindow& window,
                                         int64_t parent, uint32_t begin, uint32_t end, uint32_t ring)
      : params_(params),
        window_(window),
        parent_(parent),
        begin_(begin),
        end_(end),
        lane_(threadIdx.x % 32),
        rest_lane_(min(lane_, kRecordRows + (kRotates ? kDim / 8 : 0) - 1)),
        ring_(ring),
        next_(begin) {
    const GatherParams& p = params.common.gather;
    records_ = params.common.records + int64_t{blockIdx.y} * p.num_queries * kRecordBytes + lane_ * 16;
    rest_ = rest_lane_ < kRecordRows
                ? records_ + (rest_lane_ - lane_) * 16 + kMetaOffset
                : reinterpret_cast<const char*>(params.rotations) + (rest_lane_ - kRecordRows) * 16;
    entry_ = read_entry(begin);
#pragma unroll 1
    for (uint32_t i = 0; i < kPairStages - 1; ++i) {
      issue_pair(ring + i * Stage::kPairBytes);
    }
  }

  // Waits for the next two tiles and returns the stage of the first; the second stands behind it.
  __device__ __forceinline__ uint32_t wait() {
    constexpr uint32_t kLast = (kPairStages - 1) * Stage::kPairBytes;
    const uint32_t stage = ring_ + read_;
    const uint32_t before = ring_ + (read_ == 0 ? kLast : read_ - Stage::kPairBytes);
    device::wait_copies<kPairStages - 2>();
    __syncwarp();
    issue_pair(before);  // no lane reads the tiles before these any more
    read_ = read_ == kLast ? 0 : read_ + Stage::kPairBytes;
    return stage;
  }

 private:
  static constexpr int kRows = kPaired ? kPairedGroup : kRecordRows;
  static constexpr int kRecordBytes = Record::bytes(kRows), kMetaOffset = Record::meta_offset(kRows);

  // The entry of query `first` + lane, behind the last query that of the last one.
  __device__ __forceinline__ uint32_t read_entry(uint32_t first) const {
    const GatherParams& p = params_.common.gather;
    const uint32_t index = min(first + lane_, end_ - 1);
    if (index >= end_) {
      return 0;  // there is no query
    }
    const uint32_t at = window_.begin + static_cast<uint32_t>(list_of(p, index));
    return params_.entries ? params_.entries[at] : at * p.entries_of_list() + static_cast<uint32_t>(parent_);
  }

  // For this lane's query among the next 32 of the inverted list: what it sees of the parent, its position and its number.
  __device__ __forceinline__ void look_up() {
    const GradientParams& common = params_.common;
    const GatherParams& p = common.gather;
    const uint32_t index = next_ + lane_;
    const uint32_t entry = entry_;
    entry_ = read_entry(next_ + 32);
    const uint32_t list_row = entry / p.entries_of_list();
    const int slot = static_cast<int>(entry % p.entries_of_list());
    query_ = list_row * p.stride + (index & (p.stride - 1));
    present_ = 0;
    position_ = 0;
    if (index >= end_ || query_ >= static_cast<uint32_t>(p.num_queries)) {
      // The last list may have fewer queries than the others, and the last two tiles fewer than they have place for. The
      // weights are 0, but they meet a record, which must be one that was written and that this parent sees.
      query_ = list_row * p.stride;
      return;
    }
    const int batch = blockIdx.y / p.num_kv_heads, kv_head = blockIdx.y % p.num_kv_heads;
    const int64_t list_idx = (batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + kv_head;
    const int64_t rightmost = node_of(p, p.t0 + query_);
    const int count =
        params_.entries ? params_.counts[list_idx] : static_cast<int>(rightmost / kParentRows) + 1;
    const int position = (count - 1 - slot) * kParentRows + last_place(p, rightmost, list_idx);
    // Above the bottom a query's diagonal block is always refined.
    const int64_t rows = min(static_cast<int64_t>(position) + (common.selected ? 0 : 1),
                             rightmost + 1 - parent_ * kParentRows);
    present_ = rows >= kParentRows ? 0xffffu : (1u << max(static_cast<int>(rows), 0)) - 1u;
    if (common.selected) {
      present_ &= ~static_cast<unsigned>(
          reinterpret_cast<const uint16_t*>(common.selected + list_idx * common.mask_words)[slot]);
    }
    position_ = static_cast<unsigned>(max(position, 0));
  }

  // Begins the copies of the next two tiles, behind the last query of look_up()'s queries of weight 0: without a branch
  // the products of the queries before hide what the addresses wait for.
  __device__ __forceinline__ void issue_pair(uint32_t stage) {
    const int from = static_cast<int>((next_ - begin_) % 32);  // a multiple of kQueries
    if (from == 0) {
      look_up();
    }
    if constexpr (kPaired) {
      issue_paired(stage, from);
    } else {
      issue(stage, from);
      issue(stage + Stage::kBytes, from + 1);
    }
    next_ += kQueries;
    device::commit_copies();
  }
  __device__ __forceinline__ void issue(uint32_t stage, int from) const {
    const unsigned query = __shfl_sync(device::kFullMask, query_, from);
    const unsigned present = __shfl_sync(device::kFullMask, present_, from);
    const unsigned position = __shfl_sync(device::kFullMask, position_, from);
    const uint32_t to = stage + lane_ * 16;
    const char* record = records_ + uint64_t{query} * kRecordBytes;
#pragma unroll
    for (int at = 0; at < kMetaOffset; at += 512) {
      device::copy_async_16(to + at, record + at);
    }
    // The numbers of the rows, and behind them the factors of the rotation; lanes beyond copy the last of these again.
    device::copy_async_16(to + kMetaOffset,
                          rest_ + uint64_t{rest_lane_ < kRecordRows ? query : position} *
                                      (rest_lane_ < kRecordRows ? kRecordBytes : Stage::kRowBytes));
    if (lane_ == 0) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(stage + Stage::kPresentOffset), "r"(present) : "memory");
    }
  }

  // Copies four queries. The rows of the second one of a tile stand kRows further down there than in its record, which
  // flips a bit of their chunks in chunk_offset().
  __device__ __forceinline__ void issue_paired(uint32_t stage, int from) const {
    constexpr int kStretch = kRows * (kDim == 32 ? 64 : 128);  // of a record, without a gap in a tile
    constexpr int kFlip = kDim == 32 ? 32 : 64;
    const int at = lane_ * 16;
    const uint32_t first = stage + at / kStretch * (2 * kStretch) + at % kStretch;
    const uint32_t second = stage + at / kStretch * (2 * kStretch) + kStretch + (at % kStretch ^ kFlip);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned query = __shfl_sync(device::kFullMask, query_, from + i);
      const uint32_t to = (i % 2 == 0 ? first : second) + i / 2 * Stage::kBytes;
      const char* record = records_ + uint64_t{query} * kRecordBytes;
#pragma unroll
      for (int step = 0; step < kMetaOffset; step += 512) {
        device::copy_async_16(to + 2 * step, record + step);
      }
    }
    // Sixteen lanes copy the numbers of a row each.
    const unsigned query = __shfl_sync(device::kFullMask, query_, from + lane_ / kRows % 4);
    if (lane_ < 4 * kRows) {
      device::copy_async_16(
          stage + lane_ / kRecordRows * Stage::kBytes + Stage::kMetaOffset + lane_ % kRecordRows * 16,
          records_ + (lane_ % kRows - lane_) * 16 + uint64_t{query} * kRecordBytes + kMetaOffset);
    }
    const int own = lane_ - from;
    if (own >= 0 && own < 4) {
      const uint32_t to = stage + own / 2 * Stage::kBytes + Stage::kPresentOffset + own % 2 * 4;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(present_) : "memory");
    }
  }

  const KeyGradientParams& params_;
  const InvertedListWindow& window_;
  int64_t parent_;
  uint32_t begin_, end_;
  int lane_, rest_lane_;
  uint32_t ring_;
  const char* records_;  // of the head, from this lane's 16-byte chunk on
  const char* rest_;     // what this lane copies behind the two tiles, for record 0 or position 0
  uint32_t next_, entry_ = 0;
  uint32_t read_ = 0;  // stage to be read next
  unsigned query_ = 0, present_ = 0, position_ = 0;
};

// Loads fragments of 8 rows. x[c] holds dims 8 c + 2 (lane % 4) and the next of row lane / 4, c counted from `first`.
template <int kDim>
__device__ __forceinline__ void load_four_chunks(uint32_t (&x)[4], uint32_t tile, int first) {
  const int lane = threadIdx.x % 32;
  device::load_matrices(x, tile + chunk_offset<kDim>(lane % 8, first + lane / 8));
}

// Rotates the rows of a query to its position, in place.
template <int kDim>
__device__ __forceinline__ void rotate_query(uint32_t (&q)[kDim / 8], uint32_t rotations) {
  constexpr int kPairs = kDim / 16;
  __half2 cosine[kPairs], sine[kPairs];
  const uint32_t at = rotations + threadIdx.x % 4 * 16;
#pragma unroll
  for (int i = 0; i < kPairs; i += 2) {
    // The cos of two pairs, then their sin.
    const uint4 pack = device::load_shared_16(at + i * 32);
    cosine[i] = *reinterpret_cast<const __half2*>(&pack.x);
    cosine[i + 1] = *reinterpret_cast<const __half2*>(&pack.y);
    sine[i] = *reinterpret_cast<const __half2*>(&pack.z);
    sine[i + 1] = *reinterpret_cast<const __half2*>(&pack.w);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    __half2& low = *reinterpret_cast<__half2*>(&q[i]);
    __half2& high = *reinterpret_cast<__half2*>(&q[i + kPairs]);
    const __half2 rotated = __hfma2(low, cosine[i], __hneg2(__hmul2(high, sine[i])));
    high = __hfma2(high, cosine[i], __hmul2(low, sine[i]));
    low = rotated;
  }
}

// A tile in shared memory, by addresses: its record, the factors that rotate its rows, and a word for each query of what
// its rows see of the parent.
struct QueryRows {
  uint32_t record, rotations, present;
};

template <typename T, int kDim, bool kRotates, bool kPaired>
class ParentGradient {
 public:
  using Block = PackedParent<kDim, kDim>;
  using Stage = QueryStage<kDim>;
  static constexpr int kChunks = kDim / 8, kSteps = kDim / 16;

  // Loads the keys of the parent into registers, by way of `ring`, the shared memory of this warp, and its values into the
  // place behind the ring.
  __device__ __forceinline__ void load(const char* block, uint32_t ring) {
    const int lane = threadIdx.x % 32;
    values_ = ring + Stage::kRingBytes;
    for (int at = lane * 16; at < Block::kBytes; at += 512) {
      const int value = at - Block::kValueOffset;
      const bool is_value = value >= 0 && value < Stage::kValueBytes;
      device::copy_async_16(is_value ? values_ + value : ring + at, block + at);
    }
    device::commit_copies();
    device::wait_copies<0>();
    __syncwarp();
    const TileAddress<kDim> address;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      device::load_matrices(keys_[i], ring + address.plain(i));
    }
    load_row_scales(ring + Block::kScaleOffset, row_unscale_);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        key_sum_[i][e] = value_sum_[i][e] = 0.f;
      }
    }
  }

  // Adds two tiles.
  __device__ __forceinline__ void add_pair(const QueryRows (&queries)[2], float score_scale,
                                           float gradient_scale) {
    uint32_t q[2][kChunks];
#pragma unroll
    for (int i_query = 0; i_query < 2; ++i_query) {
#pragma unroll
      for (int i = 0; i < kChunks; i += 4) {
        load_four_chunks<kDim>(reinterpret_cast<uint32_t(&)[4]>(q[i_query][i]), queries[i_query].record, i);
      }
      if constexpr (kRotates) {
        rotate_query<kDim>(q[i_query], queries[i_query].rotations);
      }
    }
    // The even and the odd steps of each sum are chains of their own: one hides the latency of the others.
    float dp[2][2][4] = {}, s[2][2][4] = {};
#pragma unroll
    for (int i = 0; i < kChunks; i += 4) {
      uint32_t x[2][4];
#pragma unroll
      for (int i_query = 0; i_query < 2; ++i_query) {
        load_four_chunks<kDim>(x[i_query], queries[i_query].record + Stage::kGradientOffset, i);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int step = i / 2 + j;
        uint32_t value[4];
        device::load_matrices(value, values_ + TileAddress<kDim>().plain(step));
#pragma unroll
        for (int i_query = 0; i_query < 2; ++i_query) {
          device::mma_16x8x16<T>(dp[i_query][j], value, x[i_query][2 * j], x[i_query][2 * j + 1]);
          device::mma_16x8x16<__half>(s[i_query][j], keys_[step], q[i_query][2 * step],
                                      q[i_query][2 * step + 1]);
        }
      }
    }
    uint32_t weights[4], gradients[4];
#pragma unroll
    for (int i_query = 0; i_query < 2; ++i_query) {
      float(&weight)[4] = s[i_query][0];
      float(&gradient)[4] = dp[i_query][0];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        weight[e] += s[i_query][1][e];
        gradient[e] += dp[i_query][1][e];
      }
      weigh(queries[i_query], score_scale, gradient_scale, weight, gradient);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weights[2 * i_query + half] = device::pack_pair<T>(weight[2 * half], weight[2 * half + 1]);
        gradients[2 * i_query + half] = device::pack_pair<__half>(gradient[2 * half], gradient[2 * half + 1]);
      }
    }
    // A load brings two chunks of both tiles, as the products take them.
    const int lane = threadIdx.x % 32;
    const uint32_t gradient_rows =
        (lane / 8 % 2 == 0 ? queries[0] : queries[1]).record + Stage::kGradientOffset;
#pragma unroll
    for (int i = 0; i < kChunks; i += 2) {
      uint32_t x[2][2];
      device::load_matrices_transposed(reinterpret_cast<uint32_t(&)[4]>(x),
                                       gradient_rows + chunk_offset<kDim>(lane % 8, i + lane / 16));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        device::mma_16x8x16<T>(value_sum_[i + j], weights, x[j][0], x[j][1]);
        device::mma_16x8x16<__half>(key_sum_[i + j], gradients, device::transpose_matrix(q[0][i + j]),
                                    device::transpose_matrix(q[1][i + j]));
      }
    }
  }

  // Leaves the sums in shared memory, lane after lane, for the warp that adds the sums of all.
  __device__ __forceinline__ void leave(uint32_t ring) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      store_sum(ring, 2 * i, key_sum_[i]);
      store_sum(ring, 2 * i + 1, value_sum_[i]);
    }
  }
  __device__ __forceinline__ void add_left(uint32_t ring) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      add_sum(ring, 2 * i, key_sum_[i]);
      add_sum(ring, 2 * i + 1, value_sum_[i]);
    }
  }

  // Adds the result to the running sums. dK is rotated back by the child's place under its parent.
  __device__ __forceinline__ void store(const KeyGradientParams& params, int64_t parent, float factor) const {
    const GatherParams& p = params.common.gather;
    const int lane = threadIdx.x % 32;
    const int64_t first_row = (int64_t{blockIdx.y} * p.num_parents + parent) * kParentRows;
    // All loads of a row come before its first store, which might go to the same address.
    const auto read = [&](const float* from) {
      return params.add ? *reinterpret_cast<const float2*>(from) : make_float2(0.f, 0.f);
    };
    const auto write = [&](float* to, float2 old, float x, float y) {
      *reinterpret_cast<float2*>(to) = make_float2(old.x + x, old.y + y);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      const int64_t at = (first_row + row) * kDim + lane % 4 * 2;
      if (params.keys) {
        float* to = params.keys + at;
        float4 rotation[kChunks / 2];
        float2 old[kChunks];
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          old[i] = read(to + i * 8);
        }
#pragma unroll
        for (int i = 0; i < kChunks / 2; ++i) {
          rotation[i] = *reinterpret_cast<const float4*>(p.rope + row * (kDim / 2) + i * 8 + lane % 4 * 2);
        }
#pragma unroll
        for (int i = 0; i < kChunks / 2; ++i) {
          const float* low = key_sum_[i] + 2 * half;
          const float* high = key_sum_[i + kChunks / 2] + 2 * half;
          write(to + i * 8, old[i], (low[0] * rotation[i].x + high[0] * rotation[i].y) * factor,
                (low[1] * rotation[i].z + high[1] * rotation[i].w) * factor);
          write(to + i * 8 + kDim / 2, old[i + kChunks / 2],
                (high[0] * rotation[i].x - low[0] * rotation[i].y) * factor,
                (high[1] * rotation[i].z - low[1] * rotation[i].w) * factor);
        }
      }
      if (params.values) {
        float* to = params.values + at;
        float2 old[kChunks];
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          old[i] = read(to + i * 8);
        }
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          write(to + i * 8, old[i], value_sum_[i][2 * half], value_sum_[i][2 * half + 1]);
        }
      }
    }
  }

 private:
  // Turns the scores of a tile into weights and its dP^T into dS^T.
  __device__ __forceinline__ void weigh(const QueryRows& query, float score_scale, float gradient_scale,
                                        float (&s)[4], float (&dp)[4]) const {
    const int lane = threadIdx.x % 32;
    // The word of the query that this lane's columns belong to.
    const uint32_t word = query.present + (kPaired ? lane % 4 * 2 / kPairedGroup * 4 : 0);
    unsigned present;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(present) : "r"(word) : "memory");
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 bits = device::load_shared_16(query.record + Stage::kMetaOffset + (lane % 4 * 2 + i) * 16);
      const float unscale = __uint_as_float(bits.z);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e = i + 2 * half;
        const bool here = present >> (lane / 4 + 8 * half) & 1;
        const float score = s[e] * row_unscale_[half] * (unscale * score_scale);
        const float weight = here ? device::exp2_flushed(score - __uint_as_float(bits.x)) : 0.f;
        s[e] = weight;
        dp[e] = here ? weight * (dp[e] - __uint_as_float(bits.y)) * (unscale * gradient_scale) : 0.f;
      }
    }
  }

  __device__ __forceinline__ static uint32_t sum_at(uint32_t ring, int i) {
    return ring + (i * 32 + threadIdx.x % 32) * 16;
  }
  __device__ __forceinline__ static void store_sum(uint32_t ring, int i, const float (&x)[4]) {
    device::store_shared_16(sum_at(ring, i), make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                                        __float_as_uint(x[2]), __float_as_uint(x[3])));
  }
  __device__ __forceinline__ static void add_sum(uint32_t ring, int i, float (&x)[4]) {
    const uint4 bits = device::load_shared_16(sum_at(ring, i));
    x[0] += __uint_as_float(bits.x), x[1] += __uint_as_float(bits.y);
    x[2] += __uint_as_float(bits.z), x[3] += __uint_as_float(bits.w);
  }

  uint32_t keys_[kSteps][4];
  uint32_t values_;  // their address
  float row_unscale_[2];
  float key_sum_[kChunks][4], value_sum_[kChunks][4];
};

// Grid: x = parents, y = batch * kv head. The warps of a block share the inverted list of its parent in equal runs,
// whose sums are added in the order of the warps. A block has several warps where few parents have long inverted lists
// each, as at the top. Elsewhere it has one, so that no warp waits for one whose parent has a longer one.
template <typename T, int kDim, int kWarps, bool kRotates, bool kPaired>
__global__ void __launch_bounds__(kWarps * 32, 8 / kWarps) parent_gradient_kernel(KeyGradientParams params) {
  using Stage = QueryStage<kDim>;
  using Stream = QueryStream<kDim, kRotates, kPaired>;
  extern __shared__ __align__(128) char shared[];
  const GradientParams& common = params.common;
  const GatherParams& p = common.gather;
  const int warp = kWarps == 1 ? 0 : threadIdx.x / 32;
  const int64_t parent = blockIdx.x;
  const InvertedListWindow window(params, parent);
  if (window.num_queries == 0 && params.add) {
    return;
  }
  const PowerOfTwo power = parent_power(common, parent);
  const uint32_t rings = device::shared_address(shared);
  const uint32_t ring = rings + warp * Stage::kWarpBytes;
  const uint32_t run = (window.num_queries + kWarps - 1) / kWarps;
  const uint32_t begin = min(warp * run, window.num_queries);
  const uint32_t end = min(begin + run, window.num_queries);
  ParentGradient<T, kDim, kRotates, kPaired> sums;
  sums.load(p.packed + (int64_t{blockIdx.y} * p.num_parents + parent) * PackedParent<kDim, kDim>::kBytes,
            ring);
  Stream stream(params, window, parent, begin, end, ring);
  for (uint32_t index = begin; index < end; index += Stream::kQueries) {
    const uint32_t stage = stream.wait();
    QueryRows rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = stage + i * Stage::kBytes;
      rows[i] = {at, at + Stage::kRotationOffset, at + Stage::kPresentOffset};
    }
    sums.add_pair(rows, p.score_scale, power.scale);
  }
  device::wait_copies<0>();  // those behind the last query
  if constexpr (kWarps > 1) {
    __syncwarp();
    if (warp > 0) {
      sums.leave(ring);
    }
    __syncthreads();
    if (warp > 0) {
      return;
    }
    for (int other = 1; other < kWarps; ++other) {
      sums.add_left(rings + other * Stage::kWarpBytes);
    }
  }
  sums.store(params, parent, power.inverse * common.scale);
}

template <typename T, int kDim, int kWarps>
cudaError_t launch_parent_gradient_warps(const KeyGradientParams& params, cudaStream_t stream) {
  const GatherParams& p = params.common.gather;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(p.num_parents), p.num_batches * p.num_kv_heads),
                          .threads = kWarps * 32,
                          .shared_bytes = kWarps * QueryStage<kDim>::kWarpBytes};
  if (params.common.tile_rows == kPairedGroup) {
    return launch_kernel(parent_gradient_kernel<T, kDim, kWarps, false, /*kPaired=*/true>, shape, stream,
                         params);
  }
  return dispatch_rotations(params.rotations, [&](auto rotates) {
    return launch_kernel(parent_gradient_kernel<T, kDim, kWarps, rotates.value, false>, shape, stream,
                         params);
  });
}

template <typename T, int kDim>
cudaError_t launch_parent_gradient(const KeyGradientParams& params, cudaStream_t stream) {
  return params.entries ? launch_parent_gradient_warps<T, kDim, 1>(params, stream)
                        : launch_parent_gradient_warps<T, kDim, kSharedParentWarps>(params, stream);
}

}  // namespace htree::tree_attention
