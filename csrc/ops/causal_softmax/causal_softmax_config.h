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

// `block_size` 0: one warp per row up to 1024 columns, else the fewest of 128, 256, 512, 1024 threads that
// hold the row at 16 elements each; 512 or 1024 force that many. Rows beyond 32 elements per thread take the
// looping kernel.
inline KernelConfig choose_config(int64_t cols, bool vectorised, int block_size) {
  if (block_size == 0 && cols <= 1024) {
    const int elems = cols <= 256 ? 8 : cols <= 512 ? 16 : 32;
    return {kWarp, kRowsPerBlock, elems, vectorised};
  }
  int threads = block_size;
  if (threads == 0) {
    threads = 128;
    while (threads < 1024 && int64_t{threads} * 32 < cols) {
      threads *= 2;
    }
  }
  const int elems = int64_t{threads} * 16 >= cols ? 16 : int64_t{threads} * 32 >= cols ? 32 : 0;
  return {threads, 1, elems, vectorised};
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
