// Append where tokens are packed: nodes and span means from the tokens as they came, then the codes of the new tokens
// and the tail. docs/semantics/tree_cache.md §7.5
#pragma once

#include "ops/compressed_kv/compress/pack_rows.cuh"
#include "ops/tree_cache/append.cuh"

namespace htree::tree_cache {

// One pool of a sequence and head, with its tokens as they came: those before the call in the tail, the others in the
// call.
template <typename T>
struct PackedHead {
  const HeadRows<T>& nodes;
  const NewRows<T>& given;
  const NewSpan& span;
  LeafPool leaves;
  T* tail;  // [S, width] of the sequence and head
  uint32_t tail_tokens;

  __device__ __forceinline__ T* in_tail(uint32_t token) const {
    return tail + static_cast<int64_t>(token % tail_tokens) * given.width;
  }
  __device__ __forceinline__ const T* at(uint32_t token) const {
    return token < span.before ? in_tail(token) : given_row(given, span, token, nodes.head);
  }
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
  const NewSpan& span = rows.span;
  const int width = rows.given.width;
  const auto warp = static_cast<int>(threadIdx.x / device::kWarpSize);
  const int lane = threadIdx.x % device::kWarpSize;
  for (int64_t i = int64_t{part} * kWarps + warp; i < span.count; i += int64_t{num_parts} * kWarps) {
    const auto token = static_cast<uint32_t>(span.before + i);
    const T* from = rows.at(token);
    const Place place = layout.node(0, token);
    // new_span() has seen that the page is one of the pool.
    const int64_t row =
        (int64_t{rows.nodes.table[place.page]} * layout.num_kv_heads + rows.nodes.head) * layout.page_size +
        place.row;
    pack_token(from, width, bits,
               reinterpret_cast<uint32_t*>(rows.leaves.codes + row * rows.leaves.row_bytes),
               rows.leaves.scales + row);
    if (span.count - i <= rows.tail_tokens) {
      T* to = rows.in_tail(token);
      for (int d = lane; d < width; d += device::kWarpSize) {
        to[d] = from[d];
      }
    }
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
  const HeadPools<T> pools = head_pools(append, sequence, head);
  const int64_t first_kept = int64_t{blockIdx.x} * params.tail_tokens;
  const PackedHead<T> keys = {
      pools.keys,        append.k, span, params.leaves.keys, params.key_tail + first_kept * append.k.width,
      params.tail_tokens};
  const PackedHead<T> values = {pools.values,
                                append.v,
                                span,
                                params.leaves.values,
                                params.value_tail + first_kept * append.v.width,
                                params.tail_tokens};
  const auto token_row = [&](bool of_keys, uint32_t token) { return (of_keys ? keys : values).at(token); };
  const int part = static_cast<int>(blockIdx.y), num_parts = static_cast<int>(gridDim.y);
  for (uint32_t level = begin; level < end; ++level) {
    if (level > layout.num_layers) {
      append_tokens(layout, keys, params.leaves.bits, part, num_parts);
      append_tokens(layout, values, params.leaves.bits, part, num_parts);
    } else if (level < layout.num_layers || layout.span > 0) {
      append_level<T, kPack>(layout, pools, span, level, part, num_parts, token_row);
    }
    __syncthreads();
  }
}

template <typename T>
cudaError_t launch_append_packed(const AppendPackedParams<T>& params, cudaStream_t stream) {
  const AppendParams<T>& append = params.append;
  constexpr int kWide = device::kPackOf<T>;
  const bool wide = in_wide_packs(append.k, append.keys) && in_wide_packs(append.v, append.values) &&
                    in_wide_packs(append.k, params.key_tail) && in_wide_packs(append.v, params.value_tail);
  return launch_levels(wide ? append_packed_kernel<T, kWide> : append_packed_kernel<T, 1>, params, append,
                       wide ? kWide : 1, 1, append.layout.num_layers + 2, stream);
}

}  // namespace htree::tree_cache
