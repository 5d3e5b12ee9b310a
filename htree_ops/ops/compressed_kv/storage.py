"""Where the compressed rows of a cache lie: one tensor per part, or pages of a pool under a block table.

Both kinds keep keys and values side by side and count only pages. How many tokens a sequence has, the
cache knows (:mod:`htree_ops.ops.compressed_kv.cache`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from htree_ops.ops.compressed_kv.format import WORD, CompressedKV, check_format, row_bytes

__all__ = ["ContiguousRows", "PagedRows", "RowFormat"]


@dataclass(frozen=True)
class RowFormat:
    """What one compressed row is: D channels, of which ``keep`` are stored in ``bits`` bits each."""

    head_dim: int
    keep: int
    bits: int

    def check(self, op: str, prefix: str) -> None:
        """Checks as :func:`htree_ops.ops.compressed_kv.format.check_format` does."""
        check_format(op, self.head_dim, self.keep, self.bits, prefix)

    def num_bytes(self) -> int:
        """Bytes of one row: bitmap, values and scale."""
        return self.head_dim // 8 + row_bytes(self.keep, self.bits) + (0 if self.bits == 16 else 2)

    def allocate(self, lead: int, heads: int, rows: int, device: torch.device) -> CompressedKV:
        """Zeros [lead, heads, rows, ...]."""
        return CompressedKV(
            torch.zeros(lead, heads, rows, self.head_dim // WORD, dtype=torch.int64, device=device),
            torch.zeros(lead, heads, rows, row_bytes(self.keep, self.bits), dtype=torch.uint8, device=device),
            torch.zeros(lead, heads, 0 if self.bits == 16 else rows, dtype=torch.float16, device=device),
        )


class ContiguousRows:
    """Rows [B, H_kv, capacity, ...]: each sequence has a fixed place.

    Args:
        formats: of keys and values.
        batch, heads, capacity: B, H_kv and tokens per sequence.
    """

    block_table: Tensor | None = None

    def __init__(
        self, formats: Sequence[RowFormat], batch: int, heads: int, capacity: int, device: torch.device
    ) -> None:
        self.parts = [f.allocate(batch, heads, capacity, device) for f in formats]

    def missing_pages(self, tokens: Sequence[int]) -> int:
        """How many pages are lacking for that many more tokens per sequence: none, since all rows exist."""
        return 0

    def write(self, sequences: Sequence[int], starts: Sequence[int], rows: Sequence[CompressedKV]) -> None:
        """Stores rows [n, H_kv, S, ...] of keys and values as tokens start ... start + S - 1 of n sequences."""
        for part, new in zip(self.parts, rows, strict=True):
            for target, source in zip(part, new, strict=True):
                size = source.shape[2]
                if len(sequences) == target.shape[0] and len(set(starts)) == 1:
                    target[:, :, starts[0] : starts[0] + size] = source
                    continue
                for row, sequence, start in zip(source, sequences, starts, strict=True):
                    target[sequence, :, start : start + size] = row

    def read(self, sequence: int, length: int) -> list[CompressedKV]:
        """Rows [H_kv, length, ...] of the first ``length`` tokens, keys and values."""
        return [CompressedKV(*(x[sequence, :, :length] for x in part)) for part in self.parts]

    def reorder(self, index: Sequence[int], length: int) -> None:
        """Sequence i becomes what sequence index[i] was, in its first ``length`` tokens."""
        for part in self.parts:
            for x in part:
                used = x[:, :, :length]
                places = torch.tensor(index, dtype=torch.int64, device=x.device)
                used.copy_(used.index_select(0, places))

    def clear(self) -> None:
        """Forgets every sequence."""


class PagedRows:
    """Rows in pages of a pool [num_pages, H_kv, page, ...]; sequences may share pages after a reorder.

    A page is written once, whole, and never changes, so that sharing needs no copies.

    Args:
        formats: of keys and values.
        num_pages: of the pool; page: tokens of each. The op needs a page for the table to point to, so a
            pool without pages holds one that is never given out.
        batch, heads, capacity: B, H_kv and tokens per sequence, a multiple of page.

    Attributes:
        block_table: int32 [B, max(1, capacity / page)] on the device; -1 where there is no page.
    """

    def __init__(
        self,
        formats: Sequence[RowFormat],
        batch: int,
        heads: int,
        capacity: int,
        device: torch.device,
        *,
        page: int,
        num_pages: int,
    ) -> None:
        self.parts = [f.allocate(max(1, num_pages), heads, page, device) for f in formats]
        self.page = page
        columns = max(1, capacity // page)
        self.block_table = torch.full((batch, columns), -1, dtype=torch.int32, device=device)
        self.pages: list[list[int]] = [[] for _ in range(batch)]
        self.users: Counter[int] = Counter()
        self.free = list(range(num_pages))[::-1]

    def missing_pages(self, tokens: Sequence[int]) -> int:
        """How many pages are lacking for that many more tokens per sequence."""
        return max(0, sum(n // self.page for n in tokens) - len(self.free))

    def write(self, sequences: Sequence[int], starts: Sequence[int], rows: Sequence[CompressedKV]) -> None:
        """Stores rows [n, H_kv, S, ...] behind the pages of n sequences; starts and S are multiples of the page."""
        count = rows[0].bitmap.shape[2] // self.page
        if not count:
            return
        new: list[int] = []
        slots: list[int] = []
        for sequence, start in zip(sequences, starts, strict=True):
            first = start // self.page
            self.pages[sequence][first:] = [self.free.pop() for _ in range(count)]
            new += self.pages[sequence][first:]
            slots += range(first, first + count)
        self.users.update(new)
        places, columns, lines = torch.tensor(
            (new, slots, [sequence for sequence in sequences for _ in range(count)]),
            device=self.block_table.device,
        )
        self.block_table[lines, columns] = places.int()
        for part, source in zip(self.parts, rows, strict=True):
            for target, x in zip(part, source, strict=True):
                if x.shape[2]:  # no scales for 16 bits
                    pages = x.unflatten(2, (count, self.page)).transpose(1, 2).flatten(0, 1)
                    target.index_copy_(0, places, pages)

    def read(self, sequence: int, length: int) -> list[CompressedKV]:
        """Rows [H_kv, length, ...] of the first ``length`` tokens, keys and values; a copy."""
        places = torch.tensor(self.pages[sequence], dtype=torch.int64, device=self.block_table.device)
        gathered = ([x[places].transpose(0, 1).flatten(1, 2) for x in part] for part in self.parts)
        return [CompressedKV(*(x[:, :length] for x in part)) for part in gathered]

    def reorder(self, index: Sequence[int], length: int) -> None:
        """Sequence i becomes what sequence index[i] was: the pages are shared, nothing moves."""
        kept = [list(self.pages[i]) for i in index]
        for pages in kept:
            self.users.update(pages)
        places = torch.tensor(index, dtype=torch.int64, device=self.block_table.device)
        table = self.block_table.index_select(0, places)
        self.clear()
        self.pages = kept
        self.block_table.copy_(table)

    def clear(self) -> None:
        """Forgets every sequence; pages that no other sequence uses are free again."""
        for pages in self.pages:
            self.users.subtract(pages)
            self.free += [page for page in pages if not self.users[page]]
            for page in pages:
                if not self.users[page]:
                    del self.users[page]
        self.pages = [[] for _ in self.pages]
        self.block_table.fill_(-1)
