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

// Products of the means in `tile`, as they are, with queries that were rotated back. Each half and step of the dims has
// sums of its own, so that products need not wait for one another.
template <class Tr>
__device__ __forceinline__ void multiply_means(const DecodeBlock<Tr>& block, const uint8_t* tile,
                                               const SpanQueries<Tr>& queries,
                                               float (&sums)[Tr::kHeadTiles][4]) {
  using T = typename Tr::T;
  const uint32_t address = device::shared_address(tile);
  float parts[2 * Tr::kSteps][Tr::kHeadTiles][4] = {};
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
        float(&part)[4] = parts[half * Tr::kSteps + step][head_tile];
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
          multiply_parts(keys.high, words.words[1], part);
          multiply_parts(keys.high, words.words[0], part);
        } else {
          multiply_keys(keys, words, part);
        }
      }
    }
  }
#pragma unroll
  for (int part = 0; part < 2 * Tr::kSteps; ++part) {
#pragma unroll
    for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[head_tile][i] += parts[part][head_tile][i];
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

__device__ __forceinline__ int log2_of_power(int power) {
  return 31 - __clz(power);
}

// One tile after the other of the means of a warp's slots: a slot has as many tiles as a candidate has means, which is a
// power of two.
template <class Tr>
struct SpanCursor {
  const DecodeBlock<Tr>& block;
  const LayerSlots& slots;
  int log2_per_node;  // of the means of a candidate
  int place = 0;      // among the warp's slots
  int part = 0;       // tile of the slot
  int slot;           // counted from the block's first, or -1

  __device__ __forceinline__ SpanCursor(const DecodeBlock<Tr>& block, const LayerSlots& slots, int per_node)
      : block(block), slots(slots), log2_per_node(log2_of_power(per_node)) {
    find_slot();
  }
  __device__ __forceinline__ bool ended() const { return place >= block.params.plan.shares * slots.tiles; }
  __device__ __forceinline__ void advance() {
    if (++part >> log2_per_node != 0) {
      part = 0;
      ++place;
      find_slot();
    }
  }
  // First mean of the tile, of those of the slot; and the place in the slot of the candidate of a mean.
  __device__ __forceinline__ int first_mean() const { return part * kDecodeRate; }
  __device__ __forceinline__ int child(int mean) const { return mean >> log2_per_node; }
  // Whether the tile begins a candidate, if candidates fill tiles.
  __device__ __forceinline__ bool begins_candidate() const {
    return (first_mean() & ((1 << log2_per_node) - 1)) == 0;
  }

 private:
  __device__ __forceinline__ void find_slot() { slot = ended() ? -1 : slot_of_tile(block, slots, place); }
};

// Asks for the tiles that a cursor names. Rows of the next tile are looked up one tile ahead, because the table of pages
// is in global memory.
template <class Tr>
class SpanStream {
 public:
  __device__ __forceinline__ SpanStream(const DecodeBlock<Tr>& block, TileRing<Tr>& ring,
                                        const LayerSlots& slots, const int32_t* list, int per_node)
      : block_(block), ring_(ring), list_(list), cursor_(block, slots, per_node), per_node_(per_node) {
    const PageLayout& layout = block.attend().layout;
    const uint32_t means = layout.page_size / layout.span;
    run_ = static_cast<int>(means & -means);  // neighbouring rows of the pool, from multiples of it on
    look_up();
  }

  // Asks for the next tile, or for none behind the last. Its present rows become bits 16 * pending and further of
  // `present`.
  __device__ __forceinline__ void ask(int pending, uint64_t& present) {
    const uint64_t bits = __ballot_sync(device::kFullMask, row_ != kAbsentRow) & 0xffffu;
    present |= bits << (16 * pending);
    const bool exists = !cursor_.ended();
    ring_.ask_means(exists, row_, position());
    if (exists) {
      cursor_.advance();
      look_up();
    }
  }

 private:
  // The pool row of row lane % 16 of the tile. The means of the rightmost candidate may hold later tokens.
  __device__ __forceinline__ void look_up() {
    row_ = kAbsentRow;
    if (cursor_.slot < 0) {
      return;
    }
    const LayerSlots& slots = cursor_.slots;
    const int in_slot = cursor_.first_mean() + block_.lane % kDecodeRate;
    const int in_list = slots.first + cursor_.slot;
    const auto first =
        static_cast<uint32_t>(list_[in_list]) * (kDecodeRate * per_node_) + cursor_.first_mean();
    const uint32_t own = first + block_.lane % kDecodeRate;
    if (run_ < kDecodeRate) {
      row_ = row_of_mean(own);
    } else {
      if (cursor_.part == 0 || (first & (run_ - 1)) == 0) {
        run_row_ = row_of_mean(first);
        run_first_ = first;
      }
      row_ = run_row_ == kAbsentRow ? kAbsentRow : run_row_ + (own - run_first_);
    }
    if (in_list * kDecodeRate + cursor_.child(in_slot) >= slots.num - 1) {
      row_ = kAbsentRow;
    }
  }
  __device__ __forceinline__ uint32_t row_of_mean(uint32_t mean) const {
    const auto& attend = block_.attend();
    const int64_t row =
        row_at(attend, block_.walk, attend.layout.span_mean(mean), attend.layout.key_rows(), 1);
    return row < 0 ? kAbsentRow : static_cast<uint32_t>(row);
  }
  // The position whose rotation comes with a tile: that of its candidate where it has only one, else that of the
  // slot's first.
  __device__ __forceinline__ int position() const {
    if (cursor_.slot < 0) {
      return 0;
    }
    const int child = per_node_ >= kDecodeRate ? cursor_.child(cursor_.first_mean()) : 0;
    return (cursor_.slots.first + cursor_.slot) * kDecodeRate + child;
  }

  const DecodeBlock<Tr>& block_;
  TileRing<Tr>& ring_;
  const int32_t* list_;
  SpanCursor<Tr> cursor_;  // of the tile that is looked up
  int per_node_;
  int run_;
  uint32_t row_;
  uint32_t run_row_ = kAbsentRow, run_first_ = 0;
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
  const int per_node = static_cast<int>(layout.tokens[slots.layer] / layout.span);
  const bool rotates = block.attend().options.cos != nullptr;
  const bool whole_tiles = per_node >= kDecodeRate;
  SpanStream<Tr> stream(block, ring, slots, list, per_node);
  uint64_t present = 0;  // sixteen bits for each tile that was asked for
  for (int pending = 0; pending < ring.ahead(); ++pending) {
    stream.ask(pending, present);
  }
  SpanQueries<Tr> queries;
  queries.load(block, nullptr);
  LogSum sums[2][Tr::kHeadTiles][2];
  for (SpanCursor<Tr> cursor(block, slots, per_node); !cursor.ended(); cursor.advance()) {
    const uint8_t* tile = ring.take();
    const auto bits = static_cast<uint32_t>(present & 0xffffu);
    present >>= 16;
    stream.ask(ring.ahead() - 1, present);
    if (cursor.slot < 0) {
      continue;
    }
    if (!whole_tiles || cursor.begins_candidate()) {
      clear_sums<Tr>(sums);
    }
    const auto* rotation = reinterpret_cast<const float*>(tile + Tr::kTileBytes);
    const int first = cursor.slot * kDecodeRate;  // candidate of the block
    float products[Tr::kHeadTiles][4] = {};
    if (whole_tiles) {
      if (cursor.begins_candidate()) {
        queries.load(block, rotates ? rotation : nullptr);
      }
      multiply_means(block, tile, queries, products);
      add_means<Tr>(products, bits, block.lane, sums);
      if (((cursor.first_mean() + kDecodeRate) & (per_node - 1)) == 0) {
        merge_rows<Tr>(sums);
        store_log_sums(block, 8, first + cursor.child(cursor.first_mean()), sums[0]);
      }
    } else {
      const int child = cursor.child(cursor.first_mean() + block.lane / 4);
      const int children[2] = {child, child + 8 / per_node};
      if (rotates) {
        score_tile<Tr, true>(block, tile, children, products);
      } else {
        score_tile<Tr, false>(block, tile, children, products);
      }
      add_means<Tr>(products, bits, block.lane, sums);
      store_log_sums(block, per_node, first + children[0], sums[0]);
      store_log_sums(block, per_node, first + children[1], sums[1]);
    }
  }
}

}  // namespace htree::tree_cache
