#include "ops/sparse_attention/cuda/gather_choice.h"

#include <c10/util/Exception.h>

#include <string>

#include "host/env.h"

namespace htree::tree_attention {

GatherChoice gather_choice() {
  const std::string choice = env_or("HTREE_TREE_GATHER", "auto");
  const bool per_query = choice == "per_query" || choice == "private";  // `private` is an older name
  const bool gathered = choice == "gathered";
  TORCH_CHECK_VALUE(choice == "auto" || gathered || per_query,
                    "HTREE_TREE_GATHER is auto, gathered or per_query, got ", choice);
  return per_query ? GatherChoice::kPerQuery : gathered ? GatherChoice::kGathered : GatherChoice::kAuto;
}

}  // namespace htree::tree_attention
