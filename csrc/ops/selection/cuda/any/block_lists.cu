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

// Keys order as scores do, which are never NaN; above that of +inf there is room for what is forced or raised.
__device__ __forceinline__ uint32_t key_of_score(float score) {
  const uint32_t bits = __float_as_uint(score);
  return bits >> 31 != 0 ? ~bits : bits | 1u << 31;
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

using Choice = RowChoice<SelectTraits::kThreads>;

struct ListRow {
  int32_t* blocks;
  float* scores;  // null where nobody asks for them
};

__device__ __forceinline__ void choose_row(const BlockListParams& params, const float* units,
                                           int32_t diagonal, const ListRow& list, const Choice& row) {
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
    for (int b = threadIdx.x; b < row.num; b += SelectTraits::kThreads) {
      row.keys[b] = block_is_forced(options, b, diagonal)
                        ? SelectTraits::kRightmost
                        : key_of_score(block_score(units, b, units_of_block));
    }
    __syncthreads();
    // One that is best but for the diagonal block has no block behind it.
    if (const int64_t best = best_blocks(options, row.num); best > 1) {
      row.raise_neighbours(row.threshold(static_cast<uint32_t>(best)), SelectTraits::kBest,
                           SelectTraits::kNeighbour);
    }
    row.choose(row.threshold(static_cast<uint32_t>(taken)), emit);
  } else {
    for (int b = threadIdx.x; b < row.num; b += SelectTraits::kThreads) {
      emit(b, b);
    }
  }
  for (int64_t i = taken + threadIdx.x; i < options.count; i += SelectTraits::kThreads) {
    list.blocks[i] = -1;
    if (list.scores != nullptr) {
      list.scores[i] = device::negative_infinity<float>();
    }
  }
}

// Grid: thread blocks take rows (slot, head) in turns; the heads of a slot lie side by side in the lists.
__global__ void __launch_bounds__(SelectTraits::kThreads) block_lists_kernel(const BlockListParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ Choice::Shared shared;
  const BlockChunk& chunk = params.chunk;
  auto* words = reinterpret_cast<WordRanks*>(shared_bytes);
  uint32_t* keys = params.keys == nullptr
                       ? reinterpret_cast<uint32_t*>(words + (params.key_capacity + 31) / 32)
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
    const int64_t place =
        ((document.list_row + static_cast<int64_t>(leader) * params.row_step) * params.heads +
         chunk.first_head + head) *
        params.options.count;
    const ListRow list{params.blocks + place, params.scores == nullptr ? nullptr : params.scores + place};
    if (document.broken) {
      for (int64_t i = threadIdx.x; i < params.options.count; i += SelectTraits::kThreads) {
        list.blocks[i] = -1;
        if (list.scores != nullptr) {
          list.scores[i] = __int_as_float(0x7fc00000);  // NaN
        }
      }
      continue;
    }
    const int32_t diagonal = diagonal_block(chunk, document, leader);
    choose_row(params, score_row(chunk, head, slot), diagonal, list, {keys, words, diagonal + 1, shared});
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_block_documents(const BlockDocumentParams& params, cudaStream_t stream) {
  return launch_kernel(block_documents_kernel, {.grid = 1, .threads = kTableThreads}, stream, params);
}

cudaError_t launch_block_lists(const BlockListParams& params, cudaStream_t stream) {
  const LaunchShape shape{.grid = static_cast<unsigned>(params.num_blocks),
                          .threads = SelectTraits::kThreads,
                          .shared_bytes = row_shared_bytes(params.key_capacity, params.keys == nullptr)};
  return launch_kernel(block_lists_kernel, shape, stream, params);
}

}  // namespace htree::tree_attention
