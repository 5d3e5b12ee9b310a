// A product of an index query with an index key of a page, the same in every kernel that chooses by an index.
#pragma once

#include "device/fp8.cuh"
#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "ops/tree_cache/index/coded_row.h"
#include "ops/tree_cache/index/index_params.h"

namespace htree::tree_cache {

constexpr int kMostIndexDim = 128;

// One chain of multiply-adds over d, so that a product's bits depend on nothing else. `query` is in shared memory.
template <typename Key>
__device__ __forceinline__ float index_product(const IndexRows<Key>& index, int64_t row, const float* query) {
  const Key* key = index.keys + row * index.d;
  float sum = 0.0f;
  if constexpr (std::is_same_v<Key, IndexCode>) {
#pragma unroll 4
    for (int first = 0; first < index.d; first += 16) {
      const auto words = device::load_pack<4>(reinterpret_cast<const uint32_t*>(key + first));
#pragma unroll
      for (int e = 0; e < 16; e += 2) {
        const float2 pair = device::decode_e4m3x2(static_cast<uint16_t>(words[e / 4] >> e % 4 * 8));
        sum = fmaf(pair.x, query[first + e], sum);
        sum = fmaf(pair.y, query[first + e + 1], sum);
      }
    }
    return sum * scale_value(index.scales[row]);
  } else {
    constexpr int kPack = device::kPackOf<Key>;
#pragma unroll 4
    for (int first = 0; first < index.d; first += kPack) {
      const auto pack = device::load_pack<kPack>(key + first);
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        sum = fmaf(device::to_acc(pack[e]), query[first + e], sum);
      }
    }
    return sum;
  }
}

// Copies the index query of a row and head to shared memory, in fp32. A __syncthreads has to follow.
template <int kThreads, typename Key>
__device__ __forceinline__ void load_index_query(const IndexRows<Key>& index, int64_t row, int head,
                                                 float* query) {
  const auto* given = index.query + row * index.query_row + head * index.query_head;
  for (int i = threadIdx.x; i < index.d; i += kThreads) {
    query[i] = device::to_acc(given[i]);
  }
}

// The largest product of tokens [token + lane, token + count) in steps of `lanes`, which stand in one page; NaN loses. -inf
// where the table has no page of the pool.
template <typename Key>
__device__ __forceinline__ float largest_product(const IndexRows<Key>& index, const PageLayout& layout,
                                                 const int32_t* table, int head, uint32_t token,
                                                 uint32_t count, uint32_t lane, uint32_t lanes,
                                                 const float* query) {
  const uint32_t place = token / layout.page_size, page = static_cast<uint32_t>(table[place]);
  const int64_t rows =
      (int64_t{page} * index.heads + head) * layout.page_size + (token - place * layout.page_size);
  float best = device::negative_infinity<float>();
  for (uint32_t i = lane; page < layout.num_pages && i < count; i += lanes) {
    best = fmaxf(best, index_product(index, rows + i, query));
  }
  return best;
}

}  // namespace htree::tree_cache
