// Switches read from the environment, each once. The table of all of them stands in README.md.
#pragma once

#include <cstdlib>
#include <string>

namespace htree {

inline std::string env_or(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value ? value : fallback;
}

}  // namespace htree
