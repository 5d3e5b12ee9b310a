// Launchers of the tensor-core kernels of tree attention: r = 16, fp16 or bf16 inputs. No torch.
//
// A launch works on one chunk: `num_batches` batches and `num_queries` consecutive queries, the first at
// token t0, a multiple of the selection stride. Queries i with the same i / stride share one list of parents.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstdint>

#include "ops/tree_attention/plan/layout_sizes.h"
#include "ops/tree_attention/tree_args.h"

namespace htree::tree_attention {

enum class HalfType { kHalf, kBFloat16 };

// [B, rows, heads, D] with a unit last stride; strides in elements.
struct TensorView {
  const void* data = nullptr;
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
  bool aligned = false;  // every row starts at a multiple of 16 bytes; only queries say so
};

// What the instances are compiled for.
struct TensorCoreShape {
  HalfType dtype = HalfType::kBFloat16;
  int key_dim = 0;
  int value_dim = 0;
};

// cos and sin of position * base^(-2i/K), [size, K/2]; every angle 0 when `rotate` is false.
void launch_rope_table(float2* table, int64_t size, int key_dim, double base, bool rotate,
                       cudaStream_t stream);

struct RelayParams {
  TensorView keys;               // [B, N, H_kv, K]
  TensorView values;             // [B, N, H_kv, V]
  const float2* rope = nullptr;  // [>= 16, K/2]
  char* blocks = nullptr;        // [B, H_kv, num_parents] parent blocks
  int64_t num_nodes = 0;
  int64_t num_parents = 0;
  int64_t num_batches = 0;
  int64_t num_kv_heads = 0;
};
void launch_relay(const TensorCoreShape& shape, const RelayParams& params, cudaStream_t stream);

// cos and sin of 16 j base^(-2i/K) in fp16 for slots j < num_slots, [num_slots][cos, sin][K/4] pairs of dims
// i; every angle 0 when `rotate` is false. kDims: dims 2i and 2i + 1. kFragments: as TurnFactors of
// union/turned_query.cuh reads them.
enum class TurnOrder { kDims, kFragments };
void launch_turn_table(__half2* table, int64_t num_slots, int key_dim, TurnOrder order, double base,
                       bool rotate, cudaStream_t stream);

// The queries, lists and keys of one layer.
struct GatherParams {
  TensorView queries;            // [B, T_q, H, K], from the first query of the chunk
  const char* blocks = nullptr;  // [B, H_kv, num_parents] parent blocks of the layer
  int64_t num_parents = 0;
  const int32_t* lists =
      nullptr;             // [B, num_lists, H_kv, list_width]; null: parents 0, 1, ... up to the query's own
  int64_t list_batch = 0;  // stride in elements
  const float2* rope = nullptr;  // [list_width * 16 + 1, K/2]
  float score_scale = 0.f;       // scale * log2(e): scores are in log2 units
  int64_t node_span = 1;         // tokens per node of the layer
  int64_t t0 = 0;
  int num_queries = 0;
  int num_lists = 0;
  int num_batches = 0;
  int num_kv_heads = 0;
  int group = 0;  // G
  int list_width = 0;
  int stride = 1;
};

// Slots that one warp scores: short enough to fill the chip, long enough to hide the start.
constexpr int kRunSlots = 64;

// Scores of the leaders and, for every run of kRunSlots slots and head, (maximum, sum of 2^(s - maximum))
// over the candidates that are ranked, or over all n for kLse. Entries p >= n of a row are not written, nor
// are runs past its last slot.
struct ScoreParams {
  GatherParams gather;
  Importance importance = Importance::kLseCausal;
  float* scores = nullptr;  // [B, num_lists, H_kv, score_width, G]
  int64_t score_width = 0;  // >= the largest n of the chunk
  float2* sums = nullptr;   // [B, num_lists, H_kv, num_runs, G]
  int num_runs = 0;         // score_runs(score_width)
};
constexpr int64_t score_runs(int64_t score_width) {
  return (score_width + kRunSlots * kTensorCoreRate - 1) / (kRunSlots * kTensorCoreRate);
}
void launch_scores(const TensorCoreShape& shape, const ScoreParams& params, cudaStream_t stream);

// Exact selection: docs/semantics/tree_attention.md §1.6.
struct LeaderSelectParams {
  GatherParams gather;            // of the layer the scores belong to
  const float* scores = nullptr;  // as ScoreParams, or importances [B, num_lists, H_kv, score_width]
  int64_t score_width = 0;
  const float2* sums = nullptr;  // as ScoreParams; null where `scores` are importances
  int num_runs = 0;
  int32_t* next_lists = nullptr;  // [B, num_lists, H_kv, list_width] node ids, ascending, -1 tail
  int64_t next_batch = 0;         // stride in elements
  uint32_t* selected =
      nullptr;  // [B, num_lists, H_kv, mask_words]: bit p = candidate p is selected; may be null
  int64_t selected_batch = 0;  // stride in words
  int64_t mask_words = 0;      // >= score_width / 32
  Importance importance = Importance::kLseCausal;
};
void launch_leader_select(const LeaderSelectParams& params, cudaStream_t stream);

// Softmax over the candidates that are not selected, merged into the running state. Maxima between layers are
// in log2 units; the last layer converts them and writes the output.
struct AttendParams {
  GatherParams gather;
  const __half2* turns = nullptr;      // turn table of list_width + 1 slots, for union/ and block/
  const uint32_t* selected = nullptr;  // as above; null at the bottom, where nothing is selected
  int64_t selected_batch = 0;
  int64_t mask_words = 0;
  bool first = false;  // no state yet
  bool last = false;
  float* max = nullptr;  // [B, T_q, H]
  float* sum = nullptr;
  int64_t state_batch = 0;   // stride of max and sum in elements
  float* partial = nullptr;  // [num_batches, num_queries, H, V], the state between layers
  void* out = nullptr;       // [B, T_q, H, V] in the input's dtype
};
void launch_attend(const TensorCoreShape& shape, const AttendParams& params, cudaStream_t stream);

// The list of the top layer, any r: parents 0 ... t / parent_span, then -1. parent_span = r^layers.
void launch_top_lists(int32_t* lists, int64_t num_batches, int64_t num_lists, int64_t num_kv_heads,
                      int64_t width, int64_t t0, int64_t stride, int64_t parent_span, cudaStream_t stream);

}  // namespace htree::tree_attention
