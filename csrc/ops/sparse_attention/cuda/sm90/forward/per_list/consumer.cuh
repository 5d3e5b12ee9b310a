// The consumer warpgroups of attend.cuh. While the product S = Q K'^T of one tile runs, so does O += P V of
// the tile before it, and the softmax of the first hides under the second (the order of FlashAttention-3).
#pragma once

#include "ops/sparse_attention/cuda/sm90/forward/per_list/query.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/per_list/softmax.cuh"

namespace htree::tree_attention {

template <typename T, typename Tile>
class PerListConsumer {
 public:
  using Block = PackedParent<Tile::kKeyDim, Tile::kValueDim>;
  using Keys = TileOperand<Tile::kKeyDim>;
  using Values = TileOperand<Tile::kValueDim>;
  using Softmax = PerListSoftmax<T, Tile::kValueDim>;

  __device__ __forceinline__ PerListConsumer(const AttendParams& params, PerListShared<Tile>& shared)
      : params_(params),
        shared_(shared),
        // Taken from one lane, so that the compiler knows it to be the same in all lanes.
        group_(__shfl_sync(device::kFullMask, static_cast<int>(threadIdx.x / 128), 0) -
               Tile::kProducerGroups),
        thread_(threadIdx.x % 128) {}

  // All threads of both consumer warpgroups.
  __device__ __forceinline__ void run() {
    const int num_tasks = num_list_tasks<Tile>(params_);
    unsigned first_tile = 0;
    for (int task_idx = blockIdx.x; task_idx < num_tasks; task_idx += gridDim.x) {
      const ListTask task = list_task<Tile>(params_, task_idx);
      if (task.num_tiles == 0 && !params_.first && !params_.last) {
        continue;  // nothing to add
      }
      prepare(task);
      Softmax state;
      state.begin(shared_.unscale[row_of(0)], shared_.unscale[row_of(1)]);
      attend(task, first_tile, state);
      first_tile += task.num_tiles;
      state.finish();
      // Found a second time, so that it needs no registers during the loop over the tiles.
      asm volatile("" : "+r"(task_idx));
      PerListStore<T, Tile>(params_, shared_, group_, thread_).run(list_task<Tile>(params_, task_idx), state);
    }
  }

 private:
  __device__ __forceinline__ int row_of(int h) const { return accumulator_row<Tile>(group_, thread_, h); }

  __device__ __forceinline__ void meet() const {
    if (Tile::kSplitKeys) {
      device::named_barrier_sync(kGroupsMeet, 256);
    } else {
      device::named_barrier_sync(kQueryReady + group_, 128);
    }
  }

  __device__ __forceinline__ void prepare(const ListTask& task) const {
    meet();  // the products that read the queries of the previous task are done
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
      const uint32_t offset = Keys::dims_offset(step);
      device::wgmma<__half, kTileKeys>(state.scores, Keys::further(query, offset),
                                       Keys::further(keys, offset), step > 0);
    }
    device::wgmma_commit();
  }

  __device__ __forceinline__ void wait_values(unsigned tile_idx) const {
    device::barrier_wait(&shared_.values_full[stage_of<Tile>(tile_idx)], phase_of<Tile>(tile_idx));
  }

  // To be called after wait_values(), with a wgmma_fence() since the weights were packed.
  __device__ __forceinline__ void issue_output(Softmax& state, unsigned tile_idx) const {
    const uint64_t values = Values::transposed(shared_.values[stage_of<Tile>(tile_idx)]);
#pragma unroll
    for (int slot = 0; slot < kTileSlots; ++slot) {
      device::wgmma<T, Tile::kValueDim, device::Major::kMN>(
          state.out, state.weights[slot], Values::further(values, slot * Tile::kSlotValueBytes), true);
    }
    device::wgmma_commit();
  }

  __device__ __forceinline__ void release(device::Barrier* empty) const {
    if (thread_ == 0) {
      device::barrier_arrive(empty);
    }
  }

  // Whether all keys of a tile take part unchanged. It is asked before the wait for the scores,
  // which hides the load.
  __device__ __forceinline__ bool is_plain(unsigned tile_idx) const {
    const TileNote& note = shared_.notes[tile_idx % Tile::kNotes];
    return !__any_sync(device::kFullMask, note.slots[thread_ % kTileSlots] != TileNote::kAll);
  }

  // Replaces the scores of tile `tile_idx`, already computed, by weights.
  __device__ __forceinline__ void weigh(Softmax& state, unsigned tile_idx, bool plain) const {
    if (!plain) {
      state.amend(shared_.notes[tile_idx % Tile::kNotes]);
    }
    state.weigh();
  }

  __device__ __forceinline__ void attend(const ListTask& task, unsigned first_tile, Softmax& state) const {
    unsigned tile = first_tile + (Tile::kSplitKeys ? group_ : 0);
    const unsigned end = first_tile + task.num_tiles;
    if (tile >= end) {
      return;
    }
    issue_scores(state, tile);
    bool plain = is_plain(tile);
    device::wgmma_wait<0>();
    device::pin_registers(state.scores);
    release(&shared_.keys_empty[stage_of<Tile>(tile)]);
    const bool has_own = !Tile::kSplitKeys || group_ == 0;
    int limit[2];
    if (has_own) {
      own_limits(task, limit);
      state.cut_own(limit);
    }
    weigh(state, tile, plain);
    state.pack_weights();
    if (has_own && task.own_first < task.own_last) {
      add_own_nonfinite(task, tile, limit, state);
    }
#pragma unroll 1
    while (tile + Tile::kTileStep < end) {
      const unsigned next = tile + Tile::kTileStep;
      wait_values(tile);  // first, so that one fence serves the products of both without a gap
      issue_scores(state, next);
      issue_output(state, tile);
      plain = is_plain(next);
      device::wgmma_wait<1>();
      device::pin_registers(state.scores);
      release(&shared_.keys_empty[stage_of<Tile>(next)]);
      weigh(state, next, plain);
      state.settle();
      device::wgmma_wait<0>();
      device::pin_registers(state.out);
      release(&shared_.values_empty[stage_of<Tile>(tile)]);
      state.rescale_out();
      state.pack_weights();
      tile = next;
    }
    wait_values(tile);
    device::wgmma_fence();
    issue_output(state, tile);
    device::wgmma_wait<0>();
    device::pin_registers(state.out);
    release(&shared_.values_empty[stage_of<Tile>(tile)]);
  }

  __device__ __forceinline__ void own_limits(const ListTask& task, int (&limit)[2]) const {
    const GatherParams& p = params_.gather;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const ListRow row = ListRow::of<Tile>(p, task, row_of(h));
      // A row that stands for no query needs numbers all the same.
      const int query = row.exists ? row.query : task.first_query;
      // Where the first query sees all children, the others do.
      limit[h] = task.own_first == kParentRows
                     ? kParentRows
                     : static_cast<int>(node_of(p, p.t0 + query) % kParentRows) + (params_.selected ? 0 : 1);
    }
  }

  __device__ __forceinline__ void add_own_nonfinite(const ListTask& task, unsigned tile_idx,
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
      const char* block = p.packed + (task.head_index * p.num_parents + own) * Block::kBytes;
      state.add_nonfinite(block + Block::kValueOffset, limit);
    }
  }

  const AttendParams& params_;
  PerListShared<Tile>& shared_;
  int group_, thread_;
};

}  // namespace htree::tree_attention
