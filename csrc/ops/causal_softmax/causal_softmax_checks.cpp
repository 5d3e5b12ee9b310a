// All checks and output allocation of the room, shared by the CPU, CUDA and Meta kernels.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "host/check.h"
#include "ops/causal_softmax/causal_softmax.h"

namespace htree::causal_softmax {
namespace {

constexpr const char* kOp = "causal_softmax";

void check_scores(const char* name, const at::Tensor& x) {
  check_floating(kOp, name, x, /*double_on_cuda=*/true);
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, kOp, ": ", name,
                    " must be 2-D [h, w] or 3-D [b, h, w], got ", x.dim(), "-D ", x.sym_sizes());
  TORCH_CHECK_VALUE(holds(x.sym_size(-1).sym_ge(x.sym_size(-2))), kOp, ": ", name,
                    " must have at least as many columns (keys) as rows (queries), got ", x.sym_sizes());
}

void check_block_size(int64_t block_size) {
  TORCH_CHECK_NOT_IMPLEMENTED(block_size == 0 || block_size == 512 || block_size == 1024, kOp,
                              ": block_size must be 0 (automatic), 512 or 1024, got ", block_size);
}

// First and last element offsets that a tensor can touch, relative to its storage.
std::pair<int64_t, int64_t> extent(const at::Tensor& t) {
  int64_t low = t.storage_offset();
  int64_t high = low;
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    const int64_t reach = (t.size(dim) - 1) * t.stride(dim);
    (reach < 0 ? low : high) += reach;
  }
  return {low, high};
}

// Interleaved views (columns 0, 2, ... and 1, 3, ...) share a range but no element.
bool provably_disjoint(const at::Tensor& a, const at::Tensor& b) {
  const auto [a_low, a_high] = extent(a);
  const auto [b_low, b_high] = extent(b);
  if (a_high < b_low || b_high < a_low) {
    return true;
  }
  int64_t divisor = 0;
  for (const auto& t : {a, b}) {
    for (int64_t dim = 0; dim < t.dim(); ++dim) {
      divisor = t.size(dim) > 1 ? std::gcd(divisor, t.stride(dim)) : divisor;
    }
  }
  return divisor > 1 && (a.storage_offset() - b.storage_offset()) % divisor != 0;
}

// True when no two elements can share a place: sorted by stride, each dim steps over all that the smaller
// ones reach.
bool provably_injective(const at::Tensor& t) {
  std::array<std::pair<int64_t, int64_t>, 3> dims{};  // stride, size
  const auto end = dims.begin() + t.dim();
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    dims[static_cast<size_t>(dim)] = {t.size(dim) > 1 ? std::abs(t.stride(dim)) : 0, t.size(dim)};
  }
  std::sort(dims.begin(), end);
  int64_t reach = 0;
  for (auto it = dims.begin(); it != end; ++it) {
    if (it->second > 1 && it->first <= reach) {
      return false;
    }
    reach += it->first * (it->second - 1);
  }
  return true;
}

}  // namespace

Problem problem_of(const at::Tensor& x, int64_t block_size) {
  return {
      .batch = x.dim() == 3 ? x.size(0) : 1,
      .rows = x.size(-2),
      .cols = x.size(-1),
      .block_size = static_cast<int>(block_size),
  };
}

Strides strides_of(const at::Tensor& x) {
  return {.batch = x.dim() == 3 ? x.stride(0) : 0, .row = x.stride(-2), .col = x.stride(-1)};
}

at::Tensor prepare(const at::Tensor& x, int64_t block_size) {
  check_scores("x", x);
  check_block_size(block_size);
  return at::empty_symint(x.sym_sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
}

void prepare_out(const at::Tensor& x, int64_t block_size, const at::Tensor& out) {
  check_scores("x", x);
  check_block_size(block_size);
  check_same_dtype(kOp, "out", out, "x", x);
  check_same_device(kOp, "out", out, "x", x);
  check_shape(kOp, "out", out, x.sym_sizes(), "the shape of x");
}

void check_overlap(const at::Tensor& x, const at::Tensor& out) {
  TORCH_CHECK(out.numel() == 0 || provably_injective(out), kOp,
              ": elements of out must not share memory, they may overlap with shape ", out.sizes(),
              " and strides ", out.strides());
  const bool same_view = x.data_ptr() == out.data_ptr() && x.strides() == out.strides();
  if (x.numel() == 0 || same_view || !x.is_alias_of(out)) {
    return;
  }
  TORCH_CHECK(
      provably_disjoint(x, out), kOp,
      ": out must be the same view as x or share no memory with it; it may partially overlap x (shape ",
      x.sizes(), ", strides ", x.strides(), " and ", out.strides(), ", offsets ", x.storage_offset(), " and ",
      out.storage_offset(), ")");
}

at::Tensor prepare_backward(const at::Tensor& dy, const at::Tensor& y) {
  check_scores("y", y);
  check_same_dtype(kOp, "dy", dy, "y", y);
  check_same_device(kOp, "dy", dy, "y", y);
  check_shape(kOp, "dy", dy, y.sym_sizes(), "the shape of y");
  return at::empty_symint(y.sym_sizes(), y.options().memory_format(at::MemoryFormat::Contiguous));
}

}  // namespace htree::causal_softmax
