// Work policies: the first template argument of a staged kernel says what it does with the data that it
// moves. An IO-only variant is the same kernel with another policy, so it has the same launches, loops,
// addresses and predicates.
#pragma once

namespace htree {

// Does the arithmetic that docs/semantics defines.
struct FullWork {
  static constexpr bool kIoOnly = false;
};

// Does every load and store of the full kernel, but only a few operations on what was loaded. Each loaded
// value feeds a stored one, or the compiler would delete the load. The results mean no more than
// docs/semantics/io_only.md §2.3 says.
struct IoOnly {
  static constexpr bool kIoOnly = true;
};

}  // namespace htree
