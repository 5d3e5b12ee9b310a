"""Time of tree attention that selects by span means, as a multiple of the same call without a span.

Run: ``python -m benchmarks.selection_span --csv PATH`` on a GPU with 40 GB; ``--quick`` for a look, without the
sequence of 10^6 tokens. B = 1, H = 32, H_kv = 4, K = V = 128, k = 512, M = 8192, bf16, random normal inputs; ``--device
cpu`` takes smaller ones. All spans of a length and stride are timed in turns in one process, then one by one under load
("sustained"). ``--open-next`` times each of the first settings with and without ``open_next``. Figures are reported,
never asserted.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import htree_ops  # noqa: F401 - registers the ops
from benchmarks.harness import timing
from benchmarks.harness.plain_rows import parse_for_gpu, print_rows
from benchmarks.harness.progress import progress
from htree_ops.info import source_commit
from htree_ops.tuning.clock import clock_for
from tests.support.tree_attention_cases import TreeAttentionCase

#: T, selection_stride, spans, rounds.
SETTINGS = {
    "cuda": (
        (131_072, 16, (4, 2), 6),
        (131_072, 4, (4, 2), 5),
        (131_072, 1, (4, 2), 3),
        (1_048_576, 16, (4,), 2),
        (1_048_576, 4, (4,), 1),
    ),
    "cpu": ((2048, 16, (4, 2), 2), (4096, 16, (4,), 2)),
}
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"dtype": torch.bfloat16, "H": 32, "H_kv": 4, "top_k": 512, "M": 8192, "K": 128, "V": 128},
    "cpu": {"dtype": torch.float32, "H": 4, "H_kv": 1, "top_k": 32, "M": 512, "K": 32, "V": 32},
}


@dataclass(frozen=True, kw_only=True)
class SpanRow:
    """One forward; ``multiple`` is its sustained time by that of the span None.

    ``score_tflop`` are the products of queries with span means of the top layer: half of T/s leaders times T/c means.
    """

    gpu: str
    torch: str
    commit: str
    T: int
    selection_stride: int
    selection_span: int | None
    median_ms: float
    sustained_ms: float
    multiple: float
    peak_bytes: int | None
    score_tflop: float


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that a call holds beyond those before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def times_of(
    case: TreeAttentionCase, ways: Sequence[dict[str, Any]], device: str, effort: timing.Effort
) -> list[tuple[functools.partial[object], float, float]]:
    """For each way to call ``attention`` the call, its median in ms, and that under load; all are timed in turns."""
    inputs, clock = (*case.make_qkv(device), *case.op_options()), clock_for(device)
    calls = [
        functools.partial(torch.ops.htree.attention, *inputs, store_parents=False, **way) for way in ways
    ]
    times = timing.measure_undisturbed({str(i): [call] for i, call in enumerate(calls)}, clock, effort)
    medians = [times[str(i)].median_us for i in range(len(calls))]
    return [
        (call, median / 1e3, timing.sustained([call], clock, median, effort).median_us / 1e3)
        for call, median in zip(calls, medians, strict=True)
    ]


def measure(
    length: int, stride: int, spans: Sequence[int], device: str, effort: timing.Effort
) -> list[SpanRow]:
    """A row for None and one for every span."""
    case = TreeAttentionCase(name="span", T=length, r=16, selection_stride=stride, **SIZES[device])
    ways = [None, *spans]
    timed = times_of(case, [{"selection_span": span} for span in ways], device, effort)
    on_gpu = device == "cuda"
    plain_ms = timed[0][2]
    return [
        SpanRow(
            gpu=torch.cuda.get_device_name() if on_gpu else "none",
            torch=torch.__version__,
            commit=source_commit(),
            T=length,
            selection_stride=stride,
            selection_span=span,
            median_ms=median_ms,
            sustained_ms=sustained_ms,
            multiple=sustained_ms / plain_ms,
            peak_bytes=peak_of(call) if on_gpu else None,
            score_tflop=0.0 if span is None else length / stride * case.H * (length / span) * case.K / 1e12,
        )
        for span, (call, median_ms, sustained_ms) in zip(ways, timed, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class NextRow:
    """One forward with ``open_next`` and one without, under load; ``multiple`` is the one by the other."""

    gpu: str
    torch: str
    commit: str
    T: int
    selection_stride: int
    selection_span: int | None
    plain_ms: float
    open_next_ms: float
    multiple: float


def measure_next(
    length: int, stride: int, spans: Sequence[int], device: str, effort: timing.Effort
) -> list[NextRow]:
    """A row for None and for the last of the spans."""
    case = TreeAttentionCase(name="next", T=length, r=16, selection_stride=stride, **SIZES[device])
    rows = []
    for span in (None, spans[-1]):
        ways = [{"selection_span": span, "open_next": open_next} for open_next in (False, True)]
        plain_ms, open_next_ms = (sustained for _, _, sustained in times_of(case, ways, device, effort))
        rows.append(
            NextRow(
                gpu=torch.cuda.get_device_name() if device == "cuda" else "none",
                torch=torch.__version__,
                commit=source_commit(),
                T=length,
                selection_stride=stride,
                selection_span=span,
                plain_ms=plain_ms,
                open_next_ms=open_next_ms,
                multiple=open_next_ms / plain_ms,
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = argparse.ArgumentParser(description="time of tree attention by selection_span")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="the shortest sequence alone, few repetitions")
    parser.add_argument("--open-next", action="store_true", help="time open_next, in place of spans")
    arguments = parse_for_gpu(parser, argv)
    settings = SETTINGS[arguments.device]
    if arguments.quick or arguments.open_next:
        settings = tuple(setting for setting in settings if setting[0] == settings[0][0])
    what = measure_next if arguments.open_next else measure
    rows = (
        row
        for length, stride, spans, rounds in progress(
            settings, lambda setting: f"T={setting[0]} stride {setting[1]}"
        )
        for row in what(
            length,
            stride,
            spans,
            arguments.device,
            timing.QUICK if arguments.quick else timing.Effort(rounds=rounds),
        )
    )
    print_rows(rows, arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
