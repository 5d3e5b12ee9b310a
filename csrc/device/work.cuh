// Work policies: the first template argument of a staged kernel says what it does with the data that it
// moves. An IO-only twin is the same kernel with another policy, hence with the same launches, loops,
// addresses and predicates.
#pragma once

namespace htree {

// The arithmetic that docs/semantics.md defines.
struct FullWork {};

}  // namespace htree
