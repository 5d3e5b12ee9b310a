"""The lengths of a cache's sequences as the host knows them, so that it seldom waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from htree_ops.ops.arguments import check_int, check_integers

__all__ = ["HostLengths", "integers", "read_counts"]


def read_counts(counts: Tensor | Sequence[int]) -> list[int] | None:
    """The numbers, or None where only a device knows them."""
    if not isinstance(counts, Tensor):
        return list(counts)
    if counts.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    return counts.tolist()


def integers(
    name: str, argument: str, values: Tensor | Sequence[int], batch: int, device: torch.device
) -> Tensor:
    """``values`` as int32 [B] on the device.

    Raises:
        TypeError, ValueError, DeviceError: they are no such numbers.
    """
    check_integers(name, argument, values)
    if not isinstance(values, Tensor):
        for value in values:
            check_int(name, argument, value, -1)
        values = torch.tensor(list(values), dtype=torch.int32, device="cpu")
    if len(values) != batch:
        raise ValueError(f"{name}: {argument} must be {batch} integers, got {len(values)}")
    if values.dtype == torch.int64:
        values = values.clamp(-(2**31), 2**31 - 1)  # a number that int32 cannot hold is refused as one
    return values.to(device, torch.int32).contiguous()


class HostLengths:
    """What the host knows of ``lengths`` [B], which the device counts.

    Attributes:
        most: no sequence b has more than ``most[b]`` tokens; None where not even that is known, after a compiled step.
        exact: whether each has as many.
    """

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.most: list[int] | None = [0] * len(lengths)
        self.exact = True

    def read(self) -> list[int]:
        """The lengths; waits for the device where they are not known."""
        if not self.exact or self.most is None:
            self.set(self.lengths.tolist())
        assert self.most is not None
        return self.most

    def set(self, lengths: list[int]) -> None:
        """They are known now."""
        self.most, self.exact = lengths, True

    def grow(self, counts: Sequence[int], capacity: int, *, exact: bool) -> None:
        """Sequence b has got ``counts[b]`` tokens, or at most so many where that is not exact."""
        if self.most is not None:
            self.most = [min(capacity, n + new) for n, new in zip(self.most, counts, strict=True)]
        self.exact = self.exact and exact

    def lose(self) -> None:
        """A compiled step changes them, each time that it runs."""
        self.most, self.exact = None, False
