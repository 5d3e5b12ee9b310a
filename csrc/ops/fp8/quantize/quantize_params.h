// Kernel parameters of quantisation: raw pointers, strides and sizes in elements. Torch-free.
//
// Every problem is a matrix x [rows, cols] with unit column stride. Scales are fp32 and are
// laid out as follows:
//   kTensor     one scale                                 scale []
//   kRowGroups  groups of `group` columns of each row     scale [rows, ceil(cols / group)]
//   kColumns    groups of `group` of each `length` rows   scale [rows / length, ceil(length / group), cols]
#pragma once

#include <cstdint>

#include "device/sizes.h"

namespace htree::fp8 {

enum class ScaleLayout { kTensor, kRowGroups, kColumns };

struct MatrixShape {
  int64_t rows;
  int64_t cols;
  ScaleLayout layout;
  int64_t group;  // elements under one scale, along the row or down the column; the last group may be shorter
  int64_t length;  // kColumns: rows of one matrix of the batch
};

// Number of scales; shape has at least one element.
constexpr int64_t num_scales(const MatrixShape& s) {
  switch (s.layout) {
    case ScaleLayout::kTensor:
      return 1;
    case ScaleLayout::kRowGroups:
      return s.rows * ceil_div(s.cols, s.group);
    case ScaleLayout::kColumns:
      break;
  }
  return s.rows / s.length * ceil_div(s.length, s.group) * s.cols;
}

}  // namespace htree::fp8
