// Kernels of the Hadamard transform: a tile is loaded once into registers, transformed
// there, and stored once.
//
// For the two half types the first four stages, two of them across lanes, are one product with the 16-point
// matrix H_16 per eight rows on the tensor cores. Its inputs and its +-1 are exact in those types and it
// accumulates in fp32, so no intermediate is rounded to half and no shuffle is spent. (The idea of tensor
// cores for Hadamard transforms is that of "HadaCore", Agarwal et al. 2024; here only the stages whose inputs
// are the stored values take them.) The other stages are additions of registers, shuffles, and, for rows of
// more than a warp, one exchange through shared memory.
#pragma once

#include "device/butterfly.cuh"
#include "ops/hadamard/hadamard_tile.cuh"

namespace htree::hadamard {

// Which bits of the element index belong to a thread's registers, and which to the number of the thread,
// while a row of several warps is stored. The exchange gives a thread the undone bits [kFirst, kFirst +
// kCount). Bits [0, kVectorBits) stay together, so that vectors are stored, and where registers are left the
// highest bits fill them. The other bits go to the threads in ascending order, so that the lanes of a warp
// store adjacent vectors.
template <typename Tr>
struct Exchange {
  static constexpr bool kHalf = sizeof(typename Tr::T) == 2;
  // The vectors of a thread need bit 0. Bits for which no registers are left are done by
  // shuffles before the exchange.
  static constexpr int kShuffled = kHalf ? (Tr::kWarpBits > 2 ? Tr::kWarpBits - 2 : 0) : 5;
  static constexpr int kDoneLanes = kHalf ? 2 + kShuffled : 5;
  static constexpr int kFirst = Tr::kPackBits + kDoneLanes;
  static constexpr int kCount = Tr::kWarpBits + 5 - kDoneLanes;
  static constexpr int kVectorBits =
      Tr::kElemBits - kCount < Tr::kPackBits ? Tr::kElemBits - kCount : Tr::kPackBits;
  static constexpr int kTopBits = Tr::kElemBits - kVectorBits - kCount;
  static constexpr int kVector = 1 << kVectorBits;
  static_assert(kVectorBits >= 1 && kTopBits >= 0);
  static_assert((kFirst - kVectorBits) + (Tr::kLog2N - kTopBits - kFirst - kCount) == 5 + Tr::kWarpBits);

  // Where vector `vector` of a thread stands in the row.
  static __device__ __forceinline__ int place(int vector, int thread) {
    constexpr int kLowThreadBits = kFirst - kVectorBits;
    return (thread & ((1 << kLowThreadBits) - 1)) << kVectorBits | (vector & ((1 << kCount) - 1)) << kFirst |
           (thread >> kLowThreadBits) << (kFirst + kCount) | (vector >> kCount) << (Tr::kLog2N - kTopBits);
  }

  // Where element i stands in shared memory. Every lane writes a pack of eight floats by two 16-byte
  // accesses: without the swizzle lanes i and i + 4 would meet in the same banks.
  static __device__ __forceinline__ int slot(int i) { return kHalf ? i ^ (i >> 3 & 4) : i; }
};

// The stages of bits 0, 2, 3 and 4 of the index, on the pack's 8 values in each of four neighbouring lanes,
// over the whole warp. Lane i holds row i / 4 of the product; the words of its pack are bits 1 and 2 of the
// index. For the fragments of the 16 x 8 matrices see mma.m16n8k16 in the PTX ISA.
template <typename T>
__device__ __forceinline__ void first_four_stages(const Pack<T, 8>& raw, uint32_t signs, float* value) {
  const auto* words = reinterpret_cast<const uint32_t*>(&raw);
  const uint32_t flipped = signs ^ 0x80008000u;  // the sign flips where bit 2 of both input and result is set
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    float* d = value + 4 * upper;
    const uint32_t last = upper == 0 ? signs : flipped;
    if constexpr (__is_same(T, __half)) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%10, %10, %10, %10};"
          : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
          : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(signs), "r"(last), "f"(0.0f));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%10, %10, %10, %10};"
          : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
          : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(signs), "r"(last), "f"(0.0f));
    }
  }
}

// Lane i's pair of the 8 x 8 matrix H_8: rows 2 * (i % 4) and the next of column i / 4, as 1 or -1 in T.
template <typename T>
__device__ __forceinline__ uint32_t sign_pair() {
  const uint32_t lane = threadIdx.x % device::kWarpSize;
  const uint32_t column = lane / 4;
  const uint32_t row = lane % 4 * 2;
  constexpr uint32_t kOne = __is_same(T, __half) ? 0x3c00u : 0x3f80u;
  const uint32_t low = kOne | (__popc(row & column) & 1u) << 15;
  const uint32_t high = kOne | (__popc((row + 1) & column) & 1u) << 15;
  return high << 16 | low;
}

// Converts the stored packs to fp32 (fp64) values and does the stages inside a pack and those
// of kDoneLanes lane bits.
template <typename Tr>
struct FirstStages {
  static constexpr bool kTensorCores = sizeof(typename Tr::T) == 2 && Tr::kLog2N >= Tr::kPackBits + 2;
  static constexpr int kDoneLanes = kTensorCores ? 2 : 0;

  static __device__ __forceinline__ void run(const Raw<Tr>& raw, typename Tr::A (&value)[Tr::kElems]) {
    if constexpr (kTensorCores) {
      const uint32_t signs = sign_pair<typename Tr::T>();
#pragma unroll
      for (int pack = 0; pack < Tr::kPacks; ++pack) {
        first_four_stages(raw[pack], signs, value + pack * Tr::kPackElems);
      }
      device::butterfly_registers<1>(value);
    } else {
#pragma unroll
      for (int i = 0; i < Tr::kElems; ++i) {
        value[i] = device::to_acc(raw[i / Tr::kPackElems][i % Tr::kPackElems]);
      }
      device::butterfly_register_bits<0, (Tr::kLog2N < Tr::kPackBits ? Tr::kLog2N : Tr::kPackBits)>(value);
    }
  }
};

// Exchanges the values of a row of several warps through shared memory: in go packs, out come the vectors of
// Exchange. It calls __syncthreads once, then meanwhile(), before the values are read back.
template <typename Tr, typename Meanwhile>
__device__ __forceinline__ void exchange(typename Tr::A (&value)[Tr::kElems], typename Tr::A* shared,
                                         Meanwhile&& meanwhile) {
  using A = typename Tr::A;
  using Ex = Exchange<Tr>;
  constexpr int kWide = 16 / sizeof(A) < Tr::kPackElems ? 16 / sizeof(A) : Tr::kPackElems;
  const int thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < Tr::kElems; i += kWide) {
    const int at = place_of<Tr>(i / Tr::kPackElems, thread) + i % Tr::kPackElems;
    device::store_pack(shared + Ex::slot(at), *reinterpret_cast<const Pack<A, kWide>*>(&value[i]));
  }
  __syncthreads();
  meanwhile();
  constexpr int kRead = 16 / sizeof(A) < Ex::kVector ? 16 / sizeof(A) : Ex::kVector;
#pragma unroll
  for (int i = 0; i < Tr::kElems; i += kRead) {
    const int at = Ex::place(i / Ex::kVector, thread) + i % Ex::kVector;
    const auto in = device::load_pack<kRead>(shared + Ex::slot(at));
#pragma unroll
    for (int e = 0; e < kRead; ++e) {
      value[i + e] = in[e];
    }
  }
}

// Transforms and stores a row of several warps that has been loaded.
template <typename Tr, typename Params, typename Meanwhile>
__device__ __forceinline__ void transform_row(const Params& p, const RowNumbers& rows, uint32_t row,
                                              const Raw<Tr>& raw, typename Tr::A* shared,
                                              Meanwhile&& meanwhile) {
  using Ex = Exchange<Tr>;
  typename Tr::A value[Tr::kElems];
  FirstStages<Tr>::run(raw, value);
  device::butterfly_register_bits<Tr::kPackBits, Tr::kElemBits>(value);
  device::butterfly_lane_bits<FirstStages<Tr>::kDoneLanes, Ex::kDoneLanes>(value);
  exchange<Tr>(value, shared, meanwhile);
  device::butterfly_register_bits<Ex::kVectorBits, Ex::kVectorBits + Ex::kCount>(value);
  store_tile<Tr, Ex::kVector>(p, rows, row, value,
                              [](int vector) { return Ex::place(vector, static_cast<int>(threadIdx.x)); });
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    transform_kernel(const __grid_constant__ TransformParams<typename Tr::T, typename Tr::A> p,
                     const __grid_constant__ RowNumbers rows) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kTileThreadBits = Tr::kLaneBits + Tr::kWarpBits;
  const int thread_in_tile = threadIdx.x & ((1 << kTileThreadBits) - 1);
  const uint32_t tile = blockIdx.x * Tr::kConfig.tiles_per_block() + (threadIdx.x >> kTileThreadBits);
  const uint32_t first_row = tile << Tr::kLog2RowsPerTile;
  Raw<Tr> raw;
  load_tile<Tr>(p, rows, first_row, thread_in_tile, raw);
  if constexpr (Tr::kWarpBits > 0) {
    transform_row<Tr>(p, rows, first_row, raw, reinterpret_cast<typename Tr::A*>(shared), [] {});
  } else {
    // In a tile with several short rows only the bits within a row are transformed.
    constexpr int kLanes =
        Tr::kLog2N - Tr::kPackBits < Tr::kLaneBits ? Tr::kLog2N - Tr::kPackBits : Tr::kLaneBits;
    constexpr int kPacks = Tr::kLog2N - Tr::kPackBits - Tr::kLaneBits;
    typename Tr::A value[Tr::kElems];
    FirstStages<Tr>::run(raw, value);
    device::butterfly_register_bits<Tr::kPackBits, Tr::kPackBits + kPacks>(value);
    device::butterfly_lane_bits<FirstStages<Tr>::kDoneLanes, kLanes>(value);
    store_tile<Tr, Tr::kPackElems>(p, rows, first_row, value,
                                   [&](int pack) { return place_of<Tr>(pack, thread_in_tile); });
  }
}

// Starts copies of a thread's packs to the thread's own places in shared memory. They
// are done after cp.async.wait_all.
template <typename Tr, Access kAccess, typename Params, typename P>
__device__ __forceinline__ void prefetch_row(const Params& p, const RowNumbers& rows, uint32_t row,
                                             P* staged) {
  using T = typename Tr::T;
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(staged + pack * Tr::kBlock + threadIdx.x));
    visit<Tr, kAccess, Tr::kPackElems>(
        p.x, rows, p.log2_segment, row, place_of<Tr>(pack, static_cast<int>(threadIdx.x)),
        [&](const T* at) {
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(at) : "memory");
        },
        [](const T*, int) {});
  }
}

// Of the streaming kernel on a multiprocessor: 128 of its 65536 registers for each. The compiler keeps to
// that up to Hopper. For sm_100 and sm_120 it takes 255 and spills, unless it is told.
constexpr int kStreamedThreads = 65536 / 128;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define HTREE_STREAMED_BOUNDS __launch_bounds__(Tr::kBlock, kStreamedThreads / Tr::kBlock)
#else
#define HTREE_STREAMED_BOUNDS __launch_bounds__(Tr::kBlock)
#endif

// For rows so long that few blocks fit on a multiprocessor. Each block goes from row to row, and the next row
// is copied to shared memory while this one is exchanged and stored. Shared memory holds the exchange and one
// staged row. x.access must not be kElements.
template <typename Tr>
__global__ void HTREE_STREAMED_BOUNDS
streaming_kernel(const __grid_constant__ TransformParams<typename Tr::T, typename Tr::A> p,
                 const __grid_constant__ RowNumbers rows) {
  using P = Pack<typename Tr::T, Tr::kPackElems>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* exchanged = reinterpret_cast<typename Tr::A*>(shared);
  auto* staged = reinterpret_cast<P*>(shared + (sizeof(typename Tr::A) << Tr::kLog2N));
  const auto prefetch = [&](uint32_t row) {
    if (row < rows.num_rows) {
      if (p.x.access == Access::kWhole) {
        prefetch_row<Tr, Access::kWhole>(p, rows, row, staged);
      } else {
        prefetch_row<Tr, Access::kSegments>(p, rows, row, staged);
      }
    }
  };
  prefetch(blockIdx.x);
  for (uint32_t row = blockIdx.x; row < rows.num_rows; row += gridDim.x) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    Raw<Tr> raw;
#pragma unroll
    for (int pack = 0; pack < Tr::kPacks; ++pack) {
      raw[pack] = staged[pack * Tr::kBlock + threadIdx.x];
    }
    // All threads have read the exchange of the previous row, which this one overwrites.
    __syncthreads();
    transform_row<Tr>(p, rows, row, raw, exchanged, [&] { prefetch(row + gridDim.x); });
  }
}

// y[i], y[i + n/2] = scale * (y[i] +- y[i + n/2]); a block per 256 elements of the first half of a row.
template <typename T>
__global__ void __launch_bounds__(256)
    join_halves_kernel(const __grid_constant__ TransformParams<T, Acc<T>> p,
                       const __grid_constant__ RowNumbers rows) {
  const int half = 1 << (p.log2_length - 1);
  const uint32_t row = blockIdx.x / (half / 256);
  const int i = blockIdx.x % (half / 256) * 256 + threadIdx.x;
  T* start = row_start(p.y, rows, row);
  T* low = element_of<Access::kElements>(start, p.y, p.log2_segment, i);
  T* high = element_of<Access::kElements>(start, p.y, p.log2_segment, i + half);
  const Acc<T> a = device::to_acc(*low);
  const Acc<T> b = device::to_acc(*high);
  *low = device::from_acc<T>((a + b) * p.scale);
  *high = device::from_acc<T>((a - b) * p.scale);
}

}  // namespace htree::hadamard
