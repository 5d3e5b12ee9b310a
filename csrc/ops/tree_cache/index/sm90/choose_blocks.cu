// The choice of an index for a few rows, in one launch (sm_90): a cluster takes a row and index head. Its blocks divide the
// sequence, score their own blocks of r tokens, and choose the best of each layer among their own; one block chooses
// among those. Keys and places stay in shared memory. docs/semantics/tree_cache.md §7.7
#include "device/divmod.cuh"
#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/sm90/cluster_memory.cuh"
#include "device/sm90/pdl.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/selection/cuda/any/row_choice.cuh"
#include "ops/selection/cuda/any/select_topk.cuh"
#include "ops/tree_cache/index/coded_row.h"
#include "ops/tree_cache/index/index_params.h"
#include "ops/tree_cache/rows.cuh"

namespace htree::tree_cache {
namespace {

using tree_attention::SelectTraits;
using tree_attention::WordRanks;
using Choice = tree_attention::RowChoice<kChoiceThreads>;

constexpr int kUnit = 1 << kChoiceRateLog2;  // tokens of a unit

// The blocks of a layer among which a row chooses, and those of this block of the cluster. Units are blocks of r tokens.
struct LayerShare {
  int num;    // up to the diagonal one
  int share;  // of a block of the cluster
  int first;  // of this one
  int own;

  // How many are chosen here of a layer: at most `most` of those of each of the first `ranks` blocks.
  __device__ __forceinline__ int chosen_before(int ranks, int most) const {
    const int full = min(num / share, ranks), rest = full < ranks ? num - full * share : 0;
    return full * min(share, most) + min(rest, most);
  }
};

template <typename Key>
struct ChoiceBlock {
  const IndexChoiceParams<Key>& params;
  const device::FastDivisor& page_size;
  WalkRow walk;  // head is the index head
  int rank;
  uint32_t* keys;
  WordRanks* words;
  uint32_t* gathered;  // in the place of the rings
  Choice::Shared& shared;

  // Keys of all layers lie behind one another, from layer 0 on.
  __device__ __forceinline__ LayerShare layer(int layer) const {
    const int cluster = params.plan.cluster, chooses = walk.query.top;
    const int units = walk.query.token / kUnit + 1,
              align = max(kStageUnits, 1 << (kChoiceRateLog2 * (chooses - 1)));
    const int share = ((units + cluster - 1) / cluster + align - 1) / align * align;
    const int shift = kChoiceRateLog2 * layer;
    LayerShare found;
    found.num = ((units - 1) >> shift) + 1;
    found.share = share >> shift;
    found.first = rank * found.share;
    found.own = max(0, min(found.share, found.num - found.first));
    return found;
  }
  __device__ __forceinline__ int top_k() const { return params.call.options.top_k; }
  // Of `layer` in the block of the cluster that chooses in the end.
  __device__ __forceinline__ uint32_t* gathered_keys(int layer) const {
    return gathered + 2 * layer * params.plan.cluster * top_k();
  }
  __device__ __forceinline__ uint32_t* gathered_places(int layer) const {
    return gathered_keys(layer) + params.plan.cluster * top_k();
  }
  // Entry `i` of the list of a layer, for all K/V heads of the index head.
  __device__ __forceinline__ void write(int layer, int i, int32_t block) const {
    const int kv_heads = static_cast<int>(params.call.layout.num_kv_heads),
              each = kv_heads / params.index.heads;
    int32_t* list = own_list(params.call, walk, layer);
    list += (walk.head * each - walk.head) * top_k();
    for (int head = 0; head < each; ++head) {
      list[head * top_k() + i] = block;
    }
  }
};

// The products of tensor cores take 16 tokens, those of a unit, with the query in all eight columns. Of each 32 channels lane
// 4 g + t has the eight from 8 t on of tokens g and g + 8, so that it loads them at once; the order of channels is the same
// for queries.
constexpr int kChannels = 32, kOwnChannels = 8, kMostChunks = kMostIndexDim / kChannels;

// Rows of kDims channels, or of any number where kDims is 0. The usual number has instructions of its own: they are a
// quarter fewer for each token, and nobody has fetched them before.
constexpr int kUsualDims = 32;
template <int kDims>
constexpr int kChunksOf = kDims > 0 ? kDims / kChannels : kMostChunks;

// Codes are exact in fp16.
template <typename Key>
using Factor = std::conditional_t<std::is_same_v<Key, IndexCode>, __half, Key>;

// A lane's channels of the query, as factors of products. Beside codes they are fp16 numbers times a power of two that takes
// the largest to 2^6: what is rounded is below 2^-30 of that one.
template <typename Key, int kDims>
struct QueryFactors {
  uint32_t pairs[kChunksOf<kDims>][kOwnChannels / 2];
  float undone = 1.0f;  // the inverse of that power

  __device__ __forceinline__ QueryFactors(const IndexRows<Key>& index, int64_t row, int head) {
    const auto* given = index.query + row * index.query_row + head * index.query_head;
    const int begin = static_cast<int>(threadIdx.x % 4) * kOwnChannels;
    float numbers[kChunksOf<kDims>][kOwnChannels], largest = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunksOf<kDims>; ++c) {
#pragma unroll
      for (int e = 0; e < kOwnChannels; ++e) {
        const int channel = c * kChannels + begin + e;
        numbers[c][e] = kDims > 0 || channel < index.d ? device::to_acc(given[channel]) : 0.0f;
        largest = fmaxf(largest, fabsf(numbers[c][e]));
      }
    }
    float factor = 1.0f;
    if constexpr (std::is_same_v<Key, IndexCode>) {
      largest = fmaxf(largest, __shfl_xor_sync(device::kFullMask, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(device::kFullMask, largest, 2));
      constexpr int kLeast = -100;
      const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, kLeast), 127);
      factor = scale_value(static_cast<uint8_t>(127 + 6 - exponent));
      undone = scale_value(static_cast<uint8_t>(127 - 6 + exponent));
    }
#pragma unroll
    for (int c = 0; c < kChunksOf<kDims>; ++c) {
#pragma unroll
      for (int e = 0; e < kOwnChannels; e += 2) {
        pairs[c][e / 2] = device::pack_pair<Factor<Key>>(numbers[c][e] * factor, numbers[c][e + 1] * factor);
      }
    }
  }
};

// A lane's channels of a token as they lie in the page, and as factors of products.
template <typename Key>
using RawChannels = std::conditional_t<sizeof(Key) == 1, uint2, uint4>;

__device__ __forceinline__ void to_factors(const uint2& codes, uint32_t (&pairs)[kOwnChannels / 2]) {
  const uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
  for (int i = 0; i < kOwnChannels / 2; ++i) {
    const __half2_raw halves =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16), __NV_E4M3);
    pairs[i] = reinterpret_cast<const uint32_t&>(halves);
  }
}
__device__ __forceinline__ void to_factors(const uint4& numbers, uint32_t (&pairs)[kOwnChannels / 2]) {
  pairs[0] = numbers.x;
  pairs[1] = numbers.y;
  pairs[2] = numbers.z;
  pairs[3] = numbers.w;
}

// The largest of `values` of four units over the tokens of a lane's group of four lanes: lane 4 g + t returns that of unit t.
__device__ __forceinline__ float largest_of_units(const float (&values)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, upper = (threadIdx.x & 2) != 0;
  const float first = odd ? values[1] : values[0], second = odd ? values[3] : values[2];
  float best = upper ? second : first;
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    best = fmaxf(best, __shfl_xor_sync(device::kFullMask, best, offset));
  }
  return best;
}

// What a warp scores at a time, in its ring in shared memory: index keys of some units, and behind them their scales.
struct alignas(128) ChoiceStage {
  uint8_t keys[kStageKeyBytes];
  uint8_t scales[kStageUnits * kUnit];
};
static_assert(sizeof(ChoiceStage) == kStageBytes);

// The units of this block that a warp has in its turns: those from `first` on, in steps of all warps.
template <typename Key, int kDims>
struct WarpUnits {
  const ChoiceBlock<Key>& block;
  LayerShare units;
  int at_once;  // of a stage
  int first;
  int lane;

  __device__ __forceinline__ WarpUnits(const ChoiceBlock<Key>& of) : block(of), units(of.layer(0)) {
    at_once = block.params.plan.units;
    first = static_cast<int>(threadIdx.x) / 32 * at_once;
    lane = static_cast<int>(threadIdx.x) % 32;
  }
  __device__ __forceinline__ int begin(int turn) const { return first + turn * kChoiceWarps * at_once; }
  __device__ __forceinline__ bool has(int turn) const { return begin(turn) < units.own; }

  // Units of a run lie side by side in a page, so that one look into the table finds them. For run `lane` of a turn: its first
  // unit of the pool, -1 where the table has no page of the pool. A run behind the diagonal unit is that one's.
  __device__ __forceinline__ int64_t find(int turn) const {
    const PageLayout& layout = block.params.call.layout;
    const int32_t* table = block.params.call.sequences.block_table +
                           static_cast<int64_t>(block.walk.query.sequence) * layout.max_pages;
    const int run = block.params.plan.run, unit = units.first + begin(turn) + lane * run;
    const auto start = static_cast<uint32_t>((min(unit, units.num - 1) & -run) * kUnit);
    const uint32_t place = block.page_size.quotient(start), page = static_cast<uint32_t>(table[place]);
    const int64_t rows = (int64_t{page} * block.params.index.heads + block.walk.head) * layout.page_size;
    return page < layout.num_pages ? (rows + block.page_size.remainder(start, place)) / kUnit : -1;
  }

  // All lanes: starts the copies of a turn whose runs are at `place`. What is not there is copied from the pool's first page.
  // Returns a bit for each run that is there.
  __device__ __forceinline__ uint32_t load(int64_t place, ChoiceStage& stage,
                                           device::Barrier* barrier) const {
    const auto& index = block.params.index;
    const uint32_t unit_bytes = kUnit * (kDims > 0 ? kDims : index.d) * sizeof(Key),
                   scale_bytes = sizeof(Key) == 1 ? kUnit : 0;
    const int run = block.params.plan.run;
    if (lane == 0) {
      device::barrier_arrive_expect(barrier, at_once * (unit_bytes + scale_bytes));
    }
    __syncwarp();
    if (lane * run < at_once) {
      const int64_t from = max(place, int64_t{0});
      device::bulk_load(stage.keys + lane * run * unit_bytes,
                        reinterpret_cast<const uint8_t*>(index.keys) + from * unit_bytes, run * unit_bytes,
                        barrier);
      if constexpr (sizeof(Key) == 1) {
        device::bulk_load(stage.scales + lane * run * kUnit, index.scales + from * kUnit, run * kUnit,
                          barrier);
      }
    }
    return __ballot_sync(device::kFullMask, place >= 0);
  }
};

// Scores the units [quad, quad + 4) of a stage, those that it has: lane t of the first four returns that of unit quad + t.
template <typename Key, int kDims>
__device__ __forceinline__ float score_quad(const QueryFactors<Key, kDims>& query, const ChoiceStage& stage,
                                            int quad, int num, int given_d) {
  const int d = kDims > 0 ? kDims : given_d;
  // A stage has whole quads of the usual rows.
  const auto unit_of = [&](int i) { return kDims > 0 ? quad + i : min(quad + i, num - 1); };
  const int token = static_cast<int>(threadIdx.x) % 32 / 4,
            begin = static_cast<int>(threadIdx.x) % 4 * kOwnChannels;
  float sums[4][4] = {};
#pragma unroll
  for (int c = 0; c < kChunksOf<kDims>; ++c) {
    if (c * kChannels < d) {
      const bool has =
          kDims > 0 || c * kChannels + begin < d;  // half of the lanes have none of the last 16 channels
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto* keys = reinterpret_cast<const Key*>(stage.keys) + (unit_of(i) * kUnit + token) * d +
                           (has ? c * kChannels + begin : 0);
        RawChannels<Key> raw[2] = {*reinterpret_cast<const RawChannels<Key>*>(keys),
                                   *reinterpret_cast<const RawChannels<Key>*>(keys + 8 * d)};
        uint32_t tokens[2][kOwnChannels / 2];
        to_factors(has ? raw[0] : RawChannels<Key>{}, tokens[0]);
        to_factors(has ? raw[1] : RawChannels<Key>{}, tokens[1]);
#pragma unroll
        for (int step = 0; step < 4; step += 2) {
          device::mma_16x8x16<Factor<Key>>(
              sums[i], {tokens[0][step], tokens[1][step], tokens[0][step + 1], tokens[1][step + 1]},
              query.pairs[c][step], query.pairs[c][step + 1]);
        }
      }
    }
  }
  float best[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float products[2] = {sums[i][0], sums[i][2]};
    if constexpr (sizeof(Key) == 1) {
      const uint8_t* scales = stage.scales + unit_of(i) * kUnit + token;
      products[0] *= scale_value(scales[0]);
      products[1] *= scale_value(scales[8]);
    }
    best[i] = fmaxf(products[0], products[1]);
  }
  // NaN loses.
  return fmaxf(largest_of_units(best) * query.undone, device::negative_infinity<float>());
}

// Fills the keys of this block's units. The diagonal unit stands above all.
template <int kDims, typename Key>
__device__ __forceinline__ void score_units(const ChoiceBlock<Key>& block, ChoiceStage* ring,
                                            device::Barrier* barriers) {
  static_assert(kChoiceStages == 2);
  const WarpUnits<Key, kDims> units(block);
  const int lane = units.lane, diagonal = units.units.num - 1, run_log2 = __ffs(block.params.plan.run) - 1;
  uint32_t found[2] = {};  // the runs of this turn and of the next
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    if (units.has(turn)) {
      found[turn] = units.load(units.find(turn), ring[turn], &barriers[turn]);
    }
  }
  const QueryFactors<Key, kDims> query(block.params.index, block.walk.row, block.walk.head);
  for (int turn = 0; units.has(turn); ++turn) {
    const bool goes_on = units.has(turn + 2);
    const int64_t ahead = goes_on ? units.find(turn + 2) : -1;  // on its way while this turn is scored
    const int stage = turn % 2, at = units.begin(turn);
    device::barrier_wait(&barriers[stage], turn / 2 % 2);
    for (int quad = 0; quad < units.at_once; quad += 4) {
      const float best = score_quad(query, ring[stage], quad, units.at_once, block.params.index.d);
      const int in_turn = quad + lane, own = at + in_turn;
      if (lane < 4 && in_turn < units.at_once && own < units.units.own) {
        const bool there = (found[0] >> (in_turn >> run_log2) & 1) != 0;
        block.keys[own] =
            units.units.first + own == diagonal
                ? SelectTraits::kRightmost
                : tree_attention::key_of_score((there ? best : device::negative_infinity<float>()) + 0.0f);
      }
    }
    __syncwarp();
    found[0] = found[1];
    found[1] = goes_on ? units.load(ahead, ring[stage], &barriers[stage]) : 0;
  }
}

// The keys of the layers above: each is the largest of its r children, of which the last may have fewer.
template <typename Key>
__device__ __forceinline__ void raise_keys(const ChoiceBlock<Key>& block) {
  uint32_t* children = block.keys;
  for (int layer = 1; layer < block.walk.query.top; ++layer) {
    const int below = block.layer(layer - 1).own, own = block.layer(layer).own;
    uint32_t* keys = children + below;
    for (int i = threadIdx.x; i < own; i += kChoiceThreads) {
      uint32_t best = 0;
      for (int child = i * kUnit; child < min((i + 1) * kUnit, below); ++child) {
        best = max(best, children[child]);
      }
      keys[i] = best;
    }
    __syncthreads();
    children = keys;
  }
}

// Calls emit(rank, place) for the `most` best keys in the order of their places. Ends with a __syncthreads.
template <typename Key, typename Emit>
__device__ __forceinline__ void choose_best(const ChoiceBlock<Key>& block, uint32_t* keys, int num, int most,
                                            Emit&& emit) {
  if (num > most) {
    const Choice row{keys, block.words, num, block.shared};
    row.choose(row.threshold(static_cast<uint32_t>(most)), emit);
    return;
  }
  for (int i = threadIdx.x; i < num; i += kChoiceThreads) {
    emit(i, i);
  }
  __syncthreads();
}

// The lists from the row's top upwards, which open every node or say nothing.
template <typename Key>
__device__ __forceinline__ void write_top_lists(const ChoiceBlock<Key>& block) {
  const PageLayout& layout = block.params.call.layout;
  for (int layer = block.walk.query.top; layer < static_cast<int>(layout.num_layers); ++layer) {
    const int opened = static_cast<int>(block.walk.query.token / layout.tokens[layer] / layout.rate + 1);
    const int count = block.params.call.options.open_top ? 0 : opened;
    for (int i = threadIdx.x; i < block.top_k(); i += kChoiceThreads) {
      block.write(layer, i, i < count ? i : -1);
    }
  }
}

// Among the keys of this block, then one block among those that all blocks chose: of every layer another one. One loop, so
// that both pass through the same instructions, which nobody else has fetched before.
template <typename Key>
__device__ __forceinline__ void choose_row(const ChoiceBlock<Key>& block) {
  const int cluster = block.params.plan.cluster, top = block.walk.query.top, most = block.top_k();
  uint32_t* keys = block.keys;
#pragma unroll 1
  for (int turn = 0; turn < (cluster > 1 ? 2 : 1) * top; ++turn) {
    const bool gathered = turn >= top, ends = gathered || cluster == 1;
    const int layer = gathered ? turn - top : turn;
    if (turn == top) {
      device::cluster_sync();
    }
    if (gathered && layer % cluster != block.rank) {
      continue;
    }
    const LayerShare share = block.layer(layer);
    const int num = gathered ? share.chosen_before(cluster, most) : share.own;
    const int before = share.chosen_before(block.rank, most);
    choose_best(block, gathered ? block.gathered_keys(layer) : keys, num, most, [&](int rank, int i) {
      const int32_t place =
          gathered ? static_cast<int32_t>(block.gathered_places(layer)[i]) : share.first + i;
      if (ends) {
        block.write(layer, rank, place);
        return;
      }
      const auto chooser = static_cast<uint32_t>(layer % cluster);
      device::store_to_block(block.gathered_keys(layer) + before + rank, chooser, keys[i]);
      device::store_to_block(block.gathered_places(layer) + before + rank, chooser,
                             static_cast<uint32_t>(place));
    });
    for (int i = min(share.num, most) + static_cast<int>(threadIdx.x); ends && i < most;
         i += kChoiceThreads) {
      block.write(layer, i, -1);
    }
    keys += share.own;
  }
}

// Cluster (row of the chunk and index head).
template <typename Key, int kDims>
__global__ void __launch_bounds__(kChoiceThreads)
    choose_blocks_kernel(const __grid_constant__ IndexChoiceParams<Key> params,
                         const __grid_constant__ device::FastDivisor page_size) {
#if HTREE_SM90A
  __shared__ Choice::Shared shared;
  __shared__ device::Barrier barriers[kChoiceWarps][kChoiceStages];
  extern __shared__ __align__(128) uint8_t dynamic[];
  if (threadIdx.x == 0) {
    device::pdl_launch_dependents();
  }
  const int cluster = params.plan.cluster, heads = params.index.heads;
  const int64_t at = blockIdx.x / cluster, kv_heads = params.call.layout.num_kv_heads;
  ChoiceBlock<Key> block = {.params = params,
                            .page_size = page_size,
                            .walk = find_row<kChoiceThreads>(params.call, at / heads * kv_heads + at % heads),
                            .rank = static_cast<int>(blockIdx.x % cluster),
                            .keys = reinterpret_cast<uint32_t*>(dynamic),
                            .words = reinterpret_cast<WordRanks*>(dynamic + params.plan.words),
                            .gathered = reinterpret_cast<uint32_t*>(dynamic + params.plan.ring),
                            .shared = shared};
  if (!leads(block.walk)) {
    return;
  }
  if (block.rank == 0) {
    write_top_lists(block);
  }
  if (block.walk.query.top == 0) {
    return;
  }
  if (threadIdx.x < kChoiceWarps * kChoiceStages) {
    device::barrier_init(&barriers[0][0] + threadIdx.x, 1);
    device::fence_barrier_init();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  auto* ring = reinterpret_cast<ChoiceStage*>(dynamic + params.plan.ring) + warp * kChoiceStages;
  score_units<kDims>(block, ring, barriers[warp]);
  __syncthreads();
  raise_keys(block);
  if (cluster > 1) {  // the rings of all blocks are free for what they choose
    __syncwarp();
    device::cluster_arrive_relaxed();
    device::cluster_wait();
  }
  choose_row(block);
#endif
}

}  // namespace

template <typename Key>
cudaError_t launch_index_choice(const IndexChoiceParams<Key>& params, cudaStream_t stream) {
  const int64_t rows = params.call.chunk.num * params.index.heads;
  static_assert(kStageKeyBytes / (kUnit * kUsualDims * static_cast<int>(sizeof(Key))) >= 4);
  const auto kernel =
      params.index.d == kUsualDims ? choose_blocks_kernel<Key, kUsualDims> : choose_blocks_kernel<Key, 0>;
  return launch_kernel(kernel,
                       {.grid = static_cast<unsigned>(rows * params.plan.cluster),
                        .threads = kChoiceThreads,
                        .shared_bytes = params.plan.bytes,
                        .cluster = params.plan.cluster},
                       stream, params, device::FastDivisor(params.call.layout.page_size));
}

template cudaError_t launch_index_choice(const IndexChoiceParams<IndexCode>&, cudaStream_t);
template cudaError_t launch_index_choice(const IndexChoiceParams<__half>&, cudaStream_t);
template cudaError_t launch_index_choice(const IndexChoiceParams<__nv_bfloat16>&, cudaStream_t);

}  // namespace htree::tree_cache
