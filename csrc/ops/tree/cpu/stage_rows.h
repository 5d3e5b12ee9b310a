// The CPU row kernels of the build, rope and staged ops: one table per storage type and instruction set
// (host/cpu/isa.h). They know no torch. All rows have unit stride; strides between rows count elements. Real
// is double for double and float for every other type.
#pragma once

#include <cstdint>

#include "device/work.cuh"
#include "host/cpu/simd_prelude.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

template <typename Real>
struct CpuRotaryTable {
  const Real* cos;  // [size][half]
  const Real* sin;  // [size][half]
  int64_t cos_stride;
  int64_t sin_stride;
  int64_t half;  // K / 2
};

// The candidates of one query in one layer of one kv head, as rows of K or of V.
template <typename T>
struct CandidateRows {
  const T* layer;        // [N][...]
  int64_t node_stride;   // elements from a node to the next
  const int64_t* nodes;  // [num]: the node of each candidate, -1 where absent
  int64_t num;           // n
};

template <typename T, typename Real, typename Rank>
struct StageRows {
  // out[d] = mean of `count` >= 1 rows.
  void (*mean)(const T* first, int64_t row_stride, int64_t count, int64_t width, T* out);
  // out[d] = row[d] / count.
  void (*share)(const T* row, int64_t count, int64_t width, T* out);
  // out = x rotated by the angles of one row of the table, or by their negatives (`inverse`). out may be x.
  void (*rotate)(const T* x, const Real* cos, const Real* sin, bool inverse, int64_t half, T* out);
  // scores [num][num_heads] = scale * <R_{num-1} q_g, R_p key_p>, -inf where absent. `buffer` has (num_heads
  // + 1) * K elements.
  using Score = void(const T* q, int64_t head_stride, int64_t num_heads, const CandidateRows<T>& keys,
                     const CpuRotaryTable<Real>& rotary, Real scale, Real* buffer, Real* scores);
  Score* score;
  // The IO-only variant (docs/semantics/io_only.md §2.3). scores[p * num_heads] comes with the hash of
  // candidate p; the IO-only variant adds sums of what `score` reads and spreads the result over the heads.
  // `scale` is not used.
  Score* io_score;
  // The state of the candidates that are present and whose score is not -inf. scores
  // [num][score_stride >= num_heads], lmax and lsum [num_heads], lout [num_heads][width]. `buffer` has
  // num_heads * num + width elements.
  void (*accumulate)(const Real* scores, int64_t score_stride, int64_t num_heads,
                     const CandidateRows<T>& values, int64_t width, Real* buffer, Real* lmax, Real* lsum,
                     Real* lout);
  // Writes the min(top_k, num) selected positions in ascending order, with their ranks (selection.h), and
  // returns their number. num >= 1. `buffer` has select_bytes(num, num_heads) bytes, aligned to 8.
  using Select = int64_t(const Real* scores, int64_t score_stride, int64_t num_heads, int64_t num,
                         int64_t top_k, const SelectionOptions& selection, void* buffer, int32_t* positions,
                         Rank* ranks);
  Select* select;
  // The IO-only variant: the same passes over the scores. ranks[0] becomes what they fold to;
  // positions are not written.
  Select* io_select;
  int64_t (*select_bytes)(int64_t max_candidates, int64_t num_heads);
  // out[d] = row[d] / sum, rounded once.
  void (*normalize)(const Real* row, Real sum, int64_t width, T* out);
};

struct StageTables {
  StageRows<float, float, uint32_t> for_float;
  StageRows<Fp16, float, uint32_t> for_half;
  StageRows<Bf16, float, uint32_t> for_bfloat16;
  StageRows<double, double, uint64_t> for_double;
};

extern const StageTables kStageTablesBaseline;
extern const StageTables kStageTablesAvx2;
extern const StageTables kStageTablesAvx512;

}  // namespace htree::tree_attention
