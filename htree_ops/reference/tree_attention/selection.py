"""Importance of candidates, the order of keys and the lists of the next layer (docs/semantics §1.6, §1.15)."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from .tree import num_parents

IMPORTANCES = ("lse_causal", "lse", "exp_joint")
SMALLEST_NORMAL = 2.0**-126  # weights below it count as 0, whatever the dtype of the scores


class Choice(TypedDict, total=False):
    """How positions are chosen by their importances.

    open_next: half of the selected are the most important ones, the next ones stand behind these (§1.6).
    tie_bits: low bits of the importance that are ignored when ordering.
    """

    open_next: bool
    tie_bits: int


def importance_of(scores: Tensor, num_candidates: Tensor, importance: str = "lse_causal") -> Tensor:
    """Return the importance [B,T,S,C] of each candidate from scores [B,T,S,C,G] and n [B,T,S].

    Entries at positions >= n hold 0. The rightmost candidate n-1 has no special value here: it is
    selected unconditionally, and stays out of the normaliser except for "lse".
    """
    if importance not in IMPORTANCES:
        raise ValueError(f"importance must be one of {IMPORTANCES}, got {importance!r}")
    positions = torch.arange(scores.shape[-2], device=scores.device)
    inside = positions < num_candidates[..., None]
    counted = inside if importance == "lse" else positions < num_candidates[..., None] - 1
    return _shares(scores[..., None, :], counted, importance).masked_fill(~inside, 0.0)


def importance_of_spans(
    span_scores: Tensor, num_candidates: Tensor, importance: str = "lse_causal"
) -> Tensor:
    """Return the importance [B,T,S,C] of each candidate from the scores [B,T,S,C,J,G] of its J span means.

    A mean that is absent has the score -inf. Entries at positions >= n - 1 hold 0: the rightmost candidate is
    selected unconditionally, and its means have no score.
    """
    if importance not in ("lse_causal", "exp_joint"):
        raise ValueError(f"importance must be lse_causal or exp_joint with span means, got {importance!r}")
    positions = torch.arange(span_scores.shape[3], device=span_scores.device)
    counted = positions < num_candidates[..., None] - 1
    return _shares(span_scores, counted, importance).masked_fill(~counted, 0.0)


def _shares(scores: Tensor, counted: Tensor, importance: str) -> Tensor:
    """Sum exp(score - reference) over means and heads of [B,T,S,C,J,G]; the reference is of candidates that count."""
    together = scores.masked_fill(~counted[..., None, None], -torch.inf).flatten(3, 4)
    if scores.numel() == 0:
        reference = scores
    elif importance == "exp_joint":
        reference = together.flatten(3).amax(-1)[..., None, None, None]
    else:
        reference = torch.logsumexp(together, dim=3)[..., None, None, :]
    weights = torch.exp(scores - reference)
    weights = torch.where((reference == -torch.inf) | (weights < SMALLEST_NORMAL), 0.0, weights)
    total = torch.zeros_like(scores[..., 0, 0])
    for head_idx in range(scores.shape[-1]):  # ascending: the order is part of the definition
        of_head = torch.zeros_like(total)
        for mean_idx in range(scores.shape[-2]):
            of_head = of_head + weights[..., mean_idx, head_idx]
        total = total + of_head
    return total


def drop_low_bits(importance: Tensor, tie_bits: int) -> Tensor:
    """Clear the `tie_bits` low mantissa bits of non-negative float32 importances (NaN stays NaN)."""
    if tie_bits == 0:
        return importance
    bits = importance.float().view(torch.int32) >> tie_bits << tie_bits
    return torch.where(importance.isnan(), torch.nan, bits.view(torch.float32))


def order_by_key(importance: Tensor, num_candidates: Tensor) -> Tensor:
    """Sort positions by key: candidate n-1, then NaN, then larger importance; equal ones by position."""
    positions = torch.arange(importance.shape[-1], device=importance.device)
    key = importance.double().masked_fill(importance.isnan(), 1e300)
    key = torch.where(positions == num_candidates[..., None] - 1, torch.inf, key)
    key = torch.where(positions < num_candidates[..., None], key, -1.0)
    return key.sort(dim=-1, descending=True, stable=True).indices


def select_topk(
    scores: Tensor,
    num_candidates: Tensor,
    top_k: int,
    importance: str = "lse_causal",
    open_next: bool = False,
    tie_bits: int = 0,
) -> Tensor:
    """Return the min(k, n) selected positions in key order, -1 tail, int32 [B,T,S,k].

    Counts outside [0, C] are clamped to it.
    """
    num_candidates = num_candidates.clamp(0, scores.shape[-2])
    value = importance_of(scores, num_candidates, importance)
    return select_important(value, num_candidates, top_k, open_next=open_next, tie_bits=tie_bits)


def next_after_best(order: Tensor, num_candidates: Tensor, top_k: int) -> Tensor:
    """Reorder positions [...,C] given in key order for `open_next`, where n > k.

    The ceil(k/2) first come first, the rightmost before the others, then the positions p+1 < n behind them, each in
    the order of positions; then the rest as it was.
    """
    count = order.shape[-1]
    positions = torch.arange(count, device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, positions)
    best = rank < -(-top_k // 2)
    behind = torch.nn.functional.pad(best, (1, 0))[..., :-1] & ~best & (positions < num_candidates[..., None])
    key = torch.where(best | behind, positions + count * behind, 2 * count + rank)
    key = torch.where(positions == num_candidates[..., None] - 1, -1, key)
    return torch.where(num_candidates[..., None] > top_k, key.argsort(dim=-1), order)


def select_important(
    importance: Tensor, num_candidates: Tensor, top_k: int, **choice: Unpack[Choice]
) -> Tensor:
    """`select_topk` from importances [B,T,S,C]."""
    order = order_by_key(drop_low_bits(importance, choice.get("tie_bits", 0)), num_candidates)
    if choice.get("open_next", False):
        order = next_after_best(order, num_candidates, top_k)
    order = order[..., :top_k]
    order = torch.nn.functional.pad(order, (0, top_k - order.shape[-1]), value=-1)
    kept = torch.arange(top_k, device=importance.device) < num_candidates[..., None]
    return torch.where(kept, order, -1).to(torch.int32)


def mask_topk_scores(scores: Tensor, topk_positions: Tensor) -> Tensor:
    """Return scores [B,T,S,C,G] with -inf at the listed positions; positions outside [0, C) do nothing."""
    return scores.masked_fill(positions_mask(topk_positions, scores.shape[-2])[..., None], -torch.inf)


def positions_mask(positions: Tensor, num_positions: int) -> Tensor:
    """Turn position lists [...,k] into a bool mask [...,C]; positions outside [0, C) are ignored."""
    valid = (positions >= 0) & (positions < num_positions)
    slots = torch.where(valid, positions, num_positions).long()
    mask = torch.zeros(*positions.shape[:-1], num_positions + 1, dtype=torch.bool, device=positions.device)
    return mask.scatter_(-1, slots, True)[..., :-1]


def sort_nodes(nodes: Tensor, valid: Tensor) -> Tensor:
    """Sort the valid nodes [...,k] ascending and fill the tail with -1, int32."""
    last = torch.iinfo(torch.int64).max
    ordered = torch.where(valid, nodes.long(), last).sort(dim=-1).values
    return torch.where(ordered == last, -1, ordered).to(torch.int32)


def compute_next_parents(parents: Tensor, topk_positions: Tensor, compression_rate: int = 16) -> Tensor:
    """Map positions to nodes, c(p) = P[p // r] * r + p % r, ascending, -1 tail: int32 [B,T,S,k].

    Positions that are negative or lie beyond the listed parents are dropped.
    """
    positions = topk_positions.long()
    slot = positions.div(compression_rate, rounding_mode="floor")
    valid = (positions >= 0) & (slot < num_parents(parents)[..., None])
    chosen = parents.long().gather(-1, torch.where(valid, slot, 0))
    return sort_nodes(chosen * compression_rate + positions % compression_rate, valid)
