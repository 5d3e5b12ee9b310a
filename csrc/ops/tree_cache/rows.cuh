// What comes before and after the walk. Before: what each row is, and the lists at its top. After: the merge
// of all parts of its softmax, and the ring that keeps lists for later calls.
#pragma once

#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "device/sm90/pdl.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_cache/walk.cuh"

namespace htree::tree_cache {

constexpr int kRowThreads = 128;

// The queries of a sequence: rows [first, first + count) of the call, which are its last tokens.
struct QuerySpan {
  int64_t first;
  int64_t count;
  int64_t length;

  __device__ __forceinline__ int64_t first_token() const { return length - count; }  // may be negative
  __device__ __forceinline__ int64_t begin() const { return first_token() > 0 ? first_token() : 0; }
};

__device__ __forceinline__ QuerySpan query_span(const CacheSequences& sequences, int sequence) {
  const int64_t first = sequences.cu_q[sequence];
  int64_t count = sequences.cu_q[sequence + 1] - first;
  if (sequences.q_lengths != nullptr) {
    count = min(count, static_cast<int64_t>(sequences.q_lengths[sequence]));
  }
  return {first, count > 0 ? count : 0, sequences.lengths[sequence]};
}

// What a row of the call is, if it is one of `sequence`.
template <typename T>
__device__ __forceinline__ QueryRow describe_row(const AttendParams<T>& params, int64_t row, int sequence) {
  const CacheSequences& sequences = params.sequences;
  QueryRow found;
  found.sequence = sequence;
  const QuerySpan span = query_span(sequences, sequence);
  const int64_t token = span.first_token() + row - span.first;
  if (row < span.first || row >= span.first + span.count || token < 0) {
    return found;
  }
  found.token = static_cast<int32_t>(token);
  const int stride = params.options.stride;
  const int64_t leader = token - token % stride;
  if (span.length > params.layout.capacity() || span.length < 0) {
    found.leader = kNoLists;
  } else if (leader >= span.begin() && row >= token - leader) {
    found.leader = static_cast<int32_t>(row - (token - leader));
  } else {
    found.leader = kNoLists;
    if (sequences.ring > 0 && sequences.lists != nullptr) {
      const int64_t slot = leader / stride % sequences.ring;
      if (sequences.list_pos[static_cast<int64_t>(sequence) * sequences.ring + slot] == leader) {
        found.leader = kFromRing + static_cast<int32_t>(slot);
      }
    }
  }
  // The rows of a stride walk one tree, that of their leader.
  int64_t bound = params.options.max_top_nodes;
  while (leader + 1 > bound) {
    ++found.top;
    bound *= params.layout.rate;
  }
  return found;
}

// Row `at` of the chunk and its K/V heads. Every thread of a block of kThreads calls it.
template <int kThreads, typename T>
__device__ __forceinline__ WalkRow find_row(const AttendParams<T>& params, int64_t at) {
  const int64_t heads = params.layout.num_kv_heads;
  const CacheSequences& sequences = params.sequences;
  WalkRow walk;
  walk.at = at;
  walk.row = params.chunk.first + walk.at / heads;
  walk.head = static_cast<int>(walk.at % heads);
  int begun = 0;  // sequences that begin at or before the row
  for (int first = 0; first < sequences.num_sequences; first += kThreads) {
    const int sequence = first + static_cast<int>(threadIdx.x);
    begun += __syncthreads_count(sequence < sequences.num_sequences && sequences.cu_q[sequence] <= walk.row);
  }
  walk.query = describe_row(params, walk.row, max(begun - 1, 0));
  return walk;
}

// The same, by its description where rows have one.
template <int kThreads, typename T>
__device__ __forceinline__ WalkRow row_or_described(const AttendParams<T>& params, int64_t at) {
  return params.chunk.rows != nullptr ? walk_row(params, at) : find_row<kThreads>(params, at);
}

// One thread per query of the whole call.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(const AttendParams<T> params) {
  const CacheSequences& sequences = params.sequences;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (row >= params.chunk.total) {
    return;
  }
  int low = 0, high = sequences.num_sequences;  // the last sequence that begins at or before the row
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (sequences.cu_q[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  params.chunk.rows[row] = describe_row(params, row, low);
}

// Block (sequence, entry of the ring): decides which leader the entry holds after the call. Lists of earlier
// calls are copied here; store_ring_kernel writes those of the call's own leaders.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) start_ring_kernel(const AttendParams<T> params) {
  const CacheSequences& sequences = params.sequences;
  const int sequence = static_cast<int>(blockIdx.x / sequences.ring);
  const int slot = static_cast<int>(blockIdx.x % sequences.ring);
  const QuerySpan span = query_span(sequences, sequence);
  const int64_t stride = params.options.stride;
  int32_t kept = sequences.list_pos == nullptr ? -1 : sequences.list_pos[blockIdx.x];
  if (kept >= span.begin()) {
    kept = -1;
  }
  // The newest leader of the call that belongs in this entry.
  int64_t newest = (span.length - 1) / stride;
  newest -= ((newest - slot) % sequences.ring + sequences.ring) % sequences.ring;
  const bool own = span.length > 0 && span.length <= params.layout.capacity() && newest >= 0 &&
                   newest * stride >= span.begin();
  if (threadIdx.x == 0) {
    sequences.new_list_pos[blockIdx.x] = own ? static_cast<int32_t>(newest * stride) : kept;
  }
  const int64_t size = int64_t{params.layout.num_layers} * params.layout.num_kv_heads * params.options.top_k;
  const int64_t first = blockIdx.x * size;
  for (int64_t i = threadIdx.x; !own && i < size; i += kRowThreads) {
    sequences.new_lists[first + i] = sequences.lists == nullptr ? -1 : sequences.lists[first + i];
  }
}

__device__ __forceinline__ bool leads(const WalkRow& walk) {
  return walk.query.token >= 0 && walk.query.leader == walk.row;
}

// Block (query, kv head): writes a leader's lists from its top layer upwards, which open every node or say nothing.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) top_lists_kernel(const AttendParams<T> params) {
  const WalkRow walk = walk_row(params, blockIdx.x);
  if (!leads(walk)) {
    return;
  }
  const PageLayout& layout = params.layout;
  for (int layer = walk.query.top; layer < static_cast<int>(layout.num_layers); ++layer) {
    const int opened = static_cast<int>(walk.query.token / layout.tokens[layer] / layout.rate + 1);
    const int count = params.options.open_top ? 0 : opened;
    int32_t* list = own_list(params, walk, layer);
    for (int i = threadIdx.x; i < params.options.top_k; i += kRowThreads) {
      list[i] = i < count ? i : -1;
    }
  }
}

// Where the ring keeps the lists of a leader after the call, or -1.
template <typename T>
__device__ __forceinline__ int64_t ring_entry(const AttendParams<T>& params, const WalkRow& walk) {
  const CacheSequences& sequences = params.sequences;
  if (sequences.ring == 0) {
    return -1;
  }
  const int64_t entry = static_cast<int64_t>(walk.query.sequence) * sequences.ring +
                        walk.query.token / params.options.stride % sequences.ring;
  return sequences.new_list_pos[entry] == walk.query.token ? entry : -1;
}

// Block (query, kv head): copies a leader's lists to the ring, if the ring keeps them.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) store_ring_kernel(const AttendParams<T> params) {
  const WalkRow walk = walk_row(params, blockIdx.x);
  if (!leads(walk)) {
    return;
  }
  const CacheSequences& sequences = params.sequences;
  const int64_t entry = ring_entry(params, walk);
  if (entry < 0) {
    return;
  }
  const int64_t heads = params.layout.num_kv_heads, layers = params.layout.num_layers;
  for (int layer = 0; layer < layers; ++layer) {
    const int32_t* from = own_list(params, walk, layer);
    int32_t* to = sequences.new_lists + ((entry * layers + layer) * heads + walk.head) * params.options.top_k;
    for (int i = threadIdx.x; i < params.options.top_k; i += kRowThreads) {
      to[i] = from[i];
    }
  }
}

template <typename T>
cudaError_t launch_top_lists(const AttendParams<T>& params, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(params.chunk.num * params.layout.num_kv_heads);
  return launch_kernel(top_lists_kernel<T>, {.grid = rows, .threads = kRowThreads}, stream, params);
}

template <typename T>
cudaError_t launch_store_ring(const AttendParams<T>& params, cudaStream_t stream) {
  if (params.sequences.ring == 0) {
    return cudaSuccess;
  }
  const auto rows = static_cast<unsigned>(params.chunk.num * params.layout.num_kv_heads);
  return launch_kernel(store_ring_kernel<T>, {.grid = rows, .threads = kRowThreads}, stream, params);
}

// The parts of the softmax of a row, from the top layer down and in the order of the candidates.
struct RowParts {
  const PageLayout& layout;
  const QueryRow& query;
  int top_k, splits;

  __device__ __forceinline__ int of_layer(int layer) const {
    const int num = num_candidates(layout, query, top_k, layer);
    return merges(layer, num, top_k) ? (num + kSplit - 1) / kSplit : 0;
  }
  __device__ __forceinline__ int count() const {
    int sum = 0;
    for (int layer = query.top; layer >= 0; --layer) {
      sum += of_layer(layer);
    }
    return sum;
  }
  // Layer and split of part i as one number: layer * splits + split.
  __device__ __forceinline__ int64_t place(int i) const {
    int layer = query.top;
    for (int here; layer > 0 && i >= (here = of_layer(layer)); --layer) {
      i -= here;
    }
    return int64_t{layer} * splits + i;
  }
};

// A part as the threads of a block read it.
struct MergedPart {
  int64_t at;  // in part_max
  float sum, weight;
  bool empty;  // its sum is 0: no candidate counts, and its values may be anything
};

// Block (query, kv head; query head of the group): merges all parts of the softmax in their order. What is read before the
// wait was there before the kernel that it waits for, or before the one that chose, which begins after all that came
// before it.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) merge_parts_kernel(const AttendParams<T> params, int splits) {
  __shared__ MergedPart parts[kRowThreads];
  __shared__ float scratch[kRowThreads / device::kWarpSize];
  const WalkRow walk = row_or_described<kRowThreads>(params, blockIdx.x);
  const int64_t group = params.group, value_dim = params.value_dim;
  const int64_t head = walk.head * group + blockIdx.y;
  const int64_t out_row = walk.row * params.layout.num_kv_heads * group + head;
  T* out = params.out + out_row * value_dim;
  if (!counts(walk.query)) {
    device::pdl_wait();
    const float nothing = walk.query.token >= 0 ? nanf("") : 0.0f;
    for (int64_t d = threadIdx.x; d < value_dim; d += kRowThreads) {
      out[d] = device::from_acc<T>(nothing);
    }
    if (threadIdx.x == 0) {
      params.lse[out_row] = walk.query.token >= 0 ? nothing : device::negative_infinity<float>();
    }
    return;
  }
  const RowParts row{params.layout, walk.query, params.options.top_k, splits};
  const int num = row.count();
  const int64_t first = walk.at * params.layout.num_layers * splits;
  const auto at = [&](int i) { return (first + row.place(i)) * group + blockIdx.y; };
  device::pdl_wait();
  float maximum = device::negative_infinity<float>();
  for (int i = threadIdx.x; i < num; i += kRowThreads) {
    const int64_t part = at(i);
    const float sum = params.chunk.part_sum[part], max = params.chunk.part_max[part];
    maximum = sum != 0.0f ? fmaxf(maximum, max) : maximum;
  }
  maximum = device::block_reduce<kRowThreads, device::Max>(maximum, scratch);
  const float base = maximum == device::negative_infinity<float>() ? 0.0f : maximum;
  for (int64_t column = 0; column < value_dim; column += kRowThreads) {
    const int64_t d = column + threadIdx.x;
    const float* values = params.chunk.part_out + min(d, value_dim - 1);
    float sum = 0.0f, total = 0.0f;
    for (int tile = 0; tile < num; tile += kRowThreads) {
      __syncthreads();
      if (const int i = tile + static_cast<int>(threadIdx.x); i < num) {
        const int64_t part = at(i);
        const float own = params.chunk.part_sum[part];
        const bool empty = own == 0.0f;
        parts[threadIdx.x] = {part, own, empty ? 0.0f : expf(params.chunk.part_max[part] - base), empty};
      }
      __syncthreads();
#pragma unroll 8
      for (int i = 0; i < min(kRowThreads, num - tile); ++i) {
        const MergedPart part = parts[i];
        const float value = values[part.at * value_dim];
        sum = part.empty ? sum : sum + part.sum * part.weight;
        total = part.empty ? total : total + value * part.weight;
      }
    }
    if (d < value_dim) {
      out[d] = device::from_acc<T>(total / sum);
    }
    if (d == 0) {
      params.lse[out_row] = maximum + logf(sum);
    }
  }
}

template <typename T>
cudaError_t launch_merge(const AttendParams<T>& params, bool pdl, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.chunk.num * params.layout.num_kv_heads),
                  static_cast<unsigned>(params.group));
  return launch_kernel(merge_parts_kernel<T>, {.grid = grid, .threads = kRowThreads, .pdl = pdl}, stream,
                       params, num_splits(most_candidates(params.layout, params.options)));
}

template <typename T>
cudaError_t launch_rows(const AttendParams<T>& params, cudaStream_t stream) {
  const unsigned ring_rows =
      static_cast<unsigned>(params.sequences.num_sequences) * static_cast<unsigned>(params.sequences.ring);
  if (ring_rows > 0) {
    const cudaError_t error =
        launch_kernel(start_ring_kernel<T>, {.grid = ring_rows, .threads = kRowThreads}, stream, params);
    if (error != cudaSuccess) {
      return error;
    }
  }
  if (params.chunk.total == 0 || params.chunk.rows == nullptr) {
    return cudaSuccess;
  }
  const auto blocks = static_cast<unsigned>(ceil_div(params.chunk.total, kRowThreads));
  return launch_kernel(rows_kernel<T>, {.grid = blocks, .threads = kRowThreads}, stream, params);
}

}  // namespace htree::tree_cache
