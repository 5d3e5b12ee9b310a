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

// The largest of a block's units; -0 becomes +0.
__device__ __forceinline__ float block_score(const float* units, int64_t block, int32_t units_of_block) {
  const float* own = units + block * units_of_block;
  if (units_of_block == 1) {
    return *own + 0.0f;
  }
  float best = device::negative_infinity<float>();
  int32_t i = 0;
  if (units_of_block % 4 == 0) {  // rows of scores begin at whole tiles of units
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

// The keys of a long row that can be among the chosen, in their order.
template <int kThreads>
constexpr int kGroups = kFilteredKeys / kThreads;  // of a thread's keys
struct FilteredRow {
  static constexpr int kMost = static_cast<int>(kFilteredKeys);
  uint32_t keys[kMost];  // first the largest of each group
  int32_t places[kMost];
};
static_assert(sizeof(FilteredRow) == kFilteredKeys * 8);

// The groups of a row that `count` keys are chosen of: those of a thread are one where that leaves twice as many as are
// chosen.
template <int kThreads>
__device__ __forceinline__ int num_groups(uint32_t count) {
  return 2 * count <= kThreads ? kThreads : FilteredRow::kMost;
}

// As many groups as are chosen hold a key from the `count`-th largest of their largest keys on, so no smaller key is
// chosen. Returns how many others there are, at least `count`; where they are more than kMost, `filtered` does not hold
// them. All threads must call. Ends with a __syncthreads.
template <int kThreads>
__device__ __forceinline__ int filter_row(const RowChoice<kThreads>& row,
                                          const uint32_t (&largest)[kGroups<kThreads>], uint32_t count,
                                          FilteredRow& filtered) {
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
  const device::Threshold threshold =
      RowChoice<kThreads>{filtered.keys, row.words, groups, row.shared}.threshold(count);
  const uint32_t least = threshold.key + (threshold.equal == 0 ? 1 : 0);
  const int words = (row.num + 31) / 32;
  for (int place = threadIdx.x; place < words * 32; place += kThreads) {
    const unsigned kept = __ballot_sync(device::kFullMask, place < row.num && row.keys[place] >= least);
    if (threadIdx.x % 32 == 0) {
      row.words[place / 32].larger = kept;
    }
  }
  __syncthreads();
  uint32_t before = 0;
  for (int tile = 0; tile < words; tile += kThreads) {
    const int word = tile + static_cast<int>(threadIdx.x);
    uint32_t bits = word < words ? row.words[word].larger : 0, total;
    uint32_t at = before + device::block_exclusive_sum<kThreads>(__popc(bits), row.shared.sums, total);
    for (; bits != 0 && at < FilteredRow::kMost; bits &= bits - 1, ++at) {
      filtered.places[at] = word * 32 + __ffs(bits) - 1;
      filtered.keys[at] = row.keys[filtered.places[at]];
    }
    before += total;
  }
  __syncthreads();
  return static_cast<int>(before);
}

// Fills the keys of a row. A thread's groups are neighbouring places, from tile to tile of kFilteredKeys.
template <int kThreads>
__device__ __forceinline__ void fill_keys(const BlockOptions& options, const float* units,
                                          int32_t units_of_block, int32_t diagonal,
                                          const RowChoice<kThreads>& row,
                                          uint32_t (&largest)[kGroups<kThreads>]) {
  constexpr int kOwn = kGroups<kThreads>;
  const bool aligned = reinterpret_cast<uintptr_t>(row.keys) % sizeof(uint4) == 0;
  const auto key_at = [&](int b) {
    return block_is_forced(options, b, diagonal) ? SelectTraits::kRightmost
                                                 : key_of_score(block_score(units, b, units_of_block));
  };
  // Blocks of one unit that nothing forces: their scores lie side by side, at whole tiles of four.
  const int64_t begin = options.first, end = units_of_block == 1 ? diagonal + 1 - options.local : 0;
  for (int first = kOwn * static_cast<int>(threadIdx.x); first < row.num; first += kOwn * kThreads) {
    uint32_t keys[kOwn] = {};
    if (kOwn == 4 && first >= begin && first + kOwn <= end) {
      const float4 scores = *reinterpret_cast<const float4*>(units + first);
      const float four[4] = {scores.x, scores.y, scores.z, scores.w};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        keys[i] = key_of_score(four[i] + 0.0f);  // -0 becomes +0
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        keys[i] = first + i < row.num ? key_at(first + i) : 0;
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

struct ListRow {
  int32_t* blocks;
  float* scores;  // null where nobody asks for them
};

template <int kThreads>
__device__ __forceinline__ void choose_row(const BlockListParams& params, const float* units,
                                           int32_t diagonal, const ListRow& list,
                                           const RowChoice<kThreads>& row, FilteredRow& filtered) {
  const BlockOptions& options = params.options;
  const int32_t units_of_block = params.chunk.block_size / params.chunk.unit;
  const int taken = static_cast<int>(min(static_cast<int64_t>(row.num), options.count));
  const auto emit = [&](int rank, int b) {
    list.blocks[rank] = b;
    if (list.scores != nullptr) {
      list.scores[rank] = block_is_forced(options, b, diagonal) ? -device::negative_infinity<float>()
                                                                : block_score(units, b, units_of_block);
    }
  };
  if (row.num > options.count) {
    uint32_t largest[kGroups<kThreads>] = {};
    fill_keys<kThreads>(options, units, units_of_block, diagonal, row, largest);
    __syncthreads();
    // One that is best but for the diagonal block has no block behind it.
    const int64_t best = best_blocks(options, row.num);
    const auto count = static_cast<uint32_t>(taken);
    if (best > 1) {
      row.raise_neighbours(row.threshold(static_cast<uint32_t>(best)), SelectTraits::kBest,
                           SelectTraits::kNeighbour);
    } else if (const int groups = num_groups<kThreads>(count); row.num > 2 * groups && taken < groups) {
      const int kept = filter_row(row, largest, count, filtered);
      if (kept <= FilteredRow::kMost) {
        const RowChoice<kThreads> few{filtered.keys, row.words, kept, row.shared};
        few.choose(kept > taken ? few.threshold(count) : device::Threshold{0, 0},
                   [&](int rank, int i) { emit(rank, filtered.places[i]); });
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
template <int kThreads>
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
    choose_row<kThreads>(params, score_row(chunk, head, slot), diagonal, list,
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
  return params.num_blocks <= kFewRows ? launch(block_lists_kernel<kMostThreads>, kMostThreads)
                                       : launch(block_lists_kernel<kThreads>, kThreads);
}

}  // namespace htree::tree_attention
