// Scores of span means, where a leader has to choose: of each candidate and head the log-sum-exp over the means
// of its tokens, all rotated by the position of the candidate. docs/semantics/tree_attention.md §1.15
#pragma once

#include "ops/tree_cache/decode/sm90/scores.cuh"
#include "ops/tree_cache/decode/sm90/select.cuh"

namespace htree::tree_cache {

// The means of a slot's 16 candidates stand in tiles of 16 rows. Where a candidate fills tiles, its query is
// rotated back in place of its keys, once for all of them.
template <class Tr>
struct SpanQueries {
  QueryOperands of[Tr::kHeadTiles][2][Tr::kSteps];

  // `words` are the staged queries, cos and sin those of the candidate's position, or null.
  __device__ __forceinline__ void load(const uint32_t* words, int lane, const float* cos, const float* sin) {
#pragma unroll
    for (int tile = 0; tile < Tr::kHeadTiles; ++tile) {
#pragma unroll
      for (int step = 0; step < Tr::kSteps; ++step) {
        QueryOperands& low = of[tile][0][step];
        QueryOperands& high = of[tile][1][step];
        low = load_queries<Tr>(words, tile, 0, step, lane);
        high = load_queries<Tr>(words, tile, 1, step, lane);
        if (cos != nullptr) {
          const int dim = (4 * step + lane % 4) * 8;
          rotate_back(low, high, cos + dim, sin + dim);
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
                                                     const float* cos_row, const float* sin_row) {
    float cos[8], sin[8], x[8], y[8];
    tree_attention::load_table(cos_row, cos);
    tree_attention::load_table(sin_row, sin);
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

// Products of this lane's two means, as they are, with queries that were rotated back. load(row, half, step) is a
// pack of a mean. Each half and step of the dims has sums of its own, so that products need not wait for one another.
template <class Tr, class Load>
__device__ __forceinline__ void multiply_means(int lane, Load&& load, const SpanQueries<Tr>& queries,
                                               float (&sums)[Tr::kHeadTiles][4]) {
  using T = typename Tr::T;
  float parts[2 * Tr::kSteps][Tr::kHeadTiles][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 0; step < Tr::kSteps; ++step) {
      KeyOperands keys;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint4 packed = load(row, half, step);
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

// The pool row of a span mean, or kAbsentRow where its page is none.
template <typename T>
__device__ __forceinline__ uint32_t mean_row(const AttendParams<T>& attend, const WalkRow& walk,
                                             uint32_t mean) {
  const int64_t row = row_at(attend, walk, attend.layout.span_mean(mean), attend.layout.key_rows(), 1);
  return row < 0 ? kAbsentRow : static_cast<uint32_t>(row);
}

// So many means stand in neighbouring rows of a pool, from multiples of it on: a power of two.
__device__ __forceinline__ int mean_run(const PageLayout& layout) {
  const uint32_t means = layout.page_size / layout.span;
  return static_cast<int>(means & -means);
}

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

// Merges the sums of `rows` neighbouring rows and stores their logarithm in the scores of their candidate, [heads].
template <class Tr>
__device__ __forceinline__ void store_log_sums(int lane, int rows, float* scores,
                                               const LogSum (&sums)[Tr::kHeadTiles][2]) {
#pragma unroll
  for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const LogSum own = sums[head_tile][i];
      LogSum all = own;
      for (int offset = 4; offset < 4 * rows; offset *= 2) {
        all.max = fmaxf(all.max, __shfl_xor_sync(device::kFullMask, all.max, offset));
      }
      // Equal maxima count as they are, so that inf - inf is never formed.
      all.sum = own.max == all.max ? own.sum : own.sum * device::exp2_flushed(own.max - all.max);
      for (int offset = 4; offset < 4 * rows; offset *= 2) {
        all.sum += __shfl_xor_sync(device::kFullMask, all.sum, offset);
      }
      if (lane / 4 % rows == 0) {
        scores[head_tile * 8 + lane % 4 * 2 + i] = log2_of(all);
      }
    }
  }
}

// The rows of this lane in a tile of 16 neighbouring span means: lane / 4 and 8 further on. They go from global memory
// straight into the operands of products.
template <class Tr>
struct MeanTile {
  uint4 packs[2][2][Tr::kSteps];
  uint32_t present = 0;  // a bit for each of the 16 rows, right for this lane's two

  // Means from `first` on, a multiple of 16; only the first `count` are there.
  __device__ __forceinline__ void load(const AttendParams<typename Tr::T>& attend, const WalkRow& walk,
                                       uint32_t first, int count, int lane) {
    const int run = mean_run(attend.layout);
    const uint32_t run_row = run >= kDecodeRate && count > 0 ? mean_row(attend, walk, first) : kAbsentRow;
    present = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int in_tile = lane / 4 + 8 * i;
      uint32_t row = run_row == kAbsentRow ? kAbsentRow : run_row + in_tile;
      if (in_tile >= count) {
        row = kAbsentRow;
      } else if (run < kDecodeRate) {
        row = mean_row(attend, walk, first + in_tile);
      }
      const bool exists = row != kAbsentRow;
      present |= (exists ? 1u : 0u) << in_tile;
      const auto* from = reinterpret_cast<const uint4*>(attend.keys + int64_t{exists ? row : 0} * Tr::kDim);
#pragma unroll
      for (int pack = 0; pack < 2 * Tr::kSteps; ++pack) {
        const int half = pack / Tr::kSteps, step = pack % Tr::kSteps;
        packs[i][half][step] = exists ? __ldg(from + pack_of<Tr>(half, step, lane)) : make_uint4(0, 0, 0, 0);
      }
    }
  }
  __device__ __forceinline__ uint4 operator()(int row, int half, int step) const {
    return packs[row][half][step];
  }
};

// Rotations of the candidates of this lane's two rows, from the table.
template <class Tr>
struct TableRotation {
  const float* cos_row[2];
  const float* sin_row[2];

  __device__ __forceinline__ void begin(int) const {}
  __device__ __forceinline__ void get(int row, int chunk, float (&cos)[8], float (&sin)[8]) const {
    tree_attention::load_table(cos_row[row] + chunk * 8, cos);
    tree_attention::load_table(sin_row[row] + chunk * 8, sin);
  }
};

// Neighbouring slots of a layer whose candidates are scored by their span means. A warp takes whole candidates, so no bit
// depends on how many warps share the slots.
template <class Tr>
struct SpanSlots {
  const AttendParams<typename Tr::T>& attend;
  const WalkRow& walk;
  const uint32_t* queries;  // staged
  float* scores;            // [slots][16][heads]
  const int32_t* list;      // of the layer; null: slot i is node i
  int first;                // slot of the layer
  int slots;
  int readable;       // candidates of the layer but the rightmost, whose means may hold later tokens
  int log2_per_node;  // of the means of a candidate
  int lane;

  // Warp `warp` of `warps`. With kAhead it loads a tile before it computes the one before, for where few warps hide the
  // way to memory.
  template <bool kAhead>
  __device__ __forceinline__ void score(int warp, int warps) const {
    if ((1 << log2_per_node) >= kDecodeRate) {
      score_candidates(warp, warps);
    } else {
      score_tiles<kAhead>(warp, warps);
    }
  }

 private:
  __device__ __forceinline__ bool rotates() const { return attend.options.cos != nullptr; }
  __device__ __forceinline__ const float* cosines(int position) const {
    return rotates() ? attend.options.cos + int64_t{position} * Tr::kHalf : nullptr;
  }
  __device__ __forceinline__ const float* sines(int position) const {
    return attend.options.sin + int64_t{position} * Tr::kHalf;
  }
  // Loads tile `part` of the means of slot `slot`.
  __device__ __forceinline__ void load(int slot, int part, MeanTile<Tr>& tile) const {
    const int in_layer = first + slot;
    const auto parent = static_cast<uint32_t>(list == nullptr ? in_layer : list[in_layer]);
    const int count = ((readable - in_layer * kDecodeRate) << log2_per_node) - part * kDecodeRate;
    tile.load(attend, walk, ((parent * kDecodeRate) << log2_per_node) + part * kDecodeRate,
              min(max(count, 0), kDecodeRate), lane);
  }

  // Candidates that fill tiles: the query is rotated back in place of their means.
  __device__ __forceinline__ void score_candidates(int warp, int warps) const {
    const int tiles = (1 << log2_per_node) / kDecodeRate;
    SpanQueries<Tr> rotated;
    MeanTile<Tr> tile;
    for (int candidate = warp; candidate < slots * kDecodeRate; candidate += warps) {
      LogSum sums[2][Tr::kHeadTiles][2];
      clear_sums<Tr>(sums);
      const int position = first * kDecodeRate + candidate;
      if (position < readable) {
        rotated.load(queries, lane, cosines(position), sines(position));
        for (int i = 0; i < tiles; ++i) {
          load(candidate / kDecodeRate, candidate % kDecodeRate * tiles + i, tile);
          float products[Tr::kHeadTiles][4] = {};
          multiply_means<Tr>(lane, tile, rotated, products);
          add_means<Tr>(products, tile.present, lane, sums);
        }
        merge_rows<Tr>(sums);
      }
      store_log_sums<Tr>(lane, 8, scores + candidate * Tr::kHeads, sums[0]);
    }
  }

  // Tiles that hold several candidates: their means are rotated.
  template <bool kAhead>
  __device__ __forceinline__ void score_tiles(int warp, int warps) const {
    const int tiles = slots << log2_per_node;
    const int parts = (1 << log2_per_node) - 1;  // a mask
    MeanTile<Tr> tile, next;
    if (kAhead && warp < tiles) {
      load(warp >> log2_per_node, warp & parts, tile);
    }
    for (int index = warp; index < tiles; index += warps) {
      if (!kAhead) {
        load(index >> log2_per_node, index & parts, tile);
      } else if (index + warps < tiles) {
        load((index + warps) >> log2_per_node, (index + warps) & parts, next);
      }
      const int candidates[2] = {(index * kDecodeRate + lane / 4) >> log2_per_node,
                                 (index * kDecodeRate + lane / 4 + 8) >> log2_per_node};
      score_tile(tile, candidates);
      if (kAhead) {
        tile = next;
      }
    }
  }
  __device__ __forceinline__ void score_tile(const MeanTile<Tr>& tile, const int (&candidates)[2]) const {
    float products[Tr::kHeadTiles][4] = {};
    if (rotates()) {
      const int position[2] = {first * kDecodeRate + candidates[0], first * kDecodeRate + candidates[1]};
      TableRotation<Tr> rotation = {{cosines(position[0]), cosines(position[1])},
                                    {sines(position[0]), sines(position[1])}};
      score_keys<Tr, true>(queries, lane, tile, rotation, products);
    } else {
      score_keys<Tr, false>(queries, lane, tile, TableRotation<Tr>{}, products);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const bool exists = (tile.present >> (lane / 4 + 8 * row) & 1) != 0;
      LogSum sums[Tr::kHeadTiles][2];
#pragma unroll
      for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          sums[head_tile][i] =
              exists ? LogSum{products[head_tile][2 * row + i], 1.0f} : LogSum{kNoScore, 0.0f};
        }
      }
      store_log_sums<Tr>(lane, 1 << log2_per_node, scores + candidates[row] * Tr::kHeads, sums);
    }
  }
};

// log2 of the span means of a node of a layer.
__device__ __forceinline__ int log2_means(const PageLayout& layout, int layer) {
  return log2_of_power(static_cast<int>(layout.tokens[layer] / layout.span));
}

// The block's span scores of a layer.
template <class Tr>
__device__ __forceinline__ void score_spans(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                            const int32_t* list) {
  const SpanSlots<Tr> own = {.attend = block.attend(),
                             .walk = block.walk,
                             .queries = block.queries(),
                             .scores = block.span_scores(),
                             .list = list,
                             .first = slots.first,
                             .slots = slots.own(block.params.plan.shares),
                             .readable = slots.num - 1,
                             .log2_per_node = log2_means(block.attend().layout, slots.layer),
                             .lane = block.lane};
  own.template score<true>(block.warp, Tr::kWarps);
}

// Brings the block's own of the scores that top_spans.cuh has made to its shared memory. A __syncthreads has to follow.
template <class Tr>
__device__ __forceinline__ void load_top_spans(const DecodeBlock<Tr>& block, const LayerSlots& slots) {
  constexpr int kSlotFloats = kDecodeRate * Tr::kHeads;
  const auto& attend = block.attend();
  const int64_t at = block.walk.at * int64_t{block.most_slots()} + slots.first;
  const auto* from = reinterpret_cast<const float4*>(attend.chunk.span_scores + at * kSlotFloats);
  auto* to = reinterpret_cast<float4*>(block.span_scores());
  const int packs = slots.own(block.params.plan.shares) * kSlotFloats / 4;
  for (int i = threadIdx.x; i < packs; i += Tr::kThreads) {
    to[i] = from[i];
  }
}

}  // namespace htree::tree_cache
