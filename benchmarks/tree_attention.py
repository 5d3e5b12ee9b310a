"""Tree attention against dense causal attention on the same heads (SDPA: cuDNN and FlashAttention-2 on a GPU).

Run: ``python -m benchmarks run tree_attention --csv PATH``; ``--device cpu --rounds 3`` on a CPU.
Dense attention computes another function, so its rows say so. It rotates nothing: RoPE is not part of its time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.baselines import BACKENDS, differentiate
from benchmarks.harness.suite import Benchmark, Candidate
from tests.support import tree_attention_checks as checks
from tests.support.tree_attention_cases import (
    BENCHMARK_BACKWARD_CASES,
    BENCHMARK_CASES,
    TreeAttentionBackwardCase,
    TreeAttentionCase,
)

#: Beyond this length FlashAttention-2 is left out: it takes 1.7 times cuDNN's time at every length, here minutes.
FLASH_UP_TO = 65_536
#: Beyond this length dense attention runs on one head only, and its name says so: all 32 take 4.7 seconds a call at
#: 524288 tokens and 19 at 1048576.
ALL_HEADS_UP_TO = 262_144
#: Rows that are compared with the reference before timing: the last ones, which have the longest lists. The reference
#: of all rows would need hundreds of gigabytes.
CHECKED_ROWS = 64
OPTIONS = (
    "compression_rate",
    "max_top_nodes",
    "top_k_per_layer",
    "scale",
    "rope_base",
    "importance",
    "selection_stride",
)


class Dense:
    """Dense causal attention [B,T,H,V] by one backend; ignores the tree's options.

    With ``num_heads`` it computes only the first query heads, on the first key head.
    """

    def __init__(self, backend: SDPBackend, num_heads: int | None = None) -> None:
        self.backend = backend
        self.num_heads = num_heads

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        if self.num_heads is not None:
            q, k, v = q[:, :, : self.num_heads], k[:, :, :1], v[:, :, :1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def recorded(self, case: TreeAttentionBackwardCase, device: str, seed: int) -> tuple[Any, ...]:
        """Inputs of the backward: the output with its graph, the upstream gradient, the leaves.

        On a CPU the K and V heads are repeated first: with enable_gqa and gradients torch would build the [T,T] matrix.
        """
        leaves = [x.requires_grad_() for x in case.forward.make_qkv(device, seed)]
        q, k, v = leaves
        if device == "cpu":
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        out = self(q, k, v)
        return out, torch.randn_like(out), *leaves


def check_forward(span: int | None, inputs: tuple[Any, ...], result: Tensor) -> None:
    q, k, v, *options = inputs
    suffix = q[:, -CHECKED_ROWS:]
    parents = torch.ops.htree.attention_forward(suffix, k, v, *options, selection_span=span)[3]
    expected = checks.forced(suffix, k, v, parents, dict(zip(OPTIONS, options, strict=True)))
    checks.assert_output(result[:, -CHECKED_ROWS:], expected.out, v)


def check_backward(span: int | None, inputs: tuple[Any, ...], result: tuple[Tensor, Tensor, Tensor]) -> None:
    """Checks dq of the last rows, and dk and dv by a call on those rows alone, for which there is a reference."""
    dout, q, k, v, _, _, _, _, *options = inputs
    suffix, dout = q[:, -CHECKED_ROWS:], dout[:, -CHECKED_ROWS:]
    out, gmax, gsum, parents = torch.ops.htree.attention_forward(suffix, k, v, *options, selection_span=span)
    gradients = torch.ops.htree.attention_backward(
        dout, suffix, k, v, out, gmax, gsum, parents, *options, selection_span=span
    )
    keywords = dict(zip(OPTIONS, options, strict=True))
    expected = checks.reference_gradients(suffix, k, v, dout, parents, keywords)
    checks.assert_gradients(gradients, expected, dout, suffix, k, v)
    checks.assert_gradients((result[0][:, -CHECKED_ROWS:], None, None), expected, dout, suffix, k, v)


def forward_cases(device: str) -> list[TreeAttentionCase]:
    """The cases of the family; on a CPU also the half types at the first size, which should cost at most twice fp32."""
    cases = BENCHMARK_CASES[device]
    if device != "cpu":
        return cases
    return [*cases, *(cases[0].with_dtype(dtype) for dtype in (torch.float16, torch.bfloat16))]


def dense_for(case: TreeAttentionCase, device: str) -> dict[str, Dense]:
    """Dense attention by every backend that is quick enough for the length."""
    if case.T > ALL_HEADS_UP_TO:
        return {f"dense SDPA, cuDNN, 1 of {case.H} heads": Dense(SDPBackend.CUDNN_ATTENTION, 1)}
    return {
        f"dense SDPA, {name}": Dense(backend)
        for name, backend in BACKENDS[device].items()
        if case.T <= FLASH_UP_TO or "Flash" not in name
    }


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the family on ``device`` ("cpu" or "cuda")."""
    forward = [
        Benchmark(
            "tree_attention",
            case,
            Candidate(
                "htree_ops",
                partial(torch.ops.htree.attention, selection_span=case.selection_span),
                capturable=False,
            ),
            [
                Candidate(name, run, same_function=False, capturable=False)
                for name, run in dense_for(case, device).items()
            ],
            partial(check_forward, case.selection_span),
        )
        for case in forward_cases(device)
    ]
    backward = [
        Benchmark(
            "tree_attention_backward",
            case,
            Candidate(
                "htree_ops",
                partial(torch.ops.htree.attention_backward, selection_span=case.forward.selection_span),
                capturable=False,
            ),
            [
                Candidate(name, differentiate, run.recorded, same_function=False, capturable=False)
                for name, run in dense_for(case.forward, device).items()
            ],
            partial(check_backward, case.forward.selection_span),
        )
        for case in BENCHMARK_BACKWARD_CASES[device]
    ]
    return forward + backward
