// Whether elements share memory, for mutating ops: what they write must belong to one
// element alone. docs/semantics/conventions.md §0.5
//
// ATen's own answer (MemoryOverlap.h) is "too hard", which its callers let pass, for every view that is not dense: for
// windows of one row as well as for the columns of two matrices that lie one in the other.
//
// Meta tensors have no addresses. Those of one storage are compared by their offsets in it; others never
// share. Tensors with symbolic sizes or strides pass, and are checked when the op runs.
#pragma once

#include <ATen/core/Tensor.h>

namespace htree {

// Whether a and b have the same elements in the same places. Strides of dims with one element do not matter.
bool is_same_view(const at::Tensor& a, const at::Tensor& b);

// RuntimeError unless each stride of `written`, from the smallest on, steps over everything that those before it reach,
// as in every view that slicing, permuting and reshaping make.
void check_writable(const char* op, const char* name, const at::Tensor& written);
// RuntimeError where `written` and `other` share memory. Exact where both have such strides; where they have not, the
// search may end undecided, which counts as shared.
void check_disjoint(const char* op, const char* name, const at::Tensor& written, const char* other_name,
                    const at::Tensor& other);

}  // namespace htree
