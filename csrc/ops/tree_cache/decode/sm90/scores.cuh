// Scores of a layer's candidates with all query heads, on the tensor cores, as exact as fp32: a rotated key and
// a rotated query are each a sum of two bf16 numbers, and three of the four products are added.
#pragma once

#include "device/rotary.cuh"
#include "ops/selection/cuda/any/compute_scores.cuh"
#include "ops/tree_cache/decode/sm90/tiles.cuh"

namespace htree::tree_cache {

// x = high + low; `high` is a bf16 in the upper half of a float, and `low` is exact before it is rounded.
struct SplitFloat {
  float high;
  float low;
};
__device__ __forceinline__ SplitFloat split_float(float x) {
  const float high = __uint_as_float(__float_as_uint(x) & 0xffff0000u);
  return {high, x - high};
}
// The same, but the low part of an infinity is 0, not NaN.
__device__ __forceinline__ SplitFloat split_any_float(float x) {
  const SplitFloat split = split_float(x);
  return {split.high, split.high == x ? 0.0f : split.low};
}

// Two floats as bf16, by cutting off what lies behind.
__device__ __forceinline__ uint32_t pack_upper_halves(float first, float second) {
  return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}

// Where the word of queries stands that holds dims `dim` and dim + 1 (dim even) of a head: [high or low part]
// [tile of heads][half of the dims][step][lane][4]. A lane gets the four words of a step with one load.
template <class Tr>
__device__ __forceinline__ int query_word(int part, int head, int dim) {
  const int half = dim / Tr::kHalf, in_half = dim % Tr::kHalf;
  const int chunk = in_half / 8;
  const int lane = head % 8 * 4 + chunk % 4;
  return ((((part * Tr::kHeadTiles + head / 8) * 2 + half) * Tr::kSteps + chunk / 4) * 32 + lane) * 4 +
         in_half % 8 / 2;
}

// Stages the queries of a row in `words`, rotated by `position`, in units of log2. Heads beyond the group are zero. Every
// thread of the block calls it.
template <class Tr>
__device__ __forceinline__ void stage_queries(const AttendParams<typename Tr::T>& attend, const WalkRow& walk,
                                              int position, uint32_t* words) {
  const auto& options = attend.options;
  const float scale = options.scale * 1.44269504088896340736f;
  const auto* q = attend.q + walk.row * attend.q_row + int64_t{walk.head} * attend.group * attend.q_head;
  const int64_t table = int64_t{position} * Tr::kHalf;
  for (int item = threadIdx.x; item < Tr::kHeads * Tr::kHalf / 2; item += Tr::kThreads) {
    const int head = item / (Tr::kHalf / 2);
    const int dim = item % (Tr::kHalf / 2) * 2;
    float low[2] = {}, high[2] = {};
    if (head < attend.group) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        low[e] = device::to_acc(q[head * attend.q_head + dim + e]);
        high[e] = device::to_acc(q[head * attend.q_head + Tr::kHalf + dim + e]);
        if (options.cos != nullptr) {
          device::rotate_pair(low[e], high[e], options.cos[table + dim + e], options.sin[table + dim + e]);
        }
        low[e] *= scale;
        high[e] *= scale;
      }
    }
    const auto low0 = split_any_float(low[0]), low1 = split_any_float(low[1]);
    const auto high0 = split_any_float(high[0]), high1 = split_any_float(high[1]);
    words[query_word<Tr>(0, head, dim)] = pack_upper_halves(low0.high, low1.high);
    words[query_word<Tr>(1, head, dim)] = device::pack_pair<__nv_bfloat16>(low0.low, low1.low);
    words[query_word<Tr>(0, head, Tr::kHalf + dim)] = pack_upper_halves(high0.high, high1.high);
    words[query_word<Tr>(1, head, Tr::kHalf + dim)] = device::pack_pair<__nv_bfloat16>(high0.low, high1.low);
  }
}

// The queries for a layer, at the position of its last candidate.
template <class Tr>
__device__ __forceinline__ void stage_decode_queries(const DecodeBlock<Tr>& block, const LayerSlots& slots) {
  stage_queries<Tr>(block.attend(), block.walk, slots.num - 1, block.queries());
}

// Copies the rotations of the sixteen children of a slot by their places in it to shared memory: of each the cosines,
// then the sines. Every thread calls it; wait_copies() and a __syncthreads have to follow.
template <class Tr>
__device__ __forceinline__ void copy_child_rotations(const DecodeBlock<Tr>& block) {
  const auto& options = block.attend().options;
  if (options.cos == nullptr) {
    return;
  }
  for (int i = threadIdx.x * 4; i < kDecodeRate * Tr::kHalf; i += Tr::kThreads * 4) {
    const uint32_t to = device::shared_address(block.children(i / Tr::kHalf) + i % Tr::kHalf);
    device::copy_async_16(to, options.cos + i);
    device::copy_async_16(to + Tr::kHalf * sizeof(float), options.sin + i);
  }
  device::commit_copies();
}

// Eight elements of T as floats.
template <typename T>
__device__ __forceinline__ void unpack_eight(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __half>) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    } else {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

// The keys of two children as the A operands of two products: high parts and low parts.
struct KeyOperands {
  uint32_t high[2][4];
  uint32_t low[2][4];

  // x is elements of child `row` of the pair. A rotation mixes infinities anyway.
  template <bool kRotated>
  __device__ __forceinline__ void set(int row, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto a = kRotated ? split_float(x[2 * i]) : split_any_float(x[2 * i]);
      const auto b = kRotated ? split_float(x[2 * i + 1]) : split_any_float(x[2 * i + 1]);
      high[i / 2][i % 2 * 2 + row] = pack_upper_halves(a.high, b.high);
      low[i / 2][i % 2 * 2 + row] = device::pack_pair<__nv_bfloat16>(a.low, b.low);
    }
  }
};

// The words of the queries for one tile of heads, half and step of the dims: [high or low part].
struct QueryOperands {
  uint4 words[2];
};
template <class Tr>
__device__ __forceinline__ QueryOperands load_queries(const uint32_t* queries, int tile, int half, int step,
                                                      int lane) {
  QueryOperands found;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int at = (((part * Tr::kHeadTiles + tile) * 2 + half) * Tr::kSteps + step) * 32 + lane;
    found.words[part] = device::load_shared_16(device::shared_address(queries + at * 4));
  }
  return found;
}

// sums += one part of the keys times one part of the queries.
__device__ __forceinline__ void multiply_parts(const uint32_t (&keys)[2][4], const uint4& queries,
                                               float (&sums)[4]) {
  device::mma_16x8x16<__nv_bfloat16>(sums, keys[0], queries.x, queries.y);
  device::mma_16x8x16<__nv_bfloat16>(sums, keys[1], queries.z, queries.w);
}
__device__ __forceinline__ void multiply_keys(const KeyOperands& keys, const QueryOperands& queries,
                                              float (&sums)[4]) {
  multiply_parts(keys.low, queries.words[0], sums);
  multiply_parts(keys.high, queries.words[1], sums);
  multiply_parts(keys.high, queries.words[0], sums);
}

// The pack of eight dims of a row that a lane has in a half and step of the dims.
template <class Tr>
__device__ __forceinline__ int pack_of(int half, int step, int lane) {
  return half * Tr::kChunks / 2 + 4 * step + lane % 4;
}

// Products of this lane's two keys with all heads. load(row, half, step) is a pack of a key. Keys are rotated with what
// `rotation` gives: it is told which pack comes, and asked for the cosines and sines of that pack for each key.
template <class Tr, bool kRotate, class Load, class Rotation>
__device__ __forceinline__ void score_keys(const uint32_t* query_words, int lane, Load&& load,
                                           Rotation&& rotation, float (&sums)[Tr::kHeadTiles][4]) {
  using T = typename Tr::T;
#pragma unroll
  for (int step = 0; step < Tr::kSteps; ++step) {
    const int chunk = pack_of<Tr>(0, step, lane);
    if constexpr (kRotate) {
      rotation.begin(chunk);
    }
    KeyOperands low_keys, high_keys;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float low[8], high[8];
      unpack_eight<T>(load(row, 0, step), low);
      unpack_eight<T>(load(row, 1, step), high);
      if constexpr (kRotate) {
        float cos[8], sin[8];
        rotation.get(row, chunk, cos, sin);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          device::rotate_pair(low[e], high[e], cos[e], sin[e]);
        }
      }
      low_keys.set<kRotate>(row, low);
      high_keys.set<kRotate>(row, high);
    }
#pragma unroll
    for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
      const auto queries = [&](int half) {
        return load_queries<Tr>(query_words, head_tile, half, step, lane);
      };
      multiply_keys(low_keys, queries(0), sums[head_tile]);
      multiply_keys(high_keys, queries(1), sums[head_tile]);
    }
  }
}

// Rotations of two children of a slot: by the slot, which came with its tile, and by the place in the slot together.
template <class Tr>
struct SlotRotation {
  const float* slot;
  const float* children[2];
  float cos[8], sin[8];

  __device__ __forceinline__ void begin(int chunk) {
    tree_attention::load_table(slot + chunk * 8, cos);
    tree_attention::load_table(slot + Tr::kHalf + chunk * 8, sin);
  }
  __device__ __forceinline__ void get(int row, int chunk, float (&c)[8], float (&s)[8]) const {
    float child_cos[8], child_sin[8];
    tree_attention::load_table(children[row] + chunk * 8, child_cos);
    tree_attention::load_table(children[row] + Tr::kHalf + chunk * 8, child_sin);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      c[e] = cos[e];
      s[e] = sin[e];
      device::rotate_pair(c[e], s[e], child_cos[e], child_sin[e]);
    }
  }
};

// Reads this lane's packs of a tile in shared memory, as score_keys() and multiply_means() ask for them.
template <class Tr>
struct TileLoad {
  uint32_t tile;  // shared address
  int lane;

  __device__ __forceinline__ TileLoad(uint32_t tile_address, int own_lane)
      : tile(tile_address), lane(own_lane) {}
  __device__ __forceinline__ uint4 operator()(int row, int half, int step) const {
    return device::load_shared_16(tile + pack_offset<Tr>(lane / 4 + 8 * row, pack_of<Tr>(half, step, lane)));
  }
};

// The same where the tile holds packed tokens.
template <class Tr>
struct CodeLoad {
  uint32_t tile;
  int lane;
  uint32_t scales[2];  // of this lane's two keys, twice in a word each

  __device__ __forceinline__ CodeLoad(uint32_t tile_address, int own_lane)
      : tile(tile_address), lane(own_lane) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int key = lane / 4 + 8 * row;
      const uint32_t pair = device::load_shared_4(tile + Tr::kScalesAt + key / 2 * 4);
      scales[row] = __byte_perm(pair, 0, key % 2 == 0 ? 0x1010 : 0x3232);
    }
  }
  __device__ __forceinline__ uint4 operator()(int row, int half, int step) const {
    const int first = pack_of<Tr>(half, step, lane) * Tr::kLeafBits;  // eight codes have kLeafBits bytes
    const uint32_t at = tile + code_offset<Tr>(lane / 4 + 8 * row, first / 16) + first % 16;
    return expand_eight<typename Tr::T, Tr::kLeafBits>(at, scales[row]);
  }
};

// Products of the keys in `tile` with all heads. Each key is rotated by its position: `child` are the places in the slot
// of this lane's two keys. kCodes: they are packed tokens.
template <class Tr, bool kRotate, bool kCodes>
__device__ __forceinline__ void score_tile(const DecodeBlock<Tr>& block, const uint8_t* tile,
                                           const int (&child)[2], float (&sums)[Tr::kHeadTiles][4]) {
  SlotRotation<Tr> rotation = {reinterpret_cast<const float*>(tile + Tr::kTileBytes),
                               {block.children(child[0]), block.children(child[1])}};
  using Load = std::conditional_t<kCodes, CodeLoad<Tr>, TileLoad<Tr>>;
  const Load load(device::shared_address(tile), block.lane);
  score_keys<Tr, kRotate>(block.queries(), block.lane, load, rotation, sums);
}

// The block's scores of a layer, -inf where there is no candidate. Brings the tiles and asks for the first
// values. `asked` says how many of the layer's places have been asked for. kCodes: the layer is that of packed tokens.
template <class Tr, bool kCodes>
__device__ __forceinline__ void score_rows(const DecodeBlock<Tr>& block, TileRing<Tr>& ring,
                                           const LayerSlots& slots, const uint32_t* rows, int asked) {
  for (; asked < ring.ahead(); ++asked) {
    ring.ask(slots, rows, asked);
  }
  const bool rotates = block.attend().options.cos != nullptr;
  const int children[2] = {block.lane / 4, block.lane / 4 + 8};
  const int tiles = block.params.plan.shares * slots.tiles;
  for (int index = 0; index < tiles; ++index) {
    const uint8_t* tile = ring.take();
    ring.ask(slots, rows, index + ring.ahead());
    const int slot = slot_of_tile(block, slots, index);
    if (slot >= 0) {
      float sums[Tr::kHeadTiles][4] = {};
      if (rotates) {
        score_tile<Tr, true, kCodes>(block, tile, children, sums);
      } else {
        score_tile<Tr, false, kCodes>(block, tile, children, sums);
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int candidate = slot * kDecodeRate + block.lane / 4 + 8 * row;
        const bool present = rows[candidate] != kAbsentRow;
#pragma unroll
        for (int head_tile = 0; head_tile < Tr::kHeadTiles; ++head_tile) {
          constexpr float kNone = -__builtin_huge_valf();
          float2 pair = make_float2(sums[head_tile][2 * row], sums[head_tile][2 * row + 1]);
          pair = present ? pair : make_float2(kNone, kNone);
          float* to = block.scores() + candidate * Tr::kHeads + head_tile * 8 + block.lane % 4 * 2;
          *reinterpret_cast<float2*>(to) = pair;
        }
      }
    }
  }
}

// The same for any layer. Packed tokens have a loop of their own, because one for both kinds of tiles would keep more
// addresses in registers than there are.
template <class Tr>
__device__ __forceinline__ void score_layer(const DecodeBlock<Tr>& block, TileRing<Tr>& ring,
                                            const LayerSlots& slots, const uint32_t* rows, int asked) {
  if constexpr (Tr::kLeafBits > 0) {
    if (has_codes<Tr>(slots)) {
      score_rows<Tr, true>(block, ring, slots, rows, asked);
      return;
    }
  }
  score_rows<Tr, false>(block, ring, slots, rows, asked);
}

}  // namespace htree::tree_cache
