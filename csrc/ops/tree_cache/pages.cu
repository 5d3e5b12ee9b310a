// The table of pages on the device. One thread block does a step for all sequences, in their order, so that
// the table is exactly that of the CPU. docs/semantics/tree_cache.md §7.4. No torch.
#include "device/select.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_cache/tree_cache_params.h"

namespace htree::tree_cache {
namespace {

constexpr int kPageThreads = 1024;

enum PlanRow { kBefore, kTaken, kFrom, kTo };

struct PageShared {
  uint32_t sums[kPageThreads / device::kWarpSize];
  int slow[kPageThreads];  // sequences of a tile whose pages the whole block has to change
  int flag;
};

__device__ __forceinline__ int32_t* plan_row(const PageTableParams& table, PlanRow row) {
  return table.plan + static_cast<int64_t>(row) * table.num_sequences;
}
__device__ __forceinline__ int32_t* pages_of(const PageTableParams& table, int sequence) {
  return table.block_table + static_cast<int64_t>(sequence) * table.max_pages;
}
__device__ __forceinline__ int64_t pages_for(int64_t tokens, const PageStepParams& step) {
  return (tokens + step.page_size - 1) / step.page_size;
}
// The pages that a sequence holds, cut to what the table allows whatever is in memory.
__device__ __forceinline__ int held_by(const PageTableParams& table, int sequence) {
  return max(0, min(table.held[sequence], table.max_pages));
}

__device__ __forceinline__ bool has_lists(const PageTableParams& table, int sequence, int64_t leader) {
  bool found = false;
  for (int i = 0; i < table.ring; ++i) {
    found |= table.list_pos[static_cast<int64_t>(sequence) * table.ring + i] == leader;
  }
  return found;
}

// Takes a page off the stack. One thread calls.
__device__ __forceinline__ int32_t pop_page(const PageTableParams& table) {
  const int32_t page = table.free_pages[table.free_pages[0]--];
  table.users[page] = 1;
  return page;
}

// Drops the pages [first, last) of `pages` and puts those without users on the stack, in their order. Every
// thread of the block must call.
__device__ void drop_pages(const PageTableParams& table, const int32_t* pages, int64_t first, int64_t last,
                           PageShared& shared) {
  for (int64_t tile = first; tile < last; tile += kPageThreads) {
    const int64_t i = tile + threadIdx.x;
    const int32_t page = i < last ? pages[i] : -1;
    const bool unused = page >= 0 && --table.users[page] == 0;  // a sequence holds a page once
    uint32_t total;
    const uint32_t rank = device::block_exclusive_sum<kPageThreads>(unused ? 1 : 0, shared.sums, total);
    const int32_t count = table.free_pages[0];
    if (unused) {
      table.free_pages[1 + count + rank] = page;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      table.free_pages[0] = count + static_cast<int32_t>(total);
    }
    __syncthreads();
  }
}

// ---- append and reserve

// The error of a request, or 0 if it needs nothing but free pages.
__device__ __forceinline__ int32_t request_error(const PageTableParams& table, const PageStepParams& step,
                                                 int sequence) {
  const int64_t after = int64_t{table.lengths[sequence]} + table.request[sequence];
  if (table.request[sequence] < 0) {
    return kBadLength;
  }
  if (after > step.capacity) {
    return kNoCapacity;
  }
  const int32_t length = table.lengths[sequence];
  const bool open = length % step.page_size != 0;
  return open && pages_of(table, sequence)[length / step.page_size] < 0 ? kBadPage : 0;
}

__device__ void give_pages(const PageTableParams& table, int sequence, int32_t needed, int32_t first_free) {
  int32_t* pages = pages_of(table, sequence);
  const int32_t held = held_by(table, sequence);
  for (int32_t i = 0; i < needed; ++i) {
    const int32_t page = table.free_pages[first_free - i];
    table.users[page] = 1;
    pages[held + i] = page;
  }
  table.held[sequence] = held + needed;
}

__device__ void step_append(const PageTableParams& table, const PageStepParams& step, PageShared& shared) {
  const bool adds = step.step == PageStep::kAppend;
  const auto finish = [&](int sequence, bool taken) {
    plan_row(table, kTaken)[sequence] = taken ? table.request[sequence] : 0;
    if (taken && adds) {
      table.lengths[sequence] += table.request[sequence];
    }
  };
  for (int tile = 0; tile < table.num_sequences; tile += kPageThreads) {
    const int sequence = tile + static_cast<int>(threadIdx.x);
    int32_t error = 0;
    uint32_t needed = 0;
    if (sequence < table.num_sequences) {
      error = request_error(table, step, sequence);
      if (error == 0) {
        const int64_t after = int64_t{table.lengths[sequence]} + table.request[sequence];
        const int64_t more = pages_for(after, step) - held_by(table, sequence);
        needed = more > 0 ? static_cast<uint32_t>(more) : 0;
      } else {
        table.errors[sequence] |= error;
      }
    }
    uint32_t total;
    const uint32_t before = device::block_exclusive_sum<kPageThreads>(needed, shared.sums, total);
    const int32_t free = table.free_pages[0];
    __syncthreads();
    if (total <= static_cast<uint32_t>(free)) {
      if (sequence < table.num_sequences) {
        if (needed > 0) {
          give_pages(table, sequence, static_cast<int32_t>(needed), free - static_cast<int32_t>(before));
        }
        finish(sequence, error == 0);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        table.free_pages[0] = free - static_cast<int32_t>(total);
      }
    } else if (threadIdx.x == 0) {  // not enough for all: the earlier sequences get theirs
      for (int b = tile; b < min(tile + kPageThreads, table.num_sequences); ++b) {
        if (request_error(table, step, b) != 0) {
          finish(b, false);
          continue;
        }
        const int64_t after = int64_t{table.lengths[b]} + table.request[b];
        const int64_t more = max(int64_t{0}, pages_for(after, step) - held_by(table, b));
        const bool fits = more <= table.free_pages[0];
        if (fits) {
          give_pages(table, b, static_cast<int32_t>(more), table.free_pages[0]);
          table.free_pages[0] -= static_cast<int32_t>(more);
        } else {
          table.errors[b] |= kNoPage;
        }
        finish(b, fits);
      }
    }
    __syncthreads();
  }
}

// ---- truncate

__device__ __forceinline__ int32_t truncate_error(const PageTableParams& table, const PageStepParams& step,
                                                  int sequence) {
  const int64_t length = table.request[sequence], held = table.lengths[sequence], last = length - 1;
  if (length < -1 || length > held) {
    return kBadLength;
  }
  const bool whole = length < 0 || length == held || length % step.stride == 0;
  return whole || has_lists(table, sequence, last - last % step.stride) ? 0 : kInsideStride;
}

__device__ __forceinline__ void set_length(const PageTableParams& table, int sequence, int32_t length) {
  table.lengths[sequence] = length;
  for (int i = 0; i < table.ring; ++i) {
    int32_t& leader = table.list_pos[static_cast<int64_t>(sequence) * table.ring + i];
    leader = leader >= length ? -1 : leader;
  }
}

// Shortens one sequence: gives pages back, and copies its open page if others share it. Every thread of the
// block must call.
__device__ void shorten(const PageTableParams& table, const PageStepParams& step, int sequence,
                        PageShared& shared) {
  const int32_t length = table.request[sequence];
  const int64_t keep = pages_for(length, step);
  const int64_t held = held_by(table, sequence);
  int32_t* pages = pages_of(table, sequence);
  const int32_t open = length % step.page_size == 0 ? -1 : pages[keep - 1];
  const bool copies = open >= 0 && table.users[open] > 1;
  bool frees = false;
  for (int64_t i = keep + threadIdx.x; copies && i < held; i += kPageThreads) {
    frees |= table.users[pages[i]] == 1;
  }
  if (__syncthreads_or(frees || (copies && table.free_pages[0] > 0)) == 0 && copies) {
    if (threadIdx.x == 0) {
      table.errors[sequence] |= kNoPage;
    }
    __syncthreads();
    return;
  }
  drop_pages(table, pages, keep, held, shared);
  for (int64_t i = keep + threadIdx.x; i < held; i += kPageThreads) {
    pages[i] = -1;
  }
  if (threadIdx.x == 0) {
    table.held[sequence] = static_cast<int32_t>(keep);
    if (copies) {
      --table.users[open];
      plan_row(table, kFrom)[sequence] = open;
      pages[keep - 1] = pop_page(table);
      plan_row(table, kTo)[sequence] = pages[keep - 1];
    }
    set_length(table, sequence, length);
  }
  __syncthreads();
}

__device__ void step_truncate(const PageTableParams& table, const PageStepParams& step, PageShared& shared) {
  for (int tile = 0; tile < table.num_sequences; tile += kPageThreads) {
    const int sequence = tile + static_cast<int>(threadIdx.x);
    bool slow = false;
    if (sequence < table.num_sequences) {
      const int32_t error = truncate_error(table, step, sequence);
      const int32_t length = table.request[sequence];
      if (error != 0) {
        table.errors[sequence] |= error;
      } else if (length >= 0 && length < table.lengths[sequence]) {
        const int64_t keep = pages_for(length, step);
        slow = keep < held_by(table, sequence) ||
               (length % step.page_size != 0 && table.users[pages_of(table, sequence)[keep - 1]] > 1);
        if (!slow) {
          set_length(table, sequence, length);
        }
      }
    }
    shared.slow[threadIdx.x] = slow;
    const bool any = __syncthreads_or(slow) != 0;
    for (int i = 0; any && i < min(kPageThreads, table.num_sequences - tile); ++i) {
      if (shared.slow[i]) {
        shorten(table, step, tile + i, shared);
      }
    }
    __syncthreads();
  }
}

// ---- reorder: sequence b becomes what request[b] was

// The table as it was before the step.
struct OldTable {
  const int32_t* block_table;
  const int32_t* lengths;
  const int32_t* held;
  const int32_t* list_pos;
};

__device__ __forceinline__ OldTable old_table(const PageTableParams& table) {
  const int64_t batch = table.num_sequences;
  const int32_t* lengths = table.old + batch * table.max_pages;
  return {table.old, lengths, lengths + batch, lengths + 2 * batch};
}

// Calls f(sequence, index) for the pages of all sequences that move, spread over the block; num(b) is their
// number in sequence b.
template <typename Count, typename F>
__device__ __forceinline__ void for_moved_pages(const PageTableParams& table, Count&& num, F&& f) {
  for (int b = 0; b < table.num_sequences; ++b) {
    if (table.request[b] == b) {
      continue;
    }
    const int64_t count = num(b);
    for (int64_t i = threadIdx.x; i < count; i += kPageThreads) {
      f(b, i);
    }
  }
  __syncthreads();
}

__device__ void step_reorder(const PageTableParams& table, const PageStepParams& step, PageShared& shared) {
  const OldTable old = old_table(table);
  const int batch = table.num_sequences;
  bool bad = false;
  for (int b = threadIdx.x; b < batch; b += kPageThreads) {
    const bool none = table.request[b] < 0 || table.request[b] >= batch;
    if (none) {
      table.errors[b] |= kBadSequence;
    }
    bad |= none;
    table.owner[b] = batch;
    plan_row(table, kTaken)[b] = b;
  }
  if (__syncthreads_or(bad)) {
    return;
  }
  // The open page of a sequence stays with the sequence itself, or goes to the first one that takes it.
  for (int b = threadIdx.x; b < batch; b += kPageThreads) {
    atomicMin(&table.owner[table.request[b]], table.request[b] == b ? -1 : b);
  }
  __syncthreads();
  const auto is_open = [&](int b) { return old.lengths[b] % step.page_size != 0; };
  const auto owns = [&](int b) {
    const int32_t owner = table.owner[table.request[b]];
    return owner == b || (owner == -1 && table.request[b] == b);
  };
  const auto takes = [&](int b) {
    const int source = table.request[b];
    return old.lengths[source] / step.page_size + (is_open(source) && owns(b));
  };
  const auto old_page = [&](int b, int64_t i) {
    return old.block_table[static_cast<int64_t>(b) * table.max_pages + i];
  };
  const auto old_held = [&](int b) {
    return static_cast<int64_t>(max(0, min(old.held[b], table.max_pages)));
  };
  const auto copies = [&](int b) { return table.request[b] != b && is_open(table.request[b]) && !owns(b); };
  for_moved_pages(table, takes,
                  [&](int b, int64_t i) { atomicAdd(&table.users[old_page(table.request[b], i)], 1); });
  const int32_t free_before = table.free_pages[0];
  __syncthreads();
  for (int b = 0; b < batch; ++b) {
    if (table.request[b] != b) {
      drop_pages(table, old.block_table + static_cast<int64_t>(b) * table.max_pages, 0, old_held(b), shared);
    }
  }
  if (threadIdx.x == 0) {
    int32_t wanted = 0;
    for (int b = 0; b < batch; ++b) {
      wanted += copies(b);
    }
    shared.flag = wanted > table.free_pages[0];
  }
  __syncthreads();
  if (shared.flag) {  // too few pages for all copies: everything stays as it was
    if (threadIdx.x == 0) {
      table.free_pages[0] = free_before;
    }
    for_moved_pages(table, takes,
                    [&](int b, int64_t i) { atomicSub(&table.users[old_page(table.request[b], i)], 1); });
    for_moved_pages(table, old_held, [&](int b, int64_t i) { atomicAdd(&table.users[old_page(b, i)], 1); });
    for (int b = threadIdx.x; b < batch; b += kPageThreads) {
      table.errors[b] |= copies(b) ? kNoPage : 0;
    }
    return;
  }
  const auto all_pages = [&](int) { return static_cast<int64_t>(table.max_pages); };
  for_moved_pages(table, all_pages, [&](int b, int64_t i) {
    pages_of(table, b)[i] = i < takes(b) ? old_page(table.request[b], i) : -1;
  });
  for (int b = threadIdx.x; b < batch; b += kPageThreads) {
    const int source = table.request[b];
    plan_row(table, kTaken)[b] = source;
    if (source != b) {
      table.held[b] = static_cast<int32_t>(takes(b)) + copies(b);
      table.lengths[b] = old.lengths[source];
      for (int i = 0; i < table.ring; ++i) {
        table.list_pos[static_cast<int64_t>(b) * table.ring + i] =
            old.list_pos[static_cast<int64_t>(source) * table.ring + i];
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int b = 0; b < batch; ++b) {
      if (copies(b)) {
        const int64_t at = takes(b);
        plan_row(table, kFrom)[b] = old_page(table.request[b], at);
        plan_row(table, kTo)[b] = pages_of(table, b)[at] = pop_page(table);
      }
    }
  }
}

// ---- attend

__device__ void step_attend(const PageTableParams& table, const PageStepParams& step) {
  for (int b = threadIdx.x; b < table.num_sequences; b += kPageThreads) {
    const int64_t length = table.lengths[b];
    const int64_t first = max(int64_t{0}, length - table.request[b]);
    const bool any = table.request[b] > 0 && length > 0;
    if (any && first % step.stride != 0 && !has_lists(table, b, first - first % step.stride)) {
      table.errors[b] |= kMissingLeader;
    }
  }
}

__global__ void __launch_bounds__(kPageThreads)
    page_step_kernel(const PageTableParams table, const PageStepParams step) {
  __shared__ PageShared shared;
  for (int b = threadIdx.x; b < table.num_sequences; b += kPageThreads) {
    plan_row(table, kBefore)[b] = table.lengths[b];
    plan_row(table, kTaken)[b] = 0;
    plan_row(table, kFrom)[b] = -1;
    plan_row(table, kTo)[b] = -1;
  }
  __syncthreads();
  switch (step.step) {
    case PageStep::kAppend:
    case PageStep::kReserve:
      return step_append(table, step, shared);
    case PageStep::kTruncate:
      return step_truncate(table, step, shared);
    case PageStep::kReorder:
      return step_reorder(table, step, shared);
    case PageStep::kAttend:
      return step_attend(table, step);
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

cudaError_t launch_page_step(const PageTableParams& table, const PageStepParams& step, cudaStream_t stream) {
  return launch_kernel(page_step_kernel, {.grid = 1, .threads = kPageThreads}, stream, table, step);
}

cudaError_t launch_copy_pages(void* keys, int64_t key_bytes, void* values, int64_t value_bytes,
                              const int32_t* pages, int64_t num, int64_t num_pages, cudaStream_t stream) {
  const auto run = [&](void* pool, int64_t bytes) {
    if (bytes == 0) {
      return cudaSuccess;
    }
    const bool wide = bytes % 16 == 0 && reinterpret_cast<uintptr_t>(pool) % 16 == 0;
    return wide ? launch_copy<int4>(pool, bytes, pages, num, num_pages, stream)
                : launch_copy<uint16_t>(pool, bytes, pages, num, num_pages, stream);
  };
  const cudaError_t error = run(keys, key_bytes);
  return error != cudaSuccess ? error : run(values, value_bytes);
}

}  // namespace htree::tree_cache
