"""Plain PyTorch reference of the selection of blocks by an index (docs/semantics/selection.md §9)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .sparse_attention import documents


def block_scores(
    index_query: Tensor, index_key: Tensor, block_size: int = 16, selection_stride: int = 1
) -> Tensor:
    """The largest product of each leader with the keys of each block, [B, ⌈T_q/s⌉, H_i, ⌈T/block_size⌉].

    In float32, float64 for float64. A NaN counts as -inf; blocks from the leader's own on are -inf.
    """
    wide = torch.promote_types(index_query.dtype, torch.float32)
    T, T_q = index_key.shape[1], index_query.shape[1]
    leaders = torch.arange(T - T_q, T, selection_stride, device=index_query.device)
    products = torch.einsum(
        "blhd,bthd->blht", index_query[:, ::selection_stride].to(wide), index_key.to(wide)
    )
    products = products.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    num_blocks = -(-T // block_size)
    padded = torch.nn.functional.pad(products, (0, num_blocks * block_size - T), value=-torch.inf)
    scores = padded.unflatten(-1, (num_blocks, block_size)).amax(-1)
    before = torch.arange(num_blocks, device=scores.device) < leaders[:, None, None] // block_size
    return scores.masked_fill(~before, -torch.inf)


def choose_blocks(
    scores: Tensor, diagonal: Tensor, count: int, *, local: int = 1, first: int = 0, open_next: bool = False
) -> tuple[Tensor, Tensor]:
    """Lists (blocks int32, scores) [..., count] from the scores [..., N] of blocks and diagonal blocks [...]."""
    num_blocks = scores.shape[-1]
    place = torch.arange(num_blocks, device=scores.device)
    present = place <= diagonal[..., None]
    forced = present & ((place > diagonal[..., None] - local) | (place < first))
    scores = scores.masked_fill(~present, -torch.inf)
    # forced blocks, then larger scores, then lower places; what is behind the diagonal block comes last
    order = scores.argsort(dim=-1, descending=True, stable=True)
    kind = torch.where(forced, 0, torch.where(present, 1, 2))
    order = order.gather(-1, kind.gather(-1, order).argsort(dim=-1, stable=True))
    rank = torch.empty_like(order).scatter_(-1, order, place.expand_as(order))
    if open_next:
        best = rank < forced.sum(-1, keepdim=True).clamp_min(-(-count // 2))
        behind = torch.nn.functional.pad(best, (1, 0))[..., :-1] & ~best & present
        rank = torch.where(best, rank, torch.where(behind, num_blocks + place, 2 * num_blocks + rank))
        order = rank.argsort(dim=-1)
    chosen = torch.nn.functional.pad(order[..., :count], (0, max(0, count - num_blocks)), value=num_blocks)
    chosen = torch.where(chosen <= diagonal[..., None], chosen, num_blocks).sort(dim=-1).values
    valid = chosen < num_blocks
    shown = torch.nn.functional.pad(scores.masked_fill(forced, torch.inf), (0, 1), value=-torch.inf)
    return torch.where(valid, chosen, -1).to(torch.int32), shown.gather(-1, chosen)


def select_blocks(
    index_query: Tensor,
    index_key: Tensor,
    count: int,
    *,
    block_size: int = 16,
    selection_stride: int = 1,
    **choice: Any,
) -> tuple[Tensor, Tensor]:
    """(blocks, scores) [B, ⌈T_q/s⌉, H_i, count] of index_query [B, T_q, H_i, d] and index_key [B, T, H_i, d]."""
    scores = block_scores(index_query, index_key, block_size, selection_stride)
    T, T_q = index_key.shape[1], index_query.shape[1]
    leaders = torch.arange(T - T_q, T, selection_stride, device=scores.device)
    diagonal = (leaders // block_size)[:, None].expand(scores.shape[:-1])
    return choose_blocks(scores, diagonal, count, **choice)


def select_blocks_varlen(
    index_query: Tensor, index_key: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, count: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """(blocks, scores) [N_q, H_i, count] of packed documents, one after another; rows of no leader are -1 and -inf."""
    wide = torch.promote_types(index_query.dtype, torch.float32)
    blocks = index_query.new_full((*index_query.shape[:2], count), -1, dtype=torch.int32)
    scores = index_query.new_full((*index_query.shape[:2], count), -torch.inf, dtype=wide)
    for queries, keys in documents(cu_seq_q, cu_seq_k):
        found = select_blocks(index_query[None, queries], index_key[None, keys], count, **options)
        leaders = slice(queries.start, queries.stop, options.get("selection_stride", 1))
        blocks[leaders], scores[leaders] = found[0][0], found[1][0]
    return blocks, scores
