// Block scores of an index from pages: the largest product of a leader's index query with the index keys of each block of
// r tokens. Every index key of a sequence is read once for each of its leaders. docs/semantics/tree_cache.md §7.7
#include <algorithm>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_cache/index/index_params.h"

namespace htree::tree_cache {
namespace {

constexpr int kIndexThreads = 128;
constexpr int kMostIndexDim = 128;

// One chain of multiply-adds over d, so that a product's bits depend on nothing else.
template <typename T>
__device__ __forceinline__ float index_product(const T* key, int d, const float* query) {
  constexpr int kPack = device::kPackOf<T>;
  float sum = 0.0f;
#pragma unroll 4
  for (int first = 0; first < d; first += kPack) {
    const auto pack = device::load_pack<kPack>(key + first);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      sum = fmaf(device::to_acc(pack[e]), query[first + e], sum);
    }
  }
  return sum;
}

__device__ __forceinline__ bool is_leader(const QueryRow& query, int64_t row) {
  return query.token >= 0 && query.leader == row;
}

// Block (row of the chunk and head; split of the sequence). `lanes` lanes, a power of two, share a block of r tokens.
template <typename T>
__global__ void __launch_bounds__(kIndexThreads)
    index_scores_kernel(const IndexScoreParams<T> params, int lanes) {
  __shared__ float query[kMostIndexDim];
  const PageLayout& layout = params.layout;
  const int64_t at = blockIdx.x / params.heads, row = params.first + at;
  const int head = static_cast<int>(blockIdx.x % params.heads);
  const QueryRow leader = params.rows[row];
  const uint32_t groups = kIndexThreads / lanes;
  const uint32_t num = is_leader(leader, row) ? static_cast<uint32_t>(leader.token) / layout.rate : 0;
  if (blockIdx.y * groups >= num) {
    return;
  }
  const T* given = params.query + row * params.query_row + head * params.query_head;
  for (int i = threadIdx.x; i < params.d; i += kIndexThreads) {
    query[i] = device::to_acc(given[i]);
  }
  __syncthreads();
  const int32_t* table = params.block_table + static_cast<int64_t>(leader.sequence) * layout.max_pages;
  float* scores = params.scores + (head * params.num + at) * params.row;
  const uint32_t group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  for (uint32_t first = blockIdx.y * groups; first < num; first += gridDim.y * groups) {
    const uint32_t block = first + group;
    float best = device::negative_infinity<float>();
    if (block < num) {
      const uint32_t token = block * layout.rate, place = token / layout.page_size;
      const uint32_t page = static_cast<uint32_t>(table[place]);
      const int64_t rows = (int64_t{page} * params.heads + head) * layout.page_size;
      const T* keys = params.keys + (rows + (token - place * layout.page_size)) * params.d;
      for (uint32_t i = lane; page < layout.num_pages && i < layout.rate; i += lanes) {
        best = fmaxf(best,
                     index_product(keys + static_cast<int64_t>(i) * params.d, params.d, query));  // NaN loses
      }
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

}  // namespace

template <typename T>
cudaError_t launch_index_scores(const IndexScoreParams<T>& params, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < static_cast<int>(params.layout.rate) && lanes < device::kWarpSize) {
    lanes *= 2;
  }
  const int64_t rows = params.num * params.heads;
  // Enough thread blocks to fill a large GPU a few times; those behind the end of a sequence end at once.
  constexpr int64_t kEnoughBlocks = 4096;
  const int64_t splits = ceil_div(params.row, kIndexThreads / lanes);
  const dim3 grid(
      static_cast<unsigned>(rows),
      static_cast<unsigned>(std::clamp<int64_t>(kEnoughBlocks / rows, 1, std::min<int64_t>(splits, 65535))));
  return launch_kernel(index_scores_kernel<T>, {.grid = grid, .threads = kIndexThreads}, stream, params,
                       lanes);
}

cudaError_t launch_index_documents(const QueryRow* rows, int64_t first, int64_t num, int layers,
                                   tree_attention::BlockDocument* documents, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(num, kIndexThreads));
  return launch_kernel(index_documents_kernel, {.grid = blocks, .threads = kIndexThreads}, stream, rows,
                       first, num, layers, documents);
}

template cudaError_t launch_index_scores(const IndexScoreParams<float>&, cudaStream_t);
template cudaError_t launch_index_scores(const IndexScoreParams<__half>&, cudaStream_t);
template cudaError_t launch_index_scores(const IndexScoreParams<__nv_bfloat16>&, cudaStream_t);

}  // namespace htree::tree_cache
