"""Reference of the tree cache, written from docs/semantics/tree_cache.md §7 and independent of every kernel.

Appending follows the definition token by token. Attention gathers the tokens of a sequence from its pages and takes
rows of the reference of tree attention, which builds the tree anew: the nodes in the pages are not read. Only where
tokens are packed they are, because then nothing else tells of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from . import compressed_kv
from .tree_attention import htree_forward_naive
from .tree_attention.attention import Forward
from .tree_attention.selection import Choice
from .tree_attention.tree import accumulate_dtype

__all__ = [
    "cache_layers",
    "gather_tokens",
    "tree_cache_append",
    "tree_cache_append_packed",
    "tree_cache_attention",
    "tree_cache_pages",
    "tree_cache_prompt",
]


def cache_layers(capacity: int, compression_rate: int, max_top_nodes: int) -> int:
    """The number of layers of the tree over ``capacity`` tokens."""
    layers = 1
    while capacity > max_top_nodes * compression_rate ** (layers - 1):
        layers += 1
    return layers


def _mean(rows: Tensor) -> Tensor:
    """Mean over dim 0: the sum in order in fp32 (fp64), rounded once."""
    wide = rows.to(accumulate_dtype(rows))
    total = wide[0].clone()
    for row in wide[1:]:
        total = total + row
    return (total / len(rows)).to(rows.dtype)


def _place(end: int, span: int, page_size: int) -> tuple[int, int]:
    """The page of a node of ``span`` tokens that ends before token ``end``, and its rank among those of that page."""
    page = (end - 1) // page_size
    return page, end // span - 1 - page * page_size // span


def tree_cache_append(
    k_pool: Tensor,
    v_pool: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_new: Tensor,
    new_lengths: Tensor | None = None,
    max_new: int | None = None,
    *,
    page_size: int,
    compression_rate: int = 16,
    max_top_nodes: int = 8192,
    selection_span: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the pools after `tree_cache_append_`."""
    k_pool, v_pool = k_pool.clone(), v_pool.clone()
    layers = cache_layers(block_table.shape[1] * page_size, compression_rate, max_top_nodes)
    first_row = [0]
    for layer in range(layers):
        first_row.append(first_row[-1] + -(-page_size // compression_rate**layer))
    for b, table in enumerate(block_table.tolist()):
        rows = int(cu_new[b + 1] - cu_new[b]) if new_lengths is None else int(new_lengths[b])
        for i in range(rows):
            end = int(lengths[b]) + i + 1  # tokens up to this one
            for pool, x in ((k_pool, k), (v_pool, v)):
                page, row = _place(end, 1, page_size)
                pool[table[page], :, row] = x[int(cu_new[b]) + i]
                for layer in range(1, layers):
                    span = compression_rate**layer
                    if end % span:
                        break
                    child = span // compression_rate
                    children = []
                    for c in range(compression_rate):
                        page, row = _place(end - span + (c + 1) * child, child, page_size)
                        children.append(pool[table[page], :, first_row[layer - 1] + row])
                    page, row = _place(end, span, page_size)
                    pool[table[page], :, first_row[layer] + row] = _mean(torch.stack(children))
            if selection_span and end % selection_span == 0:
                page, row = _place(end, 1, page_size)
                members = k_pool[table[page], :, row + 1 - selection_span : row + 1]
                page, row = _place(end, selection_span, page_size)
                k_pool[table[page], :, first_row[layers] + row] = _mean(members.transpose(0, 1))
    return k_pool, v_pool


def tree_cache_append_packed(
    k_pool: Tensor,
    v_pool: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    k_tail: Tensor,
    v_tail: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_new: Tensor,
    new_lengths: Tensor | None = None,
    max_new: int | None = None,
    *,
    page_size: int,
    compression_rate: int = 16,
    max_top_nodes: int = 8192,
    selection_span: int | None = None,
) -> tuple[Tensor, ...]:
    """Return the eight tensors after `tree_cache_append_packed_`."""
    before = (k_pool, v_pool, k_codes, k_scales, v_codes, v_scales, k_tail, v_tail)
    k_pool, v_pool, k_codes, k_scales, v_codes, v_scales, k_tail, v_tail = (x.clone() for x in before)
    layers = cache_layers(block_table.shape[1] * page_size, compression_rate, max_top_nodes)
    first_row = [0, 0]
    for layer in range(1, layers):
        first_row.append(first_row[-1] + -(-page_size // compression_rate**layer))
    for b, table in enumerate(block_table.tolist()):
        rows = int(cu_new[b + 1] - cu_new[b]) if new_lengths is None else int(new_lengths[b])
        for i in range(rows):
            end = int(lengths[b]) + i + 1  # tokens up to this one
            of_keys = (k_pool, k_codes, k_scales, k_tail, k)
            of_values = (v_pool, v_codes, v_scales, v_tail, v)
            for pool, codes, scales, tail, x in (of_keys, of_values):
                token = x[int(cu_new[b]) + i]
                bits = 8 * codes.shape[3] // x.shape[2]
                _, packed, scale = compressed_kv.kv_compress(token[None, :, None], x.shape[2], bits)
                page, row = _place(end, 1, page_size)
                codes[table[page], :, row], scales[table[page], :, row] = packed[0, :, 0], scale[0, :, 0]
                tail[b, :, (end - 1) % tail.shape[2]] = token
                for layer in range(1, layers):
                    span = compression_rate**layer
                    if end % span:
                        break
                    child = span // compression_rate
                    children = []
                    for c in range(compression_rate):
                        last = end - span + (c + 1) * child
                        page, row = _place(last, child, page_size)
                        children.append(
                            tail[b, :, (last - 1) % tail.shape[2]]
                            if layer == 1
                            else pool[table[page], :, first_row[layer - 1] + row]
                        )
                    page, row = _place(end, span, page_size)
                    pool[table[page], :, first_row[layer] + row] = _mean(torch.stack(children))
            if selection_span and end % selection_span == 0:
                places = torch.arange(end - selection_span, end, device=k_tail.device) % k_tail.shape[2]
                page, row = _place(end, selection_span, page_size)
                k_pool[table[page], :, first_row[layers] + row] = _mean(k_tail[b, :, places].transpose(0, 1))
    return k_pool, v_pool, k_codes, k_scales, v_codes, v_scales, k_tail, v_tail


def _expanded(codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Packed tokens [num_pages, H_kv, P, width] of all pages in ``dtype``."""
    bitmap = torch.full((*scales.shape, width // 64), -1, dtype=torch.int64, device=codes.device)
    return compressed_kv.kv_decompress(
        bitmap, codes, scales, width, width, 8 * codes.shape[3] // width, dtype
    )


def _gather_nodes(
    pool: Tensor, table: Tensor, length: int, span: int, first_row: int, page_size: int
) -> Tensor:
    """Rows [1, N, H_kv, D] of the nodes of ``span`` tokens each; zeros for one that is not finished."""
    rows = []
    for end in range(span, length + 1, span):
        page, row = _place(end, span, page_size)
        rows.append(pool[int(table[page]), :, first_row + row])
    if length % span:
        rows.append(torch.zeros_like(pool[0, :, 0]))
    return torch.stack(rows)[None]


def gather_tokens(pool: Tensor, table: Tensor, length: int, page_size: int) -> Tensor:
    """Rows [length, H_kv, D] of the tokens of one sequence."""
    token = torch.arange(length, device=pool.device)
    return pool[table.long()[token // page_size], :, token % page_size]


def tree_cache_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_q: Tensor,
    lists: Tensor | None = None,
    list_pos: Tensor | None = None,
    q_lengths: Tensor | None = None,
    rope_table: Tensor | None = None,
    *,
    page_size: int,
    compression_rate: int = 16,
    max_top_nodes: int = 8192,
    top_k: int = 512,
    selection_stride: int = 1,
    selection_span: int | None = None,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    importance: str = "lse_causal",
    inv_freq: Sequence[float] | None = None,
    k_codes: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_codes: Tensor | None = None,
    v_scales: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    **choice: Unpack[Choice],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, lse, lists, list_pos) of `tree_cache_attention`, row by row; out in the compute dtype."""
    stride, wide = selection_stride, accumulate_dtype(q) if compute_dtype is None else compute_dtype
    layers = cache_layers(block_table.shape[1] * page_size, compression_rate, max_top_nodes)
    batch, kv_heads = len(block_table), k_pool.shape[1]
    ring = list_pos.shape[1] if list_pos is not None else 4 if stride > 1 else 0
    out = q.new_zeros(*q.shape[:2], v_pool.shape[3], dtype=wide)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
    new_pos = block_table.new_full((batch, ring), -1) if list_pos is None else list_pos.clone()
    shape = (batch, ring, layers, kv_heads, top_k)
    new_lists = block_table.new_full(shape, -1) if lists is None else lists.clone()

    k_tokens, v_tokens = k_pool, v_pool
    packed = k_codes is not None
    if k_codes is not None and k_scales is not None and v_codes is not None and v_scales is not None:
        k_tokens = _expanded(k_codes, k_scales, k_pool.shape[3], k_pool.dtype)
        v_tokens = _expanded(v_codes, v_scales, v_pool.shape[3], v_pool.dtype)

    def tree_of(
        b: int, keys: Tensor, values: Tensor, length: int
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """The layers over the first tokens of sequence b from its pages, and its span means."""
        table, rate, first = block_table[b], compression_rate, 0
        found = [(keys[None, :length], values[None, :length])]
        for layer in range(1, layers):
            if layer < cache_layers(length, rate, max_top_nodes):
                rows = (length, rate**layer, first, page_size)
                found.append((_gather_nodes(k_pool, table, *rows), _gather_nodes(v_pool, table, *rows)))
            first += -(-page_size // rate**layer)
        if selection_span is None:
            return found, None
        return found, _gather_nodes(k_pool, table, length, selection_span, first, page_size)

    def forward(
        b: int, query: Tensor, keys: Tensor, values: Tensor, length: int, parents: list[Tensor] | None
    ) -> Forward:
        # A tree deeper than the sequence needs opens everything above, so that all lists have the same depth.
        return htree_forward_naive(
            query[None, None],
            keys[None, :length],
            values[None, :length],
            compression_rate=compression_rate,
            max_top_nodes=max_top_nodes,
            top_k_per_layer=top_k,
            scale=scale,
            rope_base=rope_base,
            inv_freq=inv_freq,
            importance=importance,
            selection_span=selection_span,
            parents=parents,
            compute_dtype=wide,
            tree=tree_of(b, keys, values, length) if packed else None,
            **choice,
        )

    for b in range(batch):
        first, length = int(cu_q[b]), int(lengths[b])
        count = int(cu_q[b + 1]) - first if q_lengths is None else int(q_lengths[b])
        begin = length - count
        new_pos[b, new_pos[b] >= max(0, begin)] = -1
        keys = gather_tokens(k_tokens, block_table[b], length, page_size)
        values = gather_tokens(v_tokens, block_table[b], length, page_size)
        for t in range(max(0, begin), length):
            leader = t - t % stride
            depth = cache_layers(t + 1, compression_rate, max_top_nodes)
            used: list[Tensor] | None
            if leader >= max(0, begin):
                own = forward(b, q[first + leader - begin], keys, values, leader + 1, None)
                used = own.parents
            else:
                found = [] if list_pos is None else (list_pos[b] == leader).nonzero().flatten().tolist()
                used = [lists[b, found[0], i][None, None] for i in range(layers)] if found else None  # type: ignore[index]
            row = first + t - begin
            if used is None:
                out[row], lse[row] = torch.nan, torch.nan
                continue
            used = [
                used[i] if i < len(used) else _opened(leader, i, compression_rate, kv_heads, top_k, q.device)
                for i in range(layers)
            ]
            result = forward(b, q[row], keys, values, t + 1, used[:depth])
            out[row], lse[row] = result.out[0, 0], result.lse[0, 0]
            if leader == t and ring:
                slot = t // stride % ring
                new_pos[b, slot] = t
                new_lists[b, slot] = torch.stack([x[0, 0] for x in used])
    return out, lse, new_lists, new_pos


def tree_cache_prompt(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    length: int,
    copies: Tensor | None = None,
    capacity: int = 0,
    store_lists: bool = False,
    *,
    page_size: int,
    top_k: int = 512,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, lists) of `tree_cache_prompt`, whose log-sum-exp is gmax + log(gsum). No copies are read."""
    k, v = (
        torch.stack([gather_tokens(pool, table, length, page_size) for table in block_table])
        for pool in (k_pool, v_pool)
    )
    found = htree_forward_naive(q, k, v, top_k_per_layer=top_k, **options)
    lists = torch.stack(found.parents) if store_lists else q.new_zeros(0, dtype=torch.int32)
    return found.out, found.lse, lists


def _opened(token: int, layer: int, rate: int, kv_heads: int, top_k: int, device: torch.device) -> Tensor:
    """The list [1, 1, H_kv, k] of a layer in which everything is opened."""
    count = token // rate**layer // rate + 1
    nodes = torch.arange(top_k, dtype=torch.int32, device=device)
    return torch.where(nodes < count, nodes, -1).expand(1, 1, kv_heads, top_k)


class _Table:
    """The table of pages as lists: what each sequence has, and the free pages, the next one last."""

    def __init__(self, state: Sequence[Tensor], page_size: int) -> None:
        table, lengths, held, users, free, errors, list_pos, _ = (x.tolist() for x in state)
        self.pages = [row[:count] for row, count in zip(table, held, strict=True)]
        self.lengths, self.users, self.errors, self.ring = lengths, users, errors, list_pos
        self.free = free[1 : 1 + free[0]]
        self.before = list(lengths)
        self.taken = [0] * len(lengths)
        self.copies: dict[int, tuple[int, int]] = {}
        self.page_size = page_size

    def take(self, sequence: int, pages: int) -> None:
        for _ in range(pages):
            self.pages[sequence].append(self.free.pop())
            self.users[self.pages[sequence][-1]] = 1

    def drop(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free.append(page)

    def copy_open_page(self, sequence: int, page: int) -> None:
        self.take(sequence, 1)
        self.copies[sequence] = (page, self.pages[sequence][-1])

    def append(self, b: int, tokens: int, capacity: int, adds: bool) -> None:
        needed = -(-(self.lengths[b] + tokens) // self.page_size) - len(self.pages[b])
        if tokens < 0 or self.lengths[b] + tokens > capacity or needed > len(self.free):
            self.errors[b] |= 4 if tokens < 0 else 1 if self.lengths[b] + tokens > capacity else 2
            return
        self.take(b, needed)
        self.taken[b] = tokens
        self.lengths[b] += tokens * adds

    def truncate(self, b: int, length: int, stride: int) -> None:
        if length in (-1, self.lengths[b]):
            return
        if not 0 <= length < self.lengths[b]:
            self.errors[b] |= 4
            return
        if length % stride and (length - 1) - (length - 1) % stride not in self.ring[b]:
            self.errors[b] |= 8
            return
        keep = -(-length // self.page_size)
        kept, dropped = self.pages[b][:keep], self.pages[b][keep:]
        shared = length % self.page_size > 0 and self.users[kept[-1]] > 1
        if shared and not self.free and all(self.users[page] > 1 for page in dropped):
            self.errors[b] |= 2
            return
        self.drop(dropped)
        self.pages[b] = kept
        if shared:
            page = kept.pop()
            self.users[page] -= 1
            self.copy_open_page(b, page)
        self.lengths[b] = length
        self.ring[b] = [leader if leader < length else -1 for leader in self.ring[b]]

    def reorder(self, beams: list[int]) -> None:
        self.taken = list(range(len(beams)))
        for b, beam in enumerate(beams):
            self.errors[b] |= 0 if 0 <= beam < len(beams) else 32
        if any(not 0 <= beam < len(beams) for beam in beams):
            return
        old, lengths, ring = [list(x) for x in self.pages], list(self.lengths), [list(x) for x in self.ring]
        full = [n // self.page_size for n in lengths]
        is_open = [n % self.page_size > 0 for n in lengths]
        owner = {source: source if beams[source] == source else beams.index(source) for source in set(beams)}
        moved = [b for b, beam in enumerate(beams) if beam != b]
        copies = [b for b in moved if is_open[beams[b]] and owner[beams[b]] != b]
        users, free = list(self.users), list(self.free)
        for b in moved:
            count = full[beams[b]] + (is_open[beams[b]] and b not in copies)
            self.pages[b] = old[beams[b]][:count]
            for page in self.pages[b]:
                self.users[page] += 1
        for b in moved:
            self.drop(old[b])
        if len(copies) > len(self.free):
            self.pages, self.users, self.free = old, users, free
            for b in copies:
                self.errors[b] |= 2
            return
        for b in moved:
            self.lengths[b], self.ring[b] = lengths[beams[b]], ring[beams[b]]
        for b in copies:
            self.copy_open_page(b, old[beams[b]][full[beams[b]]])
        self.taken = list(beams)

    def attend(self, b: int, rows: int, stride: int) -> None:
        first = max(0, self.lengths[b] - rows)
        if rows > 0 and self.lengths[b] > 0 and first % stride and first - first % stride not in self.ring[b]:
            self.errors[b] |= 16


def tree_cache_pages(
    block_table: Tensor,
    lengths: Tensor,
    held: Tensor,
    users: Tensor,
    free_pages: Tensor,
    errors: Tensor,
    list_pos: Tensor,
    plan: Tensor,
    request: Tensor,
    step: str,
    *,
    capacity: int,
    page_size: int,
    selection_stride: int = 1,
) -> tuple[Tensor, ...]:
    """Return the eight tensors after `tree_cache_pages_` on CUDA, which notes what is not possible. They fit together.

    Of free_pages the part behind the count keeps what it held.
    """
    state = (block_table, lengths, held, users, free_pages, errors, list_pos, plan)
    table = _Table(state, page_size)
    wanted = request.tolist()
    if step == "reorder":
        table.reorder(wanted)
    for b, number in enumerate(wanted):
        if step in ("append", "reserve"):
            table.append(b, number, capacity, adds=step == "append")
        elif step == "truncate":
            table.truncate(b, number, selection_stride)
        elif step == "attend":
            table.attend(b, number, selection_stride)
    copies = [table.copies.get(b, (-1, -1)) for b in range(len(wanted))]
    rows = [[*pages, *[-1] * (block_table.shape[1] - len(pages))] for pages in table.pages]
    stack = free_pages.tolist()
    stack[: 1 + len(table.free)] = [len(table.free), *table.free]
    new = (rows, table.lengths, [len(x) for x in table.pages], table.users, stack, table.errors, table.ring)
    planned = [table.before, table.taken, [x for x, _ in copies], [x for _, x in copies]]
    return tuple(
        torch.tensor(values, dtype=torch.int32, device=like.device).view(like.shape)
        for values, like in zip((*new, planned), state, strict=True)
    )
