// Rows between packed and padded tensors on the CPU. "auto" never needs the first two there: it runs every document
// where it lies.
#include <limits>

#include "ops/tree_attention/varlen/varlen.h"

namespace htree::tree_attention {
namespace {

// Calls visit(document, first padded row, first packed row, rows) for every document of a group.
template <typename Visit>
void for_documents(const Tensor& table, Visit&& visit) {
  const Tensor columns = table.contiguous();
  const auto* row = columns.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < columns.size(0); ++i, row += 3) {
    if (row[2] > 0) visit(i, row[1], row[0], row[2]);
  }
}

}  // namespace

void gather_rows_cpu(const std::vector<RowCopy>& copies) {
  for (const RowCopy& copy : copies) {
    copy.padded.fill_(copy.padding);
    for_documents(copy.table, [&](int64_t i, int64_t first, int64_t begin, int64_t count) {
      copy.padded[i].narrow(0, first, count).copy_(copy.packed.narrow(0, begin, count));
    });
  }
}

void scatter_rows_cpu(const std::vector<RowCopy>& copies) {
  for (const RowCopy& copy : copies) {
    for_documents(copy.table, [&](int64_t i, int64_t first, int64_t begin, int64_t count) {
      copy.packed.narrow(0, begin, count).copy_(copy.padded[i].narrow(0, first, count));
    });
  }
}

void fill_rows_cpu(const Tensor& starts, const Tensor& kinds, double empty, const Tensor& packed) {
  const Tensor bounds = starts.contiguous(), kind_of = kinds.contiguous();
  const auto* start = bounds.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < kind_of.numel(); ++i) {
    const int32_t kind = kind_of.const_data_ptr<int32_t>()[i];
    if (kind == kInGroup) continue;
    packed.narrow(0, start[i], start[i + 1] - start[i])
        .fill_(kind == kBroken ? std::numeric_limits<double>::quiet_NaN() : empty);
  }
  packed.slice(0, start[kind_of.numel()]).fill_(empty);
}

const VarlenKernels kVarlenCpu = {attention_forward_cpu,
                                  attention_over_lists_cpu,
                                  attention_backward_cpu,
                                  select_block_layers_cpu,
                                  gather_rows_cpu,
                                  scatter_rows_cpu,
                                  fill_rows_cpu,
                                  [](const Tensor&) { return false; },
                                  true};

}  // namespace htree::tree_attention
