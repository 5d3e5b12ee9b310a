// Whether elements share memory, for mutating ops: what they write must belong to one
// element alone. docs/semantics/conventions.md §0.5
//
// Meta tensors have no addresses. Those of one storage are compared by their offsets in it; others never
// share. Tensors with symbolic sizes or strides pass, and are checked when the op runs.
#pragma once

#include <ATen/core/Tensor.h>

namespace htree {

// Whether two elements of t share memory. Exact up to a bound on the work, beyond which the answer is true.
bool overlaps_itself(const at::Tensor& t);
// Whether a and b have the same elements in the same places. Strides of dims with one element do not matter.
bool is_same_view(const at::Tensor& a, const at::Tensor& b);
// Whether an element of a shares memory with one of b, with the same bound.
bool share_memory(const at::Tensor& a, const at::Tensor& b);

// RuntimeError where elements of `written` share memory.
void check_writable(const char* op, const char* name, const at::Tensor& written);
// RuntimeError where `written` and `other` share memory.
void check_disjoint(const char* op, const char* name, const at::Tensor& written, const char* other_name,
                    const at::Tensor& other);

}  // namespace htree
