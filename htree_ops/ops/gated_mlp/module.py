"""The gated MLP with its weights, as a module (docs/semantics/gated_mlp.md §3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from htree_ops.ops.arguments import check_int, options_of
from htree_ops.ops.gated_mlp.function import Activation, Side, gated_mlp

__all__ = ["FusedGatedMLP"]


class FusedGatedMLP(nn.Module):
    """:func:`gated_mlp` with its weights, drawn from a normal distribution with a deviation of 0.02.

    Args:
        hidden_dim: Hd.
        intermediate_dim: I.
        activation: "silu" or "gelu".
        act_on: "up" or "gate".
        device, dtype: of the weights [I, Hd].

    Raises:
        TypeError: a size is not an int. ValueError: a size below 1, an unknown activation or side.
    """

    def __init__(
        self,
        hidden_dim: int,
        intermediate_dim: int,
        activation: Activation = "silu",
        act_on: Side = "up",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("hidden_dim", hidden_dim), ("intermediate_dim", intermediate_dim)):
            check_int("FusedGatedMLP", name, value, 1)
        with options_of("FusedGatedMLP"):
            none = torch.empty(0, 0, device="meta")  # a call without rows checks the options alone
            gated_mlp(none, none, none, activation, act_on)
        self.hidden_dim = hidden_dim
        self.intermediate_dim = intermediate_dim
        self.activation = activation
        self.act_on = act_on
        size = (intermediate_dim, hidden_dim)
        self.gate_weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.up_weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws both weights anew."""
        nn.init.normal_(self.gate_weight, std=0.02)
        nn.init.normal_(self.up_weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., Hd] -> [..., I]."""
        return gated_mlp(x, self.gate_weight, self.up_weight, self.activation, self.act_on)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_dim}, {self.intermediate_dim}, activation={self.activation}, act_on={self.act_on}"
        )
