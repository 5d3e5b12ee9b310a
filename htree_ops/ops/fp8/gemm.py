"""Products of FP8 matrices with scales (docs/semantics/fp8.md §3.3).

A scale is the factor that was applied when quantising, so that products are divided by it. ``torch._scaled_mm`` takes
the reciprocals: :func:`~htree_ops.ops.fp8.fp8_scale_inv`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.arguments import (
    FLOATING,
    check_devices,
    check_dtype,
    check_tensors,
    tuning_config,
    validate_arguments,
    validate_arguments_as,
)
from htree_ops.ops.fp8.quantize import FP8
from htree_ops.tuning.select import configured

KEYS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_SIZE_M", "num_warps", "num_stages")
#: Tuples of the tuning space, in the order of KEYS, that have a kernel.
COMPILED_CONFIGS = tuple(
    (rows, 128, 64, group, 8, stages) for rows, stages in ((128, 5), (256, 4)) for group in (4, 8)
)


def _check_operands(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> None:
    """Checks what the op checks, before an operand is quantised."""
    check_devices("fp8_gemm", {"a": a, "b": b})
    check_dtype("fp8_gemm", (*FLOATING, FP8), a=a)
    check_dtype("fp8_gemm", (*FLOATING, FP8), b=b)
    check_tensors("fp8_gemm", a=(a, "M K"), b=(b, "K N"))
    for name, x, scale in (("a", a, a_scale), ("b", b, b_scale)):
        if x.dtype == FP8 and scale is None:
            raise ValueError(
                f"fp8_gemm: {name}_scale must be a Tensor where {name} is quantised already, got None"
            )


def _quantised(x: Tensor, scale: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    """A float operand in FP8, and its scale; where none is given, one scale for the whole tensor.

    A scale with two dims has one entry per slice along ``dim``, the dim of the sum.
    """
    granularity = "tensor" if scale is None or scale.dim() == 0 else "channel"
    codes, used, _ = torch.ops.htree.fp8_quantize(x, scale, granularity, dim)
    return codes, used


def _dtype_of_product(a: Tensor, b: Tensor) -> torch.dtype:
    """The dtype of the floating operands, float16 where both are quantised already."""
    given = [x.dtype for x in (a, b) if x.dtype != FP8]
    if not given:
        return torch.float16
    return given[0] if len(given) == 1 else torch.promote_types(*given)


#: In messages of fp8_quantize, x and scale are an operand of fp8_gemm and its scale.
_quantised_a = validate_arguments_as("fp8_gemm", x="a", scale="a_scale")(_quantised)
_quantised_b = validate_arguments_as("fp8_gemm", x="b", scale="b_scale")(_quantised)


@validate_arguments
def fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    *,
    BLOCK_M: int | None = None,
    BLOCK_N: int | None = None,
    BLOCK_K: int | None = None,
    GROUP_SIZE_M: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Tensor:
    """``C = (Σ_k a·b) / (a_scale · b_scale)`` on FP8 tensor cores, rounded once to ``output_dtype``.

    **Scales divide the product**, as they multiplied the operands: 448 / max|a| of :func:`htree_ops.fp8_quantize`.
    ``torch._scaled_mm`` and most FP8 checkpoints have the reciprocals, with which the product is wrong and no error is
    raised; :func:`~htree_ops.ops.fp8.fp8_scale_inv` turns one into the other.

    Accuracy: on the CPU 15 products at a time are summed in fp32 and those sums in fp64, an error of 2^-20 of Σ|a·b| at
    any K, with the same bits for any number of threads. The FP8 tensor cores of sm_90 align the terms of a sum to
    the largest and drop what lies more than about 13 bits below it, so their sums are moved to fp32 registers
    every 128 elements of K. On random data the result errs by up to 2^-12 of Σ|a·b| at K = 128 and 2^-15 at
    K = 4096 beyond the rounding of the result, about as much as ``torch._scaled_mm(use_fast_accum=False)``.
    Scales of any size that fp32 holds are applied so that only a result that is out of range overflows or becomes 0.
    On sm_90 few rows are computed by blocks that stream b, more by persistent tiles; estimates of their times choose
    among them and cuBLASLt, which takes some sizes that fill the tiles badly. There a product of scales beyond 2^126
    gives 0.
    Source: docs/semantics/fp8.md §3.3, design document [002].

    Args:
        a: [M, K] float8_e4m3fn; or float32, float16 or bfloat16, which is quantised here, with ``a_scale``
            (one, or one per row) if it is given and else with one scale for the tensor.
        b: [K, N] likewise; column-major is read in place, row-major is transposed first.
        a_scale: fp32 [] or [M, 1], the factor that was applied when quantising a.
        b_scale: fp32 [] or [1, N].
        output_dtype: float16, bfloat16 or float32. By default the dtype of the operands that are not quantised yet
            (of two the one that holds both, as ``torch.promote_types`` has it), and float16 where both are, in which
            results beyond 65504 are infinite.
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_SIZE_M, num_warps, num_stages: a configuration of the CUDA kernel for
            the tuner, all or none: rows and columns per block, elements of K between moves to fp32 registers,
            row tiles that are swept together, warps that multiply, stages of 128 elements of K. Checked
            on every device, ignored on the CPU.

    Returns:
        A new contiguous tensor [M, N]; zeros for K = 0. Not differentiable.

    Raises:
        DeviceError: tensors on different devices.
        UnsupportedDtypeError: another dtype of an operand, a scale or the output.
        ShapeMismatchError: a or b is not 2-D, K differs, or a scale is neither [] nor constant along K.
        ValueError: a scale on the CPU that is not positive and finite, the missing scale of a quantised operand, or
            a missing part of a configuration.
        ArchitectureNotSupportedError: a configuration that is not compiled.
        NotImplementedError: a configuration on another GPU than sm_90.

    Without a configuration ``HTREE_TUNE`` decides: see :mod:`htree_ops.tuning.select`.

    Example:
        >>> a, b = torch.randn(32, 64), torch.randn(64, 16)
        >>> fp8_gemm(a, b).shape  # floats are quantised first
        torch.Size([32, 16])
    """
    if a.dtype != FP8 or b.dtype != FP8 or a_scale is None or b_scale is None:
        _check_operands(a, b, a_scale, b_scale)
    dtype = _dtype_of_product(a, b) if output_dtype is None else output_dtype
    if a.dtype != FP8:
        a, a_scale = _quantised_a(a, a_scale, -1)
    if b.dtype != FP8:
        b, b_scale = _quantised_b(b, b_scale, 0)
    config = tuning_config(
        "fp8_gemm",
        COMPILED_CONFIGS,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        GROUP_SIZE_M=GROUP_SIZE_M,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if config is None and a.dim() == b.dim() == 2:  # the op refuses other ranks
        config = configured(
            "fp8_gemm",
            (a.shape[0], b.shape[1], a.shape[1]),
            a,
            lambda tried: torch.ops.htree.fp8_gemm(a, b, a_scale, b_scale, dtype, tried),
            layout="column-major b" if b.stride(0) == 1 else "row-major b",
        )
    return torch.ops.htree.fp8_gemm(a, b, a_scale, b_scale, dtype, config)


@validate_arguments
def fp8_gemm_exact(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, output_dtype: torch.dtype | None = None
) -> Tensor:
    """:func:`fp8_gemm` with sums in fp64, exact up to K = 2^17: ``C = Σ_k a·b / a_scale / b_scale``, rounded to
    fp32 and from there to ``output_dtype``, so ``|error| <= (u + 2^-23)·|C|``.

    The products are those of cuBLAS (on the CPU, of the BLAS) in fp64, on blocks of the operands. On a GPU this is far
    slower than :func:`fp8_gemm`, even where fp64 has tensor cores.
    Source: docs/semantics/fp8.md §3.3, §3.5 (property 4).

    Args and errors as for :func:`fp8_gemm`, for operands that are quantised already; so ``output_dtype`` is float16 by
    default, in which results beyond 65504 are infinite.
    """
    dtype = torch.float16 if output_dtype is None else output_dtype
    return torch.ops.htree.fp8_gemm_exact(a, b, a_scale, b_scale, dtype)
