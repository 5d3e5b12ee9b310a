"""The least time that memory traffic takes: compulsory bytes over copy bandwidth, or a measured IO-only twin.

A row's floor says how much an op could still gain; the verdict says whether arithmetic is what limits it (§2.4 of
docs/semantics/io_twins.md). Times are microseconds in :class:`Floor` and milliseconds in :func:`verdict`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from htree_ops.bench import timing
from htree_ops.testing.cases import Case

__all__ = ["PEAKS_GB_PER_S", "TWINS", "Floor", "floor", "overhead_percent", "peak_of", "verdict"]

#: Memory bandwidth from data sheets in GB/s (10^9), by a part of torch's device name. The first match counts.
PEAKS_GB_PER_S: dict[str, float] = {
    "H200": 4800.0,
    "H100 PCIe": 2039.0,
    "H100 NVL": 3938.0,
    "H100": 3352.0,
    "H20": 4000.0,
    "GH200": 4000.0,
    "B200": 8000.0,
    "A100-SXM4-80GB": 2039.0,
    "A100 80GB": 1935.0,
    "A100": 1555.0,
    "L40S": 864.0,
    "L40": 864.0,
    "L4": 300.0,
    "A10": 600.0,
    "RTX 4090": 1008.0,
    "RTX 3090": 936.0,
}


def overhead_percent(full_ms: float, io_ms: float) -> float:
    """100 * (full - io) / full: the share of the time that the traffic does not explain.

    Raises:
        ValueError: a time is not positive and finite.
    """
    for time in (full_ms, io_ms):
        if not 0 < time < float("inf"):
            raise ValueError(f"times must be positive and finite, got {full_ms} and {io_ms}")
    return 100.0 * (full_ms - io_ms) / full_ms


def verdict(full_ms: float, io_ms: float) -> str:
    """What bounds the full computation, by the unrounded overhead of :func:`overhead_percent`.

    Returns:
        "inconclusive" below 0, "IO-bound" below 20, "balanced" up to 50, else "compute-bound".
    """
    overhead = overhead_percent(full_ms, io_ms)
    if overhead < 0:
        return "inconclusive"
    if overhead < 20:
        return "IO-bound"
    return "balanced" if overhead <= 50 else "compute-bound"


def peak_of(device_name: str) -> float | None:
    """Data-sheet bandwidth in GB/s of a GPU by its name, None for an unknown one."""
    return next((peak for name, peak in PEAKS_GB_PER_S.items() if name in device_name), None)


def _io_compute_scores(*arguments: Any) -> Any:
    return torch.ops.htree.io_compute_scores(*arguments)


def _io_select_topk(scores: torch.Tensor, num_candidates: torch.Tensor, top_k: int, *_: Any) -> Any:
    return torch.ops.htree.io_select_topk(scores, num_candidates, top_k)


def _io_next_parents(parents: torch.Tensor, positions: torch.Tensor, rate: int = 16) -> Any:
    return torch.ops.htree.io_compute_next_parents(parents, positions, rate)


#: Twins that take the op's own arguments, by op. io_accumulate_non_topk keeps its
#: arithmetic, so it gives no floor.
TWINS: dict[str, Callable[..., Any]] = {
    "compute_scores": _io_compute_scores,
    "select_topk": _io_select_topk,
    "compute_next_parents": _io_next_parents,
}


@dataclass(frozen=True)
class Floor:
    """The least time of a call.

    Attributes:
        us: microseconds.
        kind: ``"copy"`` (compulsory bytes over measured copy bandwidth) or ``"twin"`` (measured).
    """

    us: float
    kind: str


def floor(
    op: str,
    case: Case,
    device: torch.device | str = "cpu",
    ceiling_gb_per_s: float | None = None,
    effort: timing.Effort | None = None,
) -> Floor:
    """The IO floor of ``op`` on ``case``.

    Args:
        op: name of the op; those of :data:`TWINS` are measured through their twin.
        case: knows its bytes and inputs.
        device: where the floor is wanted.
        ceiling_gb_per_s: copy bandwidth of the run, measured here where it is None.
        effort: how long to measure a twin.

    Raises:
        ValueError: a bandwidth that is not positive.
    """
    if op in TWINS:
        sets = range(timing.num_input_sets(case.bytes()) if torch.device(device).type == "cuda" else 2)
        calls = [partial(TWINS[op], *case.make_inputs(device, seed)) for seed in sets]
        measured = timing.measure({op: calls}, timing.clock_for(device), effort or timing.Effort(rounds=5))
        return Floor(measured[op].median_us, "twin")
    ceiling = timing.copy_bandwidth(device) if ceiling_gb_per_s is None else ceiling_gb_per_s
    if not ceiling > 0:
        raise ValueError(f"the copy bandwidth must be positive, got {ceiling} GB/s")
    return Floor(case.bytes() / ceiling / 1e3, "copy")
