// Index keys of new tokens as codes, and block scores of an index from pages: the largest product of a leader's index query
// with the index keys of each block of r tokens. Every index key of a sequence is read once for each of its leaders.
// docs/semantics/tree_cache.md §7.7
#include <algorithm>

#include "device/fp8.cuh"
#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_cache/append.cuh"
#include "ops/tree_cache/index/coded_row.h"
#include "ops/tree_cache/index/index_params.h"

namespace htree::tree_cache {
namespace {

constexpr int kIndexThreads = 128;

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

__device__ __forceinline__ bool is_leader(const QueryRow& query, int64_t row) {
  return query.token >= 0 && query.leader == row;
}

// Block (row of the chunk and head; split of the sequence). `lanes` lanes, a power of two, share a block of r tokens.
template <typename Key>
__global__ void __launch_bounds__(kIndexThreads)
    index_scores_kernel(const IndexScoreParams<Key> params, int lanes) {
  __shared__ float query[kMostIndexDim];
  const PageLayout& layout = params.layout;
  const int heads = params.index.heads;
  const int64_t at = blockIdx.x / heads, row = params.first + at;
  const int head = static_cast<int>(blockIdx.x % heads);
  const QueryRow leader = params.rows[row];
  const uint32_t groups = kIndexThreads / lanes;
  const uint32_t num = is_leader(leader, row) ? static_cast<uint32_t>(leader.token) / layout.rate : 0;
  if (blockIdx.y * groups >= num) {
    return;
  }
  load_index_query<kIndexThreads>(params.index, row, head, query);
  __syncthreads();
  const int32_t* table = params.block_table + static_cast<int64_t>(leader.sequence) * layout.max_pages;
  float* scores = params.scores + (head * params.num + at) * params.row;
  const uint32_t group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  for (uint32_t first = blockIdx.y * groups; first < num; first += gridDim.y * groups) {
    const uint32_t block = first + group;
    float best = device::negative_infinity<float>();
    if (block < num) {
      best = largest_product(params.index, layout, table, head, block * layout.rate, layout.rate, lane,
                             static_cast<uint32_t>(lanes), query);
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      best = fmaxf(best, __shfl_xor_sync(device::kFullMask, best, offset));
    }
    if (lane == 0 && block < num) {
      scores[block] = best;
    }
  }
}

__global__ void __launch_bounds__(kIndexThreads)
    index_documents_kernel(const QueryRow* rows, int64_t first, int64_t num, int layers,
                           tree_attention::BlockDocument* documents) {
  const int64_t at = int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
  if (at >= num) {
    return;
  }
  const QueryRow row = rows[first + at];
  tree_attention::BlockDocument document{};
  document.first_slot = static_cast<int32_t>(at);
  document.num_leaders = is_leader(row, first + at) ? 1 : 0;
  document.first_token = row.token;
  document.list_row = static_cast<int32_t>(at * layers);
  documents[at] = document;
}

// Block (sequence and head, part): a warp has a row at a time, a lane four channels.
__global__ void __launch_bounds__(kAppendThreads)
    append_codes_kernel(const AppendParams<__nv_bfloat16> rows, IndexCode* codes, uint8_t* scales) {
  constexpr int kWarps = kAppendThreads / device::kWarpSize, kChannels = kMostIndexDim / device::kWarpSize;
  const PageLayout& layout = rows.layout;
  const int sequence = static_cast<int>(blockIdx.x / layout.num_kv_heads);
  const int head = static_cast<int>(blockIdx.x % layout.num_kv_heads);
  const NewSpan span = new_span(rows, sequence);
  const int32_t* table = rows.block_table + static_cast<int64_t>(sequence) * layout.max_pages;
  const int lane = threadIdx.x % device::kWarpSize, width = rows.k.width;
  for (int64_t i = int64_t{blockIdx.y} * kWarps + threadIdx.x / device::kWarpSize; i < span.count;
       i += int64_t{gridDim.y} * kWarps) {
    const __nv_bfloat16* from = rows.k.data + (span.first + i) * rows.k.row + head * rows.k.head;
    float channel[kChannels] = {}, largest = 0.0f;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (const int column = lane + c * device::kWarpSize; column < width) {
        channel[c] = device::to_acc(from[column]);
        largest = fmaxf(largest, fabsf(channel[c]));  // NaN loses
      }
    }
    for (int offset = device::kWarpSize / 2; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(device::kFullMask, largest, offset));
    }
    const uint8_t scale = index_scale(largest);
    const auto token = static_cast<uint32_t>(span.before + i);
    const int64_t page = table[token / layout.page_size];  // of the pool, see new_span()
    const int64_t row = (page * layout.num_kv_heads + head) * layout.page_size + token % layout.page_size;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (const int column = lane + c * device::kWarpSize; column < width) {
        codes[row * width + column] = device::encode_e4m3(scaled_channel(channel[c], scale));
      }
    }
    if (lane == 0) {
      scales[row] = scale;
    }
  }
}

}  // namespace

template <typename Key>
cudaError_t launch_index_scores(const IndexScoreParams<Key>& params, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < static_cast<int>(params.layout.rate) && lanes < device::kWarpSize) {
    lanes *= 2;
  }
  const int64_t rows = params.num * params.index.heads;
  // Enough thread blocks to fill a large GPU a few times; those behind the end of a sequence end at once.
  constexpr int64_t kEnoughBlocks = 4096;
  const int64_t splits = ceil_div(params.row, kIndexThreads / lanes);
  const dim3 grid(
      static_cast<unsigned>(rows),
      static_cast<unsigned>(std::clamp<int64_t>(kEnoughBlocks / rows, 1, std::min<int64_t>(splits, 65535))));
  return launch_kernel(index_scores_kernel<Key>, {.grid = grid, .threads = kIndexThreads}, stream, params,
                       lanes);
}

cudaError_t launch_index_documents(const QueryRow* rows, int64_t first, int64_t num, int layers,
                                   tree_attention::BlockDocument* documents, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(num, kIndexThreads));
  return launch_kernel(index_documents_kernel, {.grid = blocks, .threads = kIndexThreads}, stream, rows,
                       first, num, layers, documents);
}

cudaError_t launch_append_codes(const AppendParams<__nv_bfloat16>& rows, IndexCode* codes, uint8_t* scales,
                                cudaStream_t stream) {
  constexpr int64_t kWarps = kAppendThreads / device::kWarpSize, kMostParts = 1024;
  const dim3 grid(static_cast<unsigned>(rows.num_sequences) * rows.layout.num_kv_heads,
                  static_cast<unsigned>(std::clamp<int64_t>(ceil_div(rows.max_new, kWarps), 1, kMostParts)));
  return launch_kernel(append_codes_kernel, {.grid = grid, .threads = kAppendThreads}, stream, rows, codes,
                       scales);
}

template cudaError_t launch_index_scores(const IndexScoreParams<IndexCode>&, cudaStream_t);
template cudaError_t launch_index_scores(const IndexScoreParams<float>&, cudaStream_t);
template cudaError_t launch_index_scores(const IndexScoreParams<__half>&, cudaStream_t);
template cudaError_t launch_index_scores(const IndexScoreParams<__nv_bfloat16>&, cudaStream_t);

}  // namespace htree::tree_cache
