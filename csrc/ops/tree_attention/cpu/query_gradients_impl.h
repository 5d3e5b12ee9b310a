// Gradients of the query kernels (docs/semantics/tree_attention.md §1.10); included after host/cpu/simd.h.
#pragma once

#include "ops/tree_attention/cpu/query_blocks.h"

namespace htree::HTREE_ISA::query {

// Children whose gradients are accumulated in registers beside kValueBlock vectors.
constexpr int kChildBlock = 4;

template <typename Real>
void weigh(const QueryShape& shape, const PackedLayer<Real>& layer, const Candidates& candidates,
           const int32_t* excluded, int64_t num_excluded, const Real* dout, const Real* delta,
           const Real* gmax, const Real* gsum, Real* scores, Real* dscores) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  const int64_t stride = shape.score_stride();
  const int64_t first = (shape.value_dim + 1) / 2;
  const int64_t tile_size = shape.value_dim * shape.r_pad;
  for (int64_t slot = 0; dscores != nullptr && slot < candidates.num_parents; ++slot) {
    const int64_t parent = candidates.parents[slot];
    Real* out = dscores + slot * shape.r;
    if (!candidates.regular && !parent_present(shape, layer.num_nodes, parent)) {
      for (int64_t g = 0; g < shape.group; ++g) {
        fill(out + g * stride, shape.r, Real{0});
      }
      continue;
    }
    const Real* tile = layer.value_lanes + parent * tile_size;
    const bool last = slot + 1 == candidates.num_parents || !candidates.regular;
    const Real* next = last ? tile : layer.value_lanes + candidates.parents[slot + 1] * tile_size;
    for_blocks<kHeadBlock>(shape.group, [&](auto heads, int64_t g) {
      for (int64_t lane = 0; lane < shape.r_pad; lane += width) {
        dot_children<heads.value>(tile + lane, shape.r_pad, dout + g * shape.value_pad, shape.value_pad,
                                  first, shape.value_dim - first, first, next + lane, out + g * stride + lane,
                                  stride);
      }
    });
  }
  const int64_t end = candidates.num_parents * shape.r;
  for (int64_t g = 0; g < shape.group; ++g) {
    Real* p = scores + g * stride;
    for (int64_t e = 0; e < num_excluded; ++e) {
      p[excluded[e]] = -kInfinity<Real>;
    }
    const Real inverse = Real{1} / gsum[g];
    for (int64_t i = 0; i < end; i += width) {
      const VecOf<Real> weight = exp(load(p + i) - splat(gmax[g])) * inverse;
      store(p + i, weight);
      if (dscores != nullptr) {
        Real* ds = dscores + g * stride + i;
        const VecOf<Real> gradient = weight * (load(ds) - splat(delta[g]));
        // A candidate that is not merged may have a NaN value, which must not matter.
        store(ds, weight == VecOf<Real>{} ? VecOf<Real>{} : gradient);
      }
    }
  }
}

template <typename Real>
void query_gradient(const QueryShape& shape, const PackedLayer<Real>& layer, const Rotation<Real>& rotation,
                    const Candidates& candidates, const int32_t* excluded, int64_t num_excluded,
                    const Real* dscores, RowList rows, Real* partial, Real* dq) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  const int64_t stride = shape.score_stride();
  const int64_t size = shape.group * shape.row();
  list_rows(shape, layer.num_nodes, candidates, excluded, num_excluded, rows);
  if (rotation.cos == nullptr) {
    add_rows(rows, shape.group, dscores, stride, layer.key_rows, shape.row(), dq);
    return;
  }
  int64_t begin = 0;
  for (int64_t slot = 0; slot < candidates.num_parents; ++slot) {
    int64_t end = begin;
    while (end < rows.count && rows.positions[end] < (slot + 1) * shape.r) {
      ++end;
    }
    if (end == begin) continue;
    fill(partial, size, Real{0});
    add_rows(RowList{rows.positions + begin, rows.nodes + begin, end - begin}, shape.group, dscores, stride,
             layer.key_rows, shape.row(), partial);
    rotate(shape, rotation, candidates.count - 1 - slot * shape.r, partial, partial, Real{-1});
    for (int64_t i = 0; i < size; i += width) {
      store(dq + i, load(dq + i) + load(partial + i));
    }
    begin = end;
  }
}

// out[child][v] += sum over rows of weights[row][child] * sources[row][v] for a block of children and of
// vectors.
template <int Children, int Vectors, typename Real>
inline void add_outer_block(const Real* const* weights, const Real* const* sources, int64_t count,
                            int64_t child, int64_t at, Real* out, int64_t out_stride) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  VecOf<Real> sum[Children][Vectors];
  for (int c = 0; c < Children; ++c) {
    for (int v = 0; v < Vectors; ++v) {
      sum[c][v] = load(out + c * out_stride + v * width);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const Real* weight = weights[i] + child;
    const Real* source = sources[i] + at;
    VecOf<Real> x[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      x[v] = load(source + v * width);
    }
    for (int c = 0; c < Children; ++c) {
      const VecOf<Real> w = splat(weight[c]);
      for (int v = 0; v < Vectors; ++v) {
        sum[c][v] += w * x[v];
      }
    }
  }
  for (int c = 0; c < Children; ++c) {
    for (int v = 0; v < Vectors; ++v) {
      store(out + c * out_stride + v * width, sum[c][v]);
    }
  }
}

template <typename Real>
inline void add_outer(const Real* const* weights, const Real* const* sources, int64_t count,
                      int64_t num_children, int64_t row_size, Real* out) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  for_blocks<kChildBlock>(num_children, [&](auto children, int64_t child) {
    for_blocks<kValueBlock>(row_size / width, [&](auto vectors, int64_t v) {
      add_outer_block<children.value, vectors.value>(weights, sources, count, child, v * width,
                                                     out + child * row_size + v * width, row_size);
    });
  });
}

// The same for one row that holds NaN or Inf: a weight of 0 keeps its child out.
template <typename Real>
inline void add_outer_careful(const Real* weights, const Real* source, int64_t num_children, int64_t row_size,
                              Real* out) {
  for (int64_t child = 0; child < num_children; ++child) {
    for (int64_t i = 0; weights[child] != 0 && i < row_size; ++i) {
      out[child * row_size + i] += weights[child] * source[i];
    }
  }
}

template <typename Real>
void node_gradients(const QueryShape& shape, const Rotation<Real>& rotation, const ParentUse<Real>* uses,
                    int64_t count, int64_t num_children, Real* rotated, Real* dkeys, Real* dvalues) {
  const int64_t stride = shape.score_stride();
  const int64_t size = shape.group * shape.row();
  bool finite = true;
  for (int64_t u = 0; u < count; ++u) {
    finite &= uses[u].finite;
    if (dkeys != nullptr && rotation.cos != nullptr) {
      rotate(shape, rotation, uses[u].position, uses[u].q, rotated + u * size, Real{1});
    }
  }
  const Real* weights[kParentUses * kHeadBlock];
  const Real* dscores[kParentUses * kHeadBlock];
  const Real* queries[kParentUses * kHeadBlock];
  const Real* douts[kParentUses * kHeadBlock];
  for (int64_t first = 0; first < shape.group; first += kHeadBlock) {
    const int64_t heads = shape.group - first < kHeadBlock ? shape.group - first : kHeadBlock;
    int64_t rows = 0;
    for (int64_t u = 0; u < count; ++u) {
      const Real* q = rotation.cos != nullptr ? rotated + u * size : uses[u].q;
      for (int64_t g = first; g < first + heads; ++g, ++rows) {
        weights[rows] = uses[u].weights + g * stride;
        dscores[rows] = uses[u].dscores + g * stride;
        queries[rows] = q + g * shape.row();
        douts[rows] = uses[u].dout + g * shape.value_pad;
      }
    }
    if (finite) {
      if (dkeys != nullptr) add_outer(dscores, queries, rows, num_children, shape.row(), dkeys);
      if (dvalues != nullptr) add_outer(weights, douts, rows, num_children, shape.value_pad, dvalues);
      continue;
    }
    for (int64_t i = 0; i < rows; ++i) {
      if (dkeys != nullptr) add_outer_careful(dscores[i], queries[i], num_children, shape.row(), dkeys);
      if (dvalues != nullptr) add_outer_careful(weights[i], douts[i], num_children, shape.value_pad, dvalues);
    }
  }
}

}  // namespace htree::HTREE_ISA::query
