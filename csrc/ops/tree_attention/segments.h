// Calls with an open top (open_top.h): a row walks the tree of its own prefix. docs/semantics/tree_attention.md §1.3
//
// Rows of one depth are neighbours, and the tokens before the next depth make a tree of that depth. So a call is cut at
// ceil(M / s) s, M r, M r^2, ...: each part is a call of its own over a prefix of the keys, whose top has up to M nodes.
#pragma once

#include <vector>

#include "ops/tree/open_top.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {

inline bool has_open_top(const TreeOptions& options) {
  return has_open_top(options.max_top_nodes, options.top_k, options.compression_rate);
}

// The first token whose queries walk `layers` layers or more, where the top is open; a multiple of the stride.
int64_t first_token_of(const TreeOptions& options, int64_t layers);

// The forward, or what follows given lists: kernel(...) for calls of one depth, or for each of a call's parts.
void forward_by_depth(AttentionForward* kernel, const TreeOptions& options, const AttentionArgs& args,
                      const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                      const Tensor& gmax, const Tensor& gsum, const std::vector<Tensor>& parents);

// The same for the gradients. dk and dv may have the dtype of k and v or that of their sums.
void backward_by_depth(AttentionBackward* kernel, const TreeOptions& options, const AttentionArgs& args,
                       const Tensor& dout, const Tensor& dlse, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                       const std::vector<Tensor>& parents, const Tensor& dq, const Tensor& dk,
                       const Tensor& dv);

}  // namespace htree::tree_attention
