// Autograd and Autocast of the whole operator. docs/semantics §0.5, §1.10.
#include <ATen/autocast_mode.h>

#include "host/autograd.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree_attention/attention.h"

namespace htree::tree_attention {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// ---- the ops, called through the dispatcher

Tensor call_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o,
                      bool store_parents) {
  static const auto op =
      op_handle<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, int64_t,
                       std::optional<double>, std::optional<double>, std::string_view, int64_t, bool)>(
          "htree::attention");
  return op.call(q, k, v, o.compression_rate, o.max_top_nodes, o.top_k, o.scale, o.rope_base, o.importance,
                 o.selection_stride, store_parents);
}

AttentionState call_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                      const AttentionOptions& o, bool store_parents) {
  static const auto op = op_handle<AttentionState(
      const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, int64_t, std::optional<double>,
      std::optional<double>, std::string_view, int64_t, bool)>("htree::attention_forward");
  return op.call(q, k, v, o.compression_rate, o.max_top_nodes, o.top_k, o.scale, o.rope_base, o.importance,
                 o.selection_stride, store_parents);
}

// What the backward reads, in the order in which it is saved.
struct Saved {
  Tensor q, k, v, out, gmax, gsum;
  std::vector<Tensor> parents;

  variable_list to_list() const {
    variable_list list = {q, k, v, out, gmax, gsum};
    list.insert(list.end(), parents.begin(), parents.end());
    return list;
  }

  static Saved from_list(const variable_list& list) {
    return {list[0], list[1], list[2], list[3], list[4], list[5], {list.begin() + 6, list.end()}};
  }
};

Gradients call_attention_backward(const Tensor& dout, const Saved& s, const AttentionOptions& o,
                                  std::array<bool, 3> output_mask) {
  static const auto op = op_handle<Gradients(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      at::TensorList, int64_t, int64_t, int64_t, std::optional<double>, std::optional<double>,
      std::string_view, int64_t, std::array<bool, 3>)>("htree::attention_backward");
  return op.call(dout, s.q, s.k, s.v, s.out, s.gmax, s.gsum, s.parents, o.compression_rate, o.max_top_nodes,
                 o.top_k, o.scale, o.rope_base, o.importance, o.selection_stride, output_mask);
}

// ---- Autograd

void save_options(AutogradContext* ctx, const AttentionOptions& o) {
  ctx->saved_data["compression_rate"] = o.compression_rate;
  ctx->saved_data["max_top_nodes"] = o.max_top_nodes;
  ctx->saved_data["top_k"] = o.top_k;
  ctx->saved_data["scale"] = o.scale;
  ctx->saved_data["rope_base"] = o.rope_base;
  ctx->saved_data["importance"] = o.importance;
  ctx->saved_data["selection_stride"] = o.selection_stride;
}

AttentionOptions load_options(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  return {data["compression_rate"].toInt(),
          data["max_top_nodes"].toInt(),
          data["top_k"].toInt(),
          data["scale"].toOptional<double>(),
          data["rope_base"].toOptional<double>(),
          data["importance"].toStringRef(),
          data["selection_stride"].toInt()};
}

struct AttentionNode : Function<AttentionNode> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionOptions& options, bool store_parents) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    auto [out, gmax, gsum, parents] = call_attention_forward(q, k, v, options, store_parents);
    ctx->save_for_backward(Saved{q, k, v, out, gmax, gsum, std::move(parents)}.to_list());
    save_options(ctx, options);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) {
      return variable_list(5);
    }
    const Saved saved = Saved::from_list(ctx->get_saved_variables());
    const std::array<bool, 3> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2)};
    auto [dq, dk, dv] = call_attention_backward(grads[0], saved, load_options(ctx), wanted);
    return {dq, dk, dv, Tensor(), Tensor()};
  }
};

// Only the wanted gradients become outputs: a node cannot have undefined ones.
struct AttentionBackwardNode : Function<AttentionBackwardNode> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const Tensor& dout, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& out, const Saved& saved,
                               const AttentionOptions& options, std::array<bool, 3> output_mask) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [dq, dk, dv] = call_attention_backward(
        dout, {q, k, v, out, saved.gmax, saved.gsum, saved.parents}, options, output_mask);
    variable_list wanted;
    for (const Tensor& gradient : {dq, dk, dv}) {
      if (gradient.defined()) {
        wanted.push_back(gradient);
      }
    }
    return wanted;
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    refuse_double_backward("attention_backward");
  }
};

Tensor attention_autograd(const Tensor& q, const Tensor& k, const Tensor& v, int64_t compression_rate,
                          int64_t max_top_nodes, int64_t top_k, std::optional<double> scale,
                          std::optional<double> rope_base, std::string_view importance,
                          int64_t selection_stride, bool store_parents) {
  const AttentionOptions options = {compression_rate, max_top_nodes,           top_k,           scale,
                                    rope_base,        std::string(importance), selection_stride};
  if (needs_grad({q, k, v})) {
    check_attention("tree_attention", q, k, v, options);  // the node calls attention_forward
    return AttentionNode::apply(q, k, v, options, store_parents);
  }
  at::AutoDispatchBelowAutograd guard;
  return call_attention(q, k, v, options, store_parents);
}

Gradients attention_backward_autograd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                                      at::TensorList parents, int64_t compression_rate, int64_t max_top_nodes,
                                      int64_t top_k, std::optional<double> scale,
                                      std::optional<double> rope_base, std::string_view importance,
                                      int64_t selection_stride, std::array<bool, 3> output_mask) {
  const AttentionOptions options = {compression_rate, max_top_nodes,           top_k,           scale,
                                    rope_base,        std::string(importance), selection_stride};
  const Saved saved = {q, k, v, out, gmax, gsum, parents.vec()};
  const bool any_wanted = output_mask[0] || output_mask[1] || output_mask[2];
  if (!any_wanted || !needs_grad({dout, q, k, v, out})) {
    at::AutoDispatchBelowAutograd guard;
    return call_attention_backward(dout, saved, options, output_mask);
  }
  const variable_list wanted = AttentionBackwardNode::apply(dout, q, k, v, out, saved, options, output_mask);
  Gradients gradients;
  size_t next = 0;
  std::get<0>(gradients) = output_mask[0] ? wanted[next++] : Tensor();
  std::get<1>(gradients) = output_mask[1] ? wanted[next++] : Tensor();
  std::get<2>(gradients) = output_mask[2] ? wanted[next++] : Tensor();
  return gradients;
}

// ---- Autocast: q, k and v take the autocast dtype (float64 stays); the states remain fp32

struct Cast {
  Tensor q, k, v;
};

template <at::DeviceType kDevice>
Cast cast_inputs(const Tensor& q, const Tensor& k, const Tensor& v) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  return {at::autocast::cached_cast(dtype, q, kDevice), at::autocast::cached_cast(dtype, k, kDevice),
          at::autocast::cached_cast(dtype, v, kDevice)};
}

template <at::DeviceType kDevice>
Tensor attention_autocast(const Tensor& q, const Tensor& k, const Tensor& v, int64_t compression_rate,
                          int64_t max_top_nodes, int64_t top_k, std::optional<double> scale,
                          std::optional<double> rope_base, std::string_view importance,
                          int64_t selection_stride, bool store_parents) {
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const Cast cast = cast_inputs<kDevice>(q, k, v);
  return call_attention(
      cast.q, cast.k, cast.v,
      {compression_rate, max_top_nodes, top_k, scale, rope_base, std::string(importance), selection_stride},
      store_parents);
}

template <at::DeviceType kDevice>
AttentionState attention_forward_autocast(const Tensor& q, const Tensor& k, const Tensor& v,
                                          int64_t compression_rate, int64_t max_top_nodes, int64_t top_k,
                                          std::optional<double> scale, std::optional<double> rope_base,
                                          std::string_view importance, int64_t selection_stride,
                                          bool store_parents) {
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const Cast cast = cast_inputs<kDevice>(q, k, v);
  return call_attention_forward(
      cast.q, cast.k, cast.v,
      {compression_rate, max_top_nodes, top_k, scale, rope_base, std::string(importance), selection_stride},
      store_parents);
}

}  // namespace

TORCH_LIBRARY_IMPL(htree, Autograd, library) {
  register_no_gradient(library, {"attention_forward"});
  library.impl("attention", TORCH_FN(attention_autograd));
  library.impl("attention_backward", TORCH_FN(attention_backward_autograd));
}

TORCH_LIBRARY_IMPL(htree, AutocastCPU, library) {
  library.impl("attention", TORCH_FN(attention_autocast<at::kCPU>));
  library.impl("attention_forward", TORCH_FN(attention_forward_autocast<at::kCPU>));
}

TORCH_LIBRARY_IMPL(htree, AutocastCUDA, library) {
  library.impl("attention", TORCH_FN(attention_autocast<at::kCUDA>));
  library.impl("attention_forward", TORCH_FN(attention_forward_autocast<at::kCUDA>));
}

}  // namespace htree::tree_attention
