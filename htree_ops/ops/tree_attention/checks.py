"""Checks of the arguments of tree attention and of its stages (docs/semantics §0.4, §1.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError
from htree_ops.ops.arguments import (
    check_bool,
    check_dtype,
    check_int,
    check_int_types,
    check_number,
    check_tensors,
    floating_for,
    state_dtype,
)

__all__ = [
    "INT32",
    "check_layer",
    "check_options",
    "check_qkv",
    "check_scores",
    "check_stage_options",
    "wide",
]

INT32 = (torch.int32,)
IMPORTANCES = ("lse_causal", "lse", "exp_joint")
SCOPES = ("kv_head", "q_head")


def wide(tensor: Tensor) -> tuple[torch.dtype, ...]:
    """dtypes of scores and states on the device of ``tensor``."""
    return (torch.float32,) if tensor.is_cuda else (torch.float32, torch.float64)


def check_qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    check_tensors(op, q=(q, "B T_q H K"), k=(k, "B T H_kv K"), v=(v, "B T H_kv V"))
    # Autocast brings them to one dtype; devices such as meta have none.
    if q.device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(q.device.type):
        check_dtype(op, floating_for(q), q=q, k=k, v=v)
    if q.shape[2] < 1 or k.shape[2] < 1 or q.shape[2] % k.shape[2] != 0:
        raise ShapeMismatchError(
            f"{op}: H of q must be a positive multiple of H_kv of k, got {q.shape[2]} and {k.shape[2]}",
            expected="a positive multiple of H_kv",
            actual=(q.shape[2], k.shape[2]),
            tensor_name="q",
        )
    if q.shape[3] < 2 or q.shape[3] % 2 != 0 or v.shape[3] < 1:
        raise ShapeMismatchError(
            f"{op}: K, the last size of q, must be even and at least 2, and V, that of v, at least 1, "
            f"got {q.shape[3]} and {v.shape[3]}",
            expected="K even, V at least 1",
            actual=(q.shape[3], v.shape[3]),
            tensor_name="q" if v.shape[3] >= 1 else "v",
        )
    if q.shape[1] > k.shape[1]:
        raise ShapeMismatchError(
            f"{op}: q must have at most as many rows as k (it is a suffix of the keys), "
            f"got T_q = {q.shape[1]} and T = {k.shape[1]}",
            expected=f"at most {k.shape[1]}",
            actual=q.shape[1],
            tensor_name="q",
        )


def check_options(
    op: str,
    compression_rate: int,
    max_top_nodes: int,
    top_k: int,
    selection_stride: int,
    scale: float | None,
    rope_base: float | None,
    importance: str,
    scope: str,
    store_parents: bool,
) -> None:
    """Types and ranges of the keywords that a module and the function share, named as the caller wrote them."""
    check_int(op, "compression_rate", compression_rate, 2)
    check_int(op, "top_k", top_k, 1)
    check_int(op, "max_top_nodes", max_top_nodes, 1)
    check_int(op, "selection_stride", selection_stride, 1)
    if max_top_nodes > top_k * compression_rate:
        raise ValueError(
            f"{op}: max_top_nodes must be at most top_k * compression_rate = {top_k * compression_rate}, "
            f"got {max_top_nodes}"
        )
    if selection_stride & (selection_stride - 1) or compression_rate % selection_stride:
        raise ValueError(
            f"{op}: selection_stride must be a power of two that divides compression_rate = "
            f"{compression_rate}, got {selection_stride}"
        )
    if scale is not None:
        check_number(op, "scale", scale)
    if rope_base is not None:
        check_number(op, "rope_base", rope_base, positive=True)
    for name, value, known in (("importance", importance, IMPORTANCES), ("scope", scope, SCOPES)):
        if not isinstance(value, str):
            raise TypeError(f"{op}: {name} must be a str, got {type(value).__name__}")
        if value not in known:
            raise ValueError(f"{op}: {name} must be one of {', '.join(known)}, got {value!r}")
    check_bool(op, "store_parents", store_parents)


def check_stage_options(
    op: str, *, scale: object = None, importance: object = "lse_causal", **integers: object
) -> None:
    """Types of the options of one stage, under their names; the op checks the ranges, which need the tensors.

    Raises:
        TypeError: an option of another type. ValueError: a scale that is not finite, or an int beyond 64 bits.
    """
    check_int_types(op, **integers)
    if scale is not None:
        check_number(op, "scale", scale)
    if not isinstance(importance, str):
        raise TypeError(f"{op}: importance must be a str, got {type(importance).__name__}")


def check_layer(
    op: str,
    q: Tensor,
    layer_k: Tensor,
    layer_v: Tensor | None,
    parents: Tensor,
    cos: Tensor,
    sin: Tensor,
    lists: str = "B rows H_kv k",
) -> None:
    values = {} if layer_v is None else {"layer_v": (layer_v, "B N H_kv V")}
    check_tensors(
        op,
        q=(q, "B T_q H K"),
        layer_k=(layer_k, "B N H_kv K"),
        **values,
        parents=(parents, lists),
        cos=(cos, "size K/2"),
        sin=(sin, "size K/2"),
    )
    dense = (
        {"q": q, "layer_k": layer_k} if layer_v is None else {"q": q, "layer_k": layer_k, "layer_v": layer_v}
    )
    check_dtype(op, floating_for(q), **dense)
    check_dtype(op, (state_dtype(q),), cos=cos, sin=sin)
    check_dtype(op, INT32, parents=parents)


def check_scores(op: str, scores: Tensor, **indices: tuple[Tensor, str]) -> None:
    check_tensors(op, scores=(scores, "B T_q H_kv k*r G"), **indices)
    check_dtype(op, wide(scores), scores=scores)
    check_dtype(op, INT32, **{name: tensor for name, (tensor, _) in indices.items()})
