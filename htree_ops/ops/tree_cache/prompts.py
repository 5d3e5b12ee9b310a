"""Rows of a prompt from a cache on a GPU: kernels of tree attention on tokens from pages (tree_cache.md §7.4, §7.6).

A decode kernel takes each row through the tree by itself. Where many rows of a sequence come at once, the kernels of
``tree_attention`` share what neighbouring rows read. They need the sequence's length on the host, and copies of keys
and values in layouts of their own, which the chunks of a prompt share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from htree_ops.ops.tree_cache.cache import TreeKVCache

__all__ = [
    "PROMPT_ROWS",
    "HostLengths",
    "PromptCopies",
    "attend_prompts",
    "host_counts",
    "is_recorded",
    "read_lengths",
]

#: From so many rows of a sequence in a call on, they are a prompt. It depends on nothing else, so that a row has the
#: same bits beside other sequences and in other pages.
PROMPT_ROWS = 256
#: Leaders whose lists the ring of a cache keeps (tree_cache.md §7.4), where it has one.
KEPT_LEADERS = 4
#: The last rows of a prompt for which lists are stored: enough for the ring, few enough for the memory that they take.
LISTED_ROWS = 4096


def is_recorded(device: torch.device) -> bool:
    """Whether calls are being compiled or captured in a graph: lengths then are not those of the replay."""
    return torch.compiler.is_compiling() or (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )


def read_lengths(lengths: Tensor | Sequence[int]) -> list[int] | None:
    """The lengths, or None where only a device knows them."""
    if isinstance(lengths, Tensor):
        return (
            lengths.tolist() if lengths.device.type == "cpu" and not torch.compiler.is_compiling() else None
        )
    return list(lengths)


def host_counts(lengths: Tensor | Sequence[int] | None, batch: int, n: int) -> list[int] | None:
    """How many of the n rows of each sequence count, or None where only a device knows. They have been checked."""
    return [n] * batch if lengths is None else read_lengths(lengths)


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
    """The first of the last ``count`` rows of a sequence from which on kernels of ``tree_attention`` take them.

    It is that of the first leader; ``count`` where there is no prompt. A prompt has all leaders whose lists the cache
    keeps, so nothing that was kept before it matters.
    """
    start = length - count
    if count < PROMPT_ROWS or start < 0:
        return count
    first = -(-start // stride) * stride
    leaders = -(-(length - first) // stride)
    return first - start if leaders >= KEPT_LEADERS else count


@dataclass
class SequenceCopies:
    """The copies of the first ``tokens`` tokens of sequences of one length, in a buffer with room for ``capacity``."""

    sequences: tuple[int, ...]
    heads: int
    stream: int
    capacity: int
    buffer: Tensor
    tokens: int = 0


class PromptCopies:
    """What a chunk of a prompt leaves for the next one: the copies of the sequence so far (tree_cache.md §7.6).

    The copies of the same sequences grow together. They are kept from the second chunk on, because a prompt that comes
    at once has no use for them, until :meth:`drop`, and never after a step of the cache was captured in a graph, which
    changes sequences without the host.

    Args:
        most_bytes: of all that is kept; None is no bound.
    """

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes = most_bytes
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

    def take(
        self, cache: TreeKVCache, sequences: list[int], heads: int, length: int, rows: int
    ) -> tuple[SequenceCopies, bool]:
        """Copies with room for sequences of ``length`` tokens, whose last ``rows`` attend, and whether to keep them.

        They are no longer among those that are kept: :meth:`keep` puts them back when they are whole again.
        """
        if cache.host_lengths.captured:
            self.drop(None)
        stream = torch.cuda.current_stream(cache.device).cuda_stream if cache.device.type == "cuda" else 0
        names = tuple(sequences)
        wanted = (names, heads, stream)
        held = next((x for x in self.kept if (x.sequences, x.heads, x.stream) == wanted), None)
        self.drop(names)
        if held is not None and held.tokens <= length <= held.capacity:
            return held, True
        held = None  # its buffer goes before a larger one is taken
        packed = cache.options.packed()

        def num_bytes(capacity: int) -> int:
            return torch.ops.htree._tree_cache_prompt_bytes(
                cache.k_pool, cache.v_pool, len(names), heads, capacity, *packed
            )

        # With room for half as many tokens again, all of the sequence is copied anew a few times only while it grows.
        capacity = min(cache.capacity, length + length // 2)
        size = num_bytes(capacity)
        bounded = self.most_bytes is not None and self.num_bytes() + size > self.most_bytes
        keeps = size > 0 and rows < length and not cache.host_lengths.captured and not bounded
        if not keeps:
            capacity, size = length, num_bytes(length) if size else 0
        buffer = torch.empty(size, dtype=torch.uint8, device=cache.device)
        return SequenceCopies(names, heads, stream, capacity, buffer), keeps

    def keep(self, copies: SequenceCopies) -> None:
        """Keeps what :meth:`take` gave."""
        self.kept = (*self.kept, copies)


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
    cache.prompt_copies.drop(
        b for b, count in enumerate(counts) if 0 < count == begins[b]
    )  # without a prompt
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
    """The last rows of sequences of ``length`` tokens; the ring gets the lists of the last leaders."""
    packed, stride = cache.options.packed(), cache.options.selection_stride
    first, last = sequences[0], sequences[-1] + 1
    if len(sequences) == last - first:
        table = cache.block_table[first:last]
    else:
        table = torch.stack([cache.block_table[b] for b in sequences])
    n, heads = q.shape[1:3]
    copies, keeps = cache.prompt_copies.take(cache, sequences, heads, length, n)
    pages = (cache.k_pool, cache.v_pool, table)

    def rows(begin: int, end: int, *, store_lists: bool) -> tuple[Tensor, ...]:
        """Those of q, and the lists of all layers."""
        held = length - n + end
        if copies.tokens > held:  # rows that come again: a shorter sequence may have another top
            copies.tokens = 0
        if copies.buffer.numel():
            torch.ops.htree._tree_cache_pack_prompt_(
                copies.buffer, *pages, heads, copies.tokens, held, copies.capacity, cache.page_size, *packed
            )
            copies.tokens = held
        out, gmax, gsum, lists = torch.ops.htree._tree_cache_prompt(
            q[:, begin:end],
            *pages,
            held,
            copies.buffer,
            copies.capacity,
            store_lists,
            cache.page_size,
            *packed,
        )
        return (out, gmax + gsum.log(), lists) if return_lse else (out, lists)

    # Lists are kept of the last rows alone, from a leader on.
    listed = max(LISTED_ROWS, KEPT_LEADERS * stride)
    plain = max(0, (n - listed) // stride * stride) if stride > 1 else 0
    parts = [rows(0, plain, store_lists=False)] if plain else []
    parts.append(rows(plain, n, store_lists=stride > 1))
    if stride > 1:
        _keep_lists(cache, sequences, length, parts[-1][-1])
    if keeps:
        cache.prompt_copies.keep(copies)
    found = [part[:-1] for part in parts]
    return found[0] if len(found) == 1 else tuple(torch.cat(x, dim=1) for x in zip(*found, strict=True))


def _keep_lists(cache: TreeKVCache, sequences: list[int], length: int, lists: Tensor) -> None:
    """Puts the last leaders of lists [layers, B, leaders, H_kv, k], those of every layer, into the ring."""
    ring, kept = cache.ring
    rate, stride, size = cache.options.compression_rate, cache.options.selection_stride, ring.shape[1]
    behind = -(-length // stride)  # leaders up to this one, of which leader i has entry i % size
    begin = behind % size  # the entry of the first of the last leaders
    if len(sequences) == cache.batch:
        parts = [(slice(None), slice(None))]
    else:
        parts = [(slice(b, b + 1), slice(i, i + 1)) for i, b in enumerate(sequences)]
    # The layers of the sequence at once, and then those above its top one by one.
    last = [(slice(0, len(lists)), lists[:, :, -size:].permute(1, 2, 0, 3, 4))]
    for layer in range(len(lists), cache.num_layers):
        above = _lists_above(cache, behind, rate ** (layer + 1))
        last.append((slice(layer, layer + 1), above[:, :, None].expand(len(sequences), -1, -1, -1, -1)))
    for layers, own in last:
        for to, of in parts:
            ring[to, begin:, layers] = own[of, : size - begin]
            if begin:
                ring[to, :begin, layers] = own[of, size - begin :]
    offsets = cache.constant("leaders", 0, lambda: _leader_offsets(size, stride, kept.device))[begin]
    for to, _ in parts:
        torch.add(offsets.expand(kept[to].shape), (behind - size) * stride, out=kept[to])


def _lists_above(cache: TreeKVCache, behind: int, tokens: int) -> Tensor:
    """The lists [1, ring, H_kv, k] of the last leaders above the top of the sequence, where every node is opened.

    Args:
        tokens: those of a node of the layer above.
    """
    ring, stride = cache.ring[0], cache.options.selection_stride
    size, heads, width = ring.shape[1], ring.shape[3], ring.shape[4]
    nodes = cache.constant("nodes", width, lambda: torch.arange(width, dtype=torch.int32, device=ring.device))
    own = [
        leader * stride // tokens for leader in range(behind - size, behind)
    ]  # the leaders' diagonal blocks
    # Most often all leaders have one.
    lists = {node: nodes.where(nodes <= node, -1) for node in dict.fromkeys(own)}
    rows = next(iter(lists.values()))[None] if len(lists) == 1 else torch.stack([lists[node] for node in own])
    return rows[None, :, None].expand(-1, size, heads, -1)


def _leader_offsets(size: int, stride: int, device: torch.device) -> Tensor:
    """[b, i]: tokens from the first of ``size`` leaders, which has entry b of a ring, to the leader of entry i."""
    entries = torch.arange(size, dtype=torch.int32, device=device)
    return (entries - entries[:, None]) % size * stride


def _on(values: list[int], device: torch.device) -> Tensor:
    """int32 on the device, without waiting for it."""
    host = torch.tensor(values, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
