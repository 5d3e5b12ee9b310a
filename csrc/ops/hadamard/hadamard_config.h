// The shape of the CUDA kernel for one dtype and length: a pure function, printable and tested on the CPU.
#pragma once

#include <string>

namespace htree::hadamard {

// How the bits of the element index are shared out while the row is loaded, lowest bits first: to the
// elements of a 16-byte pack, the lanes, the warps, and the packs of a thread. Rows shorter than
// 2^tile_bits() share a tile.
struct KernelConfig {
  int pack_bits;
  int elem_bits;  // registers of a thread: the bits of a pack and of its packs
  int lane_bits;
  int warp_bits;

  constexpr int tile_bits() const { return elem_bits + lane_bits + warp_bits; }
  constexpr int packs_bits() const { return elem_bits - pack_bits; }
  // Threads of a block: one tile of several warps, or four warps with tiles of their own.
  constexpr int threads() const { return warp_bits > 0 ? 32 << warp_bits : 128; }
  constexpr int tiles_per_block() const { return threads() >> (lane_bits + warp_bits); }
};

// A thread holds 32 values up to n = 128 and 64 beyond, half as many doubles. A row has at least four lanes,
// so that every load of a warp fills pieces of 64 bytes, and a block where a warp does not suffice.
constexpr KernelConfig choose_config(int element_size, int log2_length) {
  const bool is_double = element_size == 8;
  const int short_length = is_double ? 6 : 7;
  const int elem_bits = (is_double ? 4 : 5) + (log2_length > short_length ? 1 : 0);
  const int pack_bits = element_size == 2 ? 3 : element_size == 4 ? 2 : 1;
  const int others = log2_length - elem_bits;
  const int lane_bits = others < 2 ? 2 : others > 5 ? 5 : others;
  return {pack_bits, elem_bits, lane_bits, others > 5 ? others - 5 : 0};
}

// 32768 doubles fill the registers of a multiprocessor. Such a row takes two transforms of half the length,
// then one butterfly.
constexpr bool is_split(int element_size, int log2_length) {
  return element_size == 8 && log2_length == 15;
}

inline std::string describe(const KernelConfig& config) {
  return std::to_string(1 << config.elem_bits) + " elements per thread, " +
         std::to_string(1 << (config.lane_bits + config.warp_bits)) + " threads per tile, " +
         std::to_string(config.tiles_per_block()) + " tiles per block";
}

}  // namespace htree::hadamard
