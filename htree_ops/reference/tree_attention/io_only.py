"""The IO-only variants (docs/semantics §2.3): formulas in exact integer arithmetic, and the pipeline made of them.

The results mean nothing; they say whether a variant read what it should have read. Integers are exact, scores are sums
in the dtype of `cos` or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import selection, state, tree
from .rotary import rope_cache
from .stages import accumulate_non_topk

MULTIPLIER, INCREMENT, MASK = 1103515245, 12345, 0x7FFFFFFF


def lcg(x: int) -> int:
    """Return (x * 1103515245 + 12345) mod 2^31."""
    return (x * MULTIPLIER + INCREMENT) & MASK


def lcg_of(x: Tensor, offset: Tensor | int = 0) -> Tensor:
    """Return :func:`lcg` of int64 values, plus an offset that enters after the product."""
    low = (
        x & 0xFFFFFFFF
    )  # the product of two 32-bit numbers fits into int64 modulo 2^64, and mod 2^31 is kept
    return (low * MULTIPLIER + INCREMENT + offset) & MASK


def score_base(nodes: Tensor, kv_head: Tensor | int, token: Tensor | int) -> Tensor:
    """Return rnd * 10 - 5, rnd = hash / 2147483647 rounded to fp32 in [0, 1]; the last rounding is to fp32 as well."""
    hashed = lcg_of(nodes, 7 * kv_head + 13 * token).to(torch.float32)
    return (hashed.double() / 2.0**31 * 10 - 5).to(torch.float32)


def io_compute_scores(
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
    """Return scores [B,T_q,H_kv,k*r,G] (-inf at p >= n) and num_candidates int32 [B,T_q,H_kv]; `scale` is ignored.

    base + 0.01 sum K + 1e-6 (sum Q_g + sum of cos and sin at p and at n-1) + 0.001 g.
    """
    batch, num_queries, num_heads, _ = q.shape
    groups = layer_k.shape[2]
    found = tree.candidates(parents, layer, layer_k.shape[1], compression_rate, t0)
    wide = torch.promote_types(tree.accumulate_dtype(q), cos.dtype)
    num_positions = found.nodes.shape[-1]
    group = num_heads // max(groups, 1)
    if q.numel() == 0 or layer_k.shape[1] == 0:
        shape = (batch, num_queries, groups, num_positions, group)
        return torch.full(shape, -torch.inf, dtype=wide, device=q.device), found.num.to(torch.int32)
    token = (torch.arange(num_queries, device=q.device) + t0).view(1, -1, 1, 1)
    base = score_base(found.nodes, torch.arange(groups, device=q.device).view(1, 1, -1, 1), token).to(wide)
    key_sums = layer_k.to(wide).sum(-1)  # [B,N,S]
    keys = key_sums.transpose(1, 2)[:, None].expand(-1, num_queries, -1, -1).gather(-1, found.nodes)
    angles = (cos.to(wide) + sin.to(wide)).sum(-1)
    last = angles[(found.num - 1).clamp(min=0)]
    queries = q.to(wide).sum(-1).view(batch, num_queries, groups, group)
    shared = base + 0.01 * keys + 1e-6 * angles[:num_positions]
    per_head = 1e-6 * (queries + last[..., None]) + 0.001 * torch.arange(group, dtype=wide, device=q.device)
    scores = shared[..., None] + per_head[..., None, :]
    return scores.masked_fill(~found.present[..., None], -torch.inf), found.num.to(torch.int32)


def io_select_topk(
    scores: Tensor,
    num_candidates: Tensor,
    top_k: int,
    layer: int = 1,
    select: str = "lcg",
    t0: int = 0,
    fold_mask: int = 0,
) -> Tensor:
    """Return int32 [B,T_q,H_kv,k] hashed positions, the rightmost in slot min(k,n)-1, -1 after it and at layer 0."""
    if select not in ("lcg", "stratified"):
        raise ValueError(f'select must be "lcg" or "stratified", got {select!r}')
    batch, num_queries, groups = num_candidates.shape
    num = num_candidates.long().clamp(0, scores.shape[3])[..., None]
    slots = torch.arange(top_k, device=num.device)
    seed = (
        31 * torch.arange(batch, device=num.device).view(-1, 1, 1, 1)
        + 7 * (torch.arange(num_queries, device=num.device) + t0).view(1, -1, 1, 1)
        + 13 * torch.arange(groups, device=num.device).view(1, 1, -1, 1)
    )
    hashed = lcg_of(slots + seed)
    count = num.clamp(max=top_k)
    if select == "lcg":
        positions = hashed % num.clamp(min=1)
    else:
        first = slots * num // count.clamp(min=1)
        width = (slots + 1) * num // count.clamp(min=1) - first
        positions = first + hashed % width.clamp(min=1)
    positions = torch.where(slots == count - 1, num - 1, positions)
    return torch.where((slots < count) & (layer > 0), positions, -1).to(torch.int32)


def io_compute_next_parents(
    parents: Tensor, topk_positions: Tensor, compression_rate: int = 16, map_positions: bool = False
) -> Tensor:
    """Return the positions as they are, or with `map_positions` what `compute_next_parents` gives."""
    if map_positions:
        return selection.compute_next_parents(parents, topk_positions, compression_rate)
    return topk_positions.clone()


def io_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compression_rate: int = 16,
    max_top_nodes: int = 8192,
    top_k_per_layer: int = 512,
    scale: float | None = None,
    select: str = "lcg",
    map_positions: bool = False,
) -> Tensor:
    """Return the output [B,T_q,H,V] of the staged pipeline made of the IO-only variants. M <= k*r: §1.3."""
    rate, top_k = compression_rate, top_k_per_layer
    if max_top_nodes > top_k * rate:
        raise ValueError(f"max_top_nodes must be at most k*r = {top_k * rate}, got {max_top_nodes}")
    wide = tree.accumulate_dtype(q)
    layers = tree.build_layers(k, v, rate, max_top_nodes)
    t0 = k.shape[1] - q.shape[1]
    cos, sin = rope_cache(top_k * rate, q.shape[3], dtype=wide, device=q.device)
    sizes = (q.shape[0], q.shape[1], k.shape[2], top_k, len(layers), rate, t0)
    parents = tree.top_parents(*sizes, device=q.device)
    total = state.empty_state(q.shape[0], q.shape[1], q.shape[2], v.shape[3], q.new_empty(0, dtype=wide))
    for layer in reversed(range(len(layers))):
        keys, values = layers[layer]
        scores, num = io_compute_scores(q, keys, parents, cos, sin, layer, rate, scale, t0)
        lists = parents
        if layer:
            positions = io_select_topk(scores, num, top_k, layer, select, t0)
            scores = selection.mask_topk_scores(scores, positions)
            parents = io_compute_next_parents(parents, positions, rate, map_positions)
        merged = accumulate_non_topk(values, lists, scores, num, layer, rate, t0)
        total = state.merge_to_global(*total, *merged)
    return state.final_normalize(total[2], total[1], q.dtype)
