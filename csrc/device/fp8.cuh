// E4M3FN codes, one byte each: conversion from float and to float.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace htree::device {

// The codes of two floats, that of `low` in the low byte. Rounds to nearest, ties to even. What is beyond
// +-448, Inf included, becomes the largest value, and every NaN becomes 0x7f. One instruction from sm_89 on,
// integer arithmetic before.
__device__ __forceinline__ uint16_t encode_e4m3x2(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint8_t encode_e4m3(float x) {
  return static_cast<uint8_t>(encode_e4m3x2(x, 0.0f));
}

// The values of a pair of codes, exact.
__device__ __forceinline__ float2 decode_e4m3x2(uint16_t codes) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

__device__ __forceinline__ float decode_e4m3(uint8_t code) {
  return decode_e4m3x2(code).x;
}

}  // namespace htree::device
