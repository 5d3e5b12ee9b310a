"""rmsnorm_rope, head_rmsnorm_rope and their backward against torch.compile, eager PyTorch and Liger's two kernels.

Run: ``python -m benchmarks run rmsnorm_rope --csv PATH``. Liger is timed where it is installed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.baselines import compile_every_case, differentiate, graph_inputs
from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.reference import rmsnorm_rope as reference
from tests.support.compare import assert_close_spec
from tests.support.rmsnorm_rope_cases import (
    BENCHMARK_BACKWARD_CASES,
    BENCHMARK_CASES,
    RMSNormRoPECase,
    assert_forward,
    assert_gradients,
)

# What sums in another order than ours may add to the error, relative to the magnitudes of their terms.
OTHER_ORDER = 2.0**-16


def composition(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, num_heads: int | None = None
) -> Tensor:
    """What one writes without this package, in fp32 with one final rounding."""
    n = x.float()
    n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps) * weight.float()
    heads = n if x.dim() == 4 else n.unflatten(-1, (-1, cos.shape[-1]))
    low, high = heads.chunk(2, dim=-1)
    rotated = torch.cat((-high, low), dim=-1)
    y = heads * cos.float()[:, None] + rotated * sin.float()[:, None]
    return y.to(x.dtype).view(x.shape)


def backward_composition(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, num_heads: int | None = None
) -> tuple[Tensor, Tensor]:
    """The formulas of dx and dweight in fp32."""
    heads = (dy if x.dim() == 4 else dy.unflatten(-1, (-1, cos.shape[-1]))).float()
    low, high = (heads * sin.float()[:, None]).chunk(2, dim=-1)
    dn = (heads * cos.float()[:, None] + torch.cat((high, -low), dim=-1)).view(x.shape)
    wide, scaled = x.float(), dn * weight.float()
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    dot = (scaled * wide).sum(-1, keepdim=True)
    dx = (r * scaled - wide * (r**3 * dot / x.shape[-1])).to(x.dtype)
    return dx, (dn * wide * r).flatten(0, -2).sum(0).to(weight.dtype)


def liger(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, num_heads: int | None = None
) -> Tensor:
    """Liger's RMSNorm, then its RoPE, which needs a k beside q: it gets one head of zeros."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    n = LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)
    q = (n if x.dim() == 4 else n.unflatten(-1, (-1, cos.shape[-1]))).transpose(1, 2)
    k = q.new_zeros(q.shape[0], 1, q.shape[2], q.shape[3])
    y, _ = LigerRopeFunction.apply(q, k, cos[None], sin[None])
    return y.transpose(1, 2).reshape(x.shape)


def check_forward(inputs: tuple[Any, ...], result: Tensor) -> None:
    assert_forward(result, inputs)


def check_rounded(inputs: tuple[Any, ...], result: Tensor) -> None:
    """Checks a baseline that rounds the normalised row before it rotates it."""
    x, weight = inputs[:2]
    op = reference.head_rmsnorm_rope if x.dim() == 4 else reference.rmsnorm_rope
    n = reference.normalised(x, weight, inputs[4]).abs()
    unit = torch.finfo(x.dtype).eps
    assert_close_spec(result, op(*inputs), 2 * unit, 2 * unit * float(n.amax()), dtype=x.dtype)


def check_backward(inputs: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
    assert_gradients(result, inputs)


def check_other_order(inputs: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
    assert_gradients(result, inputs, OTHER_ORDER)


def op_of(case: RMSNormRoPECase, backward: bool = False) -> tuple[str, Any]:
    name = ("head_" if case.per_head else "") + "rmsnorm_rope" + ("_backward" if backward else "")
    return name, getattr(torch.ops.htree, name)


def forward_benchmarks(device: str) -> list[Benchmark]:
    compiled = torch.compile(composition, dynamic=False)
    baselines = [Candidate("torch.compile", compiled), Candidate("eager", composition)]
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        baselines.append(Candidate("Liger norm, then rope", torch.no_grad()(liger), check=check_rounded))
    return [
        Benchmark(op_of(case)[0], case, Candidate("htree_ops", op_of(case)[1]), baselines, check_forward)
        for case in BENCHMARK_CASES[device]
    ]


def backward_benchmarks(device: str) -> list[Benchmark]:
    compiled_forward = torch.compile(composition, dynamic=False)
    compiled_formula = torch.compile(backward_composition, dynamic=False)
    baselines = (
        Candidate(
            "torch.compile",
            differentiate,
            graph_inputs(compiled_forward, 2),
            capturable=False,
            check=check_other_order,
        ),
        Candidate("torch.compile of the formula", compiled_formula, check=check_other_order),
        Candidate(
            "eager", differentiate, graph_inputs(composition, 2), capturable=False, check=check_other_order
        ),
    )
    return [
        Benchmark(
            op_of(case.forward, True)[0],
            case,
            Candidate("htree_ops", op_of(case.forward, True)[1]),
            baselines,
            check_backward,
        )
        for case in BENCHMARK_BACKWARD_CASES[device]
    ]


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the family on ``device`` ("cpu" or "cuda")."""
    compile_every_case()
    return forward_benchmarks(device) + backward_benchmarks(device)
