// The running softmax of a consumer warpgroup of attend.cuh over 64 rows, in the registers of wgmma, and how
// a task ends. Thread i of a warp holds rows i / 4 and i / 4 + 8 of the warp's 16, columns 8 j + 2 (i % 4)
// and the next.
#pragma once

#include "device/mma.cuh"
#include "device/reduce.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/sparse_attention/cuda/sm80/forward/output_factor.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/per_list/task.cuh"

namespace htree::tree_attention {

// Nothing here couples two rows: a row's reference moves by its own scores alone, so queries of the same
// block cannot change each other's rounding.
template <typename T, int kValueDim>
struct PerListSoftmax {
  // A reference moves only when a score exceeds it by this many powers of two. That is rare, so the maxima of
  // most tiles need no exchange between lanes.
  static constexpr float kSlack = 8.f;
  // From this size on references are multiples of 16 or more. A fused multiply-add does not round its product, which may
  // then lie half a step above the reference that was rounded from it: too far for a weight.
  static constexpr float kCoarse = 0x1p27f;
  static constexpr int kScores = kTileKeys / 2;  // scores of a thread
  static constexpr int kOut = kValueDim / 2;

  float out[kOut];
  float scores[kScores];
  uint32_t weights[kTileSlots][4];  // the A operand of O += P V
  float unscale[2];                 // positive; brings scores to log2 units
  float reference[2];               // in log2 units
  float largest[2];                 // of this lane's scores, before unscale
  float sum[2];                     // of this lane's weights
  float factor[2];                  // what `out` still has to be multiplied by
  bool rescale;

  __device__ __forceinline__ void begin(float unscale_low, float unscale_high) {
    unscale[0] = unscale_low;
    unscale[1] = unscale_high;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = largest[h] = -INFINITY;
      sum[h] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      out[i] = 0.f;
    }
  }

  // Undoes the powers of two of the keys and takes out the keys that do not take part.
  __device__ __forceinline__ void amend(const TileNote& note) {
    const uint4 low = *reinterpret_cast<const uint4*>(note.slots);
    const uint4 high = *reinterpret_cast<const uint4*>(note.slots + 4);
    const uint32_t both = low.x & low.y & low.z & low.w & high.x & high.y & high.z & high.w;
    const uint32_t either = low.x | low.y | low.z | low.w | high.x | high.y | high.z | high.w;
    if (either & TileNote::kScaled) {
      unscale_keys(note);
    }
    if ((both & TileNote::kAll) != TileNote::kAll) {
      take_out({low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w});
    }
  }

  // Undoes the powers of two of the keys.
  __device__ __forceinline__ void unscale_keys(const TileNote& note) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int slot = 0; slot < kTileSlots; ++slot) {
      if (!(note.slots[slot] & TileNote::kScaled)) {
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int child = i / 2 * 8 + column + i % 2;
        const int at = slot * 8 + i / 2 * 4 + i % 2;
        const float power =
            __uint_as_float(static_cast<uint32_t>(note.exponents[slot * kParentRows + child]) << 23);
        scores[at] *= power;
        scores[at + 2] *= power;
      }
    }
  }

  // Takes out the children that take part for no query. It has no branches, since above the bottom almost
  // every tile has such children.
  __device__ __forceinline__ void take_out(const uint32_t (&words)[kTileSlots]) {
    const uint32_t column = 1u << threadIdx.x % 4 * 2;
#pragma unroll
    for (int slot = 0; slot < kTileSlots; ++slot) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = slot * 8 + i / 2 * 4 + i % 2;
        if (!(words[slot] & column << (i / 2 * 8 + i % 2))) {
          scores[at] = scores[at + 2] = -INFINITY;
        }
      }
    }
  }

  // Takes out the children of the diagonal parent, slot 0 of the first tile, from `limit[h]` on.
  __device__ __forceinline__ void cut_own(const int (&limit)[2]) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int child = i / 4 * 8 + column + i % 2;
      if (child >= limit[i / 2 % 2]) {
        scores[i] = -INFINITY;
      }
    }
  }

  // Replaces scores by weights 2^(s - reference), in place.
  __device__ __forceinline__ void weigh() {
    float tops[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
    for (int i = 4; i < kScores; ++i) {
      tops[i % 4] = fmaxf(tops[i % 4], scores[i]);
    }
    const float top[2] = {fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])};
    bool grows = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(largest[h], top[h]);
      grows |= top[h] * unscale[h] > most_below(h);
    }
    rescale = __any_sync(device::kFullMask, grows);
    if (rescale) {
      move_references(top);
    }
    // Asked anew for every tile: an answer that is kept would cost a register.
    if (__any_sync(device::kFullMask, fmaxf(fabsf(reference[0]), fabsf(reference[1])) >= kCoarse)) {
      add_weights([&](int h, float score, float from) {
        return is_coarse(h) ? __fadd_rn(__fmul_rn(score, unscale[h]), from) : fmaf(score, unscale[h], from);
      });
    } else {
      add_weights([&](int h, float score, float from) { return fmaf(score, unscale[h], from); });
    }
  }

  // relative(h, score, -reference) is what a score of row h has beyond the reference, in log2 units.
  template <typename Relative>
  __device__ __forceinline__ void add_weights(Relative relative) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float from = reference[h] == -INFINITY ? 0.f : -reference[h];
#pragma unroll
      for (int i = 2 * h; i < kScores; i += 4) {
        scores[i] = device::exp2_flushed(relative(h, scores[i], from));
        scores[i + 1] = device::exp2_flushed(relative(h, scores[i + 1], from));
        sum[h] += scores[i] + scores[i + 1];
      }
    }
  }

  // The largest score that leaves the reference of a row where it is.
  __device__ __forceinline__ float most_below(int h) const {
    return __fadd_rd(reference[h], kSlack);
  }

  // Whether the scores of a row are rounded before the reference is subtracted, so that the largest one, of which it was
  // made, has weight 1. Rows without scores or with an infinite one need that not.
  __device__ __forceinline__ bool is_coarse(int h) const {
    return fabsf(reference[h]) >= kCoarse && fabsf(reference[h]) < INFINITY;
  }

  __device__ __forceinline__ void move_references(const float (&top)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float row_top = top[h] * unscale[h];
      row_top = fmaxf(row_top, __shfl_xor_sync(device::kFullMask, row_top, 1));
      row_top = fmaxf(row_top, __shfl_xor_sync(device::kFullMask, row_top, 2));
      const bool moves = row_top > most_below(h);
      factor[h] = !moves                      ? 1.f
                  : reference[h] == -INFINITY ? 0.f
                                              : device::exp2_flushed(reference[h] - row_top);
      reference[h] = moves ? row_top : reference[h];
      sum[h] *= factor[h];
    }
  }

  // Makes sure that the exponentials of weigh() are computed here. Without a reader the compiler moves them
  // below the next wait, where no product is left for them to hide under.
  __device__ __forceinline__ void settle() const {
    // A sum of powers of two is never negative, so nothing is ever stored. A trap in place of the store would
    // be a branch, which costs registers.
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.lt.f32 p, %0, 0f00000000;\n"
        "@p st.shared.f32 [%1], %0;\n"
        "}" ::"f"(sum[0] + sum[1]),
        "r"(0)
        : "memory");
  }

  __device__ __forceinline__ void rescale_out() {
    if (rescale) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) {
        out[i] *= factor[i / 2 % 2];
      }
    }
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      weights[i / 4][i % 4] = device::pack_pair<T>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // Adds the values of the diagonal parent that copy_own_values() replaced by 0; `values` is where they
  // stand in global memory.
  __device__ __forceinline__ void add_nonfinite(const char* values, const int (&limit)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int child = 0; child < kParentRows; ++child) {
      float weight[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = child < 8 ? weights[0][h] : weights[0][h + 2];
        const uint32_t owned = __shfl_sync(device::kFullMask, pair, (lane & 28) + child % 8 / 2);
        const uint16_t bits = static_cast<uint16_t>(child % 2 ? owned >> 16 : owned);
        weight[h] = device::to_acc(*reinterpret_cast<const T*>(&bits));
      }
#pragma unroll
      for (int i = 0; i < kOut; i += 4) {
        const T* pair =
            reinterpret_cast<const T*>(values + chunk_offset<kValueDim>(child, i / 4) + lane % 4 * 4);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float value = device::to_acc(pair[c]);
          if (!(fabsf(value) <= 3.402823466e38f)) {
            out[i + c] += child < limit[0] ? weight[0] * value : 0.f;
            out[i + c + 2] += child < limit[1] ? weight[1] * value : 0.f;
          }
        }
      }
    }
  }

  // Gives every lane the numbers of its rows, relative to their true maxima, which `largest` then
  // holds in log2 units.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] *= unscale[h];
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        sum[h] += __shfl_xor_sync(device::kFullMask, sum[h], offset);
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(device::kFullMask, largest[h], offset));
      }
      factor[h] = largest[h] == -INFINITY ? 1.f : device::exp2_flushed(reference[h] - largest[h]);
      sum[h] *= factor[h];
    }
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      out[i] *= factor[i / 2 % 2];
    }
  }
};

// The end of a task: merges the softmax into the running state of docs/semantics/tree_attention.md §1.7 and
// writes that state or, at the last layer, the output.

template <typename T, typename Tile>
class PerListStore {
 public:
  using Softmax = PerListSoftmax<T, Tile::kValueDim>;

  __device__ __forceinline__ PerListStore(const AttendParams& params, PerListShared<Tile>& shared, int group,
                                          int thread)
      : params_(params), shared_(shared), group_(group), thread_(thread) {}

  // All threads of both consumer warpgroups call.
  __device__ __forceinline__ void run(const ListTask& task, Softmax& state) const {
    if constexpr (Tile::kSplitKeys) {
      exchange(state);
      // Each warpgroup now has its half of the dims.
      store_dims<Softmax::kOut / 2>(task, state, group_ * Tile::kValueDim / 2);
    } else {
      store_dims<Softmax::kOut>(task, state, 0);
    }
  }

 private:
  __device__ __forceinline__ int row_of(int h) const { return accumulator_row<Tile>(group_, thread_, h); }

  // Leaves in out[0 ... kOut / 2) the sum of both warpgroups over the dims of this warpgroup's half.
  __device__ __forceinline__ void exchange(Softmax& state) const {
    constexpr int kSent = Softmax::kOut / 2;
    device::named_barrier_sync(kGroupsMeet, 256);  // no warp reads the queries any more
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
    // per pair of dims. The scores are no longer needed.
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
      device::named_barrier_sync(kGroupsMeet, 256);  // the other warpgroup has read the state as well
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
      const float inverse = output_factor(params_, int64_t{kv_head} * p.group + rows[h].head, max, sum);
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
