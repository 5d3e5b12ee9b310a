"""Sequences with padding at one end, moved to the front without a look at them on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from htree_ops.errors import UnsupportedDtypeError, refuse
from htree_ops.ops.arguments import check_devices, check_shape, check_tensor
from htree_ops.ops.ranks import beside


@dataclass(frozen=True)
class Padding:
    """Where the real rows of each sequence stand, from a mask [B, T] that is True at padding.

    Attributes:
        mask: the mask.
        first: the first real row, int64 [B, 1].
        broken: whether there is padding between real rows, bool [B].
    """

    mask: Tensor
    first: Tensor
    broken: Tensor

    @classmethod
    def of(cls, op: str, x: Tensor, mask: Tensor, importance: str) -> Padding:
        """Checks the key_padding_mask of x [B, T, E] and reads it on its device."""
        check_tensor(op, "key_padding_mask", mask)
        if mask.dtype != torch.bool:
            refuse(
                UnsupportedDtypeError,
                f"{op}: key_padding_mask must have dtype torch.bool, with True at padding, got {mask.dtype}",
                dtype=mask.dtype,
                supported_dtypes=(torch.bool,),
                tensor_name="key_padding_mask",
            )
        wanted = tuple(x.shape[:2])
        check_shape(op, "key_padding_mask", mask, wanted, f"[B, T] = {wanted}")
        check_devices(op, {"x": x, "key_padding_mask": mask})
        if importance == "lse":
            raise ValueError(
                f"{op}: key_padding_mask must be None where importance is 'lse', which is not causal"
            )
        real = ~mask
        steps = torch.arange(mask.shape[1], device=mask.device)
        first = real.int().argmax(1, keepdim=True) if mask.shape[1] else mask.new_zeros(len(mask), 1).long()
        inside = (steps >= first) & (steps < first + real.sum(1, keepdim=True))
        broken = (inside != real).any(1)
        if mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(broken.any()):
            raise ValueError(
                f"{op}: key_padding_mask must be True at one or both ends of each sequence and nowhere else, got "
                f"padding between tokens of sequence {int(broken.int().argmax())}"
            )
        return cls(mask, first, broken)

    def to_front(self, x: Tensor) -> Tensor:
        """x [B, T, E] with the real rows of each sequence first and zeros behind them."""
        return self._rolled(x.masked_fill(self.mask[:, :, None], 0), self.first)

    def from_front(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`to_front`: 0 at padding, and NaN in the real rows of a broken sequence."""
        back = self._rolled(x, -self.first).masked_fill(beside(self.broken[:, None, None], x), torch.nan)
        return back.masked_fill(beside(self.mask[:, :, None], x), 0)

    def _rolled(self, x: Tensor, by: Tensor) -> Tensor:
        length = max(1, x.shape[1])
        rows = (torch.arange(x.shape[1], device=x.device) + by) % length
        return x.gather(1, beside(rows[:, :, None].expand(x.shape), x))
