// The tables of rotations and the lists of the top, declared in copies.h. No torch.
#include "ops/tree/cuda/copies.h"

#include <algorithm>

#include "device/sm90/pdl.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree/cuda/launch_params.h"
#include "ops/tree/cuda/sm80/rotated_query.cuh"

namespace htree::tree_attention {

namespace {

constexpr int kTableThreads = 256;

// As many numbers as one launch of launch_frequencies() carries: 2 KB of the 4 KB that arguments may have.
constexpr int kCarried = 256;
struct Carried {
  double numbers[kCarried];
};

__global__ void frequencies_kernel(double* to, Carried carried, int count) {
  if (static_cast<int>(threadIdx.x) < count) {
    to[threadIdx.x] = carried.numbers[threadIdx.x];
  }
}

// The frequency of dim i < half. `log_base` is that of the base.
__device__ __forceinline__ double frequency_of(const Frequencies& frequencies, double log_base, int i,
                                               int half) {
  return frequencies.inv_freq ? frequencies.inv_freq[i] : exp(-log_base * static_cast<double>(i) / half);
}

__global__ void rope_table_kernel(float2* table, int64_t size, int half, Frequencies frequencies,
                                  double log_base) {
  if (threadIdx.x == 0) {
    device::pdl_launch_dependents();
  }
  const int64_t i = int64_t{blockIdx.x} * kTableThreads + threadIdx.x;
  if (i >= size * half) {
    return;
  }
  const double angle = frequencies.rotate
                           ? static_cast<double>(i / half) *
                                 frequency_of(frequencies, log_base, static_cast<int>(i % half), half)
                           : 0.0;
  table[i] = make_float2(static_cast<float>(cos(angle)), static_cast<float>(sin(angle)));
}

// One thread per slot and pair of dims.
__global__ void rotation_table_kernel(__half2* table, int64_t num_slots, int key_dim, RotationOrder order,
                                      Frequencies frequencies, double log_base) {
  const int64_t i = int64_t{blockIdx.x} * kTableThreads + threadIdx.x;
  const int row_pairs = key_dim / 4, lane_pairs = key_dim / 16;
  if (i >= num_slots * row_pairs) {
    return;
  }
  const int64_t slot = i / row_pairs;
  const int pair = static_cast<int>(i % row_pairs);
  const double position = static_cast<double>(slot * kParentRows);
  float cos_of[2], sin_of[2];
  for (int e = 0; e < 2; ++e) {
    const int dim = order == RotationOrder::kDims
                        ? 2 * pair + e
                        : fragment_dim(2 * (pair % lane_pairs) + e, pair / lane_pairs);
    const double angle =
        frequencies.rotate ? position * frequency_of(frequencies, log_base, dim, key_dim / 2) : 0.0;
    cos_of[e] = static_cast<float>(cos(angle));
    sin_of[e] = static_cast<float>(sin(angle));
  }
  __half2* at = table + slot * 2 * row_pairs + pair;
  at[0] = __floats2half2_rn(cos_of[0], cos_of[1]);
  at[row_pairs] = __floats2half2_rn(sin_of[0], sin_of[1]);
}

__global__ void top_lists_kernel(TopListParams p, int64_t total) {
  const int64_t i = int64_t{blockIdx.x} * kTableThreads + threadIdx.x;
  if (i >= total) {
    return;
  }
  const int64_t slot = i % p.width;
  const int64_t list_row = i / p.width / p.num_kv_heads % p.num_lists;
  const int64_t batch = i / p.width / p.num_kv_heads / p.num_lists;
  const int64_t last = (p.t0 + list_row * p.stride) / p.parent_span;
  p.lists[i + batch * (p.batch_lists - p.num_lists) * p.num_kv_heads * p.width] =
      slot <= last ? static_cast<int32_t>(slot) : -1;
}

// For positions [0, num_positions): [pair of 8-dim chunks][lane % 4][cos, cos, sin, sin], so that a lane
// finds what rotate_query() needs in 16-byte pieces next to those of its neighbours.
__global__ void position_rotations_kernel(const float2* rope, __half2* rotations, int64_t num_positions,
                                          int half) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= num_positions * (half / 2)) {
    return;
  }
  const int64_t position = i / (half / 2);
  const int pair = static_cast<int>(i % (half / 2));  // the pair of dims 2 pair and 2 pair + 1
  const int chunk = pair / 4, lane = pair % 4;
  const float2 low = rope[position * half + 2 * pair], high = rope[position * half + 2 * pair + 1];
  __half2* to = rotations + position * half + chunk / 2 * 16 + lane * 4 + chunk % 2;
  to[0] = __floats2half2_rn(low.x, high.x);
  to[2] = __floats2half2_rn(low.y, high.y);
}

}  // namespace

cudaError_t launch_frequencies(double* to, const double* numbers, int64_t count, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < count && error == cudaSuccess; first += kCarried) {
    const int some = static_cast<int>(std::min<int64_t>(kCarried, count - first));
    Carried carried{};
    std::copy(numbers + first, numbers + first + some, carried.numbers);
    error = launch_kernel(frequencies_kernel, {.grid = 1, .threads = kCarried}, stream, to + first, carried,
                          some);
  }
  return error;
}

cudaError_t launch_rope_table(float2* table, int64_t size, int key_dim, const Frequencies& frequencies,
                              cudaStream_t stream) {
  const int half = key_dim / 2;
  return launch_kernel(rope_table_kernel,
                       {.grid = num_blocks(size * half, kTableThreads), .threads = kTableThreads}, stream,
                       table, size, half, frequencies, log(frequencies.base));
}

cudaError_t launch_rotation_table(__half2* table, int64_t num_slots, int key_dim, RotationOrder order,
                                  const Frequencies& frequencies, cudaStream_t stream) {
  return launch_kernel(rotation_table_kernel,
                       {.grid = num_blocks(num_slots * key_dim / 4, kTableThreads), .threads = kTableThreads},
                       stream, table, num_slots, key_dim, order, frequencies, log(frequencies.base));
}

cudaError_t launch_top_lists(const TopListParams& params, cudaStream_t stream) {
  const int64_t total = params.num_batches * params.num_lists * params.num_kv_heads * params.width;
  return launch_kernel(top_lists_kernel, {.grid = num_blocks(total, kTableThreads), .threads = kTableThreads},
                       stream, params, total);
}

cudaError_t launch_position_rotations(const float2* rope, __half2* rotations, int64_t num_positions,
                                      int key_dim, cudaStream_t stream) {
  const int half = key_dim / 2;
  return launch_kernel(
      position_rotations_kernel,
      {.grid = num_blocks(num_positions * (half / 2), kTableThreads), .threads = kTableThreads}, stream, rope,
      rotations, num_positions, half);
}

}  // namespace htree::tree_attention
