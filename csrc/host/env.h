// Switches read from the environment; an empty one counts as unset. docs/switches.md lists them and says when
// each is read.
#pragma once

#include <cstdlib>
#include <string>

namespace htree {

inline std::string env_or(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value && *value ? value : fallback;
}

}  // namespace htree
