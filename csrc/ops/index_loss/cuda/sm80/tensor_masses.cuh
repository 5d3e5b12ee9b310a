// Statistics and masses of the attention on the tensor cores: a warp holds the queries of 32 rows (position, head), 16 of
// wide heads, as A operands in registers, and goes through tiles of keys, which the warps of a thread block share.
//
// Rows of a position lie side by side, so that its masses are sums over neighbouring rows. The columns of a unit lie in the
// four lanes of a quad and its rows in the lanes across quads: the sums over a quad of four units are exchanged together,
// each exchange halving what a lane holds, and the sums over rows follow by as many exchanges as a part has heads.
#pragma once

#include <cfloat>

#include "device/mma.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/index_loss/cuda/any/loss_rows.cuh"
#include "ops/index_loss/index_loss_plan.h"

namespace htree::index_loss {

// key_dim is at most 16 * kMostSteps.
template <typename Element, int kMostSteps_, bool kMasses_>
struct TensorTraits {
  using T = Element;
  static constexpr int kMostSteps = kMostSteps_;  // of a product, 16 elements each
  static constexpr bool kMasses = kMasses_;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * device::kWarpSize;
  static constexpr int kRowTiles = static_cast<int>(tile_rows(16 * kMostSteps)) / (16 * kWarps);
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kLaneRows = 2 * kRowTiles;  // rows 8 apart
  static constexpr int kUnits = static_cast<int>(kTileUnits);
  static constexpr int kTokens = kUnits * static_cast<int>(kUnitTokens);  // of a tile
  static constexpr int kTogether = 4;  // units whose sums are exchanged together
  static constexpr int kStages = 2;
  static constexpr int kBlocksAtOnce = kMostSteps > 8 ? 1 : 2;  // of a multiprocessor
  static_assert(kUnits % kTogether == 0 && kRows <= kThreads);
  // Rows of a tile are an odd number of 16-byte groups apart, so that the eight rows of a matrix lie in different banks.
  static constexpr int kPitch = 2 * 16 * kMostSteps + 16;
  static constexpr int kUnitBytes = static_cast<int>(kUnitTokens) * kPitch;
  static constexpr int kStageBytes = kTokens * kPitch;
};

// What a thread block works on.
struct TensorPlace {
  int32_t batch;                  // among those of the launch
  int32_t kv_head, part;          // the part of all K/V heads
  int32_t first_head, num_heads;  // of the part
  int32_t first_row, last_row;    // positions
};

template <typename Tr>
__device__ __forceinline__ TensorPlace tensor_place(const MassParams<typename Tr::T>& params) {
  const int32_t all = params.kv_heads * params.parts;
  const int32_t part = static_cast<int32_t>(blockIdx.z) % all;
  const int32_t group = params.heads / params.kv_heads, first = part % params.parts * params.part_heads;
  const int32_t positions = Tr::kRows / params.part_heads;
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) * positions;
  return {static_cast<int32_t>(blockIdx.z) / all,
          part / params.parts,
          part,
          part / params.parts * group + first,
          min(params.part_heads, group - first),
          first_row,
          min(first_row + positions, params.span.rows)};
}

// The positions of the thread block, in shared memory.
template <typename Tr>
struct TilePositions {
  int32_t token[Tr::kRows];
  int32_t units[Tr::kRows];

  // Every thread must call.
  __device__ __forceinline__ void load(const TensorPlace& place, const LossRow* table) {
    const int32_t row = place.first_row + static_cast<int32_t>(threadIdx.x);
    if (row < place.last_row) {
      token[threadIdx.x] = table[row].token;
      units[threadIdx.x] = table[row].units;
    }
    __syncthreads();
  }
};

// A lane's rows of the products, i-th of them 8 rows behind the one before. Little of it stays in registers: what a row is
// follows from its number.
template <typename Tr>
struct LaneRows {
  int32_t first;     // row of the thread block
  uint32_t present;  // bit i: row i is a query that counts anything

  __device__ __forceinline__ LaneRows(const MassParams<typename Tr::T>& params, const TensorPlace& place,
                                      const TilePositions<Tr>& positions)
      : first(static_cast<int32_t>(threadIdx.x / device::kWarpSize * Tr::kWarpRows +
                                   threadIdx.x % device::kWarpSize / 4)),
        present(0) {
#pragma unroll
    for (int i = 0; i < Tr::kLaneRows; ++i) {
      const int32_t row = position(params, place, i);
      const bool inside = row < place.last_row && head(params, i) < place.num_heads;
      present |= (inside && positions.units[row - place.first_row] > 0 ? 1u : 0u) << i;
    }
  }

  __device__ __forceinline__ bool is_present(int i) const {
    return present >> i & 1;
  }
  // A row of the table.
  __device__ __forceinline__ int32_t position(const MassParams<typename Tr::T>& params,
                                              const TensorPlace& place, int i) const {
    return place.first_row + ((first + 8 * i) >> params.part_shift);
  }
  // Among the heads of the part.
  __device__ __forceinline__ int32_t head(const MassParams<typename Tr::T>& params, int i) const {
    return (first + 8 * i) & ((1 << params.part_shift) - 1);
  }
};

// A operands: elements 2 * (lane % 4) and the next of rows lane / 4 and lane / 4 + 8, then the same of the elements 8
// further on. Rows that are none are zeros.
template <typename Tr>
__device__ __forceinline__ void load_queries(const MassParams<typename Tr::T>& params, int64_t batch,
                                             const TensorPlace& place, const TilePositions<Tr>& positions,
                                             const LaneRows<Tr>& rows,
                                             uint32_t (&a)[Tr::kRowTiles][Tr::kMostSteps][4]) {
  const int column = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
  for (int i = 0; i < Tr::kLaneRows; ++i) {
    const bool present = rows.is_present(i);
    const auto* query = params.query.data + batch * params.query.batch;
    if (present) {
      query += positions.token[rows.position(params, place, i) - place.first_row] * params.query.row +
               (place.first_head + rows.head(params, i)) * params.query.head;
    }
#pragma unroll
    for (int step = 0; step < Tr::kMostSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 16 * step + column + 8 * half;
        a[i / 2][step][i % 2 + 2 * half] =
            present && at < params.key_dim ? *reinterpret_cast<const uint32_t*>(query + at) : 0;
      }
    }
  }
}

// Starts to copy the keys of a tile into a stage; keys from `num_tokens` on, and elements from key_dim on, become zeros and
// are not read.
template <typename Tr>
__device__ __forceinline__ void copy_keys(const typename Tr::T* keys, int64_t key_row, int32_t first_token,
                                          int32_t num_tokens, int32_t key_dim, uint32_t stage) {
  constexpr int kPacks = 2 * Tr::kMostSteps;
  constexpr int kStep = Tr::kThreads / kPacks;
  const int pack = static_cast<int>(threadIdx.x) % kPacks;
  int token = static_cast<int>(threadIdx.x) / kPacks;
  const int32_t last = 8 * pack < key_dim ? num_tokens - first_token : 0;
  const auto* from = keys + (int64_t{first_token} + token) * key_row + 8 * pack;
  stage += token * Tr::kPitch + 16 * pack;
#pragma unroll 1
  for (; token < Tr::kTokens; token += kStep) {
    device::copy_async_16_prefix(stage, token < last ? from : keys, token < last ? 16 : 0);
    from += kStep * key_row;
    stage += kStep * Tr::kPitch;
  }
}

// x[i]: the scores in base 2 of a lane's row i with its four tokens of a unit.
template <typename Tr>
__device__ __forceinline__ void multiply_unit(const uint32_t (&a)[Tr::kRowTiles][Tr::kMostSteps][4],
                                              float scale, uint32_t address, float (&x)[Tr::kLaneRows][4]) {
  float c[Tr::kRowTiles][2][4] = {};
#pragma unroll
  for (int step = 0; step < Tr::kMostSteps; ++step) {
    uint32_t b[4];
    device::load_matrices(b, address + 32 * step);
#pragma unroll
    for (int t = 0; t < Tr::kRowTiles; ++t) {
      device::mma_16x8x16<typename Tr::T>(c[t][0], a[t][step], b[0], b[1]);
      device::mma_16x8x16<typename Tr::T>(c[t][1], a[t][step], b[2], b[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < Tr::kLaneRows; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[i][j] = scale * c[i / 2][j / 2][2 * (i % 2) + j % 2];
    }
  }
}

// The address of unit 0 in a stage for load_matrices: tokens 0 to 7, elements 0 to 7 and 8 to 15; then tokens 8 to 15.
template <typename Tr>
__device__ __forceinline__ uint32_t matrix_address(uint32_t stage) {
  const int lane = static_cast<int>(threadIdx.x % device::kWarpSize);
  const int token = lane % 8 + 8 * (lane / 16), element = 8 * (lane / 8 % 2);
  return stage + token * Tr::kPitch + 2 * element;
}

// ---- what becomes of the scores

// Maxima and sums of the rows, over all units that they count.
template <typename Tr>
struct StatisticsOfRows {
  float max[Tr::kLaneRows], sum[Tr::kLaneRows];

  __device__ __forceinline__ StatisticsOfRows() {
#pragma unroll
    for (int i = 0; i < Tr::kLaneRows; ++i) {
      max[i] = -FLT_MAX;  // finite, so that no difference of infinities is formed
      sum[i] = 0.0f;
    }
  }

  // The largest score seldom grows, so that the test costs less than to rescale each time.
  __device__ __forceinline__ void add(int i, const float (&x)[4]) {
    const float largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    if (largest > max[i]) {
      sum[i] *= device::exp2_flushed(max[i] - largest);
      max[i] = largest;
    }
    float powers = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      powers += device::exp2_flushed(x[j] - max[i]);
    }
    sum[i] += powers;
  }

  __device__ __forceinline__ void store(const MassParams<typename Tr::T>& params, const TensorPlace& place,
                                        const LaneRows<Tr>& rows) {
    const LossSpan& span = params.span;
    const int64_t all = static_cast<int64_t>(span.num_batches) * span.rows;
#pragma unroll
    for (int i = 0; i < Tr::kLaneRows; ++i) {
      for (int offset = 1; offset < 4; offset *= 2) {
        const float other_max = __shfl_xor_sync(device::kFullMask, max[i], offset);
        const float other_sum = __shfl_xor_sync(device::kFullMask, sum[i], offset);
        const float largest = fmaxf(max[i], other_max);
        sum[i] = sum[i] * device::exp2_flushed(max[i] - largest) +
                 other_sum * device::exp2_flushed(other_max - largest);
        max[i] = largest;
      }
      // Rows that count nothing are stored too: they are read.
      const int32_t position = rows.position(params, place, i), head = rows.head(params, i);
      if (threadIdx.x % 4 == 0 && position < place.last_row && head < place.num_heads) {
        const int64_t row = blockIdx.y * all + static_cast<int64_t>(place.batch) * span.rows + position;
        params.partials[row * params.heads + place.first_head + head] = make_float2(max[i], sum[i]);
      }
    }
  }
};

// Masses of kTogether units: sums over the tokens of a unit and the heads of a part.
template <typename Tr>
struct MassesOfRows {
  float reference[Tr::kLaneRows];  // log-sum-exp in base 2

  __device__ __forceinline__ MassesOfRows(const MassParams<typename Tr::T>& params, int64_t batch,
                                          const TensorPlace& place, const LaneRows<Tr>& rows) {
#pragma unroll
    for (int i = 0; i < Tr::kLaneRows; ++i) {
      reference[i] = 0.0f;
      if (rows.is_present(i)) {
        const int64_t row = batch * params.span.rows + rows.position(params, place, i);
        reference[i] =
            params.lse[row * params.heads + place.first_head + rows.head(params, i)] * 1.4426950408889634f;
      }
    }
  }

  // Of a lane's four tokens. Rows that are none weigh nothing, whatever a key holds.
  __device__ __forceinline__ float weigh(int i, bool present, const float (&x)[4]) const {
    float powers = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      powers += device::exp2_flushed(x[j] - reference[i]);
    }
    return present ? powers : 0.0f;
  }
};

// Of two units, whose sums low and high are: half of the sum over the quad of the one that this lane keeps, the higher in its
// upper lanes.
template <typename Tr>
__device__ __forceinline__ void exchange(const float (&low)[Tr::kLaneRows],
                                         const float (&high)[Tr::kLaneRows], int offset,
                                         float (&kept)[Tr::kLaneRows]) {
  const bool upper = threadIdx.x & offset;
#pragma unroll
  for (int i = 0; i < Tr::kLaneRows; ++i) {
    kept[i] =
        (upper ? high[i] : low[i]) + __shfl_xor_sync(device::kFullMask, upper ? low[i] : high[i], offset);
  }
}

// Adds the rows of each position; afterwards the lanes and rows with is_first_row() hold the sums.
template <typename Tr>
__device__ __forceinline__ void add_heads(int32_t part_heads, float (&masses)[Tr::kLaneRows]) {
#pragma unroll
  for (int heads = 1; heads < 8; heads *= 2) {
    if (heads < part_heads) {
#pragma unroll
      for (int i = 0; i < Tr::kLaneRows; ++i) {
        masses[i] += __shfl_xor_sync(device::kFullMask, masses[i], 4 * heads);
      }
    }
  }
#pragma unroll
  for (int rows = 1; rows < Tr::kLaneRows; rows *= 2) {
    if (8 * rows < part_heads) {
#pragma unroll
      for (int i = 0; i < Tr::kLaneRows; i += 2 * rows) {
        masses[i] += masses[i + rows];
      }
    }
  }
}
__device__ __forceinline__ bool is_first_row(int32_t part_heads, int i) {
  const int row = 8 * i + static_cast<int>(threadIdx.x % device::kWarpSize) / 4;
  return (row & (part_heads - 1)) == 0;
}

// ---- the mainloop

// A run of positions of one document: tiles of the units of this thread block's share, as far as the rows count them.
template <typename Tr, typename Epilogue>
__device__ __forceinline__ void multiply_run(const MassParams<typename Tr::T>& params,
                                             const TensorPlace& place,
                                             const uint32_t (&a)[Tr::kRowTiles][Tr::kMostSteps][4],
                                             const LaneRows<Tr>& rows, const int32_t (&counts)[Tr::kLaneRows],
                                             const UnitRange& units, const typename Tr::T* keys,
                                             uint8_t* stages, Epilogue& epilogue) {
  const LossSpan& span = params.span;
  const int32_t num_tokens = units.end * static_cast<int32_t>(kUnitTokens);
  const uint32_t stage = device::shared_address(stages);
  const auto stage_of = [&](int number) {
    return stage + static_cast<uint32_t>(number % Tr::kStages) * Tr::kStageBytes;
  };
  const auto start = [&](int32_t unit, int number) {
    if (unit < units.end) {
      copy_keys<Tr>(keys, params.key.row, unit * static_cast<int32_t>(kUnitTokens), num_tokens,
                    params.key_dim, stage_of(number));
    }
    device::commit_copies();
  };
  // Every warp skips the tiles that none of its rows counts.
  int32_t most = 0;
#pragma unroll
  for (int i = 0; i < Tr::kLaneRows; ++i) {
    most = max(most, counts[i]);
  }
  most = __reduce_max_sync(device::kFullMask, most);
  // Of the lane's first position, for the first units of a document; positions of its other rows lie whole rows behind.
  const int64_t row_stride = static_cast<int64_t>(params.kv_heads) * params.parts * span.num_columns;
  const int64_t row = static_cast<int64_t>(place.batch) * span.rows + rows.position(params, place, 0);
  float* to =
      params.masses + row * row_stride + static_cast<int64_t>(place.part) * span.num_columns + units.column;
  __syncthreads();  // the stages may still be read for another run
  start(units.begin, 0);
  int number = 0;
  for (int32_t tile = units.begin; tile < units.end; tile += Tr::kUnits, ++number) {
    start(tile + Tr::kUnits, number + 1);
    device::wait_copies<1>();
    __syncthreads();
    const uint32_t address = matrix_address<Tr>(stage_of(number));
    const auto address_of = [&](int unit) { return address + unit * Tr::kUnitBytes; };
    if (tile < most) {
      if constexpr (!Tr::kMasses) {
#pragma unroll 1
        for (int unit = 0; unit < Tr::kUnits; ++unit) {
          float x[Tr::kLaneRows][4];
          multiply_unit<Tr>(a, params.scale, address_of(unit), x);
#pragma unroll
          for (int i = 0; i < Tr::kLaneRows; ++i) {
            if (tile + unit < counts[i]) {
              epilogue.add(i, x[i]);
            }
          }
        }
      } else {
#pragma unroll 1
        for (int first = 0; first < Tr::kUnits; first += Tr::kTogether) {
          // One pair of units, two apart, after the other: the scores of four would not fit into the registers.
          float even[Tr::kLaneRows], odd[Tr::kLaneRows] = {};
#pragma unroll 1
          for (int u = 0; u < 2; ++u) {
            float weights[2][Tr::kLaneRows];
#pragma unroll
            for (int v = 0; v < 2; ++v) {
              float x[Tr::kLaneRows][4];
              multiply_unit<Tr>(a, params.scale, address_of(first + u + 2 * v), x);
#pragma unroll
              for (int i = 0; i < Tr::kLaneRows; ++i) {
                weights[v][i] = epilogue.weigh(i, rows.is_present(i), x[i]);
              }
            }
#pragma unroll
            for (int i = 0; i < Tr::kLaneRows; ++i) {
              even[i] = odd[i];
            }
            exchange<Tr>(weights[0], weights[1], 2, odd);
          }
          float masses[Tr::kLaneRows];
          exchange<Tr>(even, odd, 1, masses);  // of unit lane % 4
          add_heads<Tr>(params.part_heads, masses);
          const int32_t unit = tile + first + static_cast<int32_t>(threadIdx.x % 4);
#pragma unroll
          for (int i = 0; i < Tr::kLaneRows; ++i) {
            if (unit < counts[i] && is_first_row(params.part_heads, i)) {
              to[((8 * i) >> params.part_shift) * row_stride + unit] = masses[i];
            }
          }
        }
      }
    }
    __syncthreads();
  }
  device::wait_copies<0>();
}

// Grid: x = tiles of positions, y = splits of the columns, z = batches and parts of K/V heads.
template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kBlocksAtOnce)
    tensor_masses_kernel(const MassParams<typename Tr::T> params) {
  extern __shared__ __align__(16) uint8_t mass_stages[];
  const LossSpan& span = params.span;
  const TensorPlace place = tensor_place<Tr>(params);
  const int64_t batch = span.first_batch + place.batch;
  const LossRow* table = table_of(span, place.batch);
  __shared__ TilePositions<Tr> positions;
  positions.load(place, table);
  const LaneRows<Tr> rows(params, place, positions);
  uint32_t a[Tr::kRowTiles][Tr::kMostSteps][4];
  load_queries<Tr>(params, batch, place, positions, rows, a);
  const auto* keys = params.key.data + batch * params.key.batch + place.kv_head * params.key.head;
  const auto go = [&](auto& epilogue) {
    for_runs(table, place.first_row, place.last_row,
             [&](int32_t first, int32_t last, int32_t start, int32_t most) {
               const UnitRange units = units_of_split(span, start, most, static_cast<int32_t>(blockIdx.y));
               if (units.begin >= units.end) {
                 return;
               }
               int32_t counts[Tr::kLaneRows];
#pragma unroll
               for (int i = 0; i < Tr::kLaneRows; ++i) {
                 const int32_t position = rows.position(params, place, i);
                 const bool mine = rows.is_present(i) && position >= first && position < last;
                 counts[i] = mine ? min(positions.units[position - place.first_row], units.end) : 0;
               }
               multiply_run<Tr>(params, place, a, rows, counts, units, keys + start * params.key.row,
                                mass_stages, epilogue);
             });
  };
  if constexpr (Tr::kMasses) {
    MassesOfRows<Tr> epilogue(params, batch, place, rows);
    go(epilogue);
  } else {
    StatisticsOfRows<Tr> epilogue;
    go(epilogue);
    epilogue.store(params, place, rows);
  }
}

template <typename T, int kMostSteps, bool kMasses>
cudaError_t launch_tensor_masses(const MassParams<T>& params, cudaStream_t stream) {
  using Tr = TensorTraits<T, kMostSteps, kMasses>;
  const LossSpan& span = params.span;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ceil_div(span.rows, Tr::kRows / params.part_heads)),
                   static_cast<unsigned>(ceil_div(span.num_columns, span.split_columns)),
                   static_cast<unsigned>(span.num_batches * params.kv_heads * params.parts)),
      .threads = Tr::kThreads,
      .shared_bytes = Tr::kStages * Tr::kStageBytes};
  return launch_kernel(tensor_masses_kernel<Tr>, shape, stream, params);
}

template <typename T, bool kMasses>
cudaError_t launch_tensor_masses(const MassParams<T>& params, cudaStream_t stream) {
  if (params.key_dim <= 64) {
    return launch_tensor_masses<T, 4, kMasses>(params, stream);
  }
  if (params.key_dim <= 128) {
    return launch_tensor_masses<T, 8, kMasses>(params, stream);
  }
  return launch_tensor_masses<T, 16, kMasses>(params, stream);
}

}  // namespace htree::index_loss
