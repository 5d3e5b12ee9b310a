// How a tile of rows is loaded into registers and stored: numbers of rows, addresses, packs.
#pragma once

#include <cstdint>

#include "device/divmod.cuh"
#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "ops/hadamard/hadamard_config.h"
#include "ops/hadamard/hadamard_params.h"

namespace htree::hadamard {

using device::Acc;
using device::Pack;

// The divisions that find a row's place in the three dims of rows from its number.
struct RowNumbers {
  device::FastDivisor middle;
  device::FastDivisor inner;
  uint32_t num_rows;
  bool one_dim;
};

template <typename Element, int kLog2Length>
struct Traits {
  using T = Element;
  using A = Acc<T>;
  static constexpr KernelConfig kConfig = choose_config(sizeof(T), kLog2Length);
  static constexpr int kLog2N = kLog2Length;
  static constexpr int kPackBits = kConfig.pack_bits;
  static constexpr int kElemBits = kConfig.elem_bits;
  static constexpr int kLaneBits = kConfig.lane_bits;
  static constexpr int kWarpBits = kConfig.warp_bits;
  static constexpr int kTileBits = kConfig.tile_bits();
  static constexpr int kPackElems = 1 << kPackBits;
  static constexpr int kPacks = 1 << kConfig.packs_bits();
  static constexpr int kElems = 1 << kElemBits;
  static constexpr int kLog2RowsPerTile = kTileBits - kLog2N;
  static constexpr int kBlock = kConfig.threads();
  static_assert(kLog2RowsPerTile >= 0 && kBlock <= 1024);
  static_assert(kWarpBits == 0 || (kLaneBits == 5 && kLog2RowsPerTile == 0),
                "a block per row, or whole warps");
};

// The start of a row. A row that has more elements than a thread has registers is addressed by
// 32-bit indices within it.
template <typename T>
__device__ __forceinline__ T* row_start(const RowView<T>& view, const RowNumbers& rows, uint32_t row) {
  if (rows.one_dim) {
    return view.data + static_cast<int64_t>(row) * view.strides[2];
  }
  const uint32_t above = rows.inner.quotient(row);
  const uint32_t outer = rows.middle.quotient(above);
  return view.data + static_cast<int64_t>(outer) * view.strides[0] +
         static_cast<int64_t>(rows.middle.remainder(above, outer)) * view.strides[1] +
         static_cast<int64_t>(rows.inner.remainder(row, above)) * view.strides[2];
}

template <Access kAccess, typename T>
__device__ __forceinline__ T* element_of(T* row, const RowView<T>& view, int log2_segment, int i) {
  if constexpr (kAccess == Access::kWhole) {
    return row + i;
  } else {
    return row + static_cast<int64_t>(i >> log2_segment) * view.segment_stride +
           (i & ((1 << log2_segment) - 1));
  }
}

// Calls whole(address) where a vector of kCount elements is one aligned piece of memory, else step(address,
// i) for those of its elements i that exist. `v` is the vector's place in the tile.
template <typename Tr, Access kAccess, int kCount, typename T, typename Whole, typename Step>
__device__ __forceinline__ void visit(const RowView<T>& view, const RowNumbers& rows, int log2_segment,
                                      uint32_t first_row, int v, Whole&& whole, Step&& step) {
  constexpr int kN = 1 << Tr::kLog2N;
  constexpr int kRowsPerVector = kN >= kCount ? 1 : kCount / kN;
  const uint32_t row = Tr::kLog2RowsPerTile == 0 ? first_row : first_row + (v >> Tr::kLog2N);
  const int i = Tr::kLog2RowsPerTile == 0 ? v : v & (kN - 1);
  // Rows shorter than the vector lie one after another (Access::kWhole says so), and the last vector
  // may be cut off.
  if (kAccess != Access::kElements && row + kRowsPerVector <= rows.num_rows) {
    whole(element_of<kAccess>(row_start(view, rows, row), view, log2_segment, i));
    return;
  }
  if (kRowsPerVector == 1 && (kAccess != Access::kElements || row >= rows.num_rows)) {
    return;
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const uint32_t its_row = row + ((i + e) >> Tr::kLog2N);
    if (its_row < rows.num_rows) {
      T* start = row_start(view, rows, its_row);
      step(element_of<Access::kElements>(start, view, log2_segment, (i + e) & (kN - 1)), e);
    }
  }
}

// Place in the tile of pack `pack` of a thread. Its bits are, from the lowest: pack, lane, warp,
// number of the pack.
template <typename Tr>
__device__ __forceinline__ int place_of(int pack, int thread_in_tile) {
  return thread_in_tile << Tr::kPackBits | pack << (Tr::kPackBits + Tr::kLaneBits + Tr::kWarpBits);
}

template <typename Tr>
using Raw = Pack<typename Tr::T, Tr::kPackElems>[Tr::kPacks];

template <typename Tr, Access kAccess, typename Params>
__device__ __forceinline__ void load_tile(const Params& p, const RowNumbers& rows, uint32_t first_row,
                                          int thread_in_tile, Raw<Tr>& raw) {
  using T = typename Tr::T;
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    raw[pack] = {};
    visit<Tr, kAccess, Tr::kPackElems>(
        p.x, rows, p.log2_segment, first_row, place_of<Tr>(pack, thread_in_tile),
        [&](const T* at) { raw[pack] = device::load_pack<Tr::kPackElems>(at); },
        [&](const T* at, int e) { raw[pack][e] = *at; });
  }
}

// Loads a tile; missing rows read as zeros.
template <typename Tr, typename Params>
__device__ __forceinline__ void load_tile(const Params& p, const RowNumbers& rows, uint32_t first_row,
                                          int thread_in_tile, Raw<Tr>& raw) {
  if (p.x.access == Access::kWhole) {
    load_tile<Tr, Access::kWhole>(p, rows, first_row, thread_in_tile, raw);
  } else if (p.x.access == Access::kSegments) {
    load_tile<Tr, Access::kSegments>(p, rows, first_row, thread_in_tile, raw);
  } else {
    load_tile<Tr, Access::kElements>(p, rows, first_row, thread_in_tile, raw);
  }
}

// Scales, rounds once and stores vectors of kCount values. place(vector) is where a vector lies in the tile.
template <typename Tr, Access kAccess, int kCount, typename Params, typename Place>
__device__ __forceinline__ void store_tile(const Params& p, const RowNumbers& rows, uint32_t first_row,
                                           const typename Tr::A (&value)[Tr::kElems], Place&& place) {
  using T = typename Tr::T;
#pragma unroll
  for (int vector = 0; vector < Tr::kElems / kCount; ++vector) {
    typename Tr::A scaled[kCount];
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      scaled[e] = value[vector * kCount + e] * p.scale;
    }
    Pack<T, kCount> out;
    device::from_acc<T>(scaled, out.data);
    visit<Tr, kAccess, kCount>(
        p.y, rows, p.log2_segment, first_row, place(vector),
        [&](T* at) { device::store_pack_streaming(at, out); }, [&](T* at, int e) { *at = out[e]; });
  }
}

template <typename Tr, int kCount, typename Params, typename Place>
__device__ __forceinline__ void store_tile(const Params& p, const RowNumbers& rows, uint32_t first_row,
                                           const typename Tr::A (&value)[Tr::kElems], Place&& place) {
  if (p.y.access == Access::kWhole) {
    store_tile<Tr, Access::kWhole, kCount>(p, rows, first_row, value, place);
  } else if (p.y.access == Access::kSegments) {
    store_tile<Tr, Access::kSegments, kCount>(p, rows, first_row, value, place);
  } else {
    store_tile<Tr, Access::kElements, kCount>(p, rows, first_row, value, place);
  }
}

}  // namespace htree::hadamard
