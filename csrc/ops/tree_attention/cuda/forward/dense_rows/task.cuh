// The tasks of a launch over dense or masked rows: which there are, in which order blocks take them, and what the rows of
// one stand for. sm_90a.
#pragma once

#include "device/divmod.cuh"
#include "ops/tree_attention/cuda/forward/dense_rows/rows.cuh"

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
  int first, last;  // tokens of the run that the call asks for, by their positions in the text
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

}  // namespace htree::tree_attention
