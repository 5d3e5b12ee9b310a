"""What the algorithm must agree with: dense attention, one softmax over the cut, the tokens that a cut covers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import Forward
from .rotary import rope, tables
from .state import gather_nodes
from .tree import accumulate_dtype


def dense_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    inv_freq: Sequence[float] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Causal attention with rotary embedding at token positions; q [B,T_q,H,K] is a suffix of k [B,T,H_kv,K].

    Equals tree attention where nothing is left out (§1.5): T <= M, or k >= N of every upper layer.
    """
    wide = accumulate_dtype(q) if compute_dtype is None else compute_dtype
    length, num_queries, group = k.shape[1], q.shape[1], q.shape[2] // k.shape[2]
    cos, sin = tables(length, q, rope_base, inv_freq, wide)
    tokens = torch.arange(length, device=q.device)
    times = tokens[length - num_queries :]
    query = rope(q.to(wide), cos, sin, times)
    keys = rope(k.to(wide), cos, sin, tokens).repeat_interleave(group, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", query, keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(tokens > times[:, None], -torch.inf)
    values = v.to(wide).repeat_interleave(group, dim=2)
    return torch.einsum("bhts,bshv->bthv", scores.softmax(-1), values)


def softmax_over_cut(forward: Forward) -> Tensor:
    """Recompute out [B,T_q,H,V] as one softmax over all merged candidates of all layers (§1.5)."""
    scores, values = [], []
    for step in forward.trace:
        layer_v = forward.layers[step.layer][1]
        scores.append(step.scores.masked_fill(~step.merged[..., None], -torch.inf))
        values.append(gather_nodes(layer_v, step.candidates.nodes))
    weights = torch.cat(scores, dim=-2).softmax(dim=-2)
    out = torch.einsum("btscg,btscv->btsgv", weights, torch.cat(values, dim=-2))
    return out.reshape(forward.out.shape)


def cut_coverage(forward: Forward, compression_rate: int) -> Tensor:
    """Count how often the cut covers each token: int64 [B,T_q,S,T]; must be 1 for j <= t and 0 beyond."""
    length = forward.layers[0][0].shape[1]
    shape = forward.trace[0].merged.shape[:3]
    edges = torch.zeros(*shape, length + 1, dtype=torch.long, device=forward.out.device)
    for step in forward.trace:
        span = compression_rate**step.layer
        first = (step.candidates.nodes * span).clamp(max=length)
        past = ((step.candidates.nodes + 1) * span).clamp(max=length)
        ones = step.merged.long()
        edges.scatter_add_(-1, first, ones).scatter_add_(-1, past, -ones)
    return edges.cumsum(-1)[..., :length]
