// The launch of the selection kernel, the same for both policies.
#pragma once

#include "ops/tree_attention/plan/select_plan.h"
#include "ops/tree_attention/stages/select/select_topk.cuh"

namespace htree::tree_attention {

// Sort buffer and normalisers first: they are small and touched most.
inline SelectPlan select_plan(const SelectParams& params) {
  SelectPlan plan{};
  int64_t left = shared_limit();
  const auto place = [&](int64_t bytes) {
    const bool fits = round_up_16(bytes) <= left;
    left -= fits ? round_up_16(bytes) : 0;
    (fits ? plan.shared_bytes : plan.scratch_bytes) += round_up_16(bytes);
    return fits;
  };
  const int64_t most = std::min(params.top_k, params.capacity);
  plan.sort_size =
      params.order == SelectionOrder::kByKey ? power_of_two_above(std::max<int64_t>(most, 1)) : 0;
  plan.sorting_shared = place(plan.sort_size * 8);
  plan.normalizer_shared = place(params.group * 4);
  plan.keys_shared = place(params.capacity * 4);
  const int64_t rows = std::min<int64_t>(params.num_rows(), INT32_MAX);
  plan.num_blocks = plan.scratch_bytes == 0 ? rows : std::min(rows, kScratchBlocks);
  return plan;
}

template <typename Work, int kHeads>
void launch_select_for(const SelectParams& params, const SelectPlan& plan, cudaStream_t stream) {
  const auto kernel = select_topk_kernel<Work, kHeads>;
  allow_shared(kernel, plan.shared_bytes);
  kernel<<<static_cast<unsigned>(plan.num_blocks), SelectTraits::kThreads,
           static_cast<size_t>(plan.shared_bytes), stream>>>(params, plan);
}

template <typename Work>
void launch_select_as(const SelectParams& params, cudaStream_t stream) {
  if (params.num_rows() == 0 || params.top_k == 0) {
    return;
  }
  const SelectPlan plan = select_plan(params);
  if (params.group == 1) {
    launch_select_for<Work, 1>(params, plan, stream);
  } else if (params.group == 2) {
    launch_select_for<Work, 2>(params, plan, stream);
  } else if (params.group <= 4) {
    launch_select_for<Work, 4>(params, plan, stream);
  } else {
    launch_select_for<Work, SelectTraits::kMaxHeads>(params, plan, stream);
  }
}

}  // namespace htree::tree_attention
