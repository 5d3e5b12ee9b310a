// Rows below `max_top_nodes` as dense causal attention, on Hopper: docs/semantics/tree_attention.md §1.5.
//
// Such a row sees so few tokens that its lists hold every parent, at every layer: all its nodes are opened, and its
// softmax runs over the tokens up to its own, at their positions in the sequence. So nothing is selected or gathered. The
// tokens are laid out once like a dense top, and a task multiplies 128 rows with one tile after the other: a run of
// neighbouring tokens, and all query heads of a K/V head. Runs start at multiples of their length in the sequence, so a
// row's result depends on nothing but its own position.
//
// The shape is that of FlashAttention-3's persistent kernel: a thread block per multiprocessor takes one task after the
// other. Two consumer warpgroups keep 64 rows each, and a producer brings tiles and queries.
//
// With kMasked the rows are those of forward/masked_rows/: the tiles of a task are those that its marks list, each brings
// the marks of its parents along, nothing is rotated, and the result is merged with the state of the layers above. Of a
// caller's lists some rows may gather: those are not written.
//
// The file holds first the shared memory of a block, then the producer warpgroup, the consumer warpgroups, and at
// last the kernel and its launch. The tasks and the rotation of their queries stand in task.cuh.
#pragma once

#include <algorithm>
#include <limits>

#include "device/sm90/pdl.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/sm80/forward/output_factor.cuh"
#include "ops/sparse_attention/cuda/sm80/masked_lists.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/dense_rows/task.cuh"
#include "ops/tree/cuda/sm80/running_state.cuh"

namespace htree::tree_attention {

// Of the last warpgroup, the first warp copies tiles and the others rotate queries.
constexpr int kRotatorWarps = 3;
constexpr int kRotatorRegisters = 72, kRowsRegisters = 216;
static_assert(128 * kRotatorRegisters + kRowsConsumers * kRowsRegisters <= 65536);

constexpr int kQueryBuffers = 2, kKeyStages = 3, kValueStages = 2;
// Task j's place is j mod kTaskPlaces. Its rows are written after the next task has let its queries go, which may be
// those of a single tile, so that the warps that rotate may be three tasks ahead.
constexpr int kTaskPlaces = 4;

// Task j of a block, counted from 0, has query buffer j mod kQueryBuffers. The rings of tiles go on from task to task.
template <int kDim>
struct RowsShared {
  char queries[kQueryBuffers][kPanels<kDim> * kRunRows * kPanelRowBytes];
  char keys[kKeyStages][kTopTileBytes<kDim>];
  char values[kValueStages][kTopTileBytes<kDim>];
  float factors[kQueryBuffers][kRunRows];
  int flags[kQueryBuffers]
           [kRotatorWarps];     // of a task: what any of its queries and keys and its last values need
  RowsTask tasks[kTaskPlaces];  // to look them up takes a tenth of the time that it takes to find them
  device::Barrier query_full[kQueryBuffers], query_empty[kQueryBuffers];
  device::Barrier key_full[kKeyStages], key_empty[kKeyStages];
  device::Barrier value_full[kValueStages], value_empty[kValueStages];
  alignas(16) uint8_t marks[kKeyStages][kDenseTileNodes];  // of masked rows: they come and go with the keys
  int num_tiles[kQueryBuffers];                            // of masked rows: of a task

  // All threads of the block call.
  __device__ __forceinline__ void init() {
    constexpr int kConsumerWarps = kRowsConsumers / 32;
    const auto all = [](auto& barriers, int num_arrivals) {
      for (device::Barrier& barrier : barriers) {
        device::barrier_init(&barrier, num_arrivals);
      }
    };
    if (threadIdx.x == 0) {
      all(query_full, kRotatorWarps);
      all(query_empty, kConsumerWarps);
      all(key_full, 1);
      all(key_empty, kConsumerWarps);
      all(value_full, 1);
      all(value_empty, kConsumerWarps);
      device::fence_barrier_init();
    }
    __syncthreads();
  }
};
template <int kDim>
constexpr int kRowsSharedBytes = sizeof(RowsShared<kDim>) + 1024;
static_assert(kRowsSharedBytes<128> <= device::kHopperSharedBytes);

// ---- the producer warpgroup: one thread copies tiles, and three warps rotate the queries of the next task while
// the products of this one run

// A place in the sequence of all tiles of a block.
template <bool kMasked>
struct TileCursor {
  int round = 0, tile = 0, num_tiles = 0;
  int64_t first_tile = 0;
  int64_t first_mark = 0;  // of masked rows: the task's place among the marked tiles

  __device__ __forceinline__ explicit TileCursor(const DenseRowsParams& params) { find(params); }
  __device__ __forceinline__ bool ended() const { return tile == num_tiles; }
  __device__ __forceinline__ void advance(const DenseRowsParams& params) {
    if (++tile == num_tiles) {
      ++round;
      find(params);
    }
  }
  __device__ __forceinline__ void find(const DenseRowsParams& params) {
    const int number = params.order.number(round);
    tile = num_tiles = 0;
    if (number < params.order.num_tasks()) {
      const RowsTask task(params, number);
      num_tiles = task.num_tiles<kMasked>(params);
      first_tile = task.first_tile(params.dense.tiles);
      if constexpr (kMasked) {
        first_mark = int64_t{task.index} * params.marks.width;
      }
    }
  }
  // The tile among those of all pairs.
  __device__ __forceinline__ int64_t place(const DenseRowsParams& params) const {
    if constexpr (kMasked) {
      return first_tile + __ldg(params.marks.tiles + first_mark + tile);
    } else {
      return first_tile + tile;
    }
  }
};

// One thread calls. The keys of the next tile come before the values of this one, as they are needed.
template <int kDim, bool kMasked>
__device__ __forceinline__ void copy_row_tiles(const DenseRowsParams& params, RowsShared<kDim>& shared) {
  using Cursor = TileCursor<kMasked>;
  device::RingPlace<kKeyStages> key_place;
  device::RingPlace<kValueStages> value_place;
  // `more` bytes of another copy come to the same barrier.
  const auto copy = [&](const Cursor& cursor, const char* tiles, char* to, device::Barrier* full,
                        device::Barrier* empty, uint32_t parity, int more) {
    const int64_t place = cursor.place(params);
    device::barrier_wait(empty, parity ^ 1);
    device::barrier_arrive_expect(full, kTopTileBytes<kDim> + more);
    device::bulk_load(to, tiles + place * kTopTileBytes<kDim>, kTopTileBytes<kDim>, full);
  };
  const int marks = kMasked ? static_cast<int>(mark_bytes(params.dense.attend.gather.group)) : 0;
  const auto copy_keys = [&](const Cursor& cursor) {
    const int stage = key_place.stage;
    copy(cursor, params.dense.tiles.keys, shared.keys[stage], &shared.key_full[stage],
         &shared.key_empty[stage], key_place.parity, marks);
    if constexpr (kMasked) {
      device::bulk_load(shared.marks[stage], params.marks.marks + (cursor.first_mark + cursor.tile) * marks,
                        marks, &shared.key_full[stage]);
    }
    key_place.advance();
  };
  Cursor keys(params), values(params);
  copy_keys(keys);
  while (!values.ended()) {
    keys.advance(params);
    if (!keys.ended()) {
      copy_keys(keys);
    }
    const int stage = value_place.stage;
    copy(values, params.dense.tiles.values, shared.values[stage], &shared.value_full[stage],
         &shared.value_empty[stage], value_place.parity, 0);
    value_place.advance();
    values.advance(params);
  }
}

// One of the warps that rotate the queries of the tasks after the first.
template <typename T, int kDim, bool kMasked>
__device__ __forceinline__ void rotate_task_queries(const DenseRowsParams& params, RowsShared<kDim>& shared,
                                                    int warp) {
  const QueryRotator<T, kDim, kMasked, kRotatorWarps> rotator(params, warp);
  for (int round = 0; params.order.number(round) < params.order.num_tasks(); ++round) {
    const int buffer = round % kQueryBuffers;
    if (round >= kQueryBuffers) {
      device::barrier_wait(&shared.query_empty[buffer], (round / kQueryBuffers - 1) & 1);
    }
    if (round > 0) {
      const RowsTask task(params, params.order.number(round));
      rotator.fetch(task, shared.queries[buffer]);
      int flags = tile_flags(params, task, threadIdx.x % 32, 32);
      const int next = params.order.number(round + 1);
      if (warp == 0 && next < params.order.num_tasks()) {  // the warp with the fewest rows
        rotator.prefetch(RowsTask(params, next));
      }
      flags |= rotator.rotate(task, shared.queries[buffer], shared.factors[buffer]) ? kScaledKeys : 0;
      flags = __reduce_or_sync(device::kFullMask, flags);
      if (threadIdx.x % 32 == 0) {
        shared.flags[buffer][warp] = flags;
        if (warp == 0) {
          shared.tasks[round % kTaskPlaces] = task;
          if constexpr (kMasked) {
            shared.num_tiles[buffer] = task.num_tiles<kMasked>(params);
          }
        }
      }
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) {
      device::barrier_arrive(&shared.query_full[buffer]);
    }
  }
}

// ---- the consumer warpgroups
//
// The products of scores of one tile run together with those of weights and values of the tile before, also where the
// two belong to different tasks: the rows of a task are finished and written while the weights of the next task's first
// tile wait. The warpgroups take turns in issuing products, so that one multiplies while the other computes
// exponentials.

// Adds the infinities and NaN of the task's own tokens to the rows that see them. `values` is the last tile in global
// memory, `first` and `end` are rows of it, `own` those of this thread's two query rows.
template <typename T, int kDim>
__device__ __forceinline__ void add_silenced(float (&out)[kDim / 2], const char* values, int first, int end,
                                             const int (&own)[2]) {
  const int column = threadIdx.x % 4 * 2;
  for (int row = first; row < end; ++row) {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const uint32_t pair =
          *reinterpret_cast<const uint32_t*>(values + panel_offset(kDenseTileNodes, row, j) + column * 2);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (infinite_or_nan<T>(pair, c)) {
          const float value = device::to_acc(reinterpret_cast<const T*>(&pair)[c]);
          out[4 * j + c] += row <= own[0] ? value : 0.f;
          out[4 * j + 2 + c] += row <= own[1] ? value : 0.f;
        }
      }
    }
  }
}

// Four lanes have a row, each one pair of every 8 columns. Of 32 columns, a lane gets 8 neighbours: `pairs[i]` is this
// lane's of columns 8 i ... 8 i + 7, and it gets the pairs of columns 8 q ... 8 q + 7 as lane q of the four.
__device__ __forceinline__ uint4 gather_columns(uint32_t (&pairs)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(device::kFullMask, odd ? pairs[i] : pairs[i + 1], 1);
    pairs[i + 1] = odd ? pairs[i + 1] : other;
    pairs[i] = odd ? other : pairs[i];
  }
  const uint32_t first = __shfl_xor_sync(device::kFullMask, upper ? pairs[0] : pairs[2], 2);
  const uint32_t second = __shfl_xor_sync(device::kFullMask, upper ? pairs[1] : pairs[3], 2);
  return upper ? make_uint4(first, second, pairs[2], pairs[3])
               : make_uint4(pairs[0], pairs[1], first, second);
}

template <typename T, int kDim, bool kMasked>
class RowsConsumer {
 public:
  __device__ __forceinline__ RowsConsumer(const DenseRowsParams& params, RowsShared<kDim>& shared)
      : params_(params),
        shared_(shared),
        group_(device::uniform(threadIdx.x / 128)),
        lane_(threadIdx.x % 32) {}

  // All consumer threads call. `task`, the first of the block, and its queries are in shared memory, and `flags` say
  // what it needs, as RowsShared::flags do.
  __device__ __forceinline__ void run(const RowsTask& task, int flags) {
    state_.clear_out();
    begin_turns();
    begin_task(task);
    if constexpr (kMasked) {
      num_tiles_ = task.num_tiles<kMasked>(params_);
    }
    flags_ = flags;
    score_first_tile();
    for (;;) {
      for (tile_ = 1; tile_ < num_tiles_; ++tile_) {
        step();
        state_.rescale();
        pack();
      }
      if (ends_) {
        break;
      }
      const bool silenced = silence_last_tile();
      RowSums sums = state_;
      static_cast<RowSums&>(state_) = RowSums{};
      ++round_;
      find_queries();
      tile_ = 0;
      step();
      finish(round_ - 1, sums, silenced);
      state_.clear_out();
      pack();
    }
    const bool silenced = silence_last_tile();
    start_values();
    device::wgmma_wait<0>();
    RowSums sums = state_;
    finish(round_, sums, silenced);
  }

 private:
  __device__ __forceinline__ int query_buffer() const { return round_ % kQueryBuffers; }

  __device__ __forceinline__ void begin_task(const RowsTask& task) {
    if constexpr (!kMasked) {
      num_tiles_ = device::uniform(task.num_tiles<kMasked>(params_));
    }
    ends_ = params_.order.number(round_ + 1) >= params_.order.num_tasks();
    first_tile_ = task.first_tile(params_.dense.tiles);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      own_[h] = own_row(task, row(h).token);
    }
    if constexpr (kMasked) {
      run_row_ = task.run % kDenseTileNodes;
      index_ = task.index;
    }
  }
  __device__ __forceinline__ RowsTask task_of(int round) const {
    return shared_.tasks[round % kTaskPlaces];
  }
  // Which of this thread's two rows in the task.
  __device__ __forceinline__ BlockRow row(int h) const {
    return BlockRow(params_, static_cast<int>(threadIdx.x) / 32 * 16 + lane_ / 4 + 8 * h);
  }
  __device__ __forceinline__ static int own_row(const RowsTask& task, int token) {
    return task.token(token) - task.last_tile * kDenseTileNodes;
  }
  __device__ __forceinline__ void find_queries() {
    device::barrier_wait(&shared_.query_full[query_buffer()], (round_ / kQueryBuffers) & 1);
    begin_task(task_of(round_));
    if constexpr (kMasked) {
      num_tiles_ = shared_.num_tiles[query_buffer()];
    }
    flags_ = 0;
#pragma unroll
    for (int warp = 0; warp < kRotatorWarps; ++warp) {
      flags_ |= shared_.flags[query_buffer()][warp];
    }
  }

  // ---- turns: warpgroup 0 begins. Each arrival has its wait: at the last tile of the block warpgroup 1 has nobody to
  // call.
  __device__ __forceinline__ void begin_turns() const {
    if (group_ == 1) {
      device::named_barrier_arrive(kTurnBarrier, kRowsConsumers);
    }
  }
  __device__ __forceinline__ void await_turn() const {
    device::named_barrier_sync(kTurnBarrier + group_, kRowsConsumers);
  }
  __device__ __forceinline__ void end_turn() const {
    if (group_ == 0 || !ends_ || tile_ + 1 < num_tiles_) {
      device::named_barrier_arrive(kTurnBarrier + 1 - group_, kRowsConsumers);
    }
  }

  // ---- products

  __device__ __forceinline__ void release(device::Barrier& barrier) const {
    if (lane_ == 0) {
      device::barrier_arrive(&barrier);
    }
  }
  __device__ __forceinline__ void start_scores() {
    const uint64_t queries = device::k_major_descriptor<device::Swizzle::k128>(
        shared_.queries[query_buffer()] + group_ * 64 * kPanelRowBytes);
    device::barrier_wait(&shared_.key_full[keys_.stage], keys_.parity);
    device::wgmma_fence();
    multiply_panels<kDim, kRunRows, kDenseTileNodes>(
        s_, queries, device::k_major_descriptor<device::Swizzle::k128>(shared_.keys[keys_.stage]));
    device::wgmma_commit();
  }
  __device__ __forceinline__ void start_values() {
    device::barrier_wait(&shared_.value_full[values_.stage], values_.parity);
    const uint64_t values =
        device::mn_major_descriptor<device::Swizzle::k128>(shared_.values[values_.stage], kTopPanelBytes);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDenseTileNodes / 16; ++step) {
      device::wgmma<T, kDim, device::Major::kMN>(state_.out, weights_[step],
                                                 device::advance(values, step * 16 * kPanelRowBytes), true);
    }
    device::wgmma_commit();
  }
  // The tile's keys are there, and so are its marks.
  __device__ __forceinline__ void read_marks() {
    if constexpr (kMasked) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        marks_[h] = shared_.marks[keys_.stage][own_[h] - run_row_];
      }
    }
  }
  // After the products of scores: lets their operands go and replaces them by weights.
  __device__ __forceinline__ void weigh() {
    if constexpr (kMasked) {
      __syncwarp();  // every lane has read its marks
    }
    release(shared_.key_empty[keys_.stage]);
    keys_.advance();
    prepare();
    if (tile_ + 1 == num_tiles_) {
      __syncwarp();  // every lane has read its factors
      release(shared_.query_empty[query_buffer()]);
    }
    if constexpr (kMasked) {
      state_.weigh(s_, marks_);
    } else {
      state_.weigh(s_);
    }
  }
  // The tile among those of all pairs.
  __device__ __forceinline__ int64_t place() const {
    if constexpr (kMasked) {
      return first_tile_ + __ldg(params_.marks.tiles + int64_t{index_} * params_.marks.width + tile_);
    } else {
      return first_tile_ + tile_;
    }
  }
  // Brings the scores to log2 units and takes out the tokens behind a row's own.
  __device__ __forceinline__ void prepare() {
    if (flags_ & kScaledKeys) {
      undo_powers(s_, shared_.factors[query_buffer()] + threadIdx.x / 32 * 16 + lane_ / 4,
                  params_.dense.tiles.scales + place() * kDenseTileNodes + lane_ % 4 * 2);
    }
    if (tile_ + 1 == num_tiles_) {
      const int column = lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        s_[i] = i / 4 * 8 + i % 2 + column > own_[i / 2 & 1] ? -INFINITY : s_[i];
      }
    }
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      weights_[i / 4][i % 4] = device::pack_pair<T>(s_[2 * i], s_[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void score_first_tile() {
    await_turn();
    start_scores();
    end_turn();
    read_marks();
    device::wgmma_wait<0>();
    weigh();
    pack();  // `out` is still zero
  }
  // The scores of a tile and the values of the one before it.
  __device__ __forceinline__ void step() {
    await_turn();
    start_scores();
    start_values();
    end_turn();
    read_marks();
    device::wgmma_wait<1>();
    weigh();
    device::wgmma_wait<0>();
    release(shared_.value_empty[values_.stage]);
    values_.advance();
  }

  // ---- the end of a task

  // Both warpgroups come here for the same tasks, without a turn. Returns whether there was anything to silence.
  __device__ __forceinline__ bool silence_last_tile() const {
    if ((flags_ & kInfiniteValues) == 0) {
      return false;
    }
    const RowsTask task = task_of(round_);
    device::barrier_wait(&shared_.value_full[values_.stage], values_.parity);
    silence_values<T, kDim>(shared_.values[values_.stage], task.run % kDenseTileNodes,
                            task.last % kDenseTileNodes + 1);
    return true;
  }

  // Writes the rows of the task of `round`, whose sums are `sums`.
  __device__ __forceinline__ void finish(int round, RowSums& sums, bool silenced) {
    state_.finish(sums);
    const RowsTask task = task_of(round);  // again, so that the loop over tiles need not keep it
    if (silenced) {
      const DenseTiles& tiles = params_.dense.tiles;
      const int own[2] = {own_row(task, row(0).token), own_row(task, row(1).token)};
      add_silenced<T, kDim>(state_.out,
                            tiles.values + (task.first_tile(tiles) + task.last_tile) * kTopTileBytes<kDim>,
                            task.run % kDenseTileNodes, task.last % kDenseTileNodes + 1, own);
    }
    const AttendParams& attend = params_.dense.attend;
    const GatherParams& p = attend.gather;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const BlockRow of = row(h);
      bool exists = task.exists(of.token);
      if constexpr (kMasked) {
        exists = exists && is_masked_row(p, task.batch, task.kv_head, task.token(of.token) - p.t0);
      }
      const int64_t at = task.batch * attend.state_batch +
                         (task.token(of.token) - p.t0) * (int64_t{p.num_kv_heads} * p.group) +
                         int64_t{task.kv_head} * p.group + of.head;
      if constexpr (kMasked) {
        if (exists && !attend.first) {
          merge_before(task, of, h, at, sums);
        }
        __syncwarp();  // all lanes of a row have read the state that one of them replaces
      }
      if (exists && lane_ % 4 == 0) {
        attend.max[at] = sums.largest[h] * kLn2;
        attend.sum[at] = sums.sum[h];
      }
      const float inverse = kMasked ? output_factor(attend, int64_t{task.kv_head} * p.group + of.head,
                                                    sums.largest[h], sums.sum[h])
                                    : 1.f / sums.sum[h];
      uint4* out = reinterpret_cast<uint4*>(static_cast<T*>(attend.out) + at * kDim) + lane_ % 4;
#pragma unroll
      for (int j = 0; j < kDim / 8; j += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = 4 * (j + i) + 2 * h;
          pairs[i] = device::pack_pair<T>(state_.out[first] * inverse, state_.out[first + 1] * inverse);
        }
        const uint4 columns = gather_columns(pairs);
        if (exists) {
          out[j] = columns;
        }
      }
    }
  }

  // Adds what the layers above have left of row h to its sums and to `out`.
  __device__ __forceinline__ void merge_before(const RowsTask& task, const BlockRow& of, int h, int64_t at,
                                               RowSums& sums) {
    const AttendParams& attend = params_.dense.attend;
    const GatherParams& p = attend.gather;
    const int64_t query = int64_t{task.batch} * p.num_queries + task.token(of.token) - p.t0;
    const float2* partial =
        reinterpret_cast<const float2*>(
            attend.partial +
            (query * p.num_kv_heads * p.group + int64_t{task.kv_head} * p.group + of.head) * kDim) +
        lane_ % 4;
    float2 sum_before[kDim / 8];
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      sum_before[j] = __ldg(partial + 4 * j);
    }
    float own, before;
    merge_states(sums.largest[h], sums.sum[h], attend.max[at], attend.sum[at], own, before);
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      float* out = state_.out + 4 * j + 2 * h;
      out[0] = out[0] * own + sum_before[j].x * before;
      out[1] = out[1] * own + sum_before[j].y * before;
    }
  }

  const DenseRowsParams& params_;
  RowsShared<kDim>& shared_;
  const int group_, lane_;
  int round_ = 0, tile_ = 0;
  int num_tiles_;  // of the task
  bool ends_;      // no task comes after it
  int flags_;      // what it needs
  int64_t first_tile_;
  int own_[2];  // the tokens of this thread's rows, as rows of the last tile
  // Of masked rows: the run as a row of the last tile, the task's place among the marks, the marks of this thread's rows.
  int run_row_, index_, marks_[2];
  device::RingPlace<kKeyStages> keys_;
  device::RingPlace<kValueStages> values_;
  AttendState<T, kDim> state_;
  float s_[64];
  uint32_t weights_[8][4];
};

// ---- the kernel

// Grid: x = blocks, no more than tasks.
template <typename T, int kDim, bool kMasked>
__global__ void __launch_bounds__(kRowsThreads, 1)
    dense_rows_kernel(const __grid_constant__ DenseRowsParams params) {
#if HTREE_SM90A
  extern __shared__ __align__(128) char raw[];
  RowsShared<kDim>& shared = *aligned_shared<RowsShared<kDim>>(raw);
  shared.init();
  if (threadIdx.x >= kRowsConsumers) {
    device::lower_registers<kRotatorRegisters>();
    device::pdl_wait();
    const int warp = device::uniform(static_cast<int>(threadIdx.x - kRowsConsumers) / 32);
    if (warp > 0) {
      rotate_task_queries<T, kDim, kMasked>(params, shared, warp - 1);
    } else if (threadIdx.x % 32 == 0) {
      copy_row_tiles<kDim, kMasked>(params, shared);
    }
    return;
  }
  device::raise_registers<kRowsRegisters>();
  const RowsTask task(params, params.order.number(0));
  const QueryRotator<T, kDim, kMasked, kRowsConsumers / 32> rotator(
      params, device::uniform(static_cast<int>(threadIdx.x) / 32));
  rotator.fetch(task, shared.queries[0]);  // older than the kernel before this one
  device::pdl_wait();
  int flags = tile_flags(params, task, threadIdx.x, kRowsConsumers);
  const bool scaled = rotator.rotate(task, shared.queries[0], shared.factors[0]);
  if (threadIdx.x == 0) {
    shared.tasks[0] = task;
  }
  flags = device::named_barrier_any(kConsumerBarrier, kRowsConsumers, scaled || (flags & kScaledKeys))
              ? flags | kScaledKeys
              : flags;
  RowsConsumer<T, kDim, kMasked>(params, shared).run(task, flags);
#else
  __trap();
#endif
}

// How many of the pairs (batch, K/V head), whose tiles have `bytes` each, are a section of the order.
inline int section_pairs(int64_t pairs, int64_t bytes) {
  constexpr int64_t kSectionBytes = 16 << 20;  // a third of the L2 of an H100 or H200
  return static_cast<int>(ceil_div(pairs, ceil_div(pairs, std::max<int64_t>(1, kSectionBytes / bytes))));
}

// The queries must be older than some kernel before it that is launched without `pdl`.
template <typename T, int kDim, bool kMasked>
cudaError_t launch_rows(const DenseAttendParams& params, const TileMarks& marks, cudaStream_t stream) {
  const GatherParams& p = params.attend.gather;
  const int64_t runs = num_runs(p.t0, p.num_queries, p.group);
  const int64_t pairs = int64_t{p.num_batches} * p.num_kv_heads;
  int processors = 0;
  if (const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, processors);
      error != cudaSuccess) {
    return error;
  }
  if (runs * pairs > std::numeric_limits<int>::max() - 2 * processors) {
    return cudaErrorInvalidConfiguration;  // more rows than any GPU's memory holds
  }
  const int64_t bytes = 2 * int64_t{params.tiles.num_tiles} * kTopTileBytes<kDim>;
  const LaunchShape shape{.grid = static_cast<unsigned>(std::min<int64_t>(runs * pairs, processors)),
                          .threads = kRowsThreads,
                          .shared_bytes = kRowsSharedBytes<kDim>,
                          .pdl = true};
  const RowsOrder order(static_cast<int>(runs), static_cast<int>(pairs), section_pairs(pairs, bytes));
  return launch_kernel(dense_rows_kernel<T, kDim, kMasked>, shape, stream,
                       DenseRowsParams{params, order, device::FastDivisor(p.num_kv_heads),
                                       device::FastDivisor(p.group), run_tokens_log2(p.group), marks});
}

template <typename T, int kDim>
cudaError_t launch_dense_rows(const DenseAttendParams& params, cudaStream_t stream) {
  return launch_rows<T, kDim, /*kMasked=*/false>(params, {}, stream);
}

}  // namespace htree::tree_attention
