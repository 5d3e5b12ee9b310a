"""Baselines that several families have, and what torch.compile needs to be one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.suite import Candidate, Inputs, MakeInputs

#: Dense attention of torch, by the type of the device.
BACKENDS = {
    "cuda": {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION},
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION},
}


def compile_every_case() -> None:
    """Allows one compilation per case: beyond its limit torch.compile would run a baseline eagerly.

    A compiled backward runs often on one graph, so it may not reuse the memory of saved tensors.
    """
    dynamo_config.recompile_limit = max(64, dynamo_config.recompile_limit)
    functorch_config.donated_buffer = False


def graph_inputs(forward: Callable[..., Tensor], num_leaves: int) -> MakeInputs:
    """Inputs of :func:`differentiate` from a case's: dy, and what ``forward`` takes, whose first are the leaves."""

    def make(case: Any, device: str, seed: int) -> Inputs:
        dy, *inputs = case.make_inputs(device, seed)
        leaves = [x.requires_grad_() for x in inputs[:num_leaves]]
        return forward(*leaves, *inputs[num_leaves:]), dy, *leaves

    return make


def differentiate(y: Tensor, dy: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """A backward through autograd; the forward has run."""
    return torch.autograd.grad(y, leaves, dy, retain_graph=True)


def dense_step(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query for each head to all keys, [B, heads, tokens, D]."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def dense_steps(device: str, make_inputs: MakeInputs) -> list[Candidate]:
    """:func:`dense_step` of each backend as a yardstick of decoding."""
    return [
        Candidate(f"dense SDPA, {name}", partial(dense_step, backend), make_inputs, same_function=False)
        for name, backend in BACKENDS[device].items()
    ]


def copy_of(x: Tensor, *_: Any) -> Tensor:
    """A copy of the first input, the least that an op of one tensor moves."""
    return x.clone()


def copy_compiled_eager(function: Callable[..., Any]) -> tuple[Candidate, ...]:
    """A copy as the yardstick, and ``function``, which computes the op, compiled and eager."""
    return (
        Candidate("copy", copy_of, same_function=False),
        Candidate("torch.compile", torch.compile(function, dynamic=False)),
        Candidate("eager", function),
    )
