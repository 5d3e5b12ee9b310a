"""Softmax states (max, sum, out): accumulate, merge, subtract, normalise (docs/semantics/tree_attention.md §1.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from .selection import sort_nodes

State = tuple[Tensor, Tensor, Tensor]


def empty_state(batch: int, num_queries: int, heads: int, width: int, like: Tensor) -> State:
    """Return the empty state (-inf, 0, 0): [B,T,H], [B,T,H], [B,T,H,V] with like's dtype and device."""
    top = like.new_full((batch, num_queries, heads), -torch.inf)
    return top, torch.zeros_like(top), like.new_zeros(batch, num_queries, heads, width)


def gather_nodes(layer: Tensor, nodes: Tensor) -> Tensor:
    """Pick layer[b, nodes[b,t,s,c], s]: [B,N,S,D] and int64 [B,T,S,C] -> [B,T,S,C,D]."""
    batch_idx = torch.arange(layer.shape[0], device=layer.device).view(-1, 1, 1, 1)
    head_idx = torch.arange(layer.shape[2], device=layer.device).view(1, 1, -1, 1)
    return layer[batch_idx, nodes, head_idx]


def accumulate(scores: Tensor, values: Tensor, kept: Tensor) -> State:
    """Return the state of the kept candidates.

    scores [B,T,S,C,G], values [B,T,S,C,V], kept bool [B,T,S,C]; the state's heads are S*G.
    A score of -inf has no weight and its value is not read; NaN propagates. The max is a constant for
    autograd: its gradient cancels in out / sum.
    """
    batch, num_queries, groups, num_candidates, heads = scores.shape
    width = values.shape[-1]
    if num_candidates == 0:
        return empty_state(batch, num_queries, groups * heads, width, scores)
    used = kept[..., None] & (scores != -torch.inf)
    masked = scores.masked_fill(~used, -torch.inf)
    top = masked.detach().amax(dim=-2)
    base = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(masked - base[..., None, :])
    # 0 * NaN is NaN: an unused value must not be touched, neither for all heads nor for one of them.
    clean = values.masked_fill(~used.any(-1)[..., None], 0.0)
    finite = clean.isfinite()
    out = torch.einsum("btscg,btscv->btsgv", weights, clean.masked_fill(~finite, 0.0))
    if not finite.all():
        spread = clean[..., None, :].masked_fill(~used[..., None], 0.0)
        out = torch.where(spread.isfinite().all(-3), out, (weights[..., None] * spread).sum(-3))
    flat = (batch, num_queries, groups * heads)
    return top.reshape(flat), weights.sum(-2).reshape(flat), out.reshape(*flat, width)


def _factor(old: Tensor, new: Tensor, total: Tensor) -> Tensor:
    """Return exp(old - new), taken as 0 for an empty state (where -inf - -inf would be NaN)."""
    return torch.exp(torch.where(total == 0, -torch.inf, old - new))


def merge_to_global(
    gmax: Tensor, gsum: Tensor, gout: Tensor, lmax: Tensor, lsum: Tensor, lout: Tensor
) -> State:
    """Merge a layer's state into the running one; [B,T,H], [B,T,H], [B,T,H,V] each. Returns the new state."""
    top = torch.maximum(gmax, lmax)
    keep, add = _factor(gmax, top, gsum), _factor(lmax, top, lsum)
    return top, gsum * keep + lsum * add, gout * keep[..., None] + lout * add[..., None]


def final_normalize(gout: Tensor, gsum: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return gout / gsum [B,T,H,V] in `dtype` (default gout's); 0/0 is NaN as in torch.softmax."""
    out = gout / gsum[..., None]
    return out if dtype is None else out.to(dtype)


def subtract_topk(
    layer_v: Tensor, topk_indices: Tensor, topk_scores: Tensor, lmax: Tensor, lsum: Tensor, lout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Remove the listed nodes from a state that holds all candidates (historical; accurate for sigma <= 2).

    layer_v [B,N,H_kv,V]; topk_indices int32, topk_scores [B,T,H,k]; state [B,T,H] and [B,T,H,V].
    Returns the reduced state and the list sorted ascending (-1 tail). The state becomes the exact empty
    one where the list is not full (then nothing else existed) or where the remainder is not above its
    own rounding error, k * eps of the sum.
    """
    num_heads, group = lmax.shape[-1], lmax.shape[-1] // layer_v.shape[2]
    wide = lsum.dtype
    valid = (topk_indices >= 0) & (topk_indices < layer_v.shape[1])
    values = gather_nodes(
        layer_v.repeat_interleave(group, dim=2).to(wide), torch.where(valid, topk_indices, 0).long()
    )
    assert values.shape[2] == num_heads
    tmax, tsum, tout = accumulate(topk_scores.to(wide)[..., None], values, valid)
    factor = _factor(tmax, lmax, tsum)
    rest = lsum - tsum * factor
    top_k = topk_indices.shape[-1]
    empty = (topk_indices == -1).any(-1) | (rest <= top_k * torch.finfo(wide).eps * lsum)
    new_max = torch.where(empty, -torch.inf, lmax)
    new_sum = torch.where(empty, 0.0, rest)
    new_out = torch.where(empty[..., None], 0.0, lout - tout * factor[..., None])
    return new_max, new_sum, new_out, sort_nodes(topk_indices, topk_indices != -1)
