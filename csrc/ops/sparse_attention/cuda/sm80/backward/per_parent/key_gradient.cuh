// dK and dV of a layer, docs/semantics/tree_attention.md §1.10, for any number of query heads per kv head:
// one thread block per (batch, kv head, parent) walks the parent's inverted list.
//
// It names the lists that hold the parent; with each come stride * G rows (query, head). Each of the four warps
// takes a quarter of the rows and streams them through shared memory, 16 at a time: S^T = K' q^T and dP^T = V
// dO^T with the parent's children as rows, then dV += P^T dO and dK' += dS^T q from the same registers. The
// sums of the warps are added in their order at the end, so the result depends on the lists alone.
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/sm80/backward/gradient_rows.cuh"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/cuda/sm80/rotated_query.cuh"

namespace htree::tree_attention {

constexpr int kKeyGradientWarps = 4;
constexpr int kKeyGradientStages = 3;

// What a row sees of the parent.
struct RowView {
  unsigned present;  // bit c: child c takes part in the row's softmax
  int position;      // rotation of the query for this slot: n - 1 - 16 slot
};

// One step of a warp in shared memory: 16 rows of queries and of dO, a RowMeta and a RowView for each.
template <int kKeyDim, int kValueDim>
struct KeyGradientStage {
  static constexpr int kQueryBytes = kParentRows * kKeyDim * 2;
  static constexpr int kGradientBytes = kParentRows * kValueDim * 2;
  static constexpr int kMetaOffset = kQueryBytes + kGradientBytes;
  static constexpr int kViewOffset = kMetaOffset + kParentRows * 16;
  static constexpr int kBytes = kViewOffset + kParentRows * 8;
  static constexpr int kBlockBytes = (PackedParent<kKeyDim, kValueDim>::kBytes + 127) / 128 * 128;
  static constexpr int kWarpBytes = kKeyGradientStages * kBytes;
  // At the end the sums of the warps are stored where the stages were.
  static constexpr int kSumTiles = kKeyDim / 8 + kValueDim / 8;
  static constexpr int kSharedBytes = kBlockBytes + kKeyGradientWarps * kWarpBytes;
  static_assert(kBytes % 128 == 0 && kSumTiles * 512 <= kWarpBytes);
};

// The rows that reference a parent: rows_per_list (query, head) pairs of each list.
struct InvertedList {
  const uint32_t* entries;  // null: implicit lists; those from `first_list` on hold the parent
  uint32_t first_list;
  uint32_t num_rows;
  uint32_t rows_per_list;
  int64_t parent;
  int head_idx, batch, kv_head;
  int span_shift;

  __device__ __forceinline__ InvertedList(const KeyGradientParams& params) {
    const GatherParams& p = params.common.gather;
    parent = blockIdx.x;
    head_idx = blockIdx.y;
    batch = head_idx / p.num_kv_heads;
    kv_head = head_idx % p.num_kv_heads;
    rows_per_list = static_cast<uint32_t>(p.stride * p.group);
    span_shift = __ffsll(p.node_span) - 1;
    uint32_t num_lists;
    if (params.entries) {
      const uint32_t* offset = params.offsets + head_idx * (p.num_parents + 1) + parent;
      entries = params.entries + offset[0];
      num_lists = offset[1] - offset[0];
      first_list = 0;
    } else {
      entries = nullptr;
      // Lists whose last parent comes before this one do not hold it, and above the bottom a list that
      // refines everything adds nothing.
      int64_t first_token = parent * kParentRows * p.node_span;
      if (params.common.selected) {
        first_token = max(first_token, p.list_width * p.node_span);
      }
      const int64_t first = max((first_token - p.t0 + p.stride - 1) / p.stride, int64_t{0});
      first_list = static_cast<uint32_t>(min(first, int64_t{p.num_lists}));
      num_lists = p.num_lists - first_list;
    }
    num_rows = num_lists * rows_per_list;
  }
};

// Copies the steps of one warp. Lanes i and i + 16 look after row i.
template <int kKeyDim, int kValueDim>
class RowStream {
 public:
  using Stage = KeyGradientStage<kKeyDim, kValueDim>;

  __device__ __forceinline__ RowStream(const KeyGradientParams& params, const InvertedList& inverted,
                                       uint32_t begin, uint32_t end, uint32_t ring)
      : params_(params),
        inverted_(inverted),
        next_(begin),
        end_(end),
        begin_(begin),
        ring_(ring),
        lane_(threadIdx.x % 32) {
    entry_ = read_entry(begin);
#pragma unroll
    for (int i = 0; i < kKeyGradientStages; ++i) {
      issue();
    }
  }

  __device__ __forceinline__ uint32_t wait(uint32_t step) {
    device::wait_copies<kKeyGradientStages - 1>();
    __syncwarp();
    return ring_ + (step - begin_) % kKeyGradientStages * Stage::kBytes;
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    issue();
  }

 private:
  __device__ __forceinline__ uint32_t row_of(uint32_t step) const {
    return step * kParentRows + lane_ % kParentRows;
  }

  __device__ __forceinline__ uint32_t read_entry(uint32_t step) const {
    const uint32_t row = row_of(step);
    if (step >= end_ || row >= inverted_.num_rows) {
      return 0;
    }
    const uint32_t list = row / inverted_.rows_per_list;
    return inverted_.entries ? inverted_.entries[list]
                             : (inverted_.first_list + list) * params_.common.gather.entries_of_list() +
                                   static_cast<uint32_t>(inverted_.parent);
  }

  // Stores the numbers of the step issued last. They were loaded then, so that no lane waits for them now.
  __device__ __forceinline__ void store_views() {
    if (next_ > begin_ && next_ - 1 < end_ && lane_ < kParentRows) {
      const GradientParams& common = params_.common;
      const int64_t rightmost = token_ >> inverted_.span_shift;
      const int place = sees_whole_ ? kParentRows - 1 : static_cast<int>(rightmost % kParentRows);
      const int count = params_.entries ? count_ : static_cast<int>(rightmost / kParentRows) + 1;
      const int position = (count - 1 - slot_) * kParentRows + place;
      // Above the bottom a query's diagonal block is always refined.
      const int64_t rows = min(static_cast<int64_t>(position) + (common.selected ? 0 : 1),
                               rightmost + 1 - inverted_.parent * kParentRows);
      const unsigned inside = rows >= kParentRows ? 0xffffu : (1u << max(static_cast<int>(rows), 0)) - 1u;
      const uint32_t at =
          ring_ + (next_ - 1 - begin_) % kKeyGradientStages * Stage::kBytes + Stage::kViewOffset;
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + lane_ * 8),
                   "r"(exists_ ? inside & ~mask_ : 0u), "r"(exists_ ? max(position, 0) : 0)
                   : "memory");
    }
  }

  __device__ __forceinline__ void issue() {
    store_views();
    if (next_ < end_) {
      const GradientParams& common = params_.common;
      const GatherParams& p = common.gather;
      const uint32_t row = row_of(next_);
      const uint32_t list_row = entry_ / p.entries_of_list();
      const uint32_t in_list = row % inverted_.rows_per_list;
      const uint32_t query = list_row * p.stride + in_list / p.group;
      exists_ = row < inverted_.num_rows && query < static_cast<uint32_t>(p.num_queries);
      slot_ = static_cast<int>(entry_ % p.entries_of_list());
      token_ = p.t0 + query;
      const int64_t list_idx =
          (inverted_.batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + inverted_.kv_head;
      count_ = params_.entries && exists_ ? params_.counts[list_idx] : 0;
      sees_whole_ = p.list_sizes && exists_ && p.list_sizes[list_idx] < 0;
      mask_ = common.selected && exists_
                  ? reinterpret_cast<const uint16_t*>(common.selected + list_idx * common.mask_words)[slot_]
                  : 0;
      const uint32_t record = exists_ ? query * p.group + in_list % p.group : 0u;
      const int64_t first_record = int64_t{inverted_.head_idx} * p.num_queries * p.group;
      const uint32_t stage = ring_ + (next_ - begin_) % kKeyGradientStages * Stage::kBytes;
      constexpr int kQueryChunks = kKeyDim / 8, kChunks = (kKeyDim + kValueDim) / 8;
#pragma unroll
      for (int i = 0; i < kParentRows * kChunks / 32; ++i) {
        const int at = i * 32 + lane_;
        const int to_row = at / kChunks, chunk = at % kChunks;
        const uint32_t from = __shfl_sync(device::kFullMask, record, to_row);
        const int bytes = __shfl_sync(device::kFullMask, exists_ ? 16 : 0, to_row);
        const uint32_t to = chunk < kQueryChunks
                                ? chunk_offset<kKeyDim>(to_row, chunk)
                                : Stage::kQueryBytes + chunk_offset<kValueDim>(to_row, chunk - kQueryChunks);
        copy_or_zero(stage + to,
                     common.records + (first_record + from) * (2 * (kKeyDim + kValueDim)) + chunk * 16,
                     bytes);
      }
      if (lane_ < kParentRows) {
        copy_or_zero(stage + Stage::kMetaOffset + lane_ * 16, common.meta + first_record + record,
                     exists_ ? 16 : 0);
      }
      entry_ = read_entry(next_ + 1);
    }
    device::commit_copies();
    ++next_;
  }

  __device__ __forceinline__ static void copy_or_zero(uint32_t shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
  }

  const KeyGradientParams& params_;
  const InvertedList& inverted_;
  uint32_t next_, end_, begin_, ring_;
  int lane_;
  uint32_t entry_;
  bool exists_ = false;
  bool sees_whole_ = false;  // the last parent of the list, which is not the diagonal one
  int slot_ = 0, count_ = 0;
  unsigned mask_ = 0;
  int64_t token_ = 0;
};

// Rotates the 16 query rows of a stage to their positions, in place.
template <int kKeyDim, int kValueDim>
__device__ __forceinline__ void rotate_rows(uint32_t stage, const float2* rope) {
  using Stage = KeyGradientStage<kKeyDim, kValueDim>;
  constexpr int kHalfChunks = kKeyDim / 16;
#pragma unroll
  for (int i = 0; i < kParentRows * kHalfChunks / 32; ++i) {
    const int unit = i * 32 + threadIdx.x % 32;
    const int row = unit / kHalfChunks, chunk = unit % kHalfChunks;
    int position;
    asm volatile("ld.shared.s32 %0, [%1];"
                 : "=r"(position)
                 : "r"(stage + Stage::kViewOffset + row * 8 + 4)
                 : "memory");
    const float4* rotations =
        reinterpret_cast<const float4*>(rope + static_cast<int64_t>(position) * (kKeyDim / 2) + chunk * 8);
    const uint32_t low_at = stage + chunk_offset<kKeyDim>(row, chunk);
    const uint32_t high_at = stage + chunk_offset<kKeyDim>(row, chunk + kHalfChunks);
    uint32_t low[4], high[4];
    const auto load = [](uint32_t(&x)[4], uint32_t at) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(at)
                   : "memory");
    };
    const auto store = [](const uint32_t(&x)[4], uint32_t at) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                   "r"(x[3])
                   : "memory");
    };
    load(low, low_at);
    load(high, high_at);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float4 rotation = rotations[pair];  // cos, sin of two dims
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(low[pair]));
      const float2 y = __half22float2(reinterpret_cast<const __half2&>(high[pair]));
      low[pair] =
          device::pack_pair<__half>(x.x * rotation.x - y.x * rotation.y, x.y * rotation.z - y.y * rotation.w);
      high[pair] =
          device::pack_pair<__half>(x.x * rotation.y + y.x * rotation.x, x.y * rotation.w + y.y * rotation.z);
    }
    store(low, low_at);
    store(high, high_at);
  }
  __syncwarp();
}

// s[i] += 16 children, the rows of A, times rows 8 i ... of B. Both are [16, kDim] tiles in shared memory.
template <typename T, int kDim>
__device__ __forceinline__ void rows_times_rows(float (&s)[2][4], uint32_t a_tile, uint32_t b_tile,
                                                const TileAddress<kDim>& at) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4], b[4];
    device::load_matrices(a, a_tile + at.plain(step));
    device::load_matrices(b, b_tile + at.transposed(step));
    device::mma_16x8x16<T>(s[0], a, b[0], b[1]);
    device::mma_16x8x16<T>(s[1], a, b[2], b[3]);
  }
}

// sum[i] += weights (16 children x 16 rows) times dims 8 i ... of a tile [16 rows, kDim].
template <typename T, int kDim>
__device__ __forceinline__ void weights_times_rows(float (&sum)[kDim / 8][4], const uint32_t (&weights)[4],
                                                   uint32_t tile, const TileAddress<kDim>& at) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t b[4];
    device::load_matrices_transposed(b, tile + at.plain(step));
    device::mma_16x8x16<T>(sum[2 * step], weights, b[0], b[1]);
    device::mma_16x8x16<T>(sum[2 * step + 1], weights, b[2], b[3]);
  }
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(at)
               : "memory");
  return x;
}

// For the 16 rows of a step: scores become weights, dP becomes dS.
template <typename Stage>
__device__ __forceinline__ void weigh_rows(int lane, uint32_t stage, float score_unit, float gradient_unit,
                                           const float (&row_unscale)[2], float (&s)[2][4],
                                           float (&dp)[2][4]) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile * 8 + lane % 4 * 2 + i;
      const float4 meta = load_shared_float4(stage + Stage::kMetaOffset + row * 16);  // RowMeta
      unsigned present;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(present)
                   : "r"(stage + Stage::kViewOffset + row * 8)
                   : "memory");
      const float score_scale = meta.z * score_unit;
      const float gradient_scale = meta.z * gradient_unit;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e = i + 2 * half;
        const bool here = present >> (lane / 4 + 8 * half) & 1;
        const float score = s[tile][e] * row_unscale[half] * score_scale;
        const float weight = here ? device::exp2_flushed(score - meta.x) : 0.f;
        s[tile][e] = weight;
        dp[tile][e] = here ? weight * (dp[tile][e] - meta.y) * gradient_scale : 0.f;
      }
    }
  }
}

// Adds the sums of the warps in their order and stores them; dK is rotated back by the child's place under
// its parent. The whole block calls.
template <int kKeyDim, int kValueDim>
__device__ __forceinline__ void store_sums(const KeyGradientParams& params, char* shared, int64_t parent,
                                           const PowerOfTwo& power, const float (&key_sum)[kKeyDim / 8][4],
                                           const float (&value_sum)[kValueDim / 8][4]) {
  using Stage = KeyGradientStage<kKeyDim, kValueDim>;
  const GradientParams& common = params.common;
  const GatherParams& p = common.gather;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // [warp][tile][lane]
  float4* sums = reinterpret_cast<float4*>(shared + Stage::kBlockBytes);
  const auto sum_at = [&](int of_warp, int tile) -> float4& {
    return sums[(of_warp * Stage::kSumTiles + tile) * 32 + lane];
  };
#pragma unroll
  for (int tile = 0; tile < kKeyDim / 8; ++tile) {
    sum_at(warp, tile) = make_float4(key_sum[tile][0], key_sum[tile][1], key_sum[tile][2], key_sum[tile][3]);
  }
#pragma unroll
  for (int tile = 0; tile < kValueDim / 8; ++tile) {
    sum_at(warp, kKeyDim / 8 + tile) =
        make_float4(value_sum[tile][0], value_sum[tile][1], value_sum[tile][2], value_sum[tile][3]);
  }
  __syncthreads();
  const auto total = [&](int tile, float(&x)[4]) {
    float4 all = sum_at(0, tile);
#pragma unroll
    for (int i = 1; i < kKeyGradientWarps; ++i) {
      const float4 other = sum_at(i, tile);
      all.x += other.x, all.y += other.y, all.z += other.z, all.w += other.w;
    }
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
  };
  const int64_t first_row = (int64_t{blockIdx.y} * p.num_parents + parent) * kParentRows;
  const auto write = [&](float* to, float x, float y) {
    float2* at = reinterpret_cast<float2*>(to);
    const float2 old = params.add ? *at : make_float2(0.f, 0.f);
    *at = make_float2(old.x + x, old.y + y);
  };
  if (params.keys) {
    for (int tile = warp; tile < kKeyDim / 16; tile += kKeyGradientWarps) {
      float low[4], high[4];
      total(tile, low);
      total(tile + kKeyDim / 16, high);
      const int dim = tile * 8 + lane % 4 * 2;
      const float factor = power.inverse * common.scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        float a[2], b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // keys were rotated by the child's place when they were packed
          const float2 rotation = p.rope[row * (kKeyDim / 2) + dim + i];
          a[i] = (low[2 * half + i] * rotation.x + high[2 * half + i] * rotation.y) * factor;
          b[i] = (high[2 * half + i] * rotation.x - low[2 * half + i] * rotation.y) * factor;
        }
        float* to = params.keys + (first_row + row) * kKeyDim + dim;
        write(to, a[0], a[1]);
        write(to + kKeyDim / 2, b[0], b[1]);
      }
    }
  }
  if (params.values) {
    for (int tile = warp; tile < kValueDim / 8; tile += kKeyGradientWarps) {
      float x[4];
      total(kKeyDim / 8 + tile, x);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        write(params.values + (first_row + lane / 4 + 8 * half) * kValueDim + tile * 8 + lane % 4 * 2,
              x[2 * half], x[2 * half + 1]);
      }
    }
  }
}

// Grid: x = parents, those with the longest inverted lists first, y = batch * kv head.
template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kKeyGradientWarps * 32, 2) key_gradient_kernel(KeyGradientParams params) {
  using Block = PackedParent<kKeyDim, kValueDim>;
  using Stage = KeyGradientStage<kKeyDim, kValueDim>;
  extern __shared__ __align__(128) char shared[];
  const GradientParams& common = params.common;
  const GatherParams& p = common.gather;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const InvertedList inverted(params);
  if (inverted.num_rows == 0 && params.add) {
    return;
  }
  const uint32_t block = device::shared_address(shared);
  const char* from = p.packed + (int64_t{blockIdx.y} * p.num_parents + inverted.parent) * Block::kBytes;
  for (int at = threadIdx.x * 16; at < Block::kBytes; at += kKeyGradientWarps * 32 * 16) {
    device::copy_async_16(block + at, from + at);
  }
  device::commit_copies();
  device::wait_copies<0>();
  __syncthreads();

  const PowerOfTwo power = parent_power(common, inverted.parent);
  float key_sum[kKeyDim / 8][4] = {}, value_sum[kValueDim / 8][4] = {};
  const uint32_t num_steps = (inverted.num_rows + kParentRows - 1) / kParentRows;
  const uint32_t steps_per_warp = (num_steps + kKeyGradientWarps - 1) / kKeyGradientWarps;
  const uint32_t begin = min(warp * steps_per_warp, num_steps), end = min(begin + steps_per_warp, num_steps);
  if (begin < end) {
    RowStream<kKeyDim, kValueDim> stream(params, inverted, begin, end,
                                         block + Stage::kBlockBytes + warp * Stage::kWarpBytes);
    const TileAddress<kKeyDim> key_at;
    const TileAddress<kValueDim> value_at;
    float row_unscale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_unscale[i] = *reinterpret_cast<const float*>(shared + Block::kScaleOffset + (lane / 4 + 8 * i) * 4);
    }
    for (uint32_t step = begin; step < end; ++step) {
      const uint32_t stage = stream.wait(step);
      rotate_rows<kKeyDim, kValueDim>(stage, p.rope);
      float s[2][4] = {}, dp[2][4] = {};
      rows_times_rows<__half>(s, block, stage, key_at);
      if (params.keys) {
        rows_times_rows<T>(dp, block + Block::kValueOffset, stage + Stage::kQueryBytes, value_at);
      }
      weigh_rows<Stage>(lane, stage, p.score_scale, power.scale, row_unscale, s, dp);
      if (params.values) {
        const uint32_t weights[4] = {
            device::pack_pair<T>(s[0][0], s[0][1]), device::pack_pair<T>(s[0][2], s[0][3]),
            device::pack_pair<T>(s[1][0], s[1][1]), device::pack_pair<T>(s[1][2], s[1][3])};
        weights_times_rows<T>(value_sum, weights, stage + Stage::kQueryBytes, value_at);
      }
      if (params.keys) {
        const uint32_t weights[4] = {
            device::pack_pair<__half>(dp[0][0], dp[0][1]), device::pack_pair<__half>(dp[0][2], dp[0][3]),
            device::pack_pair<__half>(dp[1][0], dp[1][1]), device::pack_pair<__half>(dp[1][2], dp[1][3])};
        weights_times_rows<__half>(key_sum, weights, stage, key_at);
      }
      stream.release();
    }
    device::wait_copies<0>();
  }
  __syncthreads();

  store_sums<kKeyDim, kValueDim>(params, shared, inverted.parent, power, key_sum, value_sum);
}

template <typename T, int kDim>
cudaError_t launch_key_gradient(const KeyGradientParams& params, cudaStream_t stream) {
  const GatherParams& p = params.common.gather;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(p.num_parents), p.num_batches * p.num_kv_heads),
                          .threads = kKeyGradientWarps * 32,
                          .shared_bytes = KeyGradientStage<kDim, kDim>::kSharedBytes};
  return launch_kernel(key_gradient_kernel<T, kDim, kDim>, shape, stream, params);
}

}  // namespace htree::tree_attention
