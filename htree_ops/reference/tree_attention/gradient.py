"""The backward pass written out formula by formula (docs/semantics/tree_attention.md §1.10); autograd is not used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import Forward
from .rotary import rotate, tables
from .state import gather_nodes
from .tree import tree_build_backward


def htree_backward_naive(
    dout: Tensor,
    q: Tensor,
    forward: Forward,
    *,
    dlse: Tensor | None = None,
    compression_rate: int = 16,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    inv_freq: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [B,T_q,H,K], dk [B,T,S,K], dv [B,T,S,V] for dout [B,T_q,H,V] and dlse [B,T_q,H], that of the lse.

    The selection is held fixed.

    `forward` is the result of `htree_forward_naive` for the same q with scope "kv_head". Everything is
    computed in the dtype of forward.out.
    """
    rate = compression_rate
    wide = forward.out.dtype
    batch, num_queries, num_heads, width = q.shape
    groups = forward.layers[0][0].shape[2]
    factor = width**-0.5 if scale is None else scale
    split = (batch, num_queries, groups, num_heads // groups)
    query, d_out = q.to(wide).reshape(*split, width), dout.to(wide).reshape(*split, dout.shape[-1])
    delta = (d_out * forward.out.reshape(d_out.shape)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(wide).reshape(split)
    gmax, gsum = forward.gmax.reshape(split), forward.gsum.reshape(split)
    dq = torch.zeros_like(query)
    dk, dv = (torch.zeros_like(x) for x in forward.layers[-1])
    for step in forward.trace:
        layer_k, layer_v = forward.layers[step.layer]
        if step.layer < len(forward.layers) - 1:
            dk, dv = tree_build_backward(dk, dv, layer_k.shape[1], rate)
        found = step.candidates
        num_positions = found.nodes.shape[-1]
        cos, sin = tables(num_positions, q, rope_base, inv_freq, wide)
        last = (found.num - 1).clamp(min=0)
        cos_q, sin_q = cos[last][..., None, :], sin[last][..., None, :]
        cos_k, sin_k = cos[:num_positions], sin[:num_positions]
        keys = rotate(gather_nodes(layer_k, found.nodes), cos_k, sin_k)
        values = gather_nodes(layer_v, found.nodes)
        weights = torch.exp(step.scores - gmax[..., None, :]) / gsum[..., None, :]
        weights = weights.masked_fill(~step.merged[..., None], 0.0)
        d_scores = weights * (torch.einsum("btsgv,btscv->btscg", d_out, values) - delta[..., None, :])
        d_query = torch.einsum("btscg,btscd->btsgd", d_scores, keys)
        dq = dq + factor * rotate(d_query, cos_q, -sin_q)
        rotated = factor * rotate(query, cos_q, sin_q)
        d_keys = rotate(torch.einsum("btscg,btsgd->btscd", d_scores, rotated), cos_k, -sin_k)
        d_values = torch.einsum("btscg,btsgv->btscv", weights, d_out)
        dk = _add_rows(dk, found.nodes, d_keys)
        dv = _add_rows(dv, found.nodes, d_values)
    return dq.reshape(batch, num_queries, num_heads, width), dk, dv


def _add_rows(total: Tensor, nodes: Tensor, rows: Tensor) -> Tensor:
    """Add rows [B,T,S,C,D] to total [B,N,S,D] at nodes [B,T,S,C]."""
    batch_idx = torch.arange(total.shape[0], device=total.device).view(-1, 1, 1, 1).expand_as(nodes)
    head_idx = torch.arange(total.shape[2], device=total.device).view(1, 1, -1, 1).expand_as(nodes)
    return total.index_put((batch_idx, nodes, head_idx), rows, accumulate=True)
