// What the IO-only twin of the selection needs besides the arguments of the full kernel.
// docs/semantics/io_twins.md §2.3.
#pragma once

#include <cstdint>

namespace htree::tree_attention {

struct IoPositions {
  int64_t t0 = 0;       // token of the first query
  bool bottom = false;  // layer 0: nothing is selected
  bool stratified = false;
  uint32_t fold_mask = 0;  // the zero that the compiler cannot see: it keeps the loads alive
};

}  // namespace htree::tree_attention
