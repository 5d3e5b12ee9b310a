"""Tree attention: the operator, its module, and the typed functions of every stage (docs/semantics §1).

Longer than other files because every public function carries its shapes, dtypes, errors and formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.arguments import (
    FLOATING_AND_DOUBLE,
    check_bool,
    check_dtype,
    check_int,
    check_number,
    check_option_dtype,
    check_tensors,
    floating_for,
    state_dtype,
)
from htree_ops.ops.tree_attention_checks import check_options, check_qkv, check_stage_options
from htree_ops.ops.tree_attention_stages import (
    accumulate_non_topk,
    bottom_accumulate,
    compute_and_select,
    compute_next_parents,
    compute_scores,
    final_normalize,
    mask_topk_scores_,
    merge_to_global_,
    recompute_selection,
    rope,
    rope_cache,
    select_accumulate,
    select_topk,
    subtract_topk,
    top_parents,
    tree_build,
    tree_build_backward,
)

__all__ = [
    "HTreeAttention",
    "accumulate_non_topk",
    "attention_backward",
    "attention_forward",
    "bottom_accumulate",
    "compute_and_select",
    "compute_next_parents",
    "compute_scores",
    "final_normalize",
    "mask_topk_scores_",
    "merge_to_global_",
    "recompute_selection",
    "rope",
    "rope_cache",
    "select_accumulate",
    "select_topk",
    "subtract_topk",
    "top_parents",
    "tree_attention",
    "tree_build",
    "tree_build_backward",
]


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compression_rate: int = 16,
    max_top_nodes: int = 8192,
    top_k: int = 512,
    selection_stride: int = 1,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    importance: str = "lse_causal",
    scope: str = "kv_head",
    return_lse: bool = False,
    store_parents: bool = True,
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
    Source: docs/semantics/tree_attention.md §1.1-1.7, §1.12, §1.13; design documents [000] and [001].

    Args:
        q: queries [B, T_q, H, K], not rotated, K even. Row i stands at token T - T_q + i, T_q <= T.
        k: keys [B, T, H_kv, K], H a multiple of H_kv.
        v: values [B, T, H_kv, V]. All three float32, float16 or bfloat16, or float64 on the CPU; under
            autocast they are cast to its dtype.
        compression_rate: r >= 2, children per node.
        max_top_nodes: M, most nodes of the top layer; 1 <= M <= top_k * r. It decides the number of layers.
        top_k: k >= 1, candidates that a query refines per layer.
        selection_stride: s, a power of two that divides r: s consecutive queries refine the set of their
            first one. T - T_q must be a multiple of it.
        scale: factor of the scores, finite; None is K^-1/2.
        rope_base: base of the rotary angles, positive; None rotates nothing.
        importance: "lse_causal" or "exp_joint"; or "lse", which is not causal: its normaliser holds the query's own
                node, whose pooled key covers later tokens. Where H = H_kv that cancels, but for non-finite keys and
                weights flushed to 0.
        scope: "kv_head": the H / H_kv query heads of a K/V head refine one common set. "q_head": each query
            head refines its own; K and V are expanded to H heads, which costs H / H_kv times their memory.
        return_lse: also return the log-sum-exp of each row's scores. Where a gradient is recorded this runs
            the forward a second time.
        store_parents: where a gradient is recorded, keep the lists of refined nodes (4 * B * T_q/s * H_kv *
            top_k bytes per layer) for the backward; False selects again there.

    Returns:
        out [B, T_q, H, V] in the dtype of q, differentiable in q, k and v with the selection held fixed. With
        ``return_lse`` also lse [B, T_q, H], natural logarithm, float32 (float64 for float64), without
        gradient.

    On a GPU the tensor-core path (r = 16, half precision, K = V of 32, 64 or 128, H / H_kv <= 16) needs, beside the
    output and the stored lists, one re-laid copy of K and V and at most 10^9 bytes up to T of about 10^6, by chunks
    over the queries; the backward 2 GiB and fp32 sums of dK and dV (docs/semantics §1.8).

    Raises:
        ShapeMismatchError: a rank or size that does not fit, H no multiple of H_kv, odd K, T_q > T.
        UnsupportedDtypeError: a dtype that is not supported, or q, k and v of different ones.
        DeviceError: tensors on different devices.
        ValueError: an option outside its range.
        NotImplementedError: in the backward of the backward.
    """
    check_qkv("tree_attention", q, k, v)
    check_options(
        "tree_attention",
        compression_rate,
        max_top_nodes,
        top_k,
        selection_stride,
        scale,
        rope_base,
        importance,
        scope,
        store_parents,
    )
    check_bool("tree_attention", "return_lse", return_lse)
    if scope == "q_head":
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    options = (compression_rate, max_top_nodes, top_k, scale, rope_base, importance, selection_stride)
    records = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not return_lse:
        return torch.ops.htree.attention(q, k, v, *options, store_parents)
    out, gmax, gsum, _ = torch.ops.htree.attention_forward(
        q.detach(), k.detach(), v.detach(), *options, store_parents=False
    )
    if records:
        out = torch.ops.htree.attention(q, k, v, *options, store_parents)
    return out, gmax + gsum.log()


def _op_options(
    op: str,
    compression_rate: int,
    max_top_nodes: int,
    top_k_per_layer: int,
    scale: float | None,
    rope_base: float | None,
    importance: str,
    selection_stride: int,
) -> tuple[Any, ...]:
    """The options in the order of the ops' schemas, with their types checked; the ops check the ranges."""
    sizes = {
        "compression_rate": compression_rate,
        "max_top_nodes": max_top_nodes,
        "top_k_per_layer": top_k_per_layer,
    }
    check_stage_options(op, scale=scale, importance=importance, **sizes, selection_stride=selection_stride)
    if rope_base is not None:
        check_number(op, "rope_base", rope_base, positive=True)
    return (*sizes.values(), scale, rope_base, importance, selection_stride)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compression_rate: int = 16,
    max_top_nodes: int = 8192,
    top_k_per_layer: int = 512,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    importance: str = "lse_causal",
    selection_stride: int = 1,
    store_parents: bool = True,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """:func:`tree_attention` with its states and lists, without a gradient (docs/semantics/tree_attention.md §1.8).

    Args:
        q, k, v and the options: as in :func:`tree_attention`; ``top_k_per_layer`` is its ``top_k``.

    Returns:
        out [B, T_q, H, V]; gmax and gsum [B, T_q, H] in float32 (float64 for float64), lse = gmax +
        log(gsum); parents, one int32 list [B, ceil(T_q / s), H_kv, top_k] per layer, tokens first, ascending,
        -1 at the tail; no list at all when they are not stored.

    Raises:
        As :func:`tree_attention`. A backward through the outputs raises RuntimeError.
    """
    check_qkv("attention_forward", q, k, v)
    options = _op_options(
        "attention_forward",
        compression_rate,
        max_top_nodes,
        top_k_per_layer,
        scale,
        rope_base,
        importance,
        selection_stride,
    )
    check_bool("attention_forward", "store_parents", store_parents)
    return torch.ops.htree.attention_forward(q, k, v, *options, store_parents)


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
    max_top_nodes: int = 8192,
    top_k_per_layer: int = 512,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    importance: str = "lse_causal",
    selection_stride: int = 1,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
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
    check_qkv("attention_backward", q, k, v)
    check_tensors(
        "attention_backward",
        q=(q, "B T_q H K"),
        v=(v, "B T H_kv V"),
        dout=(dout, "B T_q H V"),
        out=(out, "B T_q H V"),
        gmax=(gmax, "B T_q H"),
        gsum=(gsum, "B T_q H"),
        **{f"parents[{layer}]": (x, "B rows H_kv k") for layer, x in enumerate(parents)},
    )
    check_dtype("attention_backward", floating_for(q), q=q, dout=dout, out=out)
    check_dtype("attention_backward", (state_dtype(q),), gmax=gmax, gsum=gsum)
    for layer, x in enumerate(parents):
        check_dtype("attention_backward", (torch.int32,), **{f"parents[{layer}]": x})
    options = _op_options(
        "attention_backward",
        compression_rate,
        max_top_nodes,
        top_k_per_layer,
        scale,
        rope_base,
        importance,
        selection_stride,
    )
    return torch.ops.htree.attention_backward(dout, q, k, v, out, gmax, gsum, parents, *options, output_mask)


class HTreeAttention(nn.Module):
    """Causal self-attention layer with :func:`tree_attention` between its projections.

    ``o_proj(tree_attention(q_proj(x), k_proj(x), v_proj(x)))``, rotary positions included. Parameters are
    those of ``q_proj`` [num_heads * head_dim, embed_dim], ``k_proj`` and ``v_proj`` [num_kv_heads *
    head_dim, embed_dim] and ``o_proj`` [embed_dim, num_heads * head_dim].

    Args:
        embed_dim: E, width of the input and the output.
        num_heads: H, query heads.
        num_kv_heads: H_kv, key and value heads, a divisor of H; None is H.
        head_dim: K = V, even; None is embed_dim / num_heads.
        bias: whether the projections have one.
        device, dtype: of the parameters.
        The other keywords: as in :func:`tree_attention`.

    Raises:
        TypeError: a size that is no int, another option of a wrong type.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
        ValueError: a size or option out of range, sizes that do not divide, or an odd head_dim.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        compression_rate: int = 16,
        max_top_nodes: int = 8192,
        top_k: int = 512,
        selection_stride: int = 1,
        scale: float | None = None,
        rope_base: float | None = 10000.0,
        importance: str = "lse_causal",
        scope: str = "kv_head",
        store_parents: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in (sizes if head_dim is None else sizes | {"head_dim": head_dim}).items():
            check_int("HTreeAttention", name, size, 1)
        check_bool("HTreeAttention", "bias", bias)
        if dtype is not None:
            check_option_dtype("HTreeAttention", dtype, FLOATING_AND_DOUBLE)
        if num_heads % num_kv_heads != 0:
            raise ValueError(
                f"HTreeAttention: num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        if head_dim is None:
            if embed_dim % num_heads != 0:
                raise ValueError(
                    f"HTreeAttention: embed_dim must be a multiple of num_heads when head_dim is None, "
                    f"got {embed_dim} and {num_heads}"
                )
            head_dim = embed_dim // num_heads
        if head_dim < 2 or head_dim % 2 != 0:
            raise ValueError(f"HTreeAttention: head_dim must be even and at least 2, got {head_dim}")
        check_options(
            "HTreeAttention",
            compression_rate,
            max_top_nodes,
            top_k,
            selection_stride,
            scale,
            rope_base,
            importance,
            scope,
            store_parents,
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.compression_rate = compression_rate
        self.max_top_nodes = max_top_nodes
        self.top_k = top_k
        self.selection_stride = selection_stride
        self.scale = scale
        self.rope_base = rope_base
        self.importance = importance
        self.scope = scope
        self.store_parents = store_parents
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.o_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, *, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Attends causally within each sequence.

        Args:
            x: [B, T, E].
            attn_mask, key_padding_mask: must be None; they exist to be refused by name.

        Returns:
            [B, T, E] in the dtype of x (of autocast, where it is on).

        Raises:
            ShapeMismatchError: another shape of x.
            UnsupportedDtypeError: x has another dtype than the parameters, outside autocast.
            NotImplementedError: a mask or padding is given.
        """
        for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if mask is not None:
                raise NotImplementedError(
                    f"HTreeAttention: {name} is not supported: the attention is causal over the whole "
                    "sequence. Run sequences of different lengths one by one, or pad at the end and ignore "
                    "those rows"
                )
        if not isinstance(x, Tensor):
            raise TypeError(f"HTreeAttention: x must be a Tensor, got {type(x).__name__}")
        autocast = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
        if not x.is_floating_point() or not (autocast or x.dtype == self.q_proj.weight.dtype):
            raise UnsupportedDtypeError(
                f"HTreeAttention: x must have the dtype of the parameters ({self.q_proj.weight.dtype}), got {x.dtype}",
                dtype=x.dtype,
                supported_dtypes=(self.q_proj.weight.dtype,),
                tensor_name="x",
            )
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ShapeMismatchError(
                f"HTreeAttention: x must be [B, T, {self.embed_dim}], got {tuple(x.shape)}",
                expected=("B", "T", self.embed_dim),
                actual=tuple(x.shape),
                tensor_name="x",
            )
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        out = tree_attention(
            q,
            k,
            v,
            compression_rate=self.compression_rate,
            max_top_nodes=self.max_top_nodes,
            top_k=self.top_k,
            selection_stride=self.selection_stride,
            scale=self.scale,
            rope_base=self.rope_base,
            importance=self.importance,
            scope=self.scope,
            store_parents=self.store_parents,
        )
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return self.o_proj(out.flatten(2))

    def extra_repr(self) -> str:
        """Sizes and the options that shape the tree."""
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, compression_rate={self.compression_rate}, "
            f"max_top_nodes={self.max_top_nodes}, top_k={self.top_k}, "
            f"selection_stride={self.selection_stride}, scale={self.scale}, rope_base={self.rope_base}, "
            f"importance={self.importance!r}, "
            f"scope={self.scope!r}, store_parents={self.store_parents}"
        )
