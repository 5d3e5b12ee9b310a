// What changes beside the rows of a cache: lengths on the device, and whole pages that are copied. No torch.
#include "host/cuda/kernel_launch.h"
#include "ops/tree_cache/tree_cache_params.h"

namespace htree::tree_cache {
namespace {

// ---- lengths

constexpr int kLengthThreads = 128;

// A thread takes a sequence.
template <bool kTruncates>
__global__ void __launch_bounds__(kLengthThreads)
    lengths_kernel(const SequenceLengths all, const LengthStep step) {
  const int64_t sequence = int64_t{blockIdx.x} * kLengthThreads + threadIdx.x;
  if (sequence < all.num_sequences) {
    kTruncates ? truncate(all, step, sequence) : advance(all, step, sequence);
  }
}

// ---- copies of pages

constexpr int kCopyThreads = 256;

// A thread owns one word of W bytes of a page, and copies it for all pairs in their order: a page may be the target of
// one pair after it was the source of another.
template <typename W>
__global__ void __launch_bounds__(kCopyThreads)
    copy_pages_kernel(W* pool, int64_t words, const int32_t* pages, int64_t num, int64_t num_pages) {
  const int64_t word = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  for (int64_t i = 0; i < num && word < words; ++i) {
    const int64_t from = pages[i], to = pages[num + i];
    if (from >= 0 && from < num_pages && to >= 0 && to < num_pages && from != to) {
      pool[to * words + word] = pool[from * words + word];
    }
  }
}

template <typename W>
cudaError_t launch_copy(void* pool, int64_t bytes, const int32_t* pages, int64_t num, int64_t num_pages,
                        cudaStream_t stream) {
  const int64_t words = bytes / static_cast<int64_t>(sizeof(W));
  const auto blocks = static_cast<unsigned>(ceil_div(words, kCopyThreads));
  return launch_kernel(copy_pages_kernel<W>, {.grid = blocks, .threads = kCopyThreads}, stream,
                       static_cast<W*>(pool), words, pages, num, num_pages);
}

}  // namespace

cudaError_t launch_lengths(const SequenceLengths& all, const LengthStep& step, bool truncates,
                           cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(all.num_sequences, kLengthThreads));
  return launch_kernel(truncates ? lengths_kernel<true> : lengths_kernel<false>,
                       {.grid = blocks, .threads = kLengthThreads}, stream, all, step);
}

cudaError_t launch_copy_pages(void* keys, int64_t key_bytes, void* values, int64_t value_bytes,
                              const int32_t* pages, int64_t num, int64_t num_pages, cudaStream_t stream) {
  const auto run = [&](void* pool, int64_t bytes) {
    if (bytes == 0) {
      return cudaSuccess;
    }
    const bool wide = bytes % 16 == 0 && reinterpret_cast<uintptr_t>(pool) % 16 == 0;
    return wide ? launch_copy<int4>(pool, bytes, pages, num, num_pages, stream)
                : launch_copy<uint8_t>(pool, bytes, pages, num, num_pages, stream);
  };
  const cudaError_t error = run(keys, key_bytes);
  return error != cudaSuccess ? error : run(values, value_bytes);
}

}  // namespace htree::tree_cache
