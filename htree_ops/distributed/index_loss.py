"""The loss of an index whose tokens lie on several ranks (docs/semantics/index_loss.md §9.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from htree_ops.distributed.collectives import all_gather, group_of, join, waited
from htree_ops.distributed.documents import positions_of
from htree_ops.ops.index_loss.collector import Attended
from htree_ops.ops.index_loss.layers import index_of
from htree_ops.ops.ranks import here


class _Loss(torch.autograd.Function):
    """The mean over the positions of all ranks, and the gradients of this rank's share of them.

    Both are computed at once, so that no keys of other ranks are kept for a backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        of_queries: Tensor,
        of_keys: Tensor,
        query: Tensor,
        key: Tensor,
        positions: Tensor,
        ends: Tensor | None,
        part: float,
        group_name: GroupName,
        attended: Attended,
    ) -> Tensor:
        index_query, index_key = index_of(attended.function, query, key, of_queries, of_keys)
        wide = torch.promote_types(query.dtype, torch.float32)
        loss, gradients = query.new_zeros((), dtype=wide), None
        if any(ctx.needs_input_grad):
            gradients = tuple(torch.zeros_like(x) for x in (of_queries, of_keys))
        heads = key.shape[-2]
        group = query.shape[-2] // heads
        weight = torch.full_like(loss, part / heads)
        for head in range(heads if positions.shape[-1] else 0):
            one = slice(head, head + 1)
            rows, keys = query[..., head * group : (head + 1) * group, :], key[..., one, :].contiguous()
            of_index = index_query[..., one, :], index_key[..., one, :].contiguous()
            tensors = (_at(positions, rows, keys), keys, _at(positions, of_index[0], keys), of_index[1])
            options: dict[str, Any] = {"scale": attended.scale, "block_size": attended.block_size}
            found, *sums = torch.ops.htree._index_loss_forward(*tensors, positions, ends, **options)
            loss += found * weight
            if gradients is None:
                continue
            d_query, d_key = torch.ops.htree._index_loss_backward(
                *tensors, positions, *sums, weight, ends, **options
            )
            d_rows = d_query.gather(-3, _places(positions, d_query))
            # A row's gradient is the sum over all positions that are this row.
            d_rows = d_rows.masked_fill(_again(positions)[..., None, None], 0)[..., 0, :]
            gradients[0][head * group : (head + 1) * group] = torch.einsum("...gk,...d->gkd", rows, d_rows)
            gradients[1][head] = torch.einsum("...k,...d->kd", keys[..., 0, :], d_key[..., 0, :])
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        return waited(all_gather(loss, group_name)).sum(0)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        of_queries, of_keys = (dloss.to(x.dtype) * x for x in ctx.saved_tensors)
        return of_queries, of_keys, *[None] * 7


def _places(positions: Tensor, x: Tensor) -> Tensor:
    """Positions [..., rows] as places of rows in x [..., tokens, heads, D]."""
    return positions.clamp(min=0)[..., None, None].expand(*positions.shape, *x.shape[-2:])


def _at(positions: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """A tensor of all tokens that has the rows [..., rows, heads, D] at their positions and nothing elsewhere."""
    whole = rows.new_empty((*keys.shape[:-2], *rows.shape[-2:]))
    return whole.scatter(-3, _places(positions, rows), rows)


def _again(positions: Tensor) -> Tensor:
    """Which of the ascending positions [..., rows] are that before them."""
    return torch.cat((torch.zeros_like(positions[..., :1], dtype=torch.bool), positions.diff() == 0), -1)


def shared_index_loss(
    attended: Attended,
    weights: tuple[Tensor, Tensor],
    draw: Callable[[Tensor, Tensor | None], Tensor | None],
) -> Tensor:
    """:func:`htree_ops.index_loss` of a sequence, or of packed documents, whose tokens are split among ranks.

    Every rank has the same loss, that of all positions. Its gradients are those of the rank's share of the positions:
    their sum over the ranks is the gradient. Where other ranks have other heads, it is the mean over the heads of all.

    Args:
        attended: of this rank's tokens, with the offsets of all documents.
        weights: of index queries and of index keys.
        draw: positions, from keys of which the sizes count, and the offsets; None where there are none.
    """
    mesh = getattr(weights[0], "device_mesh", None)  # of ranks that share the heads
    if mesh is not None:
        part = shared_index_loss(attended, (here(weights[0]), here(weights[1])), draw) / mesh.size()
        of_heads = waited(all_gather(part.detach(), mesh.get_group().group_name)).sum(0)
        return part + (of_heads - part.detach())
    members = group_of(attended.function, attended.group)
    rank, size, name = members.rank(), members.size(), members.group_name
    q, k = attended.q.detach(), attended.k.detach()
    dim = q.dim() - 3  # of the tokens
    key = join(waited(all_gather(k, name)), dim, attended.balance)
    ends = None if attended.cu_seqlens is None else attended.cu_seqlens.to(q.device)
    drawn = draw(key, ends)
    if drawn is None:
        return (weights[0][:0].sum() + weights[1][:0].sum()).to(torch.promote_types(q.dtype, torch.float32))
    # The first rank's count for all. Each rank takes an equal share, with the queries of their owners.
    positions = waited(all_gather(drawn, name))[0].sort(-1).values
    places = positions_of(q.shape[dim], attended.group, attended.balance, q.device)
    at = torch.searchsorted(places, positions).clamp(max=len(places) - 1)
    rows = q.gather(dim, _places(at, q)).masked_fill((places[at] != positions)[..., None, None], 0)
    query = waited(all_gather(rows, name)).sum(0)
    own = slice(rank, None, size)
    positions, query = positions[..., own].contiguous(), query[:, own] if dim else query[own]
    part = positions.shape[-1] / drawn.shape[-1]
    return _Loss.apply(*weights, query, key, positions, ends, part, name, attended)
