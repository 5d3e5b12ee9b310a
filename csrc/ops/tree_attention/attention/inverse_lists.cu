// Launchers of the masks and the inverse of parent lists. No torch; apart from the others because CUB compiles slowly.
#include "ops/tree_attention/attention/inverse_lists.cuh"

#include <cub/device/device_radix_sort.cuh>

#include "ops/tree_attention/attention/shared_bytes.h"

namespace htree::tree_attention {
namespace {

unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Bits that tell num_keys + 1 keys apart.
int key_bits(int64_t num_keys) {
  int bits = 1;
  while (num_keys >> bits) {
    ++bits;
  }
  return bits;
}

size_t sort_bytes(int64_t num_entries) {
  size_t bytes = 0;
  cub::DeviceRadixSort::SortPairs<uint32_t, uint32_t>(nullptr, bytes, nullptr, nullptr, nullptr, nullptr,
                                                      static_cast<int>(num_entries));
  return bytes;
}

}  // namespace

void launch_list_masks(const ListMaskParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_batches} * params.num_lists * params.num_kv_heads;
  const int64_t bytes = kMaskWarps * params.mask_words * 4;
  allow_shared_bytes(list_masks_kernel, bytes);
  list_masks_kernel<<<blocks_for(rows, kMaskWarps), kMaskWarps * 32, bytes, stream>>>(params);
}

int64_t inverse_scratch_bytes(int64_t num_entries) {
  return 3 * aligned(num_entries * 4) + aligned(static_cast<int64_t>(sort_bytes(num_entries)));
}

cudaError_t launch_inverse_lists(const InverseParams& params, cudaStream_t stream) {
  const int64_t num_entries = params.num_entries();
  char* scratch = static_cast<char*>(params.scratch);
  uint32_t* keys = reinterpret_cast<uint32_t*>(scratch);
  uint32_t* sorted = reinterpret_cast<uint32_t*>(scratch + aligned(num_entries * 4));
  uint32_t* values = reinterpret_cast<uint32_t*>(scratch + 2 * aligned(num_entries * 4));
  inverse_keys_kernel<<<blocks_for(num_entries, kInverseThreads), kInverseThreads, 0, stream>>>(params, keys, values);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    return error;
  }
  // stable: the users of a parent stay in the order of their lists
  size_t bytes = sort_bytes(num_entries);
  const cudaError_t error = cub::DeviceRadixSort::SortPairs(
      scratch + 3 * aligned(num_entries * 4), bytes, keys, sorted, values, params.entries,
      static_cast<int>(num_entries), 0, key_bits(params.num_keys()), stream);
  if (error != cudaSuccess) {
    return error;
  }
  inverse_offsets_kernel<<<blocks_for(num_entries + 1, kInverseThreads), kInverseThreads, 0, stream>>>(
      sorted, num_entries, params.num_keys(), params.offsets);
  return cudaGetLastError();
}

}  // namespace htree::tree_attention
