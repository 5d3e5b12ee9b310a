"""Plain PyTorch reference of the FP8 ops (docs/semantics/fp8.md §3.3): nearest codes by search, not by bit tricks."""

from __future__ import annotations

from functools import lru_cache

import torch

MAX_VALUE = 448.0


def code_values(device: str | torch.device = "cpu") -> torch.Tensor:
    """Values of the 127 codes 0x00 … 0x7e in float64, ascending: m·2^-9 below 2^-6, (1 + m/8)·2^(e-7) from there."""
    # Computed on the CPU, where powers of two are exact.
    code = torch.arange(127, device="cpu")
    exponent, mantissa = code // 8, (code % 8).double()
    values = torch.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7).double()
    )
    return values.to(device)


@lru_cache
def _midpoints(device: torch.device) -> torch.Tensor:
    values = code_values(device)
    return (values[1:] + values[:-1]) / 2


def encode(y: torch.Tensor) -> torch.Tensor:
    """Codes, uint8, of the float values nearest to y; ties go to the even code, every NaN is 0x7f.

    A magnitude lies between two codes or beyond the last: its code is the number of midpoints below it, and on a
    midpoint the even one of the two neighbours.
    """
    magnitude = y.double().abs().nan_to_num(nan=0.0, posinf=MAX_VALUE).clamp(max=MAX_VALUE).contiguous()
    midpoints = _midpoints(y.device)
    below = torch.searchsorted(midpoints, magnitude, right=False)  # midpoints strictly below
    upto = torch.searchsorted(midpoints, magnitude, right=True)
    code = torch.where((below != upto) & (below % 2 == 1), upto, below)
    signed = code + 128 * torch.signbit(y)
    return torch.where(y.isnan(), 0x7F, signed).to(torch.uint8)


def scale_shape(shape: torch.Size, granularity: str, dim: int, block: int) -> list[int]:
    """Shape of the scales of a tensor of ``shape``."""
    if granularity == "tensor" or not shape:
        return []
    sizes = list(shape)
    sizes[dim] = 1 if granularity == "channel" else -(-sizes[dim] // block)
    return sizes


def expand_scale(
    scale: torch.Tensor, shape: torch.Size, granularity: str = "tensor", dim: int = -1, block: int = 128
) -> torch.Tensor:
    """The scale of every element, of ``shape``."""
    if granularity == "block" and shape:
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, shape[dim])
    return scale.expand(shape)


def compute_scale(
    x: torch.Tensor, granularity: str = "tensor", dim: int = -1, block: int = 128
) -> torch.Tensor:
    """fp32 448 / max|x| over finite elements, rounded once; 1 without any but 0, within [2^-126, 2^127]."""
    magnitude = x.float().abs().where(x.isfinite(), 0)
    if granularity == "tensor" or x.dim() == 0:
        largest = magnitude.max() if x.numel() else magnitude.new_zeros(())
    elif granularity == "channel":
        largest = magnitude.amax(dim, keepdim=True) if x.shape[dim] else magnitude.sum(dim, keepdim=True)
    else:
        parts = magnitude.split(block, dim) if x.shape[dim] else ()
        largest = (
            torch.cat([part.amax(dim, keepdim=True) for part in parts], dim)
            if parts
            else magnitude.new_zeros(scale_shape(x.shape, granularity, dim, block))
        )
    # The numerator is a tensor, because torch computes number / tensor as number * (1 / tensor), which rounds twice.
    quotient = torch.full_like(largest, MAX_VALUE) / largest
    return torch.where(largest == 0, 1.0, quotient).clamp(2.0**-126, 2.0**127)


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    granularity: str = "tensor",
    dim: int = -1,
    block: int = 128,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8, scale, number of elements beyond 464 or infinite) with the product x·s rounded to fp32."""
    scale = compute_scale(x, granularity, dim, block) if scale is None else scale
    y = x.float() * expand_scale(scale, x.shape, granularity, dim, block)
    return encode(y), scale, ((y.abs() > 464) | x.isinf()).sum(dtype=torch.int32)


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    granularity: str = "tensor",
    dim: int = -1,
    block: int = 128,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """q / s in ``dtype``; for dtypes below float64 rounded to fp32 first, as the ops divide in fp32."""
    values = torch.cat((code_values(codes.device), torch.tensor([torch.nan], device=codes.device).double()))
    value = values[(codes & 0x7F).long()]
    value = torch.where(codes >= 128, -value, value)
    full = expand_scale(scale, codes.shape, granularity, dim, block)
    if dtype == torch.float64:
        return value / full.double()
    return (value.float() / full).to(dtype)


def fake_quant(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    granularity: str = "tensor",
    dim: int = -1,
    block: int = 128,
) -> torch.Tensor:
    """Dequantised codes of x, in the dtype of x."""
    codes, used, _ = quantize(x, scale, granularity, dim, block)
    return dequantize(codes, used, granularity, dim, block, x.dtype)


def fake_quant_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    granularity: str = "tensor",
    dim: int = -1,
    block: int = 128,
) -> torch.Tensor:
    """dy where |x·s| ≤ 448, else 0."""
    y = x.float() * expand_scale(scale, x.shape, granularity, dim, block)
    return torch.where(y.abs() <= MAX_VALUE, dy, torch.zeros_like(dy))


def gemm(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """The float64 product of the dequantised operands: a [M, K], b [K, N] e4m3, scales [], [M, 1] and [1, N]."""
    return (a.double() / a_scale.double()) @ (b.double() / b_scale.double())
