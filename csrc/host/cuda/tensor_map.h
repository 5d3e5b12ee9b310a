// Descriptors of tensor copies (device/sm90/tma.cuh). The driver's encoder is fetched through the runtime,
// so that the library does not link libcuda, which machines without a GPU lack. Torch-free.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "device/sm90/operand_copy.cuh"

namespace htree {

// A box that copies move between a strided tensor in global memory and shared memory, innermost dimension
// first. The innermost stride is one element.
struct TensorBox {
  const void* data = nullptr;  // aligned to 16 bytes
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int rank = 2;                    // 1 to 5
  uint64_t sizes[5] = {};          // in elements, at least 1
  uint64_t strides_bytes[4] = {};  // of dimensions 1, 2, ...: multiples of 16, below 2^40
  uint32_t box[5] = {};            // in elements, 1 to 256; box[0] fits the swizzle's width
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
};

using TensorMapEncoder = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                      const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                      CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                      CUtensorMapFloatOOBfill);

// Throws std::runtime_error where the driver is too old for it (before 12.0).
inline TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder encoder = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &symbol, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(
          "htree: the CUDA driver has no cuTensorMapEncodeTiled; it must be 12.0 or newer");
    }
    return reinterpret_cast<TensorMapEncoder>(symbol);
  }();
  return encoder;
}

// The encoder needs a current context, which a thread has only after a call of the runtime that needs one.
// Choosing the device that is current already is such a call, and it is allowed while a stream is captured.
inline void bind_context() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaSetDevice(device);
  }
}

// Throws std::runtime_error with the sizes where the driver refuses the box.
inline CUtensorMap make_tensor_map(const TensorBox& b) {
  CUtensorMap map;
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const auto encode = [&] {
    return tensor_map_encoder()(&map, b.type, static_cast<cuuint32_t>(b.rank), const_cast<void*>(b.data),
                                b.sizes, b.strides_bytes, b.box, element_strides,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, b.swizzle, b.promotion,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {  // this is the first CUDA call of the thread
    bind_context();
    result = encode();
  }
  if (result != CUDA_SUCCESS) {
    std::string text = "htree: the driver refused a tensor copy descriptor (error " +
                       std::to_string(static_cast<int>(result)) + "); sizes, box and strides in bytes:";
    for (int i = 0; i < b.rank; ++i) {
      text += " " + std::to_string(b.sizes[i]) + "/" + std::to_string(b.box[i]);
      text += i > 0 ? "/" + std::to_string(b.strides_bytes[i - 1]) : "";
    }
    throw std::runtime_error(text);
  }
  return map;
}

// Descriptor for boxes of 128 bytes x `box_rows` rows of a row-major matrix, as the rings of
// device/sm90/gemm_pipeline.cuh take them. `type` has one byte (UINT8) or two; `columns` counts elements;
// `pitch_bytes` is a multiple of 16.
inline CUtensorMap row_major_map(const void* data, CUtensorMapDataType type, int64_t rows, int64_t columns,
                                 int64_t pitch_bytes, int box_rows) {
  TensorBox box;
  box.data = data;
  box.type = type;
  box.sizes[0] = static_cast<uint64_t>(columns);
  box.sizes[1] = static_cast<uint64_t>(rows);
  box.strides_bytes[0] = static_cast<uint64_t>(pitch_bytes);
  box.box[0] = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 128 : 64;
  box.box[1] = static_cast<uint32_t>(box_rows);
  return make_tensor_map(box);
}

// Descriptors for the copies of device/sm90/operand_copy.cuh, for a row-major matrix as in row_major_map().
// Tiles have `tile_rows` rows, of which one copy brings `copied_rows`.
inline device::OperandMaps operand_maps(const void* data, CUtensorMapDataType type, int64_t rows,
                                        int64_t columns, int64_t pitch_bytes, int tile_rows,
                                        int copied_rows) {
  const int rest = static_cast<int>(rows % tile_rows);
  return {row_major_map(data, type, rows, columns, pitch_bytes, copied_rows),
          row_major_map(data, type, rows, columns, pitch_bytes, rest == 0 ? tile_rows : rest)};
}

}  // namespace htree
