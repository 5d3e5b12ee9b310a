"""gated_mlp and its backward against cuBLAS with merged weights, two products, torch.compile and Liger.

Run: ``python -m benchmarks run gated_mlp --csv PATH``. Liger is timed where it is installed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.baselines import compile_every_case, differentiate, graph_inputs
from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.reference import gated_mlp as reference
from tests.support.compare import assert_close_spec
from tests.support.gated_mlp_cases import (
    BENCHMARK_BACKWARD_CASES,
    BENCHMARK_CASES,
    GatedMLPBackwardCase,
    GatedMLPCase,
    assert_forward,
    assert_gradients,
)

#: Rows and columns of the result that are compared: the fp64 reference of the whole would take minutes.
NUM_CHECKED = 48


def spread(size: int, device: torch.device) -> Tensor:
    return torch.linspace(0, size - 1, min(NUM_CHECKED, size), device=device).long()


def activated(z: Tensor, activation: str) -> Tensor:
    return torch.nn.functional.silu(z) if activation == "silu" else torch.nn.functional.gelu(z)


def composition(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str, act_on: str) -> Tensor:
    """What one writes without this package: two products, an activation, and the product of both."""
    g, u = x @ gate_weight.mT, x @ up_weight.mT
    return g * activated(u, activation) if act_on == "up" else activated(g, activation) * u


def merged(x: Tensor, weights: Tensor, activation: str, act_on: str) -> Tensor:
    """One matrix product, with both weights in one matrix [2 I, Hd]."""
    g, u = (x @ weights.mT).chunk(2, dim=-1)
    return g * activated(u, activation) if act_on == "up" else activated(g, activation) * u


def merged_inputs(case: GatedMLPCase, device: str, seed: int) -> tuple[Any, ...]:
    x, gate_weight, up_weight, *options = case.make_inputs(device, seed)
    return x, torch.cat((gate_weight, up_weight)), *options


def liger(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str, act_on: str) -> Tensor:
    """Two products, then Liger's kernel, which applies silu to its first argument."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    g, u = x @ gate_weight.mT, x @ up_weight.mT
    return LigerSiLUMulFunction.apply(u, g) if act_on == "up" else LigerSiLUMulFunction.apply(g, u)


def check_forward(inputs: tuple[Any, ...], result: Tensor) -> None:
    x, gate_weight, up_weight, *options = inputs
    rows, columns = spread(x.shape[0], x.device), spread(gate_weight.shape[0], x.device)
    part = (x[rows], gate_weight[columns], up_weight[columns], *options)
    assert_forward(result[rows][:, columns], part)


def check_rounded(inputs: tuple[Any, ...], result: Tensor) -> None:
    """Checks a baseline that rounds g and u, the activation of u, and the result."""
    x, gate_weight, up_weight, *options = inputs
    rows, columns = spread(x.shape[0], x.device), spread(gate_weight.shape[0], x.device)
    expected = reference.gated_mlp(x[rows], gate_weight[columns], up_weight[columns], *options)
    unit = torch.finfo(x.dtype).eps / 2
    scale = float(expected.abs().amax())
    assert_close_spec(
        result[rows][:, columns], expected, 8 * unit, 8 * unit * max(scale, 1e-6), dtype=x.dtype
    )


def check_backward(inputs: tuple[Any, ...], result: tuple[Tensor, Tensor, Tensor]) -> None:
    """Checks some rows of dx and of the weights' gradients; the latter are sums over all rows of x."""
    dy, x, gate_weight, up_weight, *options = inputs
    rows, columns = spread(x.shape[0], x.device), spread(gate_weight.shape[0], x.device)
    some = (x[rows], gate_weight, up_weight, *options)
    assert_gradients((result[0][rows], None, None), dy[rows], some)
    part = (x, gate_weight[columns], up_weight[columns], *options)
    assert_gradients((None, result[1][columns], result[2][columns]), dy[:, columns], part)


def check_backward_rounded(inputs: tuple[Any, ...], result: tuple[Tensor, ...]) -> None:
    """Checks a baseline that rounds every intermediate: its gradients are compared in norm."""
    dy, x, gate_weight, up_weight, *options = inputs
    rows = spread(x.shape[0], x.device)
    expected = reference.gated_mlp_backward(dy[rows], x[rows], gate_weight, up_weight, *options)[0]
    error = (result[0][rows].double() - expected).norm() / expected.norm()
    assert error < 8 * torch.finfo(x.dtype).eps, f"relative norm of the error of dx: {error}"


def merged_graph_inputs(case: GatedMLPBackwardCase, device: str, seed: int) -> tuple[Any, ...]:
    """:func:`graph_inputs` of :func:`merged`, with both weights as one leaf [2 I, Hd]."""
    dy, x, gate_weight, up_weight, *options = case.make_inputs(device, seed)
    leaves = x.requires_grad_(), torch.cat((gate_weight, up_weight)).requires_grad_()
    return merged(*leaves, *options), dy, *leaves


def liger_graph_inputs(case: GatedMLPBackwardCase, device: str, seed: int) -> tuple[Any, ...]:
    """g and u as the kernel of :func:`liger` saved them, copies of both, and what :func:`differentiate` takes."""
    inputs = graph_inputs(liger, 3)(case, device, seed)
    saved = inputs[0].grad_fn.saved_tensors
    return saved, tuple(t.clone() for t in saved), *inputs


def differentiate_liger(
    saved: tuple[Tensor, ...], kept: tuple[Tensor, ...], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Restores g and u, over which the backward of the last call wrote its gradients, and differentiates."""
    for target, source in zip(saved, kept, strict=True):
        target.data.copy_(source)  # hidden from autograd, whose check of versions would refuse the graph
    return differentiate(*inputs)


def forward_benchmarks(device: str) -> list[Benchmark]:
    compiled = torch.compile(composition, dynamic=False)
    baselines = [
        Candidate("merged product, then activation", merged, merged_inputs, check=check_rounded),
        Candidate("torch.compile", compiled, check=check_rounded),
        Candidate("eager", composition, check=check_rounded),
    ]
    with_liger = list(baselines)
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        with_liger.append(Candidate("products, then Liger", torch.no_grad()(liger), check=check_rounded))
    ours = Candidate("htree_ops", torch.ops.htree.gated_mlp)
    return [
        Benchmark(
            "gated_mlp", case, ours, with_liger if case.activation == "silu" else baselines, check_forward
        )
        for case in BENCHMARK_CASES[device]
    ]


def backward_benchmarks(device: str) -> list[Benchmark]:
    """Both sides go through autograd, so the forward has kept the products."""
    compiled = torch.compile(composition, dynamic=False)
    ours = Candidate("htree_ops", differentiate, graph_inputs(torch.ops.htree.gated_mlp, 3), capturable=False)
    makers = {
        "torch.compile": graph_inputs(compiled, 3),
        "eager": graph_inputs(composition, 3),
        "merged product, eager": merged_graph_inputs,
    }
    baselines = [
        Candidate(name, differentiate, make, capturable=False, check=check_backward_rounded)
        for name, make in makers.items()
    ]
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        baselines.append(
            Candidate(
                "products, then Liger (g and u restored before each call)",
                differentiate_liger,
                liger_graph_inputs,
                capturable=False,
                check=check_backward_rounded,
            )
        )
    return [
        Benchmark("gated_mlp_backward", case, ours, baselines, check_backward)
        for case in BENCHMARK_BACKWARD_CASES[device]
    ]


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the family on ``device`` ("cpu" or "cuda")."""
    compile_every_case()
    return forward_benchmarks(device) + backward_benchmarks(device)
