// Append where tokens are packed: nodes and span means from the tokens as they came, then the codes of the new tokens
// and the tail. docs/semantics/tree_cache.md §7.5
#pragma once

#include <algorithm>

#include "device/reduce.cuh"
#include "ops/compressed_kv/compress/pack_rows.cuh"
#include "ops/tree_cache/append.cuh"
#include "ops/tree_cache/packed/packed_params.h"

namespace htree::tree_cache {

// The tokens of a sequence and head as they came: those before the call in the tail, the others in the call.
template <typename T>
struct TokenRows {
  const NewRows<T>& given;
  NewSpan span;
  T* tail;  // [S, width] of the sequence and head
  uint32_t tail_tokens;
  int head;

  __device__ __forceinline__ T* in_tail(uint32_t token) const {
    return tail + static_cast<int64_t>(token % tail_tokens) * given.width;
  }
  __device__ __forceinline__ const T* at(uint32_t token) const {
    return token < span.before
               ? in_tail(token)
               : given.data + (span.first + token - span.before) * given.row + head * given.head;
  }
};

// One pool of a sequence and head.
template <typename T>
struct PackedHead {
  HeadRows<T> nodes;
  TokenRows<T> tokens;
  LeafPool leaves;
};

// Writes codes and scale of a token. All lanes of a warp call.
template <typename T>
__device__ __forceinline__ void pack_token(const T* row, int width, int bits, uint32_t* codes,
                                           uint16_t* scale) {
  const int lane = threadIdx.x % device::kWarpSize;
  uint32_t largest = 0;  // bits of a magnitude: NaN is above infinity
  for (int d = lane; d < width; d += device::kWarpSize) {
    largest = max(largest, __float_as_uint(device::to_acc(row[d])) & 0x7fffffffu);
  }
#pragma unroll
  for (int offset = device::kWarpSize / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(device::kFullMask, largest, offset));
  }
  const int max_code = bits == 8 ? 127 : 7;
  const uint16_t rounded = compressed_kv::scale_of(largest, max_code);
  if (lane == 0) {
    *scale = rounded;
  }
  const float divisor = __half2float(__ushort_as_half(rounded));
  const float bound = static_cast<float>(max_code);
  const int per_word = 32 / bits;
  for (int word = lane; word < width / per_word; word += device::kWarpSize) {
    uint32_t packed = 0;
    for (int i = 0; i < per_word; ++i) {
      // Of a poisoned row, whose scale is NaN, and of a row of zeros all codes are 0.
      const float x = divisor > 0.0f ? __fdiv_rn(device::to_acc(row[word * per_word + i]), divisor) : 0.0f;
      const int code = __float2int_rn(fminf(fmaxf(x, -bound), bound));
      packed |= (bits == 8 ? static_cast<uint32_t>(code) & 0xffu : static_cast<uint32_t>(code + 8))
                << (bits * i);
    }
    codes[word] = packed;
  }
}

// Writes the codes of the new tokens, a warp for each row, and copies those that the tail keeps.
template <typename T>
__device__ __forceinline__ void append_tokens(const PageLayout& layout, const PackedHead<T>& rows, int bits,
                                              int part, int num_parts) {
  constexpr int kWarps = kAppendThreads / device::kWarpSize;
  const NewSpan& span = rows.tokens.span;
  const int width = rows.tokens.given.width;
  const auto warp = static_cast<int>(threadIdx.x / device::kWarpSize);
  const int lane = threadIdx.x % device::kWarpSize;
  for (int64_t i = int64_t{part} * kWarps + warp; i < span.count; i += int64_t{num_parts} * kWarps) {
    const auto token = static_cast<uint32_t>(span.before + i);
    const T* from = rows.tokens.at(token);
    const Place place = layout.node(0, token);
    // new_span() has seen that the page is one of the pool.
    const int64_t row =
        (int64_t{rows.nodes.table[place.page]} * layout.num_kv_heads + rows.nodes.head) * layout.page_size +
        place.row;
    pack_token(from, width, bits,
               reinterpret_cast<uint32_t*>(rows.leaves.codes + row * rows.leaves.row_bytes),
               rows.leaves.scales + row);
    if (span.count - i <= rows.tokens.tail_tokens) {
      T* to = rows.tokens.in_tail(token);
      for (int d = lane; d < width; d += device::kWarpSize) {
        to[d] = from[d];
      }
    }
  }
}

// Writes the nodes of layer `level`, or with level = L the span means of keys.
template <typename T, int kPack>
__device__ __forceinline__ void append_means(const PageLayout& layout, const PackedHead<T>& rows,
                                             uint32_t level, int part, int num_parts) {
  const bool means = level == layout.num_layers;
  const uint32_t size = means ? layout.span : layout.tokens[level];
  const uint32_t count = means ? layout.span : layout.rate;
  const NewSpan& span = rows.tokens.span;
  const uint32_t first = static_cast<uint32_t>(span.before) / size;
  const uint32_t num = static_cast<uint32_t>(span.before + span.count) / size - first;
  const auto packs = static_cast<uint32_t>(rows.nodes.width / kPack);
  const uint64_t items = uint64_t{num} * packs;
  for (uint64_t item = static_cast<uint64_t>(part) * kAppendThreads + threadIdx.x; item < items;
       item += static_cast<uint64_t>(num_parts) * kAppendThreads) {
    const auto index = static_cast<uint32_t>(item / packs);
    const int column = static_cast<int>(item - uint64_t{index} * packs) * kPack;
    const uint32_t node = first + index;
    store_mean<T, kPack>(count, column,
                         rows.nodes.at(layout, means ? layout.span_mean(node) : layout.node(level, node)),
                         [&](uint32_t i) -> const T* {
                           const uint32_t child = node * count + i;
                           return means || level == 1 ? rows.tokens.at(child)
                                                      : rows.nodes.at(layout, layout.node(level - 1, child));
                         });
  }
}

// Block (sequence and head, part) writes the levels [begin, end) of keys and values: nodes of layer l at level l, span
// means at level L, tokens at level L + 1. The tokens come last, because they replace rows of the tail that nodes are
// made of. More than one level needs num_parts = 1: then a block reads only rows that it wrote itself.
template <typename T, int kPack>
__global__ void __launch_bounds__(kAppendThreads)
    append_packed_kernel(const AppendPackedParams<T> params, uint32_t begin, uint32_t end) {
  const AppendParams<T>& append = params.append;
  const PageLayout& layout = append.layout;
  const int sequence = static_cast<int>(blockIdx.x / layout.num_kv_heads);
  const int head = static_cast<int>(blockIdx.x % layout.num_kv_heads);
  const NewSpan span = new_span(append, sequence);
  if (span.count == 0) {
    return;
  }
  const int32_t* table = append.block_table + static_cast<int64_t>(sequence) * layout.max_pages;
  const int64_t first_kept = int64_t{blockIdx.x} * params.tail_tokens;
  const PackedHead<T> keys = {
      {append.keys, table, layout.key_rows(), append.k.width, head},
      {append.k, span, params.key_tail + first_kept * append.k.width, params.tail_tokens, head},
      params.leaves.keys};
  const PackedHead<T> values = {
      {append.values, table, layout.value_rows(), append.v.width, head},
      {append.v, span, params.value_tail + first_kept * append.v.width, params.tail_tokens, head},
      params.leaves.values};
  const int part = static_cast<int>(blockIdx.y), num_parts = static_cast<int>(gridDim.y);
  for (uint32_t level = begin; level < end; ++level) {
    if (level > layout.num_layers) {
      append_tokens(layout, keys, params.leaves.bits, part, num_parts);
      append_tokens(layout, values, params.leaves.bits, part, num_parts);
    } else if (level < layout.num_layers) {
      append_means<T, kPack>(layout, keys, level, part, num_parts);
      append_means<T, kPack>(layout, values, level, part, num_parts);
    } else if (layout.span > 0) {
      append_means<T, kPack>(layout, keys, level, part, num_parts);
    }
    __syncthreads();
  }
}

template <typename T, int kPack>
cudaError_t launch_append_packed_for(const AppendPackedParams<T>& params, cudaStream_t stream) {
  const AppendParams<T>& append = params.append;
  const PageLayout& layout = append.layout;
  const unsigned rows = static_cast<unsigned>(append.num_sequences) * layout.num_kv_heads;
  const uint32_t levels = layout.num_layers + 2;
  if (append.max_new <= layout.page_size) {
    return launch_kernel(append_packed_kernel<T, kPack>, {.grid = rows, .threads = kAppendThreads}, stream,
                         params, 1u, levels);
  }
  constexpr int64_t kMostParts = 1024;
  for (uint32_t level = 1; level < levels; ++level) {
    const bool tokens = level > layout.num_layers, means = level == layout.num_layers;
    if (means && layout.span == 0) {
      continue;
    }
    const int64_t size = tokens ? 1 : means ? layout.span : layout.tokens[level];
    const int64_t threads = tokens ? device::kWarpSize : std::max(append.k.width, append.v.width) / kPack;
    const int64_t items = (append.max_new / size + 1) * threads;
    const dim3 grid(rows, static_cast<unsigned>(std::min(ceil_div(items, kAppendThreads), kMostParts)));
    const cudaError_t error =
        launch_kernel(append_packed_kernel<T, kPack>, {.grid = grid, .threads = kAppendThreads}, stream,
                      params, level, level + 1);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

template <typename T>
cudaError_t launch_append_packed(const AppendPackedParams<T>& params, cudaStream_t stream) {
  const AppendParams<T>& append = params.append;
  const bool wide = in_wide_packs(append.k, append.keys) && in_wide_packs(append.v, append.values) &&
                    in_wide_packs(append.k, params.key_tail) && in_wide_packs(append.v, params.value_tail);
  return wide ? launch_append_packed_for<T, device::kPackOf<T>>(params, stream)
              : launch_append_packed_for<T, 1>(params, stream);
}

}  // namespace htree::tree_cache
