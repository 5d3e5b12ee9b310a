// attention_backward on CUDA: docs/semantics/tree_attention.md §1.10. Deterministic, without float atomics.
// Scratch beyond the fp32 sums of dK and dV and the tree: at most kBackwardScratchBytes (1.8 GiB) at any T,
// as long as one list of one batch fits.
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "host/cuda/launch_scope.h"
#include "ops/tree_attention/cuda/backward/general/general_backward.h"
#include "ops/tree_attention/cuda/backward_schedule.h"

namespace htree::tree_attention {
namespace {

void backward_tensor_core(const AttentionProblem& problem, const AttentionConfig& config, const Backward& b,
                          const CudaTree& tree, cudaStream_t stream) {
  const TensorCoreTree prepared = prepare_tensor_cores(problem, config, b.q, tree, stream);
  const TreeCall& call = prepared.call;
  BackwardBuffers buffers;
  buffers.gradients = view_of(b.dout);
  buffers.outputs = view_of(b.out);
  buffers.max = b.gmax.const_data_ptr<float>();
  buffers.sum = b.gsum.const_data_ptr<float>();
  for (const Tensor& list : b.parents) {
    buffers.parents.push_back(list.const_data_ptr<int32_t>());
  }
  buffers.query_gradient = b.data(b.dq);
  buffers.key_gradient = b.data(b.dk);
  buffers.value_gradient = b.data(b.dv);
  const int64_t rows = gradient_sum_rows(call);
  Tensor key_sums, value_sums;
  if (b.dk.defined()) {
    key_sums = scratch_of(rows * problem.key_dim, at::kFloat, b.q);
    buffers.key_sums = key_sums.mutable_data_ptr<float>();
  }
  if (b.dv.defined()) {
    value_sums = scratch_of(rows * problem.value_dim, at::kFloat, b.q);
    buffers.value_sums = value_sums.mutable_data_ptr<float>();
  }
  const Tensor scratch = scratch_of(backward_scratch_bytes(call, b.parents.empty()), at::kByte, b.q);
  buffers.scratch = static_cast<char*>(scratch.mutable_data_ptr());
  C10_CUDA_CHECK(run_backward(call, buffers, stream));
}

// Blocks stand along y of a grid by batch and K/V head.
constexpr int64_t kMostPairs = 65535;

}  // namespace

void attention_backward_cuda(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                             const std::vector<Tensor>& parents, const AttentionArgs& args, const Tensor& dq,
                             const Tensor& dk, const Tensor& dv) {
  const LaunchScope scope(q);
  if (!dq.defined() && !dk.defined() && !dv.defined()) {
    return;
  }
  if (gmax.numel() == 0 || k.size(2) == 0) {  // no query: nothing reaches the keys
    for (const Tensor& gradient : {dk, dv}) {
      if (gradient.defined()) {
        gradient.zero_();
      }
    }
    return;
  }
  const int64_t batches = k.size(0), most_batches = kMostPairs / k.size(2);
  TORCH_CHECK_VALUE(most_batches > 0, "attention_backward: k must have at most ", kMostPairs,
                    " heads on CUDA, got ", k.size(2));
  if (batches > most_batches) {
    for (int64_t first = 0; first < batches; first += most_batches) {
      const auto part = [&](const Tensor& x) {
        return x.defined() ? x.narrow(0, first, std::min(most_batches, batches - first)) : x;
      };
      std::vector<Tensor> part_lists;
      for (const Tensor& list : parents) {
        part_lists.push_back(part(list));
      }
      attention_backward_cuda(part(dout), part(q), part(k), part(v), part(out), part(gmax), part(gsum),
                              part_lists, args, part(dq), part(dk), part(dv));
    }
    return;
  }
  std::vector<Tensor> lists;
  for (const Tensor& list : parents) {
    lists.push_back(list.contiguous());
  }
  const Tensor max = gmax.contiguous(), sum = gsum.contiguous();
  const AttentionProblem problem = attention_problem(q, k, v, args);
  const AttentionConfig config = attention_backward_config(problem);
  const CudaTree tree = build_cuda_tree(k, v, args);
  const Backward backward{dout, q, out, max, sum, lists, dq, dk, dv};
  if (config.path == AttentionPath::kTensorCore) {
    backward_tensor_core(problem, config, backward, tree, scope.stream());
  } else {
    run_general_backward(problem, config, backward, tree, scope.stream());
  }
}

}  // namespace htree::tree_attention
