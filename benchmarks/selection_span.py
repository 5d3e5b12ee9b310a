"""Time of tree attention that selects by span means, as a multiple of the same call without a span.

Run: ``python benchmarks/selection_span.py --csv PATH`` on a GPU with 40 GB; ``--quick`` for a look, without the text of
10^6 tokens. B = 1, H = 32, H_kv = 4, K = V = 128, k = 512, M = 8192, bf16, random normal inputs; ``--device cpu`` takes
smaller ones. All spans of a length and stride, scored as they are and in int8 (``selection_dtype``), are timed in turns
in one process, then one by one under load ("sustained").

``--loss`` measures instead what the lists lose by int8: the importance of the nodes that are selected in int8 beside
that of those selected without, both in float64 by the definition without rounding. ``--open-next`` times each of the
first settings with and without ``open_next``. Figures are reported, never asserted.
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
import htree_ops.reference.tree_attention as reference
from htree_ops.bench import timing
from htree_ops.bench.plain_rows import parse_for_gpu, print_rows
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
#: T, H, H_kv, K, k, M, stride, span, standard deviations of the scores.
LOSSES = {
    "cuda": (
        (131_072, 32, 4, 128, 512, 8192, 4, 2, (1.0, 2.0, 4.0)),
        (131_072, 32, 4, 128, 512, 8192, 4, 4, (1.0,)),
    ),
    "cpu": (
        (16_384, 8, 1, 128, 64, 1024, 4, 2, (1.0, 2.0, 4.0)),
        (16_384, 8, 1, 128, 64, 1024, 4, 4, (1.0,)),
        (16_384, 8, 1, 64, 64, 1024, 4, 2, (1.0,)),
    ),
}
#: The last leaders of the text are judged.
LEADERS = 32
SELECTION_DTYPES = (None, "int8")


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
    selection_dtype: str | None
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
    inputs, clock = (*case.make_qkv(device), *case.op_options()), timing.clock_for(device)
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
    """A row for None, and for every span one without and one with int8."""
    case = TreeAttentionCase(name="span", T=length, r=16, selection_stride=stride, **SIZES[device])
    ways = [(None, None), *((span, dtype) for span in spans for dtype in SELECTION_DTYPES)]
    options = [{"selection_span": span, "selection_dtype": dtype} for span, dtype in ways]
    timed, on_gpu = times_of(case, options, device, effort), device == "cuda"
    plain_ms = timed[0][2]
    return [
        SpanRow(
            gpu=torch.cuda.get_device_name() if on_gpu else "none",
            torch=torch.__version__,
            commit=source_commit(),
            T=length,
            selection_stride=stride,
            selection_span=span,
            selection_dtype=dtype,
            median_ms=median_ms,
            sustained_ms=sustained_ms,
            multiple=sustained_ms / plain_ms,
            peak_bytes=peak_of(call) if on_gpu else None,
            score_tflop=0.0 if span is None else length / stride * case.H * (length / span) * case.K / 1e12,
        )
        for (span, dtype), (call, median_ms, sustained_ms) in zip(ways, timed, strict=True)
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


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """What the lists of the last leaders lose by int8; the layer above the tokens is the only one that selects.

    ``lost`` is 1 less the importance of the nodes selected in int8 by that of those selected without, ``most_lost``
    that of the leader and K/V head which lose most, ``changed`` the share of the selected nodes that are others.
    """

    gpu: str
    torch: str
    commit: str
    T: int
    H: int
    H_kv: int
    K: int
    top_k: int
    selection_stride: int
    selection_span: int
    score_deviation: float
    lost: float
    most_lost: float
    changed: float


def measure_loss(sizes: Sequence[int], deviation: float, device: str) -> LossRow:
    """One row; ``deviation`` is that of the scores of single tokens."""
    length, heads, kv_heads, width, top_k, top_nodes, stride, span = sizes
    case = TreeAttentionCase(
        name="loss",
        dtype=SIZES[device]["dtype"],
        T=length,
        num_queries=LEADERS * stride,
        H=heads,
        H_kv=kv_heads,
        K=width,
        V=width,
        r=16,
        top_k=top_k,
        M=top_nodes,
        selection_stride=stride,
        selection_span=span,
        spread=deviation,
    )
    q, k, v = case.make_qkv(device)
    lists = {
        dtype: torch.ops.htree.attention_forward(
            q, k, v, **(case.reference_options() | {"selection_dtype": dtype})
        )[3]
        for dtype in SELECTION_DTYPES
    }
    top = lists[None][1]
    nodes = -(-length // 16)
    found = reference.candidates(reference.rows_of_queries(top, case.T_q, stride), 1, nodes, 16, case.t0)
    cos, sin = (part.double() for part in case.make_table(device))
    importance = reference.span_importance(
        q[:, ::stride].double(),
        reference.span_means(k, span),
        found.rows(slice(None, None, stride)),
        16 // span,
        cos,
        sin,
        None,
        case.importance,
    )
    # The last parent of a list is the query's own, which every list holds.
    chosen = {dtype: parents[0][..., :-1].long() for dtype, parents in lists.items()}
    kept = {dtype: importance.gather(-1, some).sum(-1) for dtype, some in chosen.items()}
    lost = 1 - kept["int8"] / kept[None]
    shared = (chosen["int8"][..., None] == chosen[None][..., None, :]).any(-1)
    return LossRow(
        gpu=torch.cuda.get_device_name() if device == "cuda" else "none",
        torch=torch.__version__,
        commit=source_commit(),
        T=length,
        H=heads,
        H_kv=kv_heads,
        K=width,
        top_k=top_k,
        selection_stride=stride,
        selection_span=span,
        score_deviation=deviation,
        lost=float(1 - kept["int8"].sum() / kept[None].sum()),
        most_lost=float(lost.max()),
        changed=float(1 - shared.double().mean()),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = argparse.ArgumentParser(description="time of tree attention by selection_span")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="the shortest text alone, few repetitions")
    parser.add_argument(
        "--loss", action="store_true", help="the importance that int8 loses, in place of times"
    )
    parser.add_argument("--open-next", action="store_true", help="time open_next, in place of spans")
    arguments = parse_for_gpu(parser, argv)
    if arguments.loss:
        losses = [(sizes, x) for *sizes, deviations in LOSSES[arguments.device] for x in deviations]
        some = losses[:1] if arguments.quick else losses
        found = (
            measure_loss(sizes, x, arguments.device)
            for sizes, x in progress(some, lambda setting: f"T={setting[0][0]} deviation {setting[1]}")
        )
        print_rows(found, arguments.csv)
        return 0
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
