// Copies the layers of the tree into the layout of the query kernels (query_kernels.h), and helps torch code
// to call those kernels.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>
#include <vector>

#include "host/cpu/isa.h"
#include "host/dispatch.h"
#include "ops/sparse_attention/cpu/query_kernels.h"

namespace htree::tree_attention {

template <typename Real>
const QueryKernels<Real>& query_kernels() {
  if constexpr (std::is_same_v<Real, double>) {
    return kQueryKernelsDouble;
  } else {
    return HTREE_PICK_ISA(kQueryKernels);
  }
}

template <typename Real>
constexpr at::ScalarType kRealType = std::is_same_v<Real, double> ? at::kDouble : at::kFloat;

// Calls f(Type<T>{}, Type<Real>{}), T being the storage type of `dtype` and Real the type of its arithmetic.
template <typename F>
void dispatch_storage(const char* op, at::ScalarType dtype, F&& f) {
  dispatch_dtype(op, dtype, AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    f(Type<T>{}, Type<std::conditional_t<std::is_same_v<T, double>, double, float>>{});
  });
}

inline int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

inline QueryShape query_shape(const at::Tensor& q, int64_t kv_heads, int64_t value_dim, int64_t r,
                              int64_t max_parents, const SelectionOptions& selection, int64_t lanes) {
  QueryShape shape;
  shape.group = q.size(2) / kv_heads;
  shape.half = q.size(3) / 2;
  shape.half_pad = round_up(shape.half, lanes);
  shape.value_dim = value_dim;
  shape.value_pad = round_up(value_dim, lanes);
  shape.r = r;
  shape.r_pad = round_up(r, lanes);
  shape.max_parents = max_parents;
  shape.selection = selection;
  return shape;
}

// Hands the tasks to the threads one by one, because their cost grows with t. f(task) must not depend on the
// thread. make_worker() is called once per thread.
template <typename MakeWorker>
void parallel_tasks(int64_t num_tasks, MakeWorker&& make_worker) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), num_tasks);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    auto worker = make_worker();
    for (int64_t task = next++; task < num_tasks; task = next++) {
      worker(task);
    }
  });
}

// An uninitialised array of `rows` rows of `size` elements. Parents are gathered from it at random, a page or
// two each, and huge pages, where the system grants them, save most of the address translations.
inline at::Tensor empty_rows(int64_t rows, int64_t size, at::ScalarType dtype) {
  at::Tensor tensor = at::empty({rows, size}, dtype);
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t end = (begin + tensor.nbytes()) / kHugePage * kHugePage;
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
  return tensor;
}

// The rotation table, padded for the kernels: [2][positions][half_pad].
struct RotationTable {
  at::Tensor table;

  template <typename Real>
  Rotation<Real> rotation() const {
    if (!table.defined()) {
      return {};
    }
    const Real* cos = table.const_data_ptr<Real>();
    return {cos, cos + table.size(1) * table.size(2)};
  }
};

// From the angles p inv_freq[i], or p base^(-2i/K) where `inv_freq` is empty, computed in double and rounded once.
template <typename Real>
RotationTable make_rotation(int64_t positions, const QueryShape& shape, double base,
                            const std::vector<double>& inv_freq) {
  at::Tensor table = at::empty({2, positions, shape.half_pad}, kRealType<Real>);
  Real* cos = table.mutable_data_ptr<Real>();
  Real* sin = cos + positions * shape.half_pad;
  std::vector<double> frequencies = inv_freq;
  frequencies.resize(shape.half);
  for (int64_t i = 0; inv_freq.empty() && i < shape.half; ++i) {
    frequencies[i] = 1.0 / std::pow(base, static_cast<double>(i) / static_cast<double>(shape.half));
  }
  at::parallel_for(0, positions, 64, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      for (int64_t i = 0; i < shape.half_pad; ++i) {
        const double angle = i < shape.half ? static_cast<double>(p) * frequencies[i] : 0.0;
        cos[p * shape.half_pad + i] = static_cast<Real>(std::cos(angle));
        sin[p * shape.half_pad + i] = static_cast<Real>(std::sin(angle));
      }
    }
  });
  return {table};
}

// From the first `positions` rows of the cos and sin tensors [size, K/2].
template <typename Real>
RotationTable copy_rotation(const at::Tensor& cos, const at::Tensor& sin, int64_t positions,
                            const QueryShape& shape) {
  at::Tensor table = at::zeros({2, positions, shape.half_pad}, kRealType<Real>);
  table.select(0, 0).narrow(1, 0, shape.half).copy_(cos.narrow(0, 0, positions));
  table.select(0, 1).narrow(1, 0, shape.half).copy_(sin.narrow(0, 0, positions));
  return {table};
}

// One layer of all (batch, key/value head) pairs: padded copies of k and v in fp32 (fp64 for fp64 inputs).
// They take B H_kv N (K r_pad/r + V) elements, and as many again with `gradients`.
template <typename Real>
class PackedLayers {
 public:
  // layer_k is [B, N, H_kv, K], layer_v [B, N, H_kv, V] or undefined. The last stride is 1.
  template <typename T>
  static PackedLayers make(const at::Tensor& layer_k, const at::Tensor& layer_v, const QueryShape& shape,
                           const Rotation<Real>& rotation, bool gradients, Type<T>);

  PackedLayer<Real> at(int64_t batch, int64_t kv_head) const {
    const int64_t pair = batch * kv_heads_ + kv_head;
    const auto of = [&](const at::Tensor& tensor) -> const Real* {
      return tensor.defined() ? tensor.const_data_ptr<Real>() + pair * tensor.stride(0) : nullptr;
    };
    return {of(keys_), of(values_), of(key_rows_), of(value_lanes_), num_nodes_};
  }
  int64_t num_nodes() const { return num_nodes_; }

 private:
  at::Tensor keys_, values_, key_rows_, value_lanes_;  // [B H_kv, ...], then as in PackedLayer
  int64_t kv_heads_ = 1;
  int64_t num_nodes_ = 0;
};

// The span means of all (batch, key/value head) pairs for the layer of `num_nodes` nodes: a padded copy in
// fp32 (fp64 for fp64 inputs). It takes B H_kv ceil(T / selection_span) K elements, and more where the last
// tiles are not full.
template <typename Real>
class CpuPackedSpans {
 public:
  CpuPackedSpans() = default;
  // span_k is [B, ceil(T / selection_span), H_kv, K] with unit stride in the last dim; the means of node i
  // begin at i * means_per_node.
  template <typename T>
  CpuPackedSpans(const at::Tensor& span_k, int64_t num_nodes, int64_t means_per_node, const QueryShape& shape,
                 const Rotation<Real>& rotation, Type<T>);

  // Empty where every candidate of the layer is selected, so that no means are needed.
  bool empty() const { return !keys_.defined(); }
  PackedSpan<Real> at(int64_t batch, int64_t kv_head) const {
    PackedSpan<Real> span = span_;
    span.keys = keys_.const_data_ptr<Real>() + (batch * kv_heads_ + kv_head) * keys_.stride(0);
    return span;
  }

 private:
  at::Tensor keys_;  // [B H_kv, ...] as PackedSpan says
  int64_t kv_heads_ = 1;
  PackedSpan<Real> span_;
};

// Writes `key` [K] of child `child` of a parent as K' twice: as a padded row, and in the child's lane of the
// parent's tile [K][lanes].
template <typename T, typename Real>
inline void pack_key(const T* key, const QueryShape& shape, const Rotation<Real>& rotation, int64_t child,
                     int64_t lanes, Real* row, Real* tile) {
  for (int64_t i = 0; i < shape.half; ++i) {
    const Real lo = static_cast<Real>(key[i]);
    const Real hi = static_cast<Real>(key[shape.half + i]);
    const Real c = rotation.cos ? rotation.cos[child * shape.half_pad + i] : Real{1};
    const Real s = rotation.cos ? rotation.sin[child * shape.half_pad + i] : Real{0};
    row[i] = rotation.cos ? lo * c - hi * s : lo;
    row[shape.half_pad + i] = rotation.cos ? lo * s + hi * c : hi;
    tile[i * lanes + child] = row[i];
    tile[(shape.half + i) * lanes + child] = row[shape.half_pad + i];
  }
}

template <typename Real>
template <typename T>
CpuPackedSpans<Real>::CpuPackedSpans(const at::Tensor& span_k, int64_t num_nodes, int64_t means_per_node,
                                     const QueryShape& shape, const Rotation<Real>& rotation, Type<T>)
    : kv_heads_(span_k.size(2)) {
  const int64_t num_means = span_k.size(1);
  const int64_t tiles = std::min(means_per_node, num_means);
  const int64_t lanes = num_nodes < shape.r ? round_up(num_nodes, query_kernels<Real>().lanes) : shape.r_pad;
  span_ = {nullptr, num_nodes, num_means, means_per_node, tiles, lanes};
  const int64_t tile_size = 2 * shape.half * lanes;
  const int64_t pairs = span_k.size(0) * kv_heads_;
  const int64_t tiles_of_pair = ceil_div(num_nodes, shape.r) * tiles;
  keys_ = empty_rows(pairs, tiles_of_pair * tile_size, kRealType<Real>);
  Real* keys = keys_.template mutable_data_ptr<Real>();
  const T* means = span_k.const_data_ptr<T>();
  at::parallel_for(0, pairs * tiles_of_pair, 16, [&](int64_t begin, int64_t end) {
    std::vector<Real> row(shape.row());
    for (int64_t task = begin; task < end; ++task) {
      const int64_t pair = task / tiles_of_pair;
      const int64_t first_node = task % tiles_of_pair / tiles * shape.r;
      const T* head = means + pair / kv_heads_ * span_k.stride(0) + pair % kv_heads_ * span_k.stride(2);
      Real* tile = keys + task * tile_size;
      std::fill(tile, tile + tile_size, Real{0});
      for (int64_t child = 0; child < shape.r && first_node + child < num_nodes; ++child) {
        const int64_t mean = (first_node + child) * means_per_node + task % tiles;
        if (mean >= num_means) break;
        pack_key(head + mean * span_k.stride(1), shape, rotation, child, lanes, row.data(), tile);
      }
    }
  });
}

template <typename Real>
template <typename T>
PackedLayers<Real> PackedLayers<Real>::make(const at::Tensor& layer_k, const at::Tensor& layer_v,
                                            const QueryShape& shape, const Rotation<Real>& rotation,
                                            bool gradients, Type<T>) {
  PackedLayers out;
  const int64_t batch = layer_k.size(0);
  const int64_t num_nodes = layer_k.size(1);
  const int64_t kv_heads = layer_k.size(2);
  const int64_t num_parents = ceil_div(num_nodes, shape.r);
  const int64_t key_dim = 2 * shape.half;
  out.kv_heads_ = kv_heads;
  out.num_nodes_ = num_nodes;
  const int64_t pairs = batch * kv_heads;
  const bool with_values = layer_v.defined();
  out.keys_ = empty_rows(pairs, num_parents * key_dim * shape.r_pad, kRealType<Real>);
  Real* keys = out.keys_.template mutable_data_ptr<Real>();
  Real* values = nullptr;
  Real* key_rows = nullptr;
  Real* value_lanes = nullptr;
  if (with_values) {
    out.values_ = empty_rows(pairs, num_nodes * shape.value_pad, kRealType<Real>);
    values = out.values_.template mutable_data_ptr<Real>();
  }
  if (gradients) {
    out.key_rows_ = empty_rows(pairs, num_nodes * shape.row(), kRealType<Real>);
    out.value_lanes_ = empty_rows(pairs, num_parents * shape.value_dim * shape.r_pad, kRealType<Real>);
    key_rows = out.key_rows_.template mutable_data_ptr<Real>();
    value_lanes = out.value_lanes_.template mutable_data_ptr<Real>();
  }
  const T* k = layer_k.const_data_ptr<T>();
  const T* v = with_values ? layer_v.const_data_ptr<T>() : nullptr;

  at::parallel_for(0, pairs * num_parents, 16, [&](int64_t begin, int64_t end) {
    std::vector<Real> row(shape.row());
    for (int64_t task = begin; task < end; ++task) {
      const int64_t pair = task / num_parents;
      const int64_t parent = task % num_parents;
      const int64_t b = pair / kv_heads;
      const int64_t h = pair % kv_heads;
      Real* tile = keys + task * key_dim * shape.r_pad;
      Real* value_tile = gradients ? value_lanes + task * shape.value_dim * shape.r_pad : nullptr;
      std::fill(tile, tile + key_dim * shape.r_pad, Real{0});
      if (gradients) std::fill(value_tile, value_tile + shape.value_dim * shape.r_pad, Real{0});
      for (int64_t child = 0; child < shape.r && parent * shape.r + child < num_nodes; ++child) {
        const int64_t node = parent * shape.r + child;
        const T* k_row = k + b * layer_k.stride(0) + node * layer_k.stride(1) + h * layer_k.stride(2);
        std::fill(row.begin(), row.end(), Real{0});
        pack_key(k_row, shape, rotation, child, shape.r_pad, row.data(), tile);
        if (gradients) {
          std::copy(row.begin(), row.end(), key_rows + (pair * num_nodes + node) * shape.row());
        }
        if (!with_values) continue;
        const T* v_row = v + b * layer_v.stride(0) + node * layer_v.stride(1) + h * layer_v.stride(2);
        Real* value_row = values + (pair * num_nodes + node) * shape.value_pad;
        for (int64_t i = 0; i < shape.value_dim; ++i) {
          value_row[i] = static_cast<Real>(v_row[i]);
          if (gradients) value_tile[i * shape.r_pad + child] = value_row[i];
        }
        std::fill(value_row + shape.value_dim, value_row + shape.value_pad, Real{0});
      }
    }
  });
  return out;
}

}  // namespace htree::tree_attention
