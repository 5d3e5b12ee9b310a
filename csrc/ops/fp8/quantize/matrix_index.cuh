// From the number of a pack to its place in x and to its scales.
#pragma once

#include "device/divmod.cuh"
#include "device/pack.cuh"
#include "ops/fp8/quantize/quantize_params.h"

namespace htree::fp8 {

// Division of values below `bound` by a number fixed for a launch: by multiplication where both fit 31 bits.
class Divisor {
 public:
  Divisor(int64_t divisor, int64_t bound)
      : fast_(static_cast<uint32_t>(bound < kLimit && divisor < kLimit ? divisor : 1)),
        divisor_(divisor),
        is_fast_(bound < kLimit && divisor < kLimit) {}

  __device__ __forceinline__ int64_t quotient(int64_t value) const {
    return is_fast_ ? fast_.quotient(static_cast<uint32_t>(value)) : value / divisor_;
  }

 private:
  static constexpr int64_t kLimit = int64_t{1} << 31;
  device::FastDivisor fast_;
  int64_t divisor_;
  bool is_fast_;
};

// Packs of kPack elements number the matrix row by row; cols and, for kRowGroups with several groups to a
// row, `group` are multiples of kPack.
template <int kPack>
class MatrixIndex {
 public:
  MatrixIndex(const MatrixShape& s, int64_t row_stride)
      : num_packs_(s.rows * (s.cols / kPack)),
        packs_per_row_(s.cols / kPack, num_packs_),
        packs_of_row_(s.cols / kPack),
        row_stride_(row_stride),
        layout_(s.layout),
        cols_(s.cols),
        length_(s.length, s.rows),
        rows_of_matrix_(s.length),
        group_(s.layout == ScaleLayout::kRowGroups ? ceil_div(s.group, kPack) : s.group,
               s.layout == ScaleLayout::kRowGroups ? s.cols : s.length),
        num_groups_(s.layout == ScaleLayout::kRowGroups ? ceil_div(s.cols, s.group)
                                                        : ceil_div(s.length, s.group)) {}

  constexpr int64_t num_packs() const { return num_packs_; }

  struct Place {
    int64_t offset;     // of the pack in x
    int64_t scale_idx;  // of its first element
  };

  __device__ __forceinline__ Place place(int64_t pack) const {
    const int64_t row = packs_per_row_.quotient(pack);
    const int64_t pack_of_row = pack - row * packs_of_row_;
    const int64_t col = pack_of_row * kPack;
    const int64_t offset = row * row_stride_ + col;
    if (layout_ == ScaleLayout::kTensor) {
      return {offset, 0};
    }
    if (layout_ == ScaleLayout::kRowGroups) {
      return {offset, row * num_groups_ + group_.quotient(pack_of_row)};
    }
    const int64_t matrix = length_.quotient(row);
    const int64_t group = group_.quotient(row - matrix * rows_of_matrix_);
    return {offset, (matrix * num_groups_ + group) * cols_ + col};
  }

  // Whether the elements of a pack have a scale each.
  __device__ __forceinline__ bool has_lane_scales() const { return layout_ == ScaleLayout::kColumns; }

 private:
  int64_t num_packs_;
  Divisor packs_per_row_;
  int64_t packs_of_row_;
  int64_t row_stride_;
  ScaleLayout layout_;
  int64_t cols_;
  Divisor length_;
  int64_t rows_of_matrix_;
  Divisor group_;
  int64_t num_groups_;
};

}  // namespace htree::fp8
