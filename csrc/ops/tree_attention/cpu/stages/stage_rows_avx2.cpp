#if defined(__x86_64__)
#define HTREE_AVX2
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/tree_attention/cpu/stages/stage_rows_impl.h"

namespace htree::tree_attention {
const StageTables kStageTablesAvx2 = HTREE_ISA::stage_tables();
}
#endif
