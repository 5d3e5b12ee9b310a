#if defined(__x86_64__)
// Written by setup.py from csrc/instances.py.
#define HTREE_AVX512
#include "host/cpu/simd.h"
#include "ops/tree_attention/cpu/stages/stage_rows_impl.h"

namespace htree::tree_attention {
constexpr StageTables kStageTablesAvx512 = HTREE_ISA::stage_tables();
}  // namespace htree::tree_attention
#endif
