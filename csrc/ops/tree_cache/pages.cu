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
  int marks[kPageThreads];  // of the sequences of a tile: refused, or to be changed by the whole block
  int32_t error;
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

__device__ __forceinline__ bool has_lists(const PageTableParams& table, int sequence, int64_t leader) {
  bool found = false;
  for (int i = 0; i < table.ring; ++i) {
    found |= table.list_pos[static_cast<int64_t>(sequence) * table.ring + i] == leader;
  }
  return found;
}

// ---- what a step reads: nothing is an index before it was compared with its bound

// Notes an error of a sequence, and says whether there is none.
__device__ __forceinline__ bool report(const PageTableParams& table, int sequence, int32_t error) {
  if (error != 0) {
    atomicOr(&table.errors[sequence], error);
  }
  return error == 0;
}

__device__ __forceinline__ bool in_pool(const PageTableParams& table, int32_t page) {
  return static_cast<uint32_t>(page) < static_cast<uint32_t>(table.num_pages);
}

// The error of a sequence's length and number of pages, or 0: then the pages of its tokens are entries of its row of
// block_table.
__device__ __forceinline__ int32_t sequence_error(const PageTableParams& table, const PageStepParams& step,
                                                  int sequence) {
  const int64_t length = table.lengths[sequence], held = table.held[sequence];
  const bool fits = length >= 0 && held >= 0 && held <= table.max_pages && length <= held * step.page_size;
  return fits ? 0 : kBadHeld;
}

// Marks `count` claimed pages of the stack, from entry `top` downwards, as free again.
__device__ __forceinline__ void release_pages(const PageTableParams& table, int32_t top, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    atomicExch(&table.users[table.free_pages[top - i]], 0);
  }
}

// Marks free pages as used. Where one is no page of the pool, or has users, none is marked and the answer is false. Many
// threads may call: a page that the stack has twice is marked by one of them.
__device__ __forceinline__ bool claim_pages(const PageTableParams& table, int32_t top, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    const int32_t page = table.free_pages[top - i];
    if (!in_pool(table, page) || atomicCAS(&table.users[page], 0, 1) != 0) {
      release_pages(table, top, i);
      return false;
    }
  }
  return true;
}

// Claims `count` pages from the top of a stack of `free`, or none and says what is wrong. One thread calls.
__device__ __forceinline__ int32_t claim_error(const PageTableParams& table, int32_t free, int64_t count) {
  if (count == 0) {
    return 0;
  }
  if (free < 0 || free > table.num_pages) {
    return kBadStack;
  }
  if (count > free) {
    return kNoPage;
  }
  return claim_pages(table, free, static_cast<int32_t>(count)) ? 0 : kBadStack;
}

// Drops the pages [first, last) of a row of the table and puts those without users on the stack, in their order. The
// answer is false in a thread that found a contradiction, which is reported for `sequence`; then add_users() and the
// old number of free pages undo it. Every thread of the block must call.
__device__ bool drop_pages(const PageTableParams& table, int sequence, const int32_t* pages, int64_t first,
                           int64_t last, PageShared& shared) {
  bool good = true;
  for (int64_t tile = first; tile < last; tile += kPageThreads) {
    const int64_t i = tile + threadIdx.x;
    const int32_t page = i < last ? pages[i] : -1;
    const bool known = in_pool(table, page);
    const int32_t users = known ? atomicSub(&table.users[page], 1) : 0;
    int32_t error = i >= last ? 0 : !known ? kBadPage : users < 1 ? kBadUsers : 0;
    uint32_t total;
    const uint32_t rank = device::block_exclusive_sum<kPageThreads>(users == 1 ? 1 : 0, shared.sums, total);
    const int32_t count = table.free_pages[0];
    if (users == 1) {
      if (count >= 0 && int64_t{count} + rank < table.num_pages) {
        table.free_pages[1 + count + rank] = page;
      } else {
        error = kBadStack;
      }
    }
    good = report(table, sequence, error) && good;
    __syncthreads();
    if (threadIdx.x == 0) {
      table.free_pages[0] = static_cast<int32_t>(static_cast<uint32_t>(count) + total);
    }
    __syncthreads();
  }
  return good;
}

// Adds `change` to the users of the pages [first, last) of a row of the table. The threads of a block share the pages.
__device__ __forceinline__ void add_users(const PageTableParams& table, const int32_t* pages, int64_t first,
                                          int64_t last, int change) {
  for (int64_t i = first + threadIdx.x; i < last; i += kPageThreads) {
    if (in_pool(table, pages[i])) {
      atomicAdd(&table.users[pages[i]], change);
    }
  }
}

// ---- append and reserve

// The pages that a request lacks. The sequence has no error.
__device__ __forceinline__ int64_t lacking_pages(const PageTableParams& table, const PageStepParams& step,
                                                 int sequence) {
  const int64_t after = int64_t{table.lengths[sequence]} + table.request[sequence];
  return max(int64_t{0}, pages_for(after, step) - table.held[sequence]);
}

// The error of a request, or 0 if it needs nothing but free pages.
__device__ __forceinline__ int32_t request_error(const PageTableParams& table, const PageStepParams& step,
                                                 int sequence) {
  if (const int32_t error = sequence_error(table, step, sequence); error != 0) {
    return error;
  }
  const int64_t length = table.lengths[sequence], after = length + table.request[sequence];
  if (after < length) {
    return kBadLength;
  }
  if (after > step.capacity) {
    return kNoCapacity;
  }
  // The pages that it has and that get tokens: they are its own.
  const int64_t end = min(pages_for(after, step), int64_t{table.held[sequence]});
  for (int64_t i = length / step.page_size; i < end; ++i) {
    const int32_t page = pages_of(table, sequence)[i];
    if (!in_pool(table, page)) {
      return kBadPage;
    }
    if (table.users[page] != 1) {
      return kBadUsers;
    }
  }
  return 0;
}

// Gives claimed pages of the stack, from entry `top` downwards, to a sequence.
__device__ __forceinline__ void give_pages(const PageTableParams& table, int sequence, int32_t top,
                                           int32_t count) {
  const int32_t held = table.held[sequence];
  for (int32_t i = 0; i < count; ++i) {
    pages_of(table, sequence)[held + i] = table.free_pages[top - i];
  }
  table.held[sequence] = held + count;
}

// The sequences of a tile, one after another, where not all of them get what they lack. One thread calls.
template <typename Finish>
__device__ void append_in_order(const PageTableParams& table, const PageStepParams& step, int tile,
                                const PageShared& shared, Finish&& finish) {
  for (int b = tile; b < min(tile + kPageThreads, table.num_sequences); ++b) {
    if (shared.marks[b - tile]) {
      finish(b, false);
      continue;
    }
    const int64_t lacking = lacking_pages(table, step, b);
    const int32_t free = table.free_pages[0];
    const bool taken = report(table, b, claim_error(table, free, lacking));
    if (taken && lacking > 0) {
      give_pages(table, b, free, static_cast<int32_t>(lacking));
      table.free_pages[0] = free - static_cast<int32_t>(lacking);
    }
    finish(b, taken);
  }
}

__device__ void step_append(const PageTableParams& table, const PageStepParams& step, PageShared& shared) {
  constexpr uint32_t kMostAtOnce = 1u << 21;  // the sum over a block stays below 2^32
  const bool adds = step.step == PageStep::kAppend;
  const auto finish = [&](int sequence, bool taken) {
    plan_row(table, kTaken)[sequence] = taken ? table.request[sequence] : 0;
    if (taken && adds) {
      table.lengths[sequence] += table.request[sequence];
    }
  };
  for (int tile = 0; tile < table.num_sequences; tile += kPageThreads) {
    const int sequence = tile + static_cast<int>(threadIdx.x);
    const bool is_one = sequence < table.num_sequences;
    const bool good = is_one && report(table, sequence, request_error(table, step, sequence));
    const int64_t lacking = good ? lacking_pages(table, step, sequence) : 0;
    const auto needed = static_cast<uint32_t>(min(lacking, int64_t{kMostAtOnce}));
    shared.marks[threadIdx.x] = !good;
    uint32_t total;
    const uint32_t before = device::block_exclusive_sum<kPageThreads>(needed, shared.sums, total);
    const int32_t free = table.free_pages[0];
    const auto top = static_cast<int32_t>(static_cast<uint32_t>(free) - before);
    const auto count = static_cast<int32_t>(needed);
    const bool enough = total == 0 || (free <= table.num_pages && int64_t{total} <= free);
    const bool claimed = enough && needed < kMostAtOnce && claim_pages(table, top, count);
    if (__syncthreads_or(!claimed) == 0) {
      if (is_one) {
        if (count > 0) {
          give_pages(table, sequence, top, count);
        }
        finish(sequence, good);
      }
      if (threadIdx.x == 0) {
        table.free_pages[0] = free - static_cast<int32_t>(total);
      }
    } else {
      if (claimed) {
        release_pages(table, top, count);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        append_in_order(table, step, tile, shared, finish);
      }
    }
    __syncthreads();
  }
}

// ---- truncate

__device__ __forceinline__ int32_t truncate_error(const PageTableParams& table, const PageStepParams& step,
                                                  int sequence) {
  if (const int32_t error = sequence_error(table, step, sequence); error != 0) {
    return error;
  }
  const int64_t length = table.request[sequence], held = table.lengths[sequence], last = length - 1;
  if (length < -1 || length > held) {
    return kBadLength;
  }
  if (length < 0 || length == held) {
    return 0;
  }
  if (length % step.stride != 0 && !has_lists(table, sequence, last - last % step.stride)) {
    return kInsideStride;
  }
  if (length % step.page_size == 0) {
    return 0;
  }
  const int32_t open = pages_of(table, sequence)[length / step.page_size];
  return !in_pool(table, open) ? kBadPage : table.users[open] < 1 ? kBadUsers : 0;
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
  const int64_t held = table.held[sequence];
  int32_t* pages = pages_of(table, sequence);
  const int32_t free_before = table.free_pages[0];
  const bool dropped = drop_pages(table, sequence, pages, keep, held, shared);
  const bool whole = __syncthreads_or(!dropped) == 0;
  const int32_t open = length % step.page_size == 0 ? -1 : pages[keep - 1];
  const int32_t users = open >= 0 ? table.users[open] : 1;
  const int32_t free = table.free_pages[0];
  if (threadIdx.x == 0) {
    shared.error = !whole ? 0 : users < 1 ? kBadUsers : claim_error(table, free, users > 1);
  }
  __syncthreads();
  if (!whole || shared.error != 0) {
    add_users(table, pages, keep, held, 1);
    if (threadIdx.x == 0) {
      report(table, sequence, shared.error);
      table.free_pages[0] = free_before;
    }
    __syncthreads();
    return;
  }
  for (int64_t i = keep + threadIdx.x; i < held; i += kPageThreads) {
    pages[i] = -1;
  }
  if (threadIdx.x == 0) {
    table.held[sequence] = static_cast<int32_t>(keep);
    if (users > 1) {
      --table.users[open];
      plan_row(table, kFrom)[sequence] = open;
      plan_row(table, kTo)[sequence] = pages[keep - 1] = table.free_pages[free];
      table.free_pages[0] = free - 1;
    }
    set_length(table, sequence, length);
  }
  __syncthreads();
}

__device__ void step_truncate(const PageTableParams& table, const PageStepParams& step, PageShared& shared) {
  for (int tile = 0; tile < table.num_sequences; tile += kPageThreads) {
    const int sequence = tile + static_cast<int>(threadIdx.x);
    bool slow = false;
    if (sequence < table.num_sequences && report(table, sequence, truncate_error(table, step, sequence))) {
      const int32_t length = table.request[sequence];
      if (length >= 0 && length < table.lengths[sequence]) {
        const int64_t keep = pages_for(length, step);
        slow = keep < table.held[sequence] ||
               (length % step.page_size != 0 && table.users[pages_of(table, sequence)[keep - 1]] > 1);
        if (!slow) {
          set_length(table, sequence, length);
        }
      }
    }
    shared.marks[threadIdx.x] = slow;
    const bool any = __syncthreads_or(slow) != 0;
    for (int i = 0; any && i < min(kPageThreads, table.num_sequences - tile); ++i) {
      if (shared.marks[i]) {
        shorten(table, step, tile + i, shared);
      }
    }
    __syncthreads();
  }
}

// ---- reorder: sequence b becomes what request[b] was

// The step, and the table as it was before.
struct Moves {
  const PageTableParams& table;
  const PageStepParams& step;
  const int32_t* block_table;
  const int32_t* lengths;
  const int32_t* held;
  const int32_t* list_pos;

  __device__ __forceinline__ Moves(const PageTableParams& table, const PageStepParams& step)
      : table(table),
        step(step),
        block_table(table.old),
        lengths(table.old + int64_t{table.num_sequences} * table.max_pages),
        held(lengths + table.num_sequences),
        list_pos(held + table.num_sequences) {}

  __device__ __forceinline__ const int32_t* pages(int b) const {
    return block_table + static_cast<int64_t>(b) * table.max_pages;
  }
  __device__ __forceinline__ bool is_open(int b) const { return lengths[b] % step.page_size != 0; }
  // Whether b keeps the open page of its source.
  __device__ __forceinline__ bool owns(int b) const {
    const int32_t owner = table.owner[table.request[b]];
    return owner == b || (owner == -1 && table.request[b] == b);
  }
  // How many pages of its source b shares or keeps.
  __device__ __forceinline__ int64_t takes(int b) const {
    const int source = table.request[b];
    return lengths[source] / step.page_size + (is_open(source) && owns(b));
  }
  // Whether b gets a copy of the page behind these.
  __device__ __forceinline__ bool copies(int b) const {
    return table.request[b] != b && is_open(table.request[b]) && !owns(b);
  }
};

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

// Adds the users that pages get, and counts the copies of open pages in `wanted`. The answer is false in a thread that
// found a contradiction. Every thread of the block must call.
__device__ bool take_pages(const Moves& moves, int& wanted) {
  const PageTableParams& table = moves.table;
  bool good = true;
  for_moved_pages(
      table, [&](int b) { return moves.takes(b); },
      [&](int b, int64_t i) {
        const int32_t page = moves.pages(table.request[b])[i];
        const bool known = in_pool(table, page);
        const int32_t error = !known ? kBadPage : atomicAdd(&table.users[page], 1) < 1 ? kBadUsers : 0;
        good = report(table, table.request[b], error) && good;
      });
  wanted = 0;
  for (int tile = 0; tile < table.num_sequences; tile += kPageThreads) {
    const int b = tile + static_cast<int>(threadIdx.x);
    const bool copied = b < table.num_sequences && moves.copies(b);
    if (copied) {
      const int32_t page = moves.pages(table.request[b])[moves.takes(b)];
      const int32_t error = !in_pool(table, page) ? kBadPage : table.users[page] < 1 ? kBadUsers : 0;
      good = report(table, table.request[b], error) && good;
    }
    wanted += __syncthreads_count(copied);
  }
  return good;
}

__device__ void step_reorder(const PageTableParams& table, const PageStepParams& step, PageShared& shared) {
  const Moves moves(table, step);
  const int batch = table.num_sequences;
  bool good = true;
  for (int b = threadIdx.x; b < batch; b += kPageThreads) {
    const bool none = table.request[b] < 0 || table.request[b] >= batch;
    good = report(table, b, sequence_error(table, step, b) | (none ? kBadSequence : 0)) && good;
    table.owner[b] = batch;
    plan_row(table, kTaken)[b] = b;
  }
  if (__syncthreads_or(!good)) {
    return;
  }
  // The open page of a sequence stays with the sequence itself, or goes to the first one that takes it.
  for (int b = threadIdx.x; b < batch; b += kPageThreads) {
    atomicMin(&table.owner[table.request[b]], table.request[b] == b ? -1 : b);
  }
  __syncthreads();
  int wanted;
  good = take_pages(moves, wanted);
  const int32_t free_before = table.free_pages[0];
  __syncthreads();
  for (int b = 0; b < batch; ++b) {
    if (table.request[b] != b) {
      good = drop_pages(table, b, moves.pages(b), 0, moves.held[b], shared) && good;
    }
  }
  const bool whole = __syncthreads_or(!good) == 0;
  if (threadIdx.x == 0) {
    shared.error = whole ? claim_error(table, table.free_pages[0], wanted) : 0;
  }
  __syncthreads();
  if (!whole || shared.error != 0) {  // everything stays as it was
    if (threadIdx.x == 0) {
      table.free_pages[0] = free_before;
    }
    for (int b = 0; b < batch; ++b) {
      if (table.request[b] != b) {
        add_users(table, moves.pages(table.request[b]), 0, moves.takes(b), -1);
        add_users(table, moves.pages(b), 0, moves.held[b], 1);
      }
    }
    for (int b = threadIdx.x; b < batch; b += kPageThreads) {
      report(table, b, moves.copies(b) ? shared.error : 0);
    }
    return;
  }
  for_moved_pages(
      table, [&](int) { return static_cast<int64_t>(table.max_pages); },
      [&](int b, int64_t i) {
        pages_of(table, b)[i] = i < moves.takes(b) ? moves.pages(table.request[b])[i] : -1;
      });
  for (int b = threadIdx.x; b < batch; b += kPageThreads) {
    const int source = table.request[b];
    plan_row(table, kTaken)[b] = source;
    if (source != b) {
      table.held[b] = static_cast<int32_t>(moves.takes(b)) + moves.copies(b);
      table.lengths[b] = moves.lengths[source];
      for (int i = 0; i < table.ring; ++i) {
        table.list_pos[static_cast<int64_t>(b) * table.ring + i] =
            moves.list_pos[static_cast<int64_t>(source) * table.ring + i];
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int b = 0; b < batch; ++b) {
      if (moves.copies(b)) {
        const int64_t at = moves.takes(b);
        plan_row(table, kFrom)[b] = moves.pages(table.request[b])[at];
        plan_row(table, kTo)[b] = pages_of(table, b)[at] = table.free_pages[table.free_pages[0]--];
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
      report(table, b, kMissingLeader);
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
