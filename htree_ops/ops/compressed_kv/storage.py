"""Where the compressed rows of a cache lie: one tensor per part, or pages of a pool under a block table.

Both kinds keep keys and values side by side. How many tokens a sequence has, the cache knows
(:mod:`htree_ops.ops.compressed_kv.cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from htree_ops.ops.compressed_kv.format import WORD, CompressedKV, check_format, row_bytes
from htree_ops.ops.paging import Change, Pages

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

    def check_room(self, method: str, lengths: Sequence[int]) -> None:
        """Raises OutOfPagesError where pages are lacking for sequences of these lengths: never, for all rows exist."""

    def check_pool(self, method: str, lengths: Sequence[int]) -> None:
        """The same for sequences of these lengths and nothing else."""

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

    def reorder(self, index: Sequence[int], lengths: Sequence[int]) -> None:
        """Sequence i becomes what sequence index[i] was, of ``lengths[index[i]]`` tokens."""
        most = max(lengths, default=0)
        for part in self.parts:
            for x in part:
                used = x[:, :, :most]
                places = torch.tensor(index, dtype=torch.int64, device=x.device)
                used.copy_(used.index_select(0, places))

    def truncate(self, lengths: Sequence[int], kept: Sequence[int]) -> None:
        """Forgets the rows of sequences of ``lengths[b]`` tokens behind their first ``kept[b]``."""

    def copy_from(self, other: ContiguousRows) -> None:
        """Takes the rows of other storage of the same sizes."""
        _copy_parts(self.parts, other.parts)

    def clear(self) -> None:
        """Forgets every sequence."""


class PagedRows:
    """Rows in pages of a pool [num_pages, H_kv, page, ...]; sequences may share full pages after a reorder.

    Args:
        formats: of keys and values.
        num_pages: of the pool; page: tokens of each. The op needs a page for the table to point to, so a
            pool without pages holds one that is never given out.
        batch, heads, capacity: B, H_kv and tokens per sequence, a multiple of page.
    """

    def __init__(
        self,
        op: str,
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
        self.pages = Pages(op, batch, capacity, page, num_pages, device)

    @property
    def block_table(self) -> Tensor:
        """int32 [B, max(1, capacity / page)] on the device; -1 where there is no page."""
        return self.pages.block_table

    def check_room(self, method: str, lengths: Sequence[int]) -> None:
        """Raises OutOfPagesError where pages are lacking for sequences of these lengths."""
        self.pages.check(method, self.pages.growth(lengths))

    def check_pool(self, method: str, lengths: Sequence[int]) -> None:
        """Raises OutOfPagesError where pages are lacking for sequences of these lengths and nothing else."""
        self.pages.check_pool(method, lengths)

    def _move(self, method: str, change: Change) -> None:
        """Makes a change of pages, with its copies."""
        copies = self.pages.make(method, change)
        if copies:
            old, new = torch.tensor(copies, device=self.block_table.device).T
            for x in (x for part in self.parts for x in part):
                x[new] = x[old]

    def write(self, sequences: Sequence[int], starts: Sequence[int], rows: Sequence[CompressedKV]) -> None:
        """Stores rows [n, H_kv, S, ...] of keys and values as tokens start ... start + S - 1 of n sequences."""
        size, page = rows[0].bitmap.shape[2], self.pages.page_size
        if not size:
            return
        ends = [0] * len(self.pages.rows)
        for i, start in zip(sequences, starts, strict=True):
            ends[i] = start + size
        self._move("append", self.pages.growth(ends))
        whole = size % page == 0 and not any(start % page for start in starts)
        step = page if whole else 1
        at = [
            (i, start + t) for i, start in zip(sequences, starts, strict=True) for t in range(0, size, step)
        ]
        places, slots = torch.tensor(
            [(self.pages.rows[i][t // page], t % page) for i, t in at], device=self.block_table.device
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
        row = self.pages.rows[sequence][: self.pages.pages_for(length)]
        places = torch.tensor(row, dtype=torch.int64, device=self.block_table.device)
        gathered = ([x[places].transpose(0, 1).flatten(1, 2) for x in part] for part in self.parts)
        return [CompressedKV(*(x[:, :length] for x in part)) for part in gathered]

    def reorder(self, index: Sequence[int], lengths: Sequence[int]) -> None:
        """Sequence i becomes what sequence index[i] was: full pages are shared."""
        self._move("reorder_", self.pages.reorder(index, lengths))

    def truncate(self, lengths: Sequence[int], kept: Sequence[int]) -> None:
        """Forgets the rows of sequences of ``lengths[b]`` tokens behind their first ``kept[b]``."""
        self._move("truncate", self.pages.cut(lengths, kept))

    def copy_from(self, other: PagedRows) -> None:
        """Takes the rows and pages of other storage of the same sizes."""
        _copy_parts(self.parts, other.parts)
        self.pages.copy_from(other.pages)

    def clear(self) -> None:
        """Forgets every sequence."""
        self.pages.clear()
