"""The whole algorithm with every option and a trace (docs/semantics/tree_attention.md §1.5-§1.8, §1.12, §1.13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from . import selection, state
from .rotary import tables
from .stages import gather_values, importance_of_leaders, score_candidates
from .state import State
from .tree import (
    Candidates,
    OwnTops,
    accumulate_dtype,
    build_layers,
    candidates,
    num_parents,
    rows_of_queries,
    span_means,
    top_parents,
)


@dataclass
class LayerTrace:
    """What one layer did. S selection heads with G query heads each, C positions.

    parents: int32 [B,ceil(T_q/s),S,k], the lists used here; with M > k*r -1 where a row opens every node (§1.3).
    candidates: nodes, counts and masks [B,T_q,S,C].
    scores: [B,T_q,S,C,G]. selected: bool [B,T_q,S,C], refined at the next layer.
    merged: bool [B,T_q,S,C], present and not selected: this layer's part of the cut.
    importance: [B,ceil(T_q/s),S,C], by which the leaders select; None at the bottom, and under given lists
        unless they were asked for.
    state: the running state (max, sum, out) after this layer was merged.
    """

    layer: int
    parents: Tensor
    candidates: Candidates
    scores: Tensor
    selected: Tensor
    merged: Tensor
    importance: Tensor | None
    state: State


@dataclass
class Forward:
    """Result of `htree_forward_naive`. out [B,T_q,H,V] is in the compute dtype; trace is top layer first."""

    out: Tensor
    gmax: Tensor
    gsum: Tensor
    parents: list[Tensor]
    trace: list[LayerTrace]
    layers: list[tuple[Tensor, Tensor]]

    @property
    def lse(self) -> Tensor:
        """Natural logarithm of the softmax normaliser, [B,T_q,H]."""
        return self.gmax + self.gsum.log()


def _check(
    q: Tensor, k: Tensor, v: Tensor, rate: int, top_nodes: int, top_k: int, stride: int, span: int | None
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got {tensor.dim()}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k, v do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if q.shape[2] % k.shape[2] or q.shape[1] > k.shape[1] or q.shape[3] % 2:
        raise ValueError(f"H % H_kv, T_q <= T and even K are required: {tuple(q.shape)}, {tuple(k.shape)}")
    if rate < 2 or top_k < 1 or top_nodes < 1:
        raise ValueError(f"r >= 2, k >= 1, M >= 1 are required: r={rate}, k={top_k}, M={top_nodes}")
    if stride < 1 or rate % stride or stride & (stride - 1) or (k.shape[1] - q.shape[1]) % stride:
        raise ValueError(f"selection_stride {stride} must be a power of two that divides r and T - T_q")
    if span is not None and (span < 1 or rate % span):
        raise ValueError(f"selection_span {span} must be None or a divisor of r = {rate}")


def htree_forward_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compression_rate: int = 16,
    max_top_nodes: int = 8192,
    top_k_per_layer: int = 512,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    inv_freq: Sequence[float] | None = None,
    importance: str = "lse_causal",
    scope: str = "kv_head",
    accumulate: str = "direct",
    selection_stride: int = 1,
    selection_span: int | None = None,
    parents: Sequence[Tensor] | None = None,
    with_importance: bool = False,
    compute_dtype: torch.dtype | None = None,
    tree: tuple[list[tuple[Tensor, Tensor]], Tensor | None] | None = None,
    **choice: Unpack[selection.Choice],
) -> Forward:
    """Tree attention of q [B,T_q,H,K] over k [B,T,H_kv,K], v [B,T,H_kv,V]; q is the suffix of the sequence.

    importance: "lse_causal" | "lse" | "exp_joint" (§1.6). scope: "kv_head" shares one set among the G
    query heads of a K/V head, "q_head" selects per query head. accumulate: "direct" | "subtract" (§1.7).
    inv_freq: K/2 frequencies in place of rope_base^(-2i/K) (§1.4).
    selection_span: tokens of a span mean whose scores decide the selection (§1.15); None scores the nodes.
    parents: one list per layer, as `attention_forward` returns them; they replace the selection
    (teacher forcing), and the result is then differentiable by autograd in q, k and v. With M > k*r the lists of a
    row's top layer and of those above are not read.
    with_importance: put the importances into the trace under given lists too.
    compute_dtype: dtype of everything after the tree, which is always rounded to k's and v's own dtype
    level by level; default float32 (float64 for float64 inputs). The rotary table is rounded to float32
    first unless q is float64, as in the library.
    tree: the layers and, with selection_span, the span means to use in place of those over k and v, whose shapes are
    theirs.
    choice: of selection.Choice.
    """
    rate, top_k, stride = compression_rate, top_k_per_layer, selection_stride
    _check(q, k, v, rate, max_top_nodes, top_k, stride, selection_span)
    if selection_span is not None and importance == "lse":
        raise ValueError("selection_span must be None with importance 'lse'")
    if scope not in ("kv_head", "q_head") or accumulate not in ("direct", "subtract"):
        raise ValueError(f"unknown scope {scope!r} or accumulate {accumulate!r}")
    wide = accumulate_dtype(q) if compute_dtype is None else compute_dtype
    group = q.shape[2] // k.shape[2]
    if scope == "q_head":
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    batch, num_queries, num_heads = q.shape[:3]
    groups, t0 = k.shape[2], k.shape[1] - num_queries
    query = q.to(wide)
    if tree is not None:
        layers = [(keys.to(wide), values.to(wide)) for keys, values in tree[0]]
        span_k = tree[1]
    else:
        layers = build_layers(k, v, rate, max_top_nodes, wide)
        span_k = (
            None if selection_span is None else span_means(k.detach().to(wide), selection_span).to(k.dtype)
        )
    lists = top_parents(batch, num_queries, groups, top_k, len(layers), rate, t0, stride, device=q.device)
    own: OwnTops | None = None  # with M <= k*r every row may walk the tree of all tokens
    if max_top_nodes > top_k * rate:
        own = OwnTops.of(torch.arange(t0, k.shape[1], stride, device=q.device), rate, max_top_nodes, top_k)
    used: list[Tensor] = []
    trace: list[LayerTrace] = []
    total = state.empty_state(batch, num_queries, num_heads, v.shape[-1], query)
    for layer in reversed(range(len(layers))):
        layer_k, layer_v = layers[layer]
        if parents is not None:
            lists = parents[layer]
        lists = lists if own is None else own.lists(lists, layer)
        used.insert(0, lists if own is None else own.kept(lists, layer, top_k))
        busy = max(1, int(num_parents(lists).max())) if lists.numel() else 0  # the tail of -1 costs only time
        short = lists[..., :busy]
        found = candidates(rows_of_queries(short, num_queries, stride), layer, layer_k.shape[1], rate, t0)
        cos, sin = tables(busy * rate, q, rope_base, inv_freq, wide)
        scores = score_candidates(query, layer_k, found, cos, sin, scale)
        value = None
        if layer > 0 and (parents is None or with_importance):
            per_node = rate**layer // (selection_span or 1)
            rotation = (cos, sin, scale)
            value = importance_of_leaders(
                query.detach(), scores.detach(), found, stride, span_k, per_node, *rotation, importance
            )
        if layer == 0:
            selected = torch.zeros_like(found.present)
        elif parents is not None:
            selected = listed_candidates(found, rows_of_queries(parents[layer - 1], num_queries, stride))
        else:
            assert value is not None
            positions = selection.select_important(value, found.num[:, ::stride], top_k, **choice)
            lists = selection.compute_next_parents(short, positions, rate)
            mask = selection.positions_mask(positions, scores.shape[-2])
            selected = rows_of_queries(mask, num_queries, stride)
        merged = found.present & ~selected
        values = gather_values(layer_v, found, layer_v.dtype)
        if accumulate == "direct":
            part = state.accumulate(scores, values, merged)
        else:
            part = _subtracted(scores, values, found, selected)
        total = state.merge_to_global(*total, *part)
        trace.append(LayerTrace(layer, used[0], found, scores, selected, merged, value, total))
    out = state.final_normalize(total[2], total[1])
    return Forward(out, total[0], total[1], used, trace, layers)


def listed_candidates(found: Candidates, chosen: Tensor) -> Tensor:
    """Mark the present candidates whose node stands in the ascending lists `chosen` [B,T_q,S,k]."""
    last = torch.iinfo(torch.int64).max
    ordered = torch.where(chosen == -1, last, chosen.long()).contiguous()
    slot = torch.searchsorted(ordered, found.nodes.contiguous()).clamp(max=ordered.shape[-1] - 1)
    return found.present & (ordered.gather(-1, slot) == found.nodes)


def _subtracted(scores: Tensor, values: Tensor, found: Candidates, selected: Tensor) -> State:
    """Accumulate every candidate, then take the selected ones away; exact empty state if none is left."""
    lmax, lsum, lout = state.accumulate(scores, values, found.present)
    tmax, tsum, tout = state.accumulate(scores, values, found.present & selected)
    factor = torch.exp(torch.where(tsum == 0, -torch.inf, tmax - lmax))
    group = scores.shape[-1]
    nothing = ~(found.present & ~selected).any(-1).repeat_interleave(group, dim=-1)
    return (
        torch.where(nothing, -torch.inf, lmax),
        torch.where(nothing, 0.0, lsum - tsum * factor),
        torch.where(nothing[..., None], 0.0, lout - tout * factor[..., None]),
    )
