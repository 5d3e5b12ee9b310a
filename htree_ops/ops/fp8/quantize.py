"""FP8 in the format E4M3FN: scales, quantisation and back (docs/semantics/fp8.md §3.3).

A scale s multiplies when quantising, s = 448 / max|x|, and divides when dequantising. torch._scaled_mm takes the
reciprocals: :func:`fp8_scale_inv`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from htree_ops.errors import NumericalOverflowError
from htree_ops.ops.arguments import check_number, validate_arguments, validate_arguments_as

FP8 = torch.float8_e4m3fn
Granularity = Literal["tensor", "channel", "block"]


@dataclass(frozen=True)
class FP8Format:
    """The numbers of E4M3FN, stored as ``torch.float8_e4m3fn``.

    Attributes:
        exponent_bits: 4, with a bias of 7.
        mantissa_bits: 3.
        max_value: largest magnitude.
        min_normal: smallest magnitude with a full mantissa.
        min_subnormal: smallest magnitude, and the distance between numbers below ``min_normal``.
        nan_codes: the codes of NaN.
        has_infinity: False.

    Example:
        >>> FP8Format().max_value
        448.0
    """

    exponent_bits: int = 4
    mantissa_bits: int = 3
    max_value: float = 448.0
    min_normal: float = 2.0**-6
    min_subnormal: float = 2.0**-9
    nan_codes: tuple[int, int] = (0x7F, 0xFF)
    has_infinity: bool = False


@validate_arguments
def fp8_compute_scale(
    x: Tensor, granularity: Granularity = "tensor", dim: int = -1, block: int = 128
) -> Tensor:
    """The scale that takes the largest finite magnitude to 448: fp32 448 / max|x| in [2^-126, 2^127], 1 for zeros.

    NaN and infinities are left out of the maximum. Source: docs/semantics/fp8.md §3.3, design document [002].

    Args:
        x: any shape and strides; float32, float16 or bfloat16.
        granularity: "tensor" for one scale, "channel" for one per slice along ``dim`` (a maximum over ``dim``),
            "block" for one per ``block`` elements along ``dim``, of which the last may have fewer.
        dim: the dim that a channel or a block reduces.
        block: elements of a block, at least 1.

    Returns:
        fp32 of shape [], or that of x with ``dim`` of n reduced to 1 or to ceil(n / block).

    Raises:
        UnsupportedDtypeError: another dtype.
        ValueError: another granularity, or block below 1. IndexError: no such dim.

    Example:
        >>> fp8_compute_scale(torch.tensor([1.0, -4.0]))  # 448 / 4
        tensor(112.)
    """
    return torch.ops.htree.fp8_compute_scale(x, granularity, dim, block)


def _scale_tensor(
    op: str, x: Tensor, scale: Tensor | float | None, granularity: str, dim: int, block: int
) -> Tensor | None:
    """A number becomes the scale of every group, or one scale where the grouping is wrong, which the op refuses."""
    if scale is None or isinstance(scale, Tensor):
        return scale
    check_number(op, "scale", scale, positive=True)
    if scale <= 2.0**-150:  # rounds to 0
        raise ValueError(f"{op}: scale must be positive and finite in float32, got {scale}")
    sizes = list(x.shape)
    if granularity == "tensor" or not -len(sizes) <= dim < len(sizes) or block < 1:
        sizes = []
    else:
        sizes[dim] = 1 if granularity == "channel" else (sizes[dim] + block - 1) // block
    return torch.full(sizes, scale, dtype=torch.float32, device=x.device)


@validate_arguments
def fp8_quantize(
    x: Tensor,
    scale: Tensor | float | None = None,
    granularity: Granularity = "tensor",
    dim: int = -1,
    block: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of x·s: the product is rounded to fp32, cut to ±448, and rounded to the nearest code, ties to even.

    The sign of zero is kept, NaN stays NaN, ±Inf becomes ±448. A row's or a block's own scale takes one pass over
    x on a GPU, a tensor's or a column's two. Source: docs/semantics/fp8.md §3.3, design document [002].

    Args:
        x: any shape and strides; float32, float16 or bfloat16.
        scale: fp32 of the shape that :func:`fp8_compute_scale` returns, or a number for all groups; computed by
            default. It multiplies x, so it is the reciprocal of the scale of ``torch._scaled_mm``. Values must be
            positive and finite; they are checked where x is on the CPU.
        granularity, dim, block: see :func:`fp8_compute_scale`.

    Returns:
        (q float8_e4m3fn of the shape of x, the scale used as a fresh tensor, int32 [] number of overflows). An
        overflow is an element with ``|x·s| > 464``, the rounding limit of 448, or an infinite one.

    Raises:
        UnsupportedDtypeError: x or scale has another dtype.
        ShapeMismatchError: scale has not the shape that the granularity implies.
        DeviceError: scale lies on another device.
        ValueError: another granularity, block below 1, or a scale that is not positive and finite.

    Example:
        >>> q, scale, overflows = fp8_quantize(torch.tensor([1.0, -4.0]))
        >>> q.dtype, scale.item(), overflows.item()
        (torch.float8_e4m3fn, 112.0, 0)
    """
    given = _scale_tensor("fp8_quantize", x, scale, granularity, dim, block)
    return torch.ops.htree.fp8_quantize(x, given, granularity, dim, block)


@validate_arguments
def fp8_dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype | None = None, block: int = 128) -> Tensor:
    """``q / scale``, divided in fp32 and rounded to ``dtype``. Source: docs/semantics/fp8.md §3.3.

    The scale is that of :func:`fp8_quantize`. Elsewhere a scale often multiplies here: pass its :func:`fp8_scale_inv`.

    Args:
        q: float8_e4m3fn codes, any shape and strides.
        scale: fp32; [], or the shape of q with one dim of n reduced to 1 or to ceil(n / block).
        dtype: float16, bfloat16 or float32; by default float32, the dtype of the scale, which holds every quotient
            of a tensor that was quantised. In float16 one beyond 65504 is infinite.
        block: elements of a block, where the scale has one entry per block; as in the quantisation.

    Raises:
        UnsupportedDtypeError: q is not float8_e4m3fn, scale not float32, or another output dtype.
        ShapeMismatchError: no grouping of q gives a scale of this shape.
        DeviceError: scale lies on another device.
        ValueError: block below 1, or a scale on the CPU that is not positive and finite.
        TypeError: dtype is not a torch.dtype.

    Example:
        >>> q, scale, _ = fp8_quantize(torch.tensor([1.0, -4.0]))
        >>> fp8_dequantize(q, scale)
        tensor([ 1., -4.])
    """
    return torch.ops.htree.fp8_dequantize(q, scale, torch.float32 if dtype is None else dtype, block)


@validate_arguments
def fp8_fake_quant(
    x: Tensor,
    scale: Tensor | float | None = None,
    granularity: Granularity = "tensor",
    dim: int = -1,
    block: int = 128,
) -> Tensor:
    """x quantised and dequantised, in its own dtype, for training with the rounding in place.

    Arguments and errors are those of :func:`fp8_quantize`. With a given scale a value is rounded up by up to 1/17, in
    float16 to infinity where that passes 65504; the computed one takes the largest value to itself. The gradient goes
    straight through the rounding: ``dx = dy where |x·s| ≤ 448, else 0``; the scale has none.

    Raises:
        NotImplementedError: scale requires a gradient.

    Example:
        >>> fp8_fake_quant(torch.tensor([1.0, -4.0, 0.3]))  # E4M3 has 3 bits of mantissa
        tensor([ 1.0000, -4.0000,  0.2857])
    """
    given = _scale_tensor("fp8_fake_quant", x, scale, granularity, dim, block)
    return torch.ops.htree.fp8_fake_quant(x, given, granularity, dim, block)


@validate_arguments
def fp8_scale_inv(scale: Tensor) -> Tensor:
    """1 / scale in fp32: from the scales of this package, which multiply when quantising, to those of
    ``torch._scaled_mm`` and most FP8 checkpoints, which multiply the product or the codes; and back.

    Args:
        scale: any shape and floating dtype.

    Returns:
        fp32 of the shape of ``scale``.
    """
    return scale.float().reciprocal()


@validate_arguments_as(x="tensor")
def handle_fp8_overflow(
    tensor: Tensor,
    scale: Tensor | float,
    max_attempts: int = 3,
    *,
    on_fail: Literal["raise", "saturate"] = "raise",
    granularity: Granularity = "tensor",
    dim: int = -1,
    block: int = 128,
) -> tuple[Tensor, Tensor]:
    """Quantises with the first of s, s/2, s/4, … s/2^max_attempts at which nothing overflows.

    So the first scale may be up to 2^max_attempts times too large. The function waits for the device once per
    attempt, because the number of overflows decides. Source: docs/semantics/fp8.md §3.3, design document [002].

    Args:
        tensor: see :func:`fp8_quantize`.
        scale: the first scale, a tensor or a number; all groups are halved together.
        max_attempts: halvings, at least 1; max_attempts + 1 scales are tried.
        on_fail: "raise", or "saturate" to return the codes of the last scale, with overflows at ±448. With
            "saturate" infinities are saturated and do not count.
        granularity, dim, block: see :func:`fp8_compute_scale`.

    Returns:
        (q, the scale used).

    Raises:
        NumericalOverflowError: values overflow at the last scale, or an infinity is found at the first one.
        ValueError: max_attempts below 1, another ``on_fail``, and what :func:`fp8_quantize` raises.

    Example:
        >>> q, scale = handle_fp8_overflow(torch.tensor([1.0, -4.0]), 448.0)  # a quarter of it holds -4
        >>> scale.item()
        112.0
    """
    if max_attempts < 1:
        raise ValueError(f"handle_fp8_overflow: max_attempts must be at least 1, got {max_attempts}")
    if on_fail not in ("raise", "saturate"):
        raise ValueError(f"handle_fp8_overflow: on_fail must be 'raise' or 'saturate', got {on_fail!r}")
    given: Any = _scale_tensor("handle_fp8_overflow", tensor, scale, granularity, dim, block)
    num_infinite: int | None = None
    for _ in range(max_attempts + 1):
        q, used, num_overflow = torch.ops.htree.fp8_quantize(tensor, given, granularity, dim, block)
        given = given / 2
        overflows = int(num_overflow)
        if overflows and num_infinite is None:
            num_infinite = int(tensor.isinf().sum())
            if num_infinite and on_fail == "raise":
                raise NumericalOverflowError(
                    f"handle_fp8_overflow: tensor holds {num_infinite} infinite values, which no scale fits",
                    max_value=math.inf,
                    scale=float(used.max()),
                    attempts=1,
                )
        if overflows == (num_infinite or 0):
            return q, used
    if on_fail == "saturate":
        return q, used
    largest = float(tensor.abs().where(tensor.isfinite(), 0).max())
    raise NumericalOverflowError(
        f"handle_fp8_overflow: {overflows} values overflow at each of {max_attempts + 1} scales, the last of them "
        f"{float(used.max()):g}; the largest magnitude is {largest:g}",
        max_value=largest,
        scale=float(used.max()),
        attempts=max_attempts + 1,
    )
