"""Reference of the tree cache, written from docs/semantics/tree_cache.md §7 and independent of every kernel.

Appending follows the definition token by token. Attention gathers the tokens of a sequence from its pages and takes
rows of the reference of tree attention, which builds the tree anew: the nodes in the pages are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tree_attention import htree_forward_naive
from .tree_attention.tree import accumulate_dtype

__all__ = ["cache_layers", "gather_tokens", "tree_cache_append", "tree_cache_attention"]


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
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, lse, lists, list_pos) of `tree_cache_attention`, row by row; out in the compute dtype."""
    stride, wide = selection_stride, accumulate_dtype(q) if compute_dtype is None else compute_dtype
    layers = cache_layers(block_table.shape[1] * page_size, compression_rate, max_top_nodes)
    batch, kv_heads = len(block_table), k_pool.shape[1]
    ring = list_pos.shape[1] if list_pos is not None else 4 if stride > 1 else 0
    out = torch.zeros(*q.shape[:2], v_pool.shape[3], dtype=wide)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide)
    new_pos = torch.full((batch, ring), -1, dtype=torch.int32) if list_pos is None else list_pos.clone()
    shape = (batch, ring, layers, kv_heads, top_k)
    new_lists = torch.full(shape, -1, dtype=torch.int32) if lists is None else lists.clone()

    def forward(query: Tensor, keys: Tensor, values: Tensor, length: int, parents: list[Tensor] | None):  # type: ignore[no-untyped-def]
        # A tree deeper than the text needs opens everything above, so that all lists have the same depth.
        return htree_forward_naive(
            query[None, None],
            keys[None, :length],
            values[None, :length],
            compression_rate=compression_rate,
            max_top_nodes=max_top_nodes,
            top_k_per_layer=top_k,
            scale=scale,
            rope_base=rope_base,
            importance=importance,
            selection_span=selection_span,
            parents=parents,
            compute_dtype=wide,
        )

    for b in range(batch):
        first, length = int(cu_q[b]), int(lengths[b])
        count = int(cu_q[b + 1]) - first if q_lengths is None else int(q_lengths[b])
        begin = length - count
        new_pos[b, new_pos[b] >= max(0, begin)] = -1
        keys = gather_tokens(k_pool, block_table[b], length, page_size)
        values = gather_tokens(v_pool, block_table[b], length, page_size)
        for t in range(max(0, begin), length):
            leader = t - t % stride
            depth = cache_layers(t + 1, compression_rate, max_top_nodes)
            if leader >= max(0, begin):
                own = forward(q[first + leader - begin], keys, values, leader + 1, None)
                used = own.parents
            else:
                found = [] if list_pos is None else (list_pos[b] == leader).nonzero().flatten().tolist()
                used = [lists[b, found[0], i][None, None] for i in range(layers)] if found else None  # type: ignore[index]
            row = first + t - begin
            if used is None:
                out[row], lse[row] = torch.nan, torch.nan
                continue
            used = [
                used[i] if i < len(used) else _opened(leader, i, compression_rate, kv_heads, top_k)
                for i in range(layers)
            ]
            result = forward(q[row], keys, values, t + 1, used[:depth])
            out[row], lse[row] = result.out[0, 0], result.lse[0, 0]
            if leader == t and ring:
                slot = t // stride % ring
                new_pos[b, slot] = t
                new_lists[b, slot] = torch.stack([x[0, 0] for x in used])
    return out, lse, new_lists, new_pos


def _opened(token: int, layer: int, rate: int, kv_heads: int, top_k: int) -> Tensor:
    """The list [1, 1, H_kv, k] of a layer in which everything is opened."""
    count = token // rate**layer // rate + 1
    nodes = torch.arange(top_k, dtype=torch.int32)
    return torch.where(nodes < count, nodes, -1).expand(1, 1, kv_heads, top_k)
