// Written by setup.py from csrc/instances.py.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
#include "ops/tree_attention/cpu/stages/stage_rows_impl.h"

namespace htree::tree_attention {
constexpr StageTables kStageTablesBaseline = HTREE_ISA::stage_tables();
}  // namespace htree::tree_attention
