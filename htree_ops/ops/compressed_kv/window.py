"""The dense tokens of a compressed cache, and the rows that it compressed last (docs/semantics §4.6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DenseWindow:
    """Keys and values [B, H_kv, slots, D]: the dense tokens of a sequence are in slots 0, 1, ... in their order.

    When a whole chunk is compressed, the newest R tokens move to the front. The rows that were compressed stay in the
    slots behind them until tokens are written there: row j of the chunk in slot R + j. The first ``spare`` slots are
    needed first, so their rows are kept aside. The chunk can therefore be made dense again, bit for bit, until the
    window has grown beyond R + spare tokens.

    Args:
        sizes: B, H_kv and slots, R + C or the capacity where that is less.
        widths: D of keys and of values.
        recent: R. chunk: C. spare: at most C.

    Attributes:
        parts: keys and values.
        whole: for each sequence, whether the rows of its last chunk are all there.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        recent: int,
        chunk: int,
        spare: int,
    ) -> None:
        batch, heads, slots = sizes
        self.recent, self.chunk = recent, chunk
        self.spare = spare if slots == recent + chunk else 0  # a smaller window never compresses anything
        self.parts = [torch.zeros(batch, heads, slots, w, dtype=dtype, device=device) for w in widths]
        self.aside = [torch.zeros(batch, heads, self.spare, w, dtype=dtype, device=device) for w in widths]
        self.whole = [False] * batch

    def tensors(self) -> list[Tensor]:
        """Everything it has allocated."""
        return [*self.parts, *self.aside]

    def put(
        self, k: Tensor, v: Tensor, starts: Sequence[int], sizes: Sequence[int], dense: Sequence[int]
    ) -> None:
        """Writes rows ``starts[b]`` ... ``starts[b] + sizes[b] - 1`` of sequence b behind its ``dense[b]`` tokens."""
        if len({*zip(starts, sizes, dense, strict=True)}) == 1:
            start, size, first = starts[0], sizes[0], dense[0]
            for target, x in zip(self.parts, (k, v), strict=True):
                target[:, :, first : first + size] = x[:, :, start : start + size]
            return
        rows = [
            (b, start + i, first + i)
            for b, (start, size, first) in enumerate(zip(starts, sizes, dense, strict=True))
            for i in range(size)
        ]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3).T
        sequence, source, slot = table.to(k.device)
        for target, x in zip(self.parts, (k, v), strict=True):
            target[sequence, :, slot] = x[sequence, :, source]

    def put_at(self, k: Tensor, v: Tensor, first: Tensor) -> None:
        """Writes all rows of k and v from slot ``first[b]`` of sequence b on, which only the device knows."""
        slots = first.long()[:, None, None, None] + torch.arange(k.shape[2], device=first.device)[:, None]
        for target, x in zip(self.parts, (k, v), strict=True):
            target.scatter_(2, slots.expand(x.shape), x)

    def grown(self, dense: Sequence[int]) -> None:
        """Notes that the sequences have had ``dense`` tokens."""
        most = self.recent + self.spare
        self.whole = [whole and n <= most for whole, n in zip(self.whole, dense, strict=True)]

    def oldest(self, sequences: Sequence[int], size: int) -> list[Tensor]:
        """Keys and values [n, H_kv, size, D] of the oldest tokens of n sequences."""
        if len(sequences) == len(self.whole):
            return [x[:, :, :size] for x in self.parts]
        places = torch.tensor(sequences, dtype=torch.int64, device=self.parts[0].device)
        return [x.index_select(0, places)[:, :, :size] for x in self.parts]

    def drop(self, sequences: Sequence[int], size: int) -> None:
        """Takes the oldest ``size`` tokens, which are compressed, from windows of ``size`` + R tokens."""
        recent, spare, chunk = self.recent, self.spare, self.chunk
        places = torch.tensor(sequences, dtype=torch.int64, device=self.parts[0].device)
        for x, aside in zip(self.parts, self.aside, strict=True):
            old = x.index_select(0, places)
            x[:, :, :recent].index_copy_(0, places, old[:, :, size : size + recent])
            if size == chunk:
                x[:, :, recent + spare :].index_copy_(0, places, old[:, :, spare:chunk])
                aside.index_copy_(0, places, old[:, :, :spare])
        for b in sequences:
            self.whole[b] = size == chunk

    def keep(self, sequence: int, k: Tensor, v: Tensor, dense: int) -> None:
        """Takes the last compressed rows [H_kv, C, D] of a sequence from elsewhere, if they fit."""
        self.whole[sequence] = dense <= self.recent + self.spare
        if self.whole[sequence]:
            for target, aside, x in zip(self.parts, self.aside, (k, v), strict=True):
                aside[sequence] = x[:, : self.spare]
                target[sequence, :, self.recent + self.spare :] = x[:, self.spare :]

    def restore(self, sequence: int, dense: int) -> None:
        """Puts the rows of the last chunk before the ``dense`` <= R tokens of a sequence; they must be whole."""
        for target, aside in zip(self.parts, self.aside, strict=True):
            x = target[sequence]
            rows = torch.cat((aside[sequence], x[:, self.recent + self.spare :], x[:, :dense]), dim=1)
            x[:, : self.chunk + dense] = rows
        self.whole[sequence] = False

    def copy_from(self, other: DenseWindow, index: Sequence[int]) -> None:
        """Takes sequences of a window of the same slots, which may be this one; index[i] becomes sequence i."""
        places = torch.tensor(index, dtype=torch.int64, device=other.parts[0].device)
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs.index_select(0, places))
        self.whole = [other.whole[i] for i in index]

    def clear(self) -> None:
        """Forgets the rows that were compressed."""
        self.whole = [False] * len(self.whole)
