"""What a state must be before it replaces the tokens of a compressed cache (docs/semantics/compressed_kv.md §4.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError, refuse
from htree_ops.ops.arguments import check_data
from htree_ops.ops.compressed_kv.format import CompressedKV
from htree_ops.ops.compressed_kv.storage import RowFormat, StoredRows

#: The options of a state in their order; those of :func:`htree_ops.CompressedKVCache.config` but the dtype.
_OPTIONS = ("num_kv_heads", "head_dim", "value_dim", "keep", "bits", "window", "chunk", "hadamard_group")
_PAIRS = ("keep", "bits")


def options_as_tensor(config: Mapping[str, Any]) -> Tensor:
    """The options that the bytes of a token depend on, int64; those of keys and values one after the other."""
    numbers = [n for name in _OPTIONS for n in (config[name] if name in _PAIRS else (config[name],))]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def state_of(
    config: Mapping[str, Any],
    lengths: tuple[Sequence[int], Sequence[int]],
    storage: StoredRows,
    window: Sequence[Tensor],
    key_weight: Tensor | None,
) -> dict[str, Tensor]:
    """What :meth:`htree_ops.CompressedKVCache.state_dict` gives.

    Args:
        lengths: compressed and dense tokens of each sequence. window: keys and values of the latter.
    """
    compressed, dense = lengths
    state: dict[str, Tensor] = {
        "options": options_as_tensor(config),
        "compressed": torch.tensor(compressed, dtype=torch.int64, device="cpu"),
        "dense": torch.tensor(dense, dtype=torch.int64, device="cpu"),
    }
    batch, heads, _, width = window[0].shape
    for f, prefix in zip(storage.formats, "kv", strict=True):
        rows = f.allocate(batch, heads, max(compressed, default=0), window[0].device)
        state |= {f"{prefix}_{name}": x for name, x in rows._asdict().items()}
    for name, x in zip(("k_win", "v_win"), window, strict=True):
        state[name] = x.new_zeros(batch, heads, max(dense, default=0), x.shape[3])
        for i, length in enumerate(dense):
            state[name][i, :, :length] = x[i, :, :length]
    for i, length in enumerate(compressed):
        for part, prefix in zip(storage.read(i, length), "kv", strict=True):
            for name, x in part._asdict().items():
                state[f"{prefix}_{name}"][i, :, : x.shape[1]] = x
    none = window[0].new_empty(0, heads, width)
    state["key_weight"] = (
        none if key_weight is None else key_weight.clone(memory_format=torch.contiguous_format)
    )
    return state


def _check_entry(
    op: str, state: Mapping[str, Any], name: str, dtype: torch.dtype, shape: tuple[int, ...], most: int = 0
) -> None:
    """Checks one entry of ``shape``, where -1 is the dim of tokens, of which there must be at least ``most``."""
    x = state[name]
    if not isinstance(x, Tensor) or x.dtype != dtype:
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{op}: {name} of the state must be a Tensor of {dtype}, got {came}")
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


def _check_options(op: str, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Checks the reverse of :func:`options_as_tensor`."""
    _check_entry(op, state, "options", torch.int64, (len(_OPTIONS) + len(_PAIRS),))
    numbers = iter(state["options"].tolist())
    for name in _OPTIONS:
        stored = (next(numbers), next(numbers)) if name in _PAIRS else next(numbers)
        if stored != config[name]:
            raise ValueError(
                f"{op}: {name} of the state must be that of the cache, {config[name]}, got {stored}"
            )


def _check_lengths(
    op: str, state: Mapping[str, Any], config: Mapping[str, Any], batch: int, most: tuple[int, int]
) -> None:
    for name in ("compressed", "dense"):
        _check_entry(op, state, name, torch.int64, (batch,))
    window, chunk = config["window"], config["chunk"]
    capacity, rows = most
    for compressed, dense in zip(state["compressed"].tolist(), state["dense"].tolist(), strict=True):
        slots = window + chunk - compressed % chunk
        for name, number, bound in (
            ("compressed + dense", compressed + dense, capacity),
            ("compressed", compressed, rows),
            ("dense", dense, slots),
        ):
            if not 0 <= number <= bound:
                raise ValueError(
                    f"{op}: {name} of the state must lie between 0 and {bound} in this cache of {capacity} tokens, got "
                    f"{compressed} and {dense}"
                )


def check_state(
    op: str,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    formats: Sequence[RowFormat],
    batch: int,
    most: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Checks everything but the bytes of the rows and the signs of the key weight, and copies nothing.

    Args:
        state: of :meth:`htree_ops.CompressedKVCache.state_dict`.
        config, formats, batch, dtype: of the cache that is to take it.
        most: most tokens of a sequence, and most compressed ones.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{op}: state must be a dict, got {type(state).__name__}")
    for name, entry in state.items():
        if isinstance(entry, Tensor):
            check_data(op, f"{name} of the state", entry)
    of_rows = (f"{prefix}_{name}" for prefix in "kv" for name in CompressedKV._fields)
    for name in ("options", "compressed", "dense", *of_rows, "k_win", "v_win", "key_weight"):
        if name not in state:
            raise ValueError(f"{op}: state must have {name}, got {', '.join(map(str, state))}")
    _check_options(op, state, config)
    _check_lengths(op, state, config, batch, most)
    came, other = (getattr(state[name], "dtype", None) for name in ("k_win", "v_win"))
    if came == other not in (None, dtype):
        raise TypeError(
            f"{op}: dtype must be {came}, that of the state, got {dtype}: make the cache with dtype={came}"
        )
    heads = config["num_kv_heads"]
    rows, tokens = (max(state[name].tolist(), default=0) for name in ("compressed", "dense"))
    for prefix, f in zip("kv", formats, strict=True):
        for name, own in f.allocate(batch, heads, 1, torch.device("meta"))._asdict().items():
            shape = (*own.shape[:2], -own.shape[2], *own.shape[3:])  # scales of 16 bits have no tokens
            _check_entry(op, state, f"{prefix}_{name}", own.dtype, shape, rows)
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
    weight = state["key_weight"]
    if not isinstance(weight, Tensor) or weight.dim() != 3 or weight.shape[0] not in (0, batch):
        raise ValueError(
            f"{op}: key_weight of the state must be a tensor [0 or {batch}, H_kv, D], got "
            f"{tuple(weight.shape) if isinstance(weight, Tensor) else weight!r}"
        )
