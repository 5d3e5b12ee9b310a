// CUDA entry point of the forward: operands, choice of kernel and launch.
#include "ops/gated_mlp/gated_mlp_cuda.h"
#include "host/cuda/device_type.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"

namespace htree::gated_mlp {
namespace {

using at::Tensor;

void check_launch(cudaError_t error, const KernelConfig& config) {
  TORCH_CHECK_NOT_IMPLEMENTED(error != cudaErrorNotSupported, "gated_mlp: no kernel for ", describe(config));
  C10_CUDA_CHECK(error);
}

template <typename T>
void launch_fused(const Operands& o, const KernelConfig& config, const Results& results,
                  cudaStream_t stream) {
  const Tensor x = with_aligned_rows(o.x);
  const Tensor linear = with_aligned_rows(o.linear);
  const Tensor acted = with_aligned_rows(o.acted);
  const ForwardParams<T> params{
      .sizes = o.sizes,
      .activation = o.activation,
      .x = operand_of<T>(x),
      .gate_weight = operand_of<T>(linear),
      .up_weight = operand_of<T>(acted),
      .out = mutable_data_of<T>(results.out),
      .gate = mutable_data_of<T>(results.linear),
      .up = mutable_data_of<T>(results.acted),
  };
  const auto launch = config.kernel == Kernel::kStream   ? launch_stream<T>
                      : config.kernel == Kernel::kSwapAb ? launch_swap_ab<T>
                                                         : launch_tile<T>;
  check_launch(launch(params, config, stream), config);
}

template <typename T>
void launch_composed(const Operands& o, const Results& results, cudaStream_t stream) {
  const Tensor linear = product(o.x, o.linear.t());
  const Tensor acted = product(o.x, o.acted.t());
  C10_CUDA_CHECK(launch_gate<T>(o.activation, results.out.numel(), data_of<float>(linear),
                                data_of<float>(acted), mutable_data_of<T>(results.out), stream));
  if (results.linear.defined()) {
    results.linear.copy_(linear);
    results.acted.copy_(acted);
  }
}

}  // namespace

void forward_cuda(const Operands& o, at::IntArrayRef config, const Results& results) {
  const LaunchScope scope(o.x);
  const WithoutAutocast guard(c10::autocast_dispatch_keyset);
  KernelConfig choice = choose_config(facts_of(o, results.linear.defined()));
  if (!config.empty()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        choice.kernel != Kernel::kComposed,
        "gated_mlp: config chooses among the kernels for fp16 and bf16 on sm_90; got ", o.x.scalar_type(),
        " on sm_", at::cuda::getCurrentDeviceProperties()->major,
        at::cuda::getCurrentDeviceProperties()->minor);
    choice = config_of({config[0], config[1], config[2], config[3], config[4]});
  }
  dispatch_dtype("gated_mlp", o.x.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = DeviceType<typename decltype(tag)::type>;
    if constexpr (sizeof(T) == 2) {
      if (choice.kernel != Kernel::kComposed) {
        return launch_fused<T>(o, choice, results, scope.stream());
      }
    }
    launch_composed<T>(o, results, scope.stream());
  });
}

}  // namespace htree::gated_mlp
