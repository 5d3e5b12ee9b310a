"""The lists that an index chooses in a tree (docs/semantics/tree_attention.md §1.17), walked from the top down."""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.reference.selection import block_scores, choose_blocks

from .tree import OwnTops, layer_sizes, num_parents, top_parents


def index_parents(
    index_query: Tensor,
    index_key: Tensor,
    kv_heads: int,
    *,
    compression_rate: int = 16,
    max_top_nodes: int = 8192,
    top_k_per_layer: int = 512,
    selection_stride: int = 1,
    open_next: bool = False,
) -> list[Tensor]:
    """int32 [B,⌈T_q/s⌉,H_kv,k] of every layer of index_query [B,T_q,H_i,d] and index_key [B,T,H_i,d], tokens first.

    A candidate counts the largest product over its tokens. Each layer chooses among the children of the layer above;
    the library chooses among all nodes of a layer, which comes to the same. With M > k*r a row's top list and those
    above are -1 (§1.3).
    """
    rate, top_k, stride = compression_rate, top_k_per_layer, selection_stride
    T, T_q = index_key.shape[1], index_query.shape[1]
    depth = len(layer_sizes(T, rate, max_top_nodes))
    heads = index_query.shape[2]
    lists = top_parents(
        len(index_query), T_q, heads, top_k, depth, rate, T - T_q, stride, device=index_query.device
    )
    places = torch.arange(T - T_q, T, stride, device=lists.device)
    own = OwnTops.of(places, rate, max_top_nodes, top_k) if max_top_nodes > top_k * rate else None
    found = [lists if own is None else own.kept(lists, depth - 1, top_k)]
    for layer in reversed(range(1, depth)):
        lists = lists if own is None else own.lists(lists, layer)
        scores = block_scores(index_query, index_key, rate**layer, stride)
        children = lists.long()[..., None] * rate + torch.arange(rate, device=lists.device)
        children = children.masked_fill(lists[..., None] < 0, -1).flatten(-2)
        diagonal = (places // rate**layer).view(1, -1, 1)
        last = (
            num_parents(lists) - 1
        ) * rate + diagonal % rate  # the diagonal node's place among the candidates
        present = (children >= 0) & (children <= diagonal[..., None])
        values = scores.gather(-1, children.clamp(0, scores.shape[-1] - 1))
        values = values.masked_fill(~present, -torch.inf)
        chosen, _ = choose_blocks(values, last, top_k, open_next=open_next)
        nodes = children.gather(-1, chosen.long().clamp_min(0))
        lists = nodes.masked_fill(chosen < 0, -1).int()
        found.insert(0, lists if own is None else own.kept(lists, layer - 1, top_k))
    return [x.expand(-1, -1, kv_heads, -1) for x in found]
