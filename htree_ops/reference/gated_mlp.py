"""Plain PyTorch reference of the gated MLP and its gradients, in float64 (docs/semantics/gated_mlp.md §3.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def activate(z: Tensor, activation: str) -> Tensor:
    """silu: z·σ(z); gelu: z·Φ(z), the form with erf."""
    if activation == "silu":
        return z * torch.sigmoid(z)
    if activation == "gelu":
        return z / 2 * torch.special.erfc(-z / math.sqrt(2))
    raise ValueError(f"activation must be silu or gelu, got {activation!r}")


def activation_slope(z: Tensor, activation: str) -> Tensor:
    """silu': σ·(1 + z·(1 - σ)); gelu': Φ(z) + z·φ(z)."""
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    if activation == "gelu":
        density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return torch.special.erfc(-z / math.sqrt(2)) / 2 + z * density
    raise ValueError(f"activation must be silu or gelu, got {activation!r}")


def as_rows(x: Tensor) -> Tensor:
    """x [..., n] as [rows, n], for empty ones too."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def products(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(g, u) = (x Wg^T, x Wu^T), [..., I] in float64."""
    x = x.double()
    return x @ gate_weight.double().mT, x @ up_weight.double().mT


def gated_mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str = "silu", act_on: str = "up"
) -> Tensor:
    """g · act(u) [..., I] in float64; act(g) · u with ``act_on="gate"``."""
    g, u = products(x, gate_weight, up_weight)
    return g * activate(u, activation) if act_on == "up" else activate(g, activation) * u


def gated_mlp_backward(
    dy: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: str = "silu",
    act_on: str = "up",
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dgate_weight, dup_weight) in float64: dg = dy·act(u), du = dy·g·act'(u), then the products' own."""
    g, u = products(x, gate_weight, up_weight)
    dy = dy.double()
    if act_on == "up":
        dg, du = dy * activate(u, activation), dy * g * activation_slope(u, activation)
    else:
        dg, du = dy * u * activation_slope(g, activation), dy * activate(g, activation)
    dx = dg @ gate_weight.double() + du @ up_weight.double()
    rows = as_rows(x.double())
    return dx, as_rows(dg).mT @ rows, as_rows(du).mT @ rows
