"""Checks of what a compressed cache is given (docs/semantics/conventions.md §0.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError, refuse
from htree_ops.ops.arguments import (
    check_devices,
    check_dtype,
    check_int,
    check_number,
    check_shape,
    check_tensor,
    check_tensors,
)
from htree_ops.ops.paging import host_integers


def pair(value: Any) -> tuple[Any, Any]:
    """(keys, values): two values as they are, one value for both."""
    return (value[0], value[1]) if isinstance(value, (tuple, list)) and len(value) == 2 else (value, value)


def check_new_tokens(
    op: str, k: Tensor, v: Tensor, sizes: tuple[int, int, int, int], dtype: torch.dtype, cache: Tensor
) -> None:
    """Checks k and v [B, S, H_kv, D] for a cache of ``sizes`` B, H_kv, D of keys, D of values, and a tensor of it."""
    batch, heads, width, value_width = sizes
    if (
        isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and k.layout == v.layout == torch.strided
        and not (k.is_nested or v.is_nested)
        and k.dim() == 4
        and k.shape == (batch, k.shape[1], heads, width)
        and v.shape == (batch, k.shape[1], heads, value_width)
        and k.dtype == v.dtype == dtype
        and k.device == v.device == cache.device
    ):
        return  # fast path: a model's step comes here twice per layer; the rest only finds the words
    of_k = {"k": (k, "B S H_kv D")}
    for name, x, size, tensors in (
        ("k", k, width, of_k),
        ("v", v, value_width, of_k | {"v": (v, "B S H_kv V")}),
    ):
        check_tensors(op, **tensors)
        check_dtype(op, (dtype,), **{name: x})
        check_devices(op, {"the cache": cache, name: x})
        check_shape(op, name, x, (batch, x.shape[1], heads, size), f"[{batch}, S, {heads}, {size}]")


def check_query(
    op: str,
    q: Tensor,
    scale: float | None,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    cache: Tensor,
) -> None:
    """Checks q [B, H, D] or [B, n, H, D] and the scale for a cache of ``sizes`` B, H_kv and D, and a tensor of it."""
    batch, kv_heads, width = sizes
    check_tensor(op, "q", q)
    check_dtype(op, (dtype,), q=q)
    check_devices(op, {"the cache": cache, "q": q})
    heads = q.shape[-2] if q.dim() > 1 else 0
    wanted = (batch, *(q.shape[1:2] if q.dim() == 4 else ()), heads, width)
    check_shape(op, "q", q, wanted, f"[{batch}, H, {width}] or [{batch}, n, H, {width}]")
    if not heads or heads % kv_heads:
        refuse(
            ShapeMismatchError,
            f"{op}: H of q must be a positive multiple of H_kv = {kv_heads}, got {heads}",
            expected=f"a positive multiple of {kv_heads}",
            actual=heads,
            tensor_name="q",
        )
    if scale is not None:
        check_number(op, "scale", scale)


def prompt_lengths(op: str, lengths: Tensor | Sequence[int] | None, batch: int, size: int) -> list[int]:
    """Tokens of each of ``batch`` prompts in rows of ``size``, as :func:`host_integers`; None is ``size`` for all."""
    if lengths is None:
        return [size] * batch
    return host_integers(op, "lengths", lengths, batch, 0, size)


def check_policy(op: str, window: int, chunk: int, page_size: int | None, split_size: int) -> None:
    """Raises TypeError or ValueError for numbers with which no cache can be made."""
    check_int(op, "window", window, 0)
    check_int(op, "chunk", chunk, 1)
    check_int(op, "split_size", split_size, 0)
    if page_size is None:
        return
    check_int(op, "page_size", page_size, 1)
    if chunk % page_size:
        raise ValueError(f"{op}: page_size must divide chunk = {chunk}, got {page_size}")
