// The choice of an index for a few rows, in one launch (sm_90): a cluster takes a row and index head. Its blocks divide the
// sequence, score their own blocks of r tokens, and choose the best of each layer among their own; one block chooses
// among those. Keys and places stay in shared memory. docs/semantics/tree_cache.md §7.7
#include "device/divmod.cuh"
#include "device/sm90/cluster_memory.cuh"
#include "device/sm90/pdl.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/selection/cuda/any/row_choice.cuh"
#include "ops/selection/cuda/any/select_topk.cuh"
#include "ops/tree_cache/index/index_product.cuh"
#include "ops/tree_cache/rows.cuh"

namespace htree::tree_cache {
namespace {

using tree_attention::SelectTraits;
using tree_attention::WordRanks;
using Choice = tree_attention::RowChoice<kChoiceThreads>;

constexpr int kLanes = 1 << kChoiceRateLog2;  // of a block of r tokens
constexpr int kUnitsAtOnce = 4;               // of a lane
constexpr uint32_t kUnitGroups = kChoiceThreads / kLanes;

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
  uint32_t* gathered;
  Choice::Shared& shared;

  // `units` of all layers lie behind one another, from layer 0 on.
  __device__ __forceinline__ LayerShare layer(int layer) const {
    const int cluster = params.plan.cluster, chooses = walk.query.top;
    const int units = walk.query.token / kLanes + 1, align = 1 << (kChoiceRateLog2 * (chooses - 1));
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
    const int kv_heads = static_cast<int>(params.call.layout.num_kv_heads), each = kv_heads / params.index.heads;
    int32_t* list = own_list(params.call, walk, layer);
    list += (walk.head * each - walk.head) * top_k();
    for (int head = 0; head < each; ++head) {
      list[head * top_k() + i] = block;
    }
  }
};

// A chunk of 16 bytes of an index key as numbers, at `query` products with it added to the sum.
template <typename Key>
__device__ __forceinline__ float add_chunk(const uint4& chunk, const float* query, float sum) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  if constexpr (std::is_same_v<Key, IndexCode>) {
#pragma unroll
    for (int e = 0; e < 16; e += 2) {
      const float2 pair = device::decode_e4m3x2(static_cast<uint16_t>(words[e / 4] >> e % 4 * 8));
      sum = fmaf(pair.x, query[e], sum);
      sum = fmaf(pair.y, query[e + 1], sum);
    }
  } else {
    const auto& pack = reinterpret_cast<const device::Pack<Key, 8>&>(words);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sum = fmaf(device::to_acc(pack[e]), query[e], sum);
    }
  }
  return sum;
}

// Fills the keys of this block's units: products as index_product() has them. The diagonal unit stands above all.
template <typename Key>
__device__ __forceinline__ void score_units(const ChoiceBlock<Key>& block, const float* query) {
  constexpr int kChunk = 16 / sizeof(Key);
  const auto& index = block.params.index;
  const PageLayout& layout = block.params.call.layout;
  const int32_t* table = block.params.call.sequences.block_table +
                         static_cast<int64_t>(block.walk.query.sequence) * layout.max_pages;
  const LayerShare units = block.layer(0);
  const int diagonal = units.num - 1;
  const int group = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int first = group; first - group < units.own; first += kUnitsAtOnce * kUnitGroups) {
    const Key* keys[kUnitsAtOnce];
    float sum[kUnitsAtOnce] = {}, scale[kUnitsAtOnce];
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) {
      const int at = first + i * static_cast<int>(kUnitGroups), unit = units.first + at;
      keys[i] = nullptr;
      if (at < units.own && unit < diagonal) {
        const uint32_t token = static_cast<uint32_t>(unit * kLanes + lane);
        const uint32_t place = block.page_size.quotient(token), page = static_cast<uint32_t>(table[place]);
        const int64_t row = (int64_t{page} * index.heads + block.walk.head) * layout.page_size +
                            block.page_size.remainder(token, place);
        if (page < layout.num_pages) {
          keys[i] = index.keys + row * index.d;
          if constexpr (std::is_same_v<Key, IndexCode>) {
            scale[i] = scale_value(index.scales[row]);
          }
        }
      }
    }
    for (int d = 0; d < index.d; d += 2 * kChunk) {
      uint4 chunks[kUnitsAtOnce][2];
#pragma unroll
      for (int i = 0; i < kUnitsAtOnce; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          chunks[i][c] = make_uint4(0, 0, 0, 0);
          if (keys[i] != nullptr && d + c * kChunk < index.d) {
            chunks[i][c] = *reinterpret_cast<const uint4*>(keys[i] + d + c * kChunk);
          }
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (d + c * kChunk < index.d) {
#pragma unroll
          for (int i = 0; i < kUnitsAtOnce; ++i) {
            sum[i] = add_chunk<Key>(chunks[i][c], query + d + c * kChunk, sum[i]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) {
      if constexpr (std::is_same_v<Key, IndexCode>) {
        sum[i] *= scale[i];
      }
      float best = fmaxf(keys[i] == nullptr ? device::negative_infinity<float>() : sum[i],
                         device::negative_infinity<float>());  // NaN loses
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        best = fmaxf(best, __shfl_xor_sync(device::kFullMask, best, offset));
      }
      const int at = first + i * static_cast<int>(kUnitGroups);
      if (lane == 0 && at < units.own) {
        block.keys[at] = units.first + at == diagonal ? SelectTraits::kRightmost
                                                      : tree_attention::key_of_score(best + 0.0f);
      }
    }
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
      for (int child = i * kLanes; child < min((i + 1) * kLanes, below); ++child) {
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

template <typename Key>
__device__ __forceinline__ void choose_row(const ChoiceBlock<Key>& block, const float* query) {
  const int cluster = block.params.plan.cluster, top = block.walk.query.top, most = block.top_k();
  score_units(block, query);
  __syncthreads();
  raise_keys(block);
  if (cluster > 1) {
    device::cluster_wait();  // the other blocks have begun
  }
  uint32_t* keys = block.keys;
  for (int layer = 0; layer < top; ++layer) {
    const LayerShare share = block.layer(layer);
    const auto chooser = static_cast<uint32_t>(layer % cluster);
    const int before = share.chosen_before(block.rank, most);
    choose_best(block, keys, share.own, most, [&](int rank, int place) {
      if (cluster == 1) {
        block.write(layer, rank, place);
        return;
      }
      device::store_to_block(block.gathered_keys(layer) + before + rank, chooser, keys[place]);
      device::store_to_block(block.gathered_places(layer) + before + rank, chooser,
                             static_cast<uint32_t>(share.first + place));
    });
    keys += share.own;
  }
  if (cluster > 1) {
    device::cluster_sync();
  }
  for (int layer = block.rank; layer < top; layer += cluster) {
    const LayerShare share = block.layer(layer);
    const int taken = min(share.num, most);
    if (cluster > 1) {
      choose_best(block, block.gathered_keys(layer), share.chosen_before(cluster, most), most,
                  [&](int rank, int i) {
                    block.write(layer, rank, static_cast<int32_t>(block.gathered_places(layer)[i]));
                  });
    }
    for (int i = taken + static_cast<int>(threadIdx.x); i < most; i += kChoiceThreads) {
      block.write(layer, i, -1);
    }
  }
}

// Cluster (row of the chunk and index head).
template <typename Key>
__global__ void __launch_bounds__(kChoiceThreads)
    choose_blocks_kernel(const __grid_constant__ IndexChoiceParams<Key> params,
                         const __grid_constant__ device::FastDivisor page_size) {
#if HTREE_SM90A
  __shared__ Choice::Shared shared;
  __shared__ __align__(16) float query[kMostIndexDim];
  extern __shared__ __align__(16) uint8_t dynamic[];
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
                            .gathered = reinterpret_cast<uint32_t*>(dynamic + params.plan.gathered),
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
  if (cluster > 1) {
    __syncwarp();
    device::cluster_arrive_relaxed();
  }
  load_index_query<kChoiceThreads>(params.index, block.walk.row, block.walk.head, query);
  __syncthreads();
  choose_row(block, query);
#endif
}

}  // namespace

template <typename Key>
cudaError_t launch_index_choice(const IndexChoiceParams<Key>& params, cudaStream_t stream) {
  const int64_t rows = params.call.chunk.num * params.index.heads;
  return launch_kernel(choose_blocks_kernel<Key>,
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
