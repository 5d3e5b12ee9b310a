// Rows of a prompt from pages, by the kernels of attention: options, checks and outputs of the ops, and their entry
// points of CPU and CUDA. docs/semantics/tree_cache.md §7.6.
#pragma once

#include <optional>
#include <string_view>

#include "ops/tree/plan/problem.h"
#include "ops/tree_attention/kernels.h"
#include "ops/tree_cache/tree_cache.h"

namespace htree::tree_cache {

using tree_attention::AttentionProblem;
using tree_attention::AttentionRows;

// ---- tree_cache_prompt_bytes

// The bytes of the copies that the kernels of attention read, of sequences of up to problem.num_keys tokens on the device
// of `keys`; 0 where they read none.
using PromptBytes = int64_t(const Tensor& keys, const AttentionProblem& problem);
PromptBytes prompt_bytes_cpu, prompt_bytes_cuda;

// ---- tree_cache_pack_prompt_

// `copies` has prompt_bytes() for `capacity` tokens and holds the first `begin` ones; it gets those up to
// problem.num_keys.
struct PackCall {
  const Tensor& copies;
  const AttentionProblem& problem;
  int64_t begin;
  int64_t capacity;
};
// `pages` are those of sequences of one length; they have no lengths.
using PackPrompt = void(const Pools& pages, const PageLayout& layout, const PackCall& call);
PackPrompt pack_prompt_cpu, pack_prompt_cuda;

// ---- tree_cache_prompt

// q [B, n, H, K] are the last tokens of the sequence. The outputs are those of attention_rows.
struct PromptCall {
  const Tensor& q;
  const AttentionProblem& problem;
  const std::optional<Tensor>& copies;  // undefined or without bytes: there are none
  int64_t capacity;
  const TreeOptions& options;
  const AttentionRows& outputs;
};
using Prompt = void(const Pools& pages, const PageLayout& layout, const PromptCall& call);
Prompt prompt_cpu, prompt_cuda;

// The same without copies, by the kernel of attention on tokens that are gathered from the pages. Entries of the block
// table that are no page of the pool must not occur.
void prompt_from_tokens(const Pools& pages, const PromptCall& call, tree_attention::AttentionForward* kernel);

}  // namespace htree::tree_cache
