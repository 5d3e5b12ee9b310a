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
#: Leaders whose lists the ring of a cache keeps (tree_cache.md §7.4), where it has one.
KEPT_LEADERS = 4
#: The last rows of a prompt for which lists are stored: enough for the ring, few enough for the memory that they take.
LISTED_ROWS = 4096
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


def prompt_begin(length: int, count: int, stride: int) -> int:
    """The first of the last ``count`` rows of a text from which on kernels of ``tree_attention`` take them.

    It is that of the first leader; ``count`` where there is no prompt. A prompt has all leaders whose lists the cache
    keeps, so nothing that was kept before it matters.
    """
    start = length - count
    if count < PROMPT_ROWS or start < 0:
        return count
    first = -(-start // stride) * stride
    leaders = -(-(length - first) // stride)
    return first - start if leaders >= KEPT_LEADERS else count


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

    Rows before a prompt's first leader, and sequences without a prompt, are computed by ``tree_cache_attention`` first,
    because they read lists that the cache has kept. The prompt then leaves the lists of its last leaders there.

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
    begins = [prompt_begin(length, count, stride) for length, count in zip(lengths, counts, strict=True)]
    groups: dict[tuple[int, int, int], list[int]] = {}
    for b, (length, count, begin) in enumerate(zip(lengths, counts, begins, strict=True)):
        if begin < count:
            groups.setdefault((length, count, begin), []).append(b)
    if list(groups) == [(lengths[0], n, 0)] and len(groups[lengths[0], n, 0]) == batch:
        # All rows have their leaders in the call, so there is nothing to report.
        return _group_rows(cache, q, lengths[0], list(range(batch)), return_lse)

    cache.report_leaders(_on(counts, q.device))
    rows = max(begins)
    out = q.new_zeros(batch, n, heads, cache.value_dim)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_full((batch, n, heads), -torch.inf, dtype=wide)
    if rows:
        at = [length - count + begin for length, count, begin in zip(lengths, counts, begins, strict=True)]
        out[:, :rows], lse[:, :rows] = cache.attend_pages(
            q[:, :rows], _on(at, q.device), _on(begins, q.device)
        )
    for (length, count, begin), sequences in groups.items():
        prompt = torch.stack([q[b, begin:count] for b in sequences])
        found = _group_rows(cache, prompt, length, sequences, return_lse)
        for i, b in enumerate(sequences):
            out[b, begin:count] = found[0][i]
            if return_lse:
                lse[b, begin:count] = found[1][i]
    return (out, lse) if return_lse else (out,)


def _group_rows(
    cache: TreeKVCache, q: Tensor, length: int, sequences: list[int], return_lse: bool
) -> tuple[Tensor, ...]:
    """The last rows of sequences whose text has ``length`` tokens; the ring gets the lists of the last leaders."""
    table = cache.block_table[:, : -(-length // cache.page_size)]
    pages = table if len(sequences) == cache.batch else torch.stack([table[b] for b in sequences])
    k, v = (_tokens(pool, pages, cache.page_size, length) for pool in (cache.k_pool, cache.v_pool))
    options, stride = cache.options, cache.options.selection_stride
    named = options.to_dict() | {"scope": "kv_head", "store_parents": False}
    if stride == 1:
        found = tree_attention(q, k, v, **named, return_lse=return_lse)
        return found if isinstance(found, tuple) else (found,)
    # Lists are kept of the last rows alone, from a leader on.
    listed = max(LISTED_ROWS, KEPT_LEADERS * stride)
    plain = max(0, (q.shape[1] - listed) // stride * stride)
    parts = []
    if plain:
        end = length - q.shape[1] + plain
        found = tree_attention(q[:, :plain], k[:, :end], v[:, :end], **named, return_lse=return_lse)
        parts.append(found if isinstance(found, tuple) else (found,))
    of_op = options.of_ops()
    of_op["top_k_per_layer"] = of_op.pop("top_k")
    out, gmax, gsum, lists = torch.ops.htree.attention_forward(
        q[:, plain:], k, v, **of_op, store_parents=True
    )
    _keep_lists(cache, sequences, length, lists)
    parts.append((out, gmax + gsum.log()) if return_lse else (out,))
    return parts[0] if len(parts) == 1 else tuple(torch.cat(x, dim=1) for x in zip(*parts, strict=True))


def _keep_lists(cache: TreeKVCache, sequences: list[int], length: int, lists: list[Tensor]) -> None:
    """Puts the last leaders' lists [B, leaders, H_kv, k] of every layer of a text into the ring."""
    ring, kept = cache.ring
    rate, stride, size = cache.options.compression_rate, cache.options.selection_stride, ring.shape[1]
    behind = -(-length // stride)  # leaders up to this one, of which leader i has entry i % size
    begin = behind % size  # the entry of the first of the last leaders
    if len(sequences) == cache.batch:
        parts = [(slice(None), slice(None))]
    else:
        parts = [(slice(b, b + 1), slice(i, i + 1)) for i, b in enumerate(sequences)]
    for layer in range(cache.num_layers):
        if layer < len(lists):
            own = lists[layer][:, -size:]
        else:
            own = _lists_above(ring, behind, stride, rate ** (layer + 1)).expand(len(sequences), -1, -1, -1)
        for to, of in parts:
            ring[to, begin:, layer] = own[of, : size - begin]
            if begin:
                ring[to, :begin, layer] = own[of, size - begin :]
    offsets = cache.constant("leaders", 0, lambda: _leader_offsets(size, stride, kept.device))[begin]
    for to, _ in parts:
        torch.add(offsets.expand(kept[to].shape), (behind - size) * stride, out=kept[to])


def _lists_above(ring: Tensor, behind: int, stride: int, tokens: int) -> Tensor:
    """The lists [1, ring, H_kv, k] of the last leaders above the top of the text, where every node is opened.

    Args:
        tokens: those of a node of the layer above.
    """
    leaders = torch.arange(behind - ring.shape[1], behind, dtype=torch.int32, device=ring.device)
    nodes = torch.arange(ring.shape[4], dtype=torch.int32, device=ring.device)
    opened = nodes <= (leaders * stride)[:, None] // tokens
    return nodes.where(opened, -1)[None, :, None].expand(-1, -1, ring.shape[3], -1)


def _leader_offsets(size: int, stride: int, device: torch.device) -> Tensor:
    """[b, i]: tokens from the first of ``size`` leaders, which has entry b of a ring, to the leader of entry i."""
    entries = torch.arange(size, dtype=torch.int32, device=device)
    return (entries - entries[:, None]) % size * stride


def _on(values: list[int], device: torch.device) -> Tensor:
    """int32 on the device, without waiting for it."""
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
