// Rows below `max_top_nodes` as dense causal attention, on Hopper: docs/semantics/tree_attention.md §1.5.
//
// Such a row sees so few tokens that its lists hold every parent, at every layer: all its nodes are opened, and its
// softmax runs over the tokens up to its own, at their positions in the text. So nothing is selected or gathered. The
// tokens are laid out once like a dense top, and a thread block multiplies 128 rows with one tile after the other:
// a run of neighbouring tokens, and all query heads of a K/V head. Runs start at multiples of their length in the text,
// so a row's result depends on nothing but its own position.
//
// The shape is FlashAttention-3's: one warpgroup copies and two keep 64 rows each. The product with the keys of one tile
// runs together with the product of weights and values of the tile before, and the two warpgroups take turns in
// issuing products, so that one multiplies while the other computes exponentials.
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/cuda/forward/dense_products.cuh"
#include "ops/tree_attention/cuda/running_state.cuh"

namespace htree::tree_attention {

constexpr int kRowsGroups = 2;
constexpr int kRowsThreads = 128 * (kRowsGroups + 1);
constexpr int kRowsConsumers = 128 * kRowsGroups;
constexpr int kTurnBarrier = 2;  // barriers 2 and 3: warpgroup 0 or 1 may issue its products

// log2 of the tokens of a block: the most whole tokens of G heads in 128 rows, as a power of two, so that a run never
// reaches into two tiles.
__host__ __device__ constexpr int run_tokens_log2(int group) {
  int log2 = 0;
  while ((2 << log2) * group <= 64 * kRowsGroups) {
    ++log2;
  }
  return log2;
}
static_assert((1 << run_tokens_log2(1)) == kDenseTileNodes);

// The rows of a thread block. Token and head of row i are i / G and i % G.
struct RowsTask {
  int batch, kv_head, num_tiles;
  int64_t head_index;
  int64_t first, last;  // tokens of the run that the call asks for, by their positions in the text
  int64_t run;          // first token of the run, asked for or not

  __device__ __forceinline__ RowsTask(const GatherParams& p) {
    const int log2 = run_tokens_log2(p.group);
    const int64_t runs = gridDim.x / p.num_kv_heads;
    kv_head = blockIdx.x % p.num_kv_heads;
    batch = blockIdx.y;
    head_index = int64_t{batch} * p.num_kv_heads + kv_head;
    run = ((p.t0 >> log2) + runs - 1 - blockIdx.x / p.num_kv_heads) << log2;
    first = max(run, p.t0);
    last = min(run + (int64_t{1} << log2), p.t0 + p.num_queries) - 1;
    num_tiles = static_cast<int>(last / kDenseTileNodes) + 1;
  }
  // Rows that stand for no query of the call repeat another.
  __device__ __forceinline__ int64_t token(const GatherParams& p, int row) const {
    return min(max(run + row / p.group, first), last);
  }
  __device__ __forceinline__ bool exists(const GatherParams& p, int row) const {
    return run + row / p.group == token(p, row);
  }
};

template <typename T>
__device__ __forceinline__ bool infinite_or_nan(uint32_t pair, int index) {
  constexpr uint32_t kExponent = __is_same(T, __nv_bfloat16) ? 0x7f80u : 0x7c00u;
  return (pair >> (16 * index) & kExponent) == kExponent;
}

// Zeroes what a weight of 0 would not silence in the last tile of values: its rows behind the last token of the block,
// which may hold anything, and infinities and NaN in the rows of the block's own tokens, which some of its rows do not
// see. Returns whether there were any of the latter. All threads that multiply call.
template <typename T, int kDim>
__device__ __forceinline__ bool silence_values(char* tile, int first, int end) {
  constexpr int kChunks = kDim / 8;
  bool found = false;
  for (int i = threadIdx.x; i < (kDenseTileNodes - first) * kChunks; i += kRowsConsumers) {
    const int row = first + i / kChunks;
    uint4* at = reinterpret_cast<uint4*>(tile + panel_offset(kDenseTileNodes, row, i % kChunks));
    if (row >= end) {
      *at = make_uint4(0, 0, 0, 0);
      continue;
    }
    const uint4 chunk = *at;
    uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    bool any = false;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (infinite_or_nan<T>(words[j / 2], j % 2)) {
        words[j / 2] &= j % 2 ? 0x0000ffffu : 0xffff0000u;
        any = true;
      }
    }
    if (any) {
      *at = make_uint4(words[0], words[1], words[2], words[3]);
      found = true;
    }
  }
  device::fence_async_shared();
  return device::named_barrier_any(kConsumerBarrier, kRowsConsumers, found);
}

// Adds the infinities and NaN of the block's own tokens to the rows that see them. `values` is the last tile in global
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

// What a warpgroup does with the tiles, on which the queries in shared memory are multiplied.
template <typename T, int kDim>
struct RowsConsumer {
  using Shared = AttendShared<kDim, kRowsGroups>;
  const DenseTiles& tiles;
  const RowsTask& task;
  Shared& shared;
  AttendState<T, kDim>& state;
  int64_t first_tile;  // of the K/V head
  int own[2];          // the tokens of this thread's rows, as rows of the last tile
  bool scaled;         // whether keys or queries have powers of two to undo
  float s[64];
  uint32_t weights[8][4];

  __device__ __forceinline__ int group_index() const { return threadIdx.x / 128; }
  __device__ __forceinline__ static int stage(int tile) { return tile % kTopAttendStages; }
  __device__ __forceinline__ static uint32_t parity(int tile) { return tile / kTopAttendStages & 1; }

  __device__ __forceinline__ void release(device::Barrier* barriers, int tile) const {
    if (threadIdx.x % 32 == 0) {
      device::barrier_arrive(&barriers[stage(tile)]);
    }
  }
  __device__ __forceinline__ void start_scores(int tile) {
    const uint64_t queries = device::k_major_descriptor<device::Swizzle::k128>(
        shared.queries + group_index() * 64 * kPanelRowBytes);
    device::barrier_wait(&shared.key_full[stage(tile)], parity(tile));
    device::wgmma_fence();
    multiply_panels<kDim, Shared::kRows, kDenseTileNodes>(
        s, queries, device::k_major_descriptor<device::Swizzle::k128>(shared.keys[stage(tile)]));
    device::wgmma_commit();
  }
  __device__ __forceinline__ void start_values(int tile) {
    const uint64_t values =
        device::mn_major_descriptor<device::Swizzle::k128>(shared.values[stage(tile)], kTopPanelBytes);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDenseTileNodes / 16; ++step) {
      device::wgmma<T, kDim, device::Major::kMN>(state.out, weights[step],
                                                 device::advance(values, step * 16 * kPanelRowBytes), true);
    }
    device::wgmma_commit();
  }
  __device__ __forceinline__ void wait_values(int tile) const {
    device::barrier_wait(&shared.value_full[stage(tile)], parity(tile));
  }
  // Brings the scores to log2 units and takes out the tokens behind a row's own.
  __device__ __forceinline__ void prepare(int tile) {
    if (scaled) {
      undo_powers(s, shared.factors + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4,
                  tiles.scales + (first_tile + tile) * kDenseTileNodes + threadIdx.x % 4 * 2);
    }
    if (tile + 1 == task.num_tiles) {
      const int column = threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        s[i] = i / 4 * 8 + i % 2 + column > own[i / 2 & 1] ? -INFINITY : s[i];
      }
    }
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      weights[i / 4][i % 4] = device::pack_pair<T>(s[2 * i], s[2 * i + 1]);
    }
  }
  // Warpgroup 0 begins. Each arrival has its wait: at the last tile warpgroup 1 has nobody to call.
  __device__ __forceinline__ void begin_turns() const {
    if (group_index() == 1) {
      device::named_barrier_arrive(kTurnBarrier, kRowsConsumers);
    }
  }
  __device__ __forceinline__ void await_turn() const {
    device::named_barrier_sync(kTurnBarrier + group_index(), kRowsConsumers);
  }
  __device__ __forceinline__ void end_turn(int tile) const {
    if (group_index() == 0 || tile + 1 < task.num_tiles) {
      device::named_barrier_arrive(kTurnBarrier + 1 - group_index(), kRowsConsumers);
    }
  }

  __device__ __forceinline__ void run() {
    begin_turns();
    await_turn();
    start_scores(0);
    end_turn(0);
    device::wgmma_wait<0>();
    release(shared.key_empty, 0);
    prepare(0);
    state.weigh(s);
    pack();  // `out` is still zero
    for (int tile = 1; tile < task.num_tiles; ++tile) {
      await_turn();
      start_scores(tile);
      wait_values(tile - 1);
      start_values(tile - 1);
      end_turn(tile);
      device::wgmma_wait<1>();
      release(shared.key_empty, tile);
      prepare(tile);
      state.weigh(s);
      device::wgmma_wait<0>();
      release(shared.value_empty, tile - 1);
      state.rescale();
      pack();
    }
    const int last = task.num_tiles - 1;
    const int first_row = static_cast<int>(task.run % kDenseTileNodes);
    const int end_row = static_cast<int>(task.last % kDenseTileNodes) + 1;
    wait_values(last);
    const bool silenced = silence_values<T, kDim>(shared.values[stage(last)], first_row, end_row);
    start_values(last);
    device::wgmma_wait<0>();
    state.finish();
    if (silenced) {
      add_silenced<T, kDim>(state.out, tiles.values + (first_tile + last) * kTopTileBytes<kDim>, first_row,
                            end_row, own);
    }
  }
};

// Grid: x = runs of tokens, the longest rows first, by K/V heads, which are fastest; y = batch.
template <typename T, int kDim>
__global__ void __launch_bounds__(kRowsThreads, 1) dense_rows_kernel(DenseAttendParams params) {
#if HTREE_SM90A
  extern __shared__ __align__(128) char raw[];
  using Shared = AttendShared<kDim, kRowsGroups>;
  Shared& shared = *aligned_shared<Shared>(raw);
  const AttendParams& attend = params.attend;
  const GatherParams& p = attend.gather;
  const RowsTask task(p);
  const int64_t first_tile = task.head_index * params.tiles.num_tiles;
  init_rings(shared);
  if (threadIdx.x >= kRowsConsumers) {
    device::lower_registers<kCopyRegisters>();
    if (threadIdx.x == kRowsConsumers) {
      copy_tiles<kDim, kRowsGroups>(shared, params.tiles.keys + first_tile * kTopTileBytes<kDim>,
                                    params.tiles.values + first_tile * kTopTileBytes<kDim>, task.num_tiles);
    }
    return;
  }
  device::raise_registers<kConsumeRegisters>();
  bool scaled = scaled_tile(params.tiles.scaled + first_tile, task.num_tiles);
  scaled |= rotate_queries<T, kDim, Shared::kRows, kRowsConsumers, 4>(
      shared.queries, shared.factors, p, threadIdx.x, [&](int row) {
        const int64_t token = task.token(p, row);
        return query_row<T>(p, task.batch, task.kv_head, token - p.t0, row % p.group,
                            static_cast<int>(token));
      });
  scaled = device::named_barrier_any(kConsumerBarrier, kRowsConsumers, scaled);

  const int lane = threadIdx.x % 32;
  const int rows[2] = {static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4,
                       static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + 8};
  AttendState<T, kDim> state;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) {
    state.out[i] = 0.f;
  }
  const int64_t last_tile = int64_t{task.num_tiles - 1} * kDenseTileNodes;
  RowsConsumer<T, kDim> consumer{params.tiles,
                                 task,
                                 shared,
                                 state,
                                 first_tile,
                                 {static_cast<int>(task.token(p, rows[0]) - last_tile),
                                  static_cast<int>(task.token(p, rows[1]) - last_tile)},
                                 scaled};
  consumer.run();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!task.exists(p, rows[h])) {
      continue;
    }
    const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
    const int64_t at = task.batch * attend.state_batch + (task.token(p, rows[h]) - p.t0) * num_heads +
                       int64_t{task.kv_head} * p.group + rows[h] % p.group;
    if (lane % 4 == 0) {
      attend.max[at] = state.largest[h] * kLn2;
      attend.sum[at] = state.sum[h];
    }
    const float inverse = 1.f / state.sum[h];
    uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<T*>(attend.out) + at * kDim + lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      out[4 * j] =
          device::pack_pair<T>(state.out[4 * j + 2 * h] * inverse, state.out[4 * j + 2 * h + 1] * inverse);
    }
  }
#else
  __trap();
#endif
}

template <typename T, int kDim>
cudaError_t launch_dense_rows(const DenseAttendParams& params, cudaStream_t stream) {
  const GatherParams& p = params.attend.gather;
  const int log2 = run_tokens_log2(p.group);
  const int64_t runs = ((p.t0 + p.num_queries - 1) >> log2) - (p.t0 >> log2) + 1;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(runs * p.num_kv_heads), p.num_batches),
                          .threads = kRowsThreads,
                          .shared_bytes = kAttendSharedBytes<kDim, kRowsGroups>};
  return launch_kernel(dense_rows_kernel<T, kDim>, shape, stream, params);
}

}  // namespace htree::tree_attention
