// Merges the state of a layer into the running one: docs/semantics/tree_attention.md §1.7. No torch.
#include "ops/sparse_attention/cuda/any/merge.cuh"

namespace htree::tree_attention {
namespace {

// A warp has one head of one row. All lanes read the old state before lane 0 writes the new one.
__global__ void __launch_bounds__(kElementThreads)
    merge_to_global_kernel(const MergeParams params, int64_t num_states) {
  constexpr int kWarps = kElementThreads / device::kWarpSize;
  const int lane = threadIdx.x % device::kWarpSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t state = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / device::kWarpSize;
       state < num_states; state += step) {
    const RowIndex row = row_index(state, params.num_rows, params.num_heads);
    float* global_max = params.global.max + state_offset(params.global.max_strides, row);
    float* global_sum = params.global.sum + state_offset(params.global.sum_strides, row);
    const float old_max = *global_max;
    const float old_sum = *global_sum;
    const float layer_max = params.layer.max[state_offset(params.layer.max_strides, row)];
    const float layer_sum = params.layer.sum[state_offset(params.layer.sum_strides, row)];
    const float new_max = device::MaxNan{}(old_max, layer_max);
    const float keep = rebase_factor(old_max, new_max, old_sum);
    const float add = rebase_factor(layer_max, new_max, layer_sum);
    __syncwarp();
    if (lane == 0) {
      *global_max = new_max;
      *global_sum = old_sum * keep + layer_sum * add;
    }
    float* out = params.global.out + state_offset(params.global.out_strides, row);
    const float* layer_out = params.layer.out + state_offset(params.layer.out_strides, row);
    for (int64_t column = lane; column < params.value_dim; column += device::kWarpSize) {
      float& value = out[column * params.global.out_strides[3]];
      value = value * keep + layer_out[column * params.layer.out_strides[3]] * add;
    }
  }
}

}  // namespace

cudaError_t launch_merge_to_global(const MergeParams& params, cudaStream_t stream) {
  const int64_t states = params.num_batches * params.num_rows * params.num_heads;
  if (states == 0) {
    return cudaSuccess;
  }
  return launch_kernel(merge_to_global_kernel,
                       {.grid = blocks_for(states * device::kWarpSize), .threads = kElementThreads}, stream,
                       params, states);
}

}  // namespace htree::tree_attention
