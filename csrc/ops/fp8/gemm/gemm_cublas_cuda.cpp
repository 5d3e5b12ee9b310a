// cuBLASLt for fp8_gemm. torch's scaled product always offers cuBLASLt a workspace, which makes it choose
// kernels that clear a counter there first: 2 us of its 110 at 4096^3 on an H200. Without a workspace it
// takes the same kernels with a fixed order of tiles, and what that saves pays for the reciprocals of the
// scales. Where c has few tiles it cuts k into parts, and for that it needs the workspace.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>
#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>

#include "device/sizes.h"
#include "ops/fp8/gemm/cuda/gemm_launch.h"
#include "ops/fp8/gemm/gemm_cublas.h"

namespace htree::fp8 {
namespace {

using at::Tensor;

constexpr int64_t kPack = 16 / sizeof(float);  // cuBLASLt wants each vector of factors aligned to 16 bytes

void check(cublasStatus_t status, const char* what) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "fp8_gemm: ", what, " failed with cuBLAS status ",
              static_cast<int>(status));
}

template <typename T, cublasStatus_t (*kDestroy)(T)>
struct Destroyer {
  void operator()(T object) const { kDestroy(object); }
};
template <typename T, cublasStatus_t (*kDestroy)(T)>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, Destroyer<T, kDestroy>>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// Matrices are column-major, as cuBLASLt sees them.
Layout make_layout(cudaDataType_t type, int64_t rows, int64_t columns, int64_t pitch) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                   pitch),
        "cublasLtMatrixLayoutCreate");
  return Layout(layout);
}

template <typename T>
void set(const Operation& operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(operation.get(), attribute, &value, sizeof value),
        "cublasLtMatmulDescSetAttribute");
}

// The alignment in bytes, at most 256.
uint32_t alignment_of(const Tensor& x) {
  uint32_t alignment = 256;
  while (reinterpret_cast<uintptr_t>(x.const_data_ptr()) % alignment != 0) {
    alignment /= 2;
  }
  return alignment;
}

void set_alignment(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                   uint32_t alignment) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof alignment),
        "cublasLtMatmulPreferenceSetAttribute");
}

cudaDataType_t output_type(at::ScalarType dtype) {
  return dtype == at::kHalf ? CUDA_R_16F : dtype == at::kBFloat16 ? CUDA_R_16BF : CUDA_R_32F;
}

// Everything that the choice of cuBLASLt depends on.
struct Problem {
  c10::DeviceIndex device;
  at::ScalarType output;
  int64_t m, n, k;
  int64_t a_pitch, b_pitch;
  uint32_t a_alignment, b_alignment, c_alignment;

  auto tied() const {
    return std::tie(device, output, m, n, k, a_pitch, b_pitch, a_alignment, b_alignment, c_alignment);
  }
  bool operator<(const Problem& other) const { return tied() < other.tied(); }
};

struct Layouts {
  Layout first;
  Layout second;
  Layout result;
};

using Algorithm = std::optional<cublasLtMatmulAlgo_t>;

// The first choice of cuBLASLt among its kernels that need no workspace; none where it has no such kernel.
Algorithm ask_cublas(cublasLtHandle_t handle, const Problem& p, const Operation& operation,
                     const Layouts& layouts) {
  cublasLtMatmulPreference_t wishes = nullptr;
  check(cublasLtMatmulPreferenceCreate(&wishes), "cublasLtMatmulPreferenceCreate");
  const Preference preference(wishes);
  const size_t no_workspace = 0;
  check(cublasLtMatmulPreferenceSetAttribute(wishes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &no_workspace,
                                             sizeof no_workspace),
        "cublasLtMatmulPreferenceSetAttribute");
  // The kernels may count on these alignments. b is the first operand.
  set_alignment(wishes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.b_alignment);
  set_alignment(wishes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.a_alignment);
  set_alignment(wishes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.c_alignment);
  set_alignment(wishes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.c_alignment);
  cublasLtMatmulHeuristicResult_t choice{};
  int count = 0;
  const cublasStatus_t found =
      cublasLtMatmulAlgoGetHeuristic(handle, operation.get(), layouts.first.get(), layouts.second.get(),
                                     layouts.result.get(), layouts.result.get(), wishes, 1, &choice, &count);
  if (found == CUBLAS_STATUS_NOT_SUPPORTED || count == 0) {
    return std::nullopt;
  }
  check(found, "cublasLtMatmulAlgoGetHeuristic");
  return choice.algo;
}

// The same, asked once per problem: asking costs the host several times as much as the launch.
Algorithm algorithm_for(cublasLtHandle_t handle, const Problem& p, const Operation& operation,
                        const Layouts& layouts) {
  constexpr size_t kMostKept = 4096;
  static std::mutex mutex;
  static std::map<Problem, Algorithm> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(p);
  if (found != known.end()) {
    return found->second;
  }
  if (known.size() >= kMostKept) {
    known.clear();
  }
  return known.emplace(p, ask_cublas(handle, p, operation, layouts)).first->second;
}

// c = factor_a * factor_b * a b. False where cuBLASLt has no kernel without a workspace.
bool multiply(const GemmArguments& g, const float* factor_a, const float* factor_b, const Tensor& c,
              cudaStream_t stream) {
  cublasLtMatmulDesc_t description = nullptr;
  check(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  const Operation operation(description);
  // Its result is column-major, so it computes the transpose of c: rows of b^T times columns of a^T.
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, factor_b);
  set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, factor_a);
  set(operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
  const Problem p{.device = c.device().index(),
                  .output = g.output_dtype,
                  .m = g.a.size(0),
                  .n = g.b.size(1),
                  .k = g.a.size(1),
                  .a_pitch = g.a.stride(0),
                  .b_pitch = g.b.stride(1),
                  .a_alignment = alignment_of(g.a),
                  .b_alignment = alignment_of(g.b),
                  .c_alignment = alignment_of(c)};
  const Layouts layouts{make_layout(CUDA_R_8F_E4M3, p.k, p.n, p.b_pitch),
                        make_layout(CUDA_R_8F_E4M3, p.k, p.m, p.a_pitch),
                        make_layout(output_type(p.output), p.n, p.m, p.n)};
  const cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  const Algorithm algorithm = algorithm_for(handle, p, operation, layouts);
  if (!algorithm) {
    return false;
  }
  const float one = 1.0f;
  const float zero = 0.0f;
  check(cublasLtMatmul(handle, description, &one, g.b.const_data_ptr(), layouts.first.get(),
                       g.a.const_data_ptr(), layouts.second.get(), &zero, c.const_data_ptr(),
                       layouts.result.get(), c.mutable_data_ptr(), layouts.result.get(), &*algorithm, nullptr,
                       0, stream),
        "cublasLtMatmul");
  return true;
}

// Whether c has fewer tiles than half of the multiprocessors.
bool has_few_tiles(const GemmArguments& g) {
  constexpr int64_t kTile = 128;
  const int64_t tiles = ceil_div(g.a.size(0), kTile) * ceil_div(g.b.size(1), kTile);
  return 2 * tiles < at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
}

}  // namespace

void cublas_gemm(const GemmArguments& g, GemmScale a_scale, GemmScale b_scale, const Tensor& c, bool pdl,
                 cudaStream_t stream) {
  const bool single = g.a_scale.numel() == 1 && g.b_scale.numel() == 1;
  const int64_t num_a = single ? 1 : g.a.size(0);
  const int64_t num_b = single ? 1 : g.b.size(1);
  const int64_t first_b = (num_a + kPack - 1) / kPack * kPack;
  const Tensor reciprocals = at::empty({first_b + num_b}, g.a_scale.options());
  float* of_a = reciprocals.mutable_data_ptr<float>();
  float* of_b = of_a + first_b;
  C10_CUDA_CHECK(launch_reciprocals(a_scale, num_a, of_a, b_scale, num_b, of_b, pdl, stream));
  if (single && !has_few_tiles(g) && multiply(g, of_a, of_b, c, stream)) {
    return;
  }
  const Tensor a = reciprocals.narrow(0, 0, num_a);
  const Tensor b = reciprocals.narrow(0, first_b, num_b);
  Tensor out = c;
  at::_scaled_mm_out(out, g.a, g.b, single ? a.reshape({}) : a.unsqueeze(1),
                     single ? b.reshape({}) : b.unsqueeze(0),
                     /*bias=*/std::nullopt, /*scale_result=*/std::nullopt, g.output_dtype,
                     /*use_fast_accum=*/false);
}

}  // namespace htree::fp8
