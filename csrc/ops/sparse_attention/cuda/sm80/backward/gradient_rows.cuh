// Prepares the gradients of a chunk: records of its queries and dO, the numbers of its query heads (RowMeta),
// and the bounds of queries and of keys, which keep the gradients of scores in fp16's range.
#pragma once

#include <cfloat>

#include <cstdint>
#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/sm80/masked_lists.cuh"
#include "ops/tree/cuda/sm80/packed_layer.cuh"
#include "ops/tree/cuda/sm80/query_row.cuh"

namespace htree::tree_attention {

constexpr int kRowWarps = 8;
constexpr int kRowQueries = 32;  // per thread block

// The tiled record of a (query, kv head): the queries of up to `rows` heads and their dO as two tiles, then a RowMeta
// for each head. Heads past G are zeros of weight 0. A record that is not tiled holds G rows: K elements of the query, then
// V elements of dO.
template <int kDim>
struct TiledRecord {
  static constexpr int gradient_offset(int rows) { return rows * kDim * 2; }
  static constexpr int meta_offset(int rows) { return 2 * gradient_offset(rows); }
  static constexpr int bytes(int rows) { return static_cast<int>(tiled_record_bytes(rows, kDim, kDim)); }
  static_assert(bytes(1) == meta_offset(1) + static_cast<int>(sizeof(RowMeta)));

  // The place of a chunk of a row in its tile: that of chunk_offset(), without the places of the rows that are missing.
  static constexpr int chunk_at(int rows, int row, int chunk) {
    return chunk_offset<kDim>(row, chunk) - (kDim == 128 ? (chunk >> 3) * (kRecordRows - rows) * 128 : 0);
  }
};

// Finds the elements, of 2 bytes each, of a query's record. Where `kRotates`, it is not a paired one.
template <int kDim, bool kRotates>
class RecordRows {
 public:
  using Record = TiledRecord<kDim>;

  __device__ __forceinline__ RecordRows(const GradientParams& params, int64_t head_idx, int64_t query)
      : tiled_(params.tile_rows > 0), tile_rows_(kRotates ? kRecordRows : params.tile_rows) {
    const GatherParams& p = params.gather;
    const int64_t bytes = tiled_ ? Record::bytes(tile_rows_) : p.group * 4 * kDim;
    rows_ = reinterpret_cast<const __half*>(params.records + (head_idx * p.num_queries + query) * bytes);
  }
  __device__ __forceinline__ const __half* query(int head, int dim) const {
    return tiled_ ? tiled(0, head, dim) : rows_ + head * 2 * kDim + dim;
  }
  __device__ __forceinline__ const __half* gradient(int head, int dim) const {
    return tiled_ ? tiled(Record::gradient_offset(tile_rows_), head, dim) : query(head, kDim + dim);
  }

 private:
  __device__ __forceinline__ const __half* tiled(int offset, int head, int dim) const {
    return rows_ + (offset + Record::chunk_at(tile_rows_, head, dim / 8)) / 2 + dim % 8;
  }

  const __half* rows_;
  bool tiled_;
  int tile_rows_;
};

// Sum or maximum over kLanes neighbouring lanes. The whole warp calls.
template <int kLanes, typename Op>
__device__ __forceinline__ float over_lanes(float x, Op&& op) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    x = op(x, __shfl_xor_sync(device::kFullMask, x, offset));
  }
  return x;
}
template <int kLanes>
__device__ __forceinline__ float sum_over_lanes(float x) {
  return over_lanes<kLanes>(x, [](float a, float b) { return a + b; });
}
template <int kLanes>
__device__ __forceinline__ float max_over_lanes(float x) {
  return over_lanes<kLanes>(x, [](float a, float b) { return fmaxf(a, b); });
}

// The norm of a row's finite elements, at most the largest float. kLanes neighbouring lanes hold eight
// elements of the row each. Squares neither overflow nor vanish.
template <int kLanes>
__device__ __forceinline__ float row_norm(const float (&x)[8]) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    largest = fmaxf(largest, finite_magnitude(x[i]));
  }
  const PowerOfTwo power = half_range_scale(max_over_lanes<kLanes>(largest));
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scaled = finite_magnitude(x[i]) * power.scale;
    squares += scaled * scaled;
  }
  return fminf(sqrtf(sum_over_lanes<kLanes>(squares)) * power.inverse, FLT_MAX);
}

// Raises the bounds to the largest numbers of the block, with one atomic each; none is negative. Maxima do not depend on
// the order of arrival. The whole block calls.
__device__ __forceinline__ void raise_bounds(QueryBounds* bounds, float gradient_norm, float query_unscale,
                                             float delta) {
  __shared__ unsigned largest[3];
  if (threadIdx.x < 3) {
    largest[threadIdx.x] = 0;
  }
  __syncthreads();
  const float numbers[3] = {max_over_lanes<32>(gradient_norm), max_over_lanes<32>(query_unscale),
                            max_over_lanes<32>(delta)};
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      atomicMax(&largest[i], __float_as_uint(numbers[i]));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicMax(&bounds->gradient_norm, largest[0]);
    atomicMax(&bounds->query_unscale, largest[1]);
    atomicMax(&bounds->delta, largest[2]);
  }
}

template <typename T>
__device__ __forceinline__ uint4 load_row_chunk(const TensorView& view, int64_t batch, int64_t row,
                                                int64_t head, int dim) {
  const T* from =
      static_cast<const T*>(view.data) + batch * view.batch + row * view.row + head * view.head + dim;
  return load_eight(from, reinterpret_cast<uintptr_t>(from) % 16 == 0);
}

// Grid: x = runs of kRowQueries queries, y = batch * kv head. K/8 lanes share a row of the query and of dO.
template <typename T, int kDim>
__global__ void __launch_bounds__(kRowWarps * 32) gradient_rows_kernel(RowParams p) {
  constexpr int kLanes = kDim / 8, kPass = kRowWarps * 32 / kLanes;
  const int head_idx = blockIdx.y;
  const int batch = head_idx / p.num_kv_heads, kv_head = head_idx % p.num_kv_heads;
  const int first = blockIdx.x * kRowQueries;
  const int rows_per_query = p.tile_rows > 0 ? p.tile_rows : p.group;
  const int num_rows = min(kRowQueries, p.num_queries - first) * rows_per_query;
  const int chunk = threadIdx.x % kLanes;
  float largest_norm = 0.f, largest_unscale = 0.f, largest_delta = 0.f;
  for (int begin = 0; begin < num_rows; begin += kPass) {
    const int row = begin + threadIdx.x / kLanes;
    const int query = first + row / rows_per_query, row_head = row % rows_per_query;
    const bool masked = row < num_rows && p.gather.t0 + query < p.masked_end &&
                        is_masked_row(p.gather, batch, kv_head, query);
    const bool exists = row < num_rows && row_head < p.group && !masked;
    const int64_t head = int64_t{kv_head} * p.group + row_head;
    float x[8] = {}, g[8] = {}, o[8] = {};
    uint4 gradient = {};
    if (exists) {
      widen_eight<T>(load_row_chunk<T>(p.queries, batch, query, head, chunk * 8), x);
      gradient = load_row_chunk<T>(p.gradients, batch, query, head, chunk * 8);
      widen_eight<T>(gradient, g);
      widen_eight<T>(load_row_chunk<T>(p.outputs, batch, query, head, chunk * 8), o);
    }
    float largest = 0.f, delta = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      largest = fmaxf(largest, finite_magnitude(x[i]));
      delta += g[i] * o[i];
    }
    largest = max_over_lanes<kLanes>(largest);
    delta = sum_over_lanes<kLanes>(delta);
    const int64_t state = batch * p.states.batch + int64_t{query} * p.num_kv_heads * p.group + head;
    if (exists) {
      delta = row_delta(p.states, state, delta);
    }
    const float norm = row_norm<kLanes>(g);
    if (row >= num_rows || masked) {
      continue;
    }
    const PowerOfTwo power = half_range_scale(largest);
    const int64_t record_idx = int64_t{head_idx} * p.num_queries + query;
    RowMeta meta = {INFINITY, 0.f, 0.f, 0.f};
    if (exists) {
      meta = {p.states.max[state] * 1.442695040888963f + log2f(p.states.sum[state]), delta, power.inverse,
              norm};
      largest_norm = fmaxf(largest_norm, norm);
      largest_unscale = fmaxf(largest_unscale, largest > 0.f ? power.inverse : 0.f);
      largest_delta = fmaxf(largest_delta, finite_magnitude(delta));
      if (chunk == 0) {
        p.meta[record_idx * p.group + row_head] = meta;
      }
    }
    if (!p.records) {
      continue;
    }
    __half2 scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scaled[i] = __floats2half2_rn(x[2 * i] * power.scale, x[2 * i + 1] * power.scale);
    }
    if (p.tile_rows > 0) {
      using Record = TiledRecord<kDim>;
      char* record = p.records + record_idx * Record::bytes(rows_per_query);
      const int at = Record::chunk_at(rows_per_query, row_head, chunk);
      *reinterpret_cast<uint4*>(record + at) = *reinterpret_cast<const uint4*>(scaled);
      *reinterpret_cast<uint4*>(record + Record::gradient_offset(rows_per_query) + at) = gradient;
      if (chunk == 0) {
        *reinterpret_cast<float4*>(record + Record::meta_offset(rows_per_query) + row_head * 16) =
            make_float4(meta.log_sum, meta.delta, meta.unscale, meta.gradient_norm);
      }
    } else {
      uint4* record = reinterpret_cast<uint4*>(p.records + (record_idx * p.group + row_head) * 4 * kDim);
      record[chunk] = *reinterpret_cast<const uint4*>(scaled);
      record[kDim / 8 + chunk] = gradient;
    }
  }
  raise_bounds(&p.bounds[head_idx], largest_norm, largest_unscale, largest_delta);
}

__device__ __forceinline__ uint8_t exponent_field(float x) {
  return static_cast<uint8_t>(__float_as_uint(x) >> 23 & 0xff);
}

__device__ __forceinline__ KeyBound larger(KeyBound a, KeyBound b) {
  return {a.value < b.value ? b.value : a.value, a.unscale < b.unscale ? b.unscale : a.unscale};
}

// The bound that the lane `offset` lanes before this one holds. All lanes of a warp call.
__device__ __forceinline__ KeyBound bound_of_lane_before(KeyBound bound, int offset) {
  const unsigned bits = __shfl_up_sync(device::kFullMask, bound.value | bound.unscale << 8, offset);
  return {static_cast<uint8_t>(bits & 0xff), static_cast<uint8_t>(bits >> 8)};
}

// Nodes of a thread block. Each has kDim / 8 threads while its rows are read, and one for its bound.
constexpr int kBoundNodes = 256;

// Grid: x = runs of kBoundNodes nodes of the layer, y = batch * kv head.
template <typename T, int kDim>
__global__ void __launch_bounds__(kBoundNodes) key_bounds_kernel(PackParams p, LayerBounds bounds) {
  constexpr int kLanes = kDim / 8, kPass = kBoundNodes / kLanes;
  __shared__ KeyBound of_rows[kBoundNodes];
  const int64_t batch = blockIdx.y / p.num_kv_heads, head = blockIdx.y % p.num_kv_heads;
  const int64_t first = int64_t{blockIdx.x} * kBoundNodes;
  const int chunk = threadIdx.x % kLanes;
  for (int begin = 0; begin < kBoundNodes; begin += kPass) {
    const int row = begin + threadIdx.x / kLanes;
    const int64_t node = first + row;
    float x[8] = {}, v[8] = {};
    if (node < p.num_nodes) {
      widen_eight<T>(load_row_chunk<T>(p.keys, batch, node, head, chunk * 8), x);
      widen_eight<T>(load_row_chunk<T>(p.values, batch, node, head, chunk * 8), v);
    }
    float largest = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      largest = fmaxf(largest, finite_magnitude(x[j]));
    }
    largest = max_over_lanes<kLanes>(largest);
    const float norm = row_norm<kLanes>(v);
    if (chunk == 0) {
      of_rows[row] = {exponent_field(norm),
                      exponent_field(largest > 0.f ? key_row_scale(largest).inverse : 0.f)};
    }
  }
  __syncthreads();
  KeyBound bound = of_rows[threadIdx.x];
#pragma unroll
  for (int offset = 1; offset < kParentRows; offset *= 2) {
    const KeyBound before = bound_of_lane_before(bound, offset);
    bound = static_cast<int>(threadIdx.x) % kParentRows >= offset ? larger(bound, before) : bound;
  }
  const int64_t node = first + threadIdx.x;
  if (node >= p.num_parents * kParentRows) {
    return;
  }
  const int64_t at = int64_t{blockIdx.y} * p.num_parents * kParentRows + node;
  bounds.nodes[at] = bound;
  if (threadIdx.x % kParentRows == kParentRows - 1) {
    bounds.parents[at / kParentRows] = bound;
  }
}

// The power of two that keeps |dS| times what undoes a power of a key or query below 2^15, so that dS can be the fp16
// operand of a product. |dS| <= |dO| |V| + |delta|; the two fields are those of KeyBound.
__device__ __forceinline__ PowerOfTwo score_gradient_scale(float gradient_norm, float delta,
                                                           uint8_t value_field, uint8_t unscale_field) {
  // 2^above(field) is larger than any float with this exponent field.
  const auto above = [](uint8_t field) { return static_cast<int>(field) - 126; };
  const int product = above(exponent_field(gradient_norm)) + above(value_field);
  // Rows of zeros alone have the power 1, field 127: an infinite dS times their zeros would be NaN.
  const int unscale = unscale_field == 0 ? above(127) : above(unscale_field);
  const int bound = 1 + max(product, above(exponent_field(delta))) + unscale;
  const int shift = min(max(15 - bound, -126), 126);
  return {__uint_as_float(static_cast<uint32_t>(127 + shift) << 23),
          __uint_as_float(static_cast<uint32_t>(127 - shift) << 23)};
}

// The power of two of dS for the children of a parent of head blockIdx.y, with any query of the chunk.
__device__ __forceinline__ PowerOfTwo parent_power(const GradientParams& params, int64_t parent) {
  const KeyBound bound = params.parent_bounds[int64_t{blockIdx.y} * params.gather.num_parents + parent];
  const QueryBounds queries = params.query_bounds[blockIdx.y];
  return score_gradient_scale(__uint_as_float(queries.gradient_norm), __uint_as_float(queries.delta),
                              bound.value, exponent_field(__uint_as_float(queries.query_unscale)));
}

// The first entry in [begin, end) whose list is `list` or a later one; entries are those of InvertedListParams.
// The whole warp calls; every round of the search leaves a 32nd of the entries.
__device__ __forceinline__ uint32_t first_entry(const uint32_t* entries, uint32_t begin, uint32_t end,
                                                uint32_t list, uint32_t width) {
  const uint32_t lane = threadIdx.x % 32;
  while (begin < end) {
    const uint32_t step = (end - begin + 31) / 32;
    const uint32_t at = begin + lane * step;
    const unsigned reached = __ballot_sync(device::kFullMask, at >= end || entries[at] / width >= list);
    const uint32_t first = reached ? __ffs(reached) - 1 : 32;
    end = min(end, begin + first * step);
    begin = first == 0 ? end : begin + (first - 1) * step + 1;
  }
  return begin;
}

template <typename T, int kDim>
cudaError_t launch_gradient_rows(const RowParams& params, cudaStream_t stream) {
  const dim3 grid(num_blocks(params.num_queries, kRowQueries), params.num_batches * params.num_kv_heads);
  return launch_kernel(gradient_rows_kernel<T, kDim>, {.grid = grid, .threads = kRowWarps * 32}, stream,
                       params);
}

template <typename T, int kDim>
cudaError_t launch_key_bounds(const PackParams& pack, const LayerBounds& bounds, cudaStream_t stream) {
  const dim3 grid(num_blocks(pack.num_nodes, kBoundNodes),
                  static_cast<unsigned>(pack.num_batches * pack.num_kv_heads));
  return launch_kernel(key_bounds_kernel<T, kDim>, {.grid = grid, .threads = kBoundNodes}, stream, pack,
                       bounds);
}

}  // namespace htree::tree_attention
