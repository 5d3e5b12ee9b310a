// What the CPU entry points share: the kernels for this processor, and the rows of a compressed tensor.
#pragma once

#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "ops/compressed_kv/compressed_kv.h"
#include "ops/compressed_kv/rows.h"

namespace htree::compressed_kv {

inline const RowKernels& row_kernels() {
  return HTREE_PICK_ISA(kRowKernels);
}

// Finds the rows of a contiguous compressed tensor by their number.
class CompressedRows {
 public:
  explicit CompressedRows(const Compressed& from)
      : format_(from.format),
        bitmap_(reinterpret_cast<const uint64_t*>(from.bitmap.const_data_ptr<int64_t>())),
        values_(from.values.const_data_ptr<uint8_t>()),
        scales_(static_cast<const uint16_t*>(from.scales.const_data_ptr())) {}

  const uint64_t* bitmap(int64_t row) const { return bitmap_ + row * format_.words(); }
  const uint8_t* values(int64_t row) const { return values_ + row * format_.row_bytes(); }
  uint16_t scale(int64_t row) const { return format_.quantised() ? scales_[row] : uint16_t{0}; }

 private:
  RowFormat format_;
  const uint64_t* bitmap_;
  const uint8_t* values_;
  const uint16_t* scales_;
};

}  // namespace htree::compressed_kv
