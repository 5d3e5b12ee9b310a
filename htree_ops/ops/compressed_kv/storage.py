"""Where the compressed rows of a cache lie: one tensor per part, or pages of a pool under a block table.

Both kinds keep keys and values side by side and count only pages. How many tokens a sequence has, the
cache knows (:mod:`htree_ops.ops.compressed_kv.cache`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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

    def cast(self, rows: CompressedKV, old: torch.dtype, new: torch.dtype) -> CompressedKV:
        """Rows whose 16-bit values are of dtype ``old``, with such values of dtype ``new``; others as they are."""
        if self.bits != 16 or old == new:
            return rows
        return rows._replace(values=rows.values.view(old).to(new).view(torch.uint8))

    def allocate(self, lead: int, heads: int, rows: int, device: torch.device) -> CompressedKV:
        """Zeros [lead, heads, rows, ...]."""
        return CompressedKV(
            torch.zeros(lead, heads, rows, self.head_dim // WORD, dtype=torch.int64, device=device),
            torch.zeros(lead, heads, rows, row_bytes(self.keep, self.bits), dtype=torch.uint8, device=device),
            torch.zeros(lead, heads, 0 if self.bits == 16 else rows, dtype=torch.float16, device=device),
        )


def _copy_parts(to: Sequence[CompressedKV], source: Sequence[CompressedKV]) -> None:
    for mine, theirs in zip(to, source, strict=True):
        for target, x in zip(mine, theirs, strict=True):
            target.copy_(x)


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

    def missing_pages(self, growth: Iterable[tuple[int, int, int]]) -> int:
        """How many pages are lacking for more rows: none, since all rows exist."""
        return 0

    def pages_beyond_pool(self, lengths: Sequence[int]) -> int:
        """How many pages are lacking for sequences of these lengths and nothing else: none."""
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

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets the rows of a sequence behind its first ``length``."""

    def copy_from(self, other: ContiguousRows) -> None:
        """Takes the rows of other storage of the same sizes."""
        _copy_parts(self.parts, other.parts)

    def clear(self) -> None:
        """Forgets every sequence."""


class PagedRows:
    """Rows in pages of a pool [num_pages, H_kv, page, ...]; sequences may share pages after a reorder.

    Rows of a page are written once and never change, so that sharing needs no copies. A page that a truncation has
    opened again is copied before it is written to, if other sequences use it.

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
        self.num_pages = num_pages
        self.free = list(range(num_pages))[::-1]

    def missing_pages(self, growth: Iterable[tuple[int, int, int]]) -> int:
        """How many pages are lacking for more rows; ``growth`` has sequences, their first new row and the end."""
        users = Counter(self.users)
        needed = 0
        for sequence, start, stop in growth:
            needed += -(-stop // self.page) - -(-start // self.page)
            if start % self.page and start < stop:
                page = self.pages[sequence][start // self.page]
                needed += users[page] > 1
                users[page] -= 1
        return max(0, needed - len(self.free))

    def pages_beyond_pool(self, lengths: Sequence[int]) -> int:
        """How many pages are lacking for sequences of these lengths and nothing else."""
        return max(0, sum(-(-n // self.page) for n in lengths) - self.num_pages)

    def _open_pages(self, sequences: Sequence[int], starts: Sequence[int], size: int) -> None:
        """Gives each sequence pages of its own for its rows start ... start + size - 1."""
        changed: list[tuple[int, int, int]] = []  # sequence, column, page
        copies: list[tuple[int, int]] = []
        for sequence, start in zip(sequences, starts, strict=True):
            pages, column = self.pages[sequence], start // self.page
            if start % self.page and self.users[pages[column]] > 1:
                copies.append((pages[column], self.free[-1]))
                self.users[pages[column]] -= 1
                pages.pop()
            while len(pages) < -(-(start + size) // self.page):
                changed.append((sequence, len(pages), self.free[-1]))
                self.users[self.free[-1]] += 1
                pages.append(self.free.pop())
        if copies:
            old, new = torch.tensor(copies, device=self.block_table.device).T
            for x in (x for part in self.parts for x in part):
                x[new] = x[old]
        if changed:
            lines, columns, places = torch.tensor(changed, device=self.block_table.device).T
            self.block_table[lines, columns] = places.int()

    def write(self, sequences: Sequence[int], starts: Sequence[int], rows: Sequence[CompressedKV]) -> None:
        """Stores rows [n, H_kv, S, ...] of keys and values as tokens start ... start + S - 1 of n sequences."""
        size, page = rows[0].bitmap.shape[2], self.page
        if not size:
            return
        self._open_pages(sequences, starts, size)
        whole = size % page == 0 and not any(start % page for start in starts)
        step = page if whole else 1
        at = [
            (i, start + t) for i, start in zip(sequences, starts, strict=True) for t in range(0, size, step)
        ]
        places, slots = torch.tensor(
            [(self.pages[i][t // page], t % page) for i, t in at], device=self.block_table.device
        ).T
        for part, source in zip(self.parts, rows, strict=True):
            for target, x in zip(part, source, strict=True):
                if not x.shape[2]:  # no scales for 16 bits
                    continue
                if whole:
                    pages = x.unflatten(2, (size // page, page)).transpose(1, 2).flatten(0, 1)
                    target.index_copy_(0, places, pages)
                else:
                    target[places, :, slots] = x.transpose(1, 2).flatten(0, 1)

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

    def _drop(self, sequence: int, count: int) -> None:
        """Gives back the pages of a sequence behind its first ``count``."""
        for page in self.pages[sequence][count:]:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)
                del self.users[page]
        del self.pages[sequence][count:]

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets the rows of a sequence behind its first ``length``; pages that nobody else uses are free again."""
        self._drop(sequence, -(-length // self.page))
        self.block_table[sequence, len(self.pages[sequence]) :] = -1

    def copy_from(self, other: PagedRows) -> None:
        """Takes the rows and pages of other storage of the same sizes."""
        _copy_parts(self.parts, other.parts)
        self.block_table.copy_(other.block_table)
        self.pages = [list(pages) for pages in other.pages]
        self.users, self.free = Counter(other.users), list(other.free)

    def clear(self) -> None:
        """Forgets every sequence; pages that no other sequence uses are free again."""
        for sequence in range(len(self.pages)):
            self._drop(sequence, 0)
        self.block_table.fill_(-1)
