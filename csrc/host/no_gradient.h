// The Autograd kernel of ops without a gradient formula. docs/semantics/conventions.md §0.5
#pragma once

#include <torch/library.h>

#include <initializer_list>

namespace htree {

// Their outputs can be used, and a backward through them raises RuntimeError instead of silently giving zeros: in a
// compiled graph when its backward runs, as without one. Torch's own autogradNotImplementedFallback raises when the
// backward is traced, so that a compiled call fails although nobody asks for a gradient.
void register_no_gradient(torch::Library& autograd, std::initializer_list<const char*> ops);

}  // namespace htree
