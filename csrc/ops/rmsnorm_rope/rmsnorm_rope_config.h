// The choice of kernel for rmsnorm_rope on CUDA: a pure function of the problem, printable and
// tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace htree::rmsnorm_rope {

// `threads` threads work on one row. Each holds `pairs` pairs of 16-byte packs: one in the lower half
// of a head and its partner in the upper half. Rows of at most a warp share blocks of kSharedBlock
// threads. `stages` rows are under way at a time: 1 loads into registers, 2 and 3 load ahead into
// shared memory. `pairs` 0 is the looping kernel: one block per row, any width; it moves 16-byte
// packs where `vectorised` holds.
struct KernelConfig {
  int threads;
  int pairs;
  int stages;
  bool vectorised;

  bool found() const { return threads > 0; }
};

inline constexpr int kSharedBlock = 128;
inline constexpr int kLoopingThreads = 512;
inline constexpr int kStaticSharedBytes = 2048;  // an upper bound of what the kernels declare
inline constexpr int kOnChipWidth = 16384;  // the looping kernel keeps rows up to this width in shared memory

// Tuple of the tuning space RMSNORM_ROPE: BLOCK_SIZE threads per row, num_warps per block, num_stages rows
// under way. A row of more than a warp has its block to itself, so BLOCK_SIZE must be 32 num_warps.
struct ForcedConfig {
  int64_t block_size;
  int64_t num_warps;
  int64_t num_stages;
};

constexpr bool in_compiled_space(const ForcedConfig& forced) {
  return (forced.block_size == 64 || forced.block_size == 128 || forced.block_size == 256) &&
         forced.block_size == 32 * forced.num_warps && forced.num_stages >= 1 && forced.num_stages <= 3;
}

// 16-byte packs of half a head.
constexpr int packs_per_half(int64_t head_dim, int element_size) {
  return static_cast<int>(head_dim * element_size / 32);
}

// Threads that have work: a multiple of the packs in half a head, so that a thread meets one place of the
// tables only and loads it once for all its pairs.
inline int active_threads(int threads, int packs_per_half) {
  return packs_per_half > threads ? 0 : threads - threads % packs_per_half;
}

// The most pairs of packs that a thread can hold: 32 elements.
constexpr int max_pairs(int64_t element_size) {
  return static_cast<int>(element_size);
}

// Pairs per thread that cover the row; 0 where no more than `most` would.
inline int pairs_per_thread(int threads, int64_t num_pairs, int packs_per_half, int most) {
  const int active = active_threads(threads, packs_per_half);
  if (active == 0) {
    return 0;
  }
  for (int pairs : {1, 2, 4}) {
    if (pairs <= most && int64_t{active} * pairs >= num_pairs) {
      return pairs;
    }
  }
  return 0;
}

// For rows of `width` elements of `element_size` bytes in heads of `head_dim`. `vectorised` says that every
// operand is aligned to 16 bytes; the packs must also divide half a head. A second pair per thread saves
// loads of the tables; the backward has no registers for it below 512 threads.
inline KernelConfig choose_config(int64_t width, int64_t head_dim, int element_size, bool vectorised,
                                  bool backward) {
  const int pack = 16 / element_size;
  vectorised = vectorised && head_dim % (2 * pack) == 0;
  const KernelConfig looping{kLoopingThreads, 0, 1, vectorised};
  if (!vectorised) {
    return looping;
  }
  const int64_t num_pairs = width / (2 * pack);
  const int in_half = packs_per_half(head_dim, element_size);
  for (int threads : {4, 8, 16, 32, 64, 128, 256, 512}) {
    const int most = backward || threads <= 32 ? 1 : 2;
    const int pairs = pairs_per_thread(threads, num_pairs, in_half, most);
    if (pairs != 0) {
      return {threads, pairs, 2, true};
    }
  }
  const int pairs = pairs_per_thread(512, num_pairs, in_half, max_pairs(element_size));
  return pairs == 0 ? looping : KernelConfig{512, pairs, 2, true};
}

// The kernel that a tuple of the tuning space names; found() is false where none is compiled. Where rows
// cannot go in packs (alignment, an odd number of packs in half a head) the tuple has no meaning and the
// automatic choice stands.
inline KernelConfig choose_forced_config(int64_t width, int64_t head_dim, int element_size, bool vectorised,
                                         const ForcedConfig& forced) {
  const KernelConfig automatic = choose_config(width, head_dim, element_size, vectorised, /*backward=*/false);
  const KernelConfig none{0, 0, 0, false};
  if (!in_compiled_space(forced)) {
    return none;
  }
  if (automatic.pairs == 0) {
    return automatic;
  }
  const int pack = 16 / element_size;
  const int threads = static_cast<int>(forced.block_size);
  const int pairs = pairs_per_thread(threads, width / (2 * pack), packs_per_half(head_dim, element_size),
                                     max_pairs(element_size));
  return pairs == 0 ? none : KernelConfig{threads, pairs, static_cast<int>(forced.num_stages), true};
}

inline int threads_per_block(const KernelConfig& config) {
  return std::max(config.threads, kSharedBlock * (config.threads <= 32));
}

// Shared memory of a launch in bytes: rows of `num_tensors` inputs that are under way. One stage needs none.
inline int64_t ring_bytes(const KernelConfig& config, int num_tensors) {
  const int64_t stage = int64_t{threads_per_block(config)} * config.pairs * 2 * 16 * num_tensors;
  return config.stages == 1 ? 0 : config.stages * stage;
}

// Takes fewer stages where a block can have no more than `available` bytes of shared memory.
inline KernelConfig fit_stages(KernelConfig config, int num_tensors, int64_t available) {
  while (config.stages > 1 && ring_bytes(config, num_tensors) > available) {
    --config.stages;
  }
  return config;
}

// Threads that one multiprocessor holds; a thread of the kernels has 65536 divided by that many registers.
constexpr int resident_threads(int threads, int pairs, bool backward) {
  return !backward && pairs == 1 && threads > 32 ? 768 : 512;
}

// Blocks of a launch. Loading ahead needs a loop over rows in each block, so the grid is then what the device
// holds at one time. Without it, or where rows are few, every block takes one row.
inline int num_blocks(const KernelConfig& config, int64_t num_rows, int num_multiprocessors, bool backward) {
  const int threads = threads_per_block(config);
  const int rows_per_block = std::max(1, threads / config.threads);
  const int64_t enough = (num_rows + rows_per_block - 1) / rows_per_block;
  if (!backward && (config.pairs == 0 || config.stages == 1)) {
    return static_cast<int>(enough);
  }
  const int per_multiprocessor =
      std::max(1, resident_threads(config.threads, config.pairs, backward) / threads);
  return static_cast<int>(std::min<int64_t>(enough, int64_t{num_multiprocessors} * per_multiprocessor));
}

// Forward rows so few that each block takes two at most: twice the threads with one pair each are then faster
// (256 rows of 4096 bf16 values take 4.23 us on an H200 and not 4.55), but 512 threads are not (132 rows of
// 8192: 5.3 us, 3.99 without). All threads must have work before, so that the sums keep their order and a row its bits.
inline KernelConfig spread_few_rows(const KernelConfig& config, int64_t num_rows, int in_half,
                                    int num_multiprocessors) {
  if (config.pairs != 2 || config.threads > 128 || config.threads % in_half != 0) {
    return config;
  }
  const KernelConfig spread{2 * config.threads, 1, config.stages, config.vectorised};
  return num_rows <= 2 * num_blocks(spread, num_rows, num_multiprocessors, /*backward=*/false) ? spread
                                                                                               : config;
}

inline std::string describe(const KernelConfig& config) {
  const std::string text = std::to_string(config.threads) + " threads per row, " +
                           (config.vectorised ? "16-byte packs, " : "single elements, ");
  return config.pairs == 0 ? text + "looping"
                           : text + std::to_string(config.pairs) + " pairs per thread, " +
                                 std::to_string(config.stages) + " stages";
}

}  // namespace htree::rmsnorm_rope
