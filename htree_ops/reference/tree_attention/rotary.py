"""Half-split rotary embedding and its table (docs/semantics/tree_attention.md §1.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rope_cache(
    size: int,
    dim: int,
    base: float | None = 10000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    inv_freq: Sequence[float] | None = None,
) -> Tensor:
    """Return cos and sin of position * base^(-2i/dim), computed in float64, as `dtype` [2,size,dim/2].

    base None gives the identity rotation (cos 1, sin 0). inv_freq gives dim/2 frequencies in place of base^(-2i/dim).
    Odd dim, or inv_freq of another length, raises ValueError.
    """
    if dim % 2:
        raise ValueError(f"dim must be even, got {dim}")
    positions = torch.arange(size, dtype=torch.float64, device=device)[:, None]
    if inv_freq is not None:
        if len(inv_freq) != dim // 2:
            raise ValueError(f"inv_freq must have dim/2 = {dim // 2} numbers, got {len(inv_freq)}")
        angles = positions * torch.tensor(inv_freq, dtype=torch.float64, device=device)
        return torch.stack([angles.cos(), angles.sin()]).to(dtype)
    if base is None:
        table = torch.zeros(2, size, dim // 2, dtype=dtype, device=device)
        table[0] = 1
        return table
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / max(dim, 1)
    angles = positions * base**-exponents
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def tables(
    size: int, q: Tensor, rope_base: float | None, inv_freq: Sequence[float] | None, dtype: torch.dtype
) -> Tensor:
    """Return :func:`rope_cache` for q [...,K], rounded to float32 first unless q is float64, as in the library."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    width = q.shape[-1]
    return rope_cache(max(size, 1), width, rope_base, dtype=wide, device=q.device, inv_freq=inv_freq).to(
        dtype
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [...,K] by the angles whose cos and sin [...,K/2] broadcast against its halves."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, low * sin + high * cos], dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Rotate x [B,T,H,K] at integer positions [T] or [B,T]; cos, sin are [size,K/2]. Result in x's dtype.

    A position outside [0, size) raises IndexError.
    """
    if positions.numel() and (positions.min() < 0 or positions.max() >= cos.shape[0]):
        raise IndexError(f"positions must lie in [0, {cos.shape[0]})")
    wide = torch.promote_types(x.dtype, cos.dtype)
    rows = positions if positions.dim() == 2 else positions[None]
    c, s = cos[rows.long()][:, :, None].to(wide), sin[rows.long()][:, :, None].to(wide)
    return rotate(x.to(wide), c, -s if inverse else s).to(x.dtype)
