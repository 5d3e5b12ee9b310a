// The decode kernel: a warp's loop over its tiles.
#pragma once

#include "ops/compressed_kv/decode.cuh"
#include "ops/compressed_kv/decode_config.h"
#include "ops/compressed_kv/decode_merge.cuh"
#include "ops/compressed_kv/decode_softmax.cuh"
#include "ops/compressed_kv/decode_split.cuh"
#include "ops/compressed_kv/decode_window.cuh"

namespace htree::compressed_kv {

// What a lane needs to know of every tile.
template <typename Tr>
struct TileReader {
  LaneTable k_table;
  LaneTable v_table;
  LaneRows k;
  LaneRows v;

  __device__ __forceinline__ TileReader(const DecodeParams& p, const StageLayout& layout, int64_t first_row,
                                        const unsigned char* memory, int lane)
      : k_table{memory, 8u * lane},
        v_table{memory + (Tr::kTwoTables ? kSelectorBytes : 0), 8u * lane},
        k(lane_rows(p.k.row_bytes, layout.bitmap[0], layout.values[0], layout.scales[0], first_row, lane)),
        v(lane_rows(p.v.row_bytes, layout.bitmap[1], layout.values[1], layout.scales[1], first_row, lane)) {}

 private:
  // Copies start at multiples of 16 bytes, at or before the first row.
  __device__ static LaneRows lane_rows(int row_bytes, int bitmap, int values, int scales, int64_t first_row,
                                       int lane) {
    const auto before = [first_row](int bytes) { return static_cast<int>(first_row * bytes) & 15; };
    const int g = lane >> 2;
    const int t = lane & 3;
    const int pitch = row_pitch(row_bytes);
    LaneRows at;
    at.bitmap = bitmap + before(Tr::kD / 8) + g * (Tr::kD / 8) + (t * (Tr::kD / 32) & ~3);
    at.values = (values + before(row_bytes) + g * pitch) * 8;
    at.pitch_bits = pitch * 64;
    at.scales = scales + before(2) + 2 * g;
    // Kept in registers, not computed again per tile.
    asm volatile("" : "+r"(at.bitmap), "+r"(at.values), "+r"(at.pitch_bits), "+r"(at.scales));
    return at;
  }
};

__device__ __forceinline__ float load_scale(uint32_t address) {
  uint16_t bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address));
  return __half2float(__ushort_as_half(bits));
}

// The tile at shared address `stage`, whose rows are `tile`. kTail: it has only `num_tokens` rows. kWindow:
// `fits`.
template <bool kTail, bool kWindow, typename Tr>
__device__ __forceinline__ void attend_rows(const TileReader<Tr>& reader, const TileRows<Tr>& tile,
                                            uint32_t stage, int num_tokens, int lane, const Query<Tr>& q,
                                            WarpResult<Tr>& result) {
  const int g = lane >> 2;
  WarpState<Tr::kHeadPairs>& state = result.state;
  float score[2][Tr::kHeadPairs];
  {
    RowPair<Tr> rows =
        row_pair<Tr, Tr::kK, 0>(tile.k_word, tile.ranks, stage * 8 + reader.k.values, reader.k.pitch_bits);
    score_tile<kWindow && Tr::kK == 4, Tr>(rows, reader.k_table, q, score);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = Tr::kK == 16 ? 1.0f : load_scale(stage + reader.k.scales + 16 * half);
#pragma unroll
    for (int i = 0; i < Tr::kHeadPairs; ++i) {
      score[half][i] *= scale;
      if constexpr (kTail) {
        score[half][i] = g + 8 * half < num_tokens ? score[half][i] : kMinusInfinity;
      }
    }
  }
  raise_max(score, state, result.acc);
  RowPair<Tr> rows =
      row_pair<Tr, Tr::kV, 2>(tile.v_word, tile.ranks, stage * 8 + reader.v.values, reader.v.pitch_bits);
  float unit[2] = {1.0f, 1.0f};
  if constexpr (Tr::kV != 16) {
    float scale[2] = {load_scale(stage + reader.v.scales), load_scale(stage + reader.v.scales + 16)};
    if constexpr (kTail) {
      scale[0] = g < num_tokens ? scale[0] : 0.0f;
      scale[1] = g + 8 < num_tokens ? scale[1] : 0.0f;
    }
    // One comparison for both a larger unit and a scale that is NaN or infinite.
    const bool usual = scale[0] <= state.unit && scale[1] <= state.unit;
    if (!__all_sync(0xffffffffu, usual)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!(fabsf(scale[half]) <= 65504.0f)) {
          scale[half] = 0.0f;
#pragma unroll
          for (int i = 0; i < Tr::kWords; ++i) {
            result.poison[i] |= rows.word[half][i];
          }
        }
      }
      raise_unit(scale, state, result.acc);
    }
    unit[0] = scale[0] * state.inverse_unit;
    unit[1] = scale[1] * state.inverse_unit;
  }
  float w[2][2] = {};
#pragma unroll
  for (int i = 0; i < Tr::kHeadPairs; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w[half][i] = device::exp2_flushed(score[half][i] - state.base[i]);
      state.sum[i] += w[half][i];
      w[half][i] *= unit[half];
    }
  }
  uint32_t weight[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    weight[half] = device::transpose_matrix(device::pack_pair<typename Tr::Weight>(w[half][0], w[half][1]));
  }
  weigh_tile<kWindow && Tr::kV == 4, Tr>(rows, reader.v_table, weight[0], weight[1], result.acc);
}

// The tile at shared address `stage`. kTail: it has only `num_tokens` rows.
template <bool kTail, typename Tr>
__device__ __forceinline__ void attend_tile(const TileReader<Tr>& reader, uint32_t stage, int num_tokens,
                                            int lane, const Query<Tr>& q, WarpResult<Tr>& result) {
  const TileRows<Tr> tile =
      load_rows<Tr, kTail>(stage + reader.k.bitmap, stage + reader.v.bitmap, num_tokens, lane);
  constexpr bool kWindows = !kTail && (Tr::kK == 4 || Tr::kV == 4);
  if (kWindows && tile.fits) {
    attend_rows<kTail, kWindows>(reader, tile, stage, num_tokens, lane, q, result);
  } else {
    attend_rows<kTail, false>(reader, tile, stage, num_tokens, lane, q, result);
  }
}

// Opaque, so that it is kept and not read again wherever it is used.
__device__ __forceinline__ int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// What a block keeps for its merge, behind the selector tables.
template <typename Tr>
__host__ __device__ constexpr int window_bytes() {
  return static_cast<int>(sizeof(WindowPart<Tr::kD>));
}

// Grid: B * H_kv * head_chunks * num_splits, splits innermost; blocks of at most kMaxWarps warps. Shared
// memory: the selector tables, WindowPart, the chunks of a tile, then the rings of num_stages stages per warp
// and their padding, or BlockMerge where that and the chunks are smaller.
template <typename Tr>
__global__ void __launch_bounds__(32 * Tr::kMaxWarps, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, int num_stages) {
  extern __shared__ __align__(128) unsigned char memory[];
  const Split s = split_of(p);
  const int lane = lane_index();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const int num_warps = blockDim.x >> 5;
  const WindowRows window_part = window_rows(p, s);
  prefetch_inputs<Tr::kD>(p, s, window_part);
  const StageLayout layout(Tr::kD, p.k.row_bytes, p.v.row_bytes);
  unsigned char* const behind_tables = memory + Tr::kTableBytes;
  auto* chunks = reinterpret_cast<ChunkCopy*>(behind_tables + window_bytes<Tr>());
  const uint32_t ring = device::shared_address(chunks) +
                        chunk_table_bytes(Tr::kD, p.k.row_bytes, p.v.row_bytes) +
                        warp * num_stages * layout.bytes;
  const uint32_t ring_end = ring + num_stages * layout.bytes;
  const int num_tokens = static_cast<int>(s.end - s.begin);
  const int num_tiles = (num_tokens + kTileRows - 1) / kTileRows;
  const int whole_tiles = num_tokens / kTileRows;
  const int64_t first_row = first_row_of(p, s);
  // From this tile on, tiles hold the last row of the tensors.
  const auto last_tile = static_cast<uint32_t>((p.num_rows - first_row - 1) / kTileRows);
  const ChunkCounts counts = fill_chunks(p, layout, Tr::kD, first_row, warp, num_warps, lane, chunks);
  __syncthreads();
  const uint32_t chunk_table = device::shared_address(chunks + lane);
  // Tiles before this one are stored where they are counted and do not hold the last row.
  const uint32_t plain_tiles = p.block_table == nullptr ? last_tile : 0;
  const auto copy = [&](uint32_t to, int tile) {
    auto stored = static_cast<uint32_t>(tile);
    if (stored >= plain_tiles) {
      stored = stored_tile(p, s, tile);
      if (stored >= last_tile) {
        copy_last_tile(p, Tr::kD, first_row, to, stored, lane);
        return;
      }
    }
    copy_tile(p, chunk_table, counts, to, stored);
  };

  for (int i = 0; i < num_stages - 1; ++i) {
    const int tile = warp + i * num_warps;
    if (tile < num_tiles) {
      copy(ring + i * layout.bytes, tile);
    }
    device::commit_copies();
  }

  auto& scratch = *reinterpret_cast<QueryScratch<Tr::kD>*>(memory);  // where the tables come to lie
  auto& window_scores = *reinterpret_cast<WindowScores*>(memory + sizeof(QueryScratch<Tr::kD>));
  static_assert(sizeof(QueryScratch<Tr::kD>) + sizeof(WindowScores) <= kSelectorBytes);
  WindowPart<Tr::kD>* const window =
      p.window.per_split > 0 ? reinterpret_cast<WindowPart<Tr::kD>*>(behind_tables) : nullptr;
  Query<Tr> q;
  stage_query<Tr::kD>(p, s.first_head, s.num_heads, scratch);
  if (window != nullptr) {
    score_window<4 * Tr::kHeadPairs>(p, window_part, scratch.rows, warp, num_warps, lane, window_scores);
    __syncthreads();
    weigh_window(p, s, window_part, window_scores, *window);
  }
  if constexpr (Tr::kK == 16) {
    load_half_query<typename Tr::Pair, Tr::kD>(p, lane, scratch, q);
  } else {
    load_integer_query<Tr::kD>(p, Tr::kK == 4 ? 0.0625f : 1.0f, lane, scratch, q);
  }
  __syncthreads();
  fill_selectors<Tr::kK>(memory);
  if constexpr (Tr::kTwoTables) {
    fill_selectors<Tr::kV>(memory + kSelectorBytes);
  }
  WarpResult<Tr> result;
#pragma unroll
  for (int i = 0; i < 2 * Tr::kGroups; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      result.acc[i][c] = 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < Tr::kWords; ++i) {
    result.poison[i] = 0;
  }
  __syncthreads();

  const TileReader<Tr> reader(p, layout, first_row, memory, lane);
  int deep = num_stages == kMaxStages ? 1 : 0;
  asm volatile("" : "+r"(deep));  // kept in a register
  uint32_t stage = ring;
  uint32_t into = ring_end - layout.bytes;
  int ahead = warp + (num_stages - 1) * num_warps;
  for (int tile = warp; tile < num_tiles; tile += num_warps, ahead += num_warps) {
    if (ahead < num_tiles) {
      copy(into, ahead);
    }
    device::commit_copies();
    if (deep != 0) {
      device::wait_copies<kMaxStages - 1>();
    } else {
      device::wait_copies<kMinStages - 1>();
    }
    __syncwarp();
    if (tile < whole_tiles) {
      attend_tile<false>(reader, stage, kTileRows, lane, q, result);
    } else {
      attend_tile<true>(reader, stage, num_tokens - tile * kTileRows, lane, q, result);
    }
    __syncwarp();  // the stage is free for the next copy
    into = stage;
    stage += layout.bytes;
    stage = stage == ring_end ? ring : stage;
  }
  device::wait_copies<0>();
  __syncthreads();
  auto& shared = *reinterpret_cast<BlockMerge<Tr>*>(chunks);
  auto& part = *reinterpret_cast<SplitPart<Tr::kD>*>(memory);  // where the tables were
  finish_block(p, s, shared, part, window, result, warp, num_warps, lane);
}

}  // namespace htree::compressed_kv
