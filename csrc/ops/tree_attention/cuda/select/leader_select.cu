// The selection kernels: as few keys per thread as the longest row of a launch needs. No torch.
#include "ops/tree_attention/cuda/select/leader_select.h"

#include <algorithm>

#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/cuda/select/leader_select.cuh"

namespace htree::tree_attention {
namespace {

// kBlocks: blocks of an SM that the registers are cut for.
template <RowSource kSource, int kKeys, int kBlocks>
cudaError_t launch(const LeaderSelectParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const dim3 grid(static_cast<unsigned>(int64_t{p.num_lists} * p.num_kv_heads), p.num_batches);
  return launch_kernel(leader_select_kernel<kSource, kKeys, kBlocks>,
                       {.grid = grid, .threads = kSelectThreads}, stream, params);
}

template <RowSource kSource>
cudaError_t launch_longest(const LeaderSelectParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const int64_t last_slots = (p.t0 + int64_t{p.num_lists - 1} * p.stride) / p.node_span / kParentRows + 1;
  const int64_t longest = std::min<int64_t>(last_slots, p.list_width) * kParentRows;
  constexpr bool kScores = kSource != RowSource::kImportances;
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
  if (!params.sums) {
    return launch_longest<RowSource::kImportances>(params, stream);
  }
  return params.gather.group == 8 ? launch_longest<RowSource::kScoresOfEight>(params, stream)
                                  : launch_longest<RowSource::kScores>(params, stream);
}

}  // namespace htree::tree_attention
