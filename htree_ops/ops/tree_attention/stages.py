"""The stages of tree attention, one thin function per op (docs/semantics/tree_attention.md §1.8).

Letters of the shapes: B batch, T_q query rows, H query heads, H_kv key/value heads, G = H / H_kv, K and V
the key and value widths, N nodes of the layer, k the width of a list, r = ``compression_rate``, s =
``selection_stride``. Query row i stands at token t = ``t0`` + i; keys and values are whole layers. Lists of
nodes are int32, ascending, -1 at the tail. Scores, states and rotary tables are float32 (float64 for float64
inputs). A list with values out of range or out of order gives a meaningless result, never an access out of
bounds.

Every function raises ShapeMismatchError, UnsupportedDtypeError or DeviceError naming the argument, what was
required and what came, TypeError for an option of another type and ValueError for one outside its range. Only
``tree_build`` and ``rope`` have a gradient; a backward through the other functions raises RuntimeError
(NotImplementedError for those that write into an argument).
"""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.arguments import validate_arguments
from htree_ops.ops.tree_attention.options import Frequencies, frequencies

State = tuple[Tensor, Tensor, Tensor]


def _default_device(device: torch.device | str | None) -> torch.device:
    # torch.get_default_device() breaks the graph of torch.compile
    return torch.empty(0, device=None).device if device is None else torch.device(device)


@validate_arguments
def tree_build(k: Tensor, v: Tensor, compression_rate: int = 16) -> tuple[Tensor, Tensor]:
    """One level of the tree: parent i is the mean of its children i*r ... min((i+1)*r, N) - 1 (§1.2).

    Args:
        k: [B, N, H_kv, K] and v: [B, N, H_kv, V], float32, float16, bfloat16 or float64.
        compression_rate: r >= 2.

    Returns:
        (pk [B, ceil(N/r), H_kv, K], pv [B, ceil(N/r), H_kv, V]): summed in fp32, rounded once.
        Differentiable: d child = d parent / number of children.
    """
    return torch.ops.htree.tree_build(k, v, compression_rate)


@validate_arguments
def tree_build_backward(
    dpk: Tensor, dpv: Tensor, n_child: int, compression_rate: int = 16
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`tree_build` for ``n_child`` children: d child_i = d parent_{i // r} / c (§1.8).

    Args:
        dpk: [B, ceil(n_child/r), H_kv, K] and dpv: [B, ceil(n_child/r), H_kv, V].

    Returns:
        (dk [B, n_child, H_kv, K], dv [B, n_child, H_kv, V]); NotImplementedError when differentiated.
    """
    return torch.ops.htree.tree_build_backward(dpk, dpv, n_child, compression_rate)


@validate_arguments
def span_means(k: Tensor, span: int) -> Tensor:
    """Means of ``span`` neighbouring keys: row j is the mean of k[:, j*span ... min((j+1)*span, T) - 1] (§1.15).

    Args:
        k: [B, T, H_kv, K], float32, float16, bfloat16 or float64.
        span: at least 1.

    Returns:
        [B, ceil(T/span), H_kv, K] in the dtype of k: summed in fp32, rounded once, as :func:`tree_build` does.
    """
    return torch.ops.htree.span_means(k, span)


@validate_arguments
def rope_cache(
    size: int,
    dim: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    inv_freq: Frequencies | None = None,
) -> Tensor:
    """cos and sin of angle[p, i] = p * base^(-2i/dim), computed in float64 and rounded (§1.4).

    Args:
        size: positions; dim: K, even; base: positive; dtype: float32 or float64.
        inv_freq: dim / 2 floats in place of base^(-2i/dim), as in :func:`htree_ops.tree_attention`; base keeps its
            default then. They are copied to the device from the host, which a CUDA graph cannot record.

    Returns:
        [2, size, dim/2], the cosines first, on ``device`` (torch's default device where it is None).
    """
    given = frequencies("rope_cache", inv_freq)
    return torch.ops.htree.rope_cache(
        size, dim, base, dtype=dtype, device=_default_device(device), inv_freq=given
    )


@validate_arguments
def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Half-split rotation: (lo, hi) -> (lo cos - hi sin, lo sin + hi cos) at each row's position (§1.4).

    Args:
        x: [B, T, H, K], K even.
        cos, sin: [size, K/2] float32 (float64 for float64), without gradient.
        positions: int32 or int64, [T] or [B, T], in [0, size). Outside: IndexError on the CPU; on
            CUDA, where a check would wait for the device, the nearest position of the table is taken.
        inverse: rotate by the negative angle.

    Returns:
        [B, T, H, K] in the dtype of x, differentiable in x: the gradient is the inverse rotation.
    """
    return torch.ops.htree.rope(x, cos, sin, positions, inverse)


@validate_arguments
def top_parents(
    B: int,
    T: int,
    heads: int,
    top_k: int,
    num_layers: int,
    compression_rate: int = 16,
    t0: int = 0,
    selection_stride: int = 1,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Virtual parents of the top layer: the list 0 ... t // r^num_layers of each query (§1.3).

    Returns:
        int32 [B, ceil(T/s), heads, top_k]; row i belongs to token t0 + i*s.
    """
    sizes = (B, T, heads, top_k, num_layers, compression_rate, t0, selection_stride)
    return torch.ops.htree.top_parents(*sizes, device=_default_device(device))


@validate_arguments
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
    """Scores scale * <R_{n-1} q, R_p K_c(p)> of c(p) = parents[p // r] * r + p mod r (§1.3, §1.4).

    Args:
        q: [B, T_q, H, K]; layer_k: [B, N, H_kv, K]; parents: [B, T_q, H_kv, k].
        cos, sin: [size >= k*r, K/2] from :func:`rope_cache`.
        layer: l >= 0, 0 for the tokens; scale: None is K^-1/2; t0: token of the first query row.

    Returns:
        scores [B, T_q, H_kv, k*r, G], -inf at p >= n; num_candidates n, int32 [B, T_q, H_kv].
    """
    return torch.ops.htree.compute_scores(q, layer_k, parents, cos, sin, layer, compression_rate, scale, t0)


@validate_arguments
def select_topk(
    scores: Tensor,
    num_candidates: Tensor,
    top_k: int,
    importance: str = "lse_causal",
    open_next: bool = False,
) -> Tensor:
    """Positions of the min(top_k, n) most important candidates, the rightmost always first (§1.6).

    "lse_causal": sum over the group of exp(s - logsumexp of all but the rightmost); ties go to the smaller
    position.

    Args:
        scores: [B, T_q, H_kv, k*r, G]; num_candidates: int32 [B, T_q, H_kv].
        importance: "lse_causal", "lse" or "exp_joint".
        open_next: the ceil(top_k / 2) most important ones, then the candidates behind these, then what is next in
            importance. Where n <= top_k or top_k <= 2 that changes nothing.

    Returns:
        int32 [B, T_q, H_kv, top_k] in key order, -1 at the tail. With open_next, where n > top_k > 2, the rightmost
        comes first, then the other most important ones and the candidates behind them, each in the order of positions,
        and then the rest in key order.
    """
    return torch.ops.htree.select_topk(scores, num_candidates, top_k, importance, open_next)


@validate_arguments
def mask_topk_scores_(scores: Tensor, topk_positions: Tensor) -> Tensor:
    """Writes -inf at the selected positions of scores [B, T_q, H_kv, k*r, G]; returns scores (§1.8)."""
    torch.ops.htree.mask_topk_scores_(scores, topk_positions)
    return scores


@validate_arguments
def compute_next_parents(parents: Tensor, topk_positions: Tensor, compression_rate: int = 16) -> Tensor:
    """Nodes at the selected positions, parents[p // r] * r + p mod r, ascending, -1 at the tail (§1.6).

    Args:
        parents: int32 [B, T_q, H_kv, k]; topk_positions: int32 [B, T_q, H_kv, top_k].

    Returns:
        int32 [B, T_q, H_kv, top_k].
    """
    return torch.ops.htree.compute_next_parents(parents, topk_positions, compression_rate)


@validate_arguments
def accumulate_non_topk(
    layer_v: Tensor,
    parents: Tensor,
    scores: Tensor,
    num_candidates: Tensor,
    layer: int,
    compression_rate: int = 16,
    t0: int = 0,
) -> State:
    """State of the candidates whose score is not -inf: max, sum of e^(s-max), sum of e^(s-max) V (§1.7).

    Args:
        layer_v: [B, N, H_kv, V]; parents: [B, T_q, H_kv, k]; scores: [B, T_q, H_kv, k*r, G] after
            :func:`mask_topk_scores_`; num_candidates: int32 [B, T_q, H_kv].

    Returns:
        (lmax, lsum [B, T_q, H], lout [B, T_q, H, V]); (-inf, 0, 0) where nothing is left.
    """
    return torch.ops.htree.accumulate_non_topk(
        layer_v, parents, scores, num_candidates, layer, compression_rate, t0
    )


@validate_arguments
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
    """Scores, state of all candidates and top-k per query head, as in design document [000] (§1.8).

    Args:
        As :func:`select_accumulate`, but parents [B, T_q, H, k]: each query head has its own list.

    Returns:
        (lmax, lsum [B, T_q, H], lout [B, T_q, H, V], topk_indices int32 [B, T_q, H, top_k] in key order,
        topk_scores of the same shape, -inf at the tail); the last two are [B, T_q, H, 0] at layer 0.
    """
    return torch.ops.htree.compute_and_select(
        q, layer_k, layer_v, parents, cos, sin, layer, compression_rate, top_k, scale, t0
    )


@validate_arguments
def subtract_topk(
    layer_v: Tensor, topk_indices: Tensor, topk_scores: Tensor, lmax: Tensor, lsum: Tensor, lout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes the top-k out of a state of all candidates, as in design document [000] (§1.7).

    The remainder has the relative error eps * total mass / remaining mass: use it only where the scores'
    standard deviation is at most 2. :func:`select_accumulate` never needs it.

    Args:
        layer_v: [B, N, H_kv, V]; topk_indices, topk_scores: [B, T_q, H, k]; lmax, lsum: [B, T_q, H];
            lout: [B, T_q, H, V].

    Returns:
        (lmax, lsum, lout) as new tensors and selected_indices int32 [B, T_q, H, k], ascending, -1 at the
        tail.
    """
    return torch.ops.htree.subtract_topk(layer_v, topk_indices, topk_scores, lmax, lsum, lout)


@validate_arguments
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
    open_next: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A layer above the bottom in one op: select, and accumulate what is not selected (§1.5, §1.6, §1.8).

    Equals compute_scores, select_topk, :func:`mask_topk_scores_`, accumulate_non_topk and compute_next_parents,
    without the buffer of scores.

    Args:
        q: [B, T_q, H, K]; layer_k: [B, N, H_kv, K]; layer_v: [B, N, H_kv, V];
            parents: [B, ceil(T_q/s), H_kv, k]; cos, sin: [size >= k*r, K/2].
        layer: at least 1; top_k: width of the next lists; scale: None is K^-1/2; t0: token of the first query
            row, a multiple of s; selection_stride: s, a power of two that divides r.
        span_k: :func:`span_means` of all tokens, [B, ceil(T/c), H_kv, K]; selection_span: c, a divisor of r.
            Given together, they replace the scores in the selection (§1.15); ValueError where one is missing.
        open_next: as in :func:`select_topk`.

    Returns:
        (lmax, lsum [B, T_q, H], lout [B, T_q, H, V], next_parents int32 [B, ceil(T_q/s), H_kv, top_k]).
    """
    options = (layer, compression_rate, top_k, scale, importance, t0, selection_stride)
    return torch.ops.htree.select_accumulate(
        q, layer_k, layer_v, parents, cos, sin, *options, span_k, selection_span, open_next
    )


@validate_arguments
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
    """State of every candidate among the tokens, layer 0 (§1.5, §1.7).

    Args:
        As :func:`select_accumulate`.

    Returns:
        (lmax, lsum [B, T_q, H], lout [B, T_q, H, V]).
    """
    return torch.ops.htree.bottom_accumulate(
        q, layer_k, layer_v, parents, cos, sin, compression_rate, scale, t0, selection_stride
    )


@validate_arguments
def recompute_selection(
    q: Tensor,
    layer_k: Tensor,
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
    open_next: bool = False,
) -> Tensor:
    """The same bits as next_parents of :func:`select_accumulate`, without reading a value (§1.8)."""
    options = (layer, compression_rate, top_k, scale, importance, t0, selection_stride)
    return torch.ops.htree.recompute_selection(
        q, layer_k, parents, cos, sin, *options, span_k, selection_span, open_next
    )


@validate_arguments
def merge_to_global_(
    gmax: Tensor, gsum: Tensor, gout: Tensor, lmax: Tensor, lsum: Tensor, lout: Tensor
) -> State:
    """Merges a layer's state into the running one, in place: both are brought to the larger max and added (§1.7).

    A state with sum 0 counts as empty. Shapes [B, T_q, H] and, for gout and lout, [B, T_q, H, V]; the tensors
    must not share memory (RuntimeError).

    Returns:
        (gmax, gsum, gout), the arguments.
    """
    torch.ops.htree.merge_to_global_(gmax, gsum, gout, lmax, lsum, lout)
    return gmax, gsum, gout


@validate_arguments
def final_normalize(gout: Tensor, gsum: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """gout / gsum [B, T_q, H, V] rounded to ``dtype`` (None: that of gout); NaN where gsum is 0 (§1.7)."""
    return torch.ops.htree.final_normalize(gout, gsum, dtype)
