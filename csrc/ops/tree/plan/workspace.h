// Takes memory piece by piece out of one allocation. The function that lays out a workspace runs twice:
// without memory to count the bytes, and with memory to set the pointers.
#pragma once

#include <cstdint>

#include "device/sizes.h"

namespace htree::tree_attention {

class Workspace {
 public:
  explicit Workspace(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}

  // `count` elements of `size` bytes; every piece starts at a multiple of kAlign bytes.
  template <typename T>
  T* take(int64_t count, int64_t size = sizeof(T)) {
    T* at = memory_ ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    bytes_ += ceil_div(count * size, kAlign) * kAlign;
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlign = 256;
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace htree::tree_attention
