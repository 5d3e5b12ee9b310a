// Span scores of the layer where a leader first has to choose, on all multiprocessors. All nodes above are opened, so the
// candidates are nodes 0, 1, 2 and so on, known before the walk. A row's cluster has at most sixteen blocks, while here
// as many blocks share a row as fill the device.
#pragma once

#include "device/sm90/wgmma.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_cache/decode/sm90/spans.cuh"

namespace htree::tree_cache {

constexpr int kTopSpanWarps = 4;

// Blocks of a row and K/V head, fastest; then rows and heads. `blocks` is their number.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, kTopSpanBlocks)
    top_spans_kernel(const __grid_constant__ AttendParams<typename Tr::T> attend, int blocks) {
#if HTREE_SM90A
  __shared__ __align__(16) uint32_t queries[Tr::kHeads * Tr::kDim];
  const WalkRow walk = find_row<Tr::kThreads>(attend, blockIdx.x / blocks);
  if (!counts(walk.query) || !leads(walk)) {
    return;
  }
  const int top_k = attend.options.top_k;
  int layer = walk.query.top, num = num_candidates(attend.layout, walk.query, top_k, layer);
  while (!merges(layer, num, top_k)) {
    num = num_candidates(attend.layout, walk.query, top_k, --layer);
  }
  if (layer == 0) {
    return;  // nothing is chosen
  }
  stage_queries<Tr>(attend, walk, num - 1, queries);
  __syncthreads();
  const SpanSlots<Tr> all = {.attend = attend,
                             .walk = walk,
                             .queries = queries,
                             .scores = attend.chunk.span_scores +
                                       walk.at * int64_t{attend.options.parents} * kDecodeRate * Tr::kHeads,
                             .list = nullptr,
                             .first = 0,
                             .slots = (num + kDecodeRate - 1) / kDecodeRate,
                             .readable = num - 1,
                             .log2_per_node = log2_means(attend.layout, layer),
                             .lane = static_cast<int>(threadIdx.x % device::kWarpSize)};
  const int warp = static_cast<int>(blockIdx.x % blocks * Tr::kWarps + threadIdx.x / device::kWarpSize);
  all.template score<false>(warp, blocks * Tr::kWarps);
#endif
}

template <typename T, int kDim>
cudaError_t launch_top_spans(const AttendParams<T>& attend, int blocks, cudaStream_t stream) {
  using Tr = DecodeTraits<T, kDim, 1, true, kTopSpanWarps>;
  const int64_t rows = attend.chunk.num * attend.layout.num_kv_heads;
  return launch_kernel(top_spans_kernel<Tr>,
                       {.grid = static_cast<unsigned>(rows * blocks), .threads = Tr::kThreads}, stream,
                       attend, blocks);
}

}  // namespace htree::tree_cache
