// The order of launches of the tensor-core backward over chunks and layers. Buffers come from the caller; no
// torch.
#pragma once

#include "ops/tree_attention/cuda/forward_schedule.h"

namespace htree::tree_attention {

struct BackwardBuffers {
  TensorView gradients;        // dO [B, T_q, H, V]
  TensorView outputs;          // O
  const float* max = nullptr;  // [B, T_q, H]
  const float* sum = nullptr;
  std::vector<const int32_t*> parents;  // per layer, or empty: recomputed
  void* query_gradient = nullptr;       // [B, T_q, H, K]; null: not wanted
  void* key_gradient = nullptr;         // [B, T, H_kv, K]
  void* value_gradient = nullptr;       // [B, T, H_kv, V]
  float* key_sums = nullptr;    // gradient_sum_rows() rows of K; null where the gradient is not wanted
  float* value_sums = nullptr;  // rows of V
  char* scratch = nullptr;      // backward_scratch_bytes()
};

// Rows of the fp32 sums: [B, H_kv, 16 * parents] per layer, layer after layer.
int64_t gradient_sum_rows(const TreeCall& call);
int64_t backward_scratch_bytes(const TreeCall& call, bool recompute);

// run_prepare has run.
cudaError_t run_backward(const TreeCall& call, const BackwardBuffers& buffers, cudaStream_t stream);

}  // namespace htree::tree_attention
