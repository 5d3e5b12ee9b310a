// Argument checks. Each message says which argument of which function, what was required and what came, in
// the words of Python: "op: argument must ..., got ...". Sizes are compared as symbols, so the Meta kernels
// run the very same checks as the CPU and CUDA kernels. htree_ops/errors.py reads these sentences: a refused
// size is one whose "got" shows sizes in brackets, a refused dtype is a TypeError that says "dtype".
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <initializer_list>
#include <string>

namespace htree {

// Whether the sizes agree. On symbolic sizes this records a guard and does not specialise them.
inline bool same_size(const c10::SymInt& a, const c10::SymInt& b) {
  return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

inline bool holds(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

// `shape` is the documented form, such as "[B, T, H, K]".
inline void check_rank(const char* op, const char* name, const at::Tensor& tensor, int64_t rank,
                       const char* shape) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, op, ": ", name, " must be ", rank, "-D ", shape, ", got ",
                    tensor.dim(), "-D ", tensor.sym_sizes());
}

// `meaning` says which size it is in words that the caller knows, such as "H_kv of k".
inline void check_size(const char* op, const char* name, const at::Tensor& tensor, int64_t dim,
                       const c10::SymInt& expected, const char* meaning) {
  TORCH_CHECK_VALUE(same_size(tensor.sym_size(dim), expected), op, ": size ", dim, " of ", name, " must be ",
                    expected, " (", meaning, "), got ", tensor.sym_size(dim), " in ", tensor.sym_sizes());
}

inline void check_shape(const char* op, const char* name, const at::Tensor& tensor,
                        c10::SymIntArrayRef expected, const char* meaning) {
  bool equal = tensor.dim() == static_cast<int64_t>(expected.size());
  for (size_t dim = 0; equal && dim < expected.size(); ++dim) {
    equal = same_size(tensor.sym_size(static_cast<int64_t>(dim)), expected[dim]);
  }
  TORCH_CHECK_VALUE(equal, op, ": ", name, " must have shape ", expected, " (", meaning, "), got ",
                    tensor.sym_sizes());
}

// The dtype's name in Python, such as torch.float16.
inline std::string dtype_name(at::ScalarType dtype) {
  return std::string("torch.").append(
      c10::getDtypeNames(dtype).first);  // a string in torch 2.11, a view in 2.15
}

inline std::string dtype_names(std::initializer_list<at::ScalarType> dtypes) {
  std::string names;
  for (auto dtype : dtypes) {
    names += (names.empty() ? "" : " or ") + dtype_name(dtype);
  }
  return names;
}

inline void check_dtype(const char* op, const char* name, const at::Tensor& tensor,
                        std::initializer_list<at::ScalarType> supported) {
  bool found = false;
  for (auto dtype : supported) {
    found |= tensor.scalar_type() == dtype;
  }
  TORCH_CHECK_TYPE(found, op, ": ", name, " must have dtype ", dtype_names(supported), ", got ",
                   dtype_name(tensor.scalar_type()));
}

// The floating dtypes of every op: float32, float16, bfloat16, and float64 on the CPU; on CUDA float64 only
// where the op has `double_on_cuda` kernels. Meta tensors stand for either device and accept float64.
inline void check_floating(const char* op, const char* name, const at::Tensor& tensor, bool double_on_cuda) {
  if (tensor.is_cuda() && !double_on_cuda) {
    TORCH_CHECK_TYPE(tensor.scalar_type() != at::kDouble, op, ": ", name, " must have dtype ",
                     dtype_names({at::kFloat, at::kHalf, at::kBFloat16}), " on CUDA, got torch.float64");
  }
  check_dtype(op, name, tensor, {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble});
}

inline void check_same_dtype(const char* op, const char* name, const at::Tensor& tensor,
                             const char* like_name, const at::Tensor& like) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), op, ": ", name, " must have the dtype of ",
                   like_name, " (", dtype_name(like.scalar_type()), "), got ",
                   dtype_name(tensor.scalar_type()));
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& tensor,
                              const char* like_name, const at::Tensor& like) {
  TORCH_CHECK(tensor.device() == like.device(), op, ": ", name, " must be on the device of ", like_name, " (",
              like.device(), "), got ", tensor.device());
}

inline void check_contiguous(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": ", name, " must be contiguous, got strides ",
                    tensor.sym_strides());
}

// The factor is applied in fp32, whatever the dtype of the tensors.
inline void check_finite(const char* op, const char* name, double value) {
  TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(value)), op, ": ", name,
                    " must be finite in float32, got ", value);
}

inline void check_at_least(const char* op, const char* name, int64_t value, int64_t least) {
  TORCH_CHECK_VALUE(value >= least, op, ": ", name, " must be at least ", least, ", got ", value);
}

}  // namespace htree
