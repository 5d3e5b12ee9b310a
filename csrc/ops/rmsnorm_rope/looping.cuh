// rmsnorm_rope for rows of any width and alignment: one block per row walks over the pairs (j, j + head_dim /
// 2). The forward keeps the row in shared memory between its two passes where it fits there. The backward
// reads its rows twice.
#pragma once

#include "ops/rmsnorm_rope/rmsnorm_rope.cuh"

namespace htree::rmsnorm_rope {

// A thread takes kPack consecutive pairs at a time: packs of 16 bytes, or one pair where
// rows are not aligned.
template <typename Element, int kPack_>
struct LoopingTraits {
  using T = Element;
  static constexpr int kPack = kPack_;
  static constexpr int kThreads = kLoopingThreads;
  static constexpr int kBlock = kThreads;
  static constexpr int kScratch = kThreads / device::kWarpSize;
};

// Calls f(column of the lower pack, column in the half head) for pair t of thread t and every kThreads-th
// pair after it.
template <typename Tr, typename F>
__device__ __forceinline__ void for_pairs(const Shape& shape, const device::FastDivisor& packs_per_half,
                                          F&& f) {
  const uint32_t count = static_cast<uint32_t>(shape.width / (2 * Tr::kPack));
  for (uint32_t pair = threadIdx.x; pair < count; pair += Tr::kThreads) {
    const uint32_t head = packs_per_half.quotient(pair);
    const int in_half = static_cast<int>(packs_per_half.remainder(pair, head)) * Tr::kPack;
    f(static_cast<int>(head) * shape.head_dim + in_half, in_half);
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    looping_forward_kernel(const __grid_constant__ ForwardParams<typename Tr::T> p,
                           const __grid_constant__ RowsView rows,
                           const __grid_constant__ device::FastDivisor packs_per_half, bool keep) {
  using T = typename Tr::T;
  using A = Acc<T>;
  extern __shared__ uint4 ring[];
  T* const kept = reinterpret_cast<T*>(ring);
  __shared__ A scratch[Tr::kScratch];
  const RowIndex index(rows, blockIdx.x);
  const int half = p.shape.head_dim / 2;
  const T* const x = index.of(p.x);
  T* const y = index.of(p.y);

  A square[1] = {};
  for_pairs<Tr>(p.shape, packs_per_half, [&](int column, int) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const auto pack = device::load_pack<Tr::kPack>(x + column + side * half);
#pragma unroll
      for (int i = 0; i < Tr::kPack; ++i) {
        square[0] += device::to_acc(pack[i]) * device::to_acc(pack[i]);
      }
      if (keep) {
        device::store_pack(kept + column + side * half, pack);
      }
    }
  });
  row_sums<Tr>(square, scratch);
  const A scale = reciprocal_root(square[0] / static_cast<A>(p.shape.width) + static_cast<A>(p.shape.eps));

  const T* const source = keep ? kept : x;  // a thread reads back what it kept itself
  for_pairs<Tr>(p.shape, packs_per_half, [&](int column, int in_half) {
    Rotation<A, Tr::kPack> rotation;
    rotation.load(p.cos, p.sin, index.batch, index.position, in_half);
    A w_lower[Tr::kPack], w_upper[Tr::kPack];
    load_both(p.weight.data, p.weight.dtype, column, column + half, w_lower, w_upper);
    const auto x_lower = device::load_pack<Tr::kPack>(source + column);
    const auto x_upper = device::load_pack<Tr::kPack>(source + column + half);
    Pack<T, Tr::kPack> out[2];
#pragma unroll
    for (int i = 0; i < Tr::kPack; ++i) {
      A lower, upper;
      rotation.apply(i, device::to_acc(x_lower[i]) * scale * w_lower[i],
                     device::to_acc(x_upper[i]) * scale * w_upper[i], lower, upper);
      out[0][i] = device::from_acc<T>(lower);
      out[1][i] = device::from_acc<T>(upper);
    }
    device::store_pack_streaming(y + column, out[0]);
    device::store_pack_streaming(y + column + half, out[1]);
  });
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    looping_backward_kernel(const __grid_constant__ BackwardParams<typename Tr::T> p,
                            const __grid_constant__ RowsView rows,
                            const __grid_constant__ device::FastDivisor packs_per_half) {
  using T = typename Tr::T;
  using A = Acc<T>;
  __shared__ A scratch[2][2 * Tr::kScratch];
  const int half = p.shape.head_dim / 2;
  // A thread meets the same columns in every row, so the block's sums need no exchange.
  A* const dw = p.dw_blocks == nullptr ? nullptr : p.dw_blocks + int64_t{blockIdx.x} * p.shape.width;

  for (uint32_t i_row = 0; i_row < rows.count_of_block(); ++i_row) {
    const RowIndex index(rows, rows.first_of_block() + i_row);
    const T* const dy = index.of(p.dy);
    const T* const x = index.of(p.x);
    // Calls f(column, x, dn, w) for both halves of every pair.
    const auto for_gradients = [&](auto&& f) {
      for_pairs<Tr>(p.shape, packs_per_half, [&](int column, int in_half) {
        Rotation<A, Tr::kPack> rotation;
        rotation.load(p.cos, p.sin, index.batch, index.position, in_half);
        const auto dy_lower = device::load_pack<Tr::kPack>(dy + column);
        const auto dy_upper = device::load_pack<Tr::kPack>(dy + column + half);
        A dn[2][Tr::kPack], w[2][Tr::kPack];
#pragma unroll
        for (int i = 0; i < Tr::kPack; ++i) {
          rotation.transposed(i, device::to_acc(dy_lower[i]), device::to_acc(dy_upper[i]), dn[0][i],
                              dn[1][i]);
        }
        load_both(p.weight.data, p.weight.dtype, column, column + half, w[0], w[1]);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          f(column + side * half, device::load_pack<Tr::kPack>(x + column + side * half), dn[side], w[side]);
        }
      });
    };
    A sums[2] = {};
    for_gradients([&](int, const auto& x_pack, const auto& dn, const auto& w) {
#pragma unroll
      for (int i = 0; i < Tr::kPack; ++i) {
        const A value = device::to_acc(x_pack[i]);
        sums[0] += value * value;
        sums[1] += dn[i] * w[i] * value;
      }
    });
    row_sums<Tr>(sums, scratch[i_row % 2]);
    const A inverse_width = A(1) / static_cast<A>(p.shape.width);
    const A scale = reciprocal_root(sums[0] * inverse_width + static_cast<A>(p.shape.eps));
    const A shrink = sums[1] * scale * inverse_width * scale * scale;
    for_gradients([&](int column, const auto& x_pack, const auto& dn, const auto& w) {
      Pack<T, Tr::kPack> out;
#pragma unroll
      for (int i = 0; i < Tr::kPack; ++i) {
        const A value = device::to_acc(x_pack[i]);
        out[i] = device::from_acc<T>(dn[i] * w[i] * scale - value * shrink);
        if (dw != nullptr) {
          const A before = i_row == 0 ? A(0) : dw[column + i];
          dw[column + i] = before + dn[i] * (value * scale);
        }
      }
      if (p.dx.data != nullptr) {
        device::store_pack_streaming(index.of(p.dx) + column, out);
      }
    });
  }
}

}  // namespace htree::rmsnorm_rope
