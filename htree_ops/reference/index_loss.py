"""Plain PyTorch reference of the loss of an index (docs/semantics/index_loss.md §9.3)."""

from __future__ import annotations

import torch
from torch import Tensor


def divergences(
    query: Tensor,
    key: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    token: int,
    *,
    scale: float | None = None,
    block_size: int = 16,
) -> Tensor:
    """KL(masses of the attention ‖ softmax of the block scores) of the query at ``token`` of one sequence, [H_i].

    query [T, H, K], key [T, H_kv, K], index_query and index_key [T, H_i, d]. In float32, float64 for float64.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    counted = token // block_size * block_size
    H, H_i = query.shape[1], index_query.shape[1]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    keys = key[:counted].detach().to(wide).repeat_interleave(H // key.shape[1], dim=1)
    attention = (scale * torch.einsum("hk,thk->ht", query[token].detach().to(wide), keys)).softmax(-1)
    masses = attention.unflatten(-1, (-1, block_size)).sum(-1).unflatten(0, (H_i, -1)).mean(1)
    products = torch.einsum("hd,thd->ht", index_query[token].to(wide), index_key[:counted].to(wide))
    blocks = products.unflatten(-1, (-1, block_size))
    first = blocks.detach().argmax(
        -1, keepdim=True
    )  # torch has the first of equal ones, and a NaN before all
    guess = blocks.gather(-1, first)[..., 0].log_softmax(-1)
    return (torch.xlogy(masses, masses) - torch.where(masses == 0, 0, masses * guess)).sum(-1)


def index_loss(
    query: Tensor,
    key: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    block_size: int = 16,
) -> Tensor:
    """The loss of ``torch.ops.htree.index_loss``, one position after another; 0 where there is none."""
    tensors: tuple[Tensor, ...] = (query, key, index_query, index_key)
    if cu_seqlens is not None:
        tensors = tuple(x[None] for x in tensors)
    found = []
    for b, drawn in enumerate(positions.expand(len(tensors[0]), -1).tolist()):
        for token in drawn:
            start, end = 0, tensors[0].shape[1]
            if cu_seqlens is not None:
                ends = cu_seqlens.tolist()
                start = max(x for x in ends if x <= token)
                end = min(x for x in ends if x > token)
            q, k, iq, ik = (x[b, start:end] for x in tensors)
            found.append(divergences(q, k, iq, ik, token - start, scale=scale, block_size=block_size))
    if not found:
        return 0 * (index_query.sum() + index_key.sum()).to(torch.promote_types(query.dtype, torch.float32))
    return torch.stack(found).mean()
