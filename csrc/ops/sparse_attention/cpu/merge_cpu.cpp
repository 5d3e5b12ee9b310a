// CPU kernels of merge_to_global_, subtract_topk and final_normalize (docs/semantics/tree_attention.md §1.7),
// parallel over rows.
#include <cmath>
#include <limits>

#include "host/dispatch.h"
#include "ops/sparse_attention/sparse_attention_kernels.h"
#include "ops/tree/cpu/stage_cpu.h"

namespace htree::tree_attention {
namespace {

using StateTypes = TypeList<float, double>;

// exp(max - new_max), or 0 for an empty state, where the formula would give exp(-inf + inf) = NaN.
template <typename Real>
Real rebase(Real max, Real new_max, Real sum) {
  const Real drop = max - new_max;
  return sum == 0 ? Real{0} : drop == 0 ? Real{1} : std::exp(drop);  // one side of a merge always drops by 0
}

// The larger of the two; NaN if either is NaN.
template <typename Real>
Real max_or_nan(Real a, Real b) {
  return a != a || a > b ? a : b;
}

template <typename Real>
void merge_rows(const Tensor& gmax, const Tensor& gsum, const Tensor& gout, const Tensor& lmax,
                const Tensor& lsum, const Tensor& lout) {
  const int64_t width = gout.size(3);
  const bool unit_stride =
      gout.stride(3) == 1 && lout.stride(3) == 1;  // a state is changed in place, whatever its strides
  const RowStrides gmax_strides = row_strides(gmax);
  const RowStrides gsum_strides = row_strides(gsum);
  const RowStrides gout_strides = row_strides(gout);
  const RowStrides lmax_strides = row_strides(lmax);
  const RowStrides lsum_strides = row_strides(lsum);
  const RowStrides lout_strides = row_strides(lout);
  Real* global_max = gmax.mutable_data_ptr<Real>();
  Real* global_sum = gsum.mutable_data_ptr<Real>();
  Real* global_out = gout.mutable_data_ptr<Real>();
  const Real* layer_max = lmax.const_data_ptr<Real>();
  const Real* layer_sum = lsum.const_data_ptr<Real>();
  const Real* layer_out = lout.const_data_ptr<Real>();
  for_rows(gmax.size(0), gmax.size(1), gmax.size(2), width + 16, [&] {
    return [&](int64_t b, int64_t t, int64_t h) {
      Real& max = global_max[gmax_strides.at(b, t, h)];
      Real& sum = global_sum[gsum_strides.at(b, t, h)];
      const Real other_max = layer_max[lmax_strides.at(b, t, h)];
      const Real other_sum = layer_sum[lsum_strides.at(b, t, h)];
      const Real new_max = max_or_nan(max, other_max);
      const Real keep = rebase(max, new_max, sum);
      const Real add = rebase(other_max, new_max, other_sum);
      max = new_max;
      sum = sum * keep + other_sum * add;
      Real* out = global_out + gout_strides.at(b, t, h);
      const Real* other_out = layer_out + lout_strides.at(b, t, h);
      if (unit_stride) {
        for (int64_t i = 0; i < width; ++i) {
          out[i] = out[i] * keep + other_out[i] * add;
        }
      } else {
        for (int64_t i = 0; i < width; ++i) {
          out[i * gout.stride(3)] = out[i * gout.stride(3)] * keep + other_out[i * lout.stride(3)] * add;
        }
      }
    };
  });
}

// Removes the state of the listed nodes from a state of all candidates, in place, and sorts the list.
template <typename T>
void subtract_rows(const Tensor& layer_v, const Tensor& topk_indices, const Tensor& topk_scores,
                   const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                   const Tensor& selected_indices) {
  using Real = typename Stage<T>::Real;
  constexpr int32_t kLast = std::numeric_limits<int32_t>::max();
  const int64_t heads = lmax.size(2);
  const int64_t group = heads / layer_v.size(2);
  const int64_t width = lout.size(3);
  const int64_t top_k = topk_indices.size(3);
  const RowStrides v_strides = row_strides(layer_v);
  const RowStrides index_strides = row_strides(topk_indices);
  const RowStrides score_strides = row_strides(topk_scores);
  const auto* values = stored<T>(layer_v);
  const int32_t* index_data = topk_indices.const_data_ptr<int32_t>();
  const Real* score_data = topk_scores.const_data_ptr<Real>();
  Real* max_data = lmax.mutable_data_ptr<Real>();
  Real* sum_data = lsum.mutable_data_ptr<Real>();
  Real* out_data = lout.mutable_data_ptr<Real>();
  int32_t* selected = selected_indices.mutable_data_ptr<int32_t>();
  const auto accumulate = Stage<T>::rows().accumulate;

  for_rows(lmax.size(0), lmax.size(1), heads, top_k * (width + 16), [&] {
    return [&, nodes = std::vector<int64_t>(top_k), buffer = std::vector<Real>(top_k + width),
            removed = std::vector<Real>(width)](int64_t b, int64_t t, int64_t h) mutable {
      const int64_t row = (b * lmax.size(1) + t) * heads + h;
      const int32_t* indices = index_data + index_strides.at(b, t, h);
      for (int64_t j = 0; j < top_k; ++j) {
        nodes[j] = indices[j] >= 0 && indices[j] < layer_v.size(1) ? indices[j] : -1;
      }
      Real removed_max = 0;
      Real removed_sum = 0;
      accumulate(score_data + score_strides.at(b, t, h), 1, 1,
                 {values + v_strides.at(b, 0, h / group), v_strides.d1, nodes.data(), top_k}, width,
                 buffer.data(), &removed_max, &removed_sum, removed.data());
      const Real factor = rebase(removed_max, max_data[row], removed_sum);
      const Real rest = sum_data[row] - removed_sum * factor;
      // A list that is not full held every candidate, so nothing remains. Neither does anything where the
      // remaining sum is within the rounding error of the whole.
      const Real noise = static_cast<Real>(top_k) * std::numeric_limits<Real>::epsilon() * sum_data[row];
      const bool empty = std::find(indices, indices + top_k, -1) != indices + top_k || rest <= noise;
      Real* out = out_data + row * width;
      for (int64_t i = 0; i < width; ++i) {
        out[i] = empty ? Real{0} : out[i] - removed[i] * factor;
      }
      max_data[row] = empty ? -std::numeric_limits<Real>::infinity() : max_data[row];
      sum_data[row] = empty ? Real{0} : rest;

      int32_t* sorted = selected + row * top_k;
      std::replace_copy(indices, indices + top_k, sorted, -1, kLast);
      std::sort(sorted, sorted + top_k);
      std::replace(sorted, sorted + top_k, kLast, -1);
    };
  });
}

template <typename T>
void normalize_rows(const Tensor& gout, const Tensor& gsum, const Tensor& out) {
  using Real = typename Stage<T>::Real;
  const int64_t width = gout.size(3);
  const RowStrides gout_strides = row_strides(gout);
  const RowStrides gsum_strides = row_strides(gsum);
  const Real* from = gout.const_data_ptr<Real>();
  const Real* sums = gsum.const_data_ptr<Real>();
  auto* to = stored_mutable<T>(out);
  const auto normalize = Stage<T>::rows().normalize;
  const int64_t n1 = gout.size(1);
  const int64_t n2 = gout.size(2);
  for_rows(gout.size(0), n1, n2, width, [&] {
    return [&](int64_t b, int64_t t, int64_t h) {
      normalize(from + gout_strides.at(b, t, h), sums[gsum_strides.at(b, t, h)], width,
                to + ((b * n1 + t) * n2 + h) * width);
    };
  });
}

// Writes states of one precision into outputs of the other: float to double, double to anything narrower.
template <typename Real, typename Out>
void normalize_and_convert(const Tensor& gout, const Tensor& gsum, const Tensor& out) {
  const int64_t width = gout.size(3);
  const RowStrides gout_strides = row_strides(gout);
  const RowStrides gsum_strides = row_strides(gsum);
  const Real* from = gout.const_data_ptr<Real>();
  const Real* sums = gsum.const_data_ptr<Real>();
  Out* to = out.mutable_data_ptr<Out>();
  for_rows(gout.size(0), gout.size(1), gout.size(2), width, [&] {
    return [&](int64_t b, int64_t t, int64_t h) {
      const Real* row = from + gout_strides.at(b, t, h);
      const Real sum = sums[gsum_strides.at(b, t, h)];
      Out* result = to + ((b * gout.size(1) + t) * gout.size(2) + h) * width;
      for (int64_t i = 0; i < width; ++i) {
        result[i] = static_cast<Out>(row[i] / sum);
      }
    };
  });
}

}  // namespace

void merge_to_global_cpu(const Tensor& gmax, const Tensor& gsum, const Tensor& gout, const Tensor& lmax,
                         const Tensor& lsum, const Tensor& lout) {
  dispatch_dtype("merge_to_global_", gmax.scalar_type(), StateTypes{}, [&](auto tag) {
    merge_rows<typename decltype(tag)::type>(gmax, gsum, gout, lmax, lsum, lout);
  });
}

void subtract_topk_cpu(const Tensor& layer_v, const Tensor& topk_indices, const Tensor& topk_scores,
                       const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                       const Tensor& selected_indices) {
  dispatch_dtype("subtract_topk", layer_v.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    subtract_rows<typename decltype(tag)::type>(layer_v, topk_indices, topk_scores, lmax, lsum, lout,
                                                selected_indices);
  });
}

void final_normalize_cpu(const Tensor& gout, const Tensor& gsum, const Tensor& out) {
  dispatch_dtype("final_normalize", gout.scalar_type(), StateTypes{}, [&](auto state) {
    using State = typename decltype(state)::type;
    dispatch_dtype("final_normalize", out.scalar_type(), AllFloatTypes{}, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (std::is_same_v<typename Stage<T>::Real, State>) {
        normalize_rows<T>(gout, gsum, out);
      } else {
        normalize_and_convert<State, T>(gout, gsum, out);
      }
    });
  });
}

}  // namespace htree::tree_attention
