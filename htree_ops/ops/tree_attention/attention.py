"""Tree attention, and its forward and its backward on their own (docs/semantics §1)."""

from __future__ import annotations

import warnings
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from htree_ops.ops.arguments import check_tensor, validate_arguments, validate_arguments_as
from htree_ops.ops.tree_attention.options import TreeKeywords, TreeOptions, tree_options

#: index_query and index_key.
Index: TypeAlias = tuple[Tensor, Tensor]
Balance = Literal["zigzag", "striped", "contiguous", "work"]
#: How ranks share the tokens of a sequence (htree_ops.distributed). They stand here because layers keep one.
BALANCES: tuple[Balance, ...] = ("zigzag", "striped", "contiguous", "work")
_TRANSPOSED = "[B, H, T, K] in place of [B, T, H, K]: transpose(1, 2) the tensors"
_warned_of_transposed = False


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


def expand_heads(options: TreeOptions, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [..., H_kv, D] for the selections that ``options.scope`` asks for: with "q_head" one for each head of q.

    Where the heads do not divide, the op refuses the sizes.
    """
    if options.scope == "q_head" and q.dim() == k.dim() == v.dim() >= 2 and k.shape[-2] == v.shape[-2]:
        heads, kv_heads = q.shape[-2], k.shape[-2]
        if kv_heads > 0 and heads % kv_heads == 0:
            return k.repeat_interleave(heads // kv_heads, -2), v.repeat_interleave(heads // kv_heads, -2)
    return k, v


@overload
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    index: Index | None = ...,
    return_lse: Literal[False] = ...,
    options: TreeOptions | None = ...,
    **keywords: Unpack[TreeKeywords],
) -> Tensor: ...
@overload
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    index: Index | None = ...,
    return_lse: Literal[True],
    options: TreeOptions | None = ...,
    **keywords: Unpack[TreeKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    index: Index | None = ...,
    return_lse: bool,
    options: TreeOptions | None = ...,
    **keywords: Unpack[TreeKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
@validate_arguments
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    index: Index | None = None,
    return_lse: bool = False,
    options: TreeOptions | None = None,
    **keywords: Unpack[TreeKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention over a tree of mean-pooled keys and values: the top layer, and below it top_k * r per layer.

    Layer 0 of the tree is the tokens; a node of layer l + 1 is the mean of its (at most r) children. Each
    query starts at the top layer, refines its ``top_k`` most important candidates into their children and
    keeps the rest as they are; the nodes it keeps tile [0, t] exactly once. Over them, with scores s = scale
    * <R_{n-1} q, R_p K> (half-split rotary positions p in the query's own candidate list), it takes one
    softmax::

        out[t, h] = sum(exp(s) V) / sum(exp(s))

    A query walks the tree over its own prefix, whatever stands behind it. While that is at most max_top_nodes tokens,
    or top_k covers every layer, this is dense causal attention with rotary positions.
    Source: docs/semantics/tree_attention.md §1.1-1.7, §1.12, §1.13, §1.15; design documents [000] and [001].

    Args:
        q: queries [B, T_q, H, K], not rotated, K even. Row i stands at token T - T_q + i, T_q <= T.
        k: keys [B, T, H_kv, K], H a multiple of H_kv.
        v: values [B, T, H_kv, V]. All three float32, float16 or bfloat16, or float64 on the CPU; under
            autocast they are cast to its dtype.
        index: (index_query [B, T_q, H_i, d], index_key [B, T, H_i, d]), by which nodes are chosen in place of the mean
            scores: a node counts the largest product of index_query with index_key over its tokens, as in
            :func:`htree_ops.select_blocks`. H_i is H_kv or 1, d a multiple of 16 up to 128. It gets no gradient here.
            Not with scope="q_head", selection_span or another importance.
        return_lse: also return the log-sum-exp of each row's scores.
        options: the keywords below as one :class:`htree_ops.TreeOptions`; those that are given beside it replace its
            own. None is their defaults.
        compression_rate: r >= 2, children per node; 16.
        max_top_nodes: M >= 1, most nodes of the top layer. It decides the number of layers: a query has one while no
            more than M tokens stand before the end of its prefix, and one more each time these are r times as many.
            None is min(8192, top_k * r), with ``index`` 8192.
        top_k: k >= 1, candidates that a query refines per layer; 512.
        selection_stride: s, a power of two that divides r: s consecutive queries refine the set of their
            first one. T - T_q must be a multiple of it. 1 is recommended for quality, 4 for speed
            (:meth:`htree_ops.HTreeAttention.recommended`, which names the measurements).
        scale: factor of the scores, finite; None is K^-1/2.
        rope_base: base of the rotary angles, positive; 10000.0. None rotates nothing. Where inv_freq is given it keeps
            its default.
        importance: "lse_causal" or "exp_joint"; or "lse", which is not causal: its normaliser holds the query's own
                node, whose pooled key covers later tokens. Where H = H_kv that cancels, except for keys that are not
                finite and weights flushed to 0.
        scope: "kv_head": the H / H_kv query heads of a K/V head refine one common set. "q_head": each query
            head refines its own; K and V are expanded to H heads, which costs H / H_kv times their memory.
        store_parents: where a gradient is recorded, keep the lists of refined nodes (4 * B * T_q/s * H_kv *
            top_k bytes for each layer of the tree) for the backward; False selects again there.
        selection_span: c, a divisor of r: a candidate is selected by the log-sum-exp of the scores of its
            means of c tokens, which finds single tokens that the mean of the whole node hides. Smaller spans
            find more and cost more: a layer scores 1/c of the tokens below its candidates. None scores the
            node's own mean; 2 is recommended. It cannot be combined with importance="lse".
        open_next: half of the ``top_k`` candidates are the most important ones, the others those behind them in the
            query's list, before what is next in importance. Where 16 queries share a selection, the tokens that they
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

    Example:
        >>> q, k, v = (torch.randn(1, 1000, heads, 64) for heads in (8, 2, 2))
        >>> tree_attention(q, k, v, top_k=8, max_top_nodes=128, selection_span=2).shape
        torch.Size([1, 1000, 8, 64])
    """
    chosen = options_of_call("tree_attention", index, options, keywords)
    if torch.compiler.is_compiling():
        return _attend(q, k, v, index, chosen, return_lse)
    _warn_of_transposed(q, k)
    try:
        return _attend(q, k, v, index, chosen, return_lse)
    except ValueError as error:
        if "as many rows as k" in str(error) and q.shape[2] == k.shape[2]:
            error.args = (f"{error}. This would fit {_TRANSPOSED}",)
        raise


def _attend(
    q: Tensor, k: Tensor, v: Tensor, index: Index | None, options: TreeOptions, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    if index is None:
        k, v = expand_heads(options, q, k, v)
        op = torch.ops.htree._attention_lse if return_lse else torch.ops.htree._attention
        return op(q, k, v, options.store_parents, *options.packed())
    before = k.shape[1] - q.shape[1] if q.dim() == k.dim() == 4 else 0
    lists = torch.ops.htree._index_lists(q, k, *(x.detach() for x in index), [before], *options.packed())
    out, lse = torch.ops.htree._listed_attention(q, k, v, lists, *options.packed())
    return (out, lse) if return_lse else out


def pair_words(index: object) -> str:
    """What was given in place of a pair."""
    length = f" of length {len(index)}" if isinstance(index, (tuple, list)) else ""
    return type(index).__name__ + length


def options_of_call(
    function: str, index: Index | None, options: TreeOptions | None, keywords: TreeKeywords
) -> TreeOptions:
    """The options of a call, those beside an index where there is one, which must be a pair of tensors."""
    chosen = tree_options(function, options, keywords)
    if index is None:
        return chosen
    if chosen.scope != "kv_head":
        raise ValueError(
            f"{function}: scope must be kv_head beside an index, which has a list for each K/V head, got "
            f"{chosen.scope}"
        )
    if not (isinstance(index, (tuple, list)) and len(index) == 2):
        raise TypeError(f"{function}: index must be (index_query, index_key), got {pair_words(index)}")
    for name, x in zip(("index_query", "index_key"), index, strict=True):
        check_tensor(function, name, x)
    return chosen.beside_index()


class DocumentedKeywords(TreeKeywords, total=False):
    """The options with the name that the design documents have for ``top_k``."""

    top_k_per_layer: int


def _documented(function: str, options: TreeOptions | None, keywords: DocumentedKeywords) -> TreeOptions:
    return tree_options(
        function,
        options,
        {"top_k" if name == "top_k_per_layer" else name: value for name, value in keywords.items()},
    )


@validate_arguments_as(top_k="top_k_per_layer")
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    options: TreeOptions | None = None,
    **keywords: Unpack[DocumentedKeywords],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """:func:`tree_attention` with its states and lists, without a gradient (docs/semantics/tree_attention.md §1.8).

    Args:
        q, k, v and the options: as in :func:`tree_attention`, but for ``scope``; ``top_k_per_layer`` is another name of
            ``top_k``. Without ``store_parents`` there are no lists.

    Returns:
        out [B, T_q, H, V]; gmax and gsum [B, T_q, H] in float32 (float64 for float64), lse = gmax +
        log(gsum); parents, one int32 list [B, ceil(T_q / s), H_kv, top_k] per layer, tokens first, ascending,
        with -1 at the end; an empty list where they are not stored.

    Raises:
        As :func:`tree_attention`. A backward through the outputs raises RuntimeError.
    """
    chosen = _documented("attention_forward", options, keywords)
    return torch.ops.htree._attention_forward(q, k, v, chosen.store_parents, *chosen.packed())


@validate_arguments_as(top_k="top_k_per_layer")
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    gmax: Tensor,
    gsum: Tensor,
    parents: list[Tensor],
    *,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    options: TreeOptions | None = None,
    **keywords: Unpack[DocumentedKeywords],
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
    chosen = _documented("attention_backward", options, keywords)
    return torch.ops.htree._attention_backward(
        dout, q, k, v, out, gmax, gsum, parents, output_mask, *chosen.packed()
    )
