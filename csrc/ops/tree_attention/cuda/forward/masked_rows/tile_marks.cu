// Turns the lists of masked rows into the tiles of each task and the marks of their parents, declared in attend.h. A
// thread block has a run of tokens and a K/V head. It sets a bit in shared memory for every entry of the run's lists, and
// writes the tiles that have any. No torch.
#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/cuda/forward/attend.h"
#include "ops/tree_attention/cuda/gather.cuh"
#include "ops/tree_attention/plan/dense_rows.h"

namespace htree::tree_attention {

namespace {

constexpr int kMarkThreads = 256;
constexpr int kMarkChunk = 16;  // bytes that a thread moves at once

// The marks of a run in shared memory: `bytes` for each of its tiles.
struct RunMarks {
  uint8_t* marks;
  int bytes;

  // The parent stands in the list of tokens first ... last of the run.
  __device__ __forceinline__ void set(int parent, int first, int last) const {
    const int row = parent / kTileParents * bytes;
    for (int token = first; token <= last; ++token) {
      const int at = row + token;
      atomicOr(reinterpret_cast<uint32_t*>(marks) + at / 4, 1u << (at % 4 * 8 + parent % kTileParents));
    }
  }
  __device__ __forceinline__ bool any(int tile) const {
    const uint4* chunks = reinterpret_cast<const uint4*>(marks + tile * bytes);
    uint32_t bits = 0;
    for (int i = 0; i < bytes / kMarkChunk; ++i) {
      bits |= chunks[i].x | chunks[i].y | chunks[i].z | chunks[i].w;
    }
    return bits != 0;
  }
};

// Marks the entries of the lists of tokens first ... last, which begin at token `run`. Each warp takes some of the lists.
__device__ __forceinline__ void mark_lists(const GatherParams& p, const RunMarks& marks, int batch,
                                           int kv_head, int run, int first, int last) {
  const int lane = threadIdx.x % 32;
  const int t0 = static_cast<int>(p.t0);
  const int last_list = static_cast<int>(list_of(p, last - t0));
  for (int list = static_cast<int>(list_of(p, first - t0)) + threadIdx.x / 32; list <= last_list;
       list += kMarkThreads / 32) {
    const int begin = t0 + list * p.stride, end = min(begin + p.stride - 1, last);
    if (p.lists) {
      const int32_t* parents =
          p.lists + batch * p.list_batch + (int64_t{list} * p.num_kv_heads + kv_head) * p.list_width;
      for (int i = lane; i < p.list_width && parents[i] >= 0; i += 32) {
        marks.set(parents[i], begin - run, end - run);
      }
    } else {  // every parent up to the queries' own
      for (int parent = lane; parent <= begin / kTensorCoreRate; parent += 32) {
        marks.set(parent, begin - run, end - run);
      }
    }
  }
}

// The first warp calls. Writes the tiles below `end` that have a mark, ascending, and returns their number.
__device__ __forceinline__ int list_tiles(const RunMarks& marks, uint16_t* tiles, int end) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int base = 0; base < end; base += 32) {
    const int tile = base + lane;
    const bool marked = tile < end && marks.any(tile);
    const unsigned all = __ballot_sync(device::kFullMask, marked);
    if (marked) {
      tiles[count + __popc(all & ((1u << lane) - 1))] = static_cast<uint16_t>(tile);
    }
    count += __popc(all);
  }
  return count;
}

// Grid: x = tasks. Shared memory: marks and tiles of a run.
__global__ void __launch_bounds__(kMarkThreads)
    tile_marks_kernel(GatherParams p, TileMarks out, int runs, int bytes) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int count;
  const RunMarks marks{shared, bytes};
  uint16_t* tiles = reinterpret_cast<uint16_t*>(shared + out.width * bytes);
  const int pair = static_cast<int>(blockIdx.x) / runs, run_index = static_cast<int>(blockIdx.x) % runs;
  const int batch = pair / p.num_kv_heads, kv_head = pair % p.num_kv_heads;
  const int log2 = run_tokens_log2(p.group);
  const int t0 = static_cast<int>(p.t0);
  const int run = ((t0 >> log2) + run_index) << log2;
  const int first = max(run, t0), last = min(run + (1 << log2), t0 + p.num_queries) - 1;
  const int end = last / kDenseTileNodes + 1;
  const int chunks = bytes / kMarkChunk;
  uint4* rows = reinterpret_cast<uint4*>(shared);
  for (int i = threadIdx.x; i < end * chunks; i += kMarkThreads) {
    rows[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  mark_lists(p, marks, batch, kv_head, run, first, last);
  __syncthreads();
  if (threadIdx.x < 32) {
    const int found = list_tiles(marks, tiles, end);
    if (threadIdx.x == 0) {
      count = found;
      out.counts[blockIdx.x] = found;
    }
  }
  __syncthreads();
  const int64_t task = int64_t{blockIdx.x} * out.width;
  for (int i = threadIdx.x; i < count * chunks; i += kMarkThreads) {
    const int place = i / chunks, chunk = i % chunks;
    reinterpret_cast<uint4*>(out.marks)[(task + place) * chunks + chunk] =
        rows[tiles[place] * chunks + chunk];
  }
  for (int i = threadIdx.x; i < count; i += kMarkThreads) {
    out.tiles[task + i] = tiles[i];
  }
}

}  // namespace

cudaError_t launch_tile_marks(const GatherParams& gather, const TileMarks& marks, cudaStream_t stream) {
  const int runs = static_cast<int>(num_runs(gather.t0, gather.num_queries, gather.group));
  const int bytes = static_cast<int>(mark_bytes(gather.group));
  const LaunchShape shape{
      .grid = static_cast<unsigned>(int64_t{gather.num_batches} * gather.num_kv_heads * runs),
      .threads = kMarkThreads,
      .shared_bytes = int64_t{marks.width} * (bytes + 2)};
  return launch_kernel(tile_marks_kernel, shape, stream, gather, marks, runs, bytes);
}

}  // namespace htree::tree_attention
