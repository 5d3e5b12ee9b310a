// Which CUDA kernels take a problem: pure functions, printable and tested on the CPU.
#pragma once

#include <cstdint>
#include <string>

#include "ops/fp8/quantize/quantize_params.h"

namespace htree::fp8 {

// How many threads a chunk of elements under one scale has, and what each holds in registers.
struct ChunkConfig {
  int threads;
  int packs;
  int pack;  // elements of a load: 16 bytes of the wider type, or 1 where rows are not aligned to that

  constexpr int capacity() const { return threads * packs * pack; }
  constexpr int block() const { return threads < 128 ? 128 : threads; }
  constexpr int chunks_per_block() const { return block() / threads; }
};

constexpr int kNumChunkShapes = 10;

// The compiled shapes, smallest first. In the list of those with single elements threads = 0 is the end.
struct ChunkShapes {
  int threads[kNumChunkShapes];
  int packs[kNumChunkShapes];
};
constexpr ChunkShapes kPackShapes{{8, 8, 16, 32, 32, 64, 128, 256, 512, 1024},
                                  {1, 2, 2, 2, 4, 4, 4, 4, 4, 4}};
constexpr ChunkShapes kElementShapes{{32, 256, 1024}, {8, 16, 32}};
// The largest shape for chunks that are not a whole group: 256 threads read fastest.
constexpr int kMaxSharedThreads = 256;

// The smallest shape that holds the group; threads = 0 where none does, and then x is read twice.
constexpr ChunkConfig choose_group_config(int64_t group, int pack) {
  const ChunkShapes& shapes = pack > 1 ? kPackShapes : kElementShapes;
  for (int i = 0; i < kNumChunkShapes && shapes.threads[i] > 0; ++i) {
    const ChunkConfig config{shapes.threads[i], shapes.packs[i], pack};
    if (config.capacity() >= group) {
      return config;
    }
  }
  return {0, 0, pack};
}

// The same where the scale is known, so that a group may be several chunks.
constexpr ChunkConfig choose_chunk_config(int64_t group, int pack) {
  const ChunkConfig config = choose_group_config(group, pack);
  if (config.threads > 0 && config.threads <= kMaxSharedThreads) {
    return config;
  }
  return {kMaxSharedThreads, pack > 1 ? 4 : 16, pack};
}

// Chunks of all rows.
constexpr int64_t count_chunks(const MatrixShape& s, const ChunkConfig& config) {
  return s.rows * ceil_div(s.cols, s.group) * ceil_div(s.group, int64_t{config.capacity()});
}

// The same for turning codes into values. Each pack that is read writes twice its bytes or more, and blocks of 128
// threads with two packs each keep the memory busiest (for 2^27 codes to bf16 on an H200 99.0 us; four packs 101.5, 256
// threads 100.3, and 101.5 if the codes stay in the caches after their only use). Larger blocks are for problems that
// they bring down to one block per multiprocessor, so that the launch may use programmatic dependent launch.
constexpr int kDecodePacks = 2;
constexpr int kDecodeThreads = 128;
constexpr ChunkConfig choose_decode_config(const MatrixShape& s, int pack, int num_processors) {
  const ChunkConfig config = choose_chunk_config(s.group, pack);
  const ChunkConfig usual{kDecodeThreads, kDecodePacks, pack};
  if (pack == 1 || config.capacity() <= usual.capacity()) {
    return config;
  }
  for (const ChunkConfig& larger : {usual, ChunkConfig{128, 4, pack}, ChunkConfig{256, 4, pack}}) {
    if (count_chunks(s, larger) <= num_processors) {
      return larger;
    }
  }
  return usual;
}

constexpr int kLargestThreads = 512;
constexpr int kLargestPacks = 4;
constexpr int kBlocksPerProcessor = 4;  // blocks of kLargestThreads threads

// How many blocks share a group of `length` elements (rows of a column) in the search for the largest
// magnitude: enough to fill the multiprocessors, but each has a tile of its own.
constexpr int64_t choose_splits(int64_t num_groups, int64_t length, int64_t tile, int num_processors) {
  const int64_t wanted = ceil_div(int64_t{kBlocksPerProcessor} * num_processors, num_groups);
  const int64_t most = ceil_div(length, tile);
  return wanted < most ? wanted : most;
}

// The elements of a pack that the rows of both tensors allow: 16 bytes of the wider type, or 1. `aligned`
// says that the data pointers are multiples of 16 bytes.
constexpr int choose_pack(const MatrixShape& s, int64_t row_stride, int element_size, bool aligned) {
  const int pack = 16 / element_size;
  const bool by_groups = s.layout == ScaleLayout::kRowGroups && s.group < s.cols;
  const bool fits = aligned && s.cols % pack == 0 && (s.rows == 1 || row_stride % pack == 0) &&
                    (!by_groups || s.group % pack == 0);
  return fits ? pack : 1;
}

// How the largest magnitudes are found in a launch of its own. splits = 0 where no such launch is needed,
// because the registers hold each group.
struct LargestConfig {
  int64_t num_splits;
  int64_t num_partials;
};
constexpr int kColumnLanes = 32;  // packs across the columns
constexpr int kColumnRows = 8;    // rows of a block at one time
constexpr int kColumnSteps = 8;   // the fewest steps that are worth a block

// These blocks have half the threads, so there are twice as many.
constexpr int64_t choose_column_splits(int64_t num_tiles, int64_t group, int num_processors) {
  return choose_splits(num_tiles, group, kColumnRows * kColumnSteps, 2 * num_processors);
}

constexpr LargestConfig choose_largest_config(const MatrixShape& s, int pack, int num_processors) {
  int64_t splits = 0;
  if (s.layout == ScaleLayout::kColumns) {
    const int64_t tiles = num_scales(s) / s.cols * ceil_div(s.cols, kColumnLanes * pack);
    splits = choose_column_splits(tiles, s.group, num_processors);
  } else if (s.layout == ScaleLayout::kTensor || choose_group_config(s.group, pack).threads == 0) {
    splits = choose_splits(num_scales(s), s.group, int64_t{kLargestThreads} * kLargestPacks * pack,
                           num_processors);
  }
  return {splits, splits * num_scales(s)};
}

inline std::string describe(const ChunkConfig& config) {
  return std::to_string(config.threads) + " threads per chunk, " + std::to_string(config.packs) +
         " packs of " + std::to_string(config.pack);
}

}  // namespace htree::fp8
