// The table of sequences, and the exact choice of blocks from the scores of a chunk: a thread block has a row at a time.
// docs/semantics/selection.md §9.1
#include "ops/selection/cuda/any/block_documents.cuh"
#include "ops/selection/cuda/any/row_choice.cuh"
#include "ops/selection/cuda/any/select_topk.cuh"

namespace htree::tree_attention {
namespace {

constexpr int kTableThreads = 1024;

// Every thread must call; `values` holds kTableThreads numbers. Inclusive, in the order of the threads.
template <typename Op>
__device__ __forceinline__ int32_t block_scan(int32_t value, int32_t* values, Op op) {
  for (int offset = 1; offset < kTableThreads; offset *= 2) {
    values[threadIdx.x] = value;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= offset) {
      value = op(values[threadIdx.x - offset], value);
    }
    __syncthreads();
  }
  return value;
}

struct LargerOf {
  __device__ __forceinline__ int32_t operator()(int32_t a, int32_t b) const { return max(a, b); }
};
struct SumOf {
  __device__ __forceinline__ int32_t operator()(int32_t a, int32_t b) const { return a + b; }
};

// [begin, end) of a document after its offsets are raised to the largest before them and cut to the rows, and whether
// that changes them.
struct DocumentRows {
  int32_t begin, end;
  bool kept;
};

// `before` is the largest offset of the documents before this tile of threads; it becomes that of the next tile.
__device__ __forceinline__ DocumentRows document_rows(const int32_t* offsets, int32_t i,
                                                      int32_t num_documents, int32_t rows, int32_t& before,
                                                      int32_t* values) {
  const bool present = i < num_documents;
  const int32_t given = present ? min(max(offsets[i + 1], 0), rows) : 0;
  const int32_t end = max(before, block_scan(given, values, LargerOf{}));
  values[threadIdx.x] = end;
  __syncthreads();
  const int32_t begin = threadIdx.x == 0 ? before : values[threadIdx.x - 1];
  const int32_t last = values[kTableThreads - 1];
  __syncthreads();
  before = last;
  return {begin, end, present && offsets[i] == begin && offsets[i + 1] == end};
}

__global__ void __launch_bounds__(kTableThreads) block_documents_kernel(const BlockDocumentParams params) {
  __shared__ int32_t values[kTableThreads];
  __shared__ int32_t total;
  int32_t queries_before = 0, keys_before = 0, slots_before = 0;
  for (int32_t tile = 0; tile < params.num_documents; tile += kTableThreads) {
    const int32_t i = tile + static_cast<int32_t>(threadIdx.x);
    const bool present = i < params.num_documents;
    BlockDocument document{};
    int32_t num_queries = params.num_queries, num_keys = params.num_keys;
    if (params.cu_seq_q == nullptr) {
      document.query = i * params.query_step;
      document.key = i * params.key_step;
    } else {
      const DocumentRows queries =
          document_rows(params.cu_seq_q, i, params.num_documents, params.num_queries, queries_before, values);
      const DocumentRows keys =
          document_rows(params.cu_seq_k, i, params.num_documents, params.num_keys, keys_before, values);
      num_queries = queries.end - queries.begin;
      num_keys = keys.end - keys.begin;
      document.query = queries.begin * params.query_step;
      document.key = keys.begin * params.key_step;
      document.list_row = queries.begin;
      document.broken = !queries.kept || !keys.kept || num_queries > params.max_q ||
                        num_keys > params.max_k || num_queries > num_keys ||
                        (num_queries > 0 && (num_keys - num_queries) % params.stride != 0);
    }
    document.first_token = document.broken ? 0 : num_keys - num_queries;
    document.num_leaders = present ? num_queries / params.stride + (num_queries % params.stride != 0) : 0;
    const int32_t slots_until = block_scan(document.num_leaders, values, SumOf{});
    document.first_slot = slots_before + slots_until - document.num_leaders;
    if (params.cu_seq_q == nullptr) {
      document.list_row = document.first_slot;
    }
    if (present) {
      params.documents[i] = document;
    }
    if (threadIdx.x == kTableThreads - 1) {
      total = slots_until;
    }
    __syncthreads();
    slots_before += total;
    __syncthreads();
  }
}

// The scores of a row, and the keys that order its blocks.
struct RowScores {
  const BlockOptions& options;
  const float* units;  // as many as units_of_block make a block
  const float* tiles;  // of kTileUnits units; null: not there
  int32_t units_of_block;
  int32_t diagonal;

  __device__ __forceinline__ bool is_forced(int block) const {
    return block_is_forced(options, block, diagonal);
  }
  // The largest of a block's units; -0 becomes +0.
  __device__ __forceinline__ float score(int64_t block) const {
    const float* own = units + block * units_of_block;
    if (units_of_block == 1) {
      return *own + 0.0f;
    }
    float best = device::negative_infinity<float>();
    int32_t i = 0;
    if (units_of_block % 4 == 0) {  // rows of scores and of tiles begin at 16 bytes
      for (; i < units_of_block; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(own + i);
        best = fmaxf(fmaxf(best, fmaxf(four.x, four.y)), fmaxf(four.z, four.w));
      }
    }
    for (; i < units_of_block; ++i) {
      best = fmaxf(best, own[i]);
    }
    return best + 0.0f;
  }
  __device__ __forceinline__ uint32_t key(int block) const {
    return is_forced(block) ? SelectTraits::kRightmost : key_of_score(score(block));
  }
};

// The keys of a long row that can be among the chosen, in their order.
struct FilteredRow {
  static constexpr int kMost = static_cast<int>(kFilteredKeys);
  uint32_t keys[kMost];  // first the largest of each group
  int32_t places[kMost];
};
static_assert(sizeof(FilteredRow) == kFilteredKeys * 8);

// Keys are cut into groups, some for each thread, of which it knows the largest keys.
template <int kThreads>
constexpr int kGroups = kFilteredKeys / kThreads;
// The groups of a row that `count` keys are chosen of: those of a thread are one where that leaves twice as many as are
// chosen.
template <int kThreads>
__device__ __forceinline__ int num_groups(uint32_t count) {
  return 2 * count <= kThreads ? kThreads : FilteredRow::kMost;
}

// The smallest key that can be among the `count` largest.
__device__ __forceinline__ uint32_t least_key(const device::Threshold& threshold) {
  return threshold.key + (threshold.equal == 0 ? 1 : 0);
}

// As many groups as are chosen hold a key from the `count`-th largest of their largest keys on, so no smaller key, which
// this returns, is chosen. All threads must call. Ends with a __syncthreads.
template <int kThreads>
__device__ __forceinline__ uint32_t least_of_groups(const RowChoice<kThreads>& row,
                                                    const uint32_t (&largest)[kGroups<kThreads>],
                                                    uint32_t count, FilteredRow& filtered) {
  const int groups = num_groups<kThreads>(count);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kGroups<kThreads>; ++i) {
    most = max(most, largest[i]);
    if (groups > kThreads) {
      filtered.keys[i * kThreads + threadIdx.x] = largest[i];
    }
  }
  if (groups == kThreads) {
    filtered.keys[threadIdx.x] = most;
  }
  __syncthreads();
  return least_key(RowChoice<kThreads>{filtered.keys, row.words, groups, row.shared}.threshold(count));
}

// Leaves those of `num` items whose keys are `least` or more in `filtered`, in their order. Returns how many they are; where
// they are more than kMost, `filtered` does not hold them all. All threads must call. Ends with a __syncthreads.
template <int kThreads, typename KeyOf, typename PlaceOf>
__device__ __forceinline__ int keep_from(uint32_t least, int num, const RowChoice<kThreads>& row,
                                         FilteredRow& filtered, KeyOf&& key_of, PlaceOf&& place_of) {
  const int words = (num + 31) / 32;
  for (int i = threadIdx.x; i < words * 32; i += kThreads) {
    const unsigned kept = __ballot_sync(device::kFullMask, i < num && key_of(i) >= least);
    if (threadIdx.x % 32 == 0) {
      row.words[i / 32].larger = kept;
    }
  }
  __syncthreads();
  uint32_t before = 0;
  for (int tile = 0; tile < words; tile += kThreads) {
    const int word = tile + static_cast<int>(threadIdx.x);
    uint32_t bits = word < words ? row.words[word].larger : 0, total;
    uint32_t at = before + device::block_exclusive_sum<kThreads>(__popc(bits), row.shared.sums, total);
    for (; bits != 0 && at < FilteredRow::kMost; bits &= bits - 1, ++at) {
      const int i = word * 32 + __ffs(bits) - 1;
      filtered.places[at] = place_of(i);
      filtered.keys[at] = key_of(i);
    }
    before += total;
  }
  __syncthreads();
  return static_cast<int>(before);
}

// Fills the keys of a row. A thread's groups are neighbouring places, from tile to tile of kFilteredKeys.
template <int kThreads>
__device__ __forceinline__ void fill_keys(const RowScores& scores, const RowChoice<kThreads>& row,
                                          uint32_t (&largest)[kGroups<kThreads>]) {
  constexpr int kOwn = kGroups<kThreads>;
  const bool aligned = reinterpret_cast<uintptr_t>(row.keys) % sizeof(uint4) == 0;
  // Blocks of one unit that nothing forces: their scores lie side by side, at whole tiles of four.
  const int64_t begin = scores.options.first,
                end = scores.units_of_block == 1 ? scores.diagonal + 1 - scores.options.local : 0;
  for (int first = kOwn * static_cast<int>(threadIdx.x); first < row.num; first += kOwn * kThreads) {
    uint32_t keys[kOwn] = {};
    if (kOwn == 4 && first >= begin && first + kOwn <= end) {
      const float4 units = *reinterpret_cast<const float4*>(scores.units + first);
      const float four[4] = {units.x, units.y, units.z, units.w};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        keys[i] = key_of_score(four[i] + 0.0f);  // -0 becomes +0
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        keys[i] = first + i < row.num ? scores.key(first + i) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      largest[i] = max(largest[i], keys[i]);
    }
    if (kOwn == 4 && first + kOwn <= row.num && aligned) {
      *reinterpret_cast<uint4*>(row.keys + first) =
          make_uint4(keys[0], keys[1 % kOwn], keys[2 % kOwn], keys[3 % kOwn]);
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (first + i < row.num) {
          row.keys[first + i] = keys[i];
        }
      }
    }
  }
}

// The tiles of a row: 2^log2 blocks in each but the last, which ends with the diagonal block.
struct RowTiles {
  int num = 0;  // 0: not there
  int log2 = 0;

  // Where tiles leave much out. A row of so many has space for a second FilteredRow in the place of its keys.
  __device__ __forceinline__ RowTiles(const RowScores& scores, int taken) {
    static_assert(kLeastTiles * sizeof(uint32_t) >= sizeof(FilteredRow));
    log2 = __ffs(static_cast<int>(kTileUnits) / scores.units_of_block) - 1;
    num = (scores.diagonal >> log2) + 1;
    num = taken < FilteredRow::kMost && num >= max(2 * taken, static_cast<int>(kLeastTiles)) ? num : 0;
  }
  __device__ __forceinline__ int first_block(int tile) const { return tile << log2; }
  // That of the largest score, or that of a forced block.
  __device__ __forceinline__ uint32_t key(const RowScores& scores, int tile) const {
    return scores.is_forced(first_block(tile)) || scores.is_forced(first_block(tile + 1) - 1)
               ? SelectTraits::kRightmost
               : key_of_score(scores.tiles[tile] + 0.0f);
  }
};

// What can be among the `count` chosen, by the largest keys of tiles: as many tiles as are chosen hold one from the
// `count`-th largest of them on. Returns how many blocks it leaves in the place of the row's keys; more than kMost are not
// there. All threads must call. Ends with a __syncthreads.
template <int kThreads>
__device__ __forceinline__ int filter_by_tiles(const RowScores& scores, const RowTiles& tiles, uint32_t count,
                                               const RowChoice<kThreads>& row, FilteredRow& filtered) {
  uint32_t largest[kGroups<kThreads>] = {};
  for (int first = threadIdx.x; first < tiles.num; first += kThreads * kGroups<kThreads>) {
#pragma unroll
    for (int i = 0; i < kGroups<kThreads>; ++i) {
      if (const int tile = first + i * kThreads; tile < tiles.num) {
        row.keys[tile] = tiles.key(scores, tile);
        largest[i] = max(largest[i], row.keys[tile]);
      }
    }
  }
  __syncthreads();
  const RowChoice<kThreads> of_tiles{row.keys, row.words, tiles.num, row.shared};
  const uint32_t least = tiles.num > 2 * num_groups<kThreads>(count)
                             ? least_of_groups(of_tiles, largest, count, filtered)
                             : least_key(of_tiles.threshold(count));
  const int kept = keep_from(
      least, tiles.num, row, filtered, [&](int tile) { return row.keys[tile]; },
      [](int tile) { return tile; });
  if (kept > FilteredRow::kMost) {
    return kept;
  }
  // The last tile, which is forced, is the last of those that are kept.
  const int in_tile = tiles.first_block(1) - 1;
  const int num = tiles.first_block(kept - 1) + (scores.diagonal & in_tile) + 1;
  const auto block_of = [&](int i) {
    return tiles.first_block(filtered.places[i >> tiles.log2]) + (i & in_tile);
  };
  return keep_from(
      least, num, row, *reinterpret_cast<FilteredRow*>(row.keys),
      [&](int i) { return scores.key(block_of(i)); }, block_of);
}

struct ListRow {
  int32_t* blocks;
  float* scores;  // null where nobody asks for them
};

template <int kThreads, bool kCut>
__device__ __forceinline__ void choose_row(const BlockListParams& params, const RowScores& scores,
                                           const ListRow& list, const RowChoice<kThreads>& row,
                                           FilteredRow& filtered) {
  const BlockOptions& options = params.options;
  const int taken = static_cast<int>(min(static_cast<int64_t>(row.num), options.count));
  const auto count = static_cast<uint32_t>(taken);
  const auto emit = [&](int rank, int b) {
    list.blocks[rank] = b;
    if (list.scores != nullptr) {
      list.scores[rank] = scores.is_forced(b) ? -device::negative_infinity<float>() : scores.score(b);
    }
  };
  const auto choose_among = [&](FilteredRow& few, int num) {
    const RowChoice<kThreads> choice{few.keys, row.words, num, row.shared};
    choice.choose(num > taken ? choice.threshold(count) : device::Threshold{0, 0},
                  [&](int rank, int i) { emit(rank, few.places[i]); });
  };
  if (row.num > options.count) {
    // One that is best but for the diagonal block has no block behind it.
    const int64_t best = best_blocks(options, row.num);
    if constexpr (kCut) {
      if (const RowTiles tiles(scores, taken); tiles.num > 0) {
        const int kept = filter_by_tiles(scores, tiles, count, row, filtered);
        if (kept <= FilteredRow::kMost) {
          choose_among(*reinterpret_cast<FilteredRow*>(row.keys), kept);
          return;
        }
      }
    }
    uint32_t largest[kGroups<kThreads>] = {};
    fill_keys<kThreads>(scores, row, largest);
    __syncthreads();
    if (best > 1) {
      row.raise_neighbours(row.threshold(static_cast<uint32_t>(best)), SelectTraits::kBest,
                           SelectTraits::kNeighbour);
    } else if (const int groups = num_groups<kThreads>(count); row.num > 2 * groups && taken < groups) {
      const uint32_t least = least_of_groups(row, largest, count, filtered);
      const int kept = keep_from(
          least, row.num, row, filtered, [&](int place) { return row.keys[place]; },
          [](int place) { return place; });
      if (kept <= FilteredRow::kMost) {
        choose_among(filtered, kept);
        return;
      }
    }
    row.choose(row.threshold(count), emit);
  } else {
    for (int b = threadIdx.x; b < row.num; b += kThreads) {
      emit(b, b);
    }
  }
  for (int64_t i = taken + threadIdx.x; i < options.count; i += kThreads) {
    list.blocks[i] = -1;
    if (list.scores != nullptr) {
      list.scores[i] = device::negative_infinity<float>();
    }
  }
}

// Grid: thread blocks take rows (slot, head) in turns; the heads of a slot lie side by side in the lists.
// kCut: TileUse::kCut.
template <int kThreads, bool kCut>
__global__ void __launch_bounds__(kThreads) block_lists_kernel(const BlockListParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ typename RowChoice<kThreads>::Shared shared;
  const BlockChunk& chunk = params.chunk;
  auto& filtered = *reinterpret_cast<FilteredRow*>(shared_bytes);
  auto* words = reinterpret_cast<WordRanks*>(shared_bytes + sizeof(FilteredRow));
  uint32_t* keys = params.keys == nullptr
                       ? reinterpret_cast<uint32_t*>(words + (params.key_capacity + 63) / 64 * 2)
                       : params.keys + blockIdx.x * params.key_capacity;
  const int64_t num_rows = static_cast<int64_t>(chunk.num_slots) * chunk.num_heads;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const int32_t slot = chunk.first_slot + static_cast<int32_t>(row / chunk.num_heads);
    const int32_t head = static_cast<int32_t>(row % chunk.num_heads);
    const BlockDocument document = chunk.documents[find_document(chunk, slot)];
    const int32_t leader = slot - document.first_slot;
    if (leader >= document.num_leaders) {
      continue;  // fewer leaders than there could be
    }
    if (document.first_token + int64_t{leader} * chunk.stride < params.first_token) {
      continue;
    }
    const int64_t place =
        ((document.list_row + static_cast<int64_t>(leader) * params.row_step) * params.heads +
         chunk.first_head + head) *
        params.options.count;
    const ListRow list{params.blocks + place, params.scores == nullptr ? nullptr : params.scores + place};
    if (document.broken) {
      for (int64_t i = threadIdx.x; i < params.options.count; i += kThreads) {
        list.blocks[i] = -1;
        if (list.scores != nullptr) {
          list.scores[i] = __int_as_float(0x7fc00000);  // NaN
        }
      }
      continue;
    }
    const int32_t diagonal = diagonal_block(chunk, document, leader);
    const float* units = score_row(chunk, head, slot);
    const float* tiles = tile_scores(chunk, head, slot);
    int32_t units_of_block = chunk.block_size / chunk.unit;
    if (params.tile_use == TileUse::kUnits) {
      units = tiles;
      units_of_block /= static_cast<int32_t>(kTileUnits);
    }
    choose_row<kThreads, kCut>(params, {params.options, units, tiles, units_of_block, diagonal}, list,
                               {keys, words, diagonal + 1, shared}, filtered);
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_block_documents(const BlockDocumentParams& params, cudaStream_t stream) {
  return launch_kernel(block_documents_kernel, {.grid = 1, .threads = kTableThreads}, stream, params);
}

cudaError_t launch_block_lists(const BlockListParams& params, cudaStream_t stream) {
  const auto launch = [&](auto kernel, int threads) {
    const LaunchShape shape{.grid = static_cast<unsigned>(params.num_blocks),
                            .threads = threads,
                            .shared_bytes = row_shared_bytes(params.key_capacity, params.keys == nullptr)};
    return launch_kernel(kernel, shape, stream, params);
  };
  // A few rows, as a decode step has them, do not fill a GPU: each takes as many threads as there can be.
  constexpr int kThreads = SelectTraits::kThreads, kMostThreads = 1024;
  constexpr int64_t kFewRows = 128;
  if (params.tile_use == TileUse::kCut) {
    return launch(block_lists_kernel<kThreads, true>, kThreads);
  }
  return params.num_blocks <= kFewRows ? launch(block_lists_kernel<kMostThreads, false>, kMostThreads)
                                       : launch(block_lists_kernel<kThreads, false>, kThreads);
}

}  // namespace htree::tree_attention
