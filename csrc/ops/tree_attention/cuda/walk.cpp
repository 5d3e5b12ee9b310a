#include "ops/tree_attention/cuda/walk.h"

#include <c10/util/Exception.h>

#include <string>

#include "host/env.h"

namespace htree::tree_attention {
namespace {

// HTREE_TREE_GATHER is read at every call, so that a test can compare the kernels.
GatherChoice gather_choice() {
  const std::string choice = env_or("HTREE_TREE_GATHER", "auto");
  const bool per_query = choice == "per_query" || choice == "private";  // `private` is an older name
  const bool gathered = choice == "gathered";
  TORCH_CHECK_VALUE(choice == "auto" || gathered || per_query,
                    "HTREE_TREE_GATHER is auto, gathered or per_query, got ", choice);
  return per_query ? GatherChoice::kPerQuery : gathered ? GatherChoice::kGathered : GatherChoice::kAuto;
}

}  // namespace

ForwardConfig forward_config(const AttentionProblem& problem) {
  return choose_forward_config(problem, current_device_facts(), gather_choice());
}

BackwardConfig backward_config(const AttentionProblem& problem) {
  return choose_backward_config(problem, current_device_facts(), gather_choice());
}

}  // namespace htree::tree_attention
