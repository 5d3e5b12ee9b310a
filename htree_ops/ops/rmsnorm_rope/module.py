"""RMSNorm with its weight, followed by RoPE, as a module (docs/semantics/rmsnorm_rope.md §3.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from htree_ops.ops.arguments import FLOATING_AND_DOUBLE, check_int, check_option_dtype, reraise_as
from htree_ops.ops.rmsnorm_rope.function import rmsnorm_rope


class FusedRMSNormRoPE(nn.Module):
    """:func:`rmsnorm_rope` with its weight.

    Args:
        hidden_dim: Hd.
        head_dim: hd; even, divides Hd.
        eps: added to the mean of squares.
        device, dtype: of the weight [Hd], which starts as ones.

    Raises:
        ValueError: a size is below 1, head_dim is odd or does not divide hidden_dim, or eps is negative or not
            finite.
        TypeError: a size is not an int, eps is not a number, or the op does not compute dtype (UnsupportedDtypeError).

    Example:
        >>> angles = torch.randn(10, 64)
        >>> FusedRMSNormRoPE(4 * 64, 64)(torch.randn(1, 10, 4 * 64), angles.cos(), angles.sin()).shape
        torch.Size([1, 10, 256])
    """

    def __init__(
        self,
        hidden_dim: int,
        head_dim: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_int(name, "hidden_dim", hidden_dim, 1)
        check_int(name, "head_dim", head_dim, 0)
        with reraise_as(name):
            row = torch.empty(2, device="meta")  # a call without rows checks eps alone
            rmsnorm_rope(row.expand(0, 0, 2), row, row.expand(1, 2), row.expand(1, 2), eps)
        if dtype is not None:
            check_option_dtype(name, dtype, FLOATING_AND_DOUBLE)
        if head_dim < 2 or head_dim % 2 or hidden_dim % head_dim:
            raise ValueError(
                f"{name}: head_dim must be even and divide hidden_dim = {hidden_dim}, got {head_dim}"
            )
        self.hidden_dim = hidden_dim
        self.head_dim = head_dim
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, Hd] -> [B, S, Hd]; cos and sin [S, d], [1 or B, S, d] or [1 or B, S, 1, d], d = hd or hd/2."""
        return rmsnorm_rope(x, self.weight, cos, sin, self.eps, self.hidden_dim // self.head_dim)

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}, head_dim={self.head_dim}, eps={self.eps}"
