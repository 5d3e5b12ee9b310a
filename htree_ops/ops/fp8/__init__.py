"""FP8: scales, quantisation and back, products, linear layers (docs/semantics/fp8.md §3.3)."""

from htree_ops.ops.fp8.gemm import fp8_gemm, fp8_gemm_exact
from htree_ops.ops.fp8.linear import FP8Linear, calibrate_activation_scales, quantize_model_
from htree_ops.ops.fp8.quantize import (
    FP8Format,
    Granularity,
    fp8_compute_scale,
    fp8_dequantize,
    fp8_fake_quant,
    fp8_quantize,
    fp8_scale_inv,
    handle_fp8_overflow,
)

__all__ = [
    "FP8Format",
    "FP8Linear",
    "Granularity",
    "calibrate_activation_scales",
    "fp8_compute_scale",
    "fp8_dequantize",
    "fp8_fake_quant",
    "fp8_gemm",
    "fp8_gemm_exact",
    "fp8_quantize",
    "fp8_scale_inv",
    "handle_fp8_overflow",
    "quantize_model_",
]
