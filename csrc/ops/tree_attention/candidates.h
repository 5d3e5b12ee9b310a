// Candidate arithmetic of docs/semantics/tree_attention.md §1.3, shared by the CPU and the CUDA kernels.
//
// A query with the ascending parents P_0 < ... < P_{m-1} of a layer (-1 after them) has the candidates p in
// [0, n), candidate p being node P_{p / r} * r + p mod r. Only the last parent is cut short: at the query's
// own node.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HTREE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HTREE_HOST_DEVICE inline
#endif

namespace htree::tree_attention {

// Number of candidates of a query whose rightmost node in the layer is `rightmost` = t / r^layer.
HTREE_HOST_DEVICE int64_t candidate_count(int64_t num_parents, int64_t rightmost, int64_t r) {
  return num_parents > 0 ? (num_parents - 1) * r + rightmost % r + 1 : 0;
}

// A node takes part when it exists and starts at or before the query; only a list that breaks the invariant
// (last parent = the one that contains the query) can name another one, and such a candidate contributes
// nothing.
HTREE_HOST_DEVICE bool node_present(int64_t node, int64_t rightmost, int64_t num_nodes) {
  return node >= 0 && node <= rightmost && node < num_nodes;
}

}  // namespace htree::tree_attention
