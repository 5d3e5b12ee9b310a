"""The lengths of a cache's sequences as the host knows them, and what the device records where they are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from htree_ops.ops.arguments import check_integers
from htree_ops.ops.paging import host_integers

#: A length that a cache refuses itself, without the op.
WRONG_LENGTH = 4

#: The bits of csrc/ops/tree_cache/lengths.h.
_WORDS = {
    1: "was given tokens beyond the capacity",
    2: "has no page for tokens that it was given: reserve() takes them before a graph runs",
    WRONG_LENGTH: "was given a negative length or one beyond the call's tokens, or truncated to more than it holds",
    8: "was truncated inside a stride whose leader's lists are gone",
    16: "has a query whose leader is neither in the call nor in the ring of lists",
    32: "was truncated on the device into pages that it shares with others",
    64: "has a page in its table that is none of the pool",
    128: "was truncated inside a node whose tokens are left in fewer bits only",
}


def counts_of(
    name: str, values: Tensor | Sequence[int], batch: int, least: int, most: int, device: torch.device
) -> tuple[Tensor, list[int] | None]:
    """``values``, called lengths, as int32 [B] on the device, and as a list where the host knows it without a wait."""
    if isinstance(values, Tensor) and (values.device.type != "cpu" or torch.compiler.is_compiling()):
        check_integers(name, "lengths", values)
        if len(values) != batch:
            raise ValueError(f"{name}: lengths must be {batch} numbers, got {len(values)}")
        if values.dtype == torch.int64:
            values = values.clamp(-(2**31), 2**31 - 1)  # a number that int32 cannot hold is refused as one
        return values.to(device, torch.int32).contiguous(), None
    numbers = host_integers(name, "lengths", values, batch, least, most)
    return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(device), numbers


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


def in_words(errors: Sequence[int]) -> str:
    """The errors of all sequences, by their numbers."""
    return "; ".join(
        f"sequence {b} {words}"
        for b, bits in enumerate(errors)
        for bit, words in _WORDS.items()
        if bits & bit
    )
