// Schemas and the CPU, CUDA and Meta kernels of the whole operator; its Autograd and Autocast are in
// attention_autograd.cpp. docs/semantics/tree_attention.md §1.5, §1.10, §1.13.
#include "ops/tree_attention/attention.h"

#include <algorithm>

#include "host/registration.h"
#include "ops/tree_attention/kernels.h"
#include "ops/tree_attention/plan/attention_config.h"

namespace htree::tree_attention {
namespace {

// `lists_given`: lists of width top_k are read or written. Otherwise an option far beyond what T tokens can
// use is cut down to what they can, so that scratch follows the length: no list is longer than the number of
// parents, and a node of r >= T children is a node of T. A k that is too large for the tensor cores stays so:
// whether lists are kept must not change which kernels run.
AttentionArgs resolve(const char* op, const AttentionOptions& options, const Tensor& k, bool lists_given) {
  TORCH_CHECK_VALUE(k.size(1) < kIndexLimit, op, ": T must be below 2^31, got ", k.size(1));
  AttentionArgs args;
  const int64_t stride = options.selection_stride;
  const int64_t longest = ceil_div(std::max<int64_t>(k.size(1), 1024), stride) * stride;
  args.compression_rate = std::min(options.compression_rate, longest);
  args.max_top_nodes = options.max_top_nodes;
  constexpr int64_t kTooManyForTensorCores = kMaxSelectWidth / kTensorCoreRate + 1;
  const int64_t useful = std::max(ceil_div(longest, args.compression_rate), kTooManyForTensorCores);
  args.top_k = lists_given ? options.top_k : std::min(options.top_k, useful);
  args.selection_stride = stride;
  args.scale = resolve_scale(options.scale, k.size(3));
  args.rotate = options.rope_base.has_value();
  args.rope_base = options.rope_base.value_or(args.rope_base);
  args.importance = parse_importance(op, options.importance);
  return args;
}

// One body for CPU, CUDA and Meta: without a kernel it ends after the checks and allocations.

// layers = [(k, v)]; while the last has more than M nodes: layers.append(tree_build(*layers[-1], r))
// state = (-inf, 0, 0); parents[L - 1] = top_parents(B, T_q, H_kv, top_k, L, r, T - T_q, s)
// for l = L-1 ... 1: *layer, parents[l - 1] = select_accumulate(q, *layers[l], parents[l], cos, sin, l, ...)
//                    merge_to_global_(*state, *layer)
// merge_to_global_(*state, *bottom_accumulate(q, k, v, parents[0], cos, sin, ...))
// out = final_normalize(state out, state sum, q.dtype)
template <AttentionForward* kKernel>
AttentionState run_forward(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                           const AttentionOptions& options, bool store_parents) {
  AttentionState result = prepare_attention_forward(op, q, k, v, options, store_parents);
  if constexpr (kKernel != nullptr) {
    const auto& [out, gmax, gsum, parents] = result;
    const AttentionArgs args = resolve(op, options, k, !parents.empty());
    if (out.numel() > 0) {
      kKernel(unit_last(q), unit_last(k), unit_last(v), args, out, gmax, gsum, parents);
    }
  }
  return result;
}

template <AttentionForward* kKernel>
AttentionState attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, int64_t compression_rate,
                                 int64_t max_top_nodes, int64_t top_k, std::optional<double> scale,
                                 std::optional<double> rope_base, std::string_view importance,
                                 int64_t selection_stride, bool store_parents) {
  return run_forward<kKernel>(
      "attention_forward", q, k, v,
      {compression_rate, max_top_nodes, top_k, scale, rope_base, std::string(importance), selection_stride},
      store_parents);
}

// attention_forward(...)[0]. This kernel runs without grad, where nobody reads the lists: they are never
// stored.
template <AttentionForward* kKernel>
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, int64_t compression_rate,
                 int64_t max_top_nodes, int64_t top_k, std::optional<double> scale,
                 std::optional<double> rope_base, std::string_view importance, int64_t selection_stride,
                 bool /*store_parents*/) {
  return std::get<0>(run_forward<kKernel>(
      "tree_attention", q, k, v,
      {compression_rate, max_top_nodes, top_k, scale, rope_base, std::string(importance), selection_stride},
      /*store_parents=*/false));
}

// The gradient of the loop above with `parents` held fixed:
// torch.autograd.grad(attention of the given cut, (q, k, v), dout); P = (s - gmax).exp() / gsum per merged
// candidate, D = (dout * out).sum(-1), dS = P * (dout @ V^T - D); each layer's dK, dV go down through
// tree_build_backward
template <AttentionBackward* kKernel>
Gradients attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                             at::TensorList parents, int64_t compression_rate, int64_t max_top_nodes,
                             int64_t top_k, std::optional<double> scale, std::optional<double> rope_base,
                             std::string_view importance, int64_t selection_stride,
                             std::array<bool, 3> output_mask) {
  const AttentionOptions options = {compression_rate, max_top_nodes,           top_k,           scale,
                                    rope_base,        std::string(importance), selection_stride};
  Gradients gradients =
      prepare_attention_backward(dout, q, k, v, out, gmax, gsum, parents, options, output_mask);
  if constexpr (kKernel != nullptr) {
    const AttentionArgs args = resolve("attention_backward", options, k, !parents.empty());
    const auto& [dq, dk, dv] = gradients;
    if (dout.numel() == 0) {
      // Without a query no key has a gradient.
      for (const Tensor& gradient : {dq, dk, dv}) {
        if (gradient.defined()) {
          gradient.zero_();
        }
      }
    } else if (dq.defined() || dk.defined() || dv.defined()) {
      std::vector<Tensor> lists;
      for (const Tensor& list : parents) {
        lists.push_back(unit_last(list));
      }
      kKernel(unit_last(dout), unit_last(q), unit_last(k), unit_last(v), unit_last(out), unit_last(gmax),
              unit_last(gsum), lists, args, dq, dk, dv);
    }
  }
  return gradients;
}

template <AttentionForward* kForward, AttentionBackward* kBackward>
void register_kernels(torch::Library& library) {
  library.impl("attention_forward", TORCH_FN(attention_forward<kForward>));
  library.impl("attention", TORCH_FN(attention<kForward>));
  library.impl("attention_backward", TORCH_FN(attention_backward<kBackward>));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(htree, library) {
  define_ops(
      library,
      {
          "attention_forward(Tensor q, Tensor k, Tensor v, int compression_rate=16, int max_top_nodes=8192, "
          "int top_k_per_layer=512, float? scale=None, float? rope_base=10000., str "
          "importance=\"lse_causal\", "
          "int selection_stride=1, bool store_parents=True) -> (Tensor out, Tensor gmax, Tensor gsum, "
          "Tensor[] parents)",
          "attention(Tensor q, Tensor k, Tensor v, int compression_rate=16, int max_top_nodes=8192, "
          "int top_k_per_layer=512, float? scale=None, float? rope_base=10000., str "
          "importance=\"lse_causal\", "
          "int selection_stride=1, bool store_parents=True) -> Tensor",
          "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor gmax, Tensor "
          "gsum, "
          "Tensor[] parents, int compression_rate=16, int max_top_nodes=8192, int top_k_per_layer=512, "
          "float? scale=None, float? rope_base=10000., str importance=\"lse_causal\", int "
          "selection_stride=1, "
          "bool[3] output_mask=[True, True, True]) -> (Tensor dq, Tensor dk, Tensor dv)",
      });
}

TORCH_LIBRARY_IMPL(htree, CPU, library) {
  register_kernels<attention_forward_cpu, attention_backward_cpu>(library);
}

#if defined(HTREE_WITH_CUDA)
TORCH_LIBRARY_IMPL(htree, CUDA, library) {
  register_kernels<attention_forward_cuda, attention_backward_cuda>(library);
}
#endif

TORCH_LIBRARY_IMPL(htree, Meta, library) {
  register_kernels<nullptr, nullptr>(library);
}

}  // namespace htree::tree_attention
