// The scores of a dense top, for both passes of its selection and for its softmax. A thread block rotates its
// query rows once, keeps them in shared memory as fp16 and multiplies them with tiles of nodes.
//
// The scale of the scores and log2(e) are multiplied in before the rounding to fp16. A row whose values
// are too large or too small for that is stored times a power of two and with the factor that undoes it,
// as keys are (dense_layer.cuh).
#pragma once

#include "device/mma.cuh"
#include "device/sizes.h"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/tree/cuda/sm80/query_row.cuh"
#include "ops/tree/cuda/sm90/dense_layer.cuh"

namespace htree::tree_attention {

struct QueryRow {
  const void* data;  // [K]
  int64_t position;
};

// Rotates 8 dims of the lower half of a query row and their partners in the upper half, brings them to fp16 and returns
// the factor that undoes the row's power of two. kTasks neighbouring lanes have a row and call together.
template <typename T, int kTasks>
__device__ __forceinline__ float rotate_query_chunks(uint4& low_chunk, uint4& high_chunk,
                                                     const float4 (&rotations)[4], float score_scale) {
  float low[8], high[8];
  widen_eight<T>(low_chunk, low);
  widen_eight<T>(high_chunk, high);
  const float largest = row_magnitude<kTasks>(low, high);
  const bool plain = fits_half(largest, score_scale);
  const PowerOfTwo power = half_range_scale(largest);
  rotate_eight(low, high, plain ? score_scale : power.scale, rotations, low_chunk, high_chunk);
  return plain ? 1.f : power.inverse * score_scale;
}

// Rotates query rows into `tile`, which has kRows rows in panels. kThreads threads call, numbered by
// `thread`. row_of(i) gives the source of row i and the position it is rotated to. Returns whether the factor
// of one of this thread's rows is not 1. After a barrier of these threads the rows are visible to wgmma.
template <typename T, int kDim, int kRows, int kThreads, int kAhead, typename RowOf>
__device__ __forceinline__ bool rotate_queries(char* tile, float* factors, const GatherParams& p, int thread,
                                               RowOf row_of) {
  constexpr int kHalf = kDim / 2;
  constexpr int kTasks = kDim / 16;  // tasks of a row: 8 dims of the lower half and their partners
  constexpr int kRounds = (kRows * kTasks + kThreads - 1) / kThreads;
  static_assert(kRows * kTasks % 32 == 0 && kThreads % 32 == 0);  // warps run whole or not at all
  uint4 low_raw[kAhead], high_raw[kAhead];
  float4 rotations[kAhead][4];  // cos and sin of two dims each
  const auto load = [&](int round) {
    const int task = thread + round * kThreads;
    if (task < kRows * kTasks) {
      const QueryRow source = row_of(task / kTasks);
      const int chunk = task % kTasks;
      const T* from = static_cast<const T*>(source.data) + chunk * 8;
      low_raw[round % kAhead] = load_eight(from, p.queries.aligned);
      high_raw[round % kAhead] = load_eight(from + kHalf, p.queries.aligned);
      const float4* rotation = reinterpret_cast<const float4*>(p.rope + source.position * kHalf + chunk * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rotations[round % kAhead][i] = __ldg(rotation + i);
      }
    }
  };
#pragma unroll
  for (int round = 0; round < kAhead; ++round) {
    load(round);
  }
  bool scaled = false;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int task = thread + round * kThreads;
    if (task >= kRows * kTasks) {
      break;
    }
    const int row = task / kTasks, chunk = task % kTasks;
    uint4 &low = low_raw[round % kAhead], &high = high_raw[round % kAhead];
    const float factor = rotate_query_chunks<T, kTasks>(low, high, rotations[round % kAhead], p.score_scale);
    if (chunk == 0) {
      factors[row] = factor;
    }
    scaled |= factor != 1.f;
    *reinterpret_cast<uint4*>(tile + panel_offset(kRows, row, chunk)) = low;
    *reinterpret_cast<uint4*>(tile + panel_offset(kRows, row, kTasks + chunk)) = high;
    if (round + kAhead < kRounds) {
      load(round + kAhead);
    }
  }
  device::fence_async_shared();
  return scaled;
}

// The row of query head `head` of a kv head, to be rotated to `position`; `query` counts
// from the chunk's first.
template <typename T>
__device__ __forceinline__ QueryRow query_row(const GatherParams& p, int64_t batch, int kv_head,
                                              int64_t query, int head, int position) {
  const T* data = static_cast<const T*>(p.queries.data) + batch * p.queries.batch + query * p.queries.row +
                  int64_t{kv_head * p.group + head} * p.queries.head;
  return {data, position};
}

// ---- What all passes over the scores of leaders share. A thread block keeps 256 query rows in shared
// memory, tiles of 128 keys pass through a ring of bulk copies, and four warpgroups compute a piece of
// 64 x 128 scores each. Scores are in log2 units. sm_90a.

constexpr int kScoreRows = 256;
static_assert(kScoreRows == kTopLists);
constexpr int kScoreThreads = 512;
constexpr int kScoreGroups = kScoreThreads / 128;
constexpr int kTopScoreStages = 4;
constexpr int kIssueBarrier = 1;  // barriers 1 ... 4: warpgroup 0 ... 3 may issue its products

// The shared memory of a thread block, from an address aligned to 1024 bytes on.
template <int kDim, int kRows = kScoreRows>
struct ScoreShared {
  static constexpr int kTileBytes = kTopTileBytes<kDim>;
  static constexpr int kThreads = kRows * 2;
  char queries[kPanels<kDim> * kRows * kPanelRowBytes];
  char keys[kTopScoreStages][kTileBytes];
  float factors[kRows];
  device::Barrier full[kTopScoreStages];
  device::Barrier empty[kTopScoreStages];
};
static_assert(ScoreShared<128>::kThreads == kScoreThreads);
template <int kDim, int kRows = kScoreRows>
constexpr int kScoreSharedBytes = sizeof(ScoreShared<kDim, kRows>) + 1024;
static_assert(kScoreSharedBytes<128> <= device::kHopperSharedBytes);

template <typename Shared>
__device__ __forceinline__ Shared* aligned_shared(char* raw) {
  const uint32_t at = device::shared_address(raw);
  return reinterpret_cast<Shared*>(raw + ((1024 - at % 1024) % 1024));
}

// Issues 8 exponentials one after another, so that no instruction waits for a single one.
__device__ __forceinline__ void exp2_eight(float (&x)[8]) {
  asm volatile(
      "ex2.approx.ftz.f32 %0, %0;\n"
      "ex2.approx.ftz.f32 %1, %1;\n"
      "ex2.approx.ftz.f32 %2, %2;\n"
      "ex2.approx.ftz.f32 %3, %3;\n"
      "ex2.approx.ftz.f32 %4, %4;\n"
      "ex2.approx.ftz.f32 %5, %5;\n"
      "ex2.approx.ftz.f32 %6, %6;\n"
      "ex2.approx.ftz.f32 %7, %7;\n"
      : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]));
}

// Each thread looks at some of the first `count` tiles. Returns whether one of its tiles has keys with
// a scale other than 1.
__device__ __forceinline__ bool scaled_tile(const int32_t* flags, int count) {
  bool any = false;
  for (int i = threadIdx.x; i < count; i += 128) {
    any |= (__ldg(flags + i) & kScaledKeys * kInAnyPart) != 0;
  }
  return any;
}

// log2 of nodes per query head or of tokens per node. Both are powers of two here, so the
// kernels need no divisions.
__device__ __forceinline__ int log2_of(int64_t power) {
  return __ffsll(power) - 1;
}

// The leaders and tiles of a thread block. Rows past the last leader repeat it and write the same values
// again. Grid: x = kv heads (fastest) and runs of leaders, those with the longest rows first; y = batch.
struct ScoreTask {
  int batch, kv_head, first_list, last_list;
  int span_log2, group_log2;
  int least_rank, most_rank;  // R = n - 1 of the first and of the last leader
  int64_t head_index;

  // `rows` are those of a block.
  __device__ __forceinline__ explicit ScoreTask(const GatherParams& p, int rows = kScoreRows) {
    span_log2 = log2_of(p.node_span);
    group_log2 = log2_of(p.group);
    const int lists = rows >> group_log2;
    const int runs = gridDim.x / p.num_kv_heads;
    kv_head = blockIdx.x % p.num_kv_heads;
    batch = blockIdx.y;
    first_list = (runs - 1 - static_cast<int>(blockIdx.x) / p.num_kv_heads) * lists;
    last_list = min(first_list + lists, p.num_lists) - 1;
    least_rank = rank(p, first_list);
    most_rank = rank(p, last_list);
    head_index = int64_t{batch} * p.num_kv_heads + kv_head;
  }
  __device__ __forceinline__ int rank(const GatherParams& p, int list) const {
    return static_cast<int>((p.t0 + int64_t{list} * p.stride) >> span_log2);
  }
  // Whether all leaders that share a block of kScoreRows rows select every candidate. Then nothing reads their numbers.
  __device__ __forceinline__ bool selects_all(const GatherParams& p) const {
    const int lists = kScoreRows >> group_log2;  // a power of two
    return rank(p, min(first_list | (lists - 1), p.num_lists - 1)) < p.list_width;
  }
};

// The ring of key tiles. Thread 0 fills it between its own products.
template <typename Shared>
struct KeyRing {
  Shared& shared;
  const char* tiles;
  int num_tiles;

  // All threads must call. Ends without a barrier.
  __device__ __forceinline__ void start() {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kTopScoreStages; ++i) {
        device::barrier_init(&shared.full[i], 1);
        device::barrier_init(&shared.empty[i], Shared::kThreads / 32);
      }
      device::fence_barrier_init();
#pragma unroll
      for (int i = 0; i < kTopScoreStages - 1; ++i) {
        if (i < num_tiles) {
          copy(i);
        }
      }
    }
  }
  __device__ __forceinline__ void copy(int tile) {
    const int stage = tile % kTopScoreStages;
    device::barrier_arrive_expect(&shared.full[stage], Shared::kTileBytes);
    device::bulk_load(shared.keys[stage], tiles + int64_t{tile} * Shared::kTileBytes, Shared::kTileBytes,
                      &shared.full[stage]);
  }
  // Keeps the ring filled, and returns when the tile has arrived. Whole warps must call.
  __device__ __forceinline__ void wait(int tile) {
    if (threadIdx.x == 0 && tile + kTopScoreStages - 1 < num_tiles) {
      const int next = tile + kTopScoreStages - 1;
      if (next >= kTopScoreStages) {
        device::barrier_wait(&shared.empty[next % kTopScoreStages], (next / kTopScoreStages - 1) & 1);
      }
      copy(next);
    }
    __syncwarp();
    device::barrier_wait(&shared.full[tile % kTopScoreStages], tile / kTopScoreStages & 1);
  }
  __device__ __forceinline__ void release(int tile) {
    if (threadIdx.x % 32 == 0) {
      device::barrier_arrive(&shared.empty[tile % kTopScoreStages]);
    }
  }
};

// s = a * b^T over the head dim. Both operands are K-major panels, of kRowsA and kRowsB rows; the descriptors
// point to the first rows.
template <int kDim, int kRowsA, int kRowsB>
__device__ __forceinline__ void multiply_panels(float (&s)[64], uint64_t a, uint64_t b) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint32_t inside = step % 4 * 32;
    device::wgmma<__half, 128>(s, device::advance(a, step / 4 * kRowsA * kPanelRowBytes + inside),
                               device::advance(b, step / 4 * kRowsB * kPanelRowBytes + inside), step > 0);
  }
}

// ---- scores with the queries as rows: a thread holds rows lane / 4 and lane / 4 + 8 of its warp,
// columns 8 i + 2 (lane % 4) + e

// Undoes the powers of two of queries and keys. `factors` points to the factor of the thread's first row, in
// shared memory, `scales` to the scale of its first column.
__device__ __forceinline__ void undo_powers(float (&s)[64], const float* factors, const float* scales) {
  const float row_factors[2] = {factors[0], factors[8]};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] *= __ldg(scales + i / 4 * 8 + i % 2);
    s[i] *= row_factors[i / 2 & 1];
  }
}

// Calls use(step, x) for steps 0 ... 7 with x = 2^(s - reference of the row) of elements 8 step ... 8 step + 7. Eight are
// computed while the eight before them are used.
template <typename Use>
__device__ __forceinline__ void weigh_scores(const float (&s)[64], const float (&reference)[2], Use use) {
  float batch[2][8];
#pragma unroll
  for (int step = 0; step <= 8; ++step) {
    if (step < 8) {
      float(&x)[8] = batch[step & 1];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = s[8 * step + i] - reference[i / 2 & 1];
      }
      exp2_eight(x);
    }
    if (step > 0) {
      use(step - 1, batch[(step - 1) & 1]);
    }
  }
}

// A sum of weights relative to a new reference; an infinite sum stays infinite.
__device__ __forceinline__ float rescaled(float sum, float exponent) {
  return sum == INFINITY ? sum : sum * device::exp2_flushed(exponent);
}

struct RowMaxima {
  float largest[2] = {-INFINITY, -INFINITY};

  __device__ __forceinline__ void add(const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      largest[i / 2 & 1] = fmaxf(largest[i / 2 & 1], s[i]);
    }
  }
  __device__ __forceinline__ float finish(int row) {
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      largest[row] = fmaxf(largest[row], __shfl_xor_sync(device::kFullMask, largest[row], offset));
    }
    return largest[row];
  }
};

}  // namespace htree::tree_attention
