"""The staged kernels of tree attention against plain PyTorch; their floor is the measured IO-only variant.

Run: ``python -m benchmarks run tree_stages --csv PATH``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.reference import tree_attention as reference
from tests.support import tree_attention_checks as checks
from tests.support.compare import assert_close_spec
from tests.support.tree_stage_cases import BENCHMARK_STAGE_CASES, importance_of_positions

#: Query rows that are compared with the reference, in float64.
CHECKED_ROWS = 16


def check_scores(inputs: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
    q, keys, lists, cos, sin, layer, rate, scale, t0 = inputs
    rows = slice(0, CHECKED_ROWS)
    wide = (q[:, rows].double(), keys.double(), lists[:, rows], cos.double(), sin.double())
    expected, count = reference.compute_scores(*wide, layer, rate, scale, t0)
    # A score is a dot product of K terms of size 1, times K^-1/2, summed in fp32.
    assert_close_spec(result[0][:, rows], expected, rtol=1e-5, atol=2e-5, name="scores")
    assert torch.equal(result[1][:, rows], count)


def check_selection(inputs: tuple[Any, ...], result: Tensor) -> None:
    scores, count, top_k = inputs
    scores, count = scores[:, :CHECKED_ROWS], count[:, :CHECKED_ROWS]
    positions = result[:, :CHECKED_ROWS]
    assert torch.equal(positions[..., 0], count - 1)
    best = importance_of_positions(scores, count, reference.select_topk(scores, count, top_k))
    assert_close_spec(importance_of_positions(scores, count, positions), best, rtol=1e-5, atol=0.0)


def check_state(inputs: tuple[Any, ...], result: tuple[Tensor, Tensor, Tensor]) -> None:
    values, lists, scores, count, layer, rate, t0 = inputs
    rows = slice(0, CHECKED_ROWS)
    wide = (values.double(), lists[:, rows], scores[:, rows].double(), count[:, rows])
    expected = reference.accumulate_non_topk(*wide, layer, rate, t0)
    checks.assert_state((result[0][:, rows], result[1][:, rows], result[2][:, rows]), expected, values)


def check_lists(inputs: tuple[Any, ...], result: Tensor) -> None:
    assert torch.equal(result, reference.compute_next_parents(*inputs))


CHECKS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "compute_scores": (reference.compute_scores, check_scores),
    "select_topk": (reference.select_topk, check_selection),
    "compute_next_parents": (reference.compute_next_parents, check_lists),
    "accumulate_non_topk": (reference.accumulate_non_topk, check_state),
}


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the stages on ``device`` ("cpu" or "cuda")."""
    return [
        Benchmark(
            case.op,
            case,
            Candidate("htree_ops", getattr(torch.ops.htree, case.op)),
            [Candidate("eager", CHECKS[case.op][0], capturable=False)],
            CHECKS[case.op][1],
        )
        for case in BENCHMARK_STAGE_CASES[device]
    ]
