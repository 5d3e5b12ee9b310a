// Mutating ops on lazy views: a tensor whose values are negated or conjugated when read (Tensor.is_neg,
// is_conj). docs/semantics/conventions.md §0.5.
#pragma once

#include <torch/library.h>

#include <string>

namespace htree {

// Registers kernels of the mutating op `name` for the dispatch keys Negative and Conjugate: the op runs on
// tensors with the view's values, and what it wrote goes back into the view. Torch's own kernel for these
// keys expects a mutating op to return what it wrote; ours return nothing, and it would read past the stack.
void register_lazy_views(torch::Library& library, const std::string& name);

}  // namespace htree
