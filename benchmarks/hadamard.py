"""hadamard_transform and grouped_hadamard against a product with H, torch.compile of the butterflies, and a copy.

Run: ``python -m benchmarks run hadamard --csv PATH``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from benchmarks.harness.baselines import compile_every_case, copy_compiled_eager
from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.reference import hadamard as reference
from tests.support.compare import assert_close_spec
from tests.support.hadamard_cases import (
    BENCHMARK_CASES,
    BENCHMARK_GROUPED_CASES,
    butterflies,
    grouped_butterflies,
    grouped_tolerance,
    tolerance,
)

#: Longest row that is also multiplied by H. For longer rows the product is far slower.
MAX_PRODUCT = 4096


@lru_cache
def scaled_matrix(n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (reference.hadamard_matrix(n, device) * n**-0.5).to(dtype)


def product(x: torch.Tensor, _: float | None) -> torch.Tensor:
    return x @ scaled_matrix(x.shape[-1], x.dtype, x.device.type)


def check(inputs: tuple[Any, ...], result: torch.Tensor) -> None:
    x, scale = inputs
    rtol, atol = tolerance(x, scale)
    assert_close_spec(result, reference.hadamard_transform(x, scale), rtol, atol, dtype=x.dtype)


def check_product(inputs: tuple[Any, ...], result: torch.Tensor) -> None:
    """The matrix times n^(-1/2) is rounded to the dtype of x, which errs by u times the sum of magnitudes."""
    x, scale = inputs
    rtol, atol = tolerance(x, scale)
    rounded = torch.finfo(x.dtype).eps / 2 * x.double().abs().sum(-1, keepdim=True) * x.shape[-1] ** -0.5
    assert_close_spec(result, reference.hadamard_transform(x, scale), rtol, atol + rounded, dtype=x.dtype)


def check_grouped(inputs: tuple[Any, ...], result: torch.Tensor) -> None:
    x, group, scale = inputs
    rtol, atol = grouped_tolerance(x, group, scale)
    assert_close_spec(result, reference.grouped_hadamard(x, group, scale), rtol, atol, dtype=x.dtype)


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the family on ``device`` ("cpu" or "cuda")."""
    compile_every_case()
    plain, grouped = copy_compiled_eager(butterflies), copy_compiled_eager(grouped_butterflies)
    with_product = (*plain, Candidate("x @ H", product, check=check_product))
    ours = Candidate("htree_ops", torch.ops.htree.hadamard_transform)
    ours_grouped = Candidate("htree_ops", torch.ops.htree.grouped_hadamard)
    return [
        Benchmark(
            "hadamard_transform", case, ours, with_product if case.shape[-1] <= MAX_PRODUCT else plain, check
        )
        for case in BENCHMARK_CASES[device]
    ] + [
        Benchmark("grouped_hadamard", case, ours_grouped, grouped, check_grouped)
        for case in BENCHMARK_GROUPED_CASES[device]
    ]
