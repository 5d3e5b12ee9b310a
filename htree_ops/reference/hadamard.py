"""Plain PyTorch reference of the Hadamard transform and its grouped form (docs/semantics/hadamard.md §4.1, §4.2)."""

from __future__ import annotations

import torch


def hadamard_matrix(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """H_n in Sylvester order, float64 [n, n]: H_1 = [1], H_2m = [[H_m, H_m], [H_m, -H_m]]; n a power of two.

    Entry (i, j) is -1 to the power of the number of bits that i and j share.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"n must be a power of two, got {n}")
    index = torch.arange(n, device=device)
    shared = index[:, None] & index[None, :]
    signs = torch.ones(n, n, dtype=torch.float64, device=device)
    for bit in range(n.bit_length() - 1):
        signs *= 1.0 - 2.0 * ((shared >> bit) & 1)
    return signs


def hadamard_transform(x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """scale * x @ H_n over the last dim in float64; scale defaults to n^(-1/2).

    Up to n = 1024 it is the product with the matrix as defined; beyond, two products by H_n = H_m (x) H_1024.
    """
    n = x.shape[-1]
    scale = n**-0.5 if scale is None else scale
    low = min(n, 1024)
    blocks = x.double().unflatten(-1, (n // low, low)) @ hadamard_matrix(low, x.device)
    return scale * torch.einsum("gh,...hd->...gd", hadamard_matrix(n // low, x.device), blocks).flatten(-2)


def grouped_hadamard(x: torch.Tensor, group: int, scale: float | None = None) -> torch.Tensor:
    """The transform of the concatenated rows of ``group`` adjacent heads, x [B, H, S, D], in float64.

    Exchanges heads and positions to [B, H/G, S, G·D] (element g·D + d), transforms, and goes back.
    """
    heads = x.unflatten(1, (x.shape[1] // group, group)).transpose(2, 3)
    rows = hadamard_transform(heads.flatten(-2), scale)
    return rows.unflatten(-1, (group, x.shape[-1])).transpose(2, 3).flatten(1, 2)
