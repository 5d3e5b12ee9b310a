"""Time of tree attention that selects by span means, as a multiple of the same call without a span.

Run: ``python benchmarks/selection_span.py --csv PATH`` on a GPU with 40 GB; ``--quick`` for a look, without the text of
10^6 tokens. B = 1, H = 32, H_kv = 4, K = V = 128, k = 512, M = 8192, bf16, random normal inputs; ``--device cpu`` takes
smaller ones. All spans of a length and stride are timed in turns in one process, then one by one under load
("sustained"). Figures are reported, never asserted.
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
from htree_ops.bench import timing
from htree_ops.bench.plain_rows import print_rows
from htree_ops.bench.progress import progress
from htree_ops.bench.results import source_commit
from htree_ops.testing.tree_attention_cases import TreeAttentionCase

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


def measure(
    length: int, stride: int, spans: Sequence[int], device: str, effort: timing.Effort
) -> list[SpanRow]:
    """A row for None and one for every span."""
    case = TreeAttentionCase(name="span", T=length, r=16, selection_stride=stride, **SIZES[device])
    q, k, v = case.make_qkv(device)
    calls = {
        span: functools.partial(
            torch.ops.htree.attention, q, k, v, *case.op_options(), store_parents=False, selection_span=span
        )
        for span in (None, *spans)
    }
    clock, on_gpu = timing.clock_for(device), device == "cuda"
    peaks = {span: peak_of(call) if on_gpu else None for span, call in calls.items()}
    times = timing.measure_undisturbed({str(span): [call] for span, call in calls.items()}, clock, effort)
    medians = {span: times[str(span)].median_us / 1e3 for span in calls}
    sustained = {
        span: timing.sustained([call], clock, medians[span] * 1e3, effort).median_us / 1e3
        for span, call in calls.items()
    }
    return [
        SpanRow(
            gpu=torch.cuda.get_device_name() if on_gpu else "none",
            torch=torch.__version__,
            commit=source_commit(),
            T=length,
            selection_stride=stride,
            selection_span=span,
            median_ms=medians[span],
            sustained_ms=sustained[span],
            multiple=sustained[span] / sustained[None],
            peak_bytes=peaks[span],
            score_tflop=0.0 if span is None else length / stride * case.H * (length / span) * case.K / 1e12,
        )
        for span in calls
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = argparse.ArgumentParser(description="time of tree attention by selection_span")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="the shortest text alone, few repetitions")
    arguments = parser.parse_args(argv)
    settings = SETTINGS[arguments.device]
    if arguments.quick:
        settings = tuple(setting for setting in settings if setting[0] == settings[0][0])
    rows = (
        row
        for length, stride, spans, rounds in progress(
            settings, lambda setting: f"T={setting[0]} stride {setting[1]}"
        )
        for row in measure(
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
