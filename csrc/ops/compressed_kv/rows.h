// The CPU kernels of the compressed_kv family, one table per instruction set (host/cpu/isa.h). Pointers are to
// host memory; rows of a compressed tensor are contiguous.
#pragma once

#include <cstdint>

#include "host/cpu/simd_prelude.h"
#include "ops/compressed_kv/format.h"

namespace htree::compressed_kv {

// Floats of a buffer for the unpacked codes of one row: reads of a whole vector may start at any code.
constexpr int kUnpackedFloats = kMostHeadDim + 16;

// Of rows of D elements; weight [D] or null, bitmap [words], values [row_bytes].
template <typename T>
struct TypedKernels {
  void (*prune)(const T* x, const float* weight, const RowFormat& format, T* pruned, uint64_t* bitmap);
  void (*compress)(const T* x, const float* weight, const RowFormat& format, uint64_t* bitmap,
                   uint8_t* values, uint16_t* scale);
  void (*decompress)(const uint64_t* bitmap, const uint8_t* values, uint16_t scale, const RowFormat& format,
                     T* out);
  // The same in floats. With 16 bits the values are of type T.
  void (*expand)(const uint64_t* bitmap, const uint8_t* values, uint16_t scale, const RowFormat& format,
                 float* out);
  void (*widen)(const T* x, int head_dim, float* out);
};

// Tokens that are attended to at a time: their expanded rows stay in the caches.
constexpr int kTileTokens = 32;

struct Tile {
  int num_tokens;  // 1 ... kTileTokens
  int key_dim;
  int value_dim;
  int num_queries;
  const int* num_seen;  // [queries], how many of the tokens each query sees; null where all of them
};

struct RowKernels {
  TypedKernels<float> for_float;
  TypedKernels<Fp16> for_half;
  TypedKernels<Bf16> for_bfloat16;
  // scores[query * kTileTokens + token] += <q[query], k[token]> over rows of key_dim floats.
  void (*add_scores)(const Tile& tile, const float* q, const float* k, float* scores);
  // One step of the online softmax of §1.7. max and sum are [queries], acc is [queries, value_dim]; scores become weights.
  void (*accumulate)(const Tile& tile, const float* v, float* scores, float* max, float* sum, float* acc);
};

extern const RowKernels kRowKernelsBaseline;
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;

}  // namespace htree::compressed_kv
