// The consumer warpgroups of block_attend.cuh: S = Q K'^T of a tile is under way while O += P V of the one
// before it is, and the softmax of the former hides under the latter (the order of FlashAttention-3).
#pragma once

#include "ops/tree_attention/attention/block/block_operand.cuh"
#include "ops/tree_attention/attention/block/block_query.cuh"
#include "ops/tree_attention/attention/block/block_softmax.cuh"
#include "ops/tree_attention/attention/merge_states.cuh"

namespace htree::tree_attention {

template <typename T, typename Tile>
class BlockConsumer {
 public:
  using Block = ParentBlock<Tile::kKeyDim, Tile::kValueDim>;
  using Keys = TileOperand<Tile::kKeyDim>;
  using Values = TileOperand<Tile::kValueDim>;
  using Softmax = BlockSoftmax<T, Tile::kValueDim>;

  __device__ __forceinline__ BlockConsumer(const AttendParams& params, BlockShared<Tile>& shared)
      : params_(params),
        shared_(shared),
        group_(threadIdx.x / 128 - Tile::kProducerGroups),
        thread_(threadIdx.x % 128) {}

  // All threads of both consumer warpgroups.
  __device__ __forceinline__ void run() {
    const int num_tasks = num_block_tasks<Tile>(params_);
    unsigned first_tile = 0;
    for (int task_idx = blockIdx.x; task_idx < num_tasks; task_idx += gridDim.x) {
      const BlockTask task = block_task<Tile>(params_, task_idx);
      if (task.num_tiles == 0 && !params_.first && !params_.last) {
        continue;  // nothing to add
      }
      prepare(task);
      Softmax state;
      state.begin(shared_.unscale[row_of(0)], shared_.unscale[row_of(1)]);
      attend(task, first_tile, state);
      state.finish();
      store(task, state);
      first_tile += task.num_tiles;
    }
  }

 private:
  // The row of the block that accumulators with h = 0, 1 belong to.
  __device__ __forceinline__ int row_of(int h) const {
    return (Tile::kSplitKeys ? 0 : group_ * 64) + thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * h;
  }

  __device__ __forceinline__ void meet() const {
    if (Tile::kSplitKeys) {
      device::named_barrier_sync(kGroupsMeet, 256);
    } else {
      device::named_barrier_sync(kQueryReady + group_, 128);
    }
  }

  __device__ __forceinline__ void prepare(const BlockTask& task) const {
    meet();  // the products that read the queries of the last task are done
    constexpr int kCount = Tile::kSplitKeys ? 32 : 64;
    load_query_rows<T, Tile, kCount>(params_.gather, task, shared_, group_ * kCount, thread_);
    meet();
  }

  __device__ __forceinline__ void issue_scores(Softmax& state, unsigned tile_idx) const {
    const int stage = stage_of<Tile>(tile_idx);
    const uint64_t query =
        Keys::rows(shared_.query + (Tile::kSplitKeys ? 0 : group_ * 64 * Tile::kKeyDim * 2));
    const uint64_t keys = Keys::rows(shared_.keys[stage]);
    device::barrier_wait(&shared_.keys_full[stage], phase_of<Tile>(tile_idx));
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kKeyDim / 16; ++step) {
      device::wgmma<__half, kTileKeys>(state.scores, Keys::dims(query, step), Keys::dims(keys, step),
                                       step > 0);
    }
    device::wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(Softmax& state, unsigned tile_idx) const {
    const int stage = stage_of<Tile>(tile_idx);
    const uint64_t values = Values::transposed(shared_.values[stage]);
    device::barrier_wait(&shared_.values_full[stage], phase_of<Tile>(tile_idx));
    device::wgmma_fence();
#pragma unroll
    for (int slot = 0; slot < kTileSlots; ++slot) {
      device::wgmma<T, Tile::kValueDim, device::Major::kMN>(
          state.out, state.weights[slot], device::advance(values, slot * Tile::kSlotValueBytes), true);
    }
    device::wgmma_commit();
  }

  __device__ __forceinline__ void release(device::Barrier* empty) const {
    if (thread_ == 0) {
      device::barrier_arrive(empty);
    }
  }

  // Scores of tile `tile_idx`, already computed, to weights.
  __device__ __forceinline__ void weigh(Softmax& state, unsigned tile_idx) const {
    const TileNote& note = shared_.notes[tile_idx % Tile::kNotes];
    const uint4 low = *reinterpret_cast<const uint4*>(note.slots);
    const uint4 high = *reinterpret_cast<const uint4*>(note.slots + 4);
    const uint32_t both = low.x & low.y & low.z & low.w & high.x & high.y & high.z & high.w;
    const uint32_t either = low.x | low.y | low.z | low.w | high.x | high.y | high.z | high.w;
    if (both != TileNote::kAll || either != TileNote::kAll) {
      state.amend(note);
    }
    state.weigh();
  }

  __device__ __forceinline__ void attend(const BlockTask& task, unsigned first_tile, Softmax& state) const {
    unsigned tile = first_tile + (Tile::kSplitKeys ? group_ : 0);
    const unsigned end = first_tile + task.num_tiles;
    if (tile >= end) {
      return;
    }
    issue_scores(state, tile);
    device::wgmma_wait<0>();
    device::pin_registers(state.scores);
    release(&shared_.keys_empty[stage_of<Tile>(tile)]);
    const bool has_own = !Tile::kSplitKeys || group_ == 0;
    int limit[2];
    if (has_own) {
      own_limits(task, limit);
      state.cut_own(limit);
    }
    weigh(state, tile);
    state.pack_weights();
    if (has_own && task.own_first < task.own_last) {
      add_own_nonfinite(task, tile, limit, state);
    }
#pragma unroll 1
    while (tile + Tile::kTileStep < end) {
      const unsigned next = tile + Tile::kTileStep;
      issue_scores(state, next);
      issue_output(state, tile);
      device::wgmma_wait<1>();
      device::pin_registers(state.scores);
      release(&shared_.keys_empty[stage_of<Tile>(next)]);
      weigh(state, next);
      device::wgmma_wait<0>();
      device::pin_registers(state.out);
      release(&shared_.values_empty[stage_of<Tile>(tile)]);
      state.rescale_out();
      state.pack_weights();
      tile = next;
    }
    issue_output(state, tile);
    device::wgmma_wait<0>();
    device::pin_registers(state.out);
    release(&shared_.values_empty[stage_of<Tile>(tile)]);
  }

  __device__ __forceinline__ void own_limits(const BlockTask& task, int (&limit)[2]) const {
    const GatherParams& p = params_.gather;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const BlockRow row = BlockRow::of<Tile>(p, task, row_of(h));
      // a row that stands for no query still needs numbers
      const int query = row.exists ? row.query : task.first_query;
      limit[h] = static_cast<int>((p.t0 + query) / p.node_span % kBlockRows) + (params_.selected ? 0 : 1);
    }
  }

  __device__ __forceinline__ void add_own_nonfinite(const BlockTask& task, unsigned tile_idx,
                                                    const int (&limit)[2], Softmax& state) const {
    const GatherParams& p = params_.gather;
    const int stage = stage_of<Tile>(tile_idx);
    device::barrier_wait(&shared_.values_full[stage], phase_of<Tile>(tile_idx));
    if (shared_.notes[tile_idx % Tile::kNotes].nonfinite) {
      const int batch = task.head_index / p.num_kv_heads, kv_head = task.head_index % p.num_kv_heads;
      int64_t own = task.num_slots - 1;
      if (p.lists) {
        const int64_t row = static_cast<int64_t>(task.list_row) * p.num_kv_heads + kv_head;
        own = p.lists[batch * p.list_batch + row * p.list_width + own];
        own = min(max(own, int64_t{0}), p.num_parents - 1);
      }
      const char* block = p.blocks + (task.head_index * p.num_parents + own) * Block::kBytes;
      state.add_nonfinite(block + Block::kValueOffset, limit);
    }
  }

  // Merges into the running state of docs/semantics.md §1.7 and writes that, or the output at the last layer.
  __device__ __forceinline__ void store(const BlockTask& task, Softmax& state) const {
    if constexpr (Tile::kSplitKeys) {
      exchange(state);
      // each group now has its half of the dims
      store_dims<Softmax::kOut / 2>(task, state, group_ * Tile::kValueDim / 2);
    } else {
      store_dims<Softmax::kOut>(task, state, 0);
    }
  }

  // After it out[0 ... kOut / 2) is the sum of both groups over the dims of this group's half.
  __device__ __forceinline__ void exchange(Softmax& state) const {
    constexpr int kSent = Softmax::kOut / 2;
    device::named_barrier_sync(kGroupsMeet, 256);  // nobody reads the queries any more
    float* buffers[2] = {reinterpret_cast<float*>(shared_.query),
                         reinterpret_cast<float*>(shared_.query + Tile::kQueryBytes)};
    float* to = group_ == 0 ? buffers[1] : buffers[0];
    const float* from = group_ == 0 ? buffers[0] : buffers[1];
#pragma unroll
    for (int i = 0; i < kSent; ++i) {
      to[i * 128 + thread_] = group_ == 0 ? state.out[i + kSent] : state.out[i];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (thread_ % 4 == 0) {
        shared_.states[group_ * 64 + row_of(h)] = make_float2(state.largest[h], state.sum[h]);
      }
    }
    device::named_barrier_sync(kGroupsMeet, 256);
    float own[2], other[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 theirs = shared_.states[(group_ ^ 1) * 64 + row_of(h)];
      merge_states(state.largest[h], state.sum[h], theirs.x, theirs.y, own[h], other[h]);
    }
#pragma unroll
    for (int i = 0; i < kSent; ++i) {
      const float mine = group_ == 0 ? state.out[i] : state.out[i + kSent];
      const int h = i / 2 % 2;
      state.out[i] = mine * own[h] + from[i * 128 + thread_] * other[h];
    }
  }

  template <int kCount>
  __device__ __forceinline__ void store_dims(const BlockTask& task, Softmax& state, int first_dim) const {
    const GatherParams& p = params_.gather;
    const int batch = task.head_index / p.num_kv_heads, kv_head = task.head_index % p.num_kv_heads;
    const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
    const int dim = first_dim + thread_ % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const BlockRow row = BlockRow::of<Tile>(p, task, row_of(h));
      const int64_t head = int64_t{kv_head} * p.group + row.head;
      const int64_t state_row = batch * params_.state_batch + row.query * num_heads + head;
      const int64_t partial_row = (batch * int64_t{p.num_queries} + row.query) * num_heads + head;
      float own = 1.f, before = 0.f;
      float max = state.largest[h], sum = state.sum[h];
      if (row.exists && !params_.first) {
        merge_states(max, sum, params_.max[state_row], params_.sum[state_row], own, before);
      }
      if (Tile::kSplitKeys) {
        device::named_barrier_sync(kGroupsMeet, 256);  // the other group has read the state as well
      } else {
        __syncwarp();
      }
      if (!row.exists) {
        continue;
      }
      if (thread_ % 4 == 0 && (!Tile::kSplitKeys || group_ == 0)) {
        params_.max[state_row] = params_.last ? max * kLn2 : max;
        params_.sum[state_row] = sum;
      }
      const float inverse = 1.f / sum;
      float* partial = params_.partial + partial_row * Tile::kValueDim + dim;
      uint32_t* out =
          reinterpret_cast<uint32_t*>(static_cast<T*>(params_.out) + state_row * Tile::kValueDim + dim);
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        float2 value = {state.out[4 * i + 2 * h], state.out[4 * i + 2 * h + 1]};
        float2* at = reinterpret_cast<float2*>(partial + 8 * i);
        if (!params_.first) {
          const float2 old = *at;
          value.x = value.x * own + old.x * before;
          value.y = value.y * own + old.y * before;
        }
        if (params_.last) {
          out[4 * i] = device::pack_pair<T>(value.x * inverse, value.y * inverse);
        } else {
          *at = value;
        }
      }
    }
  }

  const AttendParams& params_;
  BlockShared<Tile>& shared_;
  int group_, thread_;
};

}  // namespace htree::tree_attention
