"""Rows of a prompt from a cache on a GPU: kernels of tree attention on tokens from pages (tree_cache.md §7.4, §7.6).

A decode kernel takes each row through the tree by itself. Where many rows of a sequence come at once, the kernels of
``tree_attention`` share what neighbouring rows read. They need the sequence's length on the host, and copies of keys
and values in layouts of their own, which the chunks of a prompt share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from htree_ops.ops.paging import stream_of
from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.functions import cache_layers
from htree_ops.ops.tree_cache.pools import Pools
from htree_ops.ops.tree_cache.ring import RING, Ring

#: From so many rows of a sequence in a call on, they are a prompt. It depends on nothing else, so that a row has the
#: same bits beside other sequences and in other pages.
PROMPT_ROWS = 256
#: The last rows of a prompt for which lists are stored: enough for the ring, few enough for the memory that they take.
LISTED_ROWS = 4096
#: (q, index_query, lengths, counts) -> out and lse of rows, the last ``counts[b]`` of the first ``lengths[b]`` tokens.
Rows = Callable[[Tensor, Tensor | None, list[int], list[int]], tuple[Tensor, Tensor]]


def prompt_begin(length: int, count: int, stride: int) -> int:
    """The first of the last ``count`` rows of a sequence from which on kernels of ``tree_attention`` take them.

    It is that of the first leader; ``count`` where there is no prompt. A prompt has all leaders whose lists the cache
    keeps, so nothing that was kept before it matters.
    """
    start = length - count
    if count < PROMPT_ROWS or start < 0:
        return count
    first = -(-start // stride) * stride
    leaders = -(-(length - first) // stride)
    return first - start if leaders >= RING else count


def indexed_rows(
    q: Tensor, k: Tensor, v: Tensor, index_query: Tensor, index_keys: Tensor, options: TreeOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """The last n rows of whole sequences by an index, whose lists are made for some rows at a time.

    Args:
        q: [B, n, H, K], from a leader on. k: [B, T, H_kv, K]. v: [B, T, H_kv, V].
        index_query: [B, n, H_i, d]. index_keys: [B, T, H_i, d].

    Returns:
        out [B, n, H, V], lse [B, n, H], and the lists [B, layers, leaders, H_kv, k] of the last leaders.
    """
    n, length, stride, packed = q.shape[1], k.shape[1], options.selection_stride, options.packed()
    layers = cache_layers(length, options.compression_rate, options.top_nodes)
    step = max(LISTED_ROWS, RING * stride)
    last = max(0, (n - step) // stride * stride)  # the ring needs the lists of these leaders together
    begins = [*range(0, last, step), last]
    found = []
    for begin, end in zip(begins, [*begins[1:], n], strict=True):
        rows, start = q[:, begin:end], [length - n + begin]
        lists = torch.ops.htree._index_lists(rows, k, index_query[:, begin:end], index_keys, start, *packed)
        out, gmax, gsum = torch.ops.htree._listed_attention_rows(rows, k, v, lists, start, *packed)
        found.append((out, gmax + gsum.log()))
    leaders = -(-(n - begins[-1]) // stride)
    of_layers = lists[:, : layers * leaders].unflatten(1, (layers, leaders))
    if stride > 1 and (more := options.top_k - lists.shape[3]) > 0:  # the ring has space for all children
        of_layers = F.pad(of_layers, (0, more), value=-1)
    out, lse = found[0] if len(found) == 1 else (torch.cat(x, dim=1) for x in zip(*found, strict=True))
    return out, lse, of_layers


@dataclass
class SequenceCopies:
    """The copies of the first ``tokens`` tokens of sequences of one length, in a buffer with space for ``capacity``."""

    sequences: tuple[int, ...]
    heads: int
    stream: int
    capacity: int
    buffer: Tensor
    tokens: int = 0


def prompt_bytes(
    keys: Tensor, values: Tensor, sequences: int, heads: int, capacity: int, options: TreeOptions
) -> int:
    """Bytes of the copies of so many sequences of up to ``capacity`` tokens; 0 where their prompts need none."""
    size: int = torch.ops.htree._tree_cache_prompt_bytes(
        keys, values, sequences, heads, capacity, *options.packed()
    )
    return size


def prompt_rows(
    q: Tensor,
    pages: tuple[Tensor, Tensor, Tensor],
    length: int,
    copies: SequenceCopies,
    options: TreeOptions,
    page_size: int,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The last n rows of sequences of ``length`` tokens, and the lists of their last leaders for a stride above 1.

    Args:
        q: [B, n, H, K], from a leader on. pages: pools of keys and of values, and the block table of the sequences.
        copies: which get the tokens that they lack.

    Returns:
        out [B, n, H, V], lse [B, n, H] (without ``return_lse`` of no use), lists [layers, B, leaders, H_kv, k].
    """
    n, heads, stride, packed = *q.shape[1:3], options.selection_stride, options.packed()

    def rows(begin: int, end: int, *, store_lists: bool) -> tuple[Tensor, Tensor, Tensor]:
        held = length - n + end
        if copies.tokens > held:  # rows that come again: a shorter sequence may have another top
            copies.tokens = 0
        if copies.buffer.numel():
            torch.ops.htree._tree_cache_pack_prompt_(
                copies.buffer, *pages, heads, copies.tokens, held, copies.capacity, page_size, *packed
            )
            copies.tokens = held
        of_copies = (copies.buffer, copies.capacity, store_lists, page_size)
        out, gmax, gsum, lists = torch.ops.htree._tree_cache_prompt(
            q[:, begin:end], *pages, held, *of_copies, *packed
        )
        return out, gmax + gsum.log() if return_lse else gmax, lists

    # Lists are kept of the last rows alone, from a leader on.
    listed = max(LISTED_ROWS, RING * stride)
    plain = max(0, (n - listed) // stride * stride) if stride > 1 else 0
    earlier = rows(0, plain, store_lists=False)[:2] if plain else None
    out, lse, lists = rows(plain, n, store_lists=stride > 1)
    if earlier is not None:
        out = torch.cat((earlier[0], out), dim=1)
        lse = torch.cat((earlier[1], lse), dim=1) if return_lse else lse
    return out, lse, lists


class _WithoutGradient(torch.autograd.Function):
    """Results that depend on a tensor and whose backward raises, as that of ``tree_cache_attention`` does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("TreeKVCache.attend: rows of a cache have no gradient")


class Prompts:
    """What computes the prompts of a cache, and the copies that a chunk leaves for the next one (§7.6).

    The copies of the same sequences grow together. They are kept from the second chunk on, because a prompt that comes
    at once has no use for them, until :meth:`drop`.

    Args:
        block_table: int32 [B, max_pages]. capacity: most tokens of a sequence.
        most_bytes: of all copies that are kept; None is no bound.
    """

    def __init__(
        self,
        pools: Pools,
        block_table: Tensor,
        ring: Ring,
        options: TreeOptions,
        capacity: int,
        most_bytes: int | None,
    ) -> None:
        self.pools, self.block_table, self.ring = pools, block_table, ring
        self.options, self.capacity, self.most_bytes = options, capacity, most_bytes
        self.kept: tuple[SequenceCopies, ...] = ()

    def num_bytes(self) -> int:
        """Of all that is kept."""
        return sum(copies.buffer.nbytes for copies in self.kept)

    def drop(self, sequences: Iterable[int] | None) -> None:
        """Forgets the copies in which one of the sequences is; None is all of them."""
        if sequences is None:
            self.kept = ()
        elif self.kept:
            gone = set(sequences)
            self.kept = tuple(copies for copies in self.kept if gone.isdisjoint(copies.sequences))

    def attend(
        self,
        q: Tensor,
        index_query: Tensor | None,
        lengths: list[int],
        counts: list[int],
        return_lse: bool,
        rows: Rows,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``TreeKVCache.attend`` where some sequence has a prompt.

        Rows before a prompt's first leader, and sequences without a prompt, are computed by ``rows`` first, because
        they read lists that the ring has kept. The prompt then leaves the lists of its last leaders there.

        Args:
            q: [B, n, H, K]. index_query: [B, n, H_i, d], or None without an index. lengths: tokens of each sequence.
            counts: rows of each sequence that count.

        Returns:
            As ``TreeKVCache.attend``.
        """
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            out, lse = self._attend(q, index_query, lengths, counts, return_lse, rows)
        if torch.is_grad_enabled() and q.requires_grad:
            out, lse = _WithoutGradient.apply(q, out, lse)
        return (out, lse) if return_lse else out

    def _attend(
        self,
        q: Tensor,
        index_query: Tensor | None,
        lengths: list[int],
        counts: list[int],
        return_lse: bool,
        rows: Rows,
    ) -> tuple[Tensor, Tensor]:
        batch, n, heads, _ = q.shape
        stride = self.options.selection_stride
        begins = [prompt_begin(length, count, stride) for length, count in zip(lengths, counts, strict=True)]
        self.drop(b for b, count in enumerate(counts) if 0 < count == begins[b])  # without a prompt
        groups: dict[tuple[int, int, int], list[int]] = {}
        for b, (length, count, begin) in enumerate(zip(lengths, counts, begins, strict=True)):
            if begin < count:
                groups.setdefault((length, count, begin), []).append(b)
        if len(groups) == 1 and (together := groups.get((lengths[0], n, 0))) == list(range(batch)):
            # All rows have their leaders in the call, so there is nothing to report.
            return self._group_rows(q, index_query, lengths[0], together, return_lse)

        out = q.new_zeros(batch, n, heads, self.pools.widths[1])
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = q.new_full((batch, n, heads), -torch.inf, dtype=wide)
        most = max(begins, default=0)
        at = [length - count + begin for length, count, begin in zip(lengths, counts, begins, strict=True)]
        # Without rows too, for it reports the leaders that are missing.
        first = None if index_query is None else index_query[:, :most]
        out[:, :most], lse[:, :most] = rows(q[:, :most], first, at, begins)
        for (length, count, begin), sequences in groups.items():
            prompt, chooser = (
                None if x is None else torch.stack([x[b, begin:count] for b in sequences])
                for x in (q, index_query)
            )
            assert prompt is not None
            found = self._group_rows(prompt, chooser, length, sequences, return_lse)
            for i, b in enumerate(sequences):
                out[b, begin:count] = found[0][i]
                if return_lse:
                    lse[b, begin:count] = found[1][i]
        return out, lse

    def _group_rows(
        self, q: Tensor, index_query: Tensor | None, length: int, sequences: list[int], return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """The last rows of sequences of ``length`` tokens; the ring gets the lists of the last leaders."""
        first, last = sequences[0], sequences[-1] + 1
        if len(sequences) == last - first:
            table = self.block_table[first:last]
        else:
            table = torch.stack([self.block_table[b] for b in sequences])
        if index_query is not None:
            found = self._indexed_rows(q, index_query, length, table)
        else:
            copies, keeps = self._take(sequences, q.shape[2], length, q.shape[1])
            pages = (self.pools.keys, self.pools.values, table)
            page_size = self.pools.sizes.page_size
            found = prompt_rows(q, pages, length, copies, self.options, page_size, return_lse)
            if keeps:
                self.kept = (*self.kept, copies)
        out, lse, lists = found
        if self.options.selection_stride > 1:
            self.ring.keep(sequences, length, lists)
        return out, lse

    def _indexed_rows(
        self, q: Tensor, index_query: Tensor, length: int, table: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:func:`prompt_rows` by an index: tokens are gathered from the pages, lists made for some rows at a time."""
        index = self.pools.index
        assert index is not None
        k, v = (
            torch.stack(x) for x in zip(*(self.pools.layer(row, 0, length) for row in table), strict=True)
        )
        out, lse, lists = indexed_rows(q, k, v, index_query, index.tokens(table, length), self.options)
        return out, lse, lists.transpose(0, 1)

    def _take(self, sequences: list[int], heads: int, length: int, rows: int) -> tuple[SequenceCopies, bool]:
        """Copies with space for sequences of ``length`` tokens, whose last ``rows`` attend, and whether to keep them.

        They are no longer among those that are kept.
        """
        device, stream = self.block_table.device, stream_of(self.block_table)
        names = tuple(sequences)
        wanted = (names, heads, stream)
        held = next((x for x in self.kept if (x.sequences, x.heads, x.stream) == wanted), None)
        self.drop(names)
        if held is not None and held.tokens <= length <= held.capacity:
            return held, True
        held = None  # its buffer goes before a larger one is taken
        pools = (self.pools.keys, self.pools.values, len(names), heads)
        # With space for half as many tokens again, all of the sequence is copied anew a few times only while it grows.
        capacity = min(self.capacity, length + length // 2)
        size = prompt_bytes(*pools, capacity, self.options)
        bounded = self.most_bytes is not None and self.num_bytes() + size > self.most_bytes
        keeps = size > 0 and rows < length and not bounded
        if not keeps:
            capacity, size = length, prompt_bytes(*pools, length, self.options) if size else 0
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return SequenceCopies(names, heads, stream, capacity, buffer), keeps
