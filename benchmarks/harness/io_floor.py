"""The least time that memory traffic takes: compulsory bytes over copy bandwidth, or a measured IO-only variant.

A row's floor says how much an op could still gain (docs/semantics/io_only.md §2.4). Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.harness import timing
from htree_ops.tuning.clock import clock_for, copy_bandwidth
from tests.support.cases import Case

#: IO-only variants that take the op's own arguments, by op. io_accumulate_non_topk keeps its
#: arithmetic, so it gives no floor.
IO_ONLY: dict[str, Callable[..., Any]] = {
    "compute_scores": torch.ops.htree.io_compute_scores,
    "select_topk": lambda scores, count, top_k, *_: torch.ops.htree.io_select_topk(scores, count, top_k),
    "compute_next_parents": torch.ops.htree.io_compute_next_parents,
}


@dataclass(frozen=True)
class Floor:
    """The least time of a call.

    Attributes:
        us: microseconds.
        kind: ``"copy"`` (compulsory bytes over measured copy bandwidth) or ``"io_only"`` (measured).
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
        op: name of the op; those of :data:`IO_ONLY` are measured through their IO-only variant.
        case: knows its bytes and inputs.
        device: where the floor is wanted.
        ceiling_gb_per_s: copy bandwidth of the run, measured here where it is None.
        effort: how long to measure an IO-only variant.

    Raises:
        ValueError: a bandwidth that is not positive.
    """
    if op in IO_ONLY:
        sets = range(timing.num_input_sets(case.bytes()) if torch.device(device).type == "cuda" else 2)
        calls = [partial(IO_ONLY[op], *case.make_inputs(device, seed)) for seed in sets]
        measured = timing.measure({op: calls}, clock_for(device), effort or timing.Effort(rounds=5))
        return Floor(measured[op].median_us, "io_only")
    ceiling = copy_bandwidth(device) if ceiling_gb_per_s is None else ceiling_gb_per_s
    if not ceiling > 0:
        raise ValueError(f"the copy bandwidth must be positive, got {ceiling} GB/s")
    return Floor(case.bytes() / ceiling / 1e3, "copy")
