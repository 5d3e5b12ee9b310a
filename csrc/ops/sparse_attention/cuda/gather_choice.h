// Which of the kernels that attend to lists the environment asks for.
#pragma once

#include "ops/sparse_attention/plan/lists.h"

namespace htree::tree_attention {

// HTREE_TREE_GATHER is read at every call, so that a test can compare the kernels.
GatherChoice gather_choice();

}  // namespace htree::tree_attention
