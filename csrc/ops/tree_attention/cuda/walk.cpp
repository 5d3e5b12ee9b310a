#include "ops/tree_attention/cuda/walk.h"

#include "ops/sparse_attention/cuda/gather_choice.h"

namespace htree::tree_attention {

ForwardConfig forward_config(const AttentionProblem& problem) {
  return choose_forward_config(problem, current_device_facts(), gather_choice());
}

BackwardConfig backward_config(const AttentionProblem& problem) {
  return choose_backward_config(problem, current_device_facts(), gather_choice());
}

}  // namespace htree::tree_attention
