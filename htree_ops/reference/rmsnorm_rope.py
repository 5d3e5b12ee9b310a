"""Plain PyTorch reference of RMSNorm followed by RoPE, and of its gradient (docs/semantics/rmsnorm_rope.md §3.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def full_table(table: Tensor, num_positions: int, head_dim: int) -> Tensor:
    """[S', d], [1 or B, S', d] or [1 or B, S', 1, d] with d = hd or hd/2, as float64 [1 or B, S, hd]."""
    rows = table[None] if table.dim() == 2 else table[:, :, 0] if table.dim() == 4 else table
    rows = rows[:, :num_positions].double()
    return rows if rows.shape[-1] == head_dim else torch.cat((rows, rows), dim=-1)


def head_dim_of(x: Tensor, cos: Tensor, num_heads: int | None) -> int:
    """hd of the row form: the width of the tables, or twice that where ``num_heads`` says so."""
    columns = cos.shape[-1]
    return 2 * columns if num_heads is not None and 2 * columns * num_heads == x.shape[-1] else columns


def rotate_half(n: Tensor) -> Tensor:
    """(-b, a) for the halves (a, b) of the last dim."""
    a, b = n.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """n = x r w with r = (mean x^2 + eps)^-1/2 over the last dim, float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


def _rotated(n: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """n [B, S, H, hd] rotated by the token's row of the tables."""
    cos, sin = (full_table(t, n.shape[1], n.shape[-1]).unsqueeze(-2) for t in (cos, sin))
    return n * cos + rotate_half(n) * sin


def rmsnorm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, num_heads: int | None = None
) -> Tensor:
    """x [B, S, Hd] normalised over Hd, then rotated head by head; float64 result."""
    n = normalised(x, weight, eps)
    if not n.numel():
        return n
    return _rotated(n.unflatten(-1, (-1, head_dim_of(x, cos, num_heads))), cos, sin).flatten(-2)


def head_rmsnorm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6) -> Tensor:
    """x [B, S, H, hd] normalised over hd, then rotated; float64 result."""
    n = normalised(x, weight, eps)
    return _rotated(n, cos, sin) if n.numel() else n


def _gradients(dn: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """dx and dweight from the gradient dn of n."""
    x, weight = x.double(), weight.double()
    r = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    dot = (dn * weight * x).sum(dim=-1, keepdim=True)
    dx = r * weight * dn - x * r**3 * dot / x.shape[-1]
    return dx, (dn * x * r).flatten(0, -2).sum(dim=0)


def _rotated_back(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The transposed rotation of dy [B, S, H, hd]: dy cos - rotate_half(dy sin)."""
    cos, sin = (full_table(t, dy.shape[1], dy.shape[-1]).unsqueeze(-2) for t in (cos, sin))
    return dy * cos - rotate_half(dy * sin)


def rmsnorm_rope_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    num_heads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """dx [B, S, Hd] and dweight [Hd] in float64."""
    if not x.numel():
        return x.double(), torch.zeros_like(weight, dtype=torch.float64)
    dy = dy.double().unflatten(-1, (-1, head_dim_of(x, cos, num_heads)))
    return _gradients(_rotated_back(dy, cos, sin).flatten(-2), x, weight, eps)


def head_rmsnorm_rope_backward(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """dx [B, S, H, hd] and dweight [hd] in float64."""
    if not x.numel():
        return x.double(), torch.zeros_like(weight, dtype=torch.float64)
    return _gradients(_rotated_back(dy.double(), cos, sin), x, weight, eps)
