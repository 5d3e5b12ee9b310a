// Schemas, CPU, CUDA and Meta kernels, Autograd and Autocast of index_loss. docs/semantics/index_loss.md §9.3;
// docs/semantics/conventions.md §0.5
#include "ops/index_loss/index_loss.h"

#include "host/autograd.h"
#include "host/op_handle.h"
#include "host/registration.h"

namespace htree::index_loss {
namespace {

constexpr const char* kOp = "index_loss";

Inputs inputs_of(const Tensor& query, const Tensor& key, const Tensor& index_query, const Tensor& index_key,
                 const Tensor& positions, const OptionalTensor& cu_seqlens) {
  return {query, key, index_query, index_key, positions, cu_seqlens.value_or(Tensor())};
}

// Whether nothing is to be computed. On the CPU the kernel refuses positions in a sequence without tokens.
bool is_empty(const Inputs& x) {
  const bool no_sequences = x.query.dim() == 4 && x.query.size(0) == 0;
  return x.positions.numel() == 0 || no_sequences || (x.query.numel() == 0 && !x.query.is_cpu());
}

// A batch dim and unit last strides for every tensor; ascending positions, which the loss, a mean, does not tell from
// others, let neighbours share the tokens that they count.
Call resolve(const Inputs& x, const Options& options) {
  const auto batched = [&](const Tensor& tensor) {
    return tree_attention::unit_last(x.cu_seqlens.defined() ? tensor.unsqueeze(0) : tensor);
  };
  const Tensor query = batched(x.query);
  const Tensor positions = x.positions.expand({query.size(0), x.positions.size(-1)});
  return {kOp,
          query,
          batched(x.key),
          batched(x.index_query),
          batched(x.index_key),
          std::get<0>(positions.sort(-1)).contiguous(),
          x.cu_seqlens.defined() ? x.cu_seqlens.contiguous() : Tensor(),
          tree_attention::resolve_scale(options.scale, query.size(3)),
          options.block_size};
}

// ---- kernels. Without any (Meta) they end after checks and allocations.

// before = block < position // block_size
// p = (scale * q @ k^T where before else -inf).softmax(-1).unflatten(-1, (-1, block_size)).sum(-1).mean(heads of the group)
// score = (iq @ ik^T).unflatten(-1, (-1, block_size)).amax(-1) where before else -inf
// loss = (xlogy(p, p) - p * score.log_softmax(-1)).sum(-1).mean()
template <const Kernels* kKernels>
Results forward(const Tensor& query, const Tensor& key, const Tensor& index_query, const Tensor& index_key,
                const Tensor& positions, const OptionalTensor& cu_seqlens, std::optional<double> scale,
                int64_t block_size) {
  const Inputs x = inputs_of(query, key, index_query, index_key, positions, cu_seqlens);
  const Results results = prepare_forward(kOp, x, {scale, block_size});
  if constexpr (kKernels != nullptr) {
    if (is_empty(x)) {
      std::get<0>(results).zero_();
    } else {
      kKernels->forward(resolve(x, {scale, block_size}), results);
    }
  }
  return results;
}

template <const Kernels* kKernels>
Tensor loss(const Tensor& query, const Tensor& key, const Tensor& index_query, const Tensor& index_key,
            const Tensor& positions, const OptionalTensor& cu_seqlens, std::optional<double> scale,
            int64_t block_size) {
  return std::get<0>(
      forward<kKernels>(query, key, index_query, index_key, positions, cu_seqlens, scale, block_size));
}

// dscore = dloss / number of rows and heads * (score.softmax(-1) - p), which goes to the first token that has the maximum:
// d_index_query += dscore @ ik[token]; d_index_key[token] += dscore^T @ iq
template <const Kernels* kKernels>
Gradients backward(const Tensor& query, const Tensor& key, const Tensor& index_query, const Tensor& index_key,
                   const Tensor& positions, const Tensor& lse, const Tensor& index_lse, const Tensor& dloss,
                   const OptionalTensor& cu_seqlens, std::optional<double> scale, int64_t block_size,
                   GradientMask output_mask) {
  constexpr const char* kName = "index_loss_backward";
  const Inputs x = inputs_of(query, key, index_query, index_key, positions, cu_seqlens);
  const Results results = prepare_forward(kName, x, {scale, block_size});
  const Gradients gradients =
      prepare_backward(kName, x, {std::get<0>(results), lse, index_lse}, dloss, output_mask);
  if constexpr (kKernels != nullptr) {
    auto [of_query, of_key] = gradients;
    if (is_empty(x)) {
      fill_zeros({of_query, of_key});
    } else if (of_query.defined() || of_key.defined()) {
      const auto batched = [&](const Tensor& gradient) {
        return gradient.defined() && x.cu_seqlens.defined() ? gradient.unsqueeze(0) : gradient;
      };
      kKernels->backward(resolve(x, {scale, block_size}), lse.contiguous(), index_lse.contiguous(), dloss,
                         {batched(of_query), batched(of_key)});
    }
  }
  return gradients;
}

template <const Kernels* kKernels>
void register_kernels(const OpKernels& kernels) {
  kernels.impl("index_loss", TORCH_FN(loss<kKernels>));
  kernels.impl("_index_loss_forward", TORCH_FN(forward<kKernels>));
  kernels.impl("_index_loss_backward", TORCH_FN(backward<kKernels>));
}

}  // namespace

// ---- Autograd and Autocast

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

Results call_forward(const Inputs& x, const Options& o) {
  static const auto op = op_handle<decltype(forward<nullptr>)>("htree::_index_loss_forward");
  return op.call(x.query, x.key, x.index_query, x.index_key, x.positions, if_defined(x.cu_seqlens), o.scale,
                 o.block_size);
}

Tensor call_loss(const Inputs& x, const Options& o) {
  static const auto op = op_handle<decltype(loss<nullptr>)>("htree::index_loss");
  return op.call(x.query, x.key, x.index_query, x.index_key, x.positions, if_defined(x.cu_seqlens), o.scale,
                 o.block_size);
}

Gradients call_backward(const Inputs& x, const Options& o, const Tensor& lse, const Tensor& index_lse,
                        const Tensor& dloss, GradientMask mask) {
  static const auto op = op_handle<decltype(backward<nullptr>)>("htree::_index_loss_backward");
  return op.call(x.query, x.key, x.index_query, x.index_key, x.positions, lse, index_lse, dloss,
                 if_defined(x.cu_seqlens), o.scale, o.block_size, mask);
}

// query and key are constants, whatever they require.
struct IndexLossNode : Function<IndexLossNode> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& index_query, const Tensor& index_key,
                        const Tensor& query, const Tensor& key, const Tensor& positions,
                        const OptionalTensor& cu_seqlens, const Options& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    const Inputs x = inputs_of(query, key, index_query, index_key, positions, cu_seqlens);
    const auto [loss, lse, index_lse] = call_forward(x, options);
    ctx->save_for_backward({index_query, index_key, query, key, positions, x.cu_seqlens, lse, index_lse});
    ctx->saved_data["scale"] = options.scale;
    ctx->saved_data["block_size"] = options.block_size;
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(7);
    const variable_list saved = ctx->get_saved_variables();
    const Inputs x = {saved[2], saved[3], saved[0], saved[1], saved[4], saved[5]};
    const Options options = {ctx->saved_data["scale"].toOptional<double>(),
                             ctx->saved_data["block_size"].toInt()};
    auto [of_query, of_key] = call_backward(x, options, saved[6], saved[7], grads[0],
                                            {ctx->needs_input_grad(0), ctx->needs_input_grad(1)});
    variable_list gradients(7);
    gradients[0] = of_query;
    gradients[1] = of_key;
    return gradients;
  }
};

Tensor loss_autograd(const Tensor& query, const Tensor& key, const Tensor& index_query,
                     const Tensor& index_key, const Tensor& positions, const OptionalTensor& cu_seqlens,
                     std::optional<double> scale, int64_t block_size) {
  refuse_tangents({query, key});
  if (needs_grad({index_query, index_key})) {
    return IndexLossNode::apply(index_query, index_key, query.detach(), key.detach(), positions, cu_seqlens,
                                Options{scale, block_size});
  }
  at::AutoDispatchBelowAutograd guard;
  return call_loss(inputs_of(query, key, index_query, index_key, positions, cu_seqlens), {scale, block_size});
}

Gradients backward_autograd(const Tensor& query, const Tensor& key, const Tensor& index_query,
                            const Tensor& index_key, const Tensor& positions, const Tensor& lse,
                            const Tensor& index_lse, const Tensor& dloss, const OptionalTensor& cu_seqlens,
                            std::optional<double> scale, int64_t block_size, GradientMask output_mask) {
  return once_differentiable(
      kOp, {query, key, index_query, index_key, lse, index_lse, dloss}, output_mask, [&] {
        return call_backward(inputs_of(query, key, index_query, index_key, positions, cu_seqlens),
                             {scale, block_size}, lse, index_lse, dloss, output_mask);
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string tensors =
      "(Tensor query, Tensor key, Tensor index_query, Tensor index_key, Tensor positions, ";
  const std::string options = "float? scale=None, int block_size=16";
  const std::string rest = "Tensor? cu_seqlens=None, *, " + options;
  // DTensor tells calls of other masks apart where the mask is positional.
  define_ops(library,
             {"index_loss" + tensors + rest + ") -> Tensor",
              "_index_loss_forward" + tensors + rest + ") -> (Tensor loss, Tensor lse, Tensor index_lse)",
              "_index_loss_backward" + tensors +
                  "Tensor lse, Tensor index_lse, Tensor dloss, Tensor? cu_seqlens=None, " + options +
                  ", bool[2] output_mask=[True, True]) -> (Tensor d_index_query, Tensor d_index_key)"});
  register_kernels<&kCpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_kernels<&kCuda>({library, DispatchKey::CUDA});
#endif
  register_kernels<nullptr>({library, DispatchKey::Meta});
  const OpKernels autograd(library, DispatchKey::Autograd);
  autograd.impl("index_loss", TORCH_FN(loss_autograd));
  autograd.impl("_index_loss_backward", TORCH_FN(backward_autograd));
  register_no_gradient(library, {"_index_loss_forward"});
  register_autocast(library, {"index_loss"});
}

}  // namespace htree::index_loss
