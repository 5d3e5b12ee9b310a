"""The IO-only variant of tree attention: the staged kernels' loads and stores with next to no arithmetic.

A variant is the kernel of its stage with another policy, so it has the same launches, buffers and addresses. Its
time is about the least that this access pattern takes, and says how much could be won by removing arithmetic. Its
results mean nothing and must never be used as attention. Formulas: docs/semantics/io_only.md §2.3.

Shapes as in :mod:`htree_ops.ops.tree_attention.stages`; no function has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.arguments import validate_arguments, validate_arguments_as

__all__ = [
    "htree_forward_io_only",
    "io_accumulate_non_topk",
    "io_compute_next_parents",
    "io_compute_scores",
    "io_select_topk",
]


@validate_arguments_as(top_k="top_k_per_layer")
def htree_forward_io_only(
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
    """The staged pipeline made of the IO-only variants: the traffic of tree attention, a meaningless result (§2).

    Args:
        q: [B, T_q, H, K], k: [B, T, H_kv, K], v: [B, T, H_kv, V]; one floating dtype, T_q <= T.
        compression_rate, max_top_nodes, top_k_per_layer: r, M and k, M <= k * r.
        scale: accepted and ignored.
        select: "lcg" hashes positions (some twice, unsorted); "stratified" draws one from each of k spans.
        map_positions: look up the nodes of the positions, in ascending order; otherwise pass the positions on.

    Returns:
        [B, T_q, H, V] in the dtype of q. Scores are worked on in pieces of at most 1 GiB.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, ValueError: as ``tree_attention``.
    """
    return torch.ops.htree.io_attention_forward(
        q, k, v, compression_rate, max_top_nodes, top_k_per_layer, scale, select, map_positions
    )


@validate_arguments
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
    """IO-only variant of ``compute_scores``: a hash of the node plus small multiples of sums of everything read (§2.3).

    Arguments and results are those of ``compute_scores``; scale is accepted and ignored.
    """
    return torch.ops.htree.io_compute_scores(
        q, layer_k, parents, cos, sin, layer, compression_rate, scale, t0
    )


@validate_arguments
def io_select_topk(
    scores: Tensor,
    num_candidates: Tensor,
    top_k: int,
    layer: int = 1,
    select: str = "lcg",
    t0: int = 0,
    fold_mask: int = 0,
) -> Tensor:
    """IO-only variant of ``select_topk``: reads the scores in two passes, returns hashed positions (§2.3).

    Args:
        scores: [B, T_q, H_kv, k*r, G]; num_candidates: int32 [B, T_q, H_kv]; layer: 0 selects nothing.
        select: "lcg" or "stratified"; t0: token of the first row.
        fold_mask: 0. With another value, bits of the scores are added to the positions: a test of the loads.

    Returns:
        int32 [B, T_q, H_kv, top_k]: the rightmost candidate in slot min(top_k, n) - 1, -1 after it.
    """
    return torch.ops.htree.io_select_topk(scores, num_candidates, top_k, layer, select, t0, fold_mask)


@validate_arguments
def io_accumulate_non_topk(
    layer_v: Tensor,
    parents: Tensor,
    scores: Tensor,
    num_candidates: Tensor,
    layer: int,
    compression_rate: int = 16,
    t0: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Another name of ``accumulate_non_topk``, which keeps its arithmetic (§2.2): the same arguments and results."""
    return torch.ops.htree.io_accumulate_non_topk(
        layer_v, parents, scores, num_candidates, layer, compression_rate, t0
    )


@validate_arguments
def io_compute_next_parents(
    parents: Tensor, topk_positions: Tensor, compression_rate: int = 16, map_positions: bool = False
) -> Tensor:
    """IO-only variant of ``compute_next_parents``: copies topk_positions; with ``map_positions`` the op itself (§2.3).

    Arguments and results are those of ``compute_next_parents``.
    """
    return torch.ops.htree.io_compute_next_parents(parents, topk_positions, compression_rate, map_positions)
