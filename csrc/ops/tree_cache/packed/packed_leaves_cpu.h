// Rows of packed tokens on the CPU, by the row kernels of ops/compressed_kv.
#pragma once

#include <limits>
#include <type_traits>

#include "ops/compressed_kv/cpu_kernels.h"
#include "ops/tree_cache/packed/packed_leaves.h"
#include "ops/tree_cache/tree_cache.h"

namespace htree::tree_cache {

// The tokens of one pool, keys or values, as rows of T. Checks refuse double.
template <typename T>
class LeafRows {
 public:
  LeafRows(const Tensor& codes, const Tensor& scales, int64_t width)
      : format_(leaf_format(width, codes.size(3))),
        heads_(codes.size(1)),
        page_size_(codes.size(2)),
        codes_(codes),
        scales_(scales) {}

  void expand(int64_t page, int64_t head, int64_t place, T* to) const {
    if constexpr (!std::is_same_v<T, double>) {
      const int64_t row = row_of(page, head, place);
      const auto* codes = codes_.const_data_ptr<uint8_t>() + row * format_.row_bytes();
      const auto* scales = static_cast<const uint16_t*>(scales_.const_data_ptr());
      loops_of<Storage<T>>(compressed_kv::row_kernels())
          .decompress(kAllChannels, codes, scales[row], format_, reinterpret_cast<Storage<T>*>(to));
    }
  }
  void pack(int64_t page, int64_t head, int64_t place, const Storage<T>* from) const {
    if constexpr (!std::is_same_v<T, double>) {
      uint64_t bitmap[compressed_kv::kMostHeadDim / 64];
      const int64_t row = row_of(page, head, place);
      auto* codes = codes_.mutable_data_ptr<uint8_t>() + row * format_.row_bytes();
      auto* scales = static_cast<uint16_t*>(scales_.mutable_data_ptr());
      loops_of<Storage<T>>(compressed_kv::row_kernels())
          .compress(from, nullptr, format_, bitmap, codes, scales + row);
    }
  }

 private:
  static constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  static constexpr uint64_t kAllChannels[compressed_kv::kMostHeadDim / 64] = {kAll, kAll, kAll, kAll,
                                                                              kAll, kAll, kAll, kAll};

  int64_t row_of(int64_t page, int64_t head, int64_t place) const {
    return (page * heads_ + head) * page_size_ + place;
  }

  compressed_kv::RowFormat format_;
  int64_t heads_, page_size_;
  const Tensor& codes_;
  const Tensor& scales_;
};

}  // namespace htree::tree_cache
