// Rows between packed and padded tensors on CUDA: parameters and launches.
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <cstring>
#include <limits>
#include <numeric>

#include "host/cuda/launch_scope.h"
#include "ops/tree_attention/varlen/row_copies.h"
#include "ops/tree_attention/varlen/varlen.h"

namespace htree::tree_attention {
namespace {

// Four bytes of elements of a value.
uint32_t four_bytes(double value, at::ScalarType dtype) {
  if (dtype == at::kFloat) {
    const auto number = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return bits;
  }
  const auto number = static_cast<float>(value);
  const uint32_t bits = dtype == at::kHalf ? c10::Half(number).x : c10::BFloat16(number).x;
  return bits | bits << 16;
}

char* bytes_of(const Tensor& tensor) {
  return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
}

int64_t row_bytes(const Tensor& packed) {
  int64_t elements = 1;
  for (int64_t dim = 1; dim < packed.dim(); ++dim) {
    elements *= packed.size(dim);
  }
  return elements * static_cast<int64_t>(packed.element_size());
}

// The widest access that divides all of these.
int widest(const Tensor& packed, int64_t row, int64_t stride) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % 16);
  const int64_t common = std::gcd(std::gcd(address, row), std::gcd(stride, int64_t{16}));
  return common == 16 ? 16 : common % 4 == 0 ? 4 : 2;
}

RowCopyParams copy_params(const RowCopy& copy) {
  const auto& [packed, padded, table, padding] = copy;
  RowCopyParams params;
  params.packed = bytes_of(packed);
  params.padded = bytes_of(padded);
  params.table = table.const_data_ptr<int32_t>();
  params.table_stride = table.stride(0);
  params.num_documents = padded.size(0);
  params.rows = padded.size(1);
  params.row_bytes = row_bytes(packed);
  params.packed_stride = packed.stride(0) * static_cast<int64_t>(packed.element_size());
  params.padding = four_bytes(padding, packed.scalar_type());
  params.width = widest(packed, params.row_bytes, params.packed_stride);
  return params;
}

void copy_rows(const std::vector<RowCopy>& copies, bool gathers) {
  if (copies.empty()) return;
  const LaunchScope scope(copies.front().packed);
  TORCH_INTERNAL_ASSERT(copies.size() <= kMostRowCopies);
  RowCopies all;
  for (const RowCopy& copy : copies) {
    all.copies[all.count++] = copy_params(copy);
  }
  C10_CUDA_CHECK(launch_copy_rows(all, gathers, scope.stream()));
}

bool records_graph_cuda(const Tensor& like) {
  const LaunchScope scope(like);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace

void gather_rows_cuda(const std::vector<RowCopy>& copies) {
  copy_rows(copies, /*gathers=*/true);
}

void scatter_rows_cuda(const std::vector<RowCopy>& copies) {
  copy_rows(copies, /*gathers=*/false);
}

void fill_rows_cuda(const Tensor& starts, const Tensor& kinds, double empty, const Tensor& packed) {
  const LaunchScope scope(packed);
  RowFillParams params;
  params.packed = bytes_of(packed);
  params.starts = starts.const_data_ptr<int32_t>();
  params.kinds = kinds.const_data_ptr<int32_t>();
  params.num_documents = kinds.numel();
  params.num_rows = packed.size(0);
  params.row_bytes = row_bytes(packed);
  params.empty = four_bytes(empty, packed.scalar_type());
  params.nan = four_bytes(std::numeric_limits<double>::quiet_NaN(), packed.scalar_type());
  params.width = widest(packed, params.row_bytes, params.row_bytes);
  C10_CUDA_CHECK(launch_fill_rows(params, scope.stream()));
}

const VarlenKernels kVarlenCuda = {
    attention_forward_cuda,   attention_over_lists_cuda, attention_backward_cuda,
    select_block_layers_cuda, gather_rows_cuda,          scatter_rows_cuda,
    fill_rows_cuda,           records_graph_cuda,        false};

}  // namespace htree::tree_attention
