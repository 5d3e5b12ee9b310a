"""Rows of a prompt from a cache on a GPU: kernels of tree attention on tokens from pages (tree_cache.md §7.4).

A decode kernel takes each row through the tree by itself. Where many rows of a sequence come at once, the kernels of
``tree_attention`` share what neighbouring rows read. They need the sequence's length on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from htree_ops.ops.tree_attention.attention import tree_attention

if TYPE_CHECKING:
    from htree_ops.ops.tree_cache.cache import TreeKVCache

__all__ = ["PROMPT_ROWS", "HostLengths", "attend_prompts", "host_counts", "is_recorded"]

#: From so many rows of a sequence in a call on, they are a prompt. It depends on nothing else, so that a row has the
#: same bits beside other sequences and in other pages.
PROMPT_ROWS = 256
#: The widest element that copies of rows may be made of.
WIDE = torch.complex128


def is_recorded(device: torch.device) -> bool:
    """Whether calls are being compiled or captured in a graph: lengths then are not those of the replay."""
    return torch.compiler.is_compiling() or (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )


def host_counts(lengths: Tensor | Sequence[int] | None, batch: int, n: int) -> list[int] | None:
    """How many of the n rows of each sequence count, or None where only a device knows."""
    if lengths is None:
        return [n] * batch
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        lengths = lengths.tolist()
    return [min(max(int(length), 0), n) for length in lengths]


class HostLengths:
    """The lengths of a cache's sequences as the host knows them, so that a prompt seldom waits for the device.

    After a step whose outcome only the device knows they are unknown until they are read. A graph changes lengths
    without the host: once a step has been captured they are read each time.
    """

    def __init__(self, batch: int) -> None:
        self.known: list[int] | None = [0] * batch
        self.captured = False

    def forget(self, device: torch.device) -> None:
        """After a step whose outcome is not known here."""
        self.known = None
        if not torch.compiler.is_compiling() and is_recorded(device):
            self.captured = True

    def append(self, counts: list[int] | None, capacity: int, device: torch.device) -> None:
        """After an append for which no page can have been lacking: tokens beyond the capacity are not taken."""
        if counts is None or self.known is None or is_recorded(device):
            self.forget(device)
        else:
            self.known = [
                held + new if held + new <= capacity else held
                for held, new in zip(self.known, counts, strict=True)
            ]

    def read(self, lengths: Tensor) -> list[int]:
        """The lengths; waits for the device where they are not known."""
        if self.known is not None and not self.captured:
            return self.known
        read: list[int] = lengths.tolist()
        self.known = None if self.captured else read
        return read


def prompt_rows(length: int, count: int, stride: int) -> tuple[int, int]:
    """The rows first ... end - 1, of the last ``count`` rows of a text, that kernels of ``tree_attention`` take.

    They begin with a leader. The last four leaders and their rows stay for the cache, which keeps those leaders' lists.
    """
    start = length - count
    if count < PROMPT_ROWS or start < 0:
        return count, count
    if stride == 1:
        return 0, count
    first = -(-start // stride) * stride
    end = (length - 1) // stride * stride - 3 * stride
    return (first - start, end - start) if first < end else (count, count)


def _tokens(pool: Tensor, pages: Tensor, page_size: int, count: int) -> Tensor:
    """The first ``count`` tokens [B, count, H_kv, .] of sequences with ``pages`` [B, n]."""
    dtype, rows = pool.dtype, pool
    if pool.shape[3] * pool.element_size() % WIDE.itemsize == 0:  # copies are faster in wide elements
        rows = pool.view(WIDE)
    rows = rows.transpose(1, 2)[:, :page_size].index_select(0, pages.flatten())
    return rows.view(dtype).unflatten(0, pages.shape).flatten(1, 2)[:, :count]


class _WithoutGradient(torch.autograd.Function):
    """Results that depend on a tensor and whose backward raises, as that of ``tree_cache_attention`` does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("TreeKVCache.attend: rows of a cache have no gradient")


def attend_prompts(
    cache: TreeKVCache, q: Tensor, counts: list[int], return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """``TreeKVCache.attend`` where some sequence has a prompt.

    Rows before a prompt's first leader, the rows of its last four leaders, and sequences without a prompt are computed
    by ``tree_cache_attention``, before and behind the others, because each call reads the lists that the last one left.

    Args:
        q: [B, n, H, K]. counts: rows of each sequence that count.

    Returns:
        As ``TreeKVCache.attend``.
    """
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        results = _attend_prompts(cache, q, counts, return_lse)
    if torch.is_grad_enabled() and q.requires_grad:
        results = _WithoutGradient.apply(q, *results)
    return (results[0], results[1]) if return_lse else results[0]


def _attend_prompts(cache: TreeKVCache, q: Tensor, counts: list[int], return_lse: bool) -> tuple[Tensor, ...]:
    batch, n, heads, _ = q.shape
    lengths = cache.host_lengths.read(cache.lengths)
    stride = cache.options.selection_stride
    spans = [prompt_rows(length, count, stride) for length, count in zip(lengths, counts, strict=True)]
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    for b, (length, count, span) in enumerate(zip(lengths, counts, spans, strict=True)):
        if span[0] < span[1]:
            groups.setdefault((length, count, *span), []).append(b)
    whole = stride == 1 and len(groups) == 1 and len(next(iter(groups.values()))) == batch and counts[0] == n
    if whole:
        return _group_rows(cache, q, lengths[0], n, list(range(batch)), return_lse)

    out = q.new_zeros(batch, n, heads, cache.value_dim)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_full((batch, n, heads), -torch.inf, dtype=wide)

    def attend_pages(begin: list[int], end: list[int]) -> None:
        """Rows begin[b] ... end[b] - 1 by ``tree_cache_attention``."""
        rows = max((e - b for b, e in zip(begin, end, strict=True)), default=0)
        if rows == 0:
            return
        part = q.new_zeros(batch, rows, heads, q.shape[3])
        for b in range(batch):
            part[b, : end[b] - begin[b]] = q[b, begin[b] : end[b]]
        at = [length - count + e for length, count, e in zip(lengths, counts, end, strict=True)]
        took = [e - b for b, e in zip(begin, end, strict=True)]
        own_out, own_lse = cache.attend_pages(part, _on(at, q.device), _on(took, q.device))
        for b in range(batch):
            out[b, begin[b] : end[b]] = own_out[b, : took[b]]
            lse[b, begin[b] : end[b]] = own_lse[b, : took[b]]

    attend_pages([0] * batch, [first for first, _ in spans])
    for (length, count, first, end), sequences in groups.items():
        rows = torch.stack([q[b, first:end] for b in sequences])
        found = _group_rows(cache, rows, length - count + end, end - first, sequences, return_lse)
        for i, b in enumerate(sequences):
            out[b, first:end] = found[0][i]
            if return_lse:
                lse[b, first:end] = found[1][i]
    attend_pages([end for _, end in spans], counts)
    return (out, lse) if return_lse else (out,)


def _group_rows(
    cache: TreeKVCache, q: Tensor, length: int, rows: int, sequences: list[int], return_lse: bool
) -> tuple[Tensor, ...]:
    """The last ``rows`` rows of sequences whose text has ``length`` tokens."""
    pages = torch.stack([cache.block_table[b, : -(-length // cache.page_size)] for b in sequences])
    k, v = (_tokens(pool, pages, cache.page_size, length) for pool in (cache.k_pool, cache.v_pool))
    options = cache.options.to_dict() | {"scope": "kv_head", "store_parents": False}
    found = tree_attention(q, k, v, **options, return_lse=return_lse)
    return found if isinstance(found, tuple) else (found,)


def _on(values: list[int], device: torch.device) -> Tensor:
    """int32 on the device, without waiting for it."""
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
