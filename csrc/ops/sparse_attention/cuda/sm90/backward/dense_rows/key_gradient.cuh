// dK and dV of the dense rows on Hopper: docs/semantics/tree_attention.md §1.10.
//
// A thread block has a tile of 128 tokens, 64 for each of two warpgroups, and walks the tiles of query rows from its own
// tokens on: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q. P^T and dS^T are operands A in registers, and both
// sums stay in registers over all rows and heads of the K/V head. A third warpgroup copies the rows.
//
// A token belongs to one thread block, which adds its rows in their order, so nothing is exchanged. dS is multiplied by a
// power of two that the 16 tokens of a warp have in common and rounded to fp16.
//
// With kMasked the rows are those of backward/masked_rows/: a block walks the tiles of rows that have a mark in its
// tokens, each brings the marks along, nothing is rotated, and the sums are always added to what is there.
#pragma once

#include "ops/sparse_attention/cuda/sm90/backward/dense_rows/products.cuh"

namespace htree::tree_attention {

constexpr int kKeyRowStages = 4;
constexpr int kDenseTileParents = kDenseTileNodes / kParentRows;  // one for each consumer warp

template <int kDim>
struct KeyGradientShared {
  char keys[kTopTileBytes<kDim>];
  char values[kTopTileBytes<kDim>];
  char queries[kKeyRowStages][kRowTileBytes<kDim>];
  char gradients[kKeyRowStages][kRowTileBytes<kDim>];
  float numbers[kKeyRowStages][kRowNumbers * kRowTileRows];
  device::Barrier own_full, full[kKeyRowStages], empty[kKeyRowStages];
  alignas(16) uint8_t marks[kKeyRowStages][kDenseTileNodes];  // of masked rows: those of a run's tokens
};
template <int kDim>
constexpr int kKeyGradientBytes = sizeof(KeyGradientShared<kDim>) + 1024;
static_assert(kKeyGradientBytes<128> <= device::kHopperSharedBytes);

// The tokens of a thread block and the tiles of rows that see some of them.
template <bool kMasked>
struct KeyTask {
  int batch, kv_head;
  int tile;      // of tokens
  int row_log2;  // log2 of the tokens of a tile of rows
  int begin;     // first tile of rows, counted from token 0, as is the end
  int end;
  int first_stored;  // what number the first stored tile of rows has
  int64_t head_index;
  int last_token;             // of the queries
  const uint32_t* row_tiles;  // of masked rows, InvertedTiles
  int num_row_tiles;

  __device__ __forceinline__ KeyTask(const RowGradientParams<kMasked>& params) {
    const GatherParams& p = params.gather;
    row_log2 = run_tokens_log2(p.group) - 1;
    kv_head = blockIdx.x % p.num_kv_heads;
    tile = blockIdx.x / p.num_kv_heads;
    batch = blockIdx.y;
    head_index = int64_t{batch} * p.num_kv_heads + kv_head;
    last_token = static_cast<int>(p.t0) + p.num_queries - 1;
    first_stored = static_cast<int>(p.t0) >> (row_log2 + 1) << 1;
    begin = max(first_stored, tile * kDenseTileNodes >> row_log2);
    end = (last_token >> row_log2) + 1;
    if constexpr (kMasked) {
      const int64_t place = head_index * params.marks.width + tile;
      row_tiles = params.inverted.row_tiles + place * params.rows.num_tiles;
      num_row_tiles = __ldg(params.inverted.counts + place);
    }
  }
  // The tiles of rows that the block walks.
  __device__ __forceinline__ int count() const { return kMasked ? num_row_tiles : end - begin; }
};

// All threads of the block call.
template <int kDim>
__device__ __forceinline__ void init_barriers(KeyGradientShared<kDim>& shared) {
  if (threadIdx.x == 0) {
    device::barrier_init(&shared.own_full, 1);
    for (int i = 0; i < kKeyRowStages; ++i) {
      device::barrier_init(&shared.full[i], 1);
      device::barrier_init(&shared.empty[i], kRowsConsumers / 32);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
}

// One thread calls.
template <int kDim, bool kMasked>
__device__ __forceinline__ void copy_key_operands(KeyGradientShared<kDim>& shared,
                                                  const RowGradientParams<kMasked>& params,
                                                  const KeyTask<kMasked>& task) {
  constexpr int kTile = kTopTileBytes<kDim>, kRowTile = kRowTileBytes<kDim>;
  const int64_t tile = task.head_index * params.tiles.num_tiles + task.tile;
  device::barrier_arrive_expect(&shared.own_full, 2 * kTile);
  device::bulk_load(shared.keys, params.tiles.keys + tile * kTile, kTile, &shared.own_full);
  device::bulk_load(shared.values, params.tiles.values + tile * kTile, kTile, &shared.own_full);
  const int64_t stored = task.head_index * params.rows.num_tiles;
  const int64_t first = stored + task.begin - task.first_stored;
  const auto bytes = static_cast<uint32_t>(kMasked ? mark_bytes(params.gather.group) : 0);  // of a tile
  for (int i = 0; i < task.count(); ++i) {
    const int stage = i % kKeyRowStages;
    const uint32_t entry = kMasked ? __ldg(task.row_tiles + i) : 0;
    if (i >= kKeyRowStages) {
      device::barrier_wait(&shared.empty[stage], (i / kKeyRowStages - 1) & 1);
    }
    const int number = static_cast<int>(entry >> 16);  // of the tile of rows
    if constexpr (kMasked) {
      const int64_t run = (stored + number) / 2;  // every run has two tiles of rows
      device::barrier_arrive_expect(&shared.full[stage], 2 * kRowTile + kRowNumberBytes + bytes);
      device::bulk_load(shared.marks[stage],
                        params.marks.marks + (run * params.marks.width + (entry & 0xffff)) * bytes, bytes,
                        &shared.full[stage]);
    } else {
      device::barrier_arrive_expect(&shared.full[stage], 2 * kRowTile + kRowNumberBytes);
    }
    const auto row_tile = [&] { return kMasked ? stored + number : first + i; };
    device::bulk_load(shared.queries[stage], params.rows.queries + row_tile() * kRowTile, kRowTile,
                      &shared.full[stage]);
    device::bulk_load(shared.gradients[stage], params.rows.gradients + row_tile() * kRowTile, kRowTile,
                      &shared.full[stage]);
    device::bulk_load(shared.numbers[stage], params.rows.numbers + row_tile() * kRowNumbers * kRowTileRows,
                      kRowNumberBytes, &shared.full[stage]);
  }
}

// What a warpgroup does with the tiles of rows, whose numbers `i` count from task.begin. A thread has tokens lane / 4 and
// lane / 4 + 8 of its warp and rows 8 j + 2 (lane % 4) and the next. Of masked rows `i` is a place in task.row_tiles. The
// 16 tokens of a warp are a parent, so one bit for each row says whether its list holds them.
template <typename T, int kDim, bool kMasked>
struct KeyGradientConsumer {
  KeyGradientShared<kDim>& shared;
  const KeyTask<kMasked>& task;
  const bool scaled;      // whether keys or queries have powers of two to undo
  const int first_token;  // of the warpgroup
  const float product_factor;
  float scale[2];  // undo the powers of the two keys
  // Of masked rows: how many of them may not see some token of the warpgroup; where the marks of rows `lane` and
  // `lane + 32` are; and bit 8 j + e of a half of the rows: the list of row 8 j + 2 (lane % 4) + e holds the parent.
  int num_crossing, mark_at[2];
  uint32_t listed[2];
  float key_sum[kDim / 2], value_sum[kDim / 2];
  float s[32], dp[32];
  uint32_t weights[4][4], ds[4][4];

  __device__ __forceinline__ static int stage(int i) { return i % kKeyRowStages; }
  __device__ __forceinline__ void wait_rows(int i) const {
    device::barrier_wait(&shared.full[stage(i)], i / kKeyRowStages & 1);
  }
  __device__ __forceinline__ void release(int i) const {
    __syncwarp();  // all lanes have read their numbers
    if (threadIdx.x % 32 == 0) {
      device::barrier_arrive(&shared.empty[stage(i)]);
    }
  }
  __device__ __forceinline__ static uint32_t own_rows() {
    return device::uniform(threadIdx.x / 128) * 64 * kPanelRowBytes;
  }
  __device__ __forceinline__ void start_scores(int i) {
    start_product<__half, kDim, kRowTileRows, kDenseTileNodes, kRowTileRows>(
        s, device::k_major_descriptor<device::Swizzle::k128>(shared.keys + own_rows()),
        device::k_major_descriptor<device::Swizzle::k128>(shared.queries[stage(i)]));
  }
  __device__ __forceinline__ void start_products(int i) {
    start_product<T, kDim, kRowTileRows, kDenseTileNodes, kRowTileRows>(
        dp, device::k_major_descriptor<device::Swizzle::k128>(shared.values + own_rows()),
        device::k_major_descriptor<device::Swizzle::k128>(shared.gradients[stage(i)]));
  }
  __device__ __forceinline__ void start_values(int i) {
    start_sum<T, kDim, 4, kRowTileRows>(value_sum, weights, shared.gradients[stage(i)]);
  }
  __device__ __forceinline__ void start_keys(int i) {
    start_sum<__half, kDim, 4, kRowTileRows>(key_sum, ds, shared.queries[stage(i)]);
  }
  // Numbers of rows 8 j + 2 (lane % 4) and the next.
  __device__ __forceinline__ float2 numbers(int i, RowNumber which, int j) const {
    return *reinterpret_cast<const float2*>(
        &shared.numbers[stage(i)][which * kRowTileRows + 8 * j + threadIdx.x % 4 * 2]);
  }
  // Sets what masked rows need. Their tiles ascend, so those that cross come first, and these begin in the block's tile
  // of tokens, where there are no more than lanes: a tile of rows has at least 4 tokens.
  __device__ __forceinline__ void find_marks(int group) {
    const int lane = threadIdx.x % 32;
    const int end = (first_token + 63 + (1 << task.row_log2) - 1) >> task.row_log2;
    const bool crosses = lane < task.num_row_tiles &&
                         static_cast<int>(__ldg(task.row_tiles + lane) >> 16) + task.first_stored < end;
    num_crossing = __popc(__ballot_sync(device::kFullMask, crosses));
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows that stand for no query have the weight 0 under any marks
      mark_at[half] = min((lane + 32 * half) / group, (1 << task.row_log2) - 1);
    }
  }
  // The rows are there, and so are the marks of their run, of which the tile is one half. All lanes of a warp call.
  __device__ __forceinline__ void read_marks(int i) {
    if constexpr (kMasked) {
      const uint32_t half_of_run = __ldg(task.row_tiles + i) >> 16 & 1;
      const uint8_t* marks = shared.marks[stage(i)] + (half_of_run << task.row_log2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool own = marks[mark_at[half]] >> threadIdx.x / 32 & 1;
        listed[half] = __ballot_sync(device::kFullMask, own) >> threadIdx.x % 4 * 2;
      }
    }
  }
  // What to subtract from the score of row 8 j + 2 (lane % 4) + e: an infinite reference makes the weights of rows whose
  // lists do not hold the parent 0. That fails only where a score is not finite, and then nothing of such a row is.
  __device__ __forceinline__ float reference(float log_sum, int j, int e) const {
    return !kMasked || (listed[j / 4] & 1u << (j % 4 * 8 + e)) != 0 ? log_sum : INFINITY;
  }
  // Whether some row of the tile does not see some token of the warpgroup.
  __device__ __forceinline__ bool crosses(int i) const {
    return kMasked ? i < num_crossing : ((task.begin + i) << task.row_log2) < first_token + 63;
  }
  // Zeroes elements of tokens behind their rows' own.
  __device__ __forceinline__ void mask(int i, float (&x)[32]) const {
    const int token =
        first_token + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 raw = numbers(i, kRowToken, j);
      const int own[2] = {__float_as_int(raw.x), __float_as_int(raw.y)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[4 * j + e] = token + e / 2 * 8 > own[e % 2] ? 0.f : x[4 * j + e];
      }
    }
  }
  __device__ __forceinline__ void times_query_factors(int i, float (&x)[32]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 factor = numbers(i, kQueryFactor, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[4 * j + e] *= e % 2 ? factor.y : factor.x;
      }
    }
  }

  // Replaces scores by weights, once they have arrived.
  __device__ __forceinline__ void weigh(int i) {
    device::pin_registers(s);
    if (scaled) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        s[j] *= scale[j / 2 & 1];
      }
      times_query_factors(i, s);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 log_sum = numbers(i, kLogSum, j);
      log_sum.x = reference(log_sum.x, j, 0);
      log_sum.y = reference(log_sum.y, j, 1);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[4 * j + e] = device::exp2_flushed(s[4 * j + e] - (e % 2 ? log_sum.y : log_sum.x));
      }
    }
    if (crosses(i)) {
      mask(i, s);
    }
    pack_operand<T>(s, weights);
  }
  // dS from weights and dP, once that has arrived.
  __device__ __forceinline__ void differentiate(int i) {
    device::pin_registers(dp);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 delta = numbers(i, kDelta, j);
      delta.x *= product_factor;
      delta.y *= product_factor;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[4 * j + e] *= fmaf(dp[4 * j + e], product_factor, -(e % 2 ? delta.y : delta.x));
      }
    }
    if (scaled) {
      times_query_factors(i, s);
    }
    if (crosses(i)) {  // a weight of 0 does not silence a NaN
      mask(i, s);
    }
    pack_operand<__half>(s, ds);
  }

  __device__ __forceinline__ void run() {
    const int count = task.count();
    // Tiles of rows before the warpgroup's first token. Masked ones are multiplied too: mask() makes their weights 0.
    const int first = kMasked ? 0 : min(max((first_token >> task.row_log2) - task.begin, 0), count);
    for (int i = 0; i < first; ++i) {
      wait_rows(i);
      release(i);
    }
    if (first == count) {
      return;
    }
    device::barrier_wait(&shared.own_full, 0);
    wait_rows(first);
    start_scores(first);
    start_products(first);
    read_marks(first);
    device::wgmma_wait<1>();
    weigh(first);
    start_values(first);
    device::wgmma_wait<0>();
    differentiate(first);
    for (int i = first + 1; i < count; ++i) {
      start_keys(i - 1);
      wait_rows(i);
      start_scores(i);
      device::wgmma_wait<1>();  // both operands in registers are free
      release(i - 1);
      start_products(i);
      read_marks(i);
      device::wgmma_wait<1>();
      weigh(i);
      start_values(i);
      device::wgmma_wait<0>();
      differentiate(i);
    }
    start_keys(count - 1);
    device::wgmma_wait<0>();
    device::pin_registers(key_sum);
    device::pin_registers(value_sum);
  }
};

// The sums of a row, of which this thread has dims 8 j + 2 (lane % 4) and the next, or zeros where there are none yet.
// All are loaded before the first store, which might go to the same address.
template <int kDim>
struct OldSums {
  float2 pairs[kDim / 8];

  __device__ __forceinline__ OldSums(const float* row, bool add) {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const float2* from = reinterpret_cast<const float2*>(row + 8 * j + threadIdx.x % 4 * 2);
      pairs[j] = add ? *from : make_float2(0.f, 0.f);
    }
  }
  __device__ __forceinline__ void store(float* row, int dim, float x, float y) const {
    const float2 old = pairs[dim / 8];
    *reinterpret_cast<float2*>(row + dim) = make_float2(old.x + x, old.y + y);
  }
};

// Adds this thread's elements of row h of an accumulator, times `factor`, to a row of sums or makes them that row.
template <int kDim>
__device__ __forceinline__ void add_row(const float (&sum)[kDim / 2], int h, float factor, float* to,
                                        bool add) {
  const OldSums<kDim> old(to, add);
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    const float* own = sum + 4 * j + 2 * h;
    old.store(to, 8 * j + threadIdx.x % 4 * 2, own[0] * factor, own[1] * factor);
  }
}

// Grid: x = tiles of tokens, those with the most rows first, by K/V heads, which are fastest; y = batch.
template <typename T, int kDim, bool kMasked>
__global__ void __launch_bounds__(kRowsThreads, 1)
    dense_key_gradient_kernel(RowGradientParams<kMasked> params) {
#if HTREE_SM90A
  extern __shared__ __align__(128) char raw[];
  using Shared = KeyGradientShared<kDim>;
  Shared& shared = *aligned_shared<Shared>(raw);
  const GatherParams& p = params.gather;
  const KeyTask<kMasked> task(params);
  if constexpr (kMasked) {
    if (task.num_row_tiles == 0) {
      return;  // nothing to add, for the whole block
    }
  }
  init_barriers(shared);
  if (threadIdx.x >= kRowsConsumers) {
    device::lower_registers<kCopyRegisters>();
    if (threadIdx.x == kRowsConsumers) {
      copy_key_operands<kDim, kMasked>(shared, params, task);
    }
    return;
  }
  device::raise_registers<kConsumeRegisters>();
  const int64_t tile = task.head_index * params.tiles.num_tiles + task.tile;
  bool scaled = scaled_tile(params.tiles.flags + tile, 1);
  scaled |= scaled_tile(
      params.rows.scaled + task.head_index * params.rows.num_tiles + task.begin - task.first_stored,
      task.end - task.begin);
  scaled = device::named_barrier_any(kConsumerBarrier, kRowsConsumers, scaled);

  // Of the 16 tokens of this warp, which are the children of one parent.
  const int parent = task.tile * kDenseTileParents + device::uniform(static_cast<int>(threadIdx.x) / 32);
  const KeyBound bound = parent < p.num_parents
                             ? params.bounds.parents[task.head_index * p.num_parents + parent]
                             : KeyBound{0, 0};
  const QueryBounds queries = params.query_bounds[task.head_index];
  const PowerOfTwo power =
      score_gradient_scale(__uint_as_float(queries.gradient_norm), __uint_as_float(queries.delta),
                           bound.value, exponent_field(__uint_as_float(queries.query_unscale)));
  const int own =
      static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;  // in the tile
  const int first_token =
      task.tile * kDenseTileNodes + device::uniform(static_cast<int>(threadIdx.x) / 128) * 64;
  KeyGradientConsumer<T, kDim, kMasked> consumer{shared, task, scaled, first_token,
                                                 power.scale * kRowWeightUnit<T>};
  if constexpr (kMasked) {
    consumer.find_marks(p.group);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    consumer.scale[h] = params.tiles.scales[tile * kDenseTileNodes + own + 8 * h];
  }
  clear(consumer.key_sum);
  clear(consumer.value_sum);
  consumer.run();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = task.tile * kDenseTileNodes + own + 8 * h;
    if (token > task.last_token) {
      continue;
    }
    const int64_t row = task.head_index * params.sum_rows + token;
    if (params.keys) {
      float* to = params.keys + row * kDim;
      const float factor = power.inverse * kLn2;  // the queries hold the scale of the scores and log2(e)
      if constexpr (kMasked) {
        add_row<kDim>(consumer.key_sum, h, factor, to, /*add=*/true);
      } else {
        const OldSums<kDim> old(to, params.add);
        rotate_back<kDim>(consumer.key_sum, h, p.rope + int64_t{token} * (kDim / 2), factor,
                          [&](int i, float x, float y) { old.store(to, i, x, y); });
      }
    }
    if (params.values) {
      add_row<kDim>(consumer.value_sum, h, kRowWeightUnit<T>, params.values + row * kDim,
                    kMasked || params.add);
    }
  }
#else
  __trap();
#endif
}

template <typename T, int kDim, bool kMasked>
cudaError_t launch_key_gradient_of_rows(const RowGradientParams<kMasked>& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const int64_t tiles = (p.t0 + p.num_queries + kDenseTileNodes - 1) / kDenseTileNodes;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(tiles * p.num_kv_heads), p.num_batches),
                          .threads = kRowsThreads,
                          .shared_bytes = kKeyGradientBytes<kDim>};
  return launch_kernel(dense_key_gradient_kernel<T, kDim, kMasked>, shape, stream, params);
}

template <typename T, int kDim>
cudaError_t launch_dense_key_gradient(const DenseGradientParams& params, cudaStream_t stream) {
  return launch_key_gradient_of_rows<T, kDim, /*kMasked=*/false>(params, stream);
}

}  // namespace htree::tree_attention
