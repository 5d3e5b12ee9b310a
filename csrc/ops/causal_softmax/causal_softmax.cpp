// Schemas, Meta, Autograd and registrations of the causal_softmax family. docs/semantics/causal_softmax.md §5
#include "ops/causal_softmax/causal_softmax.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "host/autograd.h"
#include "host/op_handle.h"
#include "host/registration.h"

namespace htree::causal_softmax {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// ---- the ops, called through the dispatcher

at::Tensor call_forward(const at::Tensor& x, int64_t block_size) {
  static const auto op = op_handle<at::Tensor(const at::Tensor&, int64_t)>("htree::causal_softmax");
  return op.call(x, block_size);
}

at::Tensor call_backward(const at::Tensor& dy, const at::Tensor& y) {
  static const auto op =
      op_handle<at::Tensor(const at::Tensor&, const at::Tensor&)>("htree::causal_softmax_backward");
  return op.call(dy, y);
}

// ---- CPU, CUDA and Meta: one body, with the device's entry points as template arguments

using Forward = void (*)(const at::Tensor&, int64_t, const at::Tensor&);
using Backward = void (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&);

// mask = torch.ones(h, w, dtype=torch.bool).tril(w - h)
// torch.softmax(x.float().masked_fill(~mask, -inf), -1).to(x.dtype)
template <Forward kForward>
at::Tensor forward(const at::Tensor& x, int64_t block_size) {
  at::Tensor out = prepare(x, block_size);
  kForward(with_batch_stride(x), block_size, out);
  return out;
}

// Writes to `out`, which may be x: at once where it has a batch stride, else by way of a fresh tensor.
template <Forward kForward>
void forward_into(const at::Tensor& x, int64_t block_size, const at::Tensor& out) {
  if (batch_stride(out).has_value()) {
    kForward(with_batch_stride(x), block_size, out);
  } else {
    const at::Tensor fresh =
        at::empty(out.sizes(), out.options().memory_format(at::MemoryFormat::Contiguous));
    kForward(with_batch_stride(x), block_size, fresh);
    out.copy_(fresh);
  }
}

template <Forward kForward>
void forward_out(const at::Tensor& x, int64_t block_size, const at::Tensor& out) {
  prepare_out(x, block_size, out);
  forward_into<kForward>(x, block_size, out);
}

template <Forward kForward>
void forward_inplace(const at::Tensor& x, int64_t block_size) {
  prepare_inplace(x, block_size);
  forward_into<kForward>(x, block_size, x);
}

// dx = torch.where(mask, y * (dy - (dy * y).masked_fill(~mask, 0).sum(-1, keepdim=True)), 0)
template <Backward kBackward>
at::Tensor backward(const at::Tensor& dy, const at::Tensor& y) {
  at::Tensor dx = prepare_backward(dy, y);
  kBackward(with_batch_stride(dy), with_batch_stride(y), dx);
  return dx;
}

// ---- Autograd

struct ForwardNode : Function<ForwardNode> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, int64_t block_size) {
    at::AutoDispatchBelowADInplaceOrView guard;
    at::Tensor y = call_forward(x, block_size);
    ctx->save_for_backward({y});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor y = ctx->get_saved_variables()[0];
    return {grads[0].defined() ? call_backward(grads[0], y) : at::Tensor(), at::Tensor()};
  }
};

at::Tensor forward_autograd(const at::Tensor& x, int64_t block_size) {
  if (needs_grad({x})) {
    return ForwardNode::apply(x, block_size);
  }
  at::AutoDispatchBelowAutograd guard;
  return call_forward(x, block_size);
}

at::Tensor backward_autograd(const at::Tensor& dy, const at::Tensor& y) {
  return std::get<0>(once_differentiable("causal_softmax_backward", {dy, y}, std::array{true},
                                         [&] { return std::tuple(call_backward(dy, y)); }));
}

template <Forward kForward, Backward kBackward>
void register_device(const OpKernels& kernels) {
  kernels.impl("causal_softmax", TORCH_FN((forward<kForward>)));
  kernels.impl("causal_softmax.out", TORCH_FN((forward_out<kForward>)));
  kernels.impl("causal_softmax_", TORCH_FN((forward_inplace<kForward>)));
  kernels.impl("causal_softmax_backward", TORCH_FN((backward<kBackward>)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(library, {
                          "causal_softmax(Tensor x, int block_size=0) -> Tensor",
                          "causal_softmax.out(Tensor x, int block_size=0, *, Tensor(a!) out) -> ()",
                          "causal_softmax_(Tensor(a!) x, int block_size=0) -> ()",
                          "causal_softmax_backward(Tensor dy, Tensor y) -> Tensor",
                      });
  register_device<forward_cpu, backward_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_device<forward_cuda, backward_cuda>({library, DispatchKey::CUDA});
#endif
  const OpKernels meta(library, DispatchKey::Meta);
  meta.impl("causal_softmax", TORCH_FN(prepare));
  meta.impl("causal_softmax.out", TORCH_FN(prepare_out));
  meta.impl("causal_softmax_", TORCH_FN(prepare_inplace));
  meta.impl("causal_softmax_backward", TORCH_FN(prepare_backward));
  const OpKernels autograd(library, DispatchKey::Autograd);
  autograd.impl("causal_softmax", TORCH_FN(forward_autograd));
  autograd.impl("causal_softmax_backward", TORCH_FN(backward_autograd));
}

}  // namespace htree::causal_softmax
