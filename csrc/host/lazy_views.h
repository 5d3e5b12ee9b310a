// Mutating ops on lazy views: tensors whose values are negated or conjugated when they are read
// (Tensor.is_neg, is_conj). docs/semantics/conventions.md §0.5
#pragma once

#include <torch/library.h>

#include <string>

namespace htree {

// Registers kernels of the mutating op `name` for the dispatch keys Negative and Conjugate. They run
// the op on tensors with the view's values and write the result back into the view. Torch's own kernels
// for these keys expect a mutating op to return what it wrote; ours return nothing, so torch's would
// read past the stack.
void register_lazy_views(torch::Library& library, const std::string& name);

}  // namespace htree
