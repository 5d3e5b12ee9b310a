"""Attention over the blocks of lists in plain PyTorch (docs/semantics/sparse_attention.md §8), by a mask.

Computes in the dtype of its inputs, float64 too, on any device, and is differentiable. It holds [B, H, T_q, T] scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def documents(cu_seq_q: Tensor, cu_seq_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """The rows of queries and of keys of each packed document that has queries."""
    for of_queries, of_keys in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        if of_queries[0] < of_queries[1]:
            yield slice(*of_queries), slice(*of_keys)


def seen_tokens(
    blocks: Tensor, T_q: int, T: int, *, block_size: int = 16, selection_stride: int = 1
) -> Tensor:
    """Which tokens the last ``T_q`` of ``T`` queries see: bool [B, H_kv or 1, T_q, T]."""
    B, rows, heads, _ = blocks.shape
    count = -(-T // block_size)
    held = torch.zeros(B, rows, heads, count + 1, dtype=torch.bool, device=blocks.device)
    ids = torch.where(
        (blocks >= 0) & (blocks < count), blocks, count
    ).long()  # what is ignored goes into a last column
    held.scatter_(-1, ids, torch.ones_like(ids, dtype=torch.bool))
    of_query = torch.arange(T_q, device=blocks.device) // selection_stride
    of_token = torch.arange(T, device=blocks.device) // block_size
    causal = torch.ones(T_q, T, dtype=torch.bool, device=blocks.device).tril(T - T_q)
    return held[:, of_query][..., of_token].transpose(1, 2) & causal


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    block_size: int = 16,
    selection_stride: int = 1,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of :func:`htree_ops.sparse_attention`."""
    T_q, T, group = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
    seen = seen_tokens(blocks, T_q, T, block_size=block_size, selection_stride=selection_stride)
    if seen.shape[1] == 1:
        seen = seen.expand(-1, key.shape[2], -1, -1)
    seen = seen.repeat_interleave(group, 1)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    factor = query.shape[3] ** -0.5 if scale is None else scale
    scores = (q * factor) @ k.transpose(2, 3)
    alive = seen.any(-1, keepdim=True)
    # A dead row is computed as if it saw everything and then replaced, so that no gradient becomes NaN.
    scores = scores.masked_fill(~seen & alive, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    whole = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1, 1))
    weights = torch.where(seen, (scores - whole).exp(), 0)
    out = weights @ v
    lse = torch.where(alive, lse, -torch.inf).squeeze(-1)
    return out.transpose(1, 2), lse.transpose(1, 2)


def sparse_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of :func:`htree_ops.sparse_attention_varlen`, document by document."""
    outs, lses = [], []
    for rows, keys in documents(cu_seq_q, cu_seq_k):
        lists = blocks[None, rows][:, :: options.get("selection_stride", 1)]
        out, lse = sparse_attention(query[None, rows], key[None, keys], value[None, keys], lists, **options)
        outs.append(out[0])
        lses.append(lse[0])
    rest = query[int(cu_seq_q[-1]) :]
    outs.append(rest.new_zeros(*rest.shape[:2], value.shape[2]))
    lses.append(rest.new_full(rest.shape[:2], -torch.inf))
    return torch.cat(outs), torch.cat(lses)
