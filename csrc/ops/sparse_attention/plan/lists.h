// Which kernels attend to lists on tensor cores, and in which of them their gradients are computed. Pure functions of a
// call, testable without a GPU. No CUDA and no torch.
#pragma once

#include "ops/tree/plan/tree_config.h"

namespace htree::tree_attention {

// How the tensor-core path computes the softmax over the gathered parents of a list.
enum class GatherKernel {
  kPerQuery,      // a warp per (query, kv head) gathers for itself: sm_80 and later
  kSharedGather,  // neighbouring queries share one gather: sm_90a
  kPerList,       // all queries of a list in products of warpgroups: sm_90a
};

// Which of them the caller wants: the fastest one that the GPU has; that one, but with a gather for the rows that would
// multiply masked tiles; or the one that every GPU has.
enum class GatherChoice { kAuto, kGathered, kPerQuery };

// From this stride on the per-list kernels run. Their time hardly depends on how many of a block's rows are
// used, so they need lists of several queries. For smaller strides the shared-gather kernels were faster than
// the per-query ones at every length tried on an H200 (4096 ... 524288). The length must not matter here:
// what a query computes must not depend on how many others are in the call.
constexpr int64_t kMinPerListStride = 4;

inline GatherKernel choose_gather(const AttentionProblem& p, const DeviceFacts& device, GatherChoice choice) {
  if (!hopper_kernels(device) || choice == GatherChoice::kPerQuery) {
    return GatherKernel::kPerQuery;
  }
  return p.args.selection_stride >= kMinPerListStride ? GatherKernel::kPerList : GatherKernel::kSharedGather;
}

// ---- gradients

// A thread block of the per-list kernels multiplies kGradientRows rows (query, head), used or not. For lists
// of fewer rows than this the per-query kernels do less work.
constexpr int64_t kMinPerListGradientRows = 32;
// The same where parent_gradient.cuh takes the keys: with 4 queries of 8 heads a list, the tokens of 131 072 tokens took 115
// ms per list (k = 128, H = 32, H_kv = 4, D = 128), and 94 per query.
constexpr int64_t kMinPerListParentRows = 64;
// G for which parent_gradient.cuh computes dK and dV. Below, kernels that fill a tile with the rows of
// several queries do less work; above, it would need two tiles.
constexpr int64_t kMinParentGroup = 4, kMaxParentGroup = 8;
// The most query heads whose gradients fit the registers of a warp of backward/shared_gather/.
constexpr int64_t kMaxSharedGatherGroup = 8;

// Which kernels compute the gradients of a layer that is gathered.
struct GradientKernels {
  bool per_list = false;               // backward/per_list/ computes all of them
  bool shared_gather_queries = false;  // dQ: backward/shared_gather/, else per_query/
  bool parent_warps = false;           // dK and dV: parent_gradient.cuh, else key_gradient.cuh
};
inline GradientKernels choose_gradients(const AttentionProblem& p, const DeviceFacts& device,
                                        GatherChoice choice) {
  const int64_t group = p.group();
  const bool parent_warps = group >= kMinParentGroup && group <= kMaxParentGroup;
  GradientKernels kernels;
  kernels.per_list =
      choose_gather(p, device, choice) == GatherKernel::kPerList &&
      p.args.selection_stride * group >= (parent_warps ? kMinPerListParentRows : kMinPerListGradientRows);
  kernels.shared_gather_queries = choice != GatherChoice::kPerQuery && hopper_kernels(device) &&
                                  !kernels.per_list && group <= kMaxSharedGatherGroup;
  kernels.parent_warps = !kernels.per_list && parent_warps;
  return kernels;
}

// The rows of a record for parent_gradient.cuh, even if the group has fewer heads; 0 where its kernel does not run. Of
// kPairedGroup rows two queries share a tile. Rows that are rotated would need the factors of two positions.
inline int tiled_record_rows(const AttentionProblem& p, const GradientKernels& kernels) {
  return !kernels.parent_warps ? 0 : p.group() == kPairedGroup && !p.args.rotate ? kPairedGroup : kRecordRows;
}

// The bytes of the record of a query, with all heads that share a K/V head, see gradient_rows.cuh.
inline int64_t gradient_record_bytes(const AttentionProblem& p, const GradientKernels& kernels) {
  const int tile_rows = tiled_record_rows(p, kernels);
  return kernels.per_list ? 0
         : tile_rows > 0  ? tiled_record_bytes(tile_rows, p.key_dim, p.value_dim)
                          : p.group() * 2 * (p.key_dim + p.value_dim);
}

// The structs of gradients.h, by their sizes.
struct RowMeta;
struct KeyBound;
struct TaskPowers;
struct QueryBounds;
constexpr int64_t kRowMetaBytes = 16, kKeyBoundBytes = 2, kTaskPowersBytes = 8, kQueryBoundsBytes = 12;

}  // namespace htree::tree_attention
