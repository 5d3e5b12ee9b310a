// The weighted values of a layer: the candidates that were not selected, on the tensor cores. A warp adds its
// slots of a share, then the block adds its warps to the share's state.
#pragma once

#include "ops/tree_cache/decode/select.cuh"
#include "ops/tree_cache/decode/tiles.cuh"

namespace htree::tree_cache {

// The sums of a warp over its slots of a share. Lane i has columns 16 m + i / 4 and 8 further on of heads
// 2 * (i % 4) and the next in out, and max and sum of head i / 4. Of packed tokens it has other columns: code_column().
template <class Tr>
struct WarpValues {
  float max[Tr::kHeadTiles];
  float sum[Tr::kHeadTiles];
  float out[Tr::kDim / 16][Tr::kHeadTiles][4];
};

// The scores of the four candidates that this lane weighs: 2 * (lane % 4) and the next, and those 8 further on,
// of head lane / 4 of a tile. -inf where the candidate is left out.
template <class Tr>
__device__ __forceinline__ void load_scores(const DecodeBlock<Tr>& block, int slot, uint32_t left_out,
                                            int head_tile, float (&scores)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int child = block.lane % 4 * 2 + i % 2 + i / 2 * 8;
    const float score =
        block.scores()[(slot * kDecodeRate + child) * Tr::kHeads + head_tile * 8 + block.lane / 4];
    scores[i] = (left_out >> child & 1) != 0 ? kNoScore : score;
  }
}

// The children of a slot that the layer below opens, as 16 bits. `slot` counts from the block's first.
template <class Tr>
__device__ __forceinline__ uint32_t opened(const DecodeBlock<Tr>& block, const LayerSlots& slots, int slot) {
  if (slots.layer == 0) {
    return 0;
  }
  const int in_list = slots.first + slot;
  return block.selected()[in_list / 2] >> (in_list % 2 * 16) & 0xffffu;
}

// Puts zeros in the place of values that are left out: a NaN among them must not meet a weight of 0.
template <class Tr>
__device__ __forceinline__ void clear_rows(uint32_t tile, uint32_t rows, int lane) {
  for (; rows != 0; rows &= rows - 1) {
    const int row = __ffs(static_cast<int>(rows)) - 1;
    if (lane < Tr::kChunks) {
      device::store_shared_16(tile + row * Tr::kRowBytes + lane * 16, make_uint4(0, 0, 0, 0));
    }
  }
  __syncwarp();
}

// The column of a value that row `row` of product `m` is where tokens are packed. Codes are transposed in units of two
// bytes, which hold two or four neighbouring columns of a token. A product takes two columns of a unit, one into its
// first eight rows and one into its last.
template <class Tr>
__device__ __forceinline__ int code_column(int m, int row) {
  if constexpr (Tr::kLeafBits == 8) {
    return m * 16 + row % 8 * 2 + row / 8;
  } else {
    return m / 2 * 32 + row % 8 * 4 + row / 8 * 2 + m % 2;
  }
}

// Adds weighed values of packed tokens, with rows of the products as code_column() says.
template <class Tr>
__device__ __forceinline__ void add_codes(uint32_t tile, int lane,
                                          const uint32_t (&weights)[Tr::kHeadTiles][2],
                                          WarpValues<Tr>& values) {
  using T = typename Tr::T;
  constexpr int kBits = Tr::kLeafBits;
  constexpr int kProducts = 8 / kBits;  // of a chunk of 16 bytes
  // Of children 2 * (lane % 4) and the next, and of those 8 further on.
  const uint32_t scales[2] = {device::load_shared_4(tile + Tr::kScalesAt + lane % 4 * 4),
                              device::load_shared_4(tile + Tr::kScalesAt + lane % 4 * 4 + 16)};
  // Matrix i of four: children 8 (i / 2) and the next seven, of two chunks the one with number i % 2.
  const int matrix = lane / 8;
  const int child = lane % 8 + matrix / 2 * 8;
#pragma unroll
  for (int first = 0; first < Tr::kCodeBytes / 16; first += 2) {
    uint32_t codes[4];
    device::load_matrices_transposed(codes, tile + code_offset<Tr>(child, first + matrix % 2));
#pragma unroll
    for (int product = 0; product < 2 * kProducts; ++product) {
      const int chunk = product / kProducts, odd = product % kProducts;
      const uint32_t low = biased_codes<kBits>(codes[chunk], odd);
      const uint32_t high = biased_codes<kBits>(codes[2 + chunk], odd);
      const uint32_t columns[4] = {
          expand_pair<T, kBits, 0, 2>(low, scales[0]), expand_pair<T, kBits, 1, 3>(low, scales[0]),
          expand_pair<T, kBits, 0, 2>(high, scales[1]), expand_pair<T, kBits, 1, 3>(high, scales[1])};
#pragma unroll
      for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
        device::mma_16x8x16<T>(values.out[first * kProducts + product][head_tile], columns,
                               weights[head_tile][0], weights[head_tile][1]);
      }
    }
  }
}

// Adds the values in `tile`, weighed by powers of two. `codes` says whether they are packed tokens.
template <class Tr>
__device__ __forceinline__ void add_tile(const DecodeBlock<Tr>& block, uint32_t tile, bool codes, int slot,
                                         uint32_t left_out, WarpValues<Tr>& values) {
  using T = typename Tr::T;
  uint32_t weights[Tr::kHeadTiles][2];
#pragma unroll
  for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
    float scores[4];
    load_scores(block, slot, left_out, head_tile, scores);
    const float base = values.max[head_tile] == kNoScore ? 0.0f : values.max[head_tile];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = device::exp2_flushed(scores[i] - base);
      values.sum[head_tile] += scores[i];
    }
    weights[head_tile][0] = device::pack_pair<T>(scores[0], scores[1]);
    weights[head_tile][1] = device::pack_pair<T>(scores[2], scores[3]);
  }
  if constexpr (Tr::kLeafBits > 0) {
    if (codes) {
      add_codes<Tr>(tile, block.lane, weights, values);
      return;
    }
  }
  // Matrix i of four: children 8 (i / 2) and the next seven, columns 8 (i % 2) and the next seven.
  const int matrix = block.lane / 8;
  const int child = block.lane % 8 + matrix / 2 * 8;
#pragma unroll
  for (int m = 0; m < Tr::kDim / 16; ++m) {
    uint32_t columns[4];
    device::load_matrices_transposed(columns, tile + pack_offset<Tr>(child, 2 * m + matrix % 2));
#pragma unroll
    for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
      device::mma_16x8x16<T>(values.out[m][head_tile], columns, weights[head_tile][0], weights[head_tile][1]);
    }
  }
}

// Adds the warps' partial sums of some heads to the state, in the order of the warps. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void add_parts(const DecodeBlock<Tr>& block, int first_head,
                                          DecodeState<Tr>& state) {
  // A thread keeps its column, so each head has its threads side by side, in one round.
  static_assert(Tr::kThreads % Tr::kDim == 0);
  constexpr int kItems = merge_heads(Tr::kWarps) * Tr::kDim;
  for (int begin = 0; begin < kItems; begin += Tr::kThreads) {
    const int item = begin + static_cast<int>(threadIdx.x);
    const int part = item / Tr::kDim, column = item % Tr::kDim;
    const int head = first_head + part;
    float top = 0.0f, total = 0.0f;
    if (item < kItems) {
      top = state.max[head];
#pragma unroll
      for (int warp = 0; warp < Tr::kWarps; ++warp) {
        top = fmaxf(top, block.shared.warps[warp][head].max);
      }
      const float base = top == kNoScore ? 0.0f : top;
      const float before = device::exp2_flushed(state.max[head] - base);
      float out = state.out[head][column] * before;
      total = state.sum[head] * before;
#pragma unroll
      for (int warp = 0; warp < Tr::kWarps; ++warp) {
        const LogSum& sum = block.shared.warps[warp][head];
        const float factor = device::exp2_flushed(sum.max - base);
        total += sum.sum * factor;
        out +=
            block.warp_sums()[(warp * merge_heads(Tr::kWarps) + part) * Tr::kMergeStride + column] * factor;
      }
      state.out[head][column] = out;
    }
    __syncthreads();  // the others of the head have read max and sum
    if (item < kItems && column == 0) {
      state.max[head] = top;
      state.sum[head] = total;
    }
  }
  __syncthreads();
}

// Adds what the warps have for one share to its state, some heads at a time. `codes` is that of add_tile(). Every
// thread calls it. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void merge_warps(const DecodeBlock<Tr>& block, const WarpValues<Tr>& values,
                                            bool codes, DecodeState<Tr>& state) {
#pragma unroll
  for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
    float sum = values.sum[head_tile];
    sum += __shfl_xor_sync(device::kFullMask, sum, 1);
    sum += __shfl_xor_sync(device::kFullMask, sum, 2);
    if (block.lane % 4 == 0) {
      block.shared.warps[block.warp][head_tile * 8 + block.lane / 4] = {values.max[head_tile], sum};
    }
  }
  constexpr int kAtOnce = merge_heads(Tr::kWarps);
#pragma unroll
  for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
#pragma unroll
    for (int first = 0; first < 8; first += kAtOnce) {
      float* own = block.warp_sums() + block.warp * kAtOnce * Tr::kMergeStride;
      const int head = block.lane % 4 * 2 - first;  // and the next
      if (head >= 0 && head < kAtOnce) {
#pragma unroll
        for (int m = 0; m < Tr::kDim / 16; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int column = m * 16 + block.lane / 4 + i / 2 * 8;
            if constexpr (Tr::kLeafBits > 0) {
              column = codes ? code_column<Tr>(m, column % 16) : column;
            }
            own[(head + i % 2) * Tr::kMergeStride + column] = values.out[m][head_tile][i];
          }
        }
      }
      __syncthreads();
      add_parts(block, head_tile * 8 + first, state);
    }
  }
}

// Adds the layer to the states of the block's shares. Asks for the keys of `below`, where it is a layer, once
// all values have been asked for.
template <class Tr>
__device__ __forceinline__ void add_layer(const DecodeBlock<Tr>& block, TileRing<Tr>& ring,
                                          const LayerSlots& slots, const uint32_t* rows,
                                          const LayerSlots& below, const uint32_t* rows_below) {
  const int shares = block.params.plan.shares;
  const int tiles = shares * slots.tiles;
  for (int share = 0; share < shares; ++share) {
    WarpValues<Tr> values = {};
#pragma unroll
    for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
      float max = kNoScore;
      for (int i = 0; i < slots.tiles; ++i) {
        const int slot = slot_of_tile(block, slots, share * slots.tiles + i);
        if (slot >= 0) {
          float scores[4];
          load_scores(block, slot, opened(block, slots, slot), head_tile, scores);
          max = fmaxf(max, fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])));
        }
      }
      max = fmaxf(max, __shfl_xor_sync(device::kFullMask, max, 1));
      values.max[head_tile] = fmaxf(max, __shfl_xor_sync(device::kFullMask, max, 2));
    }
    for (int i = 0; i < slots.tiles; ++i) {
      const int index = share * slots.tiles + i;
      const uint32_t tile = device::shared_address(ring.take());
      const int next = index + ring.ahead();
      if (next < tiles) {
        ring.ask(slots, rows, tiles + next);
      } else {
        ring.ask(below, rows_below, next - tiles);
      }
      const int slot = slot_of_tile(block, slots, index);
      if (slot >= 0) {
        const uint32_t left_out = opened(block, slots, slot);
        clear_rows<Tr>(tile, left_out, block.lane);
        add_tile(block, tile, has_codes<Tr>(slots), slot, left_out, values);
      }
    }
    merge_warps(block, values, has_codes<Tr>(slots), block.states()[share]);
  }
}

}  // namespace htree::tree_cache
