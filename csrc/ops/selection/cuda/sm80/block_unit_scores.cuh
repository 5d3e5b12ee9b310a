// Maxima over units of 16 tokens on the tensor cores: a warp has 32 leaders as rows, and the tokens of a tile, which
// the warps of a thread block share, are the columns of its products. docs/semantics/selection.md §9.1
//
// The columns of a unit lie in the four lanes of a quad. Eight units are reduced together: each exchange halves what a
// lane holds, so that 12 of them, and not 32, leave every lane with the maxima of two units for its two rows.
#pragma once

#include "device/mma.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/any/block_documents.cuh"
#include "ops/selection/plan/block_launch.h"

namespace htree::tree_attention {

// d is at most 16 * kMostSteps.
template <typename Element, int kMostSteps_>
struct UnitScoreTraits {
  using T = Element;
  static constexpr int kMostSteps = kMostSteps_;  // of a product, 16 elements each
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * device::kWarpSize;
  static constexpr int kBlocks = kMostSteps <= 2 ? 4 : 2;  // on a multiprocessor
  static constexpr int kRowTiles = 2;                      // of a warp, 16 leaders each
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kLeaders = kWarps * kRows;
  static constexpr int kUnits = static_cast<int>(kTileUnits);
  static constexpr int kTokens = kUnits * static_cast<int>(kUnitTokens);  // of a tile
  static constexpr int kStages = 2;
  static_assert(kLeaders == kTensorCoreLeaders && kUnitsOfSplit % (4 * kUnits) == 0);
  // Rows of a tile are an odd number of 16-byte groups apart, so that the eight rows of a matrix lie in different banks.
  static constexpr int pitch(int d) { return 2 * d + 16; }
  static constexpr int stage_bytes(int d) { return kTokens * pitch(d); }
};

// The rows of a lane: row and row + 8 of each product, one behind the other.
template <int kSides>
struct UnitRows {
  int32_t slot[kSides];
  bool valid[kSides];
};

// The queries of a warp as A operands: element 2 * (lane % 4) and the next of rows lane / 4 and lane / 4 + 8, then the
// same of the elements 8 further on.
template <typename Tr>
__device__ __forceinline__ void load_queries(const BlockScoreParams<typename Tr::T>& params,
                                             const BlockDocument& document,
                                             const UnitRows<2 * Tr::kRowTiles>& rows,
                                             uint32_t (&a)[Tr::kRowTiles][Tr::kMostSteps][4]) {
  using T = typename Tr::T;
  const BlockChunk& chunk = params.chunk;
  const T* head = params.query.data + document.query +
                  (chunk.first_head + static_cast<int64_t>(blockIdx.z)) * params.query.head;
  const int column = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
  for (int tile = 0; tile < Tr::kRowTiles; ++tile) {
#pragma unroll
    for (int step = 0; step < Tr::kMostSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int side = 2 * tile + i % 2;
        const int at = 16 * step + column + 8 * (i / 2);
        uint32_t pair = 0;
        if (rows.valid[side] && at < params.d) {
          const int64_t leader = rows.slot[side] - document.first_slot;
          pair = *reinterpret_cast<const uint32_t*>(head + leader * chunk.stride * params.query.row + at);
        }
        a[tile][step][i] = pair;
      }
    }
  }
}

// Copies the keys of a head into stages, tile after tile. A thread copies one pack of 8 elements of some tokens: the next
// power of two of a token's packs share it, so that no address takes a division.
template <typename Tr>
class TileCopies {
 public:
  using T = typename Tr::T;

  // Of `keys` those before `num_tokens` are read; later ones become zeros.
  __device__ __forceinline__ TileCopies(const T* keys, int64_t key_row, int64_t num_tokens, int32_t d)
      : keys_(keys), key_row_(key_row), num_tokens_(num_tokens) {
    const int packs = d / 8, log2 = packs > 1 ? 32 - __clz(packs - 1) : 0;
    pack_ = static_cast<int>(threadIdx.x) & ((1 << log2) - 1);
    token_ = static_cast<int>(threadIdx.x) >> log2;
    step_ = Tr::kThreads >> log2;
    takes_part_ = pack_ < packs;
    pitch_ = Tr::pitch(d);
  }

  __device__ __forceinline__ void start(int64_t first_token, uint32_t stage) const {
    if (!takes_part_) {
      return;
    }
    const T* from = keys_ + (first_token + token_) * key_row_ + pack_ * 8;
    uint32_t to = stage + token_ * pitch_ + pack_ * 16;
    const int64_t num = num_tokens_ - first_token;
#pragma unroll 1
    for (int token = token_; token < Tr::kTokens; token += step_) {
      const bool inside = token < num;
      device::copy_async_16_prefix(to, inside ? from : keys_, inside ? 16 : 0);
      from += step_ * key_row_;
      to += step_ * pitch_;
    }
  }

 private:
  const T* keys_;
  int64_t key_row_, num_tokens_;
  int pack_, token_, step_, pitch_;
  bool takes_part_;
};

// most[side][u]: the largest product of a row, as UnitRows has them, with this lane's tokens of unit u.
template <typename Tr>
__device__ __forceinline__ void multiply_tile(const uint32_t (&a)[Tr::kRowTiles][Tr::kMostSteps][4],
                                              int32_t d, uint32_t stage,
                                              float (&most)[2 * Tr::kRowTiles][Tr::kUnits]) {
  const int lane = static_cast<int>(threadIdx.x % device::kWarpSize);
  // Matrices: tokens 0 to 7, elements 0 to 7 and 8 to 15; then tokens 8 to 15.
  const int token = lane % 8 + 8 * (lane / 16), element = 8 * (lane / 8 % 2);
  const uint32_t address = stage + token * Tr::pitch(d) + 2 * element;
#pragma unroll
  for (int unit = 0; unit < Tr::kUnits; ++unit) {
    float c[Tr::kRowTiles][2][4] = {};
#pragma unroll
    for (int step = 0; step < Tr::kMostSteps; ++step) {
      if (16 * step < d) {
        uint32_t b[4];
        device::load_matrices(b, address + unit * static_cast<int>(kUnitTokens) * Tr::pitch(d) + 32 * step);
#pragma unroll
        for (int tile = 0; tile < Tr::kRowTiles; ++tile) {
          device::mma_16x8x16<typename Tr::T>(c[tile][0], a[tile][step], b[0], b[1]);
          device::mma_16x8x16<typename Tr::T>(c[tile][1], a[tile][step], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int side = 0; side < 2 * Tr::kRowTiles; ++side) {
      const float(&of_row)[2][4] = c[side / 2];
      const int at = side % 2 * 2;
      most[side][unit] =
          fmaxf(fmaxf(of_row[0][at], of_row[0][at + 1]), fmaxf(of_row[1][at], of_row[1][at + 1]));
    }
  }
}

// Leaves the maxima over a quad of units 2 * (lane % 4) and the next in `pair`. NaN loses, and becomes -inf.
template <int kUnits>
__device__ __forceinline__ float2 reduce_quad(const float (&values)[kUnits]) {
  static_assert(kUnits == 8);
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  float half[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sent = upper ? values[i] : values[i + 4];
    const float kept = upper ? values[i + 4] : values[i];
    half[i] = fmaxf(kept, __shfl_xor_sync(device::kFullMask, sent, 2));
  }
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sent = odd ? half[i] : half[i + 2];
    const float kept = odd ? half[i + 2] : half[i];
    pair[i] =
        fmaxf(fmaxf(kept, __shfl_xor_sync(device::kFullMask, sent, 1)), device::negative_infinity<float>());
  }
  return make_float2(pair[0], pair[1]);
}

// Of what the lanes of a quad have for a row.
__device__ __forceinline__ float largest_of_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(device::kFullMask, value, 1));
  return fmaxf(value, __shfl_xor_sync(device::kFullMask, value, 2));
}

// The units [first_unit, first_unit + kUnitsOfSplit) before the diagonal blocks of leaders of one sequence.
template <typename Tr>
__device__ __forceinline__ void score_split(const BlockScoreParams<typename Tr::T>& params,
                                            const BlockDocument& document, const LeaderRange& leaders,
                                            int32_t first_slot, uint8_t* stages) {
  const BlockChunk& chunk = params.chunk;
  const int32_t units_of_block = chunk.block_size / static_cast<int32_t>(kUnitTokens);
  const int64_t first_unit = static_cast<int64_t>(blockIdx.x) * kUnitsOfSplit;
  const int64_t units =
      static_cast<int64_t>(diagonal_block(chunk, document, leaders.end - 1)) * units_of_block;
  const int64_t last_unit = min(units, first_unit + kUnitsOfSplit);
  if (first_unit >= last_unit) {
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  constexpr int kSides = 2 * Tr::kRowTiles;
  UnitRows<kSides> rows;
  int32_t most_units = 0;  // before a diagonal block
#pragma unroll
  for (int side = 0; side < kSides; ++side) {
    rows.slot[side] = first_slot + warp * Tr::kRows + lane / 4 + 8 * side;
    const int32_t leader = rows.slot[side] - document.first_slot;
    rows.valid[side] = leader >= leaders.begin && leader < leaders.end;
    most_units =
        max(most_units, rows.valid[side] ? diagonal_block(chunk, document, leader) * units_of_block : 0);
  }
  uint32_t a[Tr::kRowTiles][Tr::kMostSteps][4];
  load_queries<Tr>(params, document, rows, a);
  // Every warp skips the tiles that none of its leaders looks at.
  most_units = __reduce_max_sync(device::kFullMask, most_units);

  const auto* keys = params.key.data + document.key +
                     (chunk.first_head + static_cast<int64_t>(blockIdx.z)) * params.key.head;
  const TileCopies<Tr> copies(keys, params.key.row, last_unit * kUnitTokens, params.d);
  const uint32_t stage = device::shared_address(stages);
  const auto stage_of = [&](int number) {
    return stage + static_cast<uint32_t>(number % Tr::kStages) * Tr::stage_bytes(params.d);
  };
  const auto start = [&](int64_t unit, int number) {
    if (unit < last_unit) {
      copies.start(unit * kUnitTokens, stage_of(number));
    }
    device::commit_copies();
  };
  __syncthreads();  // the stages may still be read for another sequence
  start(first_unit, 0);
  // Of the first row of this lane; the others follow, 8 rows apart.
  float* scores = score_row(chunk, static_cast<int32_t>(blockIdx.z), rows.slot[0]);
  float* of_tiles = tile_scores(chunk, static_cast<int32_t>(blockIdx.z), rows.slot[0]);
  float tiles[kSides] = {};  // the largest of one tile of four, of each row
  int number = 0;
  for (int64_t unit = first_unit; unit < last_unit; unit += Tr::kUnits, ++number) {
    start(unit + Tr::kUnits, number + 1);
    device::wait_copies<1>();
    __syncthreads();
    if (unit < most_units) {
      float most[kSides][Tr::kUnits];
      multiply_tile<Tr>(a, params.d, stage_of(number), most);
#pragma unroll
      for (int side = 0; side < kSides; ++side) {
        const float2 of_row = reduce_quad(most[side]);
        if (rows.valid[side]) {  // a row of scores holds whole tiles
          *reinterpret_cast<float2*>(scores + 8 * side * chunk.row + unit + 2 * (lane % 4)) = of_row;
        }
        if (chunk.tiles != nullptr) {
          const float largest = largest_of_quad(fmaxf(of_row.x, of_row.y));
          tiles[side] = number % 4 == lane % 4 ? largest : tiles[side];
        }
      }
    }
    // Four tiles of a row leave together. A split has whole fours.
    if (chunk.tiles != nullptr && (number % 4 == 3 || unit + Tr::kUnits >= last_unit) &&
        lane % 4 <= number % 4) {
#pragma unroll
      for (int side = 0; side < kSides; ++side) {
        if (rows.valid[side]) {
          of_tiles[8 * side * tile_row(chunk.row) + unit / Tr::kUnits - number % 4 + lane % 4] = tiles[side];
        }
      }
    }
    __syncthreads();
  }
  device::wait_copies<0>();
}

// Grid: x = splits of the units, y = tiles of leaders, z = heads.
template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kBlocks)
    block_unit_scores_kernel(const BlockScoreParams<typename Tr::T> params) {
  extern __shared__ __align__(16) uint8_t unit_score_stages[];
  const BlockChunk& chunk = params.chunk;
  const int32_t first = chunk.first_slot + static_cast<int32_t>(blockIdx.y) * Tr::kLeaders;
  const int32_t last = min(first + Tr::kLeaders, chunk.first_slot + chunk.num_slots);
  for (int i = find_document(chunk, first); i < chunk.num_documents; ++i) {
    const BlockDocument document = chunk.documents[i];
    if (document.first_slot >= last) {
      break;
    }
    const LeaderRange leaders = leaders_among(document, first, last);
    if (!leaders.is_empty() && !document.broken) {
      score_split<Tr>(params, document, leaders, first, unit_score_stages);
    }
  }
}

template <typename T, int kMostSteps>
cudaError_t launch_unit_scores(const BlockScoreParams<T>& params, cudaStream_t stream) {
  using Tr = UnitScoreTraits<T, kMostSteps>;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(params.splits),
                                       static_cast<unsigned>(ceil_div(params.chunk.num_slots, Tr::kLeaders)),
                                       static_cast<unsigned>(params.chunk.num_heads)),
                          .threads = Tr::kThreads,
                          .shared_bytes = Tr::kStages * Tr::stage_bytes(params.d)};
  return launch_kernel(block_unit_scores_kernel<Tr>, shape, stream, params);
}

template <typename T>
cudaError_t launch_block_unit_scores(const BlockScoreParams<T>& params, cudaStream_t stream) {
  if (params.d <= 32) {
    return launch_unit_scores<T, 2>(params, stream);
  }
  if (params.d <= 64) {
    return launch_unit_scores<T, 4>(params, stream);
  }
  return launch_unit_scores<T, 8>(params, stream);
}

}  // namespace htree::tree_attention
