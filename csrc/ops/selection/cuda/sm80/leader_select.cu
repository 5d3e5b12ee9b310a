// Exact selection of the next layer's parents for one leader: docs/semantics/tree_attention.md §1.6.
//
// One thread block holds the importances of a whole row in registers, which it reads or computes from scores.
// They are not negative, so their bits order as signed integers like the numbers, with NaN (always
// 0x7fffffff) above infinity. Maxima of disjoint groups give a lower bound of the smallest selected key.
// Histograms narrow the range down to a bin of a few keys, and those are ranked by (key, smaller position
// first). The result does not depend on the order in which threads arrive.
#include <algorithm>

#include "device/mma.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/selection.h"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/cuda/sm80/running_state.cuh"

namespace htree::tree_attention {

constexpr int kSelectThreads = 256;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kSelectBins = 2048;
constexpr int kFinalists = 64;
constexpr int kMaxSelected = 1024;  // k

template <int kKeys>
struct SelectShared {
  static constexpr int kWords = kKeys * kSelectThreads / 32;
  alignas(16) uint32_t bins[kSelectBins + 4];  // the last ones count keys outside the range
  uint64_t finalists[kFinalists];
  uint32_t above[kWords];
  uint32_t equal[kWords];
  int ids[kMaxSelected];
  int least[kSelectWarps], most[kSelectWarps];
  int scan[3][kSelectWarps];
  int bin, bin_above, bin_count, num_finalists;
};

// The sum over the threads before this one; `total` is the sum over all. Has one barrier. `scratch` holds
// kSelectWarps ints that no thread still reads.
__device__ __forceinline__ int sum_before(int value, int* scratch, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(device::kFullMask, inclusive, offset);
    inclusive += lane >= offset ? other : 0;
  }
  if (lane == 31) {
    scratch[warp] = inclusive;
  }
  __syncthreads();
  const int of_warp = lane < kSelectWarps ? scratch[lane] : 0;
  *total = __reduce_add_sync(device::kFullMask, of_warp);
  return __reduce_add_sync(device::kFullMask, lane < warp ? of_warp : 0) + inclusive - value;
}

// The keys of a row. Key i of this thread has position i * 256 + thread. Where the row is shorter, groups of
// 4 keys are skipped together, so that the cost follows the row's length.
template <int kKeys>
struct RowKeys {
  static constexpr int kStep = 4;
  int key[kKeys];  // -1 past the end
  int used;        // keys of a thread up to the end of the row

  // Loads importance(p) of the positions p < count.
  template <typename F>
  __device__ __forceinline__ void load(int count, F importance) {
    used = (count + kSelectThreads - 1) / kSelectThreads;
#pragma unroll
    for (int base = 0; base < kKeys; base += kStep) {
      const bool whole = (base + kStep) * kSelectThreads <= count;
#pragma unroll
      for (int i = base; i < base + kStep; ++i) {
        const int position = i * kSelectThreads + static_cast<int>(threadIdx.x);
        key[i] = whole || position < count ? __float_as_int(importance(position)) : -1;
      }
    }
  }
  template <typename F>
  __device__ __forceinline__ void replace(F f) {
#pragma unroll
    for (int base = 0; base < kKeys; base += kStep) {
      if (base < used) {
#pragma unroll
        for (int i = base; i < base + kStep; ++i) {
          key[i] = f(i, key[i]);
        }
      }
    }
  }
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int base = 0; base < kKeys; base += kStep) {
      if (base < used) {
#pragma unroll
        for (int i = base; i < base + kStep; ++i) {
          f(i, key[i]);
        }
      }
    }
  }
};

// Keys in [low, high]. Everything above them is selected, and so are the `wanted` largest of
// them; `count` are inside.
struct KeyRange {
  int low, high, wanted, count;
};

// The range of all keys that may be selected. 512 disjoint groups have a key each that is at least the
// smallest of the groups' maxima, so up to 512 keys can be wanted from there on.
template <int kKeys>
__device__ __forceinline__ KeyRange bracket(const RowKeys<kKeys>& keys, int wanted,
                                            SelectShared<kKeys>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int largest[2] = {-1, -1};
  keys.each([&](int i, int key) { largest[i % 2] = max(largest[i % 2], key); });
  const int least = __reduce_min_sync(device::kFullMask, min(largest[0], largest[1]));
  const int most = __reduce_max_sync(device::kFullMask, max(largest[0], largest[1]));
  if (lane == 0) {
    shared.least[warp] = least;
    shared.most[warp] = most;
  }
  __syncthreads();
  KeyRange range;
  range.low = max(__reduce_min_sync(device::kFullMask, shared.least[lane % kSelectWarps]), 0);
  range.high = __reduce_max_sync(device::kFullMask, shared.most[lane % kSelectWarps]);
  if (wanted > 2 * kSelectThreads) {
    range.low = 0;
  }
  range.wanted = wanted;
  range.count = 0;
  return range;
}

__device__ __forceinline__ void clear_bins(uint32_t* bins) {
  static_assert(kSelectBins == 8 * kSelectThreads);
  reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  reinterpret_cast<uint4*>(bins)[threadIdx.x + kSelectThreads] = make_uint4(0, 0, 0, 0);
}

// Narrows `range` to the bin of its `wanted`-th largest key. The bins must be clear. Returns whether a
// bin is one key.
template <int kKeys>
__device__ __forceinline__ bool narrow(const RowKeys<kKeys>& keys, KeyRange& range,
                                       SelectShared<kKeys>& shared) {
  const uint32_t width = static_cast<uint32_t>(range.high - range.low);
  const int shift = max(0, 21 - __clz(width));
  const uint32_t bins = device::shared_address(shared.bins);
  const auto count = [&](uint32_t bin) {
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(bins + bin * 4) : "memory");
  };
  if (shift > 0) {
    // Below the range the difference wraps. Above it there is nothing, or the range is a power of two.
    keys.each([&](int, int key) {
      count(min(static_cast<uint32_t>(key - range.low) >> shift, uint32_t{kSelectBins}));
    });
  } else {
    keys.each([&](int, int key) {
      const uint32_t bin = static_cast<uint32_t>(key - range.low);
      count(bin <= width ? bin : uint32_t{kSelectBins});
    });
  }
  __syncthreads();
  // Thread i owns 8 bins; the first threads have the largest keys.
  const int first = kSelectBins - 8 - static_cast<int>(threadIdx.x) * 8;
  const uint4 lower = *reinterpret_cast<const uint4*>(shared.bins + first);
  const uint4 upper = *reinterpret_cast<const uint4*>(shared.bins + first + 4);
  const int counts[8] = {static_cast<int>(upper.w), static_cast<int>(upper.z), static_cast<int>(upper.y),
                         static_cast<int>(upper.x), static_cast<int>(lower.w), static_cast<int>(lower.z),
                         static_cast<int>(lower.y), static_cast<int>(lower.x)};
  int own = 0, total;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    own += counts[i];
  }
  int above = sum_before(own, shared.scan[0], &total);
  if (above < range.wanted && range.wanted <= above + own) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (above < range.wanted && range.wanted <= above + counts[i]) {
        shared.bin = first + 7 - i;
        shared.bin_above = above;
        shared.bin_count = counts[i];
      }
      above += counts[i];
    }
  }
  __syncthreads();
  range.count = shared.bin_count;
  range.wanted -= shared.bin_above;
  range.low += shared.bin << shift;
  range.high = static_cast<int>(
      min(static_cast<uint32_t>(range.high), static_cast<uint32_t>(range.low) + ((1u << shift) - 1)));
  return shift == 0;
}

// ---- the choice

constexpr int kMaxGroup = 16;

// Writes the selected positions as words of bits to `shared.above`: everything above the range, and the first
// `wanted` of the few keys in it, by (key, position).
template <int kKeys>
__device__ __forceinline__ void choose_few(const RowKeys<kKeys>& keys, const KeyRange& range,
                                           SelectShared<kKeys>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool contested = range.count > range.wanted;
  keys.each([&](int i, int key) {
    const bool in = key >= range.low;
    const uint32_t word = __ballot_sync(device::kFullMask, in);
    if (lane == 0) {
      shared.above[i * kSelectWarps + warp] = word;
    }
    if (contested && in && key <= range.high) {
      const uint32_t position = i * kSelectThreads + threadIdx.x;
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

// The same where the range is one key that many positions hold. The smallest positions are selected.
template <int kKeys>
__device__ __forceinline__ void choose_ties(const RowKeys<kKeys>& keys, const KeyRange& range,
                                            SelectShared<kKeys>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  keys.each([&](int i, int key) {
    const uint32_t above = __ballot_sync(device::kFullMask, key > range.low);
    const uint32_t equal = __ballot_sync(device::kFullMask, key == range.low);
    if (lane == 0) {
      shared.above[i * kSelectWarps + warp] = above;
      shared.equal[i * kSelectWarps + warp] = equal;
    }
  });
  __syncthreads();
  constexpr int kOwn = (SelectShared<kKeys>::kWords + kSelectThreads - 1) / kSelectThreads;
  const int num_words =
      (keys.used + RowKeys<kKeys>::kStep - 1) / RowKeys<kKeys>::kStep * RowKeys<kKeys>::kStep * kSelectWarps;
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

// Selects `wanted` of the keys and writes their words to `shared.above`.
template <int kKeys>
__device__ __forceinline__ void choose(const RowKeys<kKeys>& keys, int wanted, SelectShared<kKeys>& shared) {
  clear_bins(shared.bins);
  if (threadIdx.x == 0) {
    shared.num_finalists = 0;
  }
  KeyRange range = bracket(keys, wanted, shared);
  bool one_key = narrow(keys, range, shared);
  while (range.count > kFinalists && !one_key) {
    clear_bins(shared.bins);
    __syncthreads();
    one_key = narrow(keys, range, shared);
  }
  if (range.count <= kFinalists) {
    choose_few(keys, range, shared);
  } else {
    choose_ties(keys, range, shared);
  }
}

// Raises the keys in `shared.above` above all others, and those of the positions behind them above the rest
// (§1.6, open_next). Importances end below these keys, but for NaN.
template <int kKeys>
__device__ __forceinline__ void raise_neighbours(RowKeys<kKeys>& keys, const SelectShared<kKeys>& shared) {
  constexpr int kBest = 0x7fffffff, kNeighbour = 0x7ffffffe, kNan = 0x7ffffffd;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  keys.replace([&](int i, int key) {
    const int word = i * kSelectWarps + warp;
    const uint32_t own = shared.above[word];
    const uint32_t before = word > 0 ? shared.above[word - 1] : 0u;
    const bool best = (own >> lane & 1) != 0;
    const bool behind = ((lane > 0 ? own >> (lane - 1) : before >> 31) & 1) != 0;
    return key < 0 ? key : best ? kBest : behind ? kNeighbour : min(key, kNan);
  });
}

// Selects `wanted` of the keys, the `best` largest and then the positions behind them if best > 0, and writes
// their words to `shared.above`.
template <int kKeys>
__device__ __forceinline__ void choose_with_neighbours(RowKeys<kKeys>& keys, int best, int wanted,
                                                       SelectShared<kKeys>& shared) {
#pragma unroll 1
  for (int number = best > 0 ? best : wanted;; number = wanted) {
    choose(keys, number, shared);
    if (number == wanted) {
      return;
    }
    __syncthreads();
    raise_neighbours(keys, shared);
  }
}

// Writes the references of the heads to `references` [kMaxGroup], from the sums of `runs` runs of the row's
// candidates ([runs, G]) in order. For kExpJoint they are the joint maximum. Has two barriers.
__device__ __forceinline__ void combine_sums(const float2* sums, int runs, int group, bool joint,
                                             float* references) {
  if (threadIdx.x < group) {
    LogSum all;
    for (int i = 0; i < runs; ++i) {
      const float2 part = sums[i * group + threadIdx.x];
      all.add(part.x, part.y);
    }
    references[threadIdx.x] = joint ? all.max : all.reference();
  }
  __syncthreads();
  float most = -INFINITY;
  for (int g = 0; joint && g < group; ++g) {
    most = fmaxf(most, references[g]);
  }
  __syncthreads();
  if (joint && threadIdx.x < group) {
    references[threadIdx.x] = most == -INFINITY ? INFINITY : most;
  }
  __syncthreads();
}

// Loads the importances of the first `count` candidates from their scores [p, G]: sums over the heads in
// order. kGroup is G, or 0 for any G.
template <int kKeys, int kGroup>
__device__ __forceinline__ void load_scores(RowKeys<kKeys>& keys, const float* scores, int count, int group,
                                            const float* references) {
  if constexpr (kGroup % 4 == 0 && kGroup > 0) {
    float lowered[kGroup];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      lowered[g] = references[g];
    }
    keys.load(count, [&](int position) {
      const float4* row = reinterpret_cast<const float4*>(scores + int64_t{position} * kGroup);
      float importance = 0.f;
#pragma unroll
      for (int g = 0; g < kGroup; g += 4) {
        const float4 s = __ldcs(row + g / 4);
        importance += device::exp2_flushed(s.x - lowered[g]);
        importance += device::exp2_flushed(s.y - lowered[g + 1]);
        importance += device::exp2_flushed(s.z - lowered[g + 2]);
        importance += device::exp2_flushed(s.w - lowered[g + 3]);
      }
      return importance;
    });
  } else {
    keys.load(count, [&](int position) {
      float importance = 0.f;
      for (int g = 0; g < group; ++g) {
        importance += device::exp2_flushed(scores[int64_t{position} * group + g] - references[g]);
      }
      return importance;
    });
  }
}

// Writes the weights of the sums of a group of nodes, [groups of the row, G]: 2^(reference - log-sum). Ends
// with a barrier.
__device__ __forceinline__ void weigh_groups(const SpanScores& spans, int64_t row_idx, int count, int group,
                                             const float* log_sums, float* weights) {
  const float* references = spans.references + row_idx * spans.num_groups * group;
  const int groups = (count + (1 << spans.tiling.nodes_log2) - 1) >> spans.tiling.nodes_log2;
  for (int i = threadIdx.x; i < groups * group; i += kSelectThreads) {
    weights[i] = device::exp2_flushed(__ldg(references + i) - log_sums[i % group]);
  }
  __syncthreads();
}

// Loads the importances of the first `count` nodes from the sums of their span means; `sums` [G, width] are
// the row's. kGroup is G, or 0 for any G.
template <int kKeys, int kGroup>
__device__ __forceinline__ void load_span_scores(RowKeys<kKeys>& keys, const float* sums, int64_t width,
                                                 int nodes_log2, int count, int group, const float* weights) {
  keys.load(count, [&](int position) {
    float importance = 0.f;
    if constexpr (kGroup > 0) {
      float weight[kGroup];
      const float4* own = reinterpret_cast<const float4*>(weights + (position >> nodes_log2) * kGroup);
#pragma unroll
      for (int g = 0; g < kGroup; g += 4) {
        const float4 four = own[g / 4];
        weight[g] = four.x;
        weight[g + 1] = four.y;
        weight[g + 2] = four.z;
        weight[g + 3] = four.w;
      }
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        importance += __ldcs(sums + g * width + position) * weight[g];
      }
    } else {
      for (int g = 0; g < group; ++g) {
        importance += __ldcs(sums + g * width + position) * weights[(position >> nodes_log2) * group + g];
      }
    }
    return importance;
  });
}

enum class RowSource { kImportances, kScores, kScoresOfEight, kSpans, kSpansOfEight };

// Grid: x = list rows * kv heads, those with the longest rows first; y = batch.
template <RowSource kSource, int kKeys, int kBlocks>
__global__ void __launch_bounds__(kSelectThreads, kBlocks) leader_select_kernel(LeaderSelectParams params) {
  using Shared = SelectShared<kKeys>;
  __shared__ Shared shared;
  extern __shared__ __align__(16) float group_weights[];  // see weigh_groups
  const GatherParams& p = params.gather;
  const unsigned row = gridDim.x - 1 - blockIdx.x;
  const unsigned kv_head = row % static_cast<unsigned>(p.num_kv_heads);
  const int64_t list_row = row / static_cast<unsigned>(p.num_kv_heads);
  const int64_t batch = blockIdx.y;
  constexpr bool kSpans = kSource == RowSource::kSpans || kSource == RowSource::kSpansOfEight;
  constexpr bool kWholeLayer = kSource == RowSource::kImportances || kSpans;  // candidate p is node p
  GatherTask task;
  if constexpr (kWholeLayer) {
    const int64_t token = p.t0 + list_row * p.stride;
    task.num_candidates = static_cast<int>(token >> (__ffsll(p.node_span) - 1)) + 1;
  } else {
    task = gather_task(p, static_cast<int>(batch * p.num_kv_heads + kv_head), list_row * p.stride, list_row);
  }
  const int rank = task.num_candidates - 1;
  const int num_words = (rank + 32) / 32;
  int32_t* next = params.next_lists + batch * params.next_batch + int64_t{row} * p.list_width;
  uint32_t* mask = params.selected
                       ? params.selected + batch * params.selected_batch + int64_t{row} * params.mask_words
                       : nullptr;
  const auto node = [&](int position) {
    if constexpr (kWholeLayer) {
      return position;
    }
    return (task.list ? task.list[position / kParentRows] : position / kParentRows) * kParentRows +
           position % kParentRows;
  };
  if (rank < p.list_width) {  // every candidate is selected
    for (int i = threadIdx.x; i < p.list_width; i += kSelectThreads) {
      next[i] = i <= rank ? node(i) : -1;
    }
    for (int word = threadIdx.x; mask && word < num_words; word += kSelectThreads) {
      mask[word] = rank - word * 32 >= 31 ? 0xffffffffu : (2u << (rank - word * 32)) - 1u;
    }
    return;
  }
  const int wanted = p.list_width - 1;  // the query's diagonal block is selected in any case
  if (wanted > 0) {
    RowKeys<kKeys> keys;
    const int64_t row_idx = batch * p.num_lists * p.num_kv_heads + row;
    if constexpr (kSource == RowSource::kImportances) {
      const float* importances = params.scores + row_idx * params.score_width;
      keys.load(rank, [&](int position) { return __ldg(importances + position); });
    } else if constexpr (kSpans) {
      __shared__ float log_sums[kMaxGroup];
      const SpanScores& spans = params.spans;
      const int run_log2 = spans.tiling.nodes_log2 + spans.tiling.run_log2;
      combine_sums(spans.runs + row_idx * spans.num_runs * p.group, (rank + (1 << run_log2) - 1) >> run_log2,
                   p.group, params.selection.importance == Importance::kExpJoint, log_sums);
      weigh_groups(spans, row_idx, rank, p.group, log_sums, group_weights);
      load_span_scores<kKeys, kSource == RowSource::kSpansOfEight ? 8 : 0>(
          keys, spans.sums + row_idx * p.group * spans.width, spans.width, spans.tiling.nodes_log2, rank,
          p.group, group_weights);
    } else {
      __shared__ float references[kMaxGroup];
      combine_sums(params.sums + row_idx * params.num_runs * p.group,
                   (task.num_slots + kRunSlots - 1) / kRunSlots, p.group,
                   params.selection.importance == Importance::kExpJoint, references);
      load_scores<kKeys, kSource == RowSource::kScoresOfEight ? 8 : 0>(
          keys, params.scores + row_idx * params.score_width * p.group, rank, p.group, references);
    }
    // The query's diagonal block is the first of the best.
    const auto best =
        static_cast<int>(best_with_neighbours(params.selection, p.list_width, task.num_candidates)) - 1;
    choose_with_neighbours(keys, best, wanted, shared);
  }
  __syncthreads();

  // Thread i owns the words from i * kOwn on. Word w has the positions 32 w ... 32 w + 31.
  constexpr int kOwn = (Shared::kWords + kSelectThreads - 1) / kSelectThreads;
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
      shared.ids[at++] = node((threadIdx.x * kOwn + i) * 32 + __ffs(bits) - 1);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.list_width; i += kSelectThreads) {
    next[i] = shared.ids[i];
  }
}

// ---- launches, with as few keys per thread as the longest row needs

namespace {

// The registers are limited so that kBlocks thread blocks fit an SM.
template <RowSource kSource, int kKeys, int kBlocks>
cudaError_t launch(const LeaderSelectParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const dim3 grid(static_cast<unsigned>(int64_t{p.num_lists} * p.num_kv_heads), p.num_batches);
  const auto kernel = leader_select_kernel<kSource, kKeys, kBlocks>;
  const int64_t weights = params.spans.sums ? int64_t{params.spans.num_groups} * p.group : 0;
  const LaunchShape shape{
      .grid = grid, .threads = kSelectThreads, .shared_bytes = weights * static_cast<int64_t>(sizeof(float))};
  // launch_kernel() allows for less static shared memory than this kernel has, so the limit is raised here.
  constexpr int64_t kFreeBytes = (48 << 10) - static_cast<int64_t>(sizeof(SelectShared<kKeys>)) - 256;
  if (shape.shared_bytes > kFreeBytes) {
    const int64_t asked = std::max(shape.shared_bytes, kFreeSharedBytes + 1);
    if (const cudaError_t error = allow_shared_bytes(kernel, asked); error != cudaSuccess) {
      return error;
    }
  }
  return launch_kernel(kernel, shape, stream, params);
}

template <RowSource kSource>
cudaError_t launch_longest(const LeaderSelectParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const int64_t last_slots = (p.t0 + int64_t{p.num_lists - 1} * p.stride) / p.node_span / kParentRows + 1;
  const int64_t longest = (p.lists ? std::min<int64_t>(last_slots, p.list_width) : last_slots) * kParentRows;
  constexpr bool kScores = kSource == RowSource::kScores || kSource == RowSource::kScoresOfEight;
  if (longest <= 8 * kSelectThreads) {
    return launch < kSource, 8, kScores ? 5 : 6 > (params, stream);
  }
  if (longest <= 16 * kSelectThreads) {
    return launch < kSource, 16, kScores ? 4 : 5 > (params, stream);
  }
  if (longest <= 32 * kSelectThreads) {
    return launch < kSource, 32, kScores ? 3 : 4 > (params, stream);
  }
  return launch<kSource, 64, 2>(params, stream);
}

}  // namespace

cudaError_t launch_leader_select(const LeaderSelectParams& params, cudaStream_t stream) {
  if (params.spans.sums) {
    return params.gather.group == 8 ? launch_longest<RowSource::kSpansOfEight>(params, stream)
                                    : launch_longest<RowSource::kSpans>(params, stream);
  }
  if (!params.sums) {
    return launch_longest<RowSource::kImportances>(params, stream);
  }
  return params.gather.group == 8 ? launch_longest<RowSource::kScoresOfEight>(params, stream)
                                  : launch_longest<RowSource::kScores>(params, stream);
}

}  // namespace htree::tree_attention
