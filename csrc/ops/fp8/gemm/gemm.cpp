// Schemas, Meta, Autograd and registrations of fp8_gemm. docs/semantics/fp8.md §3.3
#include "ops/fp8/gemm/gemm.h"

#include <torch/library.h>

#include "host/no_gradient.h"
#include "host/registration.h"

namespace htree::fp8 {
namespace {

using at::Tensor;
using Gemm = void (*)(const GemmArguments&, at::IntArrayRef, const Tensor&);
using ExactGemm = void (*)(const GemmArguments&, const Tensor&);

// ((a.float() @ b.float()) / (a_scale * b_scale)).to(output_dtype), with partial sums in the tensor cores
template <Gemm kGemm>
Tensor gemm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
            at::ScalarType output_dtype, at::OptionalIntArrayRef config) {
  const GemmArguments arguments{"fp8_gemm", a, b, a_scale, b_scale, output_dtype};
  Tensor c = prepare_gemm(arguments, config);
  if (c.numel() > 0 && a.size(1) == 0) {
    c.zero_();
  } else if (c.numel() > 0) {
    kGemm(arguments, config.value_or(at::IntArrayRef()), c);
  }
  return c;
}

// (a.double() @ b.double() / a_scale / b_scale).to(output_dtype)
template <ExactGemm kGemm>
Tensor exact_gemm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                  at::ScalarType output_dtype) {
  const GemmArguments arguments{"fp8_gemm_exact", a, b, a_scale, b_scale, output_dtype};
  Tensor c = prepare_gemm(arguments, std::nullopt);
  if (c.numel() > 0 && a.size(1) == 0) {
    c.zero_();
  } else if (c.numel() > 0) {
    kGemm(arguments, c);
  }
  return c;
}

Tensor meta_gemm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                 at::ScalarType output_dtype, at::OptionalIntArrayRef config) {
  return prepare_gemm({"fp8_gemm", a, b, a_scale, b_scale, output_dtype}, config);
}

Tensor meta_exact_gemm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                       at::ScalarType output_dtype) {
  return prepare_gemm({"fp8_gemm_exact", a, b, a_scale, b_scale, output_dtype}, std::nullopt);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(library, {"fp8_gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, "
                       "ScalarType output_dtype=half, int[]? config=None) -> Tensor",
                       "fp8_gemm_exact(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, "
                       "ScalarType output_dtype=half) -> Tensor"});
  const OpKernels cpu(library, DispatchKey::CPU);
  cpu.impl("fp8_gemm", TORCH_FN((gemm<gemm_cpu>)));
  cpu.impl("fp8_gemm_exact", TORCH_FN((exact_gemm<exact_gemm_cpu>)));
#if defined(HTREE_WITH_CUDA)
  const OpKernels cuda(library, DispatchKey::CUDA);
  cuda.impl("fp8_gemm", TORCH_FN((gemm<gemm_cuda>)));
  cuda.impl("fp8_gemm_exact", TORCH_FN((exact_gemm<exact_gemm_cuda>)));
#endif
  const OpKernels meta(library, DispatchKey::Meta);
  meta.impl("fp8_gemm", TORCH_FN(meta_gemm));
  meta.impl("fp8_gemm_exact", TORCH_FN(meta_exact_gemm));
  register_no_gradient(library, {"fp8_gemm", "fp8_gemm_exact"});
}

}  // namespace htree::fp8
