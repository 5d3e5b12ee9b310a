// dQ of the dense rows on Hopper: docs/semantics/tree_attention.md §1.10.
//
// A thread block has the 128 rows of a run, as in forward/dense_rows/, and multiplies them with one tile of 128 tokens
// after the other: S = Q K^T, dP = dO V^T, dQ += dS K. One warpgroup copies and two keep 64 rows each. They take turns in
// issuing products, so that one multiplies while the other computes weights. dS is the operand A of its product and never
// leaves the registers.
//
// dS of a row is multiplied by a power of two that follows from the row and from the tokens that it sees, and rounded to
// fp16. A sum over tokens belongs to one thread block, so nothing is exchanged and every bit is the same in every launch.
//
// With kMasked the rows are those of backward/masked_rows/: the tiles of a block are those that its marks list, each
// brings the marks of its parents along, nothing is rotated, and dQ of the layers above is added at the end.
#pragma once

#include "ops/sparse_attention/cuda/sm90/backward/dense_rows/products.cuh"

namespace htree::tree_attention {

// The rows of a thread block. Token and head of row i are i / G and i % G.
template <bool kMasked>
struct RunTask {
  int batch, kv_head, num_tiles;
  int64_t head_index;
  int64_t last;   // token of the run that the call asks for, by its position in the sequence
  int64_t run;    // first token of the run, asked for or not
  int64_t index;  // of masked rows: among the marks

  __device__ __forceinline__ RunTask(const RowGradientParams<kMasked>& params) {
    const GatherParams& p = params.gather;
    const int log2 = run_tokens_log2(p.group);
    const int64_t runs = gridDim.x / p.num_kv_heads;
    kv_head = blockIdx.x % p.num_kv_heads;
    batch = blockIdx.y;
    head_index = int64_t{batch} * p.num_kv_heads + kv_head;
    run = ((p.t0 >> log2) + runs - 1 - blockIdx.x / p.num_kv_heads) << log2;
    last = min(run + (int64_t{1} << log2), p.t0 + p.num_queries) - 1;
    num_tiles = static_cast<int>(last / kDenseTileNodes) + 1;
    if constexpr (kMasked) {
      index = head_index * runs + runs - 1 - blockIdx.x / p.num_kv_heads;
      num_tiles = __ldg(params.marks.counts + index);
    }
  }
  // The tiles up to that of the run's tokens, those that no row needs too.
  __device__ __forceinline__ int end_tile() const {
    return kMasked ? static_cast<int>(last / kDenseTileNodes) + 1 : num_tiles;
  }
};

constexpr int kQueryKeyStages = 3, kQueryValueStages = 2;

template <int kDim>
struct QueryGradientShared {
  char queries[2 * kRowTileBytes<kDim>];  // a tile for each warpgroup
  char gradients[2 * kRowTileBytes<kDim>];
  char keys[kQueryKeyStages][kTopTileBytes<kDim>];
  char values[kQueryValueStages][kTopTileBytes<kDim>];
  device::Barrier rows_full;
  device::Barrier key_full[kQueryKeyStages], key_empty[kQueryKeyStages];
  device::Barrier value_full[kQueryValueStages], value_empty[kQueryValueStages];
  alignas(
      16) uint8_t marks[kQueryKeyStages][kDenseTileNodes];  // of masked rows: they come and go with the keys
};
template <int kDim>
constexpr int kQueryGradientBytes = sizeof(QueryGradientShared<kDim>) + 1024;
static_assert(kQueryGradientBytes<128> <= device::kHopperSharedBytes);

// All threads of the block call.
template <int kDim>
__device__ __forceinline__ void init_barriers(QueryGradientShared<kDim>& shared) {
  if (threadIdx.x == 0) {
    device::barrier_init(&shared.rows_full, 1);
    for (int i = 0; i < kQueryKeyStages; ++i) {
      device::barrier_init(&shared.key_full[i], 1);
      device::barrier_init(&shared.key_empty[i], kRowsConsumers / 32);
    }
    for (int i = 0; i < kQueryValueStages; ++i) {
      device::barrier_init(&shared.value_full[i], 1);
      device::barrier_init(&shared.value_empty[i], kRowsConsumers / 32);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
}

// One thread calls. `row_tile` is the first of the run's two tiles.
template <int kDim, bool kMasked>
__device__ __forceinline__ void copy_query_operands(QueryGradientShared<kDim>& shared,
                                                    const RowGradientParams<kMasked>& params,
                                                    const RunTask<kMasked>& task, int64_t row_tile) {
  constexpr int kTile = kTopTileBytes<kDim>;
  device::barrier_arrive_expect(&shared.rows_full, 4 * kRowTileBytes<kDim>);
  device::bulk_load(shared.queries, params.rows.queries + row_tile * kRowTileBytes<kDim>,
                    2 * kRowTileBytes<kDim>, &shared.rows_full);
  device::bulk_load(shared.gradients, params.rows.gradients + row_tile * kRowTileBytes<kDim>,
                    2 * kRowTileBytes<kDim>, &shared.rows_full);
  const int64_t first = task.head_index * params.tiles.num_tiles;
  const auto bytes = static_cast<uint32_t>(kMasked ? mark_bytes(params.gather.group) : 0);  // of a tile
  for (int tile = 0; tile < task.num_tiles; ++tile) {
    const int key = tile % kQueryKeyStages, value = tile % kQueryValueStages;
    if (tile >= kQueryKeyStages) {
      device::barrier_wait(&shared.key_empty[key], (tile / kQueryKeyStages - 1) & 1);
    }
    int64_t place = first + tile;
    if constexpr (kMasked) {
      const int64_t mark = task.index * params.marks.width + tile;
      place = first + __ldg(params.marks.tiles + mark);
      device::barrier_arrive_expect(&shared.key_full[key], kTile + bytes);
      device::bulk_load(shared.marks[key], params.marks.marks + mark * bytes, bytes, &shared.key_full[key]);
    } else {
      device::barrier_arrive_expect(&shared.key_full[key], kTile);
    }
    device::bulk_load(shared.keys[key], params.tiles.keys + place * kTile, kTile, &shared.key_full[key]);
    if (tile >= kQueryValueStages) {
      device::barrier_wait(&shared.value_empty[value], (tile / kQueryValueStages - 1) & 1);
    }
    device::barrier_arrive_expect(&shared.value_full[value], kTile);
    device::bulk_load(shared.values[value], params.tiles.values + place * kTile, kTile,
                      &shared.value_full[value]);
  }
}

// What a warpgroup does with the tiles.
template <typename T, int kDim, bool kMasked>
struct QueryGradientConsumer {
  QueryGradientShared<kDim>& shared;
  const float* scales;  // of the keys of the K/V head
  const RunTask<kMasked>& task;
  const bool scaled;  // whether keys or queries have powers of two to undo
  // Of this thread's two rows:
  int own[2];                  // the tokens, as rows of the last tile
  const float* query_factors;  // those of the first and, 8 further on, of the second
  float log_sum[2];
  float product_factor[2], delta[2];  // in the units of dS
  // Of masked rows: the tiles of the task, which of a tile's marks are those of this thread's rows, and these marks.
  const uint16_t* marked_tiles;
  int mark_at[2], marks[2];
  float sum[kDim / 2];
  float s[64], dp[64];
  uint32_t ds[8][4];

  __device__ __forceinline__ static int group_index() { return threadIdx.x / 128; }
  __device__ __forceinline__ static void release(device::Barrier* barrier) {
    if (threadIdx.x % 32 == 0) {
      device::barrier_arrive(barrier);
    }
  }
  __device__ __forceinline__ void start_scores(int tile) {
    const int stage = tile % kQueryKeyStages;
    device::barrier_wait(&shared.key_full[stage], tile / kQueryKeyStages & 1);
    start_product<__half, kDim, 128, kRowTileRows, kDenseTileNodes>(
        s,
        device::k_major_descriptor<device::Swizzle::k128>(shared.queries + device::uniform(group_index()) *
                                                                               kRowTileBytes<kDim>),
        device::k_major_descriptor<device::Swizzle::k128>(shared.keys[stage]));
  }
  __device__ __forceinline__ void start_products(int tile) {
    const int stage = tile % kQueryValueStages;
    device::barrier_wait(&shared.value_full[stage], tile / kQueryValueStages & 1);
    start_product<T, kDim, 128, kRowTileRows, kDenseTileNodes>(
        dp,
        device::k_major_descriptor<device::Swizzle::k128>(shared.gradients + device::uniform(group_index()) *
                                                                                 kRowTileBytes<kDim>),
        device::k_major_descriptor<device::Swizzle::k128>(shared.values[stage]));
  }
  __device__ __forceinline__ void start_sums(int tile) {
    start_sum<__half, kDim, 8, kDenseTileNodes>(sum, ds, shared.keys[tile % kQueryKeyStages]);
  }
  // The keys are there, and so are their marks.
  __device__ __forceinline__ void read_marks(int tile) {
    if constexpr (kMasked) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        marks[h] = shared.marks[tile % kQueryKeyStages][mark_at[h]];
      }
    }
  }
  __device__ __forceinline__ void release_keys(int tile) const {
    if constexpr (kMasked) {
      __syncwarp();  // every lane has read its marks
    }
    release(&shared.key_empty[tile % kQueryKeyStages]);
  }
  // The factors of this thread's columns.
  __device__ __forceinline__ const float* key_scales(int tile) const {
    int place = tile;
    if constexpr (kMasked) {
      place = __ldg(marked_tiles + tile);
    }
    return scales + place * kDenseTileNodes + threadIdx.x % 4 * 2;
  }
  // What to subtract from a score before it becomes a weight. 16 columns are a parent, and an infinite reference makes the
  // weights of those that a row's list does not hold 0. That fails only where a score is not finite. Then the mean of the
  // parent is not finite either, nor is anything of the row.
  __device__ __forceinline__ float reference(int i) const {
    if constexpr (kMasked) {
      return (marks[i / 2 & 1] & 1 << i / 8) != 0 ? log_sum[i / 2 & 1] : INFINITY;
    } else {
      return log_sum[i / 2 & 1];
    }
  }
  __device__ __forceinline__ bool masked(int i) const {
    return i / 4 * 8 + i % 2 + static_cast<int>(threadIdx.x) % 4 * 2 > own[i / 2 & 1];
  }

  // Replaces scores by weights, once they have arrived.
  __device__ __forceinline__ void weigh(int tile) {
    device::pin_registers(s);
    if (scaled) {
      undo_powers(s, query_factors, key_scales(tile));
    }
    if (tile + 1 == task.num_tiles) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        s[i] = masked(i) ? -INFINITY : s[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      s[i] = device::exp2_flushed(s[i] - reference(i));
    }
  }
  // dS from weights and dP, once that has arrived.
  __device__ __forceinline__ void differentiate(int tile) {
    device::pin_registers(dp);
    release(&shared.value_empty[tile % kQueryValueStages]);
    if (tile + 1 == task.num_tiles) {  // a weight of 0 does not silence a NaN
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        dp[i] = masked(i) ? 0.f : dp[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      s[i] *= fmaf(dp[i], product_factor[i / 2 & 1], -delta[i / 2 & 1]);
    }
    if (scaled) {
      const float* from = key_scales(tile);
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        s[i] *= __ldg(from + i / 4 * 8 + i % 2);
      }
    }
    pack_operand<__half>(s, ds);
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
    start_products(0);
    end_turn(0);
    read_marks(0);
    device::wgmma_wait<1>();
    weigh(0);
    device::wgmma_wait<0>();
    differentiate(0);
    for (int tile = 1; tile < task.num_tiles; ++tile) {
      await_turn();
      start_sums(tile - 1);
      start_scores(tile);
      device::wgmma_wait<1>();  // dS is free
      release_keys(tile - 1);
      start_products(tile);
      end_turn(tile);
      read_marks(tile);
      device::wgmma_wait<1>();
      weigh(tile);
      device::wgmma_wait<0>();
      differentiate(tile);
    }
    // All scores of the last tile are there, so its keys may change.
    const int last = task.num_tiles - 1;
    device::named_barrier_sync(kConsumerBarrier, kRowsConsumers);
    silence_values<__half, kDim>(shared.keys[last % kQueryKeyStages],
                                 static_cast<int>(task.run % kDenseTileNodes),
                                 static_cast<int>(task.last % kDenseTileNodes) + 1);
    start_sums(last);
    device::wgmma_wait<0>();
    device::pin_registers(sum);
  }
};

// The bound of the keys and values that the row of `token`, -1 for none, multiplies: those up to its own, and of a caller's
// masked row those of its list.
template <bool kMasked>
__device__ __forceinline__ KeyBound bound_of_row(const RowGradientParams<kMasked>& params, int64_t head_index,
                                                 int token) {
  if (token < 0) {
    return {0, 0};
  }
  if constexpr (kMasked) {
    if (params.list_bounds) {
      return params.list_bounds[head_index * params.gather.num_lists +
                                list_of(params.gather, token - params.gather.t0)];
    }
  }
  const int64_t parent = head_index * params.gather.num_parents + token / kParentRows;
  return larger(params.bounds.earlier[parent],
                params.bounds.nodes[parent * kParentRows + token % kParentRows]);
}

// Adds dQ of the layers above, `before` or null, to this thread's elements of a row, times `factor`, and rounds them.
template <typename T, int kDim>
__device__ __forceinline__ void store_query_row(const float (&sum)[kDim / 2], int h, float factor,
                                                const float* before, T* out) {
  const int column = threadIdx.x % 4 * 2;
  float2 pairs[kDim / 8];
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    pairs[j] =
        before ? __ldg(reinterpret_cast<const float2*>(before + 8 * j + column)) : make_float2(0.f, 0.f);
  }
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    const float* own = sum + 4 * j + 2 * h;
    *reinterpret_cast<uint32_t*>(out + 8 * j + column) =
        device::pack_pair<T>(own[0] * factor + pairs[j].x, own[1] * factor + pairs[j].y);
  }
}

// Grid: x = runs of tokens, the longest rows first, by K/V heads, which are fastest; y = batch.
template <typename T, int kDim, bool kMasked>
__global__ void __launch_bounds__(kRowsThreads, 1)
    dense_query_gradient_kernel(RowGradientParams<kMasked> params) {
#if HTREE_SM90A
  extern __shared__ __align__(128) char raw[];
  using Shared = QueryGradientShared<kDim>;
  Shared& shared = *aligned_shared<Shared>(raw);
  const GatherParams& p = params.gather;
  const RunTask<kMasked> task(params);
  const int log2 = run_tokens_log2(p.group);
  const int64_t row_tile =
      task.head_index * params.rows.num_tiles + (((task.run >> log2) - (p.t0 >> log2)) << 1);
  init_barriers(shared);
  if (threadIdx.x >= kRowsConsumers) {
    device::lower_registers<kCopyRegisters>();
    if (threadIdx.x == kRowsConsumers) {
      copy_query_operands<kDim, kMasked>(shared, params, task, row_tile);
    }
    return;
  }
  device::raise_registers<kConsumeRegisters>();
  const int64_t first_tile = task.head_index * params.tiles.num_tiles;
  bool scaled = scaled_tile(params.tiles.flags + first_tile, task.end_tile());
  scaled |= scaled_tile(params.rows.scaled + row_tile, 2);
  scaled = device::named_barrier_any(kConsumerBarrier, kRowsConsumers, scaled);

  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
  const int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;  // of the tile
  QueryGradientConsumer<T, kDim, kMasked> consumer{shared, params.tiles.scales + first_tile * kDenseTileNodes,
                                                   task, scaled};
  if constexpr (kMasked) {
    consumer.marked_tiles = params.marks.tiles + task.index * params.marks.width;
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // rows that stand for no query have the weight 0 under any marks
      const int half = 1 << (log2 - 1);
      consumer.mark_at[h] = group * half + min((first_row + 8 * h) / p.group, half - 1);
    }
  }
  device::barrier_wait(&shared.rows_full, 0);
  const float* numbers = params.rows.numbers + (row_tile + group) * kRowNumbers * kRowTileRows + first_row;
  consumer.query_factors = numbers + kQueryFactor * kRowTileRows;
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto number = [&](RowNumber which) { return numbers[which * kRowTileRows + 8 * h]; };
    const KeyBound bound = bound_of_row<kMasked>(params, task.head_index, __float_as_int(number(kRowToken)));
    const PowerOfTwo power =
        score_gradient_scale(number(kGradientNorm), number(kDelta), bound.value, bound.unscale);
    inverse[h] = power.inverse;
    consumer.own[h] = __float_as_int(number(kRowToken)) - (task.end_tile() - 1) * kDenseTileNodes;
    consumer.log_sum[h] = number(kLogSum);
    consumer.product_factor[h] = power.scale * kRowWeightUnit<T>;
    consumer.delta[h] = number(kDelta) * consumer.product_factor[h];
  }
  clear(consumer.sum);
  consumer.run();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t token = __float_as_int(numbers[kRowToken * kRowTileRows + 8 * h]);
    if (token < 0) {
      continue;
    }
    const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
    const int64_t at = task.batch * params.states.batch + (token - p.t0) * num_heads +
                       int64_t{task.kv_head} * p.group + (first_row + 8 * h) % p.group;
    T* out = static_cast<T*>(params.query_gradient) + at * kDim;
    if constexpr (kMasked) {
      const int64_t row = (int64_t{task.batch} * p.num_queries + token - p.t0) * num_heads +
                          int64_t{task.kv_head} * p.group + (first_row + 8 * h) % p.group;
      store_query_row<T, kDim>(consumer.sum, h, params.scale * inverse[h],
                               params.query_sums ? params.query_sums + row * kDim : nullptr, out);
    } else {
      rotate_back<kDim>(consumer.sum, h, p.rope + token * (kDim / 2), params.scale * inverse[h],
                        [&](int dim, float x, float y) {
                          *reinterpret_cast<uint32_t*>(out + dim) = device::pack_pair<T>(x, y);
                        });
    }
  }
#else
  __trap();
#endif
}

template <typename T, int kDim, bool kMasked>
cudaError_t launch_query_gradient_of_rows(const RowGradientParams<kMasked>& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const int64_t runs = num_runs(p.t0, p.num_queries, p.group);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(runs * p.num_kv_heads), p.num_batches),
                          .threads = kRowsThreads,
                          .shared_bytes = kQueryGradientBytes<kDim>};
  return launch_kernel(dense_query_gradient_kernel<T, kDim, kMasked>, shape, stream, params);
}

template <typename T, int kDim>
cudaError_t launch_dense_query_gradient(const DenseGradientParams& params, cudaStream_t stream) {
  return launch_query_gradient_of_rows<T, kDim, /*kMasked=*/false>(params, stream);
}

}  // namespace htree::tree_attention
