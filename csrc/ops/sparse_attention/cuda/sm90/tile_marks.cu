// The kernels of tile_marks.h. No torch.
//
// Marks: a thread block has a run of tokens and a K/V head. It sets a bit in shared memory for every entry of the run's
// lists, and writes the tiles that have any. Inverted tiles: a warp has a tile of tokens and looks for it in the tiles of
// every run.
#include "ops/sparse_attention/cuda/sm90/tile_marks.h"

#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/sm80/masked_lists.cuh"

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

// Marks the entries of the lists of tokens first ... last, which begin at token `run`. Each warp takes some of the lists,
// those of rows that gather being empty. A list that a caller gives a tree may name a parent behind its queries' own, which they do not see and which has no place in `marks`.
__device__ __forceinline__ void mark_lists(const GatherParams& p, const RunMarks& marks, int batch,
                                           int kv_head, int run, int first, int last) {
  const int lane = threadIdx.x % 32;
  const int t0 = static_cast<int>(p.t0);
  const int last_list = static_cast<int>(list_of(p, last - t0));
  for (int list = static_cast<int>(list_of(p, first - t0)) + threadIdx.x / 32; list <= last_list;
       list += kMarkThreads / 32) {
    // A list may begin in the run before.
    const int begin = max(t0 + list * p.stride, run), end = min(t0 + (list + 1) * p.stride - 1, last);
    if (p.lists) {
      const int32_t* parents =
          p.lists + batch * p.list_batch + (int64_t{list} * p.num_kv_heads + kv_head) * p.list_width;
      for (int i = lane; i < p.list_width; i += 32) {
        const int parent = masked_parent(p, parents[i]);
        if (parent < 0) {
          break;
        }
        if (parent <= begin / kTensorCoreRate) {
          marks.set(parent, begin - run, end - run);
        }
      }
    } else {  // every parent up to the queries' own
      for (int parent = lane; parent <= begin / kTensorCoreRate; parent += 32) {
        marks.set(parent, begin - run, end - run);
      }
    }
  }
}

// The first warp calls. Writes the tiles below `end` that have a mark, ascending, and the last one whether or not it has.
// Returns their number.
__device__ __forceinline__ int list_tiles(const RunMarks& marks, uint16_t* tiles, int end) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int base = 0; base < end; base += 32) {
    const int tile = base + lane;
    const bool marked = tile < end && (tile + 1 == end || marks.any(tile));
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

// The place of `tile` among the `count` ascending `tiles`, or -1.
__device__ __forceinline__ int place_of(const uint16_t* tiles, int count, int tile) {
  int low = 0, high = count;  // all tiles before `low` are smaller, those from `high` on are not
  while (low < high) {
    const int middle = (low + high) / 2;
    if (tiles[middle] < tile) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < count && tiles[low] == tile ? low : -1;
}

// Whether any of `words` words is not 0.
__device__ __forceinline__ bool any_word(const uint32_t* from, int words) {
  uint32_t bits = 0;
  for (int i = 0; i < words; ++i) {
    bits |= from[i];
  }
  return bits != 0;
}

constexpr int kInvertedTileWarps = 4;

// Grid: x = runs of kInvertedTileWarps warps, one for each tile of tokens up to the last query, `tiles` of each pair.
__global__ void __launch_bounds__(kInvertedTileWarps * 32)
    inverted_tiles_kernel(GatherParams p, TileMarks marks, InvertedTiles out, int runs, int tiles,
                          int bytes) {
  const int lane = threadIdx.x % 32;
  const int row = static_cast<int>(blockIdx.x * kInvertedTileWarps + threadIdx.x / 32);
  if (row >= p.num_batches * p.num_kv_heads * tiles) {
    return;
  }
  const int pair = row / tiles, tile = row % tiles;
  const int log2 = run_tokens_log2(p.group);
  const int half_words = (1 << log2) / 8;
  const int64_t place = int64_t{pair} * marks.width + tile;
  uint32_t* row_tiles = out.row_tiles + place * (2 * runs);
  int count = 0;
  for (int base = max((tile * kDenseTileNodes >> log2) - static_cast<int>(p.t0 >> log2), 0); base < runs;
       base += 32) {
    const int run = base + lane;
    const int64_t task = int64_t{pair} * runs + run;
    const int at = run < runs ? place_of(marks.tiles + task * marks.width, marks.counts[task], tile) : -1;
    bool uses[2] = {false, false};
    if (at >= 0) {
      const uint32_t* words =
          reinterpret_cast<const uint32_t*>(marks.marks + (task * marks.width + at) * bytes);
      uses[0] = any_word(words, half_words);
      uses[1] = any_word(words + half_words, half_words);
    }
    const unsigned first = __ballot_sync(device::kFullMask, uses[0]);
    const unsigned second = __ballot_sync(device::kFullMask, uses[1]);
    const unsigned before = (1u << lane) - 1;
    uint32_t* to = row_tiles + count + __popc(first & before) + __popc(second & before);
    for (int half = 0; half < 2; ++half) {
      if (uses[half]) {
        *to++ = static_cast<uint32_t>(2 * run + half) << 16 | static_cast<uint32_t>(at);
      }
    }
    count += __popc(first) + __popc(second);
  }
  if (lane == 0) {
    out.counts[place] = count;
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

cudaError_t launch_inverted_tiles(const GatherParams& gather, const TileMarks& marks,
                                  const InvertedTiles& inverted, cudaStream_t stream) {
  const int runs = static_cast<int>(num_runs(gather.t0, gather.num_queries, gather.group));
  const int tiles = static_cast<int>((gather.t0 + gather.num_queries - 1) / kDenseTileNodes) + 1;
  const int64_t rows = int64_t{gather.num_batches} * gather.num_kv_heads * tiles;
  if (2 * runs > 1 << 16 || tiles > 1 << 16) {
    return cudaErrorInvalidConfiguration;  // a tile of rows is two numbers of 16 bits; masked rows end far before this
  }
  return launch_kernel(inverted_tiles_kernel,
                       {.grid = num_blocks(rows, kInvertedTileWarps), .threads = kInvertedTileWarps * 32},
                       stream, gather, marks, inverted, runs, tiles,
                       static_cast<int>(mark_bytes(gather.group)));
}

}  // namespace htree::tree_attention
