// The decode kernel: a cluster of blocks takes a row through all layers in one launch (sm_90a). Where a layer
// has to choose, the blocks exchange sums and importances through distributed shared memory (DSMEM).
#pragma once

#include "device/sm90/pdl.cuh"
#include "device/sm90/wgmma.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_cache/decode/sm90/scores.cuh"
#include "ops/tree_cache/decode/sm90/select.cuh"
#include "ops/tree_cache/decode/sm90/spans.cuh"
#include "ops/tree_cache/decode/sm90/values.cuh"

namespace htree::tree_cache {

// A row that is ignored is 0, one without lists NaN.
template <class Tr>
__device__ __forceinline__ void store_nothing(const DecodeBlock<Tr>& block) {
  using T = typename Tr::T;
  const auto& attend = block.attend();
  const bool ignored = block.walk.query.token < 0;
  const int64_t row = (block.walk.row * attend.layout.num_kv_heads + block.walk.head) * int64_t{attend.group};
  if (block.rank > 0) {
    return;
  }
  for (int i = threadIdx.x; i < attend.group * Tr::kDim; i += Tr::kThreads) {
    attend.out[row * Tr::kDim + i] = device::from_acc<T>(ignored ? 0.0f : nanf(""));
  }
  for (int head = threadIdx.x; head < attend.group; head += Tr::kThreads) {
    attend.lse[row + head] = ignored ? kNoScore : nanf("");
  }
}

// What a block reads of all shares to merge them, in the memory of its rings. A load of a warp from shared memory of
// others costs as many messages as it meets blocks, so a warp reads neighbouring numbers of few shares.
template <class Tr>
struct GatheredStates {
  static constexpr int kColumns = 128;  // at a time

  float max[kShares][Tr::kHeads];
  float sum[kShares][Tr::kHeads];
  float out[kShares][kColumns];
};

// Merges the states of all shares. The blocks of the cluster divide the columns of all heads.
template <class Tr>
__device__ __forceinline__ void store_row(const DecodeBlock<Tr>& block) {
  using T = typename Tr::T;
  using Gathered = GatheredStates<Tr>;
  static_assert(sizeof(Gathered) <= Tr::kWarps * kLeastStages * Tr::kStageBytes);
  const auto& attend = block.attend();
  auto& gathered = *reinterpret_cast<Gathered*>(block.dynamic + block.params.plan.places.ring);
  const int shares = block.params.plan.shares, cluster = block.params.plan.cluster;
  const int num = attend.group * Tr::kDim;
  const int each = (num / 4 + cluster - 1) / cluster * 4;
  const int begin = block.rank * each, end = min(begin + each, num);
  const int64_t row = (block.walk.row * attend.layout.num_kv_heads + block.walk.head) * int64_t{attend.group};
  for (int i = threadIdx.x; i < kShares * Tr::kHeads; i += Tr::kThreads) {
    const int share = i / Tr::kHeads, head = i % Tr::kHeads;
    const DecodeState<Tr>& state = block.states()[share % shares];
    gathered.max[share][head] = device::load_from_block(&state.max[head], share / shares);
    gathered.sum[share][head] = device::load_from_block(&state.sum[head], share / shares);
  }
  for (int first = begin; first < end; first += Gathered::kColumns) {
    const int columns = min(Gathered::kColumns, end - first), quads = columns / 4;
    for (int i = threadIdx.x; i < kShares * quads; i += Tr::kThreads) {
      const int share = i / quads, column = i % quads * 4;
      const int head = (first + column) / Tr::kDim;
      const float* from = &block.states()[share % shares].out[head][(first + column) % Tr::kDim];
      *reinterpret_cast<float4*>(&gathered.out[share][column]) =
          device::load_from_block(reinterpret_cast<const float4*>(from), share / shares);
    }
    __syncthreads();
    if (const int column = threadIdx.x; column < columns) {
      const int head = (first + column) / Tr::kDim;
      float top = kNoScore;
#pragma unroll
      for (int share = 0; share < kShares; ++share) {
        top = fmaxf(top, gathered.max[share][head]);
      }
      const float base = top == kNoScore ? 0.0f : top;
      float total = 0.0f, value = 0.0f;
#pragma unroll
      for (int share = 0; share < kShares; ++share) {
        const float factor = device::exp2_flushed(gathered.max[share][head] - base);
        total += gathered.sum[share][head] * factor;
        value += gathered.out[share][column] * factor;
      }
      attend.out[row * Tr::kDim + first + column] = device::from_acc<T>(value / total);
      if ((first + column) % Tr::kDim == 0) {
        attend.lse[row + head] = (top + log2f(total)) * 0.69314718055994530942f;
      }
    }
    __syncthreads();
  }
}

// Stores the lists of a leader from its top layer upwards, which open every node or say nothing, and leaves what the slots
// of the top are in `list`: all nodes of the layer above. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void make_top_lists(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                               int64_t entry, int32_t* list) {
  const PageLayout& layout = block.attend().layout;
  const bool stored = block.attend().chunk.lists != nullptr || entry >= 0;
  const bool open = block.attend().options.open_top;
  for (int layer = static_cast<int>(layout.num_layers) - 1; stored && layer >= slots.layer; --layer) {
    const int opened = static_cast<int>(node_at(block.walk.query.token, layer) / kDecodeRate + 1);
    const int count = open ? 0 : opened;
    for (int i = threadIdx.x; i < block.top_k(); i += Tr::kThreads) {
      list[i] = i < count ? i : -1;  // store_list gives each thread its own elements
    }
    store_list(block, layer, entry, list);
  }
  for (int i = threadIdx.x; i < slots.slots; i += Tr::kThreads) {
    list[i] = i;
  }
  __syncthreads();
}

// The slots of the top of a row that uses a leader's lists, where these tell of it. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void load_top_list(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                              int32_t* list) {
  const bool open = block.attend().options.open_top;
  const int32_t* from = list_of(block.attend(), block.walk, slots.layer);
  if (!open) {
    wait_for_lists(block);
  }
  for (int i = threadIdx.x; i < slots.slots; i += Tr::kThreads) {
    list[i] = open ? i : from[i];
  }
  __syncthreads();
}

// Starts the exchange of a layer: the log sums of the scores that importances come from.
template <class Tr>
__device__ __forceinline__ void begin_choice(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                             const float* weighed) {
  __syncthreads();  // all warps have written their scores
  if (threadIdx.x == 0) {
    device::barrier_arrive_expect(&block.shared.sums_arrived, arriving_sum_bytes(block));
    device::barrier_arrive_expect(&block.shared.keys_arrived, arriving_key_bytes(block, slots));
  }
  send_log_sums(block, slots, weighed);
}

// The list of the layer below, and the bits of the candidates that it opens. Stages that layer's queries on
// the way, where they hide a wait.
template <class Tr>
__device__ __forceinline__ void choose(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                       const LayerSlots& below, const float* weighed, const int32_t* list,
                                       int32_t* next, uint32_t parity) {
  stage_decode_queries(block, below);
  if (!block.leads) {
    load_list(block, below.layer, next);
    mark_next(block, slots, list, next);
    return;
  }
  make_normalizers(block, parity);
  send_keys(block, slots, weighed);
  device::barrier_wait(&block.shared.keys_arrived, parity);
  write_selection(block, slots, list, next);
}

// From the top layer of the row to the tokens. `current` is the half of lists and rows that belongs to a layer.
template <class Tr>
__device__ __forceinline__ void walk_layers(const DecodeBlock<Tr>& block) {
  const int64_t entry = block.leads ? ring_entry(block.attend(), block.walk) : -1;
  LayerSlots slots = top_slots(block);
  int current = 0;
  if (block.leads) {
    make_top_lists(block, slots, entry, block.list(current));
  } else {
    load_top_list(block, slots, block.list(current));
  }
  for (; !merges(slots.layer, slots.num, block.top_k()); current ^= 1) {
    int32_t* next = block.list(current ^ 1);
    if (block.leads) {
      open_all(block, slots, block.list(current), next);
      store_list(block, slots.layer - 1, entry, next);
    } else {
      load_list(block, slots.layer - 1, next);
    }
    slots = slots_below(block, slots);
  }
  TileRing<Tr> ring(block);
  find_rows(block, slots, block.list(current), block.rows(current));
  stage_decode_queries(block, slots);
  device::wait_copies<0>();  // the rotations of children
  __syncthreads();
  device::cluster_wait();  // the barriers of the other blocks are ready
  int asked = 0;
  bool first = true;
  for (uint32_t parity = 0;; parity ^= 1, current ^= 1) {
    const int32_t* list = block.list(current);
    int32_t* next = block.list(current ^ 1);
    const bool chooses = slots.layer > 0 && block.leads;
    const bool by_spans = Tr::kSpans && chooses;
    if constexpr (Tr::kSpans) {
      if (by_spans) {
        if (first) {
          load_top_spans(block, slots);
        } else {
          score_spans(block, slots, list);
        }
        begin_choice(block, slots, block.span_scores());
      }
    }
    score_layer(block, ring, slots, block.rows(current), asked);
    if (chooses && !by_spans) {
      begin_choice(block, slots, block.scores());
    }
    __syncthreads();
    LayerSlots below;
    if (slots.layer > 0) {
      below = slots_below(block, slots);
      choose(block, slots, below, by_spans ? block.span_scores() : block.scores(), list, next, parity);
      if (block.leads) {
        store_list(block, below.layer, entry, next);
      }
      find_rows(block, below, next, block.rows(current ^ 1));
    }
    // The keys of the layer below follow without a gap only where the values fill the ring.
    const bool follows = block.params.plan.shares * slots.tiles >= ring.ahead();
    add_layer(block, ring, slots, block.rows(current), follows ? below : LayerSlots{},
              block.rows(current ^ 1));
    if (slots.layer == 0) {
      return;
    }
    asked = follows ? ring.ahead() : 0;
    slots = below;
    first = false;
  }
}

// States of nothing. A __syncthreads has to follow.
template <class Tr>
__device__ __forceinline__ void clear_states(const DecodeBlock<Tr>& block) {
  constexpr int kFloats = sizeof(DecodeState<Tr>) / sizeof(float);
  auto* states = reinterpret_cast<float*>(block.states());
  for (int i = threadIdx.x; i < block.params.plan.shares * kFloats; i += Tr::kThreads) {
    states[i] = i % kFloats < Tr::kHeads ? kNoScore : 0.0f;  // max comes first
  }
}

template <class Tr>
__device__ __forceinline__ void decode_row(const DecodeParams<typename Tr::T>& params) {
  static_assert(sizeof(DecodeShared) <= kDecodeStaticBytes);
  extern __shared__ __align__(16) uint8_t dynamic[];
  __shared__ DecodeShared shared;
  DecodeBlock<Tr> block = {.params = params,
                           .shared = shared,
                           .dynamic = dynamic,
                           .walk = {},
                           .leads = true,
                           .rank = static_cast<int>(blockIdx.x % params.plan.cluster),
                           .warp = static_cast<int>(threadIdx.x / device::kWarpSize),
                           .lane = static_cast<int>(threadIdx.x % device::kWarpSize)};
  if (threadIdx.x == 0) {
    device::barrier_init(&shared.sums_arrived, 1);
    device::barrier_init(&shared.keys_arrived, 1);
    device::fence_barrier_init();
  }
  copy_child_rotations(block);
  clear_states(block);
  block.walk = find_row<Tr::kThreads>(params.attend, params.first + blockIdx.x / params.plan.cluster);
  if (!counts(block.walk.query)) {
    device::wait_copies<0>();
    if (params.leaders || params.attend.options.lists_given) {
      store_nothing(block);
    }
    return;
  }
  block.leads = leads(block.walk) && !params.attend.options.lists_given;
  if (block.leads != params.leaders) {
    device::wait_copies<0>();
    return;
  }
  __syncwarp();
  device::cluster_arrive_relaxed();
  walk_layers(block);
  device::wait_copies<0>();
  __syncwarp();
  device::cluster_sync();
  store_row(block);
  __syncwarp();
  device::cluster_arrive_relaxed();  // no block ends while another reads its states
  device::cluster_wait();
}

// Cluster (query, kv head).
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    cache_decode_kernel(const __grid_constant__ DecodeParams<typename Tr::T> params) {
#if HTREE_SM90A
  if (params.others == OtherRows::kFollow && threadIdx.x == 0) {
    device::pdl_launch_dependents();
  }
  decode_row<Tr>(params);
  if (params.others == OtherRows::kPrecede || params.attend.options.lists_follow) {
    device::pdl_wait();
  }
#endif
}

template <class Tr>
cudaError_t launch_decode_rows(const DecodeParams<typename Tr::T>& params, int64_t rows,
                               cudaStream_t stream) {
  return launch_kernel(cache_decode_kernel<Tr>,
                       {.grid = static_cast<unsigned>(rows * params.plan.cluster),
                        .threads = Tr::kThreads,
                        .shared_bytes = params.plan.places.bytes,
                        .cluster = params.plan.cluster,
                        .pdl = params.others == OtherRows::kPrecede || params.attend.options.lists_follow},
                       stream, params);
}

// All rows, or those before the last ones and these.
template <class Tr>
cudaError_t launch_decode_kernel(DecodeParams<typename Tr::T>& params, const DecodePlans& plans,
                                 cudaStream_t stream) {
  const int64_t rows = params.attend.chunk.num * params.attend.layout.num_kv_heads;
  const int64_t last = plans.num_last;
  params.plan = plans.plan;
  params.first = 0;
  params.others = last > 0 ? OtherRows::kFollow : OtherRows::kNone;
  const cudaError_t error = launch_decode_rows<Tr>(params, rows - last, stream);
  if (error != cudaSuccess || last == 0) {
    return error;
  }
  params.plan = plans.last;
  params.first = rows - last;
  params.others = OtherRows::kPrecede;
  return launch_decode_rows<Tr>(params, last, stream);
}

// kLeafBits: of a channel of packed tokens, else 0.
template <typename T, int kDim, bool kSpans, int kLeafBits>
cudaError_t launch_decode_layers(const AttendParams<T>& attend, const DecodePlans& plans,
                                 cudaStream_t stream) {
  // A page of packed tokens may have no other rows.
  const auto key_rows = static_cast<uint32_t>(std::max<int64_t>(attend.layout.key_rows(), 1));
  DecodeParams<T> params{.attend = attend,
                         .key_rows = device::FastDivisor(key_rows),
                         .page_size = device::FastDivisor(attend.layout.page_size)};
  // Given lists make every row one that uses a leader's.
  const bool given = attend.options.lists_given;
  for (int launch = 0; launch < (attend.options.stride > 1 && !given ? 2 : 1); ++launch) {
    params.leaders = launch == 0 && !given;
    cudaError_t error = cudaSuccess;
    if constexpr (kSpans) {
      if (params.leaders) {
        error = launch_top_spans<T, kDim>(attend, plans.top_span_blocks, stream);
        if (error != cudaSuccess) {
          return error;
        }
      }
      constexpr int kWarps = decode_warps(8, true, 0);
      error = launch_decode_kernel<DecodeTraits<T, kDim, 1, true, kWarps, kLeafBits>>(params, plans, stream);
    } else if (attend.group > 8) {
      constexpr int kWarps = decode_warps(16, false, 0);
      error = launch_decode_kernel<DecodeTraits<T, kDim, 2, false, kWarps, kLeafBits>>(params, plans, stream);
    } else if (constexpr int kMost = decode_warps(8, false, 0);
               decode_warps(8, false, attend.options.parents) == kMost) {
      error = launch_decode_kernel<DecodeTraits<T, kDim, 1, false, kMost, kLeafBits>>(params, plans, stream);
    } else {
      constexpr int kFewer = decode_warps(8, false, kDecodeMaxSlots);
      error = launch_decode_kernel<DecodeTraits<T, kDim, 1, false, kFewer, kLeafBits>>(params, plans, stream);
    }
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

template <typename T, int kDim, bool kSpans>
cudaError_t launch_decode(const AttendParams<T>& attend, const DecodePlans& plans, cudaStream_t stream) {
  return launch_decode_layers<T, kDim, kSpans, 0>(attend, plans, stream);
}

template <typename T, int kDim, bool kSpans>
cudaError_t launch_decode_packed(const AttendParams<T>& attend, const DecodePlans& plans,
                                 cudaStream_t stream) {
  return attend.leaves.bits == 8 ? launch_decode_layers<T, kDim, kSpans, 8>(attend, plans, stream)
                                 : launch_decode_layers<T, kDim, kSpans, 4>(attend, plans, stream);
}

}  // namespace htree::tree_cache
