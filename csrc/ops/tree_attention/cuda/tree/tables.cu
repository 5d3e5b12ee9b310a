// Launchers of attention_launch.h: run-time shape to compiled instance, and the kernels without one. No
// torch.
#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/cuda/forward/per_query/tensor_core_instances.cuh"

namespace htree::tree_attention {

HTREE_EACH_TENSOR_CORE_SHAPE(HTREE_TREE_ATTENTION_INSTANCES)

namespace {

constexpr int kTableThreads = 256;

__global__ void rope_table_kernel(float2* table, int64_t size, int half, double log_base, bool rotate) {
  const int64_t i = int64_t{blockIdx.x} * kTableThreads + threadIdx.x;
  if (i >= size * half) {
    return;
  }
  const double angle =
      rotate ? static_cast<double>(i / half) * exp(-log_base * static_cast<double>(i % half) / half) : 0.0;
  table[i] = make_float2(static_cast<float>(cos(angle)), static_cast<float>(sin(angle)));
}

// One thread per pair of dims of a slot.
__global__ void turn_table_kernel(__half2* table, int64_t num_slots, int key_dim, TurnOrder order,
                                  double log_base, bool rotate) {
  const int64_t i = int64_t{blockIdx.x} * kTableThreads + threadIdx.x;
  const int row_pairs = key_dim / 4, lane_pairs = key_dim / 16;
  if (i >= num_slots * row_pairs) {
    return;
  }
  const int64_t slot = i / row_pairs;
  const int pair = static_cast<int>(i % row_pairs);
  const double position = static_cast<double>(slot * kBlockRows);
  float cos_of[2], sin_of[2];
  for (int e = 0; e < 2; ++e) {
    const int dim = order == TurnOrder::kDims ? 2 * pair + e
                                              : fragment_dim(2 * (pair % lane_pairs) + e, pair / lane_pairs);
    const double angle = rotate ? position * exp(-log_base * dim / (key_dim / 2)) : 0.0;
    cos_of[e] = static_cast<float>(cos(angle));
    sin_of[e] = static_cast<float>(sin(angle));
  }
  __half2* at = table + slot * 2 * row_pairs + pair;
  at[0] = __floats2half2_rn(cos_of[0], cos_of[1]);
  at[row_pairs] = __floats2half2_rn(sin_of[0], sin_of[1]);
}

__global__ void top_lists_kernel(int32_t* lists, int64_t total, int64_t num_lists, int64_t num_kv_heads,
                                 int64_t width, int64_t t0, int64_t stride, int64_t parent_span) {
  const int64_t i = int64_t{blockIdx.x} * kTableThreads + threadIdx.x;
  if (i >= total) {
    return;
  }
  const int64_t slot = i % width;
  const int64_t list_row = i / width / num_kv_heads % num_lists;
  const int64_t last = (t0 + list_row * stride) / parent_span;
  lists[i] = slot <= last ? static_cast<int32_t>(slot) : -1;
}

}  // namespace

void launch_rope_table(float2* table, int64_t size, int key_dim, double base, bool rotate,
                       cudaStream_t stream) {
  const int half = key_dim / 2;
  rope_table_kernel<<<num_blocks(size * half, kTableThreads), kTableThreads, 0, stream>>>(table, size, half,
                                                                                          log(base), rotate);
}

void launch_turn_table(__half2* table, int64_t num_slots, int key_dim, TurnOrder order, double base,
                       bool rotate, cudaStream_t stream) {
  turn_table_kernel<<<num_blocks(num_slots * key_dim / 4, kTableThreads), kTableThreads, 0, stream>>>(
      table, num_slots, key_dim, order, log(base), rotate);
}

void launch_top_lists(int32_t* lists, int64_t num_batches, int64_t num_lists, int64_t num_kv_heads,
                      int64_t width, int64_t t0, int64_t stride, int64_t parent_span, cudaStream_t stream) {
  const int64_t total = num_batches * num_lists * num_kv_heads * width;
  top_lists_kernel<<<num_blocks(total, kTableThreads), kTableThreads, 0, stream>>>(
      lists, total, num_lists, num_kv_heads, width, t0, stride, parent_span);
}

void launch_relay(const TensorCoreShape& shape, const RelayParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto tag, auto dim) {
    launch_relay_instance<typename decltype(tag)::type, dim.value, dim.value>(params, stream);
  });
}

void launch_scores(const TensorCoreShape& shape, const ScoreParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto tag, auto dim) {
    launch_scores_instance<typename decltype(tag)::type, dim.value, dim.value>(params, stream);
  });
}

void launch_attend(const TensorCoreShape& shape, const AttendParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto tag, auto dim) {
    launch_attend_instance<typename decltype(tag)::type, dim.value, dim.value>(params, stream);
  });
}

}  // namespace htree::tree_attention
