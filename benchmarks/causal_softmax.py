"""causal_softmax and its backward against torch.compile, torch.softmax without a mask, and eager PyTorch.

Run: ``python -m benchmarks run causal_softmax --csv PATH``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.baselines import compile_every_case, differentiate
from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.reference import causal_softmax as reference
from tests.support.causal_softmax_cases import (
    BENCHMARK_BACKWARD_CASES,
    BENCHMARK_CASES,
    CausalSoftmaxBackwardCase,
    backward_tolerance,
    masked_softmax,
    tolerance,
    visible_mask,
)
from tests.support.compare import assert_close_spec

Forward = Callable[[torch.Tensor], torch.Tensor]


def check_forward(inputs: tuple[Any, ...], result: torch.Tensor) -> None:
    x = inputs[0]
    rtol, atol = tolerance(x.dtype, x.shape[-1])
    assert_close_spec(result, reference.causal_softmax(x), rtol, atol, dtype=x.dtype)


def check_backward(inputs: tuple[Any, ...], result: torch.Tensor, y_error: float = 0.0) -> None:
    dy, y = inputs
    rtol, atol = backward_tolerance(dy, y, y_error)
    assert_close_spec(result, reference.causal_softmax_backward(dy, y), rtol, atol, dtype=y.dtype)


def backward_formula(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y * (dy - sum(dy * y)) on the visible entries, in fp32 with one rounding to the dtype of y."""
    mask = visible_mask(y.shape[-2], y.shape[-1], y.device)
    dy32, y32 = dy.float().masked_fill(~mask, 0.0), y.float()
    return (y32 * (dy32 - (dy32 * y32).sum(dim=-1, keepdim=True))).to(y.dtype)


def check_autograd(inputs: tuple[Any, ...], result: tuple[torch.Tensor]) -> None:
    """Checks a backward that takes y from its own forward: two roundings of one value may differ by one ulp."""
    check_backward(inputs, result[0], torch.finfo(inputs[1].dtype).eps)


def graph_inputs(forward: Forward) -> Callable[[CausalSoftmaxBackwardCase, str, int], tuple[Any, ...]]:
    """Inputs of a backward through autograd: the softmax, which has run already, dy and the leaf."""

    def make(case: CausalSoftmaxBackwardCase, device: str, seed: int) -> tuple[Any, ...]:
        dy, _ = case.make_inputs(device, seed)
        x = case.make_x(device, seed).requires_grad_()
        return forward(x), dy, x

    return make


def forward_benchmarks(device: str) -> list[Benchmark]:
    compiled = torch.compile(masked_softmax, dynamic=False)
    baselines = (
        Candidate("torch.compile", lambda x, _: compiled(x)),
        Candidate("torch.softmax without mask", lambda x, _: torch.softmax(x, dim=-1), same_function=False),
        Candidate("eager", lambda x, _: masked_softmax(x)),
    )
    ours = Candidate("htree_ops", torch.ops.htree.causal_softmax)
    return [
        Benchmark("causal_softmax", case, ours, baselines, check_forward) for case in BENCHMARK_CASES[device]
    ]


def backward_benchmarks(device: str) -> list[Benchmark]:
    compiled_forward = torch.compile(masked_softmax, dynamic=False)
    compiled_formula = torch.compile(backward_formula, dynamic=False)
    baselines = (
        Candidate(
            "torch.compile",
            differentiate,
            graph_inputs(compiled_forward),
            capturable=False,
            check=check_autograd,
        ),
        Candidate("torch.compile of the formula", compiled_formula),
        Candidate(
            "eager", differentiate, graph_inputs(masked_softmax), capturable=False, check=check_autograd
        ),
    )
    ours = Candidate("htree_ops", torch.ops.htree.causal_softmax_backward)
    return [
        Benchmark("causal_softmax_backward", case, ours, baselines, check_backward)
        for case in BENCHMARK_BACKWARD_CASES[device]
    ]


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the family on ``device`` ("cpu" or "cuda")."""
    compile_every_case()
    return forward_benchmarks(device) + backward_benchmarks(device)
