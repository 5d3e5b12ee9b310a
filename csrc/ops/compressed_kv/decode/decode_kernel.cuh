// The decode kernel for tiles: a warp's loop over its tiles.
#pragma once

#include "device/sm90/pdl.cuh"
#include "ops/compressed_kv/decode/decode.cuh"
#include "ops/compressed_kv/decode/decode_config.h"
#include "ops/compressed_kv/decode/decode_merge.cuh"
#include "ops/compressed_kv/decode/decode_softmax.cuh"
#include "ops/compressed_kv/decode/decode_split.cuh"
#include "ops/compressed_kv/decode/decode_window.cuh"

namespace htree::compressed_kv {

// What a lane must know for every tile.
template <typename Tr>
struct TileReader {
  const unsigned char* k_table;
  const unsigned char* v_table;
  LaneByte byte;
  uint32_t apart;  // tokens from the lane's first row to its second
  LaneRows k;
  LaneRows v;

  __device__ __forceinline__ TileReader(const DecodeParams& p, const StageLayout& layout, int64_t first_row,
                                        const unsigned char* memory, int lane)
      : k_table(memory), v_table(memory + (Tr::kTwoTables ? kSelectorBytes : 0)), byte(lane) {
    apart = spread_of_rows(layout.pitch(0, p.k.row_bytes)) == 1 ? kTileRows / 2 : 1;
    asm volatile("" : "+r"(apart));  // kept, not computed again for each tile
    k = lane_rows<typename Tr::KeyRuns>(p.k.row_bytes, layout.pitch(0, p.k.row_bytes), layout.bitmap[0],
                                        layout.values[0], layout.scales[0], first_row, lane);
    v = lane_rows<typename Tr::ValueRuns>(p.v.row_bytes, layout.pitch(1, p.v.row_bytes), layout.bitmap[1],
                                          layout.values[1], layout.scales[1], first_row, lane);
  }

  __device__ __forceinline__ int first_token(int lane) const { return (lane >> 2) * (apart == 1 ? 2 : 1); }

 private:
  // Copies start at multiples of 16 bytes, at the first row or before it.
  template <typename R>
  __device__ __forceinline__ LaneRows lane_rows(int row_bytes, int pitch, int bitmap, int values, int scales,
                                                int64_t first_row, int lane) const {
    const auto before = [first_row](int bytes) { return static_cast<int>(first_row * bytes) & 15; };
    const int token = first_token(lane);
    LaneRows at;
    at.bitmap = bitmap + before(Tr::kD / 8) + token * (Tr::kD / 8) + (R::kLong ? 4 * (lane & 3) : 0);
    at.values = (values + before(row_bytes) + token * pitch) * 8;
    at.values_step = apart * pitch * 8;
    at.scales = scales + before(2) + 2 * token;
    asm volatile("" : "+r"(at.bitmap), "+r"(at.values), "+r"(at.values_step), "+r"(at.scales));
    return at;
  }
};

__device__ __forceinline__ float load_scale(uint32_t address) {
  uint16_t bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address));
  return __half2float(__ushort_as_half(bits));
}

// Attends to the tile at shared address `stage`. kTail: it has only `num_tokens` rows.
template <bool kTail, typename Tr>
__device__ __forceinline__ void attend_tile(const TileReader<Tr>& reader, uint32_t stage, int num_tokens,
                                            int lane, const Query<Tr>& q, WarpResult<Tr>& result) {
  const int token = reader.first_token(lane);
  const bool present[2] = {!kTail || token < num_tokens,
                           !kTail || token + static_cast<int>(reader.apart) < num_tokens};
  WarpState<Tr::kHeadPairs>& state = result.state;
  float score[2][Tr::kHeadPairs];
  {
    typename Tr::KeyRows rows(stage, reader.k, reader.apart * (Tr::kD / 8), present);
    if (fits_windows(rows)) {
      score_tile<true, Tr>(rows, reader.k_table, reader.byte, q, score);
    } else {
      score_tile<false, Tr>(rows, reader.k_table, reader.byte, q, score);
    }
  }
  typename Tr::ValueRows rows(stage, reader.v, reader.apart * (Tr::kD / 8), present);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = Tr::kK == 16 ? 1.0f : load_scale(stage + reader.k.scales + half * 2 * reader.apart);
#pragma unroll
    for (int i = 0; i < Tr::kHeadPairs; ++i) {
      score[half][i] *= scale;
      if constexpr (kTail) {
        score[half][i] = present[half] ? score[half][i] : kMinusInfinity;
      }
    }
  }
  float scale[2] = {0.0f, 0.0f};
  bool rare = exceeds_limit(score, state);
  if constexpr (Tr::kV != 16) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = load_scale(stage + reader.v.scales + half * 2 * reader.apart);
      scale[half] = present[half] ? scale[half] : 0.0f;
      // One comparison finds both a larger unit and a scale that is NaN or infinite.
      rare = rare || !(fabsf(scale[half]) <= state.unit);
    }
  }
  if (__any_sync(0xffffffffu, rare)) {
    raise_max(score, state, result.acc);
    if constexpr (Tr::kV != 16) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!(fabsf(scale[half]) <= 65504.0f)) {
          scale[half] = 0.0f;
#pragma unroll
          for (int i = 0; i < Tr::kOwnWords; ++i) {
            result.poison[i] |= rows.own_bits(half, i, lane);
          }
        }
      }
      raise_unit(scale, state, result.acc);
    }
  }
  float w[2][2] = {};
#pragma unroll
  for (int i = 0; i < Tr::kHeadPairs; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w[half][i] = device::exp2_flushed(score[half][i] - state.base[i]);
      state.sum[i] += w[half][i];
      if constexpr (Tr::kV != 16) {
        w[half][i] *= scale[half] * state.inverse_unit;
      }
    }
  }
  uint32_t weight[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    weight[half] = device::transpose_matrix(device::pack_pair<typename Tr::Weight>(w[half][0], w[half][1]));
  }
  if (fits_windows(rows)) {
    weigh_tile<true, Tr>(rows, reader.v_table, reader.byte, weight[0], weight[1], result.acc);
  } else {
    weigh_tile<false, Tr>(rows, reader.v_table, reader.byte, weight[0], weight[1], result.acc);
  }
}

// Hidden from the compiler, so that the index is kept and not read again wherever it is used.
__device__ __forceinline__ int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// What a block keeps for its merge, after the selector tables.
template <typename Tr>
__host__ __device__ constexpr int window_bytes() {
  return static_cast<int>(sizeof(WindowPart<Tr::kD>));
}

// What a block needs before its first tile. It lies where the last stages of its warps will be.
template <typename Tr>
__host__ __device__ constexpr int scratch_bytes(int window_tokens) {
  return static_cast<int>(sizeof(QueryScratch<Tr::kD>)) +
         window_tokens * kHeadsPerBlock * static_cast<int>(sizeof(float));
}

// Loads the fragments of the query, and sums this block's share of the dense window into `window` if that is
// not null. `scratch` holds scratch_bytes(). Every thread of the block must call. Selector tables that were
// written before are visible after.
template <typename Tr>
__device__ __forceinline__ void take_query_and_window(const DecodeParams& p, const Split& s,
                                                      const EarlyQuery& early, const WindowRows& window_part,
                                                      EarlyWindow<Tr::kD>& early_window,
                                                      unsigned char* memory, WindowPart<Tr::kD>* window,
                                                      int warp, int num_warps, int lane, Query<Tr>& q) {
  auto& scratch = *reinterpret_cast<QueryScratch<Tr::kD>*>(memory);
  auto& window_scores = *reinterpret_cast<WindowScores*>(memory + sizeof(QueryScratch<Tr::kD>));
  constexpr int kHeads = 4 * Tr::kHeadPairs;
  stage_query<Tr::kD>(p, s.first_head, s.num_heads, early, scratch);
  if (window != nullptr) {  // split_query uses the first warps
    score_window<kHeads>(p, window_part, early_window, scratch.rows, num_warps - 1 - warp, num_warps, lane,
                         window_scores);
  }
  if constexpr (Tr::kIntegerKeys) {
    split_query<kHeads>(warp, num_warps, lane, scratch);
  }
  __syncthreads();
  if (window != nullptr) {
    weigh_window(p, s, window_part, early_window, window_scores, *window);
  }
  if constexpr (Tr::kIntegerKeys) {
    load_integer_query<typename Tr::KeyRuns, Tr::kD>(p, Tr::kK == 4 ? 0.0625f : 1.0f, lane, scratch, q);
  } else {
    load_half_query<typename Tr::KeyRuns, typename Tr::Pair, Tr::kD>(p, lane, scratch, q);
  }
}

// What the host works out for all blocks.
struct TileLaunch {
  StageLayout layout;
  ChunkPlan plan;
  int chunk_table_bytes;
  int num_warps;  // of a block. Taken from here, the addresses of the mainloop stay in uniform registers
  int num_stages;
  int heads_per_kv;
  bool pdl;
};

// Grid: (B * num_splits, H_kv, head_chunks), splits innermost; blocks of at most kMaxWarps warps. Shared
// memory: the selector tables, WindowPart, the table of chunks, then num_stages stages of each warp and their
// padding; or BlockMerge where that is larger than chunks and stages.
template <typename Tr>
__global__ void __launch_bounds__(32 * Tr::kMaxWarps, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ TileLaunch launch) {
  extern __shared__ __align__(128) unsigned char memory[];
  device::pdl_launch_and_wait(launch.pdl);
  const Split s = split_of(p, launch.heads_per_kv);
  const int lane = lane_index();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const int num_warps = launch.num_warps, num_stages = launch.num_stages;
  const WindowRows window_part = window_rows(p, s);
  prefetch_window<Tr::kD>(p, window_part);
  EarlyWindow<Tr::kD> early_window(p, window_part, s.num_heads, num_warps - 1 - warp, lane);
  const EarlyQuery early(p, static_cast<int64_t>(s.first_head) * Tr::kD, s.num_heads * Tr::kD);
  const StageLayout& layout = launch.layout;
  unsigned char* const behind_tables = memory + Tr::kTableBytes;
  auto* chunks = reinterpret_cast<ChunkCopy*>(behind_tables + window_bytes<Tr>());
  const int rings = Tr::kTableBytes + window_bytes<Tr>() + launch.chunk_table_bytes;  // offset
  const int stage_step = num_warps * layout.bytes;  // from a warp's stage to its next one
  const uint32_t ring = device::shared_address(memory) + rings + warp * layout.bytes;
  const uint32_t ring_end = ring + num_stages * stage_step;
  const int num_tokens = static_cast<int>(s.end - s.begin);
  const int num_tiles = (num_tokens + kTileRows - 1) / kTileRows;
  const int64_t first_row = first_row_of(p, s);
  const ChunkCounts counts(p, launch.plan.lists);
  fill_chunks(p, layout, launch.plan, counts, Tr::kD, first_row, chunks);
  __syncthreads();
  const uint32_t chunk_table = device::shared_address(chunks + lane);
  // A tile before this one is stored at its own number and may be copied as a whole. Pages hold whole tiles.
  uint32_t plain_tiles = p.tables.block_table == nullptr ? whole_tiles(p, first_row) : 0;
  asm volatile("" : "+r"(plain_tiles));  // kept in a register
  const auto copy = [&](uint32_t to, int tile) {
    auto stored = static_cast<uint32_t>(tile);
    if (stored >= plain_tiles) {
      stored = stored_tile(p, s, tile);
      if (p.tables.block_table == nullptr && copy_last_tile(p, layout, Tr::kD, first_row, to, stored, lane)) {
        return;
      }
    }
    copy_tile(p, chunk_table, counts, to, stored);
  };
  for (int i = 0; i < num_stages - 1; ++i) {
    const int tile = warp + i * num_warps;
    if (tile < num_tiles) {
      copy(ring + i * stage_step, tile);
    }
    device::commit_copies();
  }

  // The tables need nothing from global memory, for which everything else waits.
  fill_selectors<Tr::kK>(memory);
  if constexpr (Tr::kTwoTables) {
    fill_selectors<Tr::kV>(memory + kSelectorBytes);
  }
  unsigned char* const last_stages = memory + rings + (num_stages - 1) * stage_step;  // not in use yet
  WindowPart<Tr::kD>* const window =
      p.window.per_split > 0 ? reinterpret_cast<WindowPart<Tr::kD>*>(behind_tables) : nullptr;
  Query<Tr> q;
  take_query_and_window<Tr>(p, s, early, window_part, early_window, last_stages, window, warp, num_warps,
                            lane, q);
  WarpResult<Tr> result;
  clear(result);
  __syncthreads();  // the last stages are free for copies

  const TileReader<Tr> reader(p, layout, first_row, memory, lane);
  int deep = num_stages == kMaxStages ? 1 : 0;
  asm volatile("" : "+r"(deep));  // kept in a register
  uint32_t stage = ring, into = ring_end - stage_step;
  const auto advance = [&] {
    __syncwarp();  // the stage is free for the next copy
    into = stage;
    stage += stage_step;
    stage = stage == ring_end ? ring : stage;
  };
  int tile = warp;
  for (int ahead = tile + (num_stages - 1) * num_warps; ahead < num_tiles; ahead += num_warps) {
    copy(into, ahead);
    device::commit_copies();
    if (deep != 0) {
      device::wait_copies<kMaxStages - 1>();
    } else {
      device::wait_copies<kMinStages - 1>();
    }
    __syncwarp();
    attend_tile<false>(reader, stage, kTileRows, lane, q, result);
    advance();
    tile += num_warps;
  }
  for (; tile < num_tiles; tile += num_warps) {
    device::wait_copies<0>();
    __syncwarp();
    attend_tile<true>(reader, stage, num_tokens - tile * kTileRows, lane, q, result);
    advance();
  }
  device::wait_copies<0>();
  __syncthreads();
  auto& shared = *reinterpret_cast<BlockMerge<Tr>*>(chunks);
  auto& inbox = *reinterpret_cast<ClusterInbox<Tr::kD>*>(memory);  // where the tables were
  finish_block(p, s, shared, inbox, window, result, warp, num_warps, lane);
}

}  // namespace htree::compressed_kv
