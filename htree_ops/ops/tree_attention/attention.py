"""Tree attention, and its forward and its backward on their own (docs/semantics §1)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from htree_ops.ops.arguments import check_kind, named, named_as

__all__ = ["attention_backward", "attention_forward", "tree_attention"]

Importance = Literal["lse_causal", "exp_joint", "lse"]
Scope = Literal["kv_head", "q_head"]
SelectionDtype = Literal["int8"]
Balance = Literal["head_tail", "striped", "contiguous", "work"]
SCOPES: tuple[Scope, ...] = ("kv_head", "q_head")
#: How ranks share the tokens of a text (htree_ops.distributed). They stand here because layers keep one.
BALANCES: tuple[Balance, ...] = ("head_tail", "striped", "contiguous", "work")
#: inv_freq, as the functions take it.
Frequencies: TypeAlias = Sequence[float] | Tensor
#: max_top_nodes = None is at most this many nodes.
MOST_TOP_NODES = 8192
_TRANSPOSED = "[B, H, T, K] in place of [B, T, H, K]: transpose(1, 2) the tensors"
_warned_of_transposed = False


def top_nodes(max_top_nodes: int | None, top_k: int, compression_rate: int) -> int:
    """M; None is the largest that top_k allows, and at most 8192."""
    if max_top_nodes is not None:
        return max_top_nodes
    return max(
        1, min(MOST_TOP_NODES, top_k * compression_rate)
    )  # the op refuses other options by their own names


def frequencies(function: str, inv_freq: Frequencies | None) -> tuple[float, ...] | None:
    """``inv_freq`` as the floats that an op takes; their number and their values are left to the op.

    Raises:
        TypeError: something else than a sequence of floats or a floating tensor [K/2] on the CPU; in compiled code a
            tensor, whose numbers are not known there.
    """
    if inv_freq is None:
        return None
    if isinstance(inv_freq, (tuple, list)):
        for place, x in enumerate(inv_freq):
            if type(x) is not float:
                check_kind(function, f"inv_freq[{place}]", x, "float")
        try:
            return tuple(float(x) for x in inv_freq)
        except OverflowError:
            raise ValueError(
                f"{function}: inv_freq must be finite in float32, got an int beyond it"
            ) from None
    if isinstance(inv_freq, Tensor):
        if torch.compiler.is_compiling():
            raise TypeError(f"{function}: inv_freq must be a tuple of floats in compiled code, got a Tensor")
        if inv_freq.layout is not torch.strided or inv_freq.is_nested:
            kind = "nested" if inv_freq.is_nested else str(inv_freq.layout)
            raise TypeError(
                f"{function}: inv_freq must be a strided tensor [K/2], got a tensor that is {kind}"
            )
        if inv_freq.dim() != 1 or not inv_freq.is_floating_point() or inv_freq.device.type != "cpu":
            raise TypeError(
                f"{function}: inv_freq must be floats or a floating tensor [K/2] on the CPU, got {inv_freq.dtype} "
                f"{tuple(inv_freq.shape)} on {inv_freq.device}"
            )
        return tuple(inv_freq.tolist())
    if isinstance(inv_freq, Sequence) and not isinstance(inv_freq, (str, bytes)):
        return frequencies(function, tuple(inv_freq))
    raise TypeError(
        f"{function}: inv_freq must be floats or a floating tensor [K/2] on the CPU, got {type(inv_freq).__name__}"
    )


def check_scope(function: str, scope: object) -> None:
    """Raises ValueError unless ``scope`` is one of the known ones: it is no option of the op."""
    if scope not in SCOPES:
        raise ValueError(f"{function}: scope must be one of {', '.join(SCOPES)}, got {scope!r}")


def check_balance(function: str, balance: object, name: str = "balance") -> None:
    """Raises ValueError unless ``balance``, an argument called ``name``, is a known way to share tokens among ranks."""
    if balance not in BALANCES:
        raise ValueError(f"{function}: {name} must be one of {', '.join(BALANCES)}, got {balance!r}")


def _warn_of_transposed(q: Tensor, k: Tensor) -> None:
    """Once per process: [B, H, T, K] with as many heads in k as in q has legal sizes."""
    global _warned_of_transposed
    if not _warned_of_transposed and q.dim() == 4 and 1 < q.shape[1] == k.shape[1] < q.shape[2]:
        _warned_of_transposed = True
        warnings.warn(
            f"tree_attention: q is {tuple(q.shape)}, read as {q.shape[1]} tokens of {q.shape[2]} heads. If it is "
            f"{_TRANSPOSED}. (Said once per process.)",
            UserWarning,
            stacklevel=4,
        )


def _have_groups(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the heads of k and v can be repeated for those of q. Where not, the op refuses the sizes."""
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[2] != v.shape[2]:
        return False
    return k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0


@overload
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compression_rate: int = ...,
    max_top_nodes: int | None = ...,
    top_k: int = ...,
    selection_stride: int = ...,
    scale: float | None = ...,
    rope_base: float | None = ...,
    importance: Importance = ...,
    scope: Scope = ...,
    return_lse: Literal[False] = ...,
    store_parents: bool = ...,
    selection_span: int | None = ...,
    selection_dtype: SelectionDtype | None = ...,
    open_next: bool = ...,
    inv_freq: Frequencies | None = ...,
) -> Tensor: ...
@overload
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compression_rate: int = ...,
    max_top_nodes: int | None = ...,
    top_k: int = ...,
    selection_stride: int = ...,
    scale: float | None = ...,
    rope_base: float | None = ...,
    importance: Importance = ...,
    scope: Scope = ...,
    return_lse: Literal[True],
    store_parents: bool = ...,
    selection_span: int | None = ...,
    selection_dtype: SelectionDtype | None = ...,
    open_next: bool = ...,
    inv_freq: Frequencies | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compression_rate: int = ...,
    max_top_nodes: int | None = ...,
    top_k: int = ...,
    selection_stride: int = ...,
    scale: float | None = ...,
    rope_base: float | None = ...,
    importance: Importance = ...,
    scope: Scope = ...,
    return_lse: bool,
    store_parents: bool = ...,
    selection_span: int | None = ...,
    selection_dtype: SelectionDtype | None = ...,
    open_next: bool = ...,
    inv_freq: Frequencies | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
@named
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compression_rate: int = 16,
    max_top_nodes: int | None = None,
    top_k: int = 512,
    selection_stride: int = 1,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    importance: Importance = "lse_causal",
    scope: Scope = "kv_head",
    return_lse: bool = False,
    store_parents: bool = True,
    selection_span: int | None = None,
    selection_dtype: SelectionDtype | None = None,
    open_next: bool = False,
    inv_freq: Frequencies | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention over a tree of mean-pooled keys and values, at most top_k * r of them per layer.

    Layer 0 of the tree is the tokens; a node of layer l + 1 is the mean of its (at most r) children. Each
    query starts at the top layer, refines its ``top_k`` most important candidates into their children and
    keeps the rest as they are; the nodes it keeps tile [0, t] exactly once. Over them, with scores s = scale
    * <R_{n-1} q, R_p K> (half-split rotary positions p in the query's own candidate list), it takes one
    softmax::

        out[t, h] = sum(exp(s) V) / sum(exp(s))

    While T <= max_top_nodes, or top_k covers every layer, this is dense causal attention with rotary
    positions.
    Source: docs/semantics/tree_attention.md §1.1-1.7, §1.12, §1.13, §1.15; design documents [000] and [001].

    Args:
        q: queries [B, T_q, H, K], not rotated, K even. Row i stands at token T - T_q + i, T_q <= T.
        k: keys [B, T, H_kv, K], H a multiple of H_kv.
        v: values [B, T, H_kv, V]. All three float32, float16 or bfloat16, or float64 on the CPU; under
            autocast they are cast to its dtype.
        compression_rate: r >= 2, children per node.
        max_top_nodes: M, most nodes of the top layer; 1 <= M <= top_k * r. It decides the number of layers.
            None is min(8192, top_k * r).
        top_k: k >= 1, candidates that a query refines per layer.
        selection_stride: s, a power of two that divides r: s consecutive queries refine the set of their
            first one. T - T_q must be a multiple of it. 1 is recommended for quality, 4 for speed
            (:meth:`htree_ops.HTreeAttention.recommended`, which names the measurements).
        scale: factor of the scores, finite; None is K^-1/2.
        rope_base: base of the rotary angles, positive; None rotates nothing. Where inv_freq is given it keeps its
            default.
        importance: "lse_causal" or "exp_joint"; or "lse", which is not causal: its normaliser holds the query's own
                node, whose pooled key covers later tokens. Where H = H_kv that cancels, except for keys that are not
                finite and weights flushed to 0.
        scope: "kv_head": the H / H_kv query heads of a K/V head refine one common set. "q_head": each query
            head refines its own; K and V are expanded to H heads, which costs H / H_kv times their memory.
        return_lse: also return the log-sum-exp of each row's scores.
        store_parents: where a gradient is recorded, keep the lists of refined nodes (4 * B * T_q/s * H_kv *
            top_k bytes per layer) for the backward; False selects again there.
        selection_span: c, a divisor of r: a candidate is selected by the log-sum-exp of the scores of its
            means of c tokens, which finds single tokens that the mean of the whole node hides. Smaller spans
            find more and cost more: a layer scores 1/c of the tokens below its candidates. None scores the
            node's own mean; 2 is recommended. It cannot be combined with importance="lse".
        selection_dtype: "int8" rounds queries and means to int8, each row with a scale of its own, for the scores that
            a selection_span computes at the layer where a query first leaves something out; the lists lose little
            (docs/semantics/tree_attention.md §1.15 has the numbers). It changes nothing but the lists, and saves no
            time on an H200 (docs/limits.md); K is at most 1024. None, which is recommended, scores in the precision of
            the path.
        open_next: half of the ``top_k`` candidates are the most important ones, the others those behind them in the
            query's list, before what is next in importance. Where 16 queries share a selection, the text that they
            come to read stands behind what the first one looked for: a dense-trained model kept 82 % of its copies with
            it and 65 % without; with selection_stride=1 it loses some (docs/quality.md). A forward takes
            0.7 to 0.8 % longer with it, 5 to 7 % with selection_stride=1 (benchmarks/results/open_next_h200.csv).
        inv_freq: [K/2] floats, finite in float32: pair i of a head (elements i and K/2 + i) rotates by position *
            inv_freq[i], and not at all where that is 0. For scaled rotary positions (Llama 3, YaRN, linear) and for
            partial ones; a factor on cos and sin, as YaRN has it, goes squared into ``scale``. A sequence or a 1-D
            floating tensor on the CPU; a sequence in compiled code. None is rope_base^(-2i/K).

    Returns:
        out [B, T_q, H, V] in the dtype of q, differentiable in q, k and v with the selection held fixed. With
        ``return_lse`` also lse [B, T_q, H], natural logarithm, float32 (float64 for float64), differentiable
        in q and k: what merges this attention with another, by weights that follow from both lse, needs it.

    On a GPU the tensor-core path (r = 16, half precision, K = V of 32, 64 or 128, H / H_kv <= 16) needs, beside the
    output and the stored lists, one packed copy of K and V and at most 10^9 bytes for T up to about 10^6, because
    queries are worked on in chunks. The backward needs 2 GiB and fp32 sums of dK and dV (docs/semantics §1.8).

    Raises:
        ShapeMismatchError: a rank or size that does not fit, H not a multiple of H_kv, odd K, T_q > T.
        UnsupportedDtypeError: a dtype that is not supported, or q, k and v of different ones.
        DeviceError: tensors on different devices.
        ValueError: an option outside its range.
        NotImplementedError: the backward is differentiated again.
    """
    M = top_nodes(max_top_nodes, top_k, compression_rate)
    options = (compression_rate, M, top_k, scale, rope_base, importance, selection_stride)
    later = (selection_span, frequencies("tree_attention", inv_freq), selection_dtype, open_next)
    if torch.compiler.is_compiling():
        return _attend(q, k, v, options, scope, return_lse, store_parents, later)
    _warn_of_transposed(q, k)
    try:
        return _attend(q, k, v, options, scope, return_lse, store_parents, later)
    except ValueError as error:
        if "as many rows as k" in str(error) and q.shape[2] == k.shape[2]:
            error.args = (f"{error}. This would fit {_TRANSPOSED}",)
        raise


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...],
    scope: str,
    return_lse: bool,
    store_parents: bool,
    later: tuple[int | None, tuple[float, ...] | None, str | None, bool],
) -> Tensor | tuple[Tensor, Tensor]:
    check_scope("tree_attention", scope)
    if scope == "q_head" and _have_groups(q, k, v):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    op = torch.ops.htree.attention_lse if return_lse else torch.ops.htree.attention
    return op(q, k, v, *options, store_parents, *later)


@named_as(top_k="top_k_per_layer")
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compression_rate: int = 16,
    max_top_nodes: int | None = None,
    top_k_per_layer: int = 512,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    importance: Importance = "lse_causal",
    selection_stride: int = 1,
    store_parents: bool = True,
    selection_span: int | None = None,
    inv_freq: Frequencies | None = None,
    selection_dtype: SelectionDtype | None = None,
    open_next: bool = False,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """:func:`tree_attention` with its states and lists, without a gradient (docs/semantics/tree_attention.md §1.8).

    Args:
        q, k, v and the options: as in :func:`tree_attention`; ``top_k_per_layer`` is its ``top_k``.

    Returns:
        out [B, T_q, H, V]; gmax and gsum [B, T_q, H] in float32 (float64 for float64), lse = gmax +
        log(gsum); parents, one int32 list [B, ceil(T_q / s), H_kv, top_k] per layer, tokens first, ascending,
        with -1 at the end; an empty list where they are not stored.

    Raises:
        As :func:`tree_attention`. A backward through the outputs raises RuntimeError.
    """
    options = (
        compression_rate,
        top_nodes(max_top_nodes, top_k_per_layer, compression_rate),
        top_k_per_layer,
        scale,
        rope_base,
        importance,
        selection_stride,
    )
    later = (selection_span, frequencies("attention_forward", inv_freq), selection_dtype, open_next)
    return torch.ops.htree.attention_forward(q, k, v, *options, store_parents, *later)


@named_as(top_k="top_k_per_layer")
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    gmax: Tensor,
    gsum: Tensor,
    parents: list[Tensor],
    compression_rate: int = 16,
    max_top_nodes: int | None = None,
    top_k_per_layer: int = 512,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    importance: Importance = "lse_causal",
    selection_stride: int = 1,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    selection_span: int | None = None,
    inv_freq: Frequencies | None = None,
    selection_dtype: SelectionDtype | None = None,
    open_next: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of :func:`tree_attention` with the selection held fixed (docs/semantics/tree_attention.md §1.10).

    With P = exp(s - gmax) / gsum on the kept nodes and D = sum(dout * out, -1)::

        dS = P * (dout V^T - D);  dV += P dout
        dq += scale R_{n-1}^-1 (dS R_p K);  dK += dS R_p^-1 (scale R_{n-1} q)

    and each layer's dK and dV go down the tree as dparent / number of children.

    Args:
        dout: [B, T_q, H, V] in the dtype of q.
        q, k, v, options: of the forward; out, gmax, gsum: its results.
        parents: its lists, or an empty list to select again.
        output_mask: which of dq, dk, dv are wanted; the others cost nothing.

    Returns:
        (dq, dk, dv) of the shapes and dtype of q, k, v; None where not wanted.

    Raises:
        As :func:`tree_attention`; NotImplementedError when differentiated.
    """
    options = (
        compression_rate,
        top_nodes(max_top_nodes, top_k_per_layer, compression_rate),
        top_k_per_layer,
        scale,
        rope_base,
        importance,
        selection_stride,
    )
    later = (selection_span, frequencies("attention_backward", inv_freq), selection_dtype, open_next)
    return torch.ops.htree.attention_backward(
        dout, q, k, v, out, gmax, gsum, parents, *options, output_mask, *later
    )
