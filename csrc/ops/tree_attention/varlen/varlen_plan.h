// The groups of a call and the tables that say whose rows are whose, from lengths on the device or on the host.
#pragma once

#include <vector>

#include "ops/tree_attention/varlen/varlen.h"

namespace htree::tree_attention {

struct VarlenPlan {
  std::vector<VarlenGroup> groups;
  // On the device of the inputs. The table is undefined if every group is in place.
  Tensor table;        // int32 [documents in the order of the groups, kTableColumns]
  bool fills = false;  // whether rows may be left that no group writes; the others are undefined if not
  Tensor starts_q, starts_k;  // int32 [documents + 1]
  Tensor kinds;               // int32 [documents]
};

VarlenPlan plan_varlen(const VarlenKernels& kernels, const char* op, const PackedInputs& inputs,
                       const Documents& documents, const TreeOptions& options, std::string_view grouping);

}  // namespace htree::tree_attention
