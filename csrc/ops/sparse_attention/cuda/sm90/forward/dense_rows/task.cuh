// The tasks of a launch over dense or masked rows: which there are, in which order blocks take them, what the rows of one
// stand for, and how its queries come into shared memory (docs/semantics/tree_attention.md §1.4). sm_90a.
#pragma once

#include "device/divmod.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/dense_rows/rows.cuh"

namespace htree::tree_attention {

// The order of the tasks of a launch: `section` pairs (batch, K/V head) at a time, so that their tiles stay in the L2,
// and in a section run by run of tokens. The number of tiles falls from run to run in the last section, rises in the
// one before, and so on: tasks that come one after the other are about equally long. Block b takes one task of each
// round of gridDim.x tasks, number b or number b from the end in turns, which shares the tiles out evenly.
class RowsOrder {
 public:
  // `pairs` pairs with `runs` runs each, `section` pairs in a section.
  RowsOrder(int runs, int pairs, int section)
      : runs_(runs),
        section_(section),
        num_tasks_(runs * pairs),
        last_section_((pairs - 1) / section),
        per_section_(static_cast<uint32_t>(section * runs)),
        pairs_(static_cast<uint32_t>(section)),
        last_pairs_(static_cast<uint32_t>(pairs - last_section_ * section)) {}

  __device__ __forceinline__ int runs() const { return runs_; }
  __device__ __forceinline__ int num_tasks() const { return num_tasks_; }
  // The task of this block in a round, no smaller than num_tasks() where there is none.
  __device__ __forceinline__ int number(int round) const {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
  __device__ __forceinline__ void place(int number, int& pair, int& run) const {
    const uint32_t section = per_section_.quotient(static_cast<uint32_t>(number));
    const uint32_t at = per_section_.remainder(static_cast<uint32_t>(number), section);
    const int sections_after = last_section_ - static_cast<int>(section);
    const device::FastDivisor& pairs = sections_after == 0 ? last_pairs_ : pairs_;
    const uint32_t step = pairs.quotient(at);
    pair = static_cast<int>(section) * section_ + static_cast<int>(pairs.remainder(at, step));
    run = sections_after % 2 == 0 ? runs_ - 1 - static_cast<int>(step) : static_cast<int>(step);
  }

 private:
  int runs_, section_, num_tasks_, last_section_;
  device::FastDivisor per_section_;  // tasks of a section
  device::FastDivisor pairs_, last_pairs_;
};

struct DenseRowsParams {
  DenseAttendParams dense;
  RowsOrder order;
  device::FastDivisor kv_heads, group;
  int run_log2;     // run_tokens_log2() of the group, a loop that blocks need not run for every task
  TileMarks marks;  // of masked rows
};

// 128 rows: a run of tokens and all query heads of a K/V head. Token and head of row i are i / G and i % G.
struct alignas(16) RowsTask {
  int pair, batch, kv_head;
  int index;        // among the marks
  int first, last;  // tokens of the run that the call asks for, by their positions in the sequence
  int run;          // first token of the run, asked for or not
  int last_tile;    // that of the run's tokens

  __device__ __forceinline__ RowsTask(const DenseRowsParams& params, int number) {
    const GatherParams& p = params.dense.attend.gather;
    int run_index;
    params.order.place(number, pair, run_index);
    batch = static_cast<int>(params.kv_heads.quotient(static_cast<uint32_t>(pair)));
    kv_head = pair - batch * p.num_kv_heads;
    const int log2 = params.run_log2;
    const int t0 = static_cast<int>(p.t0);
    run = ((t0 >> log2) + run_index) << log2;
    first = max(run, t0);
    last = min(run + (1 << log2), t0 + p.num_queries) - 1;
    last_tile = last / kDenseTileNodes;
    index = pair * params.order.runs() + run_index;
  }
  template <bool kMasked>
  __device__ __forceinline__ int num_tiles(const DenseRowsParams& params) const {
    if constexpr (kMasked) {
      return __ldg(params.marks.counts + index);
    } else {
      return last_tile + 1;
    }
  }
  // The token of a row, by the number of its token in the run. Rows that stand for no query of the call repeat another.
  __device__ __forceinline__ int token(int index) const { return min(max(run + index, first), last); }
  __device__ __forceinline__ bool exists(int index) const { return run + index == token(index); }
  __device__ __forceinline__ int64_t first_tile(const DenseTiles& tiles) const {
    return int64_t{pair} * tiles.num_tiles;
  }
};

// What a task needs of kScaledKeys and kInfiniteValues by its tiles. Each of `step` threads looks at some of them.
__device__ __forceinline__ int tile_flags(const DenseRowsParams& params, const RowsTask& task, int thread,
                                          int step) {
  const int32_t* flags = params.dense.tiles.flags + task.first_tile(params.dense.tiles);
  int last;  // __ldg() would be put off until it is used, where it is waited for
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(last) : "l"(flags + task.last_tile));
  bool scaled = false;
#pragma unroll 1  // a thread has one or two
  for (int tile = thread; tile <= task.last_tile; tile += step) {
    scaled |= (__ldg(flags + tile) & kScaledKeys * kInAnyPart) != 0;
  }
  const bool infinite = (last & kInfiniteValues * kInAnyPart) != 0;
  return (scaled ? kScaledKeys : 0) | (infinite ? kInfiniteValues : 0);
}

// What row `row` of a task stands for: a token of the run and a head of the K/V head.
struct BlockRow {
  int token, head;

  __device__ __forceinline__ BlockRow(const DenseRowsParams& params, int row) {
    token = static_cast<int>(params.group.quotient(static_cast<uint32_t>(row)));
    head = row - token * params.dense.attend.gather.group;
  }
};

// ---- queries
//
// They come to the places of the rotated ones as they are, with all rows of a task on the way at once, and each thread
// rotates what it copied. The warps that do so while another task is multiplied must be done before it is, and a task may
// be a single tile: about 2000 cycles of products. So a row costs few instructions beside its arithmetic and waits for
// nothing: a thread's rows are heads of one token where the group allows, which share their angles, and angles and rows
// are on the way before they are needed.

// What a query row, whose largest finite |element| is `largest`, is multiplied by before it is rounded to fp16, and the
// factor that undoes a power of two in it, as in rotate_query_chunks().
struct QueryScale {
  float scale, factor;
};
__device__ __forceinline__ QueryScale query_scale(float largest, float score_scale) {
  const PowerOfTwo power = half_range_scale(largest);
  return fits_half(largest, score_scale) ? QueryScale{score_scale, 1.f}
                                         : QueryScale{power.scale, power.inverse * score_scale};
}

// Warp `warp` of the kWarps that share a task. All lanes call. Masked rows are scaled and rounded here and not rotated.
template <typename T, int kDim, bool kMasked, int kWarps>
class QueryRotator {
 public:
  __device__ __forceinline__ QueryRotator(const DenseRowsParams& params, int warp)
      : params_(params),
        p_(params.dense.attend.gather),
        first_(kUnits * warp / kWarps * kUnitRows),
        end_(kUnits * (warp + 1) / kWarps * kUnitRows),
        row_(threadIdx.x % 32 / kTasks * kRun),
        chunk_(threadIdx.x % kTasks) {}

  // Begins the copies. It reads nothing but queries.
  __device__ __forceinline__ void fetch(const RowsTask& task, char* tile) const {
    const auto begin = [](uint4* to, const T* from) {
      device::copy_async_16(device::shared_address(to), from);
    };
    const auto copy = [](uint4* to, const T* from) { *to = load_eight(from, false); };
    if (!p_.queries.aligned) {
      copy_rows<false>(task, tile, copy);
    } else if (same_token()) {
      copy_rows<true>(task, tile, begin);
    } else {
      copy_rows<false>(task, tile, begin);
    }
    device::commit_copies();
  }

  // Returns whether a factor of this thread's rows is not 1. After a barrier the rows are visible to wgmma.
  __device__ __forceinline__ bool rotate(const RowsTask& task, char* tile, float* factors) const {
    const bool scaled =
        same_token() ? rotate_rows<kRun>(task, tile, factors) : rotate_rows<1>(task, tile, factors);
    device::fence_async_shared();
    return scaled;
  }

  // Brings the queries of a later task to the L2, where the heads of a token lie side by side. One warp calls.
  __device__ __forceinline__ void prefetch(const RowsTask& task) const {
    constexpr int kLine = 128 / sizeof(T);  // elements
    if (p_.queries.head != kDim) {
      return;
    }
    const T* first = queries_of(task) + task.first * p_.queries.row;
    const int lines = (p_.group * kDim + kLine - 1) / kLine;  // of a token
    const int total = lines * static_cast<int>(task.last - task.first + 1);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x % 32); i < total; i += 32) {
      const int token = i / lines;
      asm volatile(
          "prefetch.global.L2 [%0];" ::"l"(first + token * p_.queries.row + (i - token * lines) * kLine));
    }
  }

 private:
  static constexpr int kTasks = kDim / 16;  // of a row: 8 dims of the lower half and their partners
  // A warp takes a unit of neighbouring rows at a time, and a thread kRun neighbours of them one after the other.
  static constexpr int kUnitRows = 16;
  static constexpr int kRun = kUnitRows * kTasks / 32;
  static constexpr int kUnits = kRunRows / kUnitRows;
  static_assert(kRun * 32 == kUnitRows * kTasks && kUnits >= kWarps);

  // Whether the rows of a thread's run are heads of one token.
  __device__ __forceinline__ bool same_token() const {
    return p_.group % kRun == 0;
  }

  // Of token 0 of the sequence and the first head of the task.
  __device__ __forceinline__ const T* queries_of(const RowsTask& task) const {
    return static_cast<const T*>(p_.queries.data) + task.batch * p_.queries.batch +
           int64_t{task.kv_head} * p_.group * p_.queries.head - p_.t0 * p_.queries.row;
  }
  // copy(to, from) for 8 elements each.
  template <bool kSameToken, typename Copy>
  __device__ __forceinline__ void copy_rows(const RowsTask& task, char* tile, Copy copy) const {
    const T* queries = queries_of(task) + chunk_ * 8;
    int unit = first_;
    do {
      const T* from = queries;
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        if (j == 0 || !kSameToken) {
          const BlockRow at(params_, unit + row_ + j);
          from = queries + task.token(at.token) * p_.queries.row + at.head * p_.queries.head;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          copy(place(tile, unit, j, half), from + half * (kDim / 2));
        }
        from += p_.queries.head;
      }
      unit += kUnitRows;
    } while (unit < end_);
  }

  // Takes kRows of a run at a time, heads of one token. Their largest elements come first, side by side, while the angles
  // are on the way: the comparisons and shuffles of one row wait for one another.
  template <int kRows>
  __device__ __forceinline__ bool rotate_rows(const RowsTask& task, char* tile, float* factors) const {
    bool scaled = false;
    int unit = first_, run = 0;
    do {
      float4 rotations[4];
      load_rotations(rotations, task, unit + row_ + run);
      device::wait_copies<0>();
      float largest[kRows];
      row_magnitudes<T, kTasks>(largest, [&](int j, uint4& low, uint4& high) {
        low = *place(tile, unit, run + j, 0);
        high = *place(tile, unit, run + j, 1);
      });
      QueryScale scales[kRows];
      bool plain = true;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        scales[j] = {p_.score_scale, 1.f};
        plain &= fits_half(largest[j], p_.score_scale);
      }
      if (!__all_sync(device::kFullMask, plain)) {
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          scales[j] = query_scale(largest[j], p_.score_scale);
          scaled |= scales[j].factor != 1.f;
        }
      }
      // The rows are read again, so that they need no registers until then.
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        uint4 &low = *place(tile, unit, run + j, 0), &high = *place(tile, unit, run + j, 1);
        const uint4 raw[2] = {low, high};
        uint4 rotated[2];
        rotate_eight<T>(raw[0], raw[1], scales[j].scale, rotations, rotated[0], rotated[1]);
        low = rotated[0];
        high = rotated[1];
        if (chunk_ == 0) {
          factors[unit + row_ + run + j] = scales[j].factor;
        }
      }
      run += kRows;
      if (run == kRun) {
        run = 0;
        unit += kUnitRows;
      }
    } while (unit < end_);
    return scaled;
  }

  __device__ __forceinline__ void load_rotations(float4 (&rotations)[4], const RowsTask& task,
                                                 int row) const {
    const float4* from = reinterpret_cast<const float4*>(
        p_.rope + task.token(BlockRow(params_, row).token) * (kDim / 2) + chunk_ * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kMasked) {
        rotations[i] = make_float4(1.f, 0.f, 1.f, 0.f);
      } else {
        // As __ldg() does, but here: the compiler would put the load off until it is used, behind the wait for rows.
        float4& to = rotations[i];
        asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(to.x), "=f"(to.y), "=f"(to.z), "=f"(to.w)
                     : "l"(from + i));
      }
    }
  }
  // Where this thread's part of row j of its run in a unit lies: panel_offset() with what differs from row to row apart.
  __device__ __forceinline__ uint4* place(char* tile, int unit, int j, int half) const {
    static_assert(kUnitRows % 8 == 0 && (kRun & (kRun - 1)) == 0 && (kTasks & (kTasks - 1)) == 0);
    constexpr int kChunks = kPanelDims / 8;
    const int chunk = (chunk_ ^ row_) % kChunks ^ j ^ half * kTasks % kChunks;
    return reinterpret_cast<uint4*>(tile + half * kTasks / kChunks * kRunRows * kPanelRowBytes +
                                    (unit + row_ + j) * kPanelRowBytes + chunk * 16);
  }

  const DenseRowsParams& params_;
  const GatherParams& p_;
  const int first_, end_;  // the first rows of its first unit and of the one behind its last
  const int row_, chunk_;  // of this thread: its first row in a unit, and its part of each row
};

}  // namespace htree::tree_attention
