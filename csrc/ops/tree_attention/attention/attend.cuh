// One softmax step of tree attention over the candidates of a layer that are not refined further:
// docs/semantics.md §1.5, §1.7. One warp per (token, kv head) gathers its parents privately; children are the
// rows and query heads the columns of S^T = K' q^T, and O^T += V^T P^T.
#pragma once

#include "ops/tree_attention/attention/gather_task.cuh"
#include "ops/tree_attention/attention/rotated_query.cuh"

namespace htree::tree_attention {

constexpr int kAttendWarps = 4;

template <int kKeyDim, int kValueDim>
struct AttendRing {
  static constexpr int kCopyBytes = ParentBlock<kKeyDim, kValueDim>::kBytes;
  static constexpr int kStageBytes = (kCopyBytes + 127) / 128 * 128;
  // about 16 KB in flight per warp: with 12 warps on an SM the gather runs at the speed of the L2
  static constexpr int kStages = kStageBytes > 6144 ? 2 : kStageBytes > 3072 ? 3 : 4;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kAttendWarps * kWarpBytes;
};

// The running softmax of a warp: columns (query heads) 2 * (lane % 4) and the next of each tile, partial over
// the lane's rows. `reference` moves only when a score exceeds it by kSlack powers of two, so it is rarely
// rescaled; `largest` is the lane's true maximum.
template <int kValueDim, int kTiles>
struct RunningSoftmax {
  static constexpr float kSlack = 8.f;
  float reference[kTiles][2], largest[kTiles][2], sum[kTiles][2];
  float out[kTiles][kValueDim / 16][4];

  __device__ __forceinline__ RunningSoftmax() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        reference[tile][i] = largest[tile][i] = -INFINITY;
        sum[tile][i] = 0.f;
      }
#pragma unroll
      for (int step = 0; step < kValueDim / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out[tile][step][i] = 0.f;
        }
      }
    }
  }

  // Maximum of a column over its lanes.
  __device__ __forceinline__ static float column_max(float x) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      x = fmaxf(x, __shfl_xor_sync(device::kFullMask, x, offset));
    }
    return x;
  }

  __device__ __forceinline__ void rescale(int tile, int i, float factor) {
    sum[tile][i] *= factor;
#pragma unroll
    for (int step = 0; step < kValueDim / 16; ++step) {
      out[tile][step][i] *= factor;
      out[tile][step][i + 2] *= factor;
    }
  }

  // Turns scores into weights 2^(s - reference); -inf marks what does not take part.
  __device__ __forceinline__ void weigh(float (&s)[kTiles][4]) {
    bool grows = false;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float top = fmaxf(s[tile][i], s[tile][i + 2]);
        largest[tile][i] = fmaxf(largest[tile][i], top);
        grows |= top > reference[tile][i] + kSlack;
      }
    }
    if (__any_sync(device::kFullMask, grows)) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float next = column_max(largest[tile][i]);
          rescale(tile, i,
                  reference[tile][i] == -INFINITY ? 0.f : device::exp2_flushed(reference[tile][i] - next));
          reference[tile][i] = next;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float from = reference[tile][i & 1];
        s[tile][i] = device::exp2_flushed(s[tile][i] - (from == -INFINITY ? 0.f : from));
        sum[tile][i & 1] += s[tile][i];
      }
    }
  }

  // Every lane gets the state of its columns relative to their true maxima.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          sum[tile][i] += __shfl_xor_sync(device::kFullMask, sum[tile][i], offset);
        }
        largest[tile][i] = column_max(largest[tile][i]);
        if (largest[tile][i] != -INFINITY) {
          rescale(tile, i, device::exp2_flushed(reference[tile][i] - largest[tile][i]));
        }
      }
    }
  }
};

// Zeroes the value rows from `first` on: what lies past the query's own node may hold anything, NaN included,
// and a product with a weight of 0 would not silence it.
template <int kValueDim>
__device__ __forceinline__ void clear_value_rows(uint32_t values, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int at = lane * 16; at < kBlockRows * kValueDim * 2; at += 512) {
    if (row_of_offset<kValueDim>(at) >= first) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(values + at), "r"(0) : "memory");
    }
  }
  __syncwarp();
}

// Merges the warp's state into the running one and writes that, or the output at the last layer.
template <typename T, int kValueDim, int kTiles>
__device__ __forceinline__ void write_state(const AttendParams& params, const GatherTask& task, int64_t query,
                                            RunningSoftmax<kValueDim, kTiles>& state) {
  const GatherParams& p = params.gather;
  const int lane = threadIdx.x % 32;
  const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
  const int64_t first_head = int64_t{task.kv_head} * p.group;
  const int64_t state_row = task.batch * params.state_batch + query * num_heads + first_head;
  const int64_t partial_row = (task.batch * int64_t{p.num_queries} + query) * num_heads + first_head;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = tile * 8 + lane % 4 * 2 + i;
      const bool exists = column < p.group;
      float own = 1.f, before = 0.f;
      float max = state.largest[tile][i], sum = state.sum[tile][i];
      if (exists && !params.first) {
        const float old_max = params.max[state_row + column], old_sum = params.sum[state_row + column];
        const float top = fmaxf(max, old_max);
        own = sum == 0.f ? 0.f : device::exp2_flushed(max - top);
        before = old_sum == 0.f ? 0.f : device::exp2_flushed(old_max - top);
        sum = sum * own + old_sum * before;
        max = top;
      }
      __syncwarp();  // the lanes of a column have read the state that one of them replaces
      if (exists && lane / 4 == 0) {
        params.max[state_row + column] = params.last ? max * 0.693147180559945f : max;
        params.sum[state_row + column] = sum;
      }
      const float inverse = 1.f / sum;
      float* partial = params.partial + (partial_row + column) * kValueDim;
      T* out = static_cast<T*>(params.out) + (state_row + column) * kValueDim;
#pragma unroll
      for (int step = 0; step < kValueDim / 16; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int dim = step * 16 + half * 8 + lane / 4;
          float value = state.out[tile][step][i + 2 * half];
          if (exists && !params.first) {
            value = value * own + partial[dim] * before;
          }
          if (exists && params.last) {
            out[dim] = device::from_acc<T>(value * inverse);
          } else if (exists) {
            partial[dim] = value;
          }
        }
      }
    }
  }
}

// Grid: x = runs of kAttendWarps queries, the longest lists first, y = batch * kv head.
template <typename T, int kKeyDim, int kValueDim, int kTiles>
__global__ void __launch_bounds__(kAttendWarps * 32, kTiles == 1 ? 3 : 2) attend_kernel(AttendParams params) {
  using Block = ParentBlock<kKeyDim, kValueDim>;
  using Ring = AttendRing<kKeyDim, kValueDim>;
  extern __shared__ __align__(128) char shared[];
  const GatherParams& p = params.gather;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t query = int64_t{gridDim.x - 1 - blockIdx.x} * kAttendWarps + warp;
  if (query >= p.num_queries) {
    return;
  }
  const int64_t list_row = query / p.stride;
  GatherTask task = gather_task(p, blockIdx.y, query, list_row);
  RunningSoftmax<kValueDim, kTiles> state;
  const uint16_t* selected = nullptr;  // 16 bits per slot
  int last_candidate = task.num_candidates;
  if (params.selected) {
    selected =
        reinterpret_cast<const uint16_t*>(params.selected + task.batch * params.selected_batch +
                                          (list_row * p.num_kv_heads + task.kv_head) * params.mask_words);
    --last_candidate;  // the query's own node is always selected
    if (task.num_candidates <= p.list_width) {
      task.num_slots = 0;  // so is everything
    }
  }
  if (task.num_slots > 0) {
    ParentStream<Ring::kCopyBytes, Ring::kStageBytes, Ring::kStages> stream(
        p.blocks + task.blocks * Block::kBytes, Block::kBytes, p.num_parents, task.list, 0, task.num_slots,
        device::shared_address(shared) + warp * Ring::kWarpBytes);
    RotatedQuery<kKeyDim, kTiles> q;
    q.load(query_rows<T>(p, task, query), p.queries.head, p.group, p.score_scale, p.rope,
           task.num_candidates - 1);
    const TileAddress<kKeyDim> key_at;
    const TileAddress<kValueDim> value_at;
    unsigned next_selected = selected ? selected[0] : 0;
    for (int slot = 0; slot < task.num_slots; ++slot) {
      const int rows = last_candidate - slot * kBlockRows;
      const unsigned present = ~next_selected & (rows >= kBlockRows ? 0xffffu : (1u << max(rows, 0)) - 1u);
      next_selected = selected && slot + 1 < task.num_slots ? selected[slot + 1] : 0;
      const uint32_t block = stream.wait(slot);
      if (present) {
        if (rows < kBlockRows) {
          clear_value_rows<kValueDim>(block + Block::kValueOffset, rows);
        }
        float s[kTiles][4];
        slot_scores(q, key_at, block, s);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            s[tile][i] = present >> (lane / 4 + i / 2 * 8) & 1 ? s[tile][i] : -INFINITY;
          }
        }
        state.weigh(s);
        uint32_t weights[kTiles][2];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          weights[tile][0] = device::transpose_matrix(device::pack_pair<T>(s[tile][0], s[tile][1]));
          weights[tile][1] = device::transpose_matrix(device::pack_pair<T>(s[tile][2], s[tile][3]));
        }
#pragma unroll
        for (int step = 0; step < kValueDim / 16; ++step) {
          uint32_t a[4];
          device::load_matrices_transposed(a, block + Block::kValueOffset + value_at.transposed(step));
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            device::mma_16x8x16<T>(state.out[tile][step], a, weights[tile][0], weights[tile][1]);
          }
        }
      }
      q.step_back();
      stream.release();
    }
    device::wait_copies<0>();
    state.finish();
  } else if (!params.first && !params.last) {
    return;  // nothing to add
  }
  write_state<T, kValueDim, kTiles>(params, task, query, state);
}

}  // namespace htree::tree_attention
