// Sorts lists, drops repetitions and what cannot be seen. A thread block has one list: its blocks are bits in shared memory,
// a window of them at a time, and what is set is written in order, so that order and repetition in the list cannot matter.
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/any/visible_lists.h"

namespace htree::tree_attention {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / device::kWarpSize;
constexpr int kWords = 1024;  // of a window: 32 768 blocks

// Exclusive sum of `count` over the threads of the block, and the sum of all. Every thread calls.
__device__ __forceinline__ int exclusive_sum(int count, int (&totals)[kWarps], int& all) {
  const int lane = threadIdx.x % device::kWarpSize, warp = threadIdx.x / device::kWarpSize;
  int inclusive = count;
#pragma unroll
  for (int offset = 1; offset < device::kWarpSize; offset *= 2) {
    const int other = __shfl_up_sync(device::kFullMask, inclusive, offset);
    inclusive += lane >= offset ? other : 0;
  }
  __syncthreads();  // `totals` of the previous call has been read
  if (lane == device::kWarpSize - 1) {
    totals[warp] = inclusive;
  }
  __syncthreads();
  int before = inclusive - count;
  all = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    before += i < warp ? totals[i] : 0;
    all += totals[i];
  }
  return before;
}

// Grid: x = lists, the head fastest.
__global__ void __launch_bounds__(kThreads) visible_lists_kernel(VisibleListParams p) {
  __shared__ uint32_t words[kWords];
  __shared__ int totals[kWarps];
  const int64_t head = blockIdx.x % p.num_list_heads, row = blockIdx.x / p.num_list_heads;
  const int64_t batch = row / p.num_lists, list = row % p.num_lists;
  const int32_t* from = p.blocks + batch * p.blocks_batch + (list * p.num_list_heads + head) * p.width;
  // One list for all K/V heads is written once for each of them.
  const int copies = p.num_list_heads == 1 ? p.num_kv_heads : 1;
  int32_t* to = p.lists + (row * p.num_kv_heads + head) * p.visible_width;
  const auto write = [&](int64_t at, int32_t block) {
    for (int copy = 0; copy < copies; ++copy) {
      to[copy * p.visible_width + at] = block;
    }
  };
  const int64_t token = p.t0 + list * p.stride, diagonal = token / p.block_size;
  // Of the diagonal block the parts up to the queries' own are written.
  const int own_part = static_cast<int>(token % p.block_size / (p.block_size / p.parts));
  int64_t written = 0;
  bool holds_diagonal = false;
  for (int64_t base = 0; base <= diagonal; base += int64_t{kWords} * 32) {
    const int64_t end = min(diagonal + 1, base + int64_t{kWords} * 32);
    const int used = static_cast<int>((end - base + 31) / 32);
    for (int i = threadIdx.x; i < used; i += kThreads) {
      words[i] = 0;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < p.width; i += kThreads) {
      const int64_t block = from[i];
      if (block >= base && block < end) {
        atomicOr(&words[(block - base) / 32], 1u << (block - base) % 32);
      }
    }
    __syncthreads();
    const int per_thread = (used + kThreads - 1) / kThreads;
    const int first = threadIdx.x * per_thread, last = min(first + per_thread, used);
    int count = 0;
    for (int i = first; i < last; ++i) {
      count += __popc(words[i]);
    }
    int all = 0;
    int64_t at = written + exclusive_sum(count, totals, all);
    for (int i = first; i < last; ++i) {
      for (uint32_t bits = words[i]; bits != 0; bits &= bits - 1) {
        const int64_t block = base + i * 32 + __ffs(bits) - 1;
        const int parts = block == diagonal ? own_part + 1 : static_cast<int>(p.parts);
        for (int part = 0; part < parts; ++part) {
          write(at * p.parts + part, static_cast<int32_t>(block * p.parts + part));
        }
        ++at;
      }
    }
    if (end == diagonal + 1) {
      holds_diagonal = words[(diagonal - base) / 32] >> (diagonal - base) % 32 & 1;
    }
    written += all;
    __syncthreads();  // the window is read before the next one is cleared
  }
  const int64_t entries = written * p.parts - (holds_diagonal ? p.parts - 1 - own_part : 0);
  const bool marks = !p.sizes && written > 0 && !holds_diagonal;
  if (threadIdx.x == 0) {
    for (int copy = 0; p.sizes && copy < copies; ++copy) {
      const int size = static_cast<int>(entries);
      p.sizes[row * p.num_kv_heads + head + copy] = holds_diagonal || size == 0 ? size : ~size;
    }
    if (marks) {
      write(written, static_cast<int32_t>(p.num_blocks));
    }
  }
  for (int64_t i = entries + marks + threadIdx.x; i < p.visible_width; i += kThreads) {
    write(i, -1);
  }
}

}  // namespace

cudaError_t launch_visible_lists(const VisibleListParams& params, cudaStream_t stream) {
  const int64_t lists = params.num_batches * params.num_lists * params.num_list_heads;
  if (lists == 0) {
    return cudaSuccess;
  }
  return launch_kernel(visible_lists_kernel, {.grid = static_cast<unsigned>(lists), .threads = kThreads},
                       stream, params);
}

}  // namespace htree::tree_attention
