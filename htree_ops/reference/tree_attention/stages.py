"""Staged and fused ops of one layer, named and called like the library's (docs/semantics/tree_attention.md §1.8,
§1.15)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from . import selection, state
from .rotary import rotate
from .state import State
from .tree import Candidates, accumulate_dtype, candidates, rows_of_queries


def _score(
    q: Tensor,
    layer_k: Tensor,
    nodes: Tensor,
    present: Tensor,
    found: Candidates,
    cos: Tensor,
    sin: Tensor,
    scale: float | None,
) -> Tensor:
    """Return scale * <R_{n-1} q, R_p K> as [B,T,S,C,J,G] of rows `nodes` [B,T,S,C,J]; -inf where not `present`.

    q [B,T,S*G,K], layer_k [B,N,S,K], cos and sin [>= C,K/2]; arithmetic in the dtype of `cos` or wider.
    """
    groups, num_positions, per_position = layer_k.shape[2], *nodes.shape[3:]
    wide = torch.promote_types(accumulate_dtype(q), cos.dtype)
    if q.numel() == 0 or layer_k.shape[1] == 0 or num_positions == 0:
        shape = (*nodes.shape, q.shape[2] // max(groups, 1))
        return torch.full(shape, -torch.inf, dtype=wide, device=q.device)
    cos, sin = cos.to(wide), sin.to(wide)
    keys = state.gather_nodes(layer_k.to(wide), torch.where(present, nodes, 0).flatten(3))
    keys = keys.unflatten(3, (num_positions, per_position))
    keys = rotate(keys, cos[:num_positions, None], sin[:num_positions, None])
    last = (found.num - 1).clamp(min=0)
    query = q.to(wide).unflatten(2, (groups, -1))
    query = rotate(query, cos[last][..., None, :], sin[last][..., None, :])
    query = query * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.einsum("btscjd,btsgd->btscjg", keys, query)
    return scores.masked_fill(~present[..., None], -torch.inf)


def score_candidates(
    q: Tensor, layer_k: Tensor, found: Candidates, cos: Tensor, sin: Tensor, scale: float | None
) -> Tensor:
    """Return the scores [B,T,S,C,G] of the candidates; -inf where one is absent."""
    nodes, present = found.nodes[..., None], found.present[..., None]
    return _score(q, layer_k, nodes, present, found, cos, sin, scale).squeeze(4)


#: Gathered elements of span means of one piece of query rows: 128 MiB in float64.
PIECE_ELEMENTS = 1 << 24


def score_span_means(
    q: Tensor,
    span_k: Tensor,
    found: Candidates,
    means_per_node: int,
    cos: Tensor,
    sin: Tensor,
    scale: float | None,
) -> Tensor:
    """Return the scores [B,T,S,C,J,G] of each candidate's J = `means_per_node` span means, rotated at its position.

    span_k [B,ceil(T/c),S,K]. -inf where the candidate or the mean is absent, and for the rightmost candidate,
    whose means may hold tokens after the query.
    """
    means = found.nodes[..., None] * means_per_node + torch.arange(means_per_node, device=q.device)
    whole = torch.arange(found.nodes.shape[-1], device=q.device) < found.num[..., None] - 1
    present = (found.present & whole)[..., None] & (means < span_k.shape[1])
    return _score(q, span_k, means, present, found, cos, sin, scale)


def span_importance(
    q: Tensor,
    span_k: Tensor,
    found: Candidates,
    means_per_node: int,
    cos: Tensor,
    sin: Tensor,
    scale: float | None,
    importance: str,
) -> Tensor:
    """Return the importances [B,T,S,C] by span means, for some query rows at a time."""
    row = found.nodes[:, :1].numel() * means_per_node * q.shape[-1]
    step = max(1, PIECE_ELEMENTS // max(row, 1))
    pieces = []
    for first in range(0, max(q.shape[1], 1), step):
        rows = slice(first, first + step)
        some = found.rows(rows)
        scores = score_span_means(q[:, rows], span_k, some, means_per_node, cos, sin, scale)
        pieces.append(selection.importance_of_spans(scores, some.num, importance))
    return torch.cat(pieces, 1)


def importance_of_leaders(
    q: Tensor,
    scores: Tensor,
    found: Candidates,
    stride: int,
    span_k: Tensor | None,
    means_per_node: int,
    cos: Tensor,
    sin: Tensor,
    scale: float | None,
    importance: str,
) -> Tensor:
    """Return the importance [B,ceil(T/s),S,C] by which the leader of every stride selects: of scores, or of spans."""
    leaders = slice(None, None, stride)
    some = found.rows(leaders)
    if span_k is None:
        return selection.importance_of(scores[:, leaders], some.num, importance)
    return span_importance(q[:, leaders], span_k, some, means_per_node, cos, sin, scale, importance)


def compute_scores(
    q: Tensor,
    layer_k: Tensor,
    parents: Tensor,
    cos: Tensor,
    sin: Tensor,
    layer: int,
    compression_rate: int = 16,
    scale: float | None = None,
    t0: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return scores [B,T_q,H_kv,k*r,G] (-inf at p >= n) and num_candidates int32 [B,T_q,H_kv]."""
    found = candidates(parents, layer, layer_k.shape[1], compression_rate, t0)
    return score_candidates(q, layer_k, found, cos, sin, scale), found.num.to(torch.int32)


def accumulate_non_topk(
    layer_v: Tensor,
    parents: Tensor,
    scores: Tensor,
    num_candidates: Tensor,
    layer: int,
    compression_rate: int = 16,
    t0: int = 0,
) -> State:
    """Return the state [B,T_q,H], [B,T_q,H], [B,T_q,H,V] of the candidates p < n whose score is not -inf."""
    found = candidates(parents, layer, layer_v.shape[1], compression_rate, t0)
    positions = torch.arange(scores.shape[-2], device=scores.device)
    kept = found.present & (positions < num_candidates[..., None])
    return state.accumulate(scores, gather_values(layer_v, found, scores.dtype), kept)


def gather_values(layer_v: Tensor, found: Candidates, dtype: torch.dtype) -> Tensor:
    """Return the values [B,T,S,C,V] of candidates; zeros where a layer has none."""
    if layer_v.shape[1] == 0:
        return torch.zeros(*found.nodes.shape, layer_v.shape[-1], dtype=dtype, device=layer_v.device)
    return state.gather_nodes(layer_v.to(dtype), found.nodes)


def compute_and_select(
    q: Tensor,
    layer_k: Tensor,
    layer_v: Tensor,
    parents: Tensor,
    cos: Tensor,
    sin: Tensor,
    layer: int,
    compression_rate: int = 16,
    top_k: int = 512,
    scale: float | None = None,
    t0: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Per query head (lists [B,T_q,H,k]): the state over all candidates, and the top-k nodes and scores.

    topk_indices int32 [B,T_q,H,k] in key order (-1 tail), topk_scores likewise (-inf tail); both have
    width 0 at layer 0. K/V head of query head h is h // G.
    """
    group = q.shape[2] // max(layer_k.shape[2], 1)
    keys, values = (x.repeat_interleave(group, dim=2) for x in (layer_k, layer_v))
    found = candidates(parents, layer, keys.shape[1], compression_rate, t0)
    scores = score_candidates(q, keys, found, cos, sin, scale)
    lmax, lsum, lout = state.accumulate(scores, gather_values(values, found, scores.dtype), found.present)
    positions = selection.select_topk(scores, found.num, top_k)
    if layer == 0:
        positions = positions[..., :0]
    slots = positions.clamp(min=0).long()
    nodes = (parents.long() * compression_rate)[..., None] + torch.arange(
        compression_rate, device=parents.device
    )
    indices = torch.where(positions >= 0, nodes.flatten(-2).gather(-1, slots), -1).to(torch.int32)
    chosen = scores[..., 0].gather(-1, slots).masked_fill(positions < 0, -torch.inf)
    return lmax, lsum, lout, indices, chosen


def bottom_accumulate(
    q: Tensor,
    layer_k: Tensor,
    layer_v: Tensor,
    parents: Tensor,
    cos: Tensor,
    sin: Tensor,
    compression_rate: int = 16,
    scale: float | None = None,
    t0: int = 0,
    selection_stride: int = 1,
) -> State:
    """Return the state of all candidates of layer 0; row i of `parents` serves queries i*s ... i*s+s-1."""
    lists = rows_of_queries(parents, q.shape[1], selection_stride)
    found = candidates(lists, 0, layer_k.shape[1], compression_rate, t0)
    scores = score_candidates(q, layer_k, found, cos, sin, scale)
    return state.accumulate(scores, gather_values(layer_v, found, scores.dtype), found.present)


def select_accumulate(
    q: Tensor,
    layer_k: Tensor,
    layer_v: Tensor,
    parents: Tensor,
    cos: Tensor,
    sin: Tensor,
    layer: int,
    compression_rate: int = 16,
    top_k: int = 512,
    scale: float | None = None,
    importance: str = "lse_causal",
    t0: int = 0,
    selection_stride: int = 1,
    span_k: Tensor | None = None,
    selection_span: int | None = None,
    **choice: Unpack[selection.Choice],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select at a layer above the bottom: the state of what is left out, and next_parents.

    Each s queries of a stride take the set of their leader. next_parents is int32 [B,ceil(T_q/s),H_kv,k].
    """
    if (span_k is None) != (selection_span is None):
        raise ValueError("span_k and selection_span must be given together or not at all")
    if layer == 0:
        raise ValueError("layer must be at least 1, got 0: nothing is selected at the bottom")
    lists = rows_of_queries(parents, q.shape[1], selection_stride)
    found = candidates(lists, layer, layer_k.shape[1], compression_rate, t0)
    scores = score_candidates(q, layer_k, found, cos, sin, scale)
    per_node = compression_rate**layer // (selection_span or 1)
    value = importance_of_leaders(
        q, scores, found, selection_stride, span_k, per_node, cos, sin, scale, importance
    )
    positions = selection.select_important(value, found.num[:, ::selection_stride], top_k, **choice)
    nodes = selection.compute_next_parents(parents, positions, compression_rate)
    chosen = selection.positions_mask(positions, scores.shape[-2])
    chosen = rows_of_queries(chosen, q.shape[1], selection_stride)
    values = gather_values(layer_v, found, scores.dtype)
    return (*state.accumulate(scores, values, found.present & ~chosen), nodes)


def recompute_selection(
    q: Tensor, layer_k: Tensor, parents: Tensor, *arguments: Any, **keywords: Any
) -> Tensor:
    """Return next_parents of `select_accumulate`, whose other arguments it takes, without touching values."""
    return select_accumulate(q, layer_k, layer_k[..., :0], parents, *arguments, **keywords)[3]
