"""The configuration with which a call without one runs, by ``HTREE_TUNE`` (docs/semantics/python.md §3.4).

``off``: the kernel's own choice. ``read`` (default): what an earlier search found for this very problem, else the
kernel's own choice. ``tune``: as ``read``, and a problem that was never searched is searched at its first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from htree_ops.ops.arguments import constant_in_traces, dtype_name
from htree_ops.tuning.cache import TuningCache, cache_dir
from htree_ops.tuning.key import CacheKey
from htree_ops.tuning.space import SPACES

MODES = ("off", "read", "tune")
#: How many problems are remembered; beyond that all are looked up again.
MAX_CHOSEN = 4096
_chosen: dict[tuple[Any, ...], list[int] | None] = {}


@lru_cache(maxsize=8)
def _cache_in(folder: Path) -> TuningCache:
    """One reader per folder, which reads a file again only where the file has changed."""
    return TuningCache(folder)


def tuning_mode() -> str:
    """``HTREE_TUNE`` in lower case, "read" where it is empty or not set.

    Raises:
        ValueError: another value than off, read or tune.
    """
    given = os.environ.get("HTREE_TUNE", "")
    mode = given.strip().lower() or "read"
    if mode not in MODES:
        raise ValueError(f"HTREE_TUNE must be off, read or tune, got {given!r}")
    return mode


@lru_cache(maxsize=1)
def _mode_once() -> str:
    """:func:`tuning_mode` of the first call that succeeds, for calls that cost less than reading a variable."""
    return tuning_mode()


@constant_in_traces
def _wrong_mode() -> str:
    """What is wrong with ``HTREE_TUNE``; empty where nothing is."""
    try:
        _mode_once()
    except ValueError as error:
        return str(error)
    return ""


def forget() -> None:
    """Drops what this process has looked up, so that the next calls look again."""
    _chosen.clear()
    _cache_in.cache_clear()
    _mode_once.cache_clear()


def configured(
    kernel: str,
    problem: tuple[int, ...],
    tensor: torch.Tensor,
    call: Callable[[list[int] | None], Any],
    layout: str = "contiguous",
) -> list[int] | None:
    """The values of ``kernel``'s configuration for a problem on the device of ``tensor``; None is its own choice.

    Each problem is looked up once per process. Nothing is timed while a compiler traces or a CUDA graph is captured. A
    traced call takes the kernel's own choice, because a trace must not depend on a file. A captured call takes what is
    already known.

    Args:
        kernel: name of the op and of its space.
        problem: sizes that the speed depends on.
        tensor: an argument, for dtype and device.
        call: runs the op with a configuration, for the search.
        layout: how the operands lie.

    Raises:
        ValueError: ``HTREE_TUNE`` is none of the modes, on every device and in a trace too.
    """
    if not tensor.is_cuda or torch.compiler.is_compiling():
        if sentence := _wrong_mode():
            raise ValueError(sentence)
        return None  # a CPU ignores configurations, a trace must not depend on a file
    return choose(kernel, problem, tensor.dtype, layout, tensor.device, call)


def choose(
    kernel: str,
    problem: tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
    device: torch.device,
    call: Callable[[list[int] | None], Any],
) -> list[int] | None:
    """:func:`configured` on any device."""
    memory_key = (kernel, problem, dtype, layout, device.index)
    if memory_key in _chosen:
        return _chosen[memory_key]
    config = None
    mode = tuning_mode()
    if mode != "off":
        cache = _cache_in(cache_dir())
        key = CacheKey.of(kernel, problem, dtype_name(dtype), layout, device)
        config = cache.get(key)
        if config and set(config) != set(SPACES[kernel]):
            config = None  # it belongs to a space that has changed since
        if config is None and mode == "tune":
            from htree_ops.tuning.tuner import AutoTuner, may_tune, search

            if may_tune():
                return None
            tuner = AutoTuner(
                lambda **config: call(list(config.values()) or None),
                SPACES[kernel],
                warmup_runs=3,
                benchmark_runs=20,
                cache_dir=cache.folder,
                problem_size=problem,
                device=device,
                kernel_type=kernel,
                dtype=dtype,
                layout=layout,
            )
            with torch.no_grad():
                config, _, _ = search(tuner)
    if len(_chosen) >= MAX_CHOSEN:
        _chosen.clear()
    _chosen[memory_key] = [config[name] for name in SPACES[kernel]] if config else None
    return _chosen[memory_key]
