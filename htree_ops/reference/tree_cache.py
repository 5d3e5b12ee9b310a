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
from .tree_attention.tree import accumulate_dtype, layer_sizes


def cache_layers(capacity: int, compression_rate: int, max_top_nodes: int) -> int:
    """The number of layers of the tree over ``capacity`` tokens."""
    return len(layer_sizes(capacity, compression_rate, max_top_nodes))


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
    before: tuple[Tensor, ...],
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_new: Tensor,
    new_lengths: Tensor | None = None,
    *,
    page_size: int,
    compression_rate: int = 16,
    max_top_nodes: int = 8192,
    selection_span: int | None = None,
) -> tuple[Tensor, ...]:
    """Return what `tree_cache_append_` makes of its two pools, or `tree_cache_append_packed_` of its eight tensors."""
    written = tuple(x.clone() for x in before)
    pools, leaves = written[:2], written[2:]
    layers = cache_layers(block_table.shape[1] * page_size, compression_rate, max_top_nodes)
    first_row = [0, 0 if leaves else page_size]  # of packed tokens a page has no rows
    for layer in range(1, layers):
        first_row.append(first_row[-1] + -(-page_size // compression_rate**layer))

    def row_of(side: int, b: int, layer: int, end: int) -> Tensor:
        """The row [H_kv, D] of a token as it came, or of a node, that ends before token ``end``."""
        if leaves and layer == 0:
            tail = leaves[4 + side]
            return tail[b, :, (end - 1) % tail.shape[2]]
        page, row = _place(end, compression_rate**layer, page_size)
        return pools[side][block_table[b, page], :, first_row[layer] + row]

    for b, table in enumerate(block_table.tolist()):
        rows = int(cu_new[b + 1] - cu_new[b]) if new_lengths is None else int(new_lengths[b])
        for i in range(rows):
            end = int(lengths[b]) + i + 1  # tokens up to this one
            for side, x in enumerate((k, v)):
                token = x[int(cu_new[b]) + i]
                page, row = _place(end, 1, page_size)
                if leaves:
                    codes, scales, tail = leaves[2 * side], leaves[2 * side + 1], leaves[4 + side]
                    bits = 8 * codes.shape[3] // x.shape[2]
                    _, packed, scale = compressed_kv.kv_compress(token[None, :, None], x.shape[2], bits)
                    codes[table[page], :, row], scales[table[page], :, row] = packed[0, :, 0], scale[0, :, 0]
                    tail[b, :, (end - 1) % tail.shape[2]] = token
                else:
                    pools[side][table[page], :, row] = token
                for layer in range(1, layers):
                    span = compression_rate**layer
                    if end % span:
                        break
                    child = span // compression_rate
                    ends = range(end - span + child, end + 1, child)
                    page, row = _place(end, span, page_size)
                    pools[side][table[page], :, first_row[layer] + row] = _mean(
                        torch.stack([row_of(side, b, layer - 1, last) for last in ends])
                    )
            if selection_span and end % selection_span == 0:
                members = [row_of(0, b, 0, last) for last in range(end - selection_span + 1, end + 1)]
                page, row = _place(end, selection_span, page_size)
                pools[0][table[page], :, first_row[layers] + row] = _mean(torch.stack(members))
    return written


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
        """The rows ``query`` [n, H, K] of one stride, from its leader on."""
        # A tree deeper than the sequence needs opens everything above, so that all lists have the same depth.
        return htree_forward_naive(
            query[None],
            keys[None, :length],
            values[None, :length],
            compression_rate=compression_rate,
            max_top_nodes=max_top_nodes,
            top_k_per_layer=top_k,
            scale=scale,
            rope_base=rope_base,
            inv_freq=inv_freq,
            importance=importance,
            selection_stride=stride,
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
                own = forward(b, q[first + leader - begin][None], keys, values, leader + 1, None)
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
            if max_top_nodes > top_k * compression_rate:  # what a row's top has no list says
                tops = cache_layers(leader + 1, compression_rate, max_top_nodes) - 1
                used = [x if i < tops else torch.full_like(x, -1) for i, x in enumerate(used)]
            # A row's tree is that of its leader, whose place the reference must know: other queries say nothing.
            rows = torch.cat([q[row].new_zeros(t - leader, *q.shape[1:]), q[row][None]])
            result = forward(b, rows, keys, values, t + 1, used[:depth])
            out[row], lse[row] = result.out[0, -1], result.lse[0, -1]
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


def advance(
    lengths: list[int],
    counts: list[int],
    table: list[list[int]],
    *,
    num_pages: int,
    capacity: int,
    page_size: int,
) -> tuple[list[int], list[int], list[int]]:
    """Return lengths, tokens that were taken, and the errors of an append (docs/semantics/tree_cache.md §7.4)."""
    after, taken, errors = list(lengths), [0] * len(lengths), [0] * len(lengths)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        end = length + count
        if length < 0 or count < 0:
            errors[b] = 4
        elif end > min(capacity, len(table[b]) * page_size):
            errors[b] = 1
        else:
            pages = table[b][length // page_size : -(-end // page_size)]
            bad = next((page for page in pages if not 0 <= page < num_pages), None)
            errors[b] = 0 if bad is None else 2 if bad == -1 else 64
        if not errors[b]:
            after[b], taken[b] = end, count
    return after, taken, errors


def truncate(
    lengths: list[int],
    leaders: list[list[int]],
    tail_begin: list[int] | None,
    counts: list[int],
    own_from: list[int],
    *,
    stride: int,
    rate: int,
) -> tuple[list[int], list[list[int]], list[int] | None, list[int]]:
    """Return lengths, leaders, the first tokens of the tails, and the errors of a truncation (§7.4)."""
    after, ring, errors = list(lengths), [list(x) for x in leaders], [0] * len(lengths)
    begins = None if tail_begin is None else list(tail_begin)
    for b, (length, wanted) in enumerate(zip(lengths, counts, strict=True)):
        if not -1 <= wanted <= length:
            errors[b] = 4
        elif 0 <= wanted < length:
            if wanted < own_from[b]:
                errors[b] = 32
            elif wanted % stride and wanted - 1 - (wanted - 1) % stride not in leaders[b]:
                errors[b] = 8
            elif begins is not None and wanted % rate and wanted - wanted % rate < begins[b]:
                errors[b] = 128
        if not errors[b] and wanted >= 0:
            after[b] = wanted
            ring[b] = [leader if leader < wanted else -1 for leader in leaders[b]]
            if begins is not None:
                begins[b] = min(begins[b], wanted)
    return after, ring, begins, errors
