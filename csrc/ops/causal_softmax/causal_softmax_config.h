// The choice of kernel for causal_softmax on CUDA: a pure function of the problem, printable and tested on
// the CPU.
#pragma once

#include <cstdint>
#include <string>

namespace htree::causal_softmax {

// `threads` work on one row and hold `elems_per_thread` of its elements each in registers; 0 is the looping
// kernel, which reads a row twice and takes any length. `rows_per_block` rows share a block, one warp each.
// `vectorised` rows move in 16-byte packs, the others (a column stride, a misaligned start) element by
// element.
struct KernelConfig {
  int threads;
  int rows_per_block;
  int elems_per_thread;
  bool vectorised;
};

inline constexpr int kWarp = 32;
inline constexpr int kRowsPerBlock = 4;

// Elements of a row that one thread may hold: 32 floats' worth of registers.
inline int most_elems_per_thread(bool vectorised, int element_size) {
  return vectorised && element_size == 2 ? 64 : 32;
}

// `block_size` 0: one warp per row up to 1024 columns, 2048 of packed 16-bit values, else the fewest of 128,
// 256, 512, 1024 threads that hold the row: the more of a row a thread holds, the more bytes are in flight on
// an SM and the fewer instructions are spent around a row. 512 or 1024 force that many. Longer rows take the
// looping kernel.
inline KernelConfig choose_config(int64_t cols, bool vectorised, int element_size, int block_size) {
  const int most = most_elems_per_thread(vectorised, element_size);
  int threads = block_size;
  if (threads == 0) {
    threads = kWarp;
    if (cols > int64_t{kWarp} * most) {
      threads = 128;
      while (threads < 1024 && int64_t{threads} * most < cols) {
        threads *= 2;
      }
    }
  }
  int elems = threads == kWarp ? 8 : 16;
  while (elems <= most && int64_t{threads} * elems < cols) {
    elems *= 2;
  }
  const bool held = elems <= most && !(threads == 1024 && elems == 64);
  return {threads, threads == kWarp ? kRowsPerBlock : 1, held ? elems : 0, vectorised};
}

inline std::string describe(const KernelConfig& config) {
  const std::string text = std::to_string(config.threads) + " threads per row, " +
                           std::to_string(config.rows_per_block) + " rows per block, " +
                           (config.vectorised ? "16-byte packs, " : "single elements, ");
  return config.elems_per_thread == 0
             ? text + "two reads of the row"
             : text + std::to_string(config.elems_per_thread) + " elements per thread";
}

}  // namespace htree::causal_softmax
