// CPU kernels of select_topk, mask_topk_scores_ and compute_next_parents (docs/semantics/tree_attention.md
// §1.6) and of their IO-only variants (docs/semantics/io_only.md §2.3), parallel over rows.
#include <limits>

#include "host/dispatch.h"
#include "ops/selection/selection_kernels.h"
#include "ops/tree/cpu/stage_cpu.h"
#include "ops/tree/io_formulas.h"

namespace htree::tree_attention {
namespace {

using ScoreTypes = TypeList<float, double>;

template <typename Work, typename Real>
void select_rows(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                 const SelectionOptions& selection, const IoPositions& io, const Tensor& topk_positions) {
  using Rank = typename Stage<Real>::Rank;
  const auto& kernels = Stage<Real>::rows();
  const auto select = Work::kIoOnly ? kernels.io_select : kernels.select;
  const int64_t max_candidates = scores.size(3);
  const int64_t group = scores.size(4);
  const RowStrides score_strides = row_strides(scores);
  const RowStrides count_strides = row_strides(num_candidates);
  const Real* score_data = scores.const_data_ptr<Real>();
  const int32_t* counts = num_candidates.const_data_ptr<int32_t>();
  int32_t* positions = topk_positions.mutable_data_ptr<int32_t>();
  // In words of 8 bytes, for the alignment.
  const int64_t scratch_words = kernels.select_bytes(max_candidates, group) / 8 + 1;

  for_rows(scores.size(0), scores.size(1), scores.size(2), max_candidates * group, [&] {
    return [&, scratch = std::vector<uint64_t>(scratch_words), ranks = std::vector<Rank>(top_k),
            keys = std::vector<std::pair<Rank, int32_t>>()](int64_t b, int64_t i, int64_t s) mutable {
      int32_t* out = positions + ((b * scores.size(1) + i) * scores.size(2) + s) * top_k;
      const int64_t num = std::clamp<int64_t>(counts[count_strides.at(b, i, s)], 0, max_candidates);
      int64_t taken = 0;
      if (num > 0) {
        taken = select(score_data + score_strides.at(b, i, s), scores.stride(3), group, num, top_k, selection,
                       scratch.data(), out, ranks.data());
        if constexpr (Work::kIoOnly) {
          taken = io.bottom ? 0 : taken;
          const auto nothing = static_cast<int32_t>(static_cast<uint32_t>(ranks[0]) & io.fold_mask);
          const uint32_t seed = io_position_seed(b, io.t0 + i, s);
          for (int64_t j = 0; j < taken; ++j) {
            out[j] = io_position(j, taken, num, seed, io.stratified) + nothing;
          }
        } else {
          order_by_key(out, ranks.data(), taken, keys);
        }
      }
      std::fill(out + taken, out + top_k, -1);
    };
  });
}

template <typename Real>
void mask_rows(const Tensor& scores, const Tensor& topk_positions) {
  const int64_t max_candidates = scores.size(3);
  const int64_t group = scores.size(4);
  const int64_t top_k = topk_positions.size(3);
  const RowStrides score_strides = row_strides(scores);
  const RowStrides list_strides = row_strides(topk_positions);
  const int32_t* positions = topk_positions.const_data_ptr<int32_t>();
  Real* score_data = scores.mutable_data_ptr<Real>();
  for_rows(scores.size(0), scores.size(1), scores.size(2), top_k * group, [&] {
    return [&](int64_t b, int64_t i, int64_t s) {
      const int32_t* list = positions + list_strides.at(b, i, s);
      Real* row = score_data + score_strides.at(b, i, s);
      for (int64_t j = 0; j < top_k; ++j) {
        for (int64_t g = 0; list[j] >= 0 && list[j] < max_candidates && g < group; ++g) {
          row[list[j] * scores.stride(3) + g * scores.stride(4)] = -std::numeric_limits<Real>::infinity();
        }
      }
    };
  });
}

template <typename Work>
void next_parents_rows(const Tensor& parents, const Tensor& topk_positions, int64_t r,
                       const Tensor& next_parents) {
  const int64_t top_k = topk_positions.size(3);
  const RowStrides parent_strides = row_strides(parents);
  const RowStrides list_strides = row_strides(topk_positions);
  const int32_t* parent_data = parents.const_data_ptr<int32_t>();
  const int32_t* positions = topk_positions.const_data_ptr<int32_t>();
  int32_t* next = next_parents.mutable_data_ptr<int32_t>();
  const int64_t n1 = topk_positions.size(1);
  const int64_t n2 = topk_positions.size(2);
  for_rows(topk_positions.size(0), n1, n2, top_k * 16, [&] {
    return [&, nodes = std::vector<int64_t>()](int64_t b, int64_t i, int64_t s) mutable {
      const int32_t* list = parent_data + parent_strides.at(b, i, s);
      const int32_t* chosen = positions + list_strides.at(b, i, s);
      int32_t* out = next + ((b * n1 + i) * n2 + s) * top_k;
      if constexpr (Work::kIoOnly) {
        std::copy_n(chosen, top_k, out);
        return;
      }
      const int64_t num_parents = count_parents(list, parents.size(3));
      nodes.clear();
      for (int64_t j = 0; j < top_k; ++j) {
        if (chosen[j] >= 0 && chosen[j] / r < num_parents) {
          nodes.push_back(int64_t{list[chosen[j] / r]} * r + chosen[j] % r);
        }
      }
      std::sort(nodes.begin(), nodes.end());
      std::transform(nodes.begin(), nodes.end(), out,
                     [](int64_t node) { return static_cast<int32_t>(node); });
      std::fill(out + nodes.size(), out + top_k, -1);
    };
  });
}

}  // namespace

void select_topk_cpu(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                     const SelectionOptions& selection, const Tensor& topk_positions) {
  dispatch_dtype("select_topk", scores.scalar_type(), ScoreTypes{}, [&](auto tag) {
    select_rows<FullWork, typename decltype(tag)::type>(scores, num_candidates, top_k, selection, {},
                                                        topk_positions);
  });
}

void io_select_topk_cpu(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                        const IoPositions& io, const Tensor& topk_positions) {
  dispatch_dtype("io_select_topk", scores.scalar_type(), ScoreTypes{}, [&](auto tag) {
    select_rows<IoOnly, typename decltype(tag)::type>(scores, num_candidates, top_k, {}, io, topk_positions);
  });
}

void mask_topk_scores_cpu(const Tensor& scores, const Tensor& topk_positions) {
  dispatch_dtype("mask_topk_scores_", scores.scalar_type(), ScoreTypes{},
                 [&](auto tag) { mask_rows<typename decltype(tag)::type>(scores, topk_positions); });
}

void compute_next_parents_cpu(const Tensor& parents, const Tensor& topk_positions, int64_t r,
                              const Tensor& next_parents) {
  next_parents_rows<FullWork>(parents, topk_positions, r, next_parents);
}

void io_compute_next_parents_cpu(const Tensor& parents, const Tensor& topk_positions, int64_t r,
                                 const Tensor& next_parents) {
  next_parents_rows<IoOnly>(parents, topk_positions, r, next_parents);
}

}  // namespace htree::tree_attention
