// The two consumer warpgroups of gradient.cuh. Warpgroup c owns keys 64 c ... of a tile, one parent per warp,
// in S^T = K' Q^T, dP^T = V dO^T, dV = P^T dO and dK' = dS^T Q. It owns query rows 64 c ... in dQ += dS K'.
//
// dS^T passes through shared memory once and is read there in both directions. In dQ a warpgroup
// takes its own keys first, so that it needs the other one's dS as late as possible. Partial sums are
// stored while products run.
#pragma once

#include "device/mma.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/sparse_attention/cuda/sm90/backward/per_list/task.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/per_list/query.cuh"

namespace htree::tree_attention {

template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
  if constexpr (__is_same(T, __half)) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

// Volatile, so that the compiler keeps no more of these loads in registers than one step needs.
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}

template <typename T, typename Tile>
class GradientConsumer {
 public:
  using Operand = TileOperand<Tile::kDim>;
  static constexpr int kSum = Tile::kDim / 2;  // accumulators of 64 rows and all dims
  static constexpr int kScores = kGradientRows / 2;
  static constexpr int kSteps = Tile::kDim / 16;
  static constexpr int kRowSteps = kGradientRows / 16;
  static constexpr uint32_t kGroupRows = 64;

  __device__ __forceinline__ GradientConsumer(const PerListGradientParams& params,
                                              GradientShared<Tile>& shared)
      : params_(params),
        shared_(shared),
        group_(__shfl_sync(device::kFullMask, threadIdx.x / 128, 0) - 1),
        warp_(__shfl_sync(device::kFullMask, threadIdx.x / 32 % 4, 0)),
        lane_(threadIdx.x % 32) {}

  // All threads of both consumer warpgroups.
  __device__ __forceinline__ void run() {
    device::named_barrier_arrive(kDoneReading + group_, 256);
    unsigned tile_idx = 0;
    const uint32_t end = params_.run.first_task + params_.run.num_tasks;
    for (uint32_t task_idx = params_.run.first_task + blockIdx.x; task_idx < end; task_idx += gridDim.x) {
      int num_tiles, slot;
      prepare(task_idx, num_tiles, slot);
      char* partials = params_.run.partials +
                       int64_t{task_idx - params_.run.first_task} * params_.run.slots * kPartialBytes;
      float query_sum[kSum], scores[kScores], products[kScores];
#pragma unroll
      for (int i = 0; i < kSum; ++i) {
        query_sum[i] = 0.f;
      }
#pragma unroll 1
      for (; num_tiles > 0; --num_tiles, ++tile_idx, slot -= kGradientSlots) {
        step(tile_idx, params_.run.partials && slot >= 0, partials + slot * int64_t{kPartialBytes}, query_sum,
             scores, products);
      }
      if (params_.query.gradient) {
        store_queries(task_idx, query_sum);
      }
    }
  }

 private:
  static constexpr int kPartialBytes = static_cast<int>(partial_sum_bytes(Tile::kDim, Tile::kDim));

  // Loads the rows and numbers of a task. `slot` is the slot of this warp's parent in the first tile.
  __device__ __forceinline__ void prepare(uint32_t task_idx, int& num_tiles, int& slot) {
    const GradientTask task = gradient_task(params_, task_idx);
    num_tiles = task.num_tiles;
    slot = task.num_slots - 1 - 4 * group_ - warp_;
    if (task.num_slots == 0) {
      return;
    }
    const OperandPowers<T> powers(params_, task_idx, task.head_index);
    device::named_barrier_sync(kRowsMeet, 256);  // no warp reads the rows of the previous task any more
    load_gradient_rows<T, Tile, 256>(params_, task, powers, shared_, threadIdx.x - 128);
    device::named_barrier_sync(kRowsMeet, 256);
    score_factor_ = powers.score_factor(params_.gather.score_scale);
    product_factor_ = powers.weighted_gradient();
  }

  __device__ __forceinline__ void release(device::Barrier* empty) const {
    if (threadIdx.x % 128 == 0) {
      device::barrier_arrive(empty);
    }
  }

  // d = rows of `own` (the 64 keys of this warpgroup) times rows of `other` (the queries).
  template <typename E>
  __device__ __forceinline__ void keys_times_rows(float (&d)[kScores], const char* own,
                                                  const char* other) const {
    const uint64_t a = Operand::rows(own + group_ * kGroupRows * Tile::kRowBytes);
    const uint64_t b = Operand::rows(other);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      device::wgmma<E, kGradientRows>(d, Operand::dims(a, i), Operand::dims(b, i), i > 0);
    }
    device::wgmma_commit();
  }

  template <int kOther>
  __device__ __forceinline__ static float (&sum_registers(float (&free)[kScores],
                                                          float (&own)[kOther]))[kOther] {
    if constexpr (kOther == kScores) {
      return free;
    } else {
      return own;
    }
  }

  // Works on one tile. `partial` is where the sums of this warp's parent go, if it has one.
  __device__ __forceinline__ void step(unsigned tile_idx, bool has_partial, char* partial,
                                       float (&query_sum)[kSum], float (&scores)[kScores],
                                       float (&products)[kScores]) const {
    const int stage = gradient_stage<Tile>(tile_idx);
    const uint32_t phase = gradient_phase<Tile>(tile_idx);
    device::barrier_wait(&shared_.keys_full[stage], phase);
    keys_times_rows<__half>(scores, shared_.keys[stage], shared_.query);
    device::barrier_wait(&shared_.values_full[stage], phase);
    keys_times_rows<T>(products, shared_.values[stage], shared_.gradient);
    device::wgmma_wait<1>();
    device::pin_registers(scores);
    const uint32_t present = shared_.slots[stage][4 * group_ + warp_];
    if (present & kOwnSlot) {
      cut_own(scores, present);
    }
    if (present & kQuerySlot) {
      cut_queries(scores, shared_.query_masks[stage][4 * group_ + warp_]);
    }
    uint32_t weights[kRowSteps][4];
    weigh(scores, weights);
    if ((present & (kWholeSlot | kOwnSlot)) < kWholeSlot) {
      drop(weights, present);
    }
    device::named_barrier_sync(kDoneReading + (group_ ^ 1), 256);  // the previous dS may be overwritten
    device::wgmma_wait<0>();
    device::pin_registers(products);
    release(&shared_.values_empty[stage]);
    store_score_gradients(weights, products);
    // At full width these are the registers of dP^T and S^T: ptxas finds none for arrays beside them.
    float own_value_sum[kSum], own_key_sum[kSum];
    float(&value_sum)[kSum] = sum_registers(products, own_value_sum);
    float(&key_sum)[kSum] = sum_registers(scores, own_key_sum);
    device::wgmma_fence();
    const uint64_t gradient = Operand::transposed(shared_.gradient);
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i) {
      device::wgmma<T, Tile::kDim, device::Major::kMN>(
          value_sum, weights[i], device::advance(gradient, i * Tile::kSlotBytes), i > 0);
    }
    device::wgmma_commit();
    device::fence_async_shared();
    device::named_barrier_arrive(kOtherWrote + group_, 256);
    device::named_barrier_sync(kGroupWrote + group_, 128);
    add_queries(query_sum, stage, group_);
    device::wgmma_wait<1>();
    device::pin_registers(value_sum);
    device::wgmma_fence();
    const uint64_t own =
        device::k_major_descriptor<device::Swizzle::k128>(shared_.score_gradient + group_ * kGroupRows * 128);
    const uint64_t query = Operand::transposed(shared_.query);
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i) {
      device::wgmma<__half, Tile::kDim, device::Major::kK, device::Major::kMN>(
          key_sum, device::advance(own, i / 4 * Tile::kScoreHalfBytes + i % 4 * 32),
          device::advance(query, i * Tile::kSlotBytes), i > 0);
    }
    device::wgmma_commit();
    if (has_partial) {
      uint32_t packed[kSum / 2];
      pack_sum(value_sum, packed);
      store_partial(partial + Tile::kSlotBytes, packed);
    }
    device::named_barrier_sync(kOtherWrote + (group_ ^ 1), 256);
    add_queries(query_sum, stage, group_ ^ 1);
    device::wgmma_wait<1>();
    device::pin_registers(key_sum);
    uint32_t packed_key_sum[kSum / 2];
    pack_sum(key_sum, packed_key_sum);
    device::wgmma_wait<0>();
    device::pin_registers(query_sum);
    // Released before the stores, or what was spilled would be read back behind them.
    release(&shared_.keys_empty[stage]);
    device::named_barrier_arrive(kDoneReading + group_, 256);
    if (has_partial) {
      store_partial(partial, packed_key_sum);
    }
  }

  // query_sum += dS K' over the keys that warpgroup `of` owns.
  __device__ __forceinline__ void add_queries(float (&query_sum)[kSum], int stage, int of) const {
    const uint64_t a = device::mn_major_descriptor<device::Swizzle::k128>(
        shared_.score_gradient + group_ * Tile::kScoreHalfBytes + of * kGroupRows * 128,
        Tile::kScoreHalfBytes);
    const uint64_t b = Operand::transposed(shared_.keys[stage] + of * kGroupRows * Tile::kRowBytes);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kGroupRows / 16; ++i) {
      device::wgmma<__half, Tile::kDim, device::Major::kMN, device::Major::kMN>(
          query_sum, device::advance(a, i * 16 * 128), device::advance(b, i * Tile::kSlotBytes), true);
    }
    device::wgmma_commit();
  }

  // Removes the children of the queries' diagonal parent that lie past a query. This thread has keys lane / 4 and
  // lane / 4 + 8, for rows 8 i + 2 (lane % 4) and the next.
  __device__ __forceinline__ void cut_own(float (&scores)[kScores], uint32_t present) const {
    const int key = lane_ / 4;
    const uint32_t limits = device::shared_address(shared_.own_limit) + lane_ % 4 * 2;
    const int low = present >> key & 1 ? key : kParentRows,
              high = present >> key & 0x100 ? key + 8 : kParentRows;
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      uint32_t limit;
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(limit) : "r"(limits + 8 * i));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int end = limit >> 8 * j & 0xff;
        scores[4 * i + j] = low < end ? scores[4 * i + j] : -INFINITY;
        scores[4 * i + 2 + j] = high < end ? scores[4 * i + 2 + j] : -INFINITY;
      }
    }
  }

  // Clears the weights of children that take part for no query.
  __device__ __forceinline__ void drop(uint32_t (&weights)[kRowSteps][4], uint32_t present) const {
    const uint32_t low = present >> lane_ / 4 & 1 ? ~0u : 0u, high = present >> lane_ / 4 & 0x100 ? ~0u : 0u;
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights[i][j] &= j % 2 ? high : low;
      }
    }
  }

  // As cut_own(), by the masks of the queries.
  __device__ __forceinline__ void cut_queries(float (&scores)[kScores], const uint16_t* masks) const {
    const uint32_t from = device::shared_address(masks);
    const int key = lane_ / 4;
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      uint32_t mask;
      const int query = 8 * i + lane_ % 4 * 2 >> params_.group_shift;
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(mask) : "r"(from + query * 2));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        scores[4 * i + j] = mask >> key & 1 ? scores[4 * i + j] : -INFINITY;
        scores[4 * i + 2 + j] = mask >> key & 0x100 ? scores[4 * i + 2 + j] : -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void weigh(const float (&scores)[kScores],
                                        uint32_t (&weights)[kRowSteps][4]) const {
    const uint32_t sums = device::shared_address(shared_.log_sum) + lane_ % 4 * 8;
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 sum = load_shared_pair(sums + 32 * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* s = scores + 4 * i + 2 * half;
        weights[i / 2][i % 2 * 2 + half] =
            device::pack_pair<T>(device::exp2_flushed(fmaf(s[0], score_factor_, -sum.x)),
                                 device::exp2_flushed(fmaf(s[1], score_factor_, -sum.y)));
      }
    }
  }

  // Stores dS^T = P^T (dP^T - delta) to shared memory, in fp16.
  __device__ __forceinline__ void store_score_gradients(const uint32_t (&weights)[kRowSteps][4],
                                                        const float (&products)[kScores]) const {
    const uint32_t deltas = device::shared_address(shared_.delta) + lane_ % 4 * 8;
    // Matrix lane / 8 of a store: its bit 0 chooses among keys, its bit 1 among rows.
    const int key = group_ * kGroupRows + warp_ * 16 + lane_ / 8 % 2 * 8 + lane_ % 8;
    const uint32_t to =
        device::shared_address(shared_.score_gradient) + key * 128 + ((lane_ / 16 ^ key) % 8) * 16;
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 delta = load_shared_pair(deltas + 64 * i + j / 2 * 32);
        const float2 weight = unpack_pair<T>(weights[i][j]);
        const float* dp = products + 8 * i + 2 * j;
        packed[j] = device::pack_pair<__half>(weight.x * fmaf(dp[0], product_factor_, -delta.x),
                                              weight.y * fmaf(dp[1], product_factor_, -delta.y));
      }
      // Chunk 2 i + lane / 16, of 8 rows each.
      device::store_matrices((to ^ i % 4 * 32) + i / 4 * Tile::kScoreHalfBytes, packed);
    }
  }

  __device__ __forceinline__ static void pack_sum(const float (&sum)[kSum], uint32_t (&packed)[kSum / 2]) {
#pragma unroll
    for (int i = 0; i < kSum / 2; ++i) {
      packed[i] = device::pack_pair<__nv_bfloat16>(sum[2 * i], sum[2 * i + 1]);
    }
  }

  // In the order of the accumulators, the 16 bytes of all lanes side by side: see partial_sum.cuh.
  __device__ __forceinline__ void store_partial(char* partial, const uint32_t (&sum)[kSum / 2]) const {
    uint4* to = reinterpret_cast<uint4*>(partial) + lane_;
#pragma unroll
    for (int i = 0; i < kSum / 8; ++i) {
      __stcs(to + 32 * i, make_uint4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
    }
  }

  // Rotates dQ back by the query's position and adds it to dQ of the layers above.
  __device__ __forceinline__ void store_queries(uint32_t task_idx, const float (&sum)[kSum]) const {
    constexpr int kHalf = Tile::kDim / 2;
    const GatherParams& p = params_.gather;
    // Found a second time: kept, it would cost registers of the products.
    const GradientTask task = gradient_task(params_, task_idx);
    if (task.num_slots == 0 && !params_.query.first && !params_.query.last) {
      return;
    }
    const float factor = OperandPowers<T>(params_, task_idx, task.head_index).query_factor(params_.scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const PairPlace at = pair_place(p, task, group_ * kGroupRows + warp_ * 16 + lane_ / 4 + 8 * h);
      if (!at.exists) {
        continue;
      }
      const int64_t head = int64_t{task.kv_head} * p.group + at.head;
      const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
      float* partial = params_.query.partial +
                       ((task.batch * int64_t{p.num_queries} + at.query) * num_heads + head) * Tile::kDim;
      T* out = static_cast<T*>(params_.query.gradient) + task.batch * params_.query.gradient_batch +
               (at.query * num_heads + head) * Tile::kDim;
      const float2* rotations = p.rope + int64_t{position_of(p, task, at.query)} * kHalf + lane_ % 4 * 2;
      // All loads come before the first store, which might go to the same address.
      float4 rotation[kSum / 8];
      float2 old[kSum / 8][2] = {};
#pragma unroll
      for (int i = 0; i < kSum / 8; ++i) {
        rotation[i] = *reinterpret_cast<const float4*>(rotations + 8 * i);
      }
      if (!params_.query.first) {
#pragma unroll
        for (int i = 0; i < kSum / 8; ++i) {
          const float* from = partial + 8 * i + lane_ % 4 * 2;
          old[i][0] = *reinterpret_cast<const float2*>(from);
          old[i][1] = *reinterpret_cast<const float2*>(from + kHalf);
        }
      }
#pragma unroll
      for (int i = 0; i < kSum / 8; ++i) {
        const int dim = 8 * i + lane_ % 4 * 2;
        const float* low = sum + 4 * i + 2 * h;
        const float* high = low + kSum / 2;
        store_pair(partial + dim, out + dim, old[i][0],
                   (low[0] * rotation[i].x + high[0] * rotation[i].y) * factor,
                   (low[1] * rotation[i].z + high[1] * rotation[i].w) * factor);
        store_pair(partial + dim + kHalf, out + dim + kHalf, old[i][1],
                   (high[0] * rotation[i].x - low[0] * rotation[i].y) * factor,
                   (high[1] * rotation[i].z - low[1] * rotation[i].w) * factor);
      }
    }
  }

  __device__ __forceinline__ void store_pair(float* partial, T* out, float2 old, float x, float y) const {
    if (!params_.query.first) {
      x += old.x;
      y += old.y;
    }
    if (params_.query.last) {
      *reinterpret_cast<uint32_t*>(out) = device::pack_pair<T>(x, y);
    } else {
      *reinterpret_cast<float2*>(partial) = make_float2(x, y);
    }
  }

  const PerListGradientParams& params_;
  GradientShared<Tile>& shared_;
  int group_, warp_, lane_;
  float score_factor_, product_factor_;
};

}  // namespace htree::tree_attention
