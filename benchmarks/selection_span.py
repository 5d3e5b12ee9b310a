"""Time of tree attention that selects by span means, as a multiple of the same call without a span.

Run: ``python -m benchmarks.selection_span --csv PATH`` on a GPU with 40 GB; ``--quick`` for a look, without the
sequence of 10^6 tokens. B = 1, H = 32, H_kv = 4, K = V = 128, k = 512, M = 8192, bf16, random normal inputs; ``--device
cpu`` takes smaller ones. All spans of a length and stride are timed in turns in one process, then one by one under load
("sustained"). ``--open-next`` times each of the first settings with and without ``open_next``. Figures are reported,
never asserted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

import htree_ops  # noqa: F401 - registers the ops
from benchmarks.harness import timing
from benchmarks.harness.calls import medians_ms, peak_of, sustained_ms
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
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


def times_of(
    case: TreeAttentionCase, ways: Sequence[dict[str, Any]], device: str, effort: timing.Effort
) -> list[tuple[functools.partial[object], float, float]]:
    """For each way to call ``attention`` the call, its median in ms, and that under load; all are timed in turns."""
    inputs = (*case.make_qkv(device), *case.op_options())
    calls = [
        functools.partial(torch.ops.htree.attention, *inputs, store_parents=False, **way) for way in ways
    ]
    candidates = {str(i): [call] for i, call in enumerate(calls)}
    medians = medians_ms(candidates, device, effort)
    sustained = sustained_ms(candidates, medians, device, effort)
    return [(call, medians[name], sustained[name]) for name, (call,) in candidates.items()]


def measure(length: int, stride: int, spans: Sequence[int], device: str, effort: timing.Effort) -> list[Row]:
    """A row for None and one for every span; ``multiple`` is the sustained time by that of the span None.

    ``score_tflop`` are the products of queries with span means of the top layer: half of T/s leaders times T/c means.
    """
    case = TreeAttentionCase(name="span", T=length, r=16, selection_stride=stride, **SIZES[device])
    ways = [None, *spans]
    timed = times_of(case, [{"selection_span": span} for span in ways], device, effort)
    plain_ms = timed[0][2]
    return [
        {
            **where(device),
            "T": length,
            "selection_stride": stride,
            "selection_span": span,
            "median_ms": median_ms,
            "sustained_ms": sustained_ms,
            "multiple": sustained_ms / plain_ms,
            "peak_bytes": peak_of(call)[1] if device == "cuda" else None,
            "score_tflop": 0.0
            if span is None
            else length / stride * case.H * (length / span) * case.K / 1e12,
        }
        for span, (call, median_ms, sustained_ms) in zip(ways, timed, strict=True)
    ]


def measure_next(
    length: int, stride: int, spans: Sequence[int], device: str, effort: timing.Effort
) -> list[Row]:
    """A row for None and for the last of the spans, both under load; ``multiple`` is with ``open_next`` by without."""
    case = TreeAttentionCase(name="next", T=length, r=16, selection_stride=stride, **SIZES[device])
    rows = []
    for span in (None, spans[-1]):
        ways = [{"selection_span": span, "open_next": open_next} for open_next in (False, True)]
        plain_ms, open_next_ms = (sustained for _, _, sustained in times_of(case, ways, device, effort))
        rows.append(
            {
                **where(device),
                "T": length,
                "selection_stride": stride,
                "selection_span": span,
                "plain_ms": plain_ms,
                "open_next_ms": open_next_ms,
                "multiple": open_next_ms / plain_ms,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "time of tree attention by selection_span",
        quick="the shortest sequence alone, few repetitions",
        cpu=True,
    )
    parser.add_argument("--open-next", action="store_true", help="time open_next, in place of spans")
    arguments = parse_for_gpu(parser, argv)
    settings = SETTINGS[arguments.device]
    if arguments.quick or arguments.open_next:
        settings = tuple(setting for setting in settings if setting[0] == settings[0][0])

    def rows_of(setting: tuple[int, int, tuple[int, ...], int]) -> list[Row]:
        length, stride, spans, rounds = setting
        effort = timing.QUICK if arguments.quick else timing.Effort(rounds=rounds)
        return (measure_next if arguments.open_next else measure)(
            length, stride, spans, arguments.device, effort
        )

    return measure_each(settings, lambda x: f"T={x[0]} stride {x[1]}", rows_of, arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
