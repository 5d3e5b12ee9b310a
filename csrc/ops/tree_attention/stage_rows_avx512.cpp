#if defined(__x86_64__)
#include "host/simd_avx512.h"
// the body is compiled for the instruction set chosen above
#include "ops/tree_attention/stage_rows_impl.h"

namespace htree::tree_attention {
const StageTables kStageTablesAvx512 = HTREE_ISA::stage_tables();
}
#endif
