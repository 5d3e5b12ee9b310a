// Switches read from the environment; an empty one counts as unset. The table of all of them, and when each
// is read, stands in README.md.
#pragma once

#include <cstdlib>
#include <string>

namespace htree {

inline std::string env_or(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value && *value ? value : fallback;
}

}  // namespace htree
