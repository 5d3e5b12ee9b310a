// Copies of whole rows between packed and padded tensors. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace htree::tree_attention {

// Sizes in bytes are multiples of `width`, and so are the addresses: 16, 4 or 2.
struct RowCopyParams {
  char* packed = nullptr;          // rows of row_bytes, packed_stride apart
  char* padded = nullptr;          // [documents, rows, row_bytes]
  const int32_t* table = nullptr;  // begin, shift and count of each document, table_stride apart
  int64_t table_stride = 0;
  int64_t num_documents = 0, rows = 0;
  int64_t row_bytes = 0, packed_stride = 0;
  uint32_t padding = 0;  // four bytes of a padded row
  int width = 2;
};

// The copies of a group: those of a backward are q, k, v, out, its two states and the gradients of out and lse.
constexpr int kMostRowCopies = 8;
struct RowCopies {
  RowCopyParams copies[kMostRowCopies];
  int count = 0;
};

struct RowFillParams {
  char* packed = nullptr;           // [num_rows, row_bytes]
  const int32_t* starts = nullptr;  // [num_documents + 1]
  const int32_t* kinds = nullptr;   // DocumentKind [num_documents]
  int64_t num_documents = 0, num_rows = 0, row_bytes = 0;
  uint32_t empty = 0, nan = 0;  // four bytes each
  int width = 2;
};

// `gathers`: padded rows are copies of packed ones, or padding. Else packed rows are copies of padded ones.
cudaError_t launch_copy_rows(const RowCopies& copies, bool gathers, cudaStream_t stream);
cudaError_t launch_fill_rows(const RowFillParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
