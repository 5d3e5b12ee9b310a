#include "ops/sparse_attention/cuda/layer_gradients.h"

#include <algorithm>

namespace htree::tree_attention {
namespace {

// The lists of one launch, counted over all heads from `first` on: as many as have partial sums that fit
// `slots`; `most` is how many each of them may need. Where there are no lists (at the top), later queries
// need more. A list keeps one SM busy for each of its tasks, so if possible a launch has a multiple of `wave`
// lists, which run at the same time.
struct ListRun {
  int64_t lists, most;
};
ListRun next_lists(const PerListGradientParams& b, int64_t first, int64_t num_lists, int64_t slots,
                   int64_t wave) {
  const GatherParams& p = b.gather;
  const int64_t row = first % p.num_lists, left = num_lists - first;
  const auto needed = [&](int64_t lists) {
    if (p.lists) {
      return b.run.slots;  // a caller's list may hold more than its queries can see
    }
    const int64_t last_row = std::min(row + lists, int64_t{p.num_lists}) - 1;
    return (p.t0 - b.lead + last_row * p.stride) / p.node_span / kTensorCoreRate + 1;
  };
  int64_t low = 1, high = left;  // at least one list
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (middle * needed(middle) <= slots) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t lists = low < left && low > wave ? low / wave * wave : low;
  return {lists, needed(lists)};
}

}  // namespace

void run_per_list_gradients(const TensorCoreShape& shape, const PerListRuns& layer, cudaStream_t stream) {
  PartialSumParams sums = layer.sums;
  PerListGradientParams& b = sums.tasks;
  const GatherParams& p = b.gather;
  const bool keys_wanted = sums.keys || sums.values;
  const int64_t num_lists = int64_t{p.num_batches} * p.num_kv_heads * p.num_lists;
  const int64_t slots =
      layer.partial_bytes / (layer.tasks * partial_sum_bytes(shape.key_dim, shape.value_dim));
  const int64_t wave = std::max<int64_t>(1, layer.num_sms / layer.tasks);
  const PerListGradientParams all = b;
  b.run.partials = keys_wanted ? layer.partials : nullptr;
  for (int64_t first = 0; first < num_lists;) {
    const ListRun run = keys_wanted ? next_lists(all, first, num_lists, slots, wave) : ListRun{num_lists, 1};
    b.run.slots = run.most;
    b.run.first_task = first * layer.tasks;
    b.run.num_tasks = run.lists * layer.tasks;
    first += run.lists;
    launch_of_shape(shape, [&](auto type, auto dim) {
      return launch_per_list_gradient<typename decltype(type)::type, dim.value>(b, stream);
    });
    if (keys_wanted) {
      launch_of_shape(shape, [&](auto type, auto dim) {
        return launch_partial_sums<typename decltype(type)::type, dim.value>(sums, stream);
      });
    }
  }
}

void run_query_gradient(const TensorCoreShape& shape, const GradientKernels& kernels,
                        const QueryGradientParams& params, const __half2* rotations, cudaStream_t stream) {
  launch_of_shape(shape, [&](auto type, auto dim) {
    using T = typename decltype(type)::type;
    return kernels.shared_gather_queries
               ? launch_shared_gather_gradient<T, dim.value>({params, rotations}, stream)
               : launch_query_gradient<T, dim.value>(params, stream);
  });
}

void run_key_gradient(const TensorCoreShape& shape, const GradientKernels& kernels, KeyGradientParams params,
                      cudaStream_t stream) {
  const GatherParams& p = params.common.gather;
  if (!kernels.parent_warps) {
    return launch_of_shape(shape, [&](auto type, auto dim) {
      return launch_key_gradient<typename decltype(type)::type, dim.value>(params, stream);
    });
  }
  const int64_t list_bytes = int64_t{p.stride} * p.group * 2 * (shape.key_dim + shape.value_dim);
  const int64_t window = std::max<int64_t>(1, kParentWindowBytes / list_bytes);
  for (int64_t first = 0; first < p.num_lists; first += window) {
    params.first_list = static_cast<uint32_t>(first);
    params.end_list = static_cast<uint32_t>(std::min<int64_t>(first + window, p.num_lists));
    launch_of_shape(shape, [&](auto type, auto dim) {
      return launch_parent_gradient<typename decltype(type)::type, dim.value>(params, stream);
    });
    params.add = true;
  }
}

void run_masked_gradients(const TensorCoreShape& shape, const MaskedGradientParams& params,
                          cudaStream_t stream) {
  const bool keys_wanted = params.keys || params.values;
  C10_CUDA_CHECK(launch_tile_marks(params.gather, params.marks, stream));
  if (keys_wanted) {
    C10_CUDA_CHECK(launch_inverted_tiles(params.gather, params.marks, params.inverted, stream));
  }
  launch_of_shape(shape, [&](auto type, auto dim) {
    using T = typename decltype(type)::type;
    C10_CUDA_CHECK((launch_masked_row_tiles<T, dim.value>(params, stream)));
    if (params.query_gradient) {
      C10_CUDA_CHECK((launch_masked_query_gradient<T, dim.value>(params, stream)));
    }
    return keys_wanted ? launch_masked_key_gradient<T, dim.value>(params, stream) : cudaSuccess;
  });
}

}  // namespace htree::tree_attention
