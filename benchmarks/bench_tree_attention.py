"""Tree attention against dense causal attention (PyTorch's SDPA: cuDNN and FlashAttention-2 on a GPU).

Run: ``python -m htree_ops.bench --room tree_attention --json PATH --csv PATH``. Dense attention computes another
function, so it is a yardstick for time and named as such. The gate compares 64 sampled queries with the float64
reference under the selected lists.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from htree_ops.bench.suite import Benchmark, Candidate
from htree_ops.testing.compare import assert_close_spec
from htree_ops.testing.tree_attention_cases import (
    BENCHMARK_BACKWARD_CASES,
    BENCHMARK_CASES,
    TreeAttentionBackwardCase,
)
from htree_ops.testing.tree_attention_checks import TOLERANCE, forced

BACKENDS = {
    "cuda": {
        "dense SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
        "dense SDPA, FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    },
    "cpu": {"dense SDPA": SDPBackend.FLASH_ATTENTION},
}
SAMPLED = 64


def tree(*inputs: Any) -> Tensor:
    return torch.ops.htree.attention(*inputs)


def dense(backend: SDPBackend) -> Any:
    """Dense causal attention of [B, T, H, D] inputs; the tree's options are ignored."""

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def check(inputs: tuple[Any, ...], out: Tensor) -> None:
    """The last SAMPLED rows against the reference, run as queries that are a suffix of the keys."""
    q, k, v, r, top_nodes, top_k, scale, rope_base, importance, stride = inputs
    options = {
        "compression_rate": r,
        "max_top_nodes": top_nodes,
        "top_k_per_layer": top_k,
        "scale": scale,
        "rope_base": rope_base,
        "importance": importance,
        "selection_stride": stride,
    }
    tail = q[:, -SAMPLED:]
    tail_out, _, _, parents = torch.ops.htree.attention_forward(tail, k, v, **options)
    a, b = TOLERANCE[q.dtype]
    expected = forced(tail, k, v, parents, options).out
    assert_close_spec(tail_out, expected, rtol=b, atol=a * float(v.abs().max()), dtype=q.dtype)
    assert_close_spec(out[:, -SAMPLED:], tail_out, rtol=b, atol=a * float(v.abs().max()))


def recorded_dense(backend: SDPBackend) -> Any:
    """Inputs of the dense backward: the output with its graph, the leaves and the upstream gradient."""
    forward = dense(backend)

    def make(case: TreeAttentionBackwardCase, device: str, seed: int) -> tuple[Any, ...]:
        leaves = [x.requires_grad_() for x in case.forward.make_qkv(device, seed)]
        out = forward(*leaves)
        return out, leaves, torch.randn_like(out)

    return make


def differentiate(out: Tensor, leaves: list[Tensor], dout: Tensor) -> Tensor:
    return torch.autograd.grad(out, leaves, dout, retain_graph=True)[0]


def check_backward(inputs: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    """dq of the last SAMPLED rows, taken as a suffix, against float64 under the lists of the forward."""
    dout, q, k, v, _, _, _, parents, r, top_nodes, top_k, scale, rope_base, importance, stride = inputs
    options = {
        "compression_rate": r,
        "max_top_nodes": top_nodes,
        "top_k_per_layer": top_k,
        "scale": scale,
        "rope_base": rope_base,
        "importance": importance,
        "selection_stride": stride,
    }
    tail = [lists[:, -SAMPLED // stride :] for lists in parents]
    leaf = q[:, -SAMPLED:].double().requires_grad_()
    out = forced(leaf, k.double(), v.double(), tail, options).out
    (expected,) = torch.autograd.grad(out, leaf, dout[:, -SAMPLED:].double())
    error = (gradients[0][:, -SAMPLED:].double() - expected).norm() / expected.norm()
    if not error < 2e-2:
        raise AssertionError(f"dq: relative norm of the error {float(error):.2e}")


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the room on ``device`` ("cpu" or "cuda")."""
    forward = [
        Benchmark(
            "tree_attention",
            case,
            Candidate("htree_ops", tree),
            tuple(
                Candidate(name, dense(backend), same_function=False, capturable=False)
                for name, backend in BACKENDS[device].items()
            ),
            check,
        )
        for case in BENCHMARK_CASES[device]
    ]
    backward = [
        Benchmark(
            "tree_attention_backward",
            case,
            Candidate("htree_ops", torch.ops.htree.attention_backward),
            tuple(
                Candidate(name, differentiate, recorded_dense(backend), same_function=False, capturable=False)
                for name, backend in BACKENDS[device].items()
            ),
            check_backward,
        )
        for case in BENCHMARK_BACKWARD_CASES[device]
    ]
    return forward + backward
