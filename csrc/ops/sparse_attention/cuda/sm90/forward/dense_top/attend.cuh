// The softmax of a dense top over the nodes that are not selected, as one dense product over all nodes under
// a mask, on Hopper: docs/semantics/tree_attention.md §1.5, §1.7.
//
// The shape is FlashAttention-3's: one warpgroup copies, the others keep 64 query rows each, and the product
// with the keys of one tile runs together with the product of weights and values of the tile before. A block
// has one aligned run of up to 16 tokens, which share n, and all query heads of a kv head. Of the 16 rows of
// a warp, rows i and i + 8 belong to the same token, so a thread needs the mask of one token only.
//
// The file holds first the mask and the rows of a block, then its ring of tiles, then the steps of a tile, then the
// kernel and its launch.
#pragma once

#include "device/sm90/pdl.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/sm90/forward/dense_products.cuh"

namespace htree::tree_attention {

// The mask bits of the 128 candidates of a tile, shifted so that bit 8 j % 32 + c of word j / 4 belongs to
// this lane's column 8 j + 2 (lane % 4) + c.
struct TileMask {
  uint32_t words[4];

  __device__ __forceinline__ void load(const uint32_t* row, int tile) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(row) + tile);
    words[0] = raw.x;
    words[1] = raw.y;
    words[2] = raw.z;
    words[3] = raw.w;
  }
  // Takes out the candidates from `end` on, like those that are selected.
  __device__ __forceinline__ void cut(int end) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = end - 32 * i;
      words[i] |= first <= 0 ? 0xffffffffu : first < 32 ? 0xffffffffu << first : 0u;
    }
  }
  __device__ __forceinline__ void apply(float (&s)[64]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint32_t bits = words[word] >> (lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const bool out = bits >> (i / 4 * 8 + i % 2) & 1;
        s[16 * word + i] = out ? -INFINITY : s[16 * word + i];
      }
    }
  }
};

// Tokens of a block for G heads. With a single head, rows i and i + 8 both stand for it.
__host__ __device__ constexpr int attend_tokens(int group) {
  return group > 8 ? 8 : 16;
}
__host__ __device__ constexpr int attend_groups(int group) {
  return group > 4 ? 2 : 1;  // consumer warpgroups
}

// Where the rows of a block come from.
struct AttendTask {
  int batch, kv_head, rank, num_tiles;
  int half_log2;                    // log2 of the query heads among 8 rows of a warp
  int64_t head_index, block_token;  // first token of the aligned run

  __device__ __forceinline__ AttendTask(const GatherParams& p) {
    const int tokens = attend_tokens(p.group);
    const int64_t first_run = p.t0 / tokens;
    const int64_t runs = gridDim.x / p.num_kv_heads;
    kv_head = blockIdx.x % p.num_kv_heads;
    batch = blockIdx.y;
    head_index = int64_t{batch} * p.num_kv_heads + kv_head;
    block_token = (first_run + runs - 1 - blockIdx.x / p.num_kv_heads) * tokens;
    rank = static_cast<int>(block_token >> log2_of(p.node_span));
    num_tiles = rank < p.list_width ? 0 : (rank + kDenseTileNodes - 1) / kDenseTileNodes;
    half_log2 = log2_of(max(p.group / 2, 1));
  }
  // The query of row `row` of the block, counted from the first of the chunk. Rows that stand
  // for none repeat another.
  __device__ __forceinline__ int64_t query(const GatherParams& p, int row) const {
    const int token = row / 16 * (8 >> half_log2) + (row % 8 >> half_log2);
    const int64_t at = block_token + min(token, attend_tokens(p.group) - 1) - p.t0;
    return min(max(at, int64_t{0}), int64_t{p.num_queries} - 1);
  }
  __device__ __forceinline__ int head(const GatherParams& p, int row) const {
    return min((row / 8 % 2 << half_log2) + (row & ((1 << half_log2) - 1)), p.group - 1);
  }
};

// Barrier `index` of `num_threads` threads; every thread gets the OR of all values.
__device__ __forceinline__ bool named_barrier_or(int index, int num_threads, bool value) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "bar.red.or.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<int>(value)), "r"(index), "r"(num_threads)
      : "memory");
  return any;
}

// ---- the ring of tiles that one thread fills while warpgroups of 64 query rows each multiply

constexpr int kTopAttendStages = 3;

template <int kDim, int kGroups>
struct AttendShared {
  static constexpr int kRows = 64 * kGroups;
  char queries[kPanels<kDim> * kRows * kPanelRowBytes];
  char keys[kTopAttendStages][kTopTileBytes<kDim>];
  char values[kTopAttendStages][kTopTileBytes<kDim>];
  float factors[kRows];
  device::Barrier key_full[kTopAttendStages], key_empty[kTopAttendStages];
  device::Barrier value_full[kTopAttendStages], value_empty[kTopAttendStages];
};
template <int kDim, int kGroups>
constexpr int kAttendSharedBytes = sizeof(AttendShared<kDim, kGroups>) + 1024;
static_assert(kAttendSharedBytes<128, 2> <= device::kHopperSharedBytes);

// All threads of the block call.
template <int kDim, int kGroups>
__device__ __forceinline__ void init_rings(AttendShared<kDim, kGroups>& shared) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kTopAttendStages; ++i) {
      device::barrier_init(&shared.key_full[i], 1);
      device::barrier_init(&shared.key_empty[i], 4 * kGroups);
      device::barrier_init(&shared.value_full[i], 1);
      device::barrier_init(&shared.value_empty[i], 4 * kGroups);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
}

// The copies, made by one thread of their warpgroup.
template <int kDim, int kGroups>
__device__ __forceinline__ void copy_tiles(AttendShared<kDim, kGroups>& shared, const char* keys,
                                           const char* values, int num_tiles) {
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % kTopAttendStages;
    const uint32_t parity = (tile / kTopAttendStages - 1) & 1;
    if (tile >= kTopAttendStages) {
      device::barrier_wait(&shared.key_empty[stage], parity);
    }
    device::barrier_arrive_expect(&shared.key_full[stage], kTopTileBytes<kDim>);
    device::bulk_load(shared.keys[stage], keys + int64_t{tile} * kTopTileBytes<kDim>, kTopTileBytes<kDim>,
                      &shared.key_full[stage]);
    if (tile >= kTopAttendStages) {
      device::barrier_wait(&shared.value_empty[stage], parity);
    }
    device::barrier_arrive_expect(&shared.value_full[stage], kTopTileBytes<kDim>);
    device::bulk_load(shared.values[stage], values + int64_t{tile} * kTopTileBytes<kDim>, kTopTileBytes<kDim>,
                      &shared.value_full[stage]);
  }
}

// Zeroes the rows of a tile of values from `first` on. What lies at or past the query's diagonal block may hold
// anything, NaN included, and a weight of 0 does not silence a NaN. All consumer threads call.
template <int kDim, int kGroups>
__device__ __forceinline__ void clear_values(char* tile, int first) {
  constexpr int kChunks = kPanelRowBytes / 16;
  for (int i = threadIdx.x; i < kPanels<kDim> * (kDenseTileNodes - first) * kChunks; i += 128 * kGroups) {
    const int panel = i / ((kDenseTileNodes - first) * kChunks),
              at = i % ((kDenseTileNodes - first) * kChunks);
    *reinterpret_cast<uint4*>(tile + panel * kTopPanelBytes + first * kPanelRowBytes + at * 16) =
        make_uint4(0, 0, 0, 0);
  }
  device::fence_async_shared();
  device::named_barrier_sync(kConsumerBarrier, 128 * kGroups);
}

template <typename T, int kDim, int kGroups>
__device__ __forceinline__ void attend_tiles(const DenseAttendParams& params, const AttendTask& task,
                                             AttendShared<kDim, kGroups>& shared, bool scaled,
                                             const uint32_t* mask_row, const TileMask& first_mask,
                                             AttendState<T, kDim>& state) {
  constexpr int kRows = 64 * kGroups;
  const int group_idx = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * 16 + lane / 4;
  const int64_t first_tile = task.head_index * params.tiles.num_tiles;
  const uint64_t queries =
      device::k_major_descriptor<device::Swizzle::k128>(shared.queries + group_idx * 64 * kPanelRowBytes);
  float s[64];
  uint32_t weights[8][4];
  const auto start_scores = [&](int tile) {
    device::barrier_wait(&shared.key_full[tile % kTopAttendStages], tile / kTopAttendStages & 1);
    device::wgmma_fence();
    multiply_panels<kDim, kRows, kDenseTileNodes>(
        s, queries, device::k_major_descriptor<device::Swizzle::k128>(shared.keys[tile % kTopAttendStages]));
    device::wgmma_commit();
  };
  const auto start_values = [&](int tile) {
    const uint64_t values = device::mn_major_descriptor<device::Swizzle::k128>(
        shared.values[tile % kTopAttendStages], kTopPanelBytes);
#pragma unroll
    for (int step = 0; step < kDenseTileNodes / 16; ++step) {
      device::wgmma<T, kDim, device::Major::kMN>(state.out, weights[step],
                                                 device::advance(values, step * 16 * kPanelRowBytes), true);
    }
    device::wgmma_commit();
  };
  const auto wait_values = [&](int tile) {
    device::barrier_wait(&shared.value_full[tile % kTopAttendStages], tile / kTopAttendStages & 1);
  };
  const auto release = [&](device::Barrier* barriers, int tile) {
    if (lane == 0) {
      device::barrier_arrive(&barriers[tile % kTopAttendStages]);
    }
  };
  const auto prepare = [&](int tile, const TileMask& loaded) {
    TileMask mask = loaded;
    if (scaled) {
      const float factors[2] = {shared.factors[first_row], shared.factors[first_row + 8]};
      const float* scales = params.tiles.scales + (first_tile + tile) * kDenseTileNodes + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        s[i] *= __ldg(scales + i / 4 * 8 + i % 2);
        s[i] *= factors[i / 2 & 1];
      }
    }
    if ((tile + 1) * kDenseTileNodes > task.rank) {
      mask.cut(task.rank - tile * kDenseTileNodes);
    }
    mask.apply(s);
  };
  const auto pack = [&]() {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      weights[i / 4][i % 4] = device::pack_pair<T>(s[2 * i], s[2 * i + 1]);
    }
  };

  TileMask mask = first_mask, next = first_mask;
  start_scores(0);
  if (task.num_tiles > 1) {
    next.load(mask_row, 1);
  }
  device::wgmma_wait<0>();
  release(shared.key_empty, 0);
  prepare(0, mask);
  state.weigh(s);
  pack();  // `out` is still zero
  for (int tile = 1; tile < task.num_tiles; ++tile) {
    mask = next;
    if (tile + 1 < task.num_tiles) {
      next.load(mask_row, tile + 1);
    }
    start_scores(tile);
    wait_values(tile - 1);
    device::wgmma_fence();
    start_values(tile - 1);
    device::wgmma_wait<1>();
    release(shared.key_empty, tile);
    prepare(tile, mask);
    state.weigh(s);
    device::wgmma_wait<0>();
    release(shared.value_empty, tile - 1);
    state.rescale();
    pack();
  }
  const int last = task.num_tiles - 1;
  wait_values(last);
  if (task.rank % kDenseTileNodes != 0) {
    clear_values<kDim, kGroups>(shared.values[last % kTopAttendStages], task.rank % kDenseTileNodes);
  }
  device::wgmma_fence();
  start_values(last);
  device::wgmma_wait<0>();
  state.finish();
}

// Grid: x = aligned runs of tokens, the longest rows first, by kv heads, which are fastest; y = batch.
template <typename T, int kDim, int kGroups>
__global__ void __launch_bounds__(128 * (kGroups + 1), 1) dense_attend_kernel(DenseAttendParams params) {
#if HTREE_SM90A
  extern __shared__ __align__(128) char raw[];
  using Shared = AttendShared<kDim, kGroups>;
  Shared& shared = *aligned_shared<Shared>(raw);
  const AttendParams& attend = params.attend;
  const GatherParams& p = attend.gather;
  const AttendTask task(p);
  const int64_t first_tile = task.head_index * params.tiles.num_tiles;
  init_rings(shared);
  device::pdl_wait();
  if (threadIdx.x == 0) {
    device::pdl_launch_dependents();
  }
  if (threadIdx.x >= 128 * kGroups) {
    if constexpr (kGroups == 2) {
      device::lower_registers<kCopyRegisters>();
    }
    if (threadIdx.x == 128 * kGroups) {
      copy_tiles<kDim, kGroups>(shared, params.tiles.keys + first_tile * kTopTileBytes<kDim>,
                                params.tiles.values + first_tile * kTopTileBytes<kDim>, task.num_tiles);
    }
    return;
  }
  if constexpr (kGroups == 2) {
    device::raise_registers<kConsumeRegisters>();
  }
  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * 16 + lane / 4;
  const int64_t query = task.query(p, first_row);
  const uint32_t* mask_row =
      attend.selected + task.batch * attend.selected_batch +
      ((query >> log2_of(p.stride)) * p.num_kv_heads + task.kv_head) * attend.mask_words;
  TileMask first_mask;
  bool scaled = false;
  if (task.num_tiles > 0) {
    first_mask.load(mask_row, 0);
    scaled = scaled_tile(params.tiles.flags + first_tile, task.num_tiles);
    scaled |= rotate_queries<T, kDim, Shared::kRows, 128 * kGroups, 4>(
        shared.queries, shared.factors, p, threadIdx.x, [&](int row) {
          return query_row<T>(p, task.batch, task.kv_head, task.query(p, row), task.head(p, row), task.rank);
        });
    scaled = named_barrier_or(kConsumerBarrier, 128 * kGroups, scaled);
  }
  AttendState<T, kDim> state;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) {
    state.out[i] = 0.f;
  }
  if (task.num_tiles > 0) {
    attend_tiles<T, kDim, kGroups>(params, task, shared, scaled, mask_row, first_mask, state);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
    const int64_t head = int64_t{task.kv_head} * p.group + task.head(p, first_row + 8 * row);
    const int64_t at = task.batch * attend.state_batch + query * num_heads + head;
    if (lane % 4 == 0) {
      attend.max[at] = state.largest[row];
      attend.sum[at] = state.sum[row];
    }
    float* partial = attend.partial +
                     ((int64_t{task.batch} * p.num_queries + query) * num_heads + head) * kDim + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      *reinterpret_cast<float2*>(partial + 8 * j) =
          make_float2(state.out[4 * j + 2 * row], state.out[4 * j + 2 * row + 1]);
    }
  }
#else
  __trap();
#endif
}

template <typename T, int kDim, int kGroups>
cudaError_t launch_dense_attend_groups(const DenseAttendParams& params, cudaStream_t stream) {
  const GatherParams& p = params.attend.gather;
  const int64_t tokens = attend_tokens(p.group);
  const int64_t runs = (p.t0 + p.num_queries - 1) / tokens - p.t0 / tokens + 1;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(runs * p.num_kv_heads), p.num_batches),
                          .threads = 128 * (kGroups + 1),
                          .shared_bytes = kAttendSharedBytes<kDim, kGroups>,
                          .pdl = true};
  return launch_kernel(dense_attend_kernel<T, kDim, kGroups>, shape, stream, params);
}

template <typename T, int kDim>
cudaError_t launch_dense_attend(const DenseAttendParams& params, cudaStream_t stream) {
  return attend_groups(params.attend.gather.group) == 2
             ? launch_dense_attend_groups<T, kDim, 2>(params, stream)
             : launch_dense_attend_groups<T, kDim, 1>(params, stream);
}

}  // namespace htree::tree_attention
