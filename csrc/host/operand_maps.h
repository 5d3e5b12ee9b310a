// Descriptors for the copies of device/operand_copy.cuh. Torch-free.
#pragma once

#include <cstdint>

#include "device/operand_copy.cuh"
#include "host/tensor_map.h"

namespace htree {

// Of a row-major matrix as row_major_map() takes it, for tiles of `tile_rows` rows, of which a copy brings
// `copied_rows`, a share.
inline device::OperandMaps operand_maps(const void* data, CUtensorMapDataType type, int64_t rows,
                                        int64_t columns, int64_t pitch_bytes, int tile_rows,
                                        int copied_rows) {
  const int rest = static_cast<int>(rows % tile_rows);
  return {row_major_map(data, type, rows, columns, pitch_bytes, copied_rows),
          row_major_map(data, type, rows, columns, pitch_bytes, rest == 0 ? tile_rows : rest)};
}

}  // namespace htree
