// One layer of the walk of tree_cache_attention on pages: scores, selection, weighted values. A row is
// a query and a K/V head; several thread blocks share its candidates. Between the kernels the scores
// are in device memory.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device/online_softmax.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "device/rotary.cuh"
#include "device/work.cuh"
#include "ops/selection/cuda/any/compute_scores.cuh"
#include "ops/selection/cuda/any/select_topk.cuh"
#include "ops/tree_cache/rows.cuh"

namespace htree::tree_cache {

struct AttendTraits {
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / device::kWarpSize;
  static constexpr int kTile = 16;      // candidates of a warp, two lanes for each
  static constexpr int kMaxLanes = 32;  // threads on one value row
};

// ---- rows

// A row of T in a pool.
template <typename T>
struct StoredRow {
  const T* first;

  template <int kPack>
  __device__ __forceinline__ device::Pack<T, kPack> load(int column) const {
    return device::load_pack<kPack>(first + column);
  }
};

// The rows of a pool. What row_of() gives with `page_rows` and `step` names one.
template <typename T>
struct StoredRows {
  const T* pool;
  int64_t page_rows;
  int step;  // elements of a row

  __device__ __forceinline__ StoredRow<T> at(int64_t row) const { return {pool + row}; }
};

// A packed token, whose channels are codes times a scale, rounded to T. docs/semantics/tree_cache.md §7.5
template <typename T>
struct PackedRow {
  const uint8_t* codes;
  float scale;
  int bits;

  // The column is a multiple of kPack, which is even.
  template <int kPack>
  __device__ __forceinline__ device::Pack<T, kPack> load(int column) const {
    float values[kPack];
    if (bits == 8) {
      const auto bytes = device::load_pack<kPack>(codes + column);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        values[i] = scale * static_cast<float>(static_cast<int8_t>(bytes[i]));
      }
    } else {
      const auto pairs = device::load_pack<kPack / 2>(codes + column / 2);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        values[i] = scale * static_cast<float>((pairs[i / 2] >> (4 * (i % 2)) & 15) - 8);
      }
    }
    device::Pack<T, kPack> row;
    device::from_acc<T>(values, row.data);
    return row;
  }
};

template <typename T>
struct PackedRows {
  LeafPool pool;
  int64_t page_rows;  // tokens of a page
  int bits;
  static constexpr int step = 1;

  __device__ __forceinline__ PackedRow<T> at(int64_t row) const {
    return {pool.codes + row * pool.row_bytes, __half2float(__ushort_as_half(pool.scales[row])), bits};
  }
};

// ---- candidates

// The node that candidate p is, given list_or_null().
__device__ __forceinline__ int64_t node_or_place(const int32_t* list, uint32_t p, uint32_t rate) {
  return list == nullptr ? p : node_of(list, p, rate);
}

// ---- scores

// Fills queries [K][kHeads] with up to kHeads heads, rotated by `position` and scaled; heads
// beyond num_heads are zero.
template <typename T, int kHeads>
__device__ __forceinline__ void stage_queries(const AttendParams<T>& params, const T* q, int num_heads,
                                              int position, float* queries) {
  const int pairs = params.key_dim / 2;
  const CacheOptions& options = params.options;
  for (int item = threadIdx.x; item < pairs * kHeads; item += AttendTraits::kThreads) {
    const int head = item / pairs;
    const int pair = item - head * pairs;
    float low = 0.0f, high = 0.0f;
    if (head < num_heads) {
      low = device::to_acc(q[head * params.q_head + pair]);
      high = device::to_acc(q[head * params.q_head + pairs + pair]);
      if (options.cos != nullptr) {
        const int64_t at = static_cast<int64_t>(position) * pairs + pair;
        device::rotate_pair(low, high, options.cos[at], options.sin[at]);
      }
    }
    queries[pair * kHeads + head] = low * options.scale;
    queries[(pairs + pair) * kHeads + head] = high * options.scale;
  }
}

// Adds this lane's share of the products of a key with the heads. `part`, 0 or 1, is the half of the dims that
// the lane takes.
template <typename T, int kHeads, int kPack, class Row>
__device__ __forceinline__ void multiply_key(const AttendParams<T>& params, const Row& key, int position,
                                             int part, const float* queries, float (&sums)[kHeads]) {
  const int pairs = params.key_dim / 2;
  const int packs = pairs / kPack;
  const int first = part == 0 ? 0 : (packs + 1) / 2;
  const int last = part == 0 ? (packs + 1) / 2 : packs;
  const int64_t table = static_cast<int64_t>(position) * pairs;
#pragma unroll 2
  for (int pack = first; pack < last; ++pack) {
    const int pair = pack * kPack;
    const auto stored_low = key.template load<kPack>(pair);
    const auto stored_high = key.template load<kPack>(pairs + pair);
    float cos[kPack], sin[kPack];
    if (params.options.cos != nullptr) {
      tree_attention::load_table(params.options.cos + table + pair, cos);
      tree_attention::load_table(params.options.sin + table + pair, sin);
    }
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      float low = device::to_acc(stored_low[e]);
      float high = device::to_acc(stored_high[e]);
      if (params.options.cos != nullptr) {
        device::rotate_pair(low, high, cos[e], sin[e]);
      }
      const float* q_low = queries + (pair + e) * kHeads;
      const float* q_high = queries + (pairs + pair + e) * kHeads;
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        sums[head] = fmaf(high, q_high[head], fmaf(low, q_low[head], sums[head]));
      }
    }
  }
}

// Block (row, y): its warps take the tiles y kWarps, ..., y kWarps + kWarps - 1 of the row's candidates, and
// those gridDim.y kWarps further.
template <typename T, int kHeads, int kPack, class Rows>
__global__ void __launch_bounds__(AttendTraits::kThreads)
    cache_scores_kernel(const AttendParams<T> params, const Rows keys, int layer) {
  using Traits = AttendTraits;
  extern __shared__ __align__(16) float queries[];  // [K][kHeads]
  const WalkRow walk = walk_row(params, blockIdx.x);
  if (!counts(walk.query) || walk.query.top < layer) {
    return;
  }
  const int num = num_candidates(params.layout, walk.query, params.options.top_k, layer);
  const int first_tile = static_cast<int>(blockIdx.y) * Traits::kWarps;
  if (!merges(layer, num, params.options.top_k) || first_tile * Traits::kTile >= num) {
    return;
  }
  const int32_t* list = list_or_null(params, walk, layer);
  const int lane = threadIdx.x % device::kWarpSize;
  const int64_t capacity = most_candidates(params.layout, params.options);
  float* scores = params.chunk.scores + walk.at * capacity * params.group;
  const T* q = params.q + walk.row * params.q_row + walk.head * params.group * params.q_head;
  for (int first_head = 0; first_head < params.group; first_head += kHeads) {
    const int num_heads = min(kHeads, params.group - first_head);
    __syncthreads();
    stage_queries<T, kHeads>(params, q + first_head * params.q_head, num_heads, num - 1, queries);
    __syncthreads();
    for (int tile = first_tile + threadIdx.x / device::kWarpSize; tile * Traits::kTile < num;
         tile += static_cast<int>(gridDim.y) * Traits::kWarps) {
      const int p = tile * Traits::kTile + lane / 2;
      int64_t at = -1;
      // Above the tokens the rightmost node is opened whatever its score, and may be unfinished:
      // it has no score.
      if (p < num - (layer > 0)) {
        at = row_of(params, walk, layer, node_or_place(list, p, params.layout.rate), keys.page_rows,
                    keys.step);
      }
      float sums[kHeads] = {};
      if (at >= 0) {
        multiply_key<T, kHeads, kPack>(params, keys.at(at), p, lane % 2, queries, sums);
      }
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        sums[head] += __shfl_xor_sync(device::kFullMask, sums[head], 1);
        if (lane % 2 == 0 && p < num && head < num_heads) {
          scores[static_cast<int64_t>(p) * params.group + first_head + head] =
              at >= 0 ? sums[head] : device::negative_infinity<float>();
        }
      }
    }
  }
}

// The same for the span means of a leader's candidates, where it has to choose: of each candidate and head the
// log-sum-exp over its means, in their order. From there on the selection is that of single scores.
// docs/semantics/tree_attention.md §1.15
template <typename T, int kHeads, int kPack>
__global__ void __launch_bounds__(AttendTraits::kThreads)
    cache_span_kernel(const AttendParams<T> params, int layer) {
  using Traits = AttendTraits;
  extern __shared__ __align__(16) float queries[];  // [K][kHeads]
  const WalkRow walk = walk_row(params, blockIdx.x);
  if (!leads(walk) || !counts(walk.query) || walk.query.top < layer) {
    return;
  }
  const PageLayout& layout = params.layout;
  const int num = num_candidates(layout, walk.query, params.options.top_k, layer);
  const int first_tile = static_cast<int>(blockIdx.y) * Traits::kWarps;
  if (num <= params.options.top_k || first_tile * Traits::kTile >= num) {
    return;
  }
  const int32_t* list = list_or_null(params, walk, layer);  // a leader's is its own
  const int lane = threadIdx.x % device::kWarpSize;
  const uint32_t per_node = layout.tokens[layer] / layout.span;
  const int64_t capacity = most_candidates(layout, params.options);
  float* scores = params.chunk.span_scores + walk.at * capacity * params.group;
  const T* q = params.q + walk.row * params.q_row + walk.head * params.group * params.q_head;
  for (int first_head = 0; first_head < params.group; first_head += kHeads) {
    const int num_heads = min(kHeads, params.group - first_head);
    __syncthreads();
    stage_queries<T, kHeads>(params, q + first_head * params.q_head, num_heads, num - 1, queries);
    __syncthreads();
    for (int tile = first_tile + threadIdx.x / device::kWarpSize; tile * Traits::kTile < num;
         tile += static_cast<int>(gridDim.y) * Traits::kWarps) {
      const int p = tile * Traits::kTile + lane / 2;
      const bool scored = p < num - 1;  // the means of the rightmost may hold later tokens
      const uint32_t first_mean =
          scored ? static_cast<uint32_t>(node_or_place(list, p, layout.rate)) * per_node : 0;
      device::OnlineSum sums[kHeads];
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        sums[head] = device::OnlineSum::empty();
      }
      for (uint32_t mean = 0; mean < per_node; ++mean) {
        const int64_t at = scored ? row_at(params, walk, layout.span_mean(first_mean + mean),
                                           layout.key_rows(), params.key_dim)
                                  : -1;
        float products[kHeads] = {};
        if (at >= 0) {
          multiply_key<T, kHeads, kPack>(params, StoredRow<T>{params.keys + at}, p, lane % 2, queries,
                                         products);
        }
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          products[head] += __shfl_xor_sync(device::kFullMask, products[head], 1);
          if (at >= 0) {
            sums[head].add(products[head]);
          }
        }
      }
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (lane % 2 == 0 && p < num && head < num_heads) {
          scores[static_cast<int64_t>(p) * params.group + first_head + head] = sums[head].log_sum();
        }
      }
    }
  }
}

// ---- selection

// Block (row): writes the list that a leader uses in the layer
// below, ascending. docs/semantics/tree_attention.md §1.6
template <typename T, int kHeads>
__global__ void __launch_bounds__(tree_attention::SelectTraits::kThreads)
    cache_select_kernel(const AttendParams<T> params, int layer) {
  using Traits = tree_attention::SelectTraits;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ tree_attention::SelectShared shared;
  const WalkRow walk = walk_row(params, blockIdx.x);
  if (!leads(walk) || !counts(walk.query) || walk.query.top < layer) {
    return;
  }
  const PageLayout& layout = params.layout;
  const int top_k = params.options.top_k;
  const int num = num_candidates(layout, walk.query, top_k, layer);
  const int64_t capacity = most_candidates(layout, params.options);
  const int32_t* list = list_or_null(params, walk, layer);  // a leader's is its own
  int32_t* next = own_list(params, walk, layer - 1);
  auto* normalizer = reinterpret_cast<float*>(shared_bytes);  // [G]
  uint32_t* keys = params.chunk.keys == nullptr ? reinterpret_cast<uint32_t*>(normalizer + params.group)
                                                : params.chunk.keys + walk.at * capacity;
  if (num > top_k) {
    const float* scores = (layout.span > 0 ? params.chunk.span_scores : params.chunk.scores) +
                          walk.at * capacity * params.group;
    uint32_t fold = 0;
    if (params.options.selection.importance == tree_attention::Importance::kExpJoint) {
      tree_attention::make_joint_maximum<FullWork>(scores, num - 1, params.group, normalizer, shared, fold);
    } else {
      tree_attention::make_lse<FullWork, kHeads>(scores, num - 1, params.group, normalizer, shared, fold);
    }
    __syncthreads();
    tree_attention::make_keys<FullWork, kHeads>(scores, num, num - 1, params.group, normalizer, keys, fold);
    __syncthreads();
    const int64_t best = tree_attention::best_with_neighbours(params.options.selection, top_k, num);
    if (best > 0) {
      tree_attention::raise_neighbours(keys, num, best, shared);
    }
  }
  const int count = min(num, top_k);
  tree_attention::for_each_selected(keys, num, count, shared, [&](int64_t rank, int64_t p) {
    next[rank] = static_cast<int32_t>(node_or_place(list, static_cast<uint32_t>(p), layout.rate));
  });
  for (int i = count + threadIdx.x; i < top_k; i += Traits::kThreads) {
    next[i] = -1;
  }
}

// ---- weighted values

template <int kHeads, int kPack>
struct ValuesShared {
  alignas(16) float weights[kSplit][kHeads];
  int64_t rows[kSplit];  // the value among the rows of its layer; -1: do not read it
  uint32_t selected[kSplit / 32];
  float parts[AttendTraits::kThreads * kPack];
  float reduced[2][AttendTraits::kWarps];
};

// Marks the candidates of [first, first + kSplit) that the next list opens.
template <typename T>
__device__ __forceinline__ void mark_selected(const AttendParams<T>& params, const WalkRow& walk, int layer,
                                              int num, int first, uint32_t* selected) {
  const int32_t* list = list_or_null(params, walk, layer);
  const int32_t* next = list_of(params, walk, layer - 1);
  const int32_t rate = static_cast<int32_t>(params.layout.rate);
  const int slots = (num + rate - 1) / rate;
  for (int i = threadIdx.x; i < params.options.top_k; i += AttendTraits::kThreads) {
    const int32_t node = next[i];
    if (node < 0) {
      continue;
    }
    const int p = (list == nullptr ? node : candidate_of(list, slots, node, rate)) - first;
    if (p >= 0 && p < kSplit) {
      atomicOr(&selected[p / 32], 1u << (p % 32));
    }
  }
}

// Finds the values of the split's candidates, and per head the largest score of those that count.
template <typename T, int kHeads, int kPack, class Rows>
__device__ __forceinline__ void stage_rows(const AttendParams<T>& params, const WalkRow& walk,
                                           const Rows& values_of_layer, int layer, int num, int first,
                                           const float* scores, int num_heads, float (&maximum)[kHeads],
                                           ValuesShared<kHeads, kPack>& shared) {
  using Traits = AttendTraits;
  const int32_t* list = list_or_null(params, walk, layer);
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    maximum[head] = device::negative_infinity<float>();
  }
  for (int i = threadIdx.x; i < kSplit; i += Traits::kThreads) {
    const int p = first + i;
    int64_t row = -1;
    if (p < num && !(shared.selected[i / 32] >> (i % 32) & 1)) {
      row = row_of(params, walk, layer, node_or_place(list, p, params.layout.rate), values_of_layer.page_rows,
                   values_of_layer.step);
    }
    shared.rows[i] = row;
    if (row >= 0) {
      float values[kHeads];
      tree_attention::load_head_scores(scores + static_cast<int64_t>(p) * params.group, num_heads, values);
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        shared.weights[i][head] = values[head];
        maximum[head] = device::MaxNan{}(maximum[head], values[head]);
      }
    }
  }
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    maximum[head] =
        device::block_reduce<Traits::kThreads, device::MaxNan>(maximum[head], shared.reduced[head % 2]);
    __syncthreads();
  }
}

// Turns scores into weights and adds this thread's share to `sums`. A score of -inf becomes weight -1, and
// its value is not read.
template <int kHeads, int kPack>
__device__ __forceinline__ void make_weights(const float (&maximum)[kHeads], float (&sums)[kHeads],
                                             ValuesShared<kHeads, kPack>& shared) {
  for (int i = threadIdx.x; i < kSplit; i += AttendTraits::kThreads) {
    if (shared.rows[i] < 0) {
      continue;
    }
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float score = shared.weights[i][head];
      const bool used = score != device::negative_infinity<float>();
      const float weight = used ? expf(score - maximum[head]) : -1.0f;
      sums[head] += used ? weight : 0.0f;
      shared.weights[i][head] = weight;
    }
  }
}

// Adds the teams' columns in the order of the teams and stores them.
template <int kHeads, int kPack>
__device__ __forceinline__ void store_columns(const float (&columns)[kHeads][kPack], float* out,
                                              int value_dim, int num_heads, int first_column, int lanes,
                                              ValuesShared<kHeads, kPack>& shared) {
  const int width = lanes * kPack;
  const int teams = AttendTraits::kThreads / lanes;
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    if (head >= num_heads) {
      break;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      shared.parts[threadIdx.x * kPack + e] = columns[head][e];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < width; column += AttendTraits::kThreads) {
      float total = 0.0f;
      for (int team = 0; team < teams; ++team) {
        total += shared.parts[team * width + column];
      }
      if (first_column + column < value_dim) {
        out[static_cast<int64_t>(head) * value_dim + first_column + column] = total;
      }
    }
  }
}

// Block (row, split, chunk of heads): one part of the row's softmax.
template <typename T, int kHeads, int kPack, class Rows>
__global__ void __launch_bounds__(AttendTraits::kThreads)
    cache_values_kernel(const AttendParams<T> params, const Rows values, int layer, int lanes) {
  using Traits = AttendTraits;
  __shared__ ValuesShared<kHeads, kPack> shared;
  const WalkRow walk = walk_row(params, blockIdx.x);
  if (!counts(walk.query) || walk.query.top < layer) {
    return;
  }
  const int num = num_candidates(params.layout, walk.query, params.options.top_k, layer);
  const int first = static_cast<int>(blockIdx.y) * kSplit;
  if (!merges(layer, num, params.options.top_k) || first >= num) {
    return;
  }
  const int first_head = static_cast<int>(blockIdx.z) * kHeads;
  const int num_heads = min(kHeads, params.group - first_head);
  const int64_t capacity = most_candidates(params.layout, params.options);
  const float* scores = params.chunk.scores + walk.at * capacity * params.group + first_head;
  for (int i = threadIdx.x; i < kSplit / 32; i += Traits::kThreads) {
    shared.selected[i] = 0;
  }
  __syncthreads();
  if (layer > 0) {
    mark_selected(params, walk, layer, num, first, shared.selected);
  }
  __syncthreads();
  float maximum[kHeads];
  stage_rows(params, walk, values, layer, num, first, scores, num_heads, maximum, shared);
  float sums[kHeads] = {};
  make_weights(maximum, sums, shared);
  const int64_t part =
      ((walk.at * params.layout.num_layers + layer) * gridDim.y + blockIdx.y) * params.group + first_head;
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    __syncthreads();
    const float sum =
        device::block_reduce<Traits::kThreads, device::Sum>(sums[head], shared.reduced[head % 2]);
    if (threadIdx.x == 0 && head < num_heads) {
      params.chunk.part_max[part + head] = maximum[head];
      params.chunk.part_sum[part + head] = sum;
    }
  }
  const int team = threadIdx.x / lanes, teams = Traits::kThreads / lanes;
  const int end = min(kSplit, num - first);
  for (int first_column = 0; first_column < params.value_dim; first_column += lanes * kPack) {
    const int column = first_column + threadIdx.x % lanes * kPack;
    float columns[kHeads][kPack] = {};
#pragma unroll 2
    for (int i = team; i < end && column < params.value_dim; i += teams) {
      const int64_t row = shared.rows[i];
      if (row < 0) {
        continue;
      }
      const auto stored = values.at(row).template load<kPack>(column);
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        const float weight = shared.weights[i][head];
        if (weight == -1.0f) {
          continue;
        }
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
          columns[head][e] = fmaf(weight, device::to_acc(stored[e]), columns[head][e]);
        }
      }
    }
    store_columns(columns, params.chunk.part_out + part * params.value_dim, params.value_dim, num_heads,
                  first_column, lanes, shared);
  }
}

// ---- launches

template <typename T, int kHeads, int kPack>
cudaError_t launch_layers(const AttendParams<T>& params, cudaStream_t stream) {
  using Traits = AttendTraits;
  const int64_t capacity = most_candidates(params.layout, params.options);
  const auto rows = static_cast<unsigned>(params.chunk.num * params.layout.num_kv_heads);
  // Where the rows alone are too few, as many blocks as fill a large GPU a few times.
  constexpr int64_t kEnoughBlocks = 2048;
  const int64_t tiles = ceil_div(capacity, int64_t{Traits::kTile} * Traits::kWarps);
  const dim3 score_grid(rows, static_cast<unsigned>(std::clamp<int64_t>(kEnoughBlocks / rows, 1,
                                                                        std::min<int64_t>(tiles, 65535))));
  const LaunchShape score_shape{
      .grid = score_grid, .threads = Traits::kThreads, .shared_bytes = int64_t{4} * kHeads * params.key_dim};
  const int splits = num_splits(capacity);
  const dim3 value_grid(rows, static_cast<unsigned>(splits),
                        static_cast<unsigned>(ceil_div(params.group, kHeads)));
  int lanes = 1;
  while (lanes * kPack < params.value_dim && lanes < Traits::kMaxLanes) {
    lanes *= 2;
  }
  const int64_t key_bytes = params.chunk.keys == nullptr ? 4 * capacity : 0;
  const LaunchShape select_shape{.grid = rows,
                                 .threads = tree_attention::SelectTraits::kThreads,
                                 .shared_bytes = 4 * int64_t{params.group} + key_bytes};
  const LaunchShape value_shape{.grid = value_grid, .threads = Traits::kThreads};
  // The two kernels of a layer that read rows, on rows that are found in one way or the other.
  const auto launch_scores = [&](const auto& keys, int layer) {
    using Rows = std::decay_t<decltype(keys)>;
    return launch_kernel(cache_scores_kernel<T, kHeads, kPack, Rows>, score_shape, stream, params, keys,
                         layer);
  };
  const auto launch_values = [&](const auto& values, int layer) {
    using Rows = std::decay_t<decltype(values)>;
    return launch_kernel(cache_values_kernel<T, kHeads, kPack, Rows>, value_shape, stream, params, values,
                         layer, lanes);
  };
  const StoredRows<T> keys{params.keys, params.layout.key_rows(), params.key_dim};
  const StoredRows<T> values{params.values, params.layout.value_rows(), params.value_dim};
  const LeafPools& leaves = params.leaves;
  const int last = leaves.bits > 0 ? 1 : 0;  // the last layer whose rows are in the pools
  for (int layer = static_cast<int>(params.layout.num_layers) - 1; layer >= last; --layer) {
    cudaError_t error = launch_scores(keys, layer);
    if (error == cudaSuccess && layer > 0 && params.layout.span > 0) {
      error = launch_kernel(cache_span_kernel<T, kHeads, kPack>, score_shape, stream, params, layer);
    }
    if (error == cudaSuccess && layer > 0 && !params.options.lists_given) {
      error = launch_kernel(cache_select_kernel<T, kHeads>, select_shape, stream, params, layer);
    }
    if (error == cudaSuccess) {
      error = launch_values(values, layer);
    }
    if (error != cudaSuccess) {
      return error;
    }
  }
  if constexpr (kPack > 1) {
    if (leaves.bits > 0) {
      const int64_t tokens = params.layout.page_size;
      const cudaError_t error = launch_scores(PackedRows<T>{leaves.keys, tokens, leaves.bits}, 0);
      return error != cudaSuccess ? error
                                  : launch_values(PackedRows<T>{leaves.values, tokens, leaves.bits}, 0);
    }
  }
  return leaves.bits > 0 ? cudaErrorInvalidValue : cudaSuccess;
}

template <typename T>
cudaError_t launch_attend(const AttendParams<T>& params, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(params.chunk.num * params.layout.num_kv_heads);
  cudaError_t error = params.options.lists_given ? cudaSuccess : launch_top_lists(params, stream);
  if (error != cudaSuccess) {
    return error;
  }
  constexpr int kWide = device::kPackOf<T>;
  const bool wide = params.key_dim / 2 % kWide == 0 && params.value_dim % kWide == 0 &&
                    reinterpret_cast<uintptr_t>(params.keys) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(params.values) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(params.options.cos) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(params.options.sin) % 16 == 0;
  if (params.group == 1) {
    error = wide ? launch_layers<T, 1, kWide>(params, stream) : launch_layers<T, 1, 1>(params, stream);
  } else if (params.group <= 4) {
    error = wide ? launch_layers<T, 4, kWide>(params, stream) : launch_layers<T, 4, 1>(params, stream);
  } else {
    error = wide ? launch_layers<T, 8, kWide>(params, stream) : launch_layers<T, 8, 1>(params, stream);
  }
  if (error != cudaSuccess) {
    return error;
  }
  error = launch_merge(params, /*pdl=*/false, stream);
  return error != cudaSuccess || params.options.lists_given ? error : launch_store_ring(params, stream);
}

}  // namespace htree::tree_cache
