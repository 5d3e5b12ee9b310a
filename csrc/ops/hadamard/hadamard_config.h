// The shape of the CUDA kernel for one dtype and length: a pure function, printable and tested on the CPU.
#pragma once

#include <string>

namespace htree::hadamard {

// Bits of the element index, lowest first, by who holds them while the row is loaded: a pack of 16 bytes, the
// lanes, the warps, and the packs of one thread. Rows shorter than `tile_bits` share a tile.
struct KernelConfig {
  int pack_bits;
  int elem_bits;  // registers of a thread: the pack and the packs
  int lane_bits;
  int warp_bits;

  constexpr int tile_bits() const { return elem_bits + lane_bits + warp_bits; }
  constexpr int packs_bits() const { return elem_bits - pack_bits; }
  // Threads of a block: a tile, or four warps of tiles.
  constexpr int threads() const { return warp_bits > 0 ? 32 << warp_bits : 128; }
  constexpr int tiles_per_block() const { return threads() >> (lane_bits + warp_bits); }
};

// 32 values in registers up to n = 128, 64 beyond, half as many doubles; at least four lanes on a row, so
// that every load of a warp fills 64-byte pieces; a block where a warp does not suffice.
constexpr KernelConfig choose_config(int element_size, int log2_length) {
  const bool is_double = element_size == 8;
  const int short_length = is_double ? 6 : 7;
  const int elem_bits = (is_double ? 4 : 5) + (log2_length > short_length ? 1 : 0);
  const int pack_bits = element_size == 2 ? 3 : element_size == 4 ? 2 : 1;
  const int others = log2_length - elem_bits;
  const int lane_bits = others < 2 ? 2 : others > 5 ? 5 : others;
  return {pack_bits, elem_bits, lane_bits, others > 5 ? others - 5 : 0};
}

// 32768 doubles fill the registers of a multiprocessor: two transforms of half the
// length, then one butterfly.
constexpr bool is_split(int element_size, int log2_length) {
  return element_size == 8 && log2_length == 15;
}

inline std::string describe(const KernelConfig& config) {
  return std::to_string(1 << config.elem_bits) + " elements per thread, " +
         std::to_string(1 << (config.lane_bits + config.warp_bits)) + " threads per tile, " +
         std::to_string(config.tiles_per_block()) + " tiles per block";
}

}  // namespace htree::hadamard
