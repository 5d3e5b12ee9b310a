// All checks and the outputs' allocation, shared by the CPU, CUDA and Meta kernels.
#include <limits>

#include "host/check.h"
#include "host/outputs.h"
#include "ops/gated_mlp/gated_mlp.h"
#include "ops/gated_mlp/gated_mlp_config.h"

namespace htree::gated_mlp {
namespace {

void check(const char* op, const Arguments& a) {
  check_same_device(op, "gate_weight", a.gate_weight, "x", a.x);
  check_same_device(op, "up_weight", a.up_weight, "x", a.x);
  check_floating(op, "x", a.x, /*double_on_cuda=*/false);
  check_same_dtype(op, "gate_weight", a.gate_weight, "x", a.x);
  check_same_dtype(op, "up_weight", a.up_weight, "x", a.x);
  TORCH_CHECK_VALUE(a.x.dim() >= 1, op, ": x must be [..., Hd] with at least one dim, got 0-D []");
  check_rank(op, "gate_weight", a.gate_weight, 2, "[I, Hd]");
  check_rank(op, "up_weight", a.up_weight, 2, "[I, Hd]");
  check_size(op, "gate_weight", a.gate_weight, 1, a.x.sym_size(-1), "Hd of x");
  check_size(op, "up_weight", a.up_weight, 1, a.x.sym_size(-1), "Hd of x");
  check_size(op, "up_weight", a.up_weight, 0, a.gate_weight.sym_size(0), "I of gate_weight");
  TORCH_CHECK_VALUE(a.activation == "silu" || a.activation == "gelu", op,
                    ": activation must be silu or gelu, got ", a.activation);
  TORCH_CHECK_VALUE(a.act_on == "up" || a.act_on == "gate", op, ": act_on must be up or gate, got ",
                    a.act_on);
}

// [..., inner] for x [..., hidden].
at::Tensor empty_product(const Arguments& a) {
  auto sizes = a.x.sym_sizes().vec();
  sizes.back() = a.gate_weight.sym_size(0);
  return new_tensor(sizes, a.x.scalar_type(), a.x);
}

Gradients empty_gradients(const Arguments& a, Mask wanted) {
  return {new_gradient(wanted[0], a.x), new_gradient(wanted[1], a.gate_weight),
          new_gradient(wanted[2], a.up_weight)};
}

void check_product(const char* op, const char* name, const at::Tensor& tensor, const Arguments& a) {
  check_same_device(op, name, tensor, "x", a.x);
  check_same_dtype(op, name, tensor, "x", a.x);
  auto sizes = a.x.sym_sizes().vec();
  sizes.back() = a.gate_weight.sym_size(0);
  check_shape(op, name, tensor, sizes, "x with I of gate_weight as its last size");
}

}  // namespace

void check_config(at::OptionalIntArrayRef config) {
  if (!config.has_value()) {
    return;
  }
  const char* op = "gated_mlp";
  const at::IntArrayRef c = *config;
  TORCH_CHECK_VALUE(c.size() == 5, op,
                    ": config must be (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages), got ", c.size(),
                    " values");
  TORCH_CHECK_NOT_IMPLEMENTED(
      in_compiled_space({c[0], c[1], c[2], c[3], c[4]}), op,
      ": no kernel is compiled for (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages) = ", c,
      "; compiled: ", kCompiledSpace);
}

at::Tensor prepare(const Arguments& arguments, at::OptionalIntArrayRef config) {
  check("gated_mlp", arguments);
  check_config(config);
  return empty_product(arguments);
}

Products prepare_forward(const Arguments& arguments) {
  check("gated_mlp", arguments);  // gated_mlp calls this op where a gradient is recorded
  return {empty_product(arguments), empty_product(arguments), empty_product(arguments)};
}

Gradients prepare_backward(const Arguments& arguments, const at::Tensor& dy, Mask wanted) {
  check("gated_mlp_backward", arguments);
  check_product("gated_mlp_backward", "dy", dy, arguments);
  return empty_gradients(arguments, wanted);
}

Gradients prepare_saved_backward(const Arguments& arguments, const at::Tensor& dy, const at::Tensor& gate,
                                 const at::Tensor& up, Mask wanted) {
  const char* op = "gated_mlp_saved_backward";
  check(op, arguments);
  check_product(op, "dy", dy, arguments);
  check_product(op, "gate", gate, arguments);
  check_product(op, "up", up, arguments);
  return empty_gradients(arguments, wanted);
}

Operands operands_of(const Arguments& a) {
  const int64_t hidden = a.x.size(-1);
  const int64_t rows = hidden == 0 ? 0 : a.x.numel() / hidden;
  const Sizes sizes{rows, a.gate_weight.size(0), hidden};
  constexpr int64_t kMost =
      std::numeric_limits<int32_t>::max() - 1024;  // tile numbers and coordinates are 32-bit
  TORCH_CHECK_VALUE(sizes.rows <= kMost && sizes.inner <= kMost && sizes.hidden <= kMost,
                    "gated_mlp: the rows and Hd of x and I of gate_weight must be below 2^31, got ",
                    sizes.rows, " rows, I = ", sizes.inner, ", Hd = ", sizes.hidden);
  const bool swapped = a.act_on == "gate";
  return {sizes,
          a.activation == "silu" ? Activation::kSilu : Activation::kGelu,
          swapped,
          a.x.reshape({rows, hidden}),
          swapped ? a.up_weight : a.gate_weight,
          swapped ? a.gate_weight : a.up_weight};
}

}  // namespace htree::gated_mlp
