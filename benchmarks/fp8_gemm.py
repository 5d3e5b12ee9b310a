"""fp8_gemm against cuBLASLt through ``torch._scaled_mm``, with and without fast accumulation, and a bf16 product.

Run: ``python -m benchmarks run fp8_gemm --csv PATH``. cuBLASLt multiplies by reciprocal scales;
they are computed beforehand, while ``fp8_gemm`` gets the scales as they are. Fast accumulation leaves sums in the
tensor cores throughout, with errors that grow with K: it counts as another function and stands beside the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.suite import Benchmark, Candidate
from tests.support.fp8_gemm_cases import (
    BENCHMARK_CASES,
    FP8GemmCase,
    assert_product,
    sum_error,
)

#: Rows and columns of the result that are compared: the fp64 reference of the whole would take minutes.
NUM_CHECKED = 96


def spread(size: int, device: torch.device) -> Tensor:
    return torch.linspace(0, size - 1, min(NUM_CHECKED, size), device=device).long()


def chosen(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a matrix of codes, which torch cannot index in their own dtype."""
    return x.view(torch.uint8)[rows].view(x.dtype)


def check(inputs: tuple[Any, ...], result: Tensor) -> None:
    """Checks some rows and columns against the fp64 product."""
    a, b, a_scale, b_scale, dtype = inputs
    rows, columns = spread(a.shape[0], a.device), spread(b.shape[1], a.device)
    part = (
        chosen(a, rows),
        chosen(b.t(), columns).t(),
        a_scale if a_scale.dim() == 0 else a_scale[rows],
        b_scale if b_scale.dim() == 0 else b_scale[:, columns],
        dtype,
    )
    assert_product(result[rows][:, columns].contiguous(), part, sum_error(a.device.type))


def scaled_mm_inputs(case: FP8GemmCase, device: str, seed: int) -> tuple[Any, ...]:
    a, b, a_scale, b_scale, dtype = case.make_inputs(device, seed)
    return a, b, 1 / a_scale, 1 / b_scale, dtype


def scaled_mm(
    a: Tensor, b: Tensor, a_factor: Tensor, b_factor: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return torch._scaled_mm(a, b, a_factor, b_factor, out_dtype=dtype, use_fast_accum=fast)


def half_inputs(case: FP8GemmCase, device: str, seed: int) -> tuple[Any, ...]:
    a, b, *_ = case.make_inputs(device, seed)
    return a.to(torch.bfloat16), b.to(torch.bfloat16)


def eager(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return ((a.float() @ b.float()) / (a_scale * b_scale)).to(dtype)


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the FP8 product on ``device`` ("cpu" or "cuda")."""
    ours = Candidate("htree_ops", torch.ops.htree.fp8_gemm)
    if device == "cpu":
        baselines = [Candidate("eager", eager)]
    else:
        baselines = [
            Candidate("torch._scaled_mm", partial(scaled_mm, fast=False), scaled_mm_inputs),
            Candidate(
                "torch._scaled_mm, fast accumulation",
                partial(scaled_mm, fast=True),
                scaled_mm_inputs,
                same_function=False,
            ),
            Candidate("bf16 product", torch.mm, half_inputs, same_function=False),
        ]
    return [Benchmark("fp8_gemm", case, ours, baselines, check) for case in BENCHMARK_CASES[device]]
