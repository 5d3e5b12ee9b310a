// Exact selection of the next layer's parents from importances: docs/semantics.md §1.6.
//
// One block per row holds the whole row in registers. Importances are not negative, so their bits as signed
// integers order like the numbers, with NaN (0x7fffffff, as every instruction makes it) above infinity. A
// lower bound of the wanted key comes from maxima of disjoint groups, histograms narrow it down to a bin of a
// few keys, and those are ranked by (key, smaller position first). The result does not depend on the order in
// which threads arrive.
#pragma once

#include "ops/tree_attention/attention/top/top_row_keys.cuh"

namespace htree::tree_attention {

// Words of chosen positions in `shared.above`: everything above the range, and of the few keys in it the
// `wanted` first by (key, position).
template <int kKeys>
__device__ __forceinline__ void choose_few(const RowKeys<kKeys>& keys, const KeyRange& range,
                                           TopSelectShared<kKeys>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool contested = range.count > range.wanted;
  keys.each([&](int i, int key) {
    const bool in = key >= range.low;
    const uint32_t word = __ballot_sync(device::kFullMask, in);
    if (lane == 0) {
      shared.above[i * kTopSelectWarps + warp] = word;
    }
    if (contested && in && key <= range.high) {
      const uint32_t position = i * kTopSelectThreads + threadIdx.x;
      shared.finalists[atomicAdd(&shared.num_finalists, 1)] =
          uint64_t{static_cast<uint32_t>(key)} << 32 | ~position;
    }
  });
  __syncthreads();
  if (contested && threadIdx.x < range.count) {
    const uint64_t own = shared.finalists[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < range.count; ++i) {
      rank += shared.finalists[i] > own;
    }
    if (rank >= range.wanted) {
      const uint32_t position = ~static_cast<uint32_t>(own);
      atomicAnd(&shared.above[position / 32], ~(1u << position % 32));
    }
  }
}

// As choose_few where the range is one key that many positions hold: the smallest win.
template <int kKeys>
__device__ __forceinline__ void choose_ties(const RowKeys<kKeys>& keys, const KeyRange& range,
                                            TopSelectShared<kKeys>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  keys.each([&](int i, int key) {
    const uint32_t above = __ballot_sync(device::kFullMask, key > range.low);
    const uint32_t equal = __ballot_sync(device::kFullMask, key == range.low);
    if (lane == 0) {
      shared.above[i * kTopSelectWarps + warp] = above;
      shared.equal[i * kTopSelectWarps + warp] = equal;
    }
  });
  __syncthreads();
  constexpr int kOwn = (TopSelectShared<kKeys>::kWords + kTopSelectThreads - 1) / kTopSelectThreads;
  const int num_words = (keys.used + RowKeys<kKeys>::kStep - 1) / RowKeys<kKeys>::kStep *
                        RowKeys<kKeys>::kStep * kTopSelectWarps;
  const int begin = threadIdx.x * kOwn, end = min(begin + kOwn, num_words);
  int own = 0, total;
  for (int word = begin; word < end; ++word) {
    own += __popc(shared.equal[word]);
  }
  int left = range.wanted - sum_before(own, shared.scan[1], &total);
  for (int word = begin; word < end && left > 0; ++word) {
    uint32_t taken = 0;
    for (uint32_t bits = shared.equal[word]; bits && left > 0; bits &= bits - 1, --left) {
      taken |= bits & (0u - bits);
    }
    shared.above[word] |= taken;
  }
}

// Grid: x = list rows * kv heads, the longest rows first; y = batch.
template <int kKeys, int kBlocks>
__global__ void __launch_bounds__(kTopSelectThreads, kBlocks) top_select_kernel(LeaderSelectParams params) {
  using Shared = TopSelectShared<kKeys>;
  __shared__ Shared shared;
  const GatherParams& p = params.gather;
  const int64_t row = gridDim.x - 1 - blockIdx.x;
  const int64_t batch = blockIdx.y,
                list_row = static_cast<unsigned>(row) / static_cast<unsigned>(p.num_kv_heads);
  const int rank = static_cast<int>((p.t0 + list_row * p.stride) >> (__ffsll(p.node_span) - 1));
  const int num_words = rank / 32 + 1;
  int32_t* next = params.next_lists + batch * params.next_batch + row * p.list_width;
  uint32_t* mask =
      params.selected ? params.selected + batch * params.selected_batch + row * params.mask_words : nullptr;
  if (rank < p.list_width) {  // every candidate
    for (int i = threadIdx.x; i < p.list_width; i += kTopSelectThreads) {
      next[i] = i <= rank ? i : -1;
    }
    for (int word = threadIdx.x; mask && word < num_words; word += kTopSelectThreads) {
      mask[word] = rank - word * 32 >= 31 ? 0xffffffffu : (2u << (rank - word * 32)) - 1u;
    }
    return;
  }
  const int wanted = p.list_width - 1;  // the query's own node is chosen in any case
  RowKeys<kKeys> keys;
  keys.load(params.scores + (batch * p.num_lists * p.num_kv_heads + row) * params.score_width, rank);
  if (wanted > 0) {
    clear_bins(shared.bins);
    if (threadIdx.x == 0) {
      shared.num_finalists = 0;
    }
    KeyRange range = bracket(keys, wanted, shared);
    bool one_key = narrow(keys, range, shared);
    while (range.count > kTopFinalists && !one_key) {
      clear_bins(shared.bins);
      __syncthreads();
      one_key = narrow(keys, range, shared);
    }
    if (range.count <= kTopFinalists) {
      choose_few(keys, range, shared);
    } else {
      choose_ties(keys, range, shared);
    }
  }
  __syncthreads();

  // thread i owns the words from i * kOwn on; word w is positions 32 w ... 32 w + 31
  constexpr int kOwn = (Shared::kWords + kTopSelectThreads - 1) / kTopSelectThreads;
  uint32_t words[kOwn];
  int own = 0, total;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int word = threadIdx.x * kOwn + i;
    const int last_word = (rank - 1) / 32;
    words[i] = wanted > 0 && word <= last_word ? shared.above[word] : 0u;
    words[i] |= word == rank / 32 ? 1u << rank % 32 : 0u;
    own += __popc(words[i]);
    if (mask && word < num_words) {
      mask[word] = words[i];
    }
  }
  int at = sum_before(own, shared.scan[2], &total);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    for (uint32_t bits = words[i]; bits; bits &= bits - 1) {
      shared.ids[at++] = (threadIdx.x * kOwn + i) * 32 + __ffs(bits) - 1;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.list_width; i += kTopSelectThreads) {
    next[i] = shared.ids[i];
  }
}

}  // namespace htree::tree_attention
