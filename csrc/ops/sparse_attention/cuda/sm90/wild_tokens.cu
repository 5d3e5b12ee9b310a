// The kernel of wild_tokens.h: a warp has a parent.
#include "ops/sparse_attention/cuda/sm90/wild_tokens.h"

#include "host/cuda/kernel_launch.h"
#include "ops/tree/cuda/sm90/dense_layer.cuh"
#include "ops/tree/plan/dense_rows.h"

namespace htree::tree_attention {
namespace {

constexpr int kWildWarps = 8;

// Whether an element of `eight` is infinite or NaN, or has at least the exponent of `least`, the bits of a positive one.
__device__ __forceinline__ bool any_from(const uint4& eight, uint32_t least) {
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  bool any = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    any |= (words[i] & 0x7fffu) >= least || (words[i] >> 16 & 0x7fffu) >= least;
  }
  return any;
}

// Grid: x = runs of kWildWarps parents of all heads.
__global__ void __launch_bounds__(kWildWarps * 32)
    wild_tokens_kernel(WildTokens p, int64_t num_parents, uint32_t least_key, uint32_t least_value) {
  const int lane = threadIdx.x % 32;
  const int64_t parent = int64_t{blockIdx.x} * kWildWarps + threadIdx.x / 32;
  if (parent >= num_parents) {
    return;
  }
  const int64_t tile = parent / kTileParents;
  const int first = static_cast<int>(parent % kTileParents) * kTensorCoreRate;  // row of the tile
  const auto for_each_chunk = [&](char* tiles, int dim, auto&& use) {
    char* rows = tiles + tile * dense_tile_bytes(dim);
    const int chunks = dim / 8;
#pragma unroll 4
    for (int i = lane; i < kTensorCoreRate * chunks; i += 32) {
      const int row = i / chunks;
      use(row,
          *reinterpret_cast<uint4*>(rows + panel_offset(kDenseTileNodes, first + row, i - row * chunks)));
    }
  };
  unsigned wild = 0;
  for_each_chunk(p.tiles.keys, p.shape.key_dim,
                 [&](int row, const uint4& eight) { wild |= any_from(eight, least_key) ? 1u << row : 0u; });
  for_each_chunk(p.tiles.values, p.shape.value_dim,
                 [&](int row, const uint4& eight) { wild |= any_from(eight, least_value) ? 1u << row : 0u; });
  wild = __reduce_or_sync(device::kFullMask, wild);
  if (lane == 0) {
    p.wild[parent] = static_cast<uint16_t>(wild);
  }
  if (wild == 0) {
    return;
  }
  const auto silence = [&](int row, uint4& eight) {
    if (wild >> row & 1) {
      eight = make_uint4(0, 0, 0, 0);
    }
  };
  for_each_chunk(p.tiles.keys, p.shape.key_dim, silence);
  for_each_chunk(p.tiles.values, p.shape.value_dim, silence);
  if (lane < kTensorCoreRate && wild >> lane & 1) {
    p.tiles.scales[tile * kDenseTileNodes + first + lane] = 1.f;
  }
}

}  // namespace

cudaError_t launch_wild_tokens(const WildTokens& params, cudaStream_t stream) {
  const int64_t parents = params.num_heads * params.tiles.num_tiles * kTileParents;
  constexpr uint32_t kInfiniteHalf = 0x7c00, kInfiniteBFloat16 = 0x7f80;
  constexpr uint32_t kLargeBFloat16 = (127 + 32) << 7;  // 2^32
  static_assert(kLargeBFloat16 < kInfiniteBFloat16);
  const uint32_t least_value = params.shape.dtype == HalfType::kHalf ? kInfiniteHalf : kLargeBFloat16;
  return launch_kernel(wild_tokens_kernel,
                       {.grid = num_blocks(parents, kWildWarps), .threads = kWildWarps * 32}, stream, params,
                       parents, kInfiniteHalf, least_value);
}

}  // namespace htree::tree_attention
