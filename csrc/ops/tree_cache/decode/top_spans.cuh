// Span scores of the layer where a leader first has to choose, on all multiprocessors. All nodes above are opened, so the
// candidates are nodes 0, 1, 2 and so on, known before the walk. A row's cluster has at most sixteen blocks, while here
// as many blocks share a row as fill the device.
#pragma once

#include "ops/tree_cache/decode/spans.cuh"

namespace htree::tree_cache {

constexpr int kTopSpanWarps = 4;

// Blocks of a row and K/V head, fastest; then rows and heads. `blocks` is their number.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, kTopSpanBlocks)
    top_spans_kernel(const __grid_constant__ AttendParams<typename Tr::T> attend, int blocks) {
#if HTREE_SM90A
  __shared__ __align__(16) uint32_t queries[Tr::kHeads * Tr::kDim];
  const WalkRow walk = find_row<Tr>(attend, blockIdx.x / blocks);
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
  const SpanSlots<Tr> all = {
      .attend = attend,
      .walk = walk,
      .queries = queries,
      .scores = attend.chunk.span_scores + walk.at * int64_t{top_k} * kDecodeRate * Tr::kHeads,
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
cudaError_t launch_top_spans(const AttendParams<T>& attend, const DecodePlan& plan, cudaStream_t stream) {
  using Tr = DecodeTraits<T, kDim, 1, true, kTopSpanWarps>;
  const int64_t rows = attend.chunk.num * attend.layout.num_kv_heads;
  return launch_kernel(top_spans_kernel<Tr>,
                       {.grid = static_cast<unsigned>(rows * plan.top_span_blocks), .threads = Tr::kThreads},
                       stream, attend, plan.top_span_blocks);
}

// Brings the block's own of these scores to its shared memory. A __syncthreads has to follow.
template <class Tr>
__device__ __forceinline__ void load_top_spans(const DecodeBlock<Tr>& block, const LayerSlots& slots) {
  constexpr int kSlotFloats = kDecodeRate * Tr::kHeads;
  const auto& attend = block.attend();
  const int64_t at = block.walk.at * int64_t{block.top_k()} + slots.first;
  const auto* from = reinterpret_cast<const float4*>(attend.chunk.span_scores + at * kSlotFloats);
  auto* to = reinterpret_cast<float4*>(block.span_scores());
  const int packs = slots.own(block.params.plan.shares) * kSlotFloats / 4;
  for (int i = threadIdx.x; i < packs; i += Tr::kThreads) {
    to[i] = from[i];
  }
}

}  // namespace htree::tree_cache
