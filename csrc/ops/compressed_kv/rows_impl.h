// The CPU kernels of rows.h, which prune, pack, unpack and attend to rows, compiled per instruction
// set after host/cpu/simd.h (csrc/instances.py).
#pragma once

#include "ops/compressed_kv/rows.h"

namespace htree::HTREE_ISA {

using compressed_kv::RowFormat;

constexpr int kMaxHeadDim = compressed_kv::kMostHeadDim;

inline int horizontal_count(VecI mask) {  // lanes are 0 or -1
  int32_t lanes[kLanes];
  std::memcpy(lanes, &mask, sizeof mask);
  int sum = 0;
  for (int i = 0; i < kLanes; ++i) {
    sum -= lanes[i];
  }
  return sum;
}

// How many low mantissa bits of |x| are zero in every value of T.
template <typename T>
constexpr int kZeroBits = 0;
template <>
constexpr int kZeroBits<Fp16> = 13;
template <>
constexpr int kZeroBits<Bf16> = 16;

// keys [D] of the selection: the bits of |x| * weight as positive integers, whose low `zero_bits` are 0.
// Every NaN has one key, above that of infinity. docs/semantics/compressed_kv.md §4.4
template <typename T>
inline void selection_keys(const T* x, const float* weight, int head_dim, int zero_bits, int32_t* keys) {
  constexpr auto kInfinityKey = static_cast<int32_t>(compressed_kv::kNanKey) - 1;
  const VecI nan_key = VecI{} + (kInfinityKey + (1 << zero_bits));
  for (int d = 0; d < head_dim; d += kLanes) {
    VecF value = load(x + d);
    if (weight != nullptr) {
      value = value * load(weight + d);
    }
    const VecI bits = as_int(value) & 0x7fffffff;
    const VecI key = bits < nan_key ? bits : nan_key;
    std::memcpy(keys + d, &key, sizeof key);
  }
}

inline int count_at_least(const int32_t* keys, int head_dim, int32_t bound) {
  VecI count = {};
  for (int d = 0; d < head_dim; d += kLanes) {
    VecI key;
    std::memcpy(&key, keys + d, sizeof key);
    count += key >= bound;
  }
  return horizontal_count(count);
}

// The bitmap of the `keep` largest keys, ties to the lower channel. The threshold, which is the keep-th
// largest key, is found bit by bit. The low `zero_bits` of every key are 0.
inline void select_channels(const int32_t* keys, const RowFormat& format, int zero_bits, uint64_t* bitmap) {
  int32_t threshold = 0;
  for (int bit = 30; bit >= zero_bits; --bit) {
    const int32_t candidate = threshold | 1 << bit;
    if (count_at_least(keys, format.head_dim, candidate) >= format.keep) {
      threshold = candidate;
    }
  }
  int ties = format.keep - count_at_least(keys, format.head_dim, threshold + 1);
  for (int word = 0; word < format.words(); ++word) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) {
      const int32_t key = keys[64 * word + i];
      const int tie = key == threshold && ties > 0 ? 1 : 0;
      ties -= tie;
      bits |= static_cast<uint64_t>(key > threshold || tie != 0 ? 1 : 0) << i;
    }
    bitmap[word] = bits;
  }
}

template <typename T>
inline void select_row(const T* x, const float* weight, const RowFormat& format, uint64_t* bitmap) {
  alignas(64) int32_t keys[kMaxHeadDim];
  const int zero_bits = weight == nullptr ? kZeroBits<T> : 0;
  selection_keys(x, weight, format.head_dim, zero_bits, keys);
  select_channels(keys, format, zero_bits, bitmap);
}

// Calls step(channel) for the channels of a bitmap in increasing order.
template <typename Step>
inline void for_channels(const uint64_t* bitmap, int words, Step&& step) {
  for (int word = 0; word < words; ++word) {
    for (uint64_t bits = bitmap[word]; bits != 0; bits &= bits - 1) {
      step(64 * word + __builtin_ctzll(bits));
    }
  }
}

template <typename T>
void prune_row(const T* x, const float* weight, const RowFormat& format, T* pruned, uint64_t* bitmap) {
  select_row(x, weight, format, bitmap);
  std::memset(static_cast<void*>(pruned), 0, sizeof(T) * static_cast<size_t>(format.head_dim));
  for_channels(bitmap, format.words(), [&](int channel) { pruned[channel] = x[channel]; });
}

// The scale of a row whose largest kept magnitude is `largest`; NaN where that poisons the row.
inline uint16_t scale_of(float largest, int max_code) {
  if (!(largest <= std::numeric_limits<float>::max())) {
    return compressed_kv::kPoisonedScale;
  }
  const uint16_t scale = from_float<Fp16>(largest / static_cast<float>(max_code)).bits;
  if (scale == 0 && largest > 0) {
    return compressed_kv::kSmallestScale;
  }
  return scale > compressed_kv::kLargestScale ? compressed_kv::kLargestScale : scale;
}

// code = clamp(RNE(x / scale), +-max_code) in int8. Every entry of a poisoned row or a zero row gets code 0.
inline void quantise(const float* kept, int count, uint16_t scale, int max_code, int8_t* codes) {
  const float divisor = to_float(Fp16{scale});
  if (!(divisor > 0)) {
    std::memset(codes, 0, static_cast<size_t>(count));
    return;
  }
  const float bound = static_cast<float>(max_code);
  const float shifter = 12582912.0f;  // 1.5 * 2^23 rounds to an integer, ties to even
  for (int i = 0; i < count; ++i) {
    float code = kept[i] / divisor;
    code = code > bound ? bound : code < -bound ? -bound : code;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>((code + shifter) - shifter));
  }
}

template <typename T>
void compress_row(const T* x, const float* weight, const RowFormat& format, uint64_t* bitmap, uint8_t* values,
                  uint16_t* scale) {
  select_row(x, weight, format, bitmap);
  int count = 0;
  if (!format.quantised()) {
    if constexpr (sizeof(T) == 2) {  // the checks refuse fp32
      T kept[kMaxHeadDim + 1] = {};  // one padding value
      for_channels(bitmap, format.words(), [&](int channel) { kept[count++] = x[channel]; });
      std::memcpy(values, kept, static_cast<size_t>(format.row_bytes()));
    }
    return;
  }
  alignas(64) float row[kMaxHeadDim];
  for (int d = 0; d < format.head_dim; d += kLanes) {
    store(row + d, load(x + d));
  }
  float kept[kMaxHeadDim];
  for_channels(bitmap, format.words(), [&](int channel) { kept[count++] = row[channel]; });
  float largest = 0;
  for (int i = 0; i < count; ++i) {
    const float magnitude = kept[i] < 0 ? -kept[i] : kept[i];
    largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
    if (largest != largest) {
      break;
    }
  }
  *scale = scale_of(largest, format.max_code());
  int8_t codes[kMaxHeadDim + 8] = {};  // the padding of 4-bit codes is code 0
  quantise(kept, count, *scale, format.max_code(), codes);
  if (format.bits == 8) {
    std::memcpy(values, codes, static_cast<size_t>(format.row_bytes()));
  } else {
    for (int i = 0; i < format.row_bytes(); ++i) {
      values[i] = static_cast<uint8_t>((codes[2 * i] + 8) | (codes[2 * i + 1] + 8) << 4);
    }
  }
}

// ---- unpacking

// The kept entries of a row as floats, followed by zeros, so that a bitmap with too many bits reads zeros.
template <typename T>
inline void unpack_row(const uint8_t* values, uint16_t scale, const RowFormat& format, float* unpacked) {
  const int keep = format.keep;
  if (!format.quantised()) {
    using Raw = std::conditional_t<sizeof(T) == 2, T, Fp16>;  // with fp32 queries values of 16 bits are half
    alignas(64) Raw raw[compressed_kv::kUnpackedFloats] = {};
    std::memcpy(static_cast<void*>(raw), values, sizeof(Raw) * static_cast<size_t>(keep));
    for (int i = 0; i < keep; i += kLanes) {
      store(unpacked + i, load(raw + i));
    }
  } else {
    const float factor = to_float(Fp16{scale});
    if (format.bits == 8) {
      for (int i = 0; i < keep; ++i) {
        unpacked[i] = factor * static_cast<float>(static_cast<int8_t>(values[i]));
      }
    } else {
      for (int i = 0; i < (keep + 1) / 2; ++i) {
        unpacked[2 * i] = factor * static_cast<float>((values[i] & 15) - 8);
        unpacked[2 * i + 1] = factor * static_cast<float>((values[i] >> 4) - 8);
      }
    }
  }
  std::memset(unpacked + keep, 0, sizeof(float) * static_cast<size_t>(compressed_kv::kUnpackedFloats - keep));
}

#if HTREE_LANES == 16
inline VecF spread(const float* packed, uint32_t mask) {
  return (VecF)_mm512_maskz_expand_ps(static_cast<__mmask16>(mask), _mm512_loadu_ps(packed));
}
#else
// For each mask of kLanes bits, the rank of every channel among those that are set.
struct SpreadTable {
  int32_t rank[1 << kLanes][kLanes];
};
constexpr SpreadTable make_spread_table() {
  SpreadTable table{};
  for (int mask = 0; mask < 1 << kLanes; ++mask) {
    for (int i = 0, rank = 0; i < kLanes; ++i) {
      table.rank[mask][i] = rank;
      rank += mask >> i & 1;
    }
  }
  return table;
}
inline const SpreadTable kSpreadTable = make_spread_table();

// Lane i becomes packed[rank of i] where bit i of the mask is set, else 0.
inline VecF spread(const float* packed, uint32_t mask) {
  VecI index;
  std::memcpy(&index, kSpreadTable.rank[mask], sizeof index);
  VecI bit;
  for (int i = 0; i < kLanes; ++i) {
    bit[i] = 1 << i;
  }
  const VecI kept = (bit & static_cast<int32_t>(mask)) != 0;
  return as_float(as_int(__builtin_shuffle(load(packed), index)) & kept);
}
#endif

// Calls put(channel, vector) for the D expanded channels.
template <typename Put>
inline void spread_row(const uint64_t* bitmap, const float* unpacked, int words, Put&& put) {
  constexpr uint64_t kMask = (uint64_t{1} << kLanes) - 1;
  for (int word = 0; word < words; ++word) {
    uint64_t bits = bitmap[word];
    for (int i = 0; i < 64; i += kLanes, bits >>= kLanes) {
      const auto mask = static_cast<uint32_t>(bits & kMask);
      put(64 * word + i, spread(unpacked, mask));
      unpacked += __builtin_popcount(mask);
    }
  }
}

template <typename T>
void expand_row(const uint64_t* bitmap, const uint8_t* values, uint16_t scale, const RowFormat& format,
                float* out) {
  alignas(64) float unpacked[compressed_kv::kUnpackedFloats];
  unpack_row<T>(values, scale, format, unpacked);
  spread_row(bitmap, unpacked, format.words(), [&](int channel, VecF x) { store(out + channel, x); });
}

template <typename T>
void decompress_row(const uint64_t* bitmap, const uint8_t* values, uint16_t scale, const RowFormat& format,
                    T* out) {
  if (!format.quantised()) {
    if constexpr (sizeof(T) == 2) {  // raw values: not even the payload of a NaN changes
      T raw[kMaxHeadDim] = {};
      std::memcpy(static_cast<void*>(raw), values, sizeof(T) * static_cast<size_t>(format.keep));
      std::memset(static_cast<void*>(out), 0, sizeof(T) * static_cast<size_t>(format.head_dim));
      int rank = 0;
      for_channels(bitmap, format.words(), [&](int channel) { out[channel] = raw[rank++]; });
    }
    return;
  }
  alignas(64) float unpacked[compressed_kv::kUnpackedFloats];
  unpack_row<T>(values, scale, format, unpacked);
  spread_row(bitmap, unpacked, format.words(), [&](int channel, VecF x) { store(out + channel, x); });
}

template <typename T>
void widen_row(const T* x, int head_dim, float* out) {
  for (int d = 0; d < head_dim; d += kLanes) {
    store(out + d, load(x + d));
  }
}

template <typename T>
constexpr compressed_kv::TypedKernels<T> typed_kernels() {
  return {prune_row<T>, compress_row<T>, decompress_row<T>, expand_row<T>, widen_row<T>};
}

// ---- attention to a tile of expanded rows

using compressed_kv::kTileTokens;
using compressed_kv::Tile;

// Four tokens share each load of the query.
inline void add_scores(const Tile& tile, const float* q, const float* k, float* scores) {
  const int head_dim = tile.key_dim;
  for (int query = 0; query < tile.num_queries; ++query) {
    const float* row = q + static_cast<int64_t>(query) * head_dim;
    float* score = scores + query * kTileTokens;
    int token = 0;
    for (; token + 4 <= tile.num_tokens; token += 4) {
      const float* keys = k + static_cast<int64_t>(token) * head_dim;
      VecF sum[4] = {};
      for (int d = 0; d < head_dim; d += kLanes) {
        const VecF value = load(row + d);
        for (int i = 0; i < 4; ++i) {
          sum[i] += value * load(keys + i * head_dim + d);
        }
      }
      for (int i = 0; i < 4; ++i) {
        score[token + i] += horizontal_sum(sum[i]);
      }
    }
    for (; token < tile.num_tokens; ++token) {
      VecF sum = {};
      for (int d = 0; d < head_dim; d += kLanes) {
        sum += load(row + d) * load(k + static_cast<int64_t>(token) * head_dim + d);
      }
      score[token] += horizontal_sum(sum);
    }
  }
}

// The weight of a NaN or +inf score makes the sum NaN, and so the output.
inline float weigh(float* scores, int num_tokens, float& max, float& sum) {
  const float infinity = std::numeric_limits<float>::infinity();
  float new_max = max;
  for (int token = 0; token < num_tokens; ++token) {
    new_max = scores[token] > new_max ? scores[token] : new_max;
  }
  const float shift = new_max == -infinity ? 0.0f : new_max;
  const float rescale = max == -infinity ? 0.0f : exp(splat(max - shift))[0];
  for (int token = num_tokens; token < kTileTokens; ++token) {
    scores[token] = -infinity;
  }
  VecF total = {};
  for (int token = 0; token < kTileTokens; token += kLanes) {
    const VecF weight = exp(load(scores + token) - shift);
    store(scores + token, weight);
    total += weight;
  }
  max = new_max;
  sum = sum * rescale + horizontal_sum(total);
  return rescale;
}

inline void accumulate(const Tile& tile, const float* v, float* scores, float* max, float* sum, float* acc) {
  const int head_dim = tile.value_dim;
  constexpr int kStep = 4 * kLanes;  // channels in registers; D is a multiple of 64
  for (int query = 0; query < tile.num_queries; ++query) {
    float* weight = scores + query * kTileTokens;
    float* out = acc + static_cast<int64_t>(query) * head_dim;
    const int num_tokens = tile.num_seen == nullptr ? tile.num_tokens : tile.num_seen[query];
    if (num_tokens == 0) {
      continue;
    }
    const float rescale = weigh(weight, num_tokens, max[query], sum[query]);
    for (int d = 0; d < head_dim; d += kStep) {
      VecF value[4];
      for (int i = 0; i < 4; ++i) {
        value[i] = load(out + d + i * kLanes) * rescale;
      }
      for (int token = 0; token < num_tokens; ++token) {
        const VecF w = splat(weight[token]);
        const float* row = v + static_cast<int64_t>(token) * head_dim + d;
        for (int i = 0; i < 4; ++i) {
          value[i] += w * load(row + i * kLanes);
        }
      }
      for (int i = 0; i < 4; ++i) {
        store(out + d + i * kLanes, value[i]);
      }
    }
  }
}

constexpr compressed_kv::RowKernels row_kernels() {
  return {typed_kernels<float>(), typed_kernels<Fp16>(), typed_kernels<Bf16>(), add_scores, accumulate};
}

}  // namespace htree::HTREE_ISA
