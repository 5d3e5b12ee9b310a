// CUDA entry point of the rope stage.
#include "ops/tree/cuda/any/cuda_tensors.h"
#include "ops/tree/cuda/any/rope_params.h"
#include "ops/tree/tree_kernels.h"

namespace htree::tree_attention {

void rope_cuda(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse,
               const Tensor& out) {
  const LaunchScope scope(x);
  TORCH_CHECK_VALUE(cos.size(0) > 0, "rope: cos must hold at least one position, got ", cos.sizes());
  dispatch_device_dtype("rope", x.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using TableT = std::conditional_t<std::is_same_v<T, double>, double, float>;
    RopeParams<T, TableT> params;
    params.x = input_view<T>(x);
    params.out = output<T>(out);
    params.table = rotary_table<TableT>(cos, sin);
    params.table_size = cos.size(0);
    params.positions = positions.const_data_ptr();
    params.wide_positions = positions.scalar_type() == at::kLong;
    params.position_batch = positions.dim() == 2 ? positions.stride(0) : 0;
    params.position_row = positions.stride(-1);
    params.num_batches = x.size(0);
    params.num_rows = x.size(1);
    params.num_heads = x.size(2);
    params.width = x.size(3);
    params.inverse = inverse;
    C10_CUDA_CHECK(launch_rope(params, scope.stream()));
  });
}

}  // namespace htree::tree_attention
