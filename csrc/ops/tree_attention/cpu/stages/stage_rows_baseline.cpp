#define HTREE_BASELINE
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/tree_attention/cpu/stages/stage_rows_impl.h"

namespace htree::tree_attention {
const StageTables kStageTablesBaseline = HTREE_ISA::stage_tables();
}
