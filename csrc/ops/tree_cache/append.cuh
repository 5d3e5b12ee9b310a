// Append: writes the rows of new tokens, then layer by layer the nodes that those tokens finish,
// then span means. A thread owns a pack of columns of one row. Sums run over the children in their
// order, as in tree_build.
#pragma once

#include <algorithm>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_cache/tree_cache_params.h"

namespace htree::tree_cache {

constexpr int kAppendThreads = 256;

// The new tokens of a sequence: rows [first, first + count) of the call. A refused sequence has count 0.
struct NewSpan {
  int64_t first;
  int64_t before;
  int64_t count;
};

// Every thread of the block must call. Has one __syncthreads.
template <typename T>
__device__ __forceinline__ NewSpan new_span(const AppendParams<T>& params, int sequence) {
  const int64_t first = params.cu_new[sequence];
  int64_t count = params.cu_new[sequence + 1] - first;
  bool good = first >= 0 && count >= 0 && first + count <= params.num_rows;
  if (params.new_lengths != nullptr) {
    count = min(count, static_cast<int64_t>(params.new_lengths[sequence]));
  }
  const int64_t before = params.lengths[sequence];
  good = good && before >= 0 && count > 0 && count <= params.max_new &&
         before + count <= params.layout.capacity();
  if (good) {
    const int32_t* table = params.block_table + static_cast<int64_t>(sequence) * params.layout.max_pages;
    const int64_t last = (before + count - 1) / params.layout.page_size;
    for (int64_t page = before / params.layout.page_size + threadIdx.x; page <= last;
         page += kAppendThreads) {
      good = good && static_cast<uint32_t>(table[page]) < params.layout.num_pages;
    }
  }
  return {first, before, __syncthreads_and(good) ? count : 0};
}

// The rows of one head in one pool.
template <typename T>
struct HeadRows {
  T* pool;
  const int32_t* table;
  int64_t page_rows;
  int width;
  int head;

  // Null where the block table holds no page of the pool.
  __device__ __forceinline__ T* at(const PageLayout& layout, const Place& place) const {
    const uint32_t page = static_cast<uint32_t>(table[place.page]);
    return page < layout.num_pages
               ? pool + ((int64_t{page} * layout.num_kv_heads + head) * page_rows + place.row) * width
               : nullptr;
  }
};

// Stores the mean of `count` rows at `to`. child(i) is row i, null where its page is none; then nothing is stored. Many
// rows are on their way at a time; they are added in their order.
template <typename T, int kPack, class Child>
__device__ __forceinline__ void store_mean(uint32_t count, int column, T* to, Child&& child_at) {
  constexpr uint32_t kBatch = 8;
  device::Acc<T> sum[kPack] = {};
  bool whole = to != nullptr;
  for (uint32_t begin = 0; begin < count; begin += kBatch) {
    device::Pack<T, kPack> batch[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const T* child = begin + i < count ? child_at(begin + i) : nullptr;
      whole = whole && (child != nullptr || begin + i >= count);
      if (child != nullptr) {
        batch[i] = device::load_pack<kPack>(child + column);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      if (begin + i < count) {
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
          sum[e] += device::to_acc(batch[i][e]);
        }
      }
    }
  }
  if (whole) {
    device::Pack<T, kPack> mean;
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      mean[e] = device::from_acc<T>(sum[e] / static_cast<device::Acc<T>>(count));
    }
    device::store_pack(to + column, mean);
  }
}

// The pools of one head, with the new rows that go there.
template <typename T>
struct HeadPools {
  HeadRows<T> keys, values;
  const NewRows<T>& k;
  const NewRows<T>& v;
};

template <typename T>
__device__ __forceinline__ HeadPools<T> head_pools(const AppendParams<T>& params, int sequence, int head) {
  const PageLayout& layout = params.layout;
  const int32_t* table = params.block_table + static_cast<int64_t>(sequence) * layout.max_pages;
  return {{params.keys, table, layout.key_rows(), params.k.width, head},
          {params.values, table, layout.value_rows(), params.v.width, head},
          params.k,
          params.v};
}

// The row of a new token as the caller gave it.
template <typename T>
__device__ __forceinline__ const T* given_row(const NewRows<T>& given, const NewSpan& span, uint32_t token,
                                              int head) {
  return given.data + (span.first + token - span.before) * given.row + head * given.head;
}

// Writes what level `level` adds: tokens at level 0, nodes at 1 ... L-1, span means of keys at L. This is block `part` of
// `num_parts`. Keys and values go side by side, because a new token alone keeps few threads busy. token_row(of_keys, token)
// is where the row of a token stands that is in no node yet.
template <typename T, int kPack, class TokenRow>
__device__ __forceinline__ void append_level(const PageLayout& layout, const HeadPools<T>& pools,
                                             const NewSpan& span, uint32_t level, int part, int num_parts,
                                             TokenRow&& token_row) {
  const bool means = level == layout.num_layers;
  const uint32_t size = means ? layout.span : layout.tokens[level];
  const uint32_t first = static_cast<uint32_t>(span.before) / size;
  const uint32_t num = static_cast<uint32_t>(span.before + span.count) / size - first;
  const auto key_packs = static_cast<uint32_t>(pools.keys.width / kPack);
  const uint32_t packs = key_packs + (means ? 0 : static_cast<uint32_t>(pools.values.width / kPack));
  const uint64_t items = uint64_t{num} * packs;
  for (uint64_t item = static_cast<uint64_t>(part) * kAppendThreads + threadIdx.x; item < items;
       item += static_cast<uint64_t>(num_parts) * kAppendThreads) {
    const auto index = static_cast<uint32_t>(item / packs);
    const auto pack = static_cast<uint32_t>(item - uint64_t{index} * packs);
    const bool of_keys = pack < key_packs;
    const HeadRows<T> rows = of_keys ? pools.keys : pools.values;
    const int column = static_cast<int>(of_keys ? pack : pack - key_packs) * kPack;
    const uint32_t node = first + index;
    if (level == 0) {
      const T* row = given_row(of_keys ? pools.k : pools.v, span, node, rows.head) + column;
      device::store_pack(rows.at(layout, layout.node(0, node)) + column, device::load_pack<kPack>(row));
    } else {
      // A span mean is the mean of tokens, a node that of the nodes below.
      const uint32_t count = means ? layout.span : layout.rate;
      store_mean<T, kPack>(count, column,
                           rows.at(layout, means ? layout.span_mean(node) : layout.node(level, node)),
                           [&](uint32_t i) -> const T* {
                             const uint32_t child = node * count + i;
                             return means || level == 1 ? token_row(of_keys, child)
                                                        : rows.at(layout, layout.node(level - 1, child));
                           });
    }
  }
}

// Block (sequence and head, part) writes the levels [begin, end). More than one level needs num_parts = 1,
// because then a block reads only rows that it wrote itself.
template <typename T, int kPack>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const AppendParams<T> params, uint32_t begin, uint32_t end) {
  const PageLayout& layout = params.layout;
  const int sequence = static_cast<int>(blockIdx.x / layout.num_kv_heads);
  const int head = static_cast<int>(blockIdx.x % layout.num_kv_heads);
  const NewSpan span = new_span(params, sequence);
  if (span.count == 0) {
    return;
  }
  const HeadPools<T> pools = head_pools(params, sequence, head);
  const auto token_row = [&](bool of_keys, uint32_t token) {
    return (of_keys ? pools.keys : pools.values).at(layout, layout.node(0, token));
  };
  for (uint32_t level = begin; level < end; ++level) {
    append_level<T, kPack>(layout, pools, span, level, static_cast<int>(blockIdx.y),
                           static_cast<int>(gridDim.y), token_row);
    __syncthreads();
  }
}

// Launches `kernel` for the levels [begin, end): tokens at level 0 or L + 1, nodes at 1 ... L - 1, span means at L. Packs
// have `pack` channels.
template <typename T, typename Kernel, typename Params>
cudaError_t launch_levels(Kernel kernel, const Params& params, const AppendParams<T>& append, int pack,
                          uint32_t begin, uint32_t end, cudaStream_t stream) {
  const PageLayout& layout = append.layout;
  const unsigned rows = static_cast<unsigned>(append.num_sequences) * layout.num_kv_heads;
  if (append.max_new <= layout.page_size) {
    return launch_kernel(kernel, {.grid = rows, .threads = kAppendThreads}, stream, params, begin, end);
  }
  constexpr int64_t kMostParts = 1024;
  cudaError_t error = cudaSuccess;
  for (uint32_t level = begin; level < end && error == cudaSuccess; ++level) {
    const bool packed = level > layout.num_layers, means = level == layout.num_layers;
    if (means && layout.span == 0) {
      continue;
    }
    const int64_t size = packed ? 1 : means ? layout.span : layout.tokens[level];
    const int64_t threads = packed ? device::kWarpSize : (append.k.width + append.v.width) / pack;
    const int64_t items = (append.max_new / size + 1) * threads;
    const dim3 grid(rows, static_cast<unsigned>(std::min(ceil_div(items, kAppendThreads), kMostParts)));
    error =
        launch_kernel(kernel, {.grid = grid, .threads = kAppendThreads}, stream, params, level, level + 1);
  }
  return error;
}

// Whether rows of the call and of a pool can be taken in packs of 16 bytes.
template <typename T>
bool in_wide_packs(const NewRows<T>& rows, const T* pool) {
  const int64_t size = sizeof(T);
  return rows.width % device::kPackOf<T> == 0 && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(pool) % 16 == 0 && rows.row * size % 16 == 0 &&
         rows.head * size % 16 == 0;
}

template <typename T>
cudaError_t launch_append(const AppendParams<T>& params, cudaStream_t stream) {
  constexpr int kWide = device::kPackOf<T>;
  const bool wide = in_wide_packs(params.k, params.keys) && in_wide_packs(params.v, params.values);
  const uint32_t levels = params.layout.num_layers + (params.layout.span > 0);
  return launch_levels(wide ? append_kernel<T, kWide> : append_kernel<T, 1>, params, params, wide ? kWide : 1,
                       0, levels, stream);
}

}  // namespace htree::tree_cache
