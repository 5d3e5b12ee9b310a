// Contract of the tree cache: options, checks and outputs of its ops, and the entry points of CPU
// and CUDA. docs/semantics/tree_cache.md §7.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "ops/tree_attention/attention.h"
#include "ops/tree_attention/packed_options.h"
#include "ops/tree_cache/lengths.h"
#include "ops/tree_cache/page_layout.h"

namespace htree::tree_cache {

using at::Tensor;
using c10::SymInt;
using tree_attention::AttentionArgs;
using tree_attention::TreeOptions;

// The tokens of all pages in 8 or 4 bits, and the last tokens of each sequence as they came, for nodes that are not
// finished yet: token t is row t mod S. docs/semantics/tree_cache.md §7.5
struct PackedLeaves {
  const Tensor& k_codes;   // uint8 [num_pages, H_kv, P, K or K/2] contiguous
  const Tensor& k_scales;  // fp16 [num_pages, H_kv, P] contiguous
  const Tensor& v_codes;   // uint8 [num_pages, H_kv, P, V or V/2] contiguous
  const Tensor& v_scales;  // fp16 [num_pages, H_kv, P] contiguous
  const Tensor& k_tail;    // [B, H_kv, S, K] contiguous; undefined where nothing is appended
  const Tensor& v_tail;    // [B, H_kv, S, V] contiguous
};

// Those of an op's `leaves`: none, or the tensors above in their order, behind which an op may have others.
inline std::optional<PackedLeaves> packed_leaves(at::TensorList leaves) {
  if (leaves.empty()) return std::nullopt;
  return PackedLeaves{leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], leaves[5]};
}

// The pools and the table of pages, as every op takes them.
struct Pools {
  const Tensor& keys;         // [num_pages, H_kv, key rows, K] contiguous
  const Tensor& values;       // [num_pages, H_kv, value rows, V] contiguous
  const Tensor& block_table;  // int32 [B, max_pages]
  const Tensor& lengths;      // int32 [B]; kNoTensor where an op takes the length otherwise
  int64_t page_size;
  // Where there are packed leaves, keys and values have no rows of tokens.
  std::optional<PackedLeaves> leaves = std::nullopt;
};

inline const Tensor kNoTensor;

// Raises ValueError for options that a cache does not take, or that are out of their range.
void check_cache_options(const char* op, const TreeOptions& options);
// The number of layers that a sequence of max_pages * page_size tokens can need.
int64_t cache_layers(const Pools& pools, const TreeOptions& options);
// Checks the pools, packed leaves among them, against the options; the checks below take checked ones.
void check_pools(const char* op, const Pools& pools, const TreeOptions& options);
// The layout of checked pools with real sizes.
PageLayout layout_of(const Pools& pools, const TreeOptions& options);

// ---- tree_cache_append_ and tree_cache_append_packed_

struct AppendCall {
  const Tensor& k;                           // [N_new, H_kv, K]
  const Tensor& v;                           // [N_new, H_kv, V]
  const Tensor& cu_new;                      // int32 [B + 1]
  const std::optional<Tensor>& new_lengths;  // int32 [B]
  int64_t max_new;                           // most new tokens of a sequence
  const char* op;
};
void check_append(const char* op, const Pools& pools, const TreeOptions& options, const Tensor& k,
                  const Tensor& v, const Tensor& cu_new, const std::optional<Tensor>& new_lengths,
                  const std::optional<SymInt>& max_new);
using Append = void(const Pools& pools, const PageLayout& layout, const AppendCall& call);
Append append_cpu, append_cuda;

// ---- tree_cache_attention

// The pages of index keys. docs/semantics/tree_cache.md §7.7
struct IndexPool {
  Tensor keys;    // [num_pages, H_i, P, d] contiguous, H_i is H_kv or 1; uint8 where they are E4M3 codes
  Tensor scales;  // uint8 [num_pages, H_i, P] contiguous beside codes, else undefined

  bool coded() const { return scales.defined(); }
};

// An index, by which nodes are chosen.
struct IndexInputs {
  Tensor query;  // [N_q, H_i, d], in bfloat16 beside codes, else in their dtype
  IndexPool pool;
};

struct AttentionInputs {
  const Tensor& q;                          // [N_q, H, K]
  const Tensor& cu_q;                       // int32 [B + 1]
  const std::optional<Tensor>& lists;       // int32 [B, ring, L, H_kv, k]
  const std::optional<Tensor>& list_pos;    // int32 [B, ring]
  const std::optional<Tensor>& q_lengths;   // int32 [B]
  const std::optional<Tensor>& rope_table;  // [2, size, K/2]
  std::optional<IndexInputs> index;         // none: scores choose
};
// (out [N_q, H, V], lse [N_q, H], lists [B, ring, L, H_kv, k], list_pos [B, ring])
using AttentionOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;
AttentionOutputs prepare_attention(const char* op, const Pools& pools, const AttentionInputs& inputs,
                                   const TreeOptions& options);
// `args` are the options as they were asked for: lists keep their width.
using Attention = void(const Pools& pools, const PageLayout& layout, const AttentionInputs& inputs,
                       const AttentionArgs& args, const AttentionOutputs& outputs);
Attention attention_cpu, attention_cuda;

// ---- _tree_cache_step_, _tree_cache_truncate_ and tree_cache_copy_

// One step of all sequences: advance() or truncate() of lengths.h. `like` says on which device.
using Lengths = void(const SequenceLengths& all, const LengthStep& step, bool truncates, const Tensor& like);
Lengths lengths_cpu, lengths_cuda;

void check_copy(const Tensor& k_pool, const Tensor& v_pool, const Tensor& pages);
// `pages` is int32 [2, n]: from, to; a pair with -1 copies nothing.
using Copy = void(const Tensor& k_pool, const Tensor& v_pool, const Tensor& pages);
Copy copy_cpu, copy_cuda;

}  // namespace htree::tree_cache
