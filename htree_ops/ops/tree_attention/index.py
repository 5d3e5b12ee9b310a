"""Tree attention of a layer by its index, which the layer may have or not (docs/semantics/index_loss.md §9.5)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from htree_ops.ops.index_loss.collector import Attended, collect, is_fitting
from htree_ops.ops.index_loss.layers import choose_by_index
from htree_ops.ops.tree_attention.attention import expand_heads, tree_attention
from htree_ops.ops.tree_attention.options import TreeOptions, check_index_dim, other_choices
from htree_ops.ops.tree_attention.stages import rope, rope_cache


def resolve_index_dim(function: str, index_dim: int | None, head_dim: int, options: TreeOptions) -> int:
    """The width of a layer's index, checked; None is what fits its heads and options."""
    if index_dim is None:
        return 0 if other_choices(options) else min(32, head_dim // 16 * 16)
    check_index_dim(function, index_dim, options, head_dim)
    return index_dim


@dataclass(frozen=True)
class TreeOf:
    """Tree attention as a layer calls it. While :func:`htree_ops.fit_index` runs it is dense attention.

    Attributes:
        function: named in messages.
        options: of :func:`htree_ops.tree_attention`.
        layer: whose index chooses and learns.
        by_index: whether it chooses by its index.
    """

    function: str
    options: TreeOptions
    layer: nn.Module
    by_index: bool

    def sequences(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Whole sequences, or queries that are their last tokens.

        Args:
            q: [B, T_q, H, K]; k: [B, T, H_kv, K]; v: [B, T, H_kv, V].
            lengths: of the sequences, whose padding stands behind; None where there is none.
        """
        index = self._index(q, k, q.shape[1] == k.shape[1], lengths=lengths)
        if is_fitting():
            return dense_attention(q, k, v, self.options)
        return tree_attention(q, k, v, index=index, options=self.options)

    def documents(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
    ) -> Tensor:
        """Packed documents, as :func:`htree_ops.tree_attention_varlen` takes them."""
        options, index = self.options, self._index(q, k, q.shape[0] == k.shape[0], cu_seqlens=cu_k)
        if is_fitting():
            options = every_node(options, max_k)
        elif index is not None:
            options = options.beside_index()
        k, v = expand_heads(options, q, k, v)
        documents = (cu_q, cu_k, max_q, max_k, "auto", *options.packed())
        # The op, whose words the caller replaces by its own.
        out, _ = torch.ops.htree._attention_varlen(q, k, v, *(index or (None, None)), *documents)
        return out

    def _index(self, q: Tensor, k: Tensor, is_whole: bool, **rows: Any) -> tuple[Tensor, Tensor] | None:
        """By what the layer chooses in this call; it learns from one that is of whole sequences."""
        index, scale, rate = None, self.options.scale, self.options.compression_rate
        if is_whole and (self.by_index or is_fitting()):
            index = collect(self.layer, Attended(self.function, q, k, scale, rate, **rows))
        if not self.by_index or is_fitting():
            return None
        return choose_by_index(self.function, self.layer, q, k) if index is None else index


def every_node(options: TreeOptions, tokens: int) -> TreeOptions:
    """The same with every node opened in sequences of at most ``tokens``, where the tree is dense attention."""
    most = -(-max(1, tokens) // options.compression_rate)
    every: dict[str, Any] = {"top_k": most, "max_top_nodes": most * options.compression_rate}
    return replace(options, selection_span=None, **every)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, options: TreeOptions) -> Tensor:
    """Tree attention that opens every node, [B, T, H, V]: what a model computes while its index is fitted.

    Args:
        q: [B, T, H, K]; k: [B, T, H_kv, K]; v: [B, T, H_kv, V].
        options: whose rotation and scale count.
    """
    if q.shape[1] != k.shape[1]:
        raise NotImplementedError("fit_index: batches must hold whole sequences: no cache is supported")
    if options.rope_base is not None or options.inv_freq is not None:
        wide = torch.promote_types(q.dtype, torch.float32)
        base = 10000.0 if options.rope_base is None else options.rope_base
        T, K = q.shape[1::2]
        cos, sin = rope_cache(T, K, base, dtype=wide, device=q.device, inv_freq=options.inv_freq)
        place = torch.arange(T, device=q.device)
        q, k = rope(q, cos, sin, place), rope(k, cos, sin, place)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options.scale, enable_gqa=True)
    return out.transpose(1, 2)
