"""Where the compressed rows of a cache lie. How many tokens a sequence has, the cache knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from htree_ops.ops.compressed_kv.format import WORD, CompressedKV, row_bytes
from htree_ops.ops.paging import Change, Pages


@dataclass(frozen=True)
class RowFormat:
    """What one compressed row is: D channels, of which ``keep`` are stored in ``bits`` bits each."""

    head_dim: int
    keep: int
    bits: int

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


class StoredRows:
    """The compressed rows of all sequences: a place for each, [B, H_kv, capacity, ...], or pages of a pool.

    Pages are [num_pages, H_kv, page_size, ...], and sequences may share full ones after a reorder.

    Args:
        formats: of keys and values. batch, heads, capacity: B, H_kv and tokens per sequence, a multiple of page_size.
        page_size: tokens of a page; None is a place for each sequence. num_pages: of the pool. The op needs a page for
            the table to point to, so a pool without pages holds one that is never given out.
    """

    def __init__(
        self,
        op: str,
        formats: Sequence[RowFormat],
        batch: int,
        heads: int,
        capacity: int,
        device: torch.device,
        page_size: int | None,
        num_pages: int,
    ) -> None:
        self.formats = formats
        self.pages = None if page_size is None else Pages(op, batch, capacity, page_size, num_pages, device)
        lead, rows = (batch, capacity) if page_size is None else (max(1, num_pages), page_size)
        self.parts = [f.allocate(lead, heads, rows, device) for f in formats]

    @property
    def block_table(self) -> Tensor | None:
        """int32 [B, max(1, capacity / page_size)] on the device, -1 where there is no page; None without pages."""
        return None if self.pages is None else self.pages.block_table

    def check_pages(self, method: str, lengths: Sequence[int]) -> None:
        """Raises OutOfPagesError where pages are lacking for sequences of these lengths."""
        if self.pages is not None:
            self.pages.check(method, self.pages.growth(lengths))

    def _move(self, pages: Pages, method: str, change: Change) -> None:
        """Makes a change of pages, with its copies."""
        copies = pages.make(method, change)
        if copies:
            old, new = torch.tensor(copies, device=pages.block_table.device).T
            for x in (x for part in self.parts for x in part):
                x[new] = x[old]

    def write(self, sequences: Sequence[int], starts: Sequence[int], rows: Sequence[CompressedKV]) -> None:
        """Stores rows [n, H_kv, S, ...] of keys and values as tokens start ... start + S - 1 of n sequences."""
        size = rows[0].bitmap.shape[2]
        pairs = [
            (target, x)
            for both in zip(self.parts, rows, strict=True)
            for target, x in zip(*both, strict=True)
        ]
        pairs = [(target, x) for target, x in pairs if x.shape[2]]  # no scales for 16 bits
        if self.pages is None:
            together = len(sequences) == len(self.parts[0].bitmap) and len(set(starts)) == 1
            for target, x in pairs:
                if together:
                    target[:, :, starts[0] : starts[0] + size] = x
                    continue
                for row, sequence, start in zip(x, sequences, starts, strict=True):
                    target[sequence, :, start : start + size] = row
            return
        if not size:
            return
        pages, page = self.pages, self.pages.page_size
        ends = [0] * len(pages.rows)
        for i, start in zip(sequences, starts, strict=True):
            ends[i] = start + size
        self._move(pages, "append", pages.growth(ends))
        whole = size % page == 0 and not any(start % page for start in starts)
        step = page if whole else 1
        at = [
            (i, start + t) for i, start in zip(sequences, starts, strict=True) for t in range(0, size, step)
        ]
        places, slots = torch.tensor(
            [(pages.rows[i][t // page], t % page) for i, t in at], device=pages.block_table.device
        ).T
        for target, x in pairs:
            if whole:
                target.index_copy_(
                    0, places, x.unflatten(2, (size // page, page)).transpose(1, 2).flatten(0, 1)
                )
            else:
                target[places, :, slots] = x.transpose(1, 2).flatten(0, 1)

    def fill(self, rows: Sequence[CompressedKV], lengths: Sequence[int]) -> None:
        """Stores the first ``lengths[b]`` of rows [B, H_kv, S, ...] of keys and values as the tokens of sequence b."""
        most = rows[0].bitmap.shape[2]
        if lengths and all(length == most for length in lengths):
            self.write(range(len(lengths)), [0] * len(lengths), rows)
            return
        for i, length in enumerate(lengths):
            self.write([i], [0], [CompressedKV(*(x[i : i + 1, :, :length] for x in part)) for part in rows])

    def read(self, sequence: int, length: int) -> list[CompressedKV]:
        """Rows [H_kv, length, ...] of the first ``length`` tokens, keys and values."""
        if self.pages is None:
            return [CompressedKV(*(x[sequence, :, :length] for x in part)) for part in self.parts]
        row = self.pages.rows[sequence][: self.pages.pages_for(length)]
        places = torch.tensor(row, dtype=torch.int64, device=self.pages.block_table.device)
        gathered = ([x[places].transpose(0, 1).flatten(1, 2) for x in part] for part in self.parts)
        return [CompressedKV(*(x[:, :length] for x in part)) for part in gathered]

    def reorder(self, method: str, index: Sequence[int], lengths: Sequence[int]) -> None:
        """Sequence i becomes what sequence index[i] was, of ``lengths[index[i]]`` tokens."""
        if self.pages is not None:
            self._move(self.pages, method, self.pages.reorder(index, lengths))
            return
        places = torch.tensor(index, dtype=torch.int64, device=self.parts[0].bitmap.device)
        for x in (x for part in self.parts for x in part):
            used = x[:, :, : max(lengths, default=0)]
            used.copy_(used.index_select(0, places))

    def truncate(self, lengths: Sequence[int], kept: Sequence[int]) -> None:
        """Forgets the rows of sequences of ``lengths[b]`` tokens behind their first ``kept[b]``."""
        if self.pages is not None:
            self._move(self.pages, "truncate", self.pages.cut(lengths, kept))

    def copy_from(self, other: StoredRows, old: torch.dtype, new: torch.dtype) -> None:
        """Takes what other storage of the same sizes holds, its 16-bit values of dtype ``old`` in dtype ``new``."""
        for f, part, theirs in zip(self.formats, self.parts, other.parts, strict=True):
            for target, x in zip(part, f.cast(theirs, old, new), strict=True):
                target.copy_(x)
        if self.pages is not None and other.pages is not None:
            self.pages.copy_from(other.pages)

    def clear(self) -> None:
        """Forgets every sequence."""
        if self.pages is not None:
            self.pages.clear()
