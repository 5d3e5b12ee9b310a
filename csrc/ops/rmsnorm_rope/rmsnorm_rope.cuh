// Kernels of rmsnorm_rope for rows that are held in registers, docs/semantics/rmsnorm_rope.md §3.1. Each row
// is read once, normalised, rotated and written once. A thread holds packs of the lower half of a head
// together with their partners in the upper half.
#pragma once

#include "device/sm90/pdl.cuh"
#include "ops/rmsnorm_rope/dweight.cuh"
#include "ops/rmsnorm_rope/operands.cuh"
#include "ops/rmsnorm_rope/row_access.cuh"

namespace htree::rmsnorm_rope {

// A row has kThreads threads with kPairs pairs of packs each. kRing: rows are loaded ahead.
template <typename Element, int kThreads_, int kPairs_, bool kRing_>
struct Traits {
  using T = Element;
  static constexpr int kThreads = kThreads_;
  static constexpr int kPairs = kPairs_;
  static constexpr bool kRing = kRing_;
  static constexpr int kPack = device::kPackOf<T>;
  static constexpr int kBlock = kThreads <= device::kWarpSize ? kSharedBlock : kThreads;
  static constexpr int kGroups = kBlock / kThreads;  // rows that a block works on at one time
  static constexpr int kScratch = kThreads <= device::kWarpSize ? 1 : kThreads / device::kWarpSize;
  // Weights stay in registers from row to row where they fit beside everything else.
  static constexpr bool hold_weight(bool backward) { return kPairs * kPack <= (backward ? 8 : 16); }

  static constexpr int min_blocks(bool backward) {
    const int blocks = resident_threads(kThreads, kPairs, backward) / kBlock;
    return blocks == 0 ? 1 : blocks;
  }
  static_assert(kPairs <= max_pairs(sizeof(T)), "more would spill");
  static_assert(kBlock <= 512 && kBlock % device::kWarpSize == 0);
};

template <typename Tr>
struct PairWeights {
  using A = Acc<typename Tr::T>;
  A lower[Tr::kPack];
  A upper[Tr::kPack];

  __device__ __forceinline__ void load(const Weight& weight, const Columns<Tr>& columns, int pair) {
    if (columns.valid(pair)) {
      load_both(weight.data, weight.dtype, columns.lower(pair), columns.upper(pair), lower, upper);
    }
  }
};

__device__ __forceinline__ float reciprocal_root(float x) {
  return rsqrtf(x);
}
__device__ __forceinline__ double reciprocal_root(double x) {
  return rsqrt(x);
}

template <typename T, int kPack>
__device__ __forceinline__ Acc<T> sum_of_squares(const Pack<T, kPack> (&x)[2]) {
  Acc<T> sum[2] = {};
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const auto lower = device::to_acc(x[0][i]);
    const auto upper = device::to_acc(x[1][i]);
    sum[0] += lower * lower;
    sum[1] += upper * upper;
  }
  return sum[0] + sum[1];
}

// The sum of squares of a row; all of its threads get it. Pairs are summed apart until the end, so that a row
// has the same bits for 64, 128 and 256 threads, if the packs of half a head divide their number.
template <typename Tr>
__device__ __forceinline__ Acc<typename Tr::T> row_square(
    const Pack<typename Tr::T, Tr::kPack> (&x)[Tr::kPairs][2], Acc<typename Tr::T>* scratch) {
  Acc<typename Tr::T> square[Tr::kPairs];
#pragma unroll
  for (int pair = 0; pair < Tr::kPairs; ++pair) {
    square[pair] = sum_of_squares(x[pair]);
  }
  row_sums<Tr>(square, scratch);
  return pairwise_sum(square);
}

template <typename Tr, typename A>
__device__ __forceinline__ void store_pair(typename Tr::T* row, const Columns<Tr>& columns, int pair,
                                           const A (&lower)[Tr::kPack], const A (&upper)[Tr::kPack]) {
  using T = typename Tr::T;
  Pack<T, Tr::kPack> out[2];
  device::from_acc<T>(lower, out[0].data);
  device::from_acc<T>(upper, out[1].data);
  device::store_pack_streaming(row + columns.lower(pair), out[0]);
  device::store_pack_streaming(row + columns.upper(pair), out[1]);
}

// The rows of one block, kGroups at a time. In iteration i the threads of group g have row i * kGroups + g.
// All threads run all iterations, since they reduce together; beyond the end `valid` is false and the row is
// the block's last one.
template <typename Tr>
struct BlockRows {
  uint32_t first;
  uint32_t count;
  uint32_t group;
  uint32_t iterations;

  __device__ __forceinline__ explicit BlockRows(const RowsView& rows)
      : first(rows.first_of_block()),
        count(rows.count_of_block()),
        group(threadIdx.x / Tr::kThreads),
        iterations((count + Tr::kGroups - 1) / Tr::kGroups) {}
  __device__ __forceinline__ bool valid(uint32_t iteration) const {
    return Tr::kGroups == 1 || iteration * Tr::kGroups + group < count;
  }
  __device__ __forceinline__ uint32_t row(uint32_t iteration) const {
    return first + min(iteration * Tr::kGroups + group, count - 1);
  }
};

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock, Tr::min_blocks(false))
    forward_kernel(const __grid_constant__ ForwardParams<typename Tr::T> p,
                   const __grid_constant__ RowsView rows, const __grid_constant__ LaneGrid grid, int stages,
                   bool pdl) {
  using T = typename Tr::T;
  using A = Acc<T>;
  extern __shared__ uint4 ring[];
  __shared__ A scratch[2][Tr::kPairs * Tr::kScratch];
  constexpr bool kHoldWeight = Tr::hold_weight(false);
  device::pdl_launch_and_wait(pdl);
  const BlockRows<Tr> mine(rows);
  const Columns<Tr> columns(grid, p.shape);
  const A inverse_width = A(1) / static_cast<A>(p.shape.width);

  RowPipeline<Tr, 1> pipeline(ring, stages);
  for (int ahead = 0; Tr::kRing && ahead < stages - 1; ++ahead) {
    pipeline.fetch({RowIndex(rows, mine.row(ahead)).of(p.x)}, columns, ahead < mine.iterations);
  }
  PairWeights<Tr> weight[kHoldWeight ? Tr::kPairs : 1];
#pragma unroll
  for (int pair = 0; kHoldWeight && pair < Tr::kPairs; ++pair) {
    weight[pair].load(p.weight, columns, pair);
  }
  Rotation<A, Tr::kPack> rotation;
  uint32_t loaded_row = rows.num_rows;  // of the tables; none yet

  for (uint32_t iteration = 0; iteration < mine.iterations; ++iteration) {
    if constexpr (Tr::kRing) {
      const uint32_t next = iteration + stages - 1;
      pipeline.fetch({RowIndex(rows, mine.row(next)).of(p.x)}, columns, next < mine.iterations);
    }
    const RowIndex index(rows, mine.row(iteration));
    const uint32_t table_row = p.shape.batched_tables ? index.token : index.position;
    if (table_row != loaded_row) {
      rotation.load(p.cos, p.sin, index.batch, index.position, columns.in_half);
      loaded_row = table_row;
    }
    Pack<T, Tr::kPack> x[Tr::kPairs][2];
    pipeline.wait();
    pipeline.take(0, index.of(p.x), columns, x);
    pipeline.release();
    const A square = row_square<Tr>(x, scratch[iteration % 2]);
    drop_conversions(x);
    const A scale = reciprocal_root(square * inverse_width + static_cast<A>(p.shape.eps));

    T* y = index.of(p.y);
#pragma unroll
    for (int pair = 0; pair < Tr::kPairs; ++pair) {
      PairWeights<Tr>& w = weight[kHoldWeight ? pair : 0];
      if (!kHoldWeight) {
        w.load(p.weight, columns, pair);
      }
      A lower[Tr::kPack], upper[Tr::kPack];
#pragma unroll
      for (int i = 0; i < Tr::kPack; ++i) {
        rotation.apply(i, device::to_acc(x[pair][0][i]) * scale * w.lower[i],
                       device::to_acc(x[pair][1][i]) * scale * w.upper[i], lower[i], upper[i]);
      }
      if (columns.valid(pair) && mine.valid(iteration)) {
        store_pair<Tr>(y, columns, pair, lower, upper);
      }
    }
  }
}

// dn: the gradient of the normalised row, which is dy rotated back.
template <typename Tr, typename A>
__device__ __forceinline__ void rotate_back(const Rotation<A, Tr::kPack>& rotation,
                                            const Pack<typename Tr::T, Tr::kPack> (&dy)[Tr::kPairs][2],
                                            A (&dn)[Tr::kPairs][2][Tr::kPack]) {
#pragma unroll
  for (int pair = 0; pair < Tr::kPairs; ++pair) {
#pragma unroll
    for (int i = 0; i < Tr::kPack; ++i) {
      rotation.transposed(i, device::to_acc(dy[pair][0][i]), device::to_acc(dy[pair][1][i]), dn[pair][0][i],
                          dn[pair][1][i]);
    }
  }
}

// dn = transposed rotation of dy; dx = r w dn - x r^3 / width sum(dn w x); dw = sum over rows of dn x r. Each
// thread sums dw of its own columns over the rows of its block.
template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock, Tr::min_blocks(true))
    backward_kernel(const __grid_constant__ BackwardParams<typename Tr::T> p,
                    const __grid_constant__ RowsView rows, const __grid_constant__ LaneGrid grid,
                    int stages) {
  using T = typename Tr::T;
  using A = Acc<T>;
  extern __shared__ uint4 ring[];
  __shared__ A scratch[2][2 * Tr::kScratch];
  constexpr bool kHoldWeight = Tr::hold_weight(true);
  const BlockRows<Tr> mine(rows);
  const Columns<Tr> columns(grid, p.shape);
  const A inverse_width = A(1) / static_cast<A>(p.shape.width);

  RowPipeline<Tr, 2> pipeline(ring, stages);
  for (int ahead = 0; Tr::kRing && ahead < stages - 1; ++ahead) {
    const RowIndex index(rows, mine.row(ahead));
    pipeline.fetch({index.of(p.dy), index.of(p.x)}, columns, ahead < mine.iterations);
  }
  PairWeights<Tr> weight[kHoldWeight ? Tr::kPairs : 1];
#pragma unroll
  for (int pair = 0; kHoldWeight && pair < Tr::kPairs; ++pair) {
    weight[pair].load(p.weight, columns, pair);
  }
  PairWeights<Tr> dw[Tr::kPairs] = {};

  for (uint32_t iteration = 0; iteration < mine.iterations; ++iteration) {
    if constexpr (Tr::kRing) {
      const uint32_t next = iteration + stages - 1;
      const RowIndex index(rows, mine.row(next));
      pipeline.fetch({index.of(p.dy), index.of(p.x)}, columns, next < mine.iterations);
    }
    const RowIndex index(rows, mine.row(iteration));
    Pack<T, Tr::kPack> x[Tr::kPairs][2];
    A dn[Tr::kPairs][2][Tr::kPack];
    {
      // The tables are needed only here: their registers then go to dn.
      Rotation<A, Tr::kPack> rotation;
      rotation.load(p.cos, p.sin, index.batch, index.position, columns.in_half);
      Pack<T, Tr::kPack> dy[Tr::kPairs][2];
      pipeline.wait();
      pipeline.take(0, index.of(p.dy), columns, dy);
      pipeline.take(1, index.of(p.x), columns, x);
      pipeline.release();
      rotate_back<Tr>(rotation, dy, dn);
    }
    A sums[2] = {};
#pragma unroll
    for (int pair = 0; pair < Tr::kPairs; ++pair) {
      sums[0] += sum_of_squares(x[pair]);
      PairWeights<Tr>& w = weight[kHoldWeight ? pair : 0];
      if (!kHoldWeight) {
        w.load(p.weight, columns, pair);
      }
      if (columns.valid(pair)) {
#pragma unroll
        for (int i = 0; i < Tr::kPack; ++i) {
          sums[1] += dn[pair][0][i] * w.lower[i] * device::to_acc(x[pair][0][i]) +
                     dn[pair][1][i] * w.upper[i] * device::to_acc(x[pair][1][i]);
        }
      }
    }
    row_sums<Tr>(sums, scratch[iteration % 2]);
    drop_conversions(x);
    const A scale = reciprocal_root(sums[0] * inverse_width + static_cast<A>(p.shape.eps));
    const A shrink = sums[1] * scale * inverse_width * scale * scale;

#pragma unroll
    for (int pair = 0; pair < Tr::kPairs; ++pair) {
      if (!(columns.valid(pair) && mine.valid(iteration))) {
        continue;
      }
      PairWeights<Tr>& w = weight[kHoldWeight ? pair : 0];
      if (!kHoldWeight) {
        w.load(p.weight, columns, pair);
      }
      A lower[Tr::kPack], upper[Tr::kPack];
#pragma unroll
      for (int i = 0; i < Tr::kPack; ++i) {
        const A x_lower = device::to_acc(x[pair][0][i]);
        const A x_upper = device::to_acc(x[pair][1][i]);
        lower[i] = dn[pair][0][i] * w.lower[i] * scale - x_lower * shrink;
        upper[i] = dn[pair][1][i] * w.upper[i] * scale - x_upper * shrink;
        dw[pair].lower[i] += dn[pair][0][i] * (x_lower * scale);
        dw[pair].upper[i] += dn[pair][1][i] * (x_upper * scale);
      }
      if (p.dx.data != nullptr) {
        store_pair<Tr>(index.of(p.dx), columns, pair, lower, upper);
      }
    }
  }
  if (p.dw_blocks != nullptr) {
    store_block_sums<Tr>(dw, columns, p.shape.width, reinterpret_cast<A*>(ring),
                         p.dw_blocks + int64_t{blockIdx.x} * p.shape.width);
  }
}

}  // namespace htree::rmsnorm_rope
