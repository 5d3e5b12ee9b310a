// The choice of kernel for causal_softmax on CUDA: a pure function of the problem, printable and
// tested on the CPU.
#pragma once

#include <cstdint>
#include <string>

namespace htree::causal_softmax {

inline constexpr int kWarp = 32;
inline constexpr int kMaxThreads = 1024;
inline constexpr int kRowsPerBlock = 4;  // where a row has one warp
inline constexpr int kPackBytes = 16;

struct RowProblem {
  int64_t cols = 0;
  int element_size = 4;    // bytes
  bool vectorised = true;  // unit column stride, and every row starts at a multiple of 16 bytes
  bool backward = false;
  int block_size = 0;               // 512 or 1024 threads per row; 0 chooses
  int64_t shared_bytes = 48 << 10;  // the most shared memory of a block on the device
};

// `threads` threads work on one row, and each holds `elems_per_thread` of its elements in registers; 0 is the
// looping kernel, which reads a row twice and takes any length. `rows_per_block` rows share a block, one warp
// each. `vectorised` rows move in 16-byte packs, others element by element. With `stages` a block goes from
// row to row and has copies of that many rows on their way to shared memory; with 0 it takes one row.
struct KernelConfig {
  int threads = 0;
  int rows_per_block = 1;
  int elems_per_thread = 0;
  bool vectorised = false;
  int stages = 0;

  int64_t shared_bytes(int element_size, int num_tensors) const {
    return int64_t{num_tensors} * stages * threads * rows_per_block * elems_per_thread * element_size;
  }
};

inline int next_power_of_two(int64_t least, int from) {
  int value = from;
  while (value < least) {
    value *= 2;
  }
  return value;
}

// One block for each row. A thread holds up to 32 elements of the half types or 16 of the wider ones, and as
// few threads take the row as can hold it.
inline KernelConfig choose_block_per_row(const RowProblem& p) {
  const int held = p.element_size == 2 ? 32 : 16;
  if (p.block_size == 0 && p.cols <= kWarp * held) {
    return {kWarp, kRowsPerBlock, next_power_of_two((p.cols + kWarp - 1) / kWarp, 8), p.vectorised, 0};
  }
  const int threads = p.block_size != 0 ? p.block_size
                      : p.cols > kMaxThreads * held
                          ? kMaxThreads
                          : next_power_of_two((p.cols + held - 1) / held, 2 * kWarp);
  const bool narrow = p.block_size == 0 ? held == 16 : int64_t{threads} * 16 >= p.cols;
  const int elems = narrow && int64_t{threads} * 16 >= p.cols ? 16 : int64_t{threads} * 32 >= p.cols ? 32 : 0;
  return {threads, 1, elems, p.vectorised, 0};
}

// Blocks that go from row to row: for the backward, whose two inputs are twice the loads to hide, and for
// long forward rows of the half types, of which few blocks fit on a multiprocessor. A thread has 4 packs of a
// row, or up to 8 where one warp has the row to itself. `stages` is 0 where that does not fit.
inline KernelConfig choose_streaming(const RowProblem& p) {
  const bool half = p.element_size == 2;
  if (p.block_size != 0 || !p.vectorised || p.element_size > 4 ||
      (!p.backward && (!half || p.cols <= 4096))) {
    return {};
  }
  const int pack = kPackBytes / p.element_size;
  const int lane_packs = half && p.backward ? 8 : 4;
  KernelConfig config{kWarp, kRowsPerBlock, 0, true, 2};
  if (p.cols <= int64_t{kWarp} * lane_packs * pack) {
    config.elems_per_thread = next_power_of_two((p.cols + kWarp * pack - 1) / (kWarp * pack), 1) * pack;
  } else if (p.cols <= int64_t{p.backward ? kMaxThreads : 512} * 4 * pack) {
    config.threads = next_power_of_two((p.cols + 4 * pack - 1) / (4 * pack), 2 * kWarp);
    config.rows_per_block = 1;
    config.elems_per_thread = 4 * pack;
    config.stages = p.backward && config.threads >= 512 ? 1 : 2;
  } else {
    return {};
  }
  return config.shared_bytes(p.element_size, p.backward ? 2 : 1) <= p.shared_bytes ? config : KernelConfig{};
}

inline KernelConfig choose_config(const RowProblem& p) {
  const KernelConfig streaming = choose_streaming(p);
  return streaming.stages > 0 ? streaming : choose_block_per_row(p);
}

inline std::string describe(const KernelConfig& config) {
  const std::string text = std::to_string(config.threads) + " threads per row, " +
                           std::to_string(config.rows_per_block) + " rows per block, " +
                           (config.vectorised ? "16-byte packs, " : "single elements, ");
  if (config.elems_per_thread == 0) {
    return text + "two reads of the row";
  }
  return text + std::to_string(config.elems_per_thread) + " elements per thread" +
         (config.stages > 0 ? ", " + std::to_string(config.stages) + " rows in flight" : "");
}

}  // namespace htree::causal_softmax
