// The weighted values of a layer: the candidates that were not selected, on the tensor cores. A warp adds its
// slots of a share, then the block adds its warps to the share's state.
#pragma once

#include "ops/tree_cache/decode/sm90/select.cuh"
#include "ops/tree_cache/decode/sm90/tiles.cuh"

namespace htree::tree_cache {

// The sums of a warp over its slots of a share, relative to the share's maximum. Lane i has columns 16 m + i / 4 and 8
// further on of heads 2 * (i % 4) and the next in out, and max and sum of head i / 4. Of packed tokens it has other
// columns: code_column().
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

// The largest score of the share's values for this lane's head of each tile, lane / 4: all warps weigh by it, so that
// their sums need only be added. Every thread calls it. Has one __syncthreads.
template <class Tr>
__device__ __forceinline__ void find_maxima(const DecodeBlock<Tr>& block, const LayerSlots& slots, int share,
                                            float (&maxima)[Tr::kHeadTiles]) {
  auto& warps = block.shared.warps[0];
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
    max = fmaxf(max, __shfl_xor_sync(device::kFullMask, max, 2));
    if (block.lane % 4 == 0) {
      warps[block.warp][head_tile * 8 + block.lane / 4].max = max;
    }
  }
  __syncthreads();
#pragma unroll
  for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
    const int head = head_tile * 8 + block.lane / 4;
    float max = kNoScore;
#pragma unroll
    for (int warp = 0; warp < Tr::kWarps; warp += 4) {
      max = fmaxf(max, warps[warp + block.lane % 4][head].max);
    }
    max = fmaxf(max, __shfl_xor_sync(device::kFullMask, max, 1));
    maxima[head_tile] = fmaxf(max, __shfl_xor_sync(device::kFullMask, max, 2));
    if (block.warp == 0 && block.lane % 4 == 0) {
      block.shared.maxima[head] = maxima[head_tile];
    }
  }
}

// Adds the sums of all warps for a tile of heads to the state, in the order of the warps.
template <class Tr>
__device__ __forceinline__ void add_parts(const DecodeBlock<Tr>& block, int head_tile,
                                          DecodeState<Tr>& state) {
  // A thread has four columns of a head, and all threads of a head are in one warp.
  constexpr int kQuads = Tr::kDim / 4, kItems = 8 * kQuads;
  static_assert(kItems <= Tr::kThreads && kItems % 32 == 0 && 32 % kQuads == 0);
  const int item = threadIdx.x;
  if (item >= kItems) {
    return;
  }
  const int in_tile = item / kQuads, quad = item % kQuads;
  const int head = head_tile * 8 + in_tile;
  float4 parts[Tr::kWarps];
#pragma unroll
  for (int warp = 0; warp < Tr::kWarps; ++warp) {
    const float* part = block.shared.parts[warp] + in_tile * Tr::kMergeStride;
    parts[warp] = *reinterpret_cast<const float4*>(part + quad * 4);
  }
  const float before_max = state.max[head], max = block.shared.maxima[head];
  const float top = fmaxf(before_max, max);
  const float base = top == kNoScore ? 0.0f : top;
  const float before = device::exp2_flushed(before_max - base), now = device::exp2_flushed(max - base);
  float4 sum = parts[0];
#pragma unroll
  for (int warp = 1; warp < Tr::kWarps; ++warp) {
    sum.x += parts[warp].x;
    sum.y += parts[warp].y;
    sum.z += parts[warp].z;
    sum.w += parts[warp].w;
  }
  auto& out = *reinterpret_cast<float4*>(&state.out[head][quad * 4]);
  const float4 old = out;
  out = make_float4(fmaf(sum.x, now, old.x * before), fmaf(sum.y, now, old.y * before),
                    fmaf(sum.z, now, old.z * before), fmaf(sum.w, now, old.w * before));
  __syncwarp();  // all threads of the head have read its maximum
  if (quad == 0) {
    float total = block.shared.warps[0][0][head].sum;
#pragma unroll
    for (int warp = 1; warp < Tr::kWarps; ++warp) {
      total += block.shared.warps[0][warp][head].sum;
    }
    state.max[head] = top;
    state.sum[head] = fmaf(total, now, state.sum[head] * before);
  }
}

// Adds what the warps have for one share to its state, a tile of heads at a time. Each warp has its sums in `buffer`,
// that of the tile that it took last. `codes` is that of add_tile(). Every thread calls it; a __syncthreads has to come
// before that memory is used again.
template <class Tr>
__device__ __forceinline__ void merge_warps(const DecodeBlock<Tr>& block, const WarpValues<Tr>& values,
                                            bool codes, float* buffer, DecodeState<Tr>& state) {
  static_assert(8 * Tr::kMergeStride * sizeof(float) <= Tr::kStageBytes);
  const int column_of_lane = block.lane / 4, head_of_lane = block.lane % 4 * 2;
#pragma unroll
  for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
    float sum = values.sum[head_tile];
    sum += __shfl_xor_sync(device::kFullMask, sum, 1);
    sum += __shfl_xor_sync(device::kFullMask, sum, 2);
    if (head_tile > 0) {
      __syncthreads();  // the sums of the tile before have been read
    }
    if (block.lane % 4 == 0) {
      block.shared.warps[0][block.warp][head_tile * 8 + block.lane / 4].sum = sum;
    }
    if (block.lane == 0) {
      block.shared.parts[block.warp] = buffer;
    }
    __syncwarp();  // all lanes have read the tile
#pragma unroll
    for (int m = 0; m < Tr::kDim / 16; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int column = m * 16 + column_of_lane + i / 2 * 8;
        if constexpr (Tr::kLeafBits > 0) {
          column = codes ? code_column<Tr>(m, column % 16) : column;
        }
        buffer[(head_of_lane + i % 2) * Tr::kMergeStride + column] = values.out[m][head_tile][i];
      }
    }
    __syncthreads();
    add_parts(block, head_tile, state);
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
    find_maxima(block, slots, share, values.max);
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
    merge_warps(block, values, has_codes<Tr>(slots), reinterpret_cast<float*>(ring.buffer()),
                block.states()[share]);
  }
  __syncthreads();
}

}  // namespace htree::tree_cache
