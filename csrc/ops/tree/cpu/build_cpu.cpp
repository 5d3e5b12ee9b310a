// CPU kernels of tree_build, its backward and span_means (docs/semantics/tree_attention.md §1.2),
// parallel over parents.
#include <cstring>

#include "host/dispatch.h"
#include "ops/tree/cpu/stage_cpu.h"
#include "ops/tree/tree_kernels.h"

namespace htree::tree_attention {
namespace {

// The rows of a [B, N, H, D] tensor. Where the heads of a node lie side by side, all of them make one row of
// H * D elements.
struct Layout {
  int64_t batch, nodes, rows, width;
  RowStrides strides;
};

Layout layout_of(const Tensor& x) {
  const int64_t heads = x.size(2);
  const int64_t width = x.size(3);
  const bool merged = heads == 1 || x.stride(2) == width;
  return {x.size(0), x.size(1), merged ? 1 : heads, merged ? heads * width : width, row_strides(x)};
}

template <typename T>
void build(const Tensor& x, int64_t r, const Tensor& parents) {
  const Layout in = layout_of(x);
  const auto* from = stored<T>(x);
  auto* to = stored_mutable<T>(parents);
  const auto mean = Stage<T>::rows().mean;
  const int64_t num_parents = parents.size(1);
  for_rows(in.batch, num_parents, in.rows, r * in.width, [&] {
    return [&](int64_t b, int64_t i, int64_t row) {
      const int64_t count = std::min(r, in.nodes - i * r);
      mean(from + in.strides.at(b, i * r, row), in.strides.d1, count, in.width,
           to + ((b * num_parents + i) * in.rows + row) * in.width);
    };
  });
}

template <typename T>
void build_backward(const Tensor& grad, int64_t r, const Tensor& children) {
  const Layout in = layout_of(grad);
  const auto* from = stored<T>(grad);
  auto* to = stored_mutable<T>(children);
  const auto share = Stage<T>::rows().share;
  const int64_t num_children = children.size(1);
  const int64_t child_stride = in.rows * in.width;
  for_rows(in.batch, in.nodes, in.rows, r * in.width, [&] {
    return [&](int64_t b, int64_t i, int64_t row) {
      const int64_t count = std::min(r, num_children - i * r);
      auto* first = to + (b * num_children + i * r) * child_stride + row * in.width;
      share(from + in.strides.at(b, i, row), count, in.width, first);
      for (int64_t c = 1; c < count; ++c) {
        std::memcpy(first + c * child_stride, first, sizeof(*first) * static_cast<size_t>(in.width));
      }
    };
  });
}

template <typename F>
void for_each_dtype(const char* op, const Tensor& x, F&& f) {
  if (x.numel() > 0) {
    dispatch_dtype(op, x.scalar_type(), AllFloatTypes{}, std::forward<F>(f));
  }
}

}  // namespace

void tree_build_cpu(const Tensor& k, const Tensor& v, int64_t r, const Tensor& pk, const Tensor& pv) {
  for_each_dtype("tree_build", k, [&](auto tag) { build<typename decltype(tag)::type>(k, r, pk); });
  for_each_dtype("tree_build", v, [&](auto tag) { build<typename decltype(tag)::type>(v, r, pv); });
}

void span_means_cpu(const Tensor& k, int64_t span, const Tensor& means) {
  for_each_dtype("span_means", k, [&](auto tag) { build<typename decltype(tag)::type>(k, span, means); });
}

void tree_build_backward_cpu(const Tensor& dpk, const Tensor& dpv, int64_t r, const Tensor& dk,
                             const Tensor& dv) {
  const char* op = "tree_build_backward";
  for_each_dtype(op, dpk, [&](auto tag) { build_backward<typename decltype(tag)::type>(dpk, r, dk); });
  for_each_dtype(op, dpv, [&](auto tag) { build_backward<typename decltype(tag)::type>(dpv, r, dv); });
}

}  // namespace htree::tree_attention
