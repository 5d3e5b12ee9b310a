// The end of a task of per_list_attend.cuh: merges into the running state of
// docs/semantics/tree_attention.md §1.7 and writes that, or the output at the last layer.
#pragma once

#include "ops/tree_attention/cuda/forward/per_list/per_list_row.cuh"
#include "ops/tree_attention/cuda/forward/per_list/per_list_softmax.cuh"
#include "ops/tree_attention/cuda/merge_states.cuh"

namespace htree::tree_attention {

template <typename T, typename Tile>
class PerListStore {
 public:
  using Softmax = PerListSoftmax<T, Tile::kValueDim>;

  __device__ __forceinline__ PerListStore(const AttendParams& params, PerListShared<Tile>& shared, int group,
                                          int thread)
      : params_(params), shared_(shared), group_(group), thread_(thread) {}

  // All threads of both consumer warpgroups.
  __device__ __forceinline__ void run(const ListTask& task, Softmax& state) const {
    if constexpr (Tile::kSplitKeys) {
      exchange(state);
      // each group now has its half of the dims
      store_dims<Softmax::kOut / 2>(task, state, group_ * Tile::kValueDim / 2);
    } else {
      store_dims<Softmax::kOut>(task, state, 0);
    }
  }

 private:
  __device__ __forceinline__ int row_of(int h) const { return accumulator_row<Tile>(group_, thread_, h); }

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
  __device__ __forceinline__ void store_dims(const ListTask& task, Softmax& state, int first_dim) const {
    const GatherParams& p = params_.gather;
    const int batch = task.head_index / p.num_kv_heads, kv_head = task.head_index % p.num_kv_heads;
    const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
    const int dim = first_dim + thread_ % 4 * 2;
    ListRow rows[2];
    int64_t state_row[2];
    float* partial[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows[h] = ListRow::of<Tile>(p, task, row_of(h));
      const int64_t head = int64_t{kv_head} * p.group + rows[h].head;
      state_row[h] = batch * params_.state_batch + rows[h].query * num_heads + head;
      const int64_t partial_row = (batch * int64_t{p.num_queries} + rows[h].query) * num_heads + head;
      partial[h] = params_.partial + partial_row * Tile::kValueDim + dim;
    }
    // All that a thread needs of the running state is asked for at once: one round trip to memory, not one
    // per pair of dims. The scores have been used.
    float old_max[2], old_sum[2];
    float(&old)[Softmax::kScores] = state.scores;
    static_assert(kCount <= Softmax::kScores);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (rows[h].exists && !params_.first) {
        old_max[h] = params_.max[state_row[h]];
        old_sum[h] = params_.sum[state_row[h]];
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
          const float2 pair = *reinterpret_cast<const float2*>(partial[h] + 8 * i);
          old[4 * i + 2 * h] = pair.x;
          old[4 * i + 2 * h + 1] = pair.y;
        }
      }
    }
    if (Tile::kSplitKeys) {
      device::named_barrier_sync(kGroupsMeet, 256);  // the other group has read the state as well
    } else {
      __syncwarp();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!rows[h].exists) {
        continue;
      }
      float own = 1.f, before = 0.f;
      float max = state.largest[h], sum = state.sum[h];
      if (!params_.first) {
        merge_states(max, sum, old_max[h], old_sum[h], own, before);
      }
      if (thread_ % 4 == 0 && (!Tile::kSplitKeys || group_ == 0)) {
        params_.max[state_row[h]] = params_.last ? max * kLn2 : max;
        params_.sum[state_row[h]] = sum;
      }
      const float inverse = 1.f / sum;
      uint32_t* out =
          reinterpret_cast<uint32_t*>(static_cast<T*>(params_.out) + state_row[h] * Tile::kValueDim + dim);
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        float2 value = {state.out[4 * i + 2 * h], state.out[4 * i + 2 * h + 1]};
        if (!params_.first) {
          value.x = value.x * own + old[4 * i + 2 * h] * before;
          value.y = value.y * own + old[4 * i + 2 * h + 1] * before;
        }
        if (params_.last) {
          out[4 * i] = device::pack_pair<T>(value.x * inverse, value.y * inverse);
        } else {
          *reinterpret_cast<float2*>(partial[h] + 8 * i) = value;
        }
      }
    }
  }

  const AttendParams& params_;
  PerListShared<Tile>& shared_;
  int group_, thread_;
};

}  // namespace htree::tree_attention
