"""What a state must be before it replaces the tokens of a compressed cache (docs/semantics/compressed_kv.md §4.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError, refuse
from htree_ops.ops.compressed_kv.format import WORD, CompressedKV, row_bytes
from htree_ops.ops.compressed_kv.storage import RowFormat

__all__ = ["check_state"]

_DTYPES = (torch.int64, torch.uint8, torch.float16)


def _check_keys(op: str, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"{op}: state must be a dict, got {type(state).__name__}")
    rows = (f"{prefix}_{name}" for prefix in "kv" for name in CompressedKV._fields)
    for name in ("config", "compressed", "dense", *rows, "k_win", "v_win", "key_weight"):
        if name not in state:
            raise ValueError(f"{op}: state must have {name}, got {', '.join(map(str, state))}")
    if not isinstance(state["config"], Mapping):
        raise ValueError(f"{op}: config of the state must be a dict, got {type(state['config']).__name__}")
    for name, value in config.items():
        stored = state["config"].get(name)
        if stored != value:
            raise ValueError(f"{op}: {name} of the state must be that of the cache, {value}, got {stored}")


def _check_lengths(
    op: str, state: Mapping[str, Any], config: Mapping[str, Any], batch: int, capacity: int
) -> None:
    for name in ("compressed", "dense"):
        numbers = state[name]
        if not isinstance(numbers, Sequence) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{op}: {name} of the state must be a list of ints >= 0, got {numbers!r}")
        if len(numbers) != batch:
            raise ValueError(
                f"{op}: {name} of the state must have {batch} numbers, one per sequence of the cache, got {numbers}"
            )
    window, chunk = config["window"], config["chunk"]
    for compressed, dense in zip(state["compressed"], state["dense"], strict=True):
        if compressed % chunk:
            raise ValueError(f"{op}: compressed of the state must be multiples of {chunk}, got {compressed}")
        least = window if compressed else 0
        if not least <= dense <= window + chunk:
            raise ValueError(
                f"{op}: dense of the state must lie between {least} and {window + chunk} beside {compressed} "
                f"compressed tokens, got {dense}"
            )
    longest = max((c + d for c, d in zip(state["compressed"], state["dense"], strict=True)), default=0)
    if longest > capacity:
        raise ValueError(
            f"{op}: compressed + dense of the state must be at most the capacity of {capacity}, got {longest}"
        )


def _check_entry(
    op: str, state: Mapping[str, Any], name: str, dtype: torch.dtype, shape: tuple[int, ...], most: int
) -> None:
    """Checks one entry of ``shape``, where -1 is the dim of tokens, of which there must be at least ``most``."""
    x = state[name]
    if not isinstance(x, Tensor) or x.dtype != dtype:
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{op}: {name} of the state must be a tensor of {dtype}, got {came}")
    fits = x.dim() == len(shape) and all(
        size >= most if wanted < 0 else size == wanted for size, wanted in zip(x.shape, shape, strict=True)
    )
    if not fits:
        words = ", ".join(f">= {most}" if wanted < 0 else str(wanted) for wanted in shape)
        refuse(
            ShapeMismatchError,
            f"{op}: {name} of the state must be [{words}], got {tuple(x.shape)}",
            expected=shape,
            actual=tuple(x.shape),
            tensor_name=name,
        )


def check_state(
    op: str,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    formats: Sequence[RowFormat],
    batch: int,
    capacity: int,
    dtype: torch.dtype,
) -> None:
    """Checks everything but the bytes of the rows and the key weight, and copies nothing.

    Args:
        state: of :meth:`htree_ops.CompressedKVCache.state_dict`.
        config, formats, batch, capacity, dtype: of the cache that is to take it.

    Raises:
        TypeError: the state is not a dict.
        ValueError: an entry is missing or does not fit; the message names it.
    """
    _check_keys(op, state, config)
    _check_lengths(op, state, config, batch, capacity)
    heads = config["num_kv_heads"]
    rows, tokens = (max(state[name], default=0) for name in ("compressed", "dense"))
    for prefix, f in zip("kv", formats, strict=True):
        shapes: tuple[tuple[int, ...], ...] = (
            (batch, heads, -1, f.head_dim // WORD),
            (batch, heads, -1, row_bytes(f.keep, f.bits)),
            (batch, heads, 0 if f.bits == 16 else -1),
        )
        for name, part, shape in zip(CompressedKV._fields, _DTYPES, shapes, strict=True):
            _check_entry(op, state, f"{prefix}_{name}", part, shape, rows)
        _check_entry(op, state, f"{prefix}_win", dtype, (batch, heads, -1, f.head_dim), tokens)
    k_width, v_width = (state[name].shape[2] for name in ("k_win", "v_win"))
    if k_width != v_width:
        refuse(
            ShapeMismatchError,
            f"{op}: k_win and v_win of the state must hold the same number of tokens, got {k_width} and {v_width}",
            expected=k_width,
            actual=v_width,
            tensor_name="v_win",
        )
