// Exact selection of the next layer's parents from the scores of one leader: docs/semantics.md §1.6.
//
// One block of kSelectThreads threads per row. Importances are non-negative floats, so their bits order like
// the numbers, with NaN made the largest; a histogram of the bits finds the k-1-th largest key in at most
// three rounds, equal keys are taken from the smallest position on, and the query's own node joins
// unconditionally. The block size is fixed, hence so is the order of every sum.
#pragma once

#include "device/mma.cuh"
#include "ops/tree_attention/attention/gather_task.cuh"

namespace htree::tree_attention {

constexpr int kSelectThreads = 256;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kSelectBins = 2048;

// Shared memory: keys [width], words [width / 32] x 2, bins.
constexpr int64_t select_shared_bytes(int64_t width) {
  return width * 4 + (width + 31) / 32 * 8 + kSelectBins * 4;
}

// log2 sum 2^s of what it has seen; -inf of nothing, NaN of a NaN.
struct LogSum {
  float max = -INFINITY, sum = 0.f;

  __device__ __forceinline__ static float finite(float m) { return fabsf(m) == INFINITY ? 0.f : m; }
  __device__ __forceinline__ void add(float other_max, float other_sum) {
    const float top = fmaxf(max, other_max);
    const float from = finite(top);
    sum = sum * device::exp2_flushed(max - from) + other_sum * device::exp2_flushed(other_max - from);
    max = top;
  }
  // What a score is lowered by; +inf turns every weight to 0.
  __device__ __forceinline__ float reference() const {
    return sum == 0.f ? INFINITY : finite(max) + log2f(sum);
  }
};

// Inclusive to exclusive: every thread gets the sum over the threads before it, `total` the sum over all.
// Three barriers. `scratch` holds kSelectWarps ints.
__device__ __forceinline__ int block_exclusive_scan(int value, int* scratch, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(device::kFullMask, inclusive, offset);
    inclusive += lane >= offset ? other : 0;
  }
  __syncthreads();
  if (lane == 31) {
    scratch[warp] = inclusive;
  }
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll
  for (int i = 0; i < kSelectWarps; ++i) {
    before += i < warp ? scratch[i] : 0;
    all += scratch[i];
  }
  *total = all;
  return before + inclusive - value;
}

// References of the heads (shared [kGroup]): the log-sum of the first `count` candidates, or their joint
// maximum.
template <int kGroup>
__device__ __forceinline__ void head_references(const float* scores, int count, int group, bool joint_max,
                                                float* references, LogSum (*partial)[kGroup]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  LogSum sums[kGroup];
  for (int p = threadIdx.x; p < count; p += kSelectThreads) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (g < group) {
        sums[g].add(scores[int64_t{p} * group + g], 1.f);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float max = __shfl_xor_sync(device::kFullMask, sums[g].max, offset);
      const float sum = __shfl_xor_sync(device::kFullMask, sums[g].sum, offset);
      sums[g].add(max, sum);
    }
    if (lane == 0) {
      partial[warp][g] = sums[g];
    }
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    LogSum all = partial[0][threadIdx.x];
    for (int i = 1; i < kSelectWarps; ++i) {
      all.add(partial[i][threadIdx.x].max, partial[i][threadIdx.x].sum);
    }
    references[threadIdx.x] = joint_max ? all.max : all.reference();
  }
  __syncthreads();
  if (joint_max) {
    float max = -INFINITY;
    for (int g = 0; g < group; ++g) {
      max = fmaxf(max, references[g]);
    }
    __syncthreads();
    if (threadIdx.x < kGroup) {
      references[threadIdx.x] = max == -INFINITY ? INFINITY : max;
    }
    __syncthreads();
  }
}

// The `wanted`-th largest of keys[0, count): keys above `threshold` are in, of those equal to it the first
// `ties`.
struct Threshold {
  uint32_t key;
  int ties;
};

__device__ __forceinline__ Threshold find_threshold(const uint32_t* keys, int count, int wanted, int* bins,
                                                    int* scratch) {
  __shared__ uint32_t found_prefix;
  __shared__ int found_wanted, found_count;
  uint32_t prefix = 0;  // the bits above `shift + width` that are settled
  constexpr int kShifts[3] = {20, 9, 0};
  constexpr int kWidths[3] = {11, 11, 9};
#pragma unroll
  for (int round = 0; round < 3; ++round) {
    const int shift = kShifts[round], width = kWidths[round];
    for (int i = threadIdx.x; i < kSelectBins; i += kSelectThreads) {
      bins[i] = 0;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < count; p += kSelectThreads) {
      const uint32_t key = keys[p];
      if (round == 0 || key >> (shift + width) == prefix) {
        atomicAdd(&bins[key >> shift & ((1u << width) - 1)], 1);
      }
    }
    __syncthreads();
    // thread i owns 8 bins, the largest keys first
    constexpr int kOwn = kSelectBins / kSelectThreads;
    const int first = kSelectBins - 1 - static_cast<int>(threadIdx.x) * kOwn;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own += bins[first - i];
    }
    int total;
    int above = block_exclusive_scan(own, scratch, &total);
    if (above < wanted && wanted <= above + own) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int here = bins[first - i];
        if (above < wanted && wanted <= above + here) {
          found_prefix = prefix << width | static_cast<uint32_t>(first - i);
          found_wanted = wanted - above;
          found_count = here;
        }
        above += here;
      }
    }
    __syncthreads();
    prefix = found_prefix;
    wanted = found_wanted;
    // the whole bin is wanted: everything from its smallest key on
    if (found_count == wanted && shift > 0) {
      const uint32_t least = prefix << shift;
      return least == 0 ? Threshold{0, wanted} : Threshold{least - 1, 0};
    }
    __syncthreads();
  }
  return {prefix, wanted};
}

// Grid: x = list rows, y = batch * kv head.
template <int kGroup>
__global__ void __launch_bounds__(kSelectThreads) leader_select_kernel(LeaderSelectParams params) {
  extern __shared__ __align__(128) char shared[];
  __shared__ int scan_scratch[kSelectWarps];
  __shared__ float references[kGroup];
  __shared__ LogSum partial[kSelectWarps][kGroup];
  const GatherParams& p = params.gather;
  const int64_t list_row = blockIdx.x;
  const GatherTask task = gather_task(p, blockIdx.y, list_row * p.stride, list_row);
  const int n = task.num_candidates;
  const int num_words = (n + 31) / 32;
  const int64_t row_idx = (task.batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + task.kv_head;
  const float* scores = params.scores + row_idx * params.score_width * p.group;
  uint32_t* keys = reinterpret_cast<uint32_t*>(shared);
  uint32_t* above = keys + params.score_width;
  uint32_t* equal = above + (params.score_width + 31) / 32;
  int* bins = reinterpret_cast<int*>(equal + (params.score_width + 31) / 32);

  if (n > p.list_width) {
    const int ranked = n - 1;  // the rightmost is not ranked
    const int wanted = p.list_width - 1;
    Threshold threshold{0xffffffffu, 0};
    if (wanted > 0) {
      head_references<kGroup>(scores, params.importance == Importance::kLse ? n : ranked, p.group,
                              params.importance == Importance::kExpJoint, references, partial);
      for (int c = threadIdx.x; c < ranked; c += kSelectThreads) {
        float importance = 0.f;
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          if (g < p.group) {
            importance += device::exp2_flushed(scores[int64_t{c} * p.group + g] - references[g]);
          }
        }
        keys[c] = importance != importance ? 0x7fffffffu : __float_as_uint(importance);
      }
      __syncthreads();
      threshold = find_threshold(keys, ranked, wanted, bins, scan_scratch);
    }
    for (int base = threadIdx.x / 32 * 32; base < num_words * 32; base += kSelectThreads) {
      const int c = base + threadIdx.x % 32;
      const uint32_t key = c < ranked ? keys[c] : 0;
      const uint32_t is_above =
          __ballot_sync(device::kFullMask, wanted > 0 && c < ranked && key > threshold.key);
      const uint32_t is_equal = __ballot_sync(device::kFullMask, c < ranked && key == threshold.key);
      if (threadIdx.x % 32 == 0) {
        above[base / 32] = is_above;
        equal[base / 32] = is_equal;
      }
    }
    __syncthreads();
    // ties from the smallest position on: thread i owns a run of words
    const int run = (num_words + kSelectThreads - 1) / kSelectThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * run, num_words), end = min(begin + run, num_words);
    int own = 0, total;
    for (int word = begin; word < end; ++word) {
      own += __popc(equal[word]);
    }
    int rank = block_exclusive_scan(own, scan_scratch, &total);
    for (int word = begin; word < end; ++word) {
      uint32_t bits = equal[word], taken = 0;
      for (; bits && rank < threshold.ties; bits &= bits - 1, ++rank) {
        taken |= bits & (0u - bits);
      }
      above[word] |= taken;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      above[(n - 1) / 32] |= 1u << ((n - 1) % 32);
    }
  } else {
    for (int word = threadIdx.x; word < num_words; word += kSelectThreads) {
      above[word] = n - word * 32 >= 32 ? 0xffffffffu : (1u << (n - word * 32)) - 1u;
    }
  }
  __syncthreads();

  // node ids in ascending order
  int32_t* next = params.next_lists + task.batch * params.next_batch +
                  (list_row * p.num_kv_heads + task.kv_head) * p.list_width;
  const int run = (num_words + kSelectThreads - 1) / kSelectThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * run, num_words), end = min(begin + run, num_words);
  int own = 0, total;
  for (int word = begin; word < end; ++word) {
    own += __popc(above[word]);
  }
  int at = block_exclusive_scan(own, scan_scratch, &total);
  for (int word = begin; word < end; ++word) {
    for (uint32_t bits = above[word]; bits; bits &= bits - 1) {
      const int c = word * 32 + __ffs(bits) - 1;
      const int parent = task.list ? task.list[c / kBlockRows] : c / kBlockRows;
      next[at++] = parent * kBlockRows + c % kBlockRows;
    }
  }
  for (int i = total + threadIdx.x; i < p.list_width; i += kSelectThreads) {
    next[i] = -1;
  }
  if (params.selected) {
    uint32_t* mask = params.selected + task.batch * params.selected_batch +
                     (list_row * p.num_kv_heads + task.kv_head) * params.mask_words;
    for (int word = threadIdx.x; word < num_words; word += kSelectThreads) {
      mask[word] = above[word];
    }
  }
}

}  // namespace htree::tree_attention
