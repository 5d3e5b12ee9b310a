// What an IO-only score adds to its hash: the weights of the sum of the key, of the sums of query, cosines
// and sines, and of the head's number in its group (docs/semantics/io_only.md §2.3). This file holds
// constants alone, because the CPU row kernels include it.
#pragma once

namespace htree::tree_attention {

constexpr double kIoKeyWeight = 0.01;
constexpr double kIoQueryWeight = 1e-6;
constexpr double kIoHeadWeight = 0.001;

}  // namespace htree::tree_attention
