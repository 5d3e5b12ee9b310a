"""Tree attention on the CPU against dense causal attention on the same heads.

Run: ``python -m htree_ops.bench --room tree_attention_cpu --device cpu --rounds 3 --json PATH --csv PATH``;
``--case 32768-float32`` and the like pick sizes. Dense attention computes another function: its rows say so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from htree_ops.bench.suite import Benchmark, Candidate
from htree_ops.testing import tree_attention_checks as checks
from htree_ops.testing.tree_attention_cases import BENCHMARK_CASES, TreeAttentionCase

#: Rows whose outputs and gradients are compared with the reference before timing: the last ones, which have the
#: longest lists. The reference of all rows would need hundreds of gigabytes.
CHECKED_ROWS = 64
#: Above this length dense attention's backward takes minutes.
BACKWARD_MAX_T = 32_768


def dense(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Causal attention of all tokens, [B,T,H,V]. It rotates nothing: the rotary embedding is not part of the time."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def check_forward(inputs: tuple[Any, ...], result: Tensor) -> None:
    q, k, v, *options = inputs
    suffix = q[:, -CHECKED_ROWS:]
    parents = torch.ops.htree.attention_forward(suffix, k, v, *options)[3]
    expected = checks.forced(suffix, k, v, parents, keywords(options))
    checks.assert_output(result[:, -CHECKED_ROWS:], expected.out, v)


def keywords(options: list[Any]) -> dict[str, Any]:
    """The positional options of ``attention`` as keywords of the reference."""
    names = (
        "compression_rate",
        "max_top_nodes",
        "top_k_per_layer",
        "scale",
        "rope_base",
        "importance",
        "selection_stride",
    )
    return dict(zip(names, options, strict=True))


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, gmax: Tensor, gsum: Tensor, *rest: Any
) -> Any:
    return torch.ops.htree.attention_backward(dout, q, k, v, out, gmax, gsum, *rest)


def ours_backward_inputs(case: TreeAttentionCase, device: str, seed: int) -> tuple[Any, ...]:
    """Arguments of ``attention_backward`` with the lists kept by the forward pass."""
    q, k, v, *options = case.make_inputs(device, seed)
    out, gmax, gsum, parents = torch.ops.htree.attention_forward(q, k, v, *options)
    return torch.ones_like(out), q, k, v, out, gmax, gsum, parents, *options


def dense_backward_inputs(case: TreeAttentionCase, device: str, seed: int) -> tuple[Any, ...]:
    leaves = [x.requires_grad_() for x in case.make_qkv(device, seed)]
    return dense(*leaves), *leaves


def differentiate(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)


def check_backward(inputs: tuple[Any, ...], result: tuple[Tensor, Tensor, Tensor]) -> None:
    """dq of the last rows; dk and dv through a call on those rows alone, whose gradients the reference has."""
    q, k, v, *options = inputs
    suffix = q[:, -CHECKED_ROWS:]
    out, gmax, gsum, parents = torch.ops.htree.attention_forward(suffix, k, v, *options)
    dout = torch.ones_like(out)
    gradients = torch.ops.htree.attention_backward(dout, suffix, k, v, out, gmax, gsum, parents, *options)
    expected = checks.reference_gradients(suffix, k, v, dout, parents, keywords(options))
    checks.assert_gradients(gradients, expected, dout, suffix, k, v)
    checks.assert_gradients((result[0][:, -CHECKED_ROWS:], None, None), expected, dout, suffix, k, v)


def forward_cases() -> list[TreeAttentionCase]:
    cases = BENCHMARK_CASES["cpu"]
    halves = [
        case.with_dtype(dtype)
        for case in cases
        if case.T <= BACKWARD_MAX_T and case.selection_stride == 1
        for dtype in (torch.float16, torch.bfloat16)
    ]
    return [*cases, *halves]


def make_benchmarks(device: str) -> list[Benchmark]:
    """Forward and backward; none unless ``device`` is "cpu"."""
    if device != "cpu":
        return []
    sdpa = Candidate("dense SDPA", dense, same_function=False)
    forward = [
        Benchmark(
            "attention", case, Candidate("htree_ops", torch.ops.htree.attention), (sdpa,), check_forward
        )
        for case in forward_cases()
    ]
    backward = [
        Benchmark(
            "attention_backward",
            case,
            Candidate("htree_ops", attention_backward, ours_backward_inputs),
            (Candidate("dense SDPA", differentiate, dense_backward_inputs, same_function=False),),
            check_backward,
        )
        for case in BENCHMARK_CASES["cpu"]
        if case.T <= BACKWARD_MAX_T
    ]
    return forward + backward
