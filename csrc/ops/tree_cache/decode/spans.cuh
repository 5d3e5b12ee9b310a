// Scores of span means, where a leader has to choose: of each candidate and head the log-sum-exp over the means
// of its tokens, all rotated by the position of the candidate. docs/semantics/tree_attention.md §1.15
#pragma once

#include "ops/tree_cache/decode/scores.cuh"
#include "ops/tree_cache/decode/select.cuh"

namespace htree::tree_cache {

// The means of a slot's 16 candidates stand in tiles of 16 rows. Where a candidate fills tiles, its query is
// rotated back in place of its keys, once for all of them.
template <class Tr>
struct SpanQueries {
  QueryOperands of[Tr::kHeadTiles][2][Tr::kSteps];

  // `rotation` is cos and sin of the candidate's position, or null.
  __device__ __forceinline__ void load(const DecodeBlock<Tr>& block, const float* rotation) {
#pragma unroll
    for (int tile = 0; tile < Tr::kHeadTiles; ++tile) {
#pragma unroll
      for (int step = 0; step < Tr::kSteps; ++step) {
        QueryOperands& low = of[tile][0][step];
        QueryOperands& high = of[tile][1][step];
        low = load_queries<Tr>(block.queries(), tile, 0, step, block.lane);
        high = load_queries<Tr>(block.queries(), tile, 1, step, block.lane);
        if (rotation != nullptr) {
          rotate_back(low, high, rotation + (4 * step + block.lane % 4) * 8);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static void join(const QueryOperands& from, float (&x)[8]) {
    float high[8];
    unpack_eight<__nv_bfloat16>(from.words[0], high);
    unpack_eight<__nv_bfloat16>(from.words[1], x);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x[e] += high[e];
    }
  }
  __device__ __forceinline__ static void split(const float (&x)[8], QueryOperands& to) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SplitFloat a = split_float(x[2 * i]), b = split_float(x[2 * i + 1]);
      high[i] = pack_upper_halves(a.high, b.high);
      low[i] = device::pack_pair<__nv_bfloat16>(a.low, b.low);
    }
    to.words[0] = make_uint4(high[0], high[1], high[2], high[3]);
    to.words[1] = make_uint4(low[0], low[1], low[2], low[3]);
  }
  __device__ __forceinline__ static void rotate_back(QueryOperands& low, QueryOperands& high,
                                                     const float* rotation) {
    float cos[8], sin[8], x[8], y[8];
    tree_attention::load_table(rotation, cos);
    tree_attention::load_table(rotation + Tr::kHalf, sin);
    join(low, x);
    join(high, y);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      device::rotate_pair(x[e], y[e], cos[e], -sin[e]);
    }
    split(x, low);
    split(y, high);
  }
};

// Products of the means in `tile`, as they are, with queries that were rotated back.
template <class Tr>
__device__ __forceinline__ void multiply_means(const DecodeBlock<Tr>& block, const uint8_t* tile,
                                               const SpanQueries<Tr>& queries,
                                               float (&sums)[Tr::kHeadTiles][4]) {
  using T = typename Tr::T;
  const uint32_t address = device::shared_address(tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 0; step < Tr::kSteps; ++step) {
      KeyOperands keys;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int chunk = half * Tr::kChunks / 2 + 4 * step + block.lane % 4;
        const uint4 packed =
            device::load_shared_16(address + pack_offset<Tr>(block.lane / 4 + 8 * row, chunk));
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
          keys.high[0][row] = packed.x;
          keys.high[0][2 + row] = packed.y;
          keys.high[1][row] = packed.z;
          keys.high[1][2 + row] = packed.w;
        } else {
          float x[8];
          unpack_eight<T>(packed, x);
          keys.set<false>(row, x);
        }
      }
#pragma unroll
      for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
        const QueryOperands& words = queries.of[head_tile][half][step];
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
          multiply_parts(keys.high, words.words[1], sums[head_tile]);
          multiply_parts(keys.high, words.words[0], sums[head_tile]);
        } else {
          multiply_keys(keys, words, sums[head_tile]);
        }
      }
    }
  }
}

// One more score. Scores that equal the maximum count one each.
__device__ __forceinline__ void add_score(LogSum& sum, float score) {
  if (score > sum.max) {
    sum.sum = sum.sum * device::exp2_flushed(sum.max - score) + 1.0f;
    sum.max = score;
  } else {
    sum.sum += score == sum.max ? 1.0f : device::exp2_flushed(score - sum.max);
  }
}

// The tiles of means of a warp's slots, in their order.
template <class Tr>
struct SpanTiles {
  const DecodeBlock<Tr>& block;
  const LayerSlots& slots;
  const int32_t* list;
  int per_node;  // means of a candidate, and tiles of a slot

  __device__ __forceinline__ int total() const { return block.params.plan.shares * slots.tiles * per_node; }
  // The slot of a tile, counted from the block's first, or -1.
  __device__ __forceinline__ int slot(int index) const {
    return slot_of_tile(block, slots, index / per_node);
  }
  __device__ __forceinline__ int first_mean(int index) const { return index % per_node * kDecodeRate; }

  // The pool row of row lane % 16 of a tile.
  __device__ __forceinline__ uint32_t row(int index) const {
    const int slot_idx = index < total() ? slot(index) : -1;
    if (slot_idx < 0) {
      return kAbsentRow;
    }
    const int mean = first_mean(index) + block.lane % kDecodeRate;
    const int child = mean / per_node;
    const int p = (slots.first + slot_idx) * kDecodeRate + child;
    if (p >= slots.num - 1) {  // the means of the rightmost may hold later tokens
      return kAbsentRow;
    }
    const auto& attend = block.attend();
    const auto node = static_cast<uint32_t>(node_of(list, static_cast<uint32_t>(p), kDecodeRate));
    const Place place = attend.layout.span_mean(node * per_node + (mean - child * per_node));
    const int64_t found = row_at(attend, block.walk, place, attend.layout.key_rows(), 1);
    return found < 0 ? kAbsentRow : static_cast<uint32_t>(found);
  }

  // The position whose rotation comes with a tile: that of its candidate where it has only one, else that
  // of the slot's first.
  __device__ __forceinline__ int position(int index) const {
    const int slot_idx = index < total() ? slot(index) : -1;
    const int child = per_node >= kDecodeRate ? first_mean(index) / per_node : 0;
    return slot_idx < 0 ? 0 : (slots.first + slot_idx) * kDecodeRate + child;
  }
};

template <class Tr>
__device__ __forceinline__ void clear_sums(LogSum (&sums)[2][Tr::kHeadTiles][2]) {
#pragma unroll
  for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i / 2][head_tile][i % 2] = {kNoScore, 0.0f};
    }
  }
}

// Adds a tile's products to the sums of this lane's two rows. Absent means add nothing.
template <class Tr>
__device__ __forceinline__ void add_means(const float (&products)[Tr::kHeadTiles][4], uint32_t present,
                                          int lane, LogSum (&sums)[2][Tr::kHeadTiles][2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if ((present >> (lane / 4 + 8 * row) & 1) == 0) {
      continue;
    }
#pragma unroll
    for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        add_score(sums[row][head_tile][i], products[head_tile][2 * row + i]);
      }
    }
  }
}

// Adds the sums of the second row to those of the first.
template <class Tr>
__device__ __forceinline__ void merge_rows(LogSum (&sums)[2][Tr::kHeadTiles][2]) {
#pragma unroll
  for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[0][head_tile][i] = merge_log_sums(sums[0][head_tile][i], sums[1][head_tile][i]);
    }
  }
}

// Merges the sums of `rows` neighbouring rows and stores their logarithm for candidate `candidate`.
template <class Tr>
__device__ __forceinline__ void store_log_sums(const DecodeBlock<Tr>& block, int rows, int candidate,
                                               const LogSum (&sums)[Tr::kHeadTiles][2]) {
#pragma unroll
  for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      LogSum sum = sums[head_tile][i];
      for (int offset = 4; offset < 4 * rows; offset *= 2) {
        LogSum other;
        other.max = __shfl_xor_sync(device::kFullMask, sum.max, offset);
        other.sum = __shfl_xor_sync(device::kFullMask, sum.sum, offset);
        sum = merge_log_sums(sum, other);
      }
      if (block.lane / 4 % rows == 0) {
        block.span_scores()[candidate * Tr::kHeads + head_tile * 8 + block.lane % 4 * 2 + i] = log2_of(sum);
      }
    }
  }
}

// The block's span scores of a layer. The ring is empty before and after.
template <class Tr>
__device__ __forceinline__ void score_spans(const DecodeBlock<Tr>& block, TileRing<Tr>& ring,
                                            const LayerSlots& slots, const int32_t* list) {
  const PageLayout& layout = block.attend().layout;
  const SpanTiles<Tr> tiles = {block, slots, list,
                               static_cast<int>(layout.tokens[slots.layer] / layout.span)};
  const bool rotates = block.attend().options.cos != nullptr;
  const bool whole_tiles = tiles.per_node >= kDecodeRate;
  const int total = tiles.total();
  uint64_t present = 0;  // sixteen bits for each tile that was asked for
  uint32_t row = tiles.row(0);
  // The row of the next tile is looked up one tile ahead.
  const auto ask = [&](int index, int pending) {
    const uint64_t bits = __ballot_sync(device::kFullMask, row != kAbsentRow) & 0xffffu;
    present |= bits << (16 * pending);
    ring.ask_means(index < total, row, tiles.position(index));
    row = tiles.row(index + 1);
  };
  for (int index = 0; index < ring.ahead(); ++index) {
    ask(index, index);
  }
  SpanQueries<Tr> queries;
  queries.load(block, nullptr);
  LogSum sums[2][Tr::kHeadTiles][2];
  clear_sums<Tr>(sums);
  for (int index = 0; index < total; ++index) {
    const uint8_t* tile = ring.take();
    const int slot = tiles.slot(index);
    const auto bits = static_cast<uint32_t>(present & 0xffffu);
    present >>= 16;
    if (slot >= 0) {
      const int mean = tiles.first_mean(index);
      if (!whole_tiles || mean % tiles.per_node == 0) {
        clear_sums<Tr>(sums);
      }
      const auto* rotation = reinterpret_cast<const float*>(tile + Tr::kTileBytes);
      float products[Tr::kHeadTiles][4] = {};
      if (whole_tiles) {
        if (mean % tiles.per_node == 0) {
          queries.load(block, rotates ? rotation : nullptr);
        }
        multiply_means(block, tile, queries, products);
        add_means<Tr>(products, bits, block.lane, sums);
        if ((mean + kDecodeRate) % tiles.per_node == 0) {
          merge_rows<Tr>(sums);
          store_log_sums(block, 8, slot * kDecodeRate + mean / tiles.per_node, sums[0]);
        }
      } else {
        const int child = (mean + block.lane / 4) / tiles.per_node;
        const int second = child + 8 / tiles.per_node;
        ChildRotations<Tr> children;
        children.load(block, child, second);
        if (rotates) {
          score_tile<Tr, true>(block, tile, children, products);
        } else {
          score_tile<Tr, false>(block, tile, children, products);
        }
        add_means<Tr>(products, bits, block.lane, sums);
        store_log_sums(block, tiles.per_node, slot * kDecodeRate + child, sums[0]);
        store_log_sums(block, tiles.per_node, slot * kDecodeRate + second, sums[1]);
      }
    }
    ask(index + ring.ahead(), ring.ahead() - 1);
  }
}

}  // namespace htree::tree_cache
