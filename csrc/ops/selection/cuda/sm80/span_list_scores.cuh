// Scores of the leaders' candidates by span means (selection_span) where parents are gathered: one warp per
// (leader, kv head, run of slots). The score of a candidate is the log-sum over its span means, stored as
// list_scores.cuh stores scores.
//
// A parent's span means come in blocks of 16 rows, with mean j of each child in block j. A lane of the
// products therefore holds the same children and heads in every block and sums over the means alone.
#pragma once

#include "ops/selection/cuda/sm80/list_scores.cuh"
#include "ops/tree/cuda/sm90/span_copies.cuh"

namespace htree::tree_attention {

constexpr int kSpanScoreStages = 4;
constexpr int kSpanBatch = 4;  // blocks of span means whose scores a lane holds at the same time

template <int kKeyDim>
struct SpanRing {
  static constexpr int kCopyBytes = static_cast<int>(packed_span_bytes(kKeyDim));
  static constexpr int kStageBytes = (kCopyBytes + 127) / 128 * 128;
  static constexpr int kWarpBytes = kSpanScoreStages * kStageBytes;
  static constexpr int kSharedBytes = kScoreWarps * kWarpBytes;
};

// A ParentStream for the blocks of span means of each parent, one after another.
template <int kKeyDim>
class SpanStream {
 public:
  using Ring = SpanRing<kKeyDim>;

  __device__ __forceinline__ SpanStream(const char* blocks, int rows, int64_t num_parents,
                                        const int32_t* list, int begin, int end, uint32_t ring)
      : blocks_(blocks),
        rows_(rows),
        last_parent_(static_cast<int>(num_parents - 1)),
        list_(list),
        end_(end),
        slot_(begin),
        ring_(ring) {
    ids_ = read_ids(begin);
#pragma unroll
    for (int i = 0; i < kSpanScoreStages; ++i) {
      issue();
    }
  }

  // Returns the shared address of the next block. Waits for the copies of this warp alone.
  __device__ __forceinline__ uint32_t wait() const {
    device::wait_copies<kSpanScoreStages - 1>();
    __syncwarp();
    return ring_ + read_ * Ring::kStageBytes;
  }

  // Must be called after the last read of the block that wait() returned.
  __device__ __forceinline__ void release() {
    __syncwarp();
    read_ = (read_ + 1) % kSpanScoreStages;
    issue();
  }

 private:
  __device__ __forceinline__ int read_ids(int first) const {
    const int at = first + static_cast<int>(threadIdx.x % 32);
    return at >= end_ ? 0 : list_ ? min(max(list_[at], 0), last_parent_) : min(at, last_parent_);
  }

  __device__ __forceinline__ void issue() {
    if (slot_ < end_) {
      const int lane = threadIdx.x % 32;
      const int64_t id = __shfl_sync(device::kFullMask, ids_, taken_);
      const char* from = blocks_ + (id * rows_ + block_) * Ring::kCopyBytes + lane * 16;
      const uint32_t to = ring_ + write_ * Ring::kStageBytes + lane * 16;
#pragma unroll
      for (int at = 0; at < Ring::kCopyBytes; at += 512) {
        if (at + 512 <= Ring::kCopyBytes || lane * 16 < Ring::kCopyBytes % 512) {
          device::copy_async_16(to + at, from + at);
        }
      }
      if (++block_ == rows_) {
        block_ = 0;
        ++slot_;
        if (++taken_ == 32) {
          taken_ = 0;
          ids_ = read_ids(slot_);
        }
      }
    }
    write_ = (write_ + 1) % kSpanScoreStages;
    device::commit_copies();  // an empty group keeps the count of pending groups
  }

  const char* blocks_;
  int rows_, last_parent_;
  const int32_t* list_;
  int end_, slot_;
  uint32_t ring_;
  int ids_;
  int block_ = 0, taken_ = 0, read_ = 0, write_ = 0;
};

// The query rows of a slot as operands of the products with all of its blocks.
template <int kKeyDim, int kTiles>
struct SlotQuery {
  static constexpr int kSteps = kKeyDim / 16;
  uint32_t b[kTiles][kSteps][2];

  __device__ __forceinline__ explicit SlotQuery(const RotatedQuery<kKeyDim, kTiles>& q) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        constexpr int kLowSteps = kSteps / 2;
        const float(&half)[kKeyDim / 8] = step < kLowSteps ? q.low[tile] : q.high[tile];
        const int i = step % kLowSteps * 4;
        b[tile][step][0] = device::pack_pair<__half>(half[i], half[i + 1]);
        b[tile][step][1] = device::pack_pair<__half>(half[i + 2], half[i + 3]);
      }
    }
  }

  // Computes the scores of a block's rows in log2 units, as slot_scores() does.
  __device__ __forceinline__ void scores(const TileAddress<kKeyDim>& at, uint32_t block,
                                         const float (&unscale)[kTiles][2], float (&s)[kTiles][4]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[tile][i] = 0.f;
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      device::load_matrices(a, block + at.plain(step));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        device::mma_16x8x16<__half>(s[tile], a, b[tile][step][0], b[tile][step][1]);
      }
    }
    float row_scale[2];
    load_row_scales(block + kParentKeyBytes<kKeyDim>, row_scale);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[tile][i] *= row_scale[i / 2];
        s[tile][i] *= unscale[tile][i & 1];
      }
    }
  }
};

// The grid is that of list_scores_kernel.
template <typename T, int kKeyDim, int kTiles>
__global__ void __launch_bounds__(kScoreWarps * 32, kTiles == 1 ? 3 : 2)
    span_list_scores_kernel(ListScoreParams params) {
  using Ring = SpanRing<kKeyDim>;
  extern __shared__ __align__(128) char shared[];
  const GatherParams& p = params.gather;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t list_row = int64_t{blockIdx.x} * kScoreWarps + warp;
  if (list_row >= p.num_lists) {
    return;
  }
  const int64_t query = list_row * p.stride;
  const GatherTask task = gather_task(p, blockIdx.y, query, list_row);
  const int begin = blockIdx.z * kRunSlots;
  const int end = min(task.num_slots, begin + kRunSlots);
  if (begin >= end) {
    return;
  }
  const PackedSpans& spans = params.spans;
  SpanStream<kKeyDim> stream(
      spans.blocks + int64_t{blockIdx.y} * spans.num_parents * spans.rows * Ring::kCopyBytes, spans.rows,
      spans.num_parents, task.list, begin, end, device::shared_address(shared) + warp * Ring::kWarpBytes);
  const int64_t row_idx = (task.batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + task.kv_head;
  float* row = params.scores + row_idx * params.score_width * p.group;
  const int counted = task.num_candidates - 1;
  HeadSums<kTiles> sums;
  RotatedQuery<kKeyDim, kTiles> q;
  q.load(query_rows<T>(p, task, query), p.queries.head, p.group, p.score_scale, p.rope,
         task.num_candidates - 1 - begin * kParentRows);
  const TileAddress<kKeyDim> at;
  for (int slot = begin; slot < end; ++slot) {
    const SlotQuery<kKeyDim, kTiles> slot_query(q);
    q.step_back();
    LogSum nodes[kTiles][4];
    for (int first = 0; first < spans.rows; first += kSpanBatch) {
      float batch[kSpanBatch][kTiles][4];
#pragma unroll
      for (int i = 0; i < kSpanBatch; ++i) {
        if (first + i < spans.rows) {
          slot_query.scores(at, stream.wait(), q.unscale, batch[i]);
          stream.release();
        } else {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              batch[i][tile][e] = -INFINITY;
            }
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float four[4] = {batch[0][tile][e], batch[1][tile][e], batch[2][tile][e], batch[3][tile][e]};
          nodes[tile][e].add_four(four);
        }
      }
    }
    float s[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[tile][i] = nodes[tile][i].score();
        const int candidate = slot * kParentRows + lane / 4 + i / 2 * 8;
        const int head = tile * 8 + lane % 4 * 2 + (i & 1);
        if (candidate < counted && head < p.group) {
          row[int64_t{candidate} * p.group + head] = s[tile][i];
        }
      }
    }
    sums.add(s, counted - slot * kParentRows);
  }
  device::wait_copies<0>();
  sums.write(params.sums + (row_idx * params.num_runs + blockIdx.z) * p.group, p.group);
}

template <typename T, int kDim>
cudaError_t launch_span_list_scores(const ListScoreParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const LaunchShape shape{.grid = dim3(num_blocks(p.num_lists, kScoreWarps), p.num_batches * p.num_kv_heads,
                                       static_cast<unsigned>(params.num_runs)),
                          .threads = kScoreWarps * 32,
                          .shared_bytes = SpanRing<kDim>::kSharedBytes};
  return dispatch_head_tiles(p.group, [&](auto tiles) {
    return launch_kernel(span_list_scores_kernel<T, kDim, tiles.value>, shape, stream, params);
  });
}

}  // namespace htree::tree_attention
