"""Small inputs and comparisons shared by the tests of tree attention's compile and autograd behaviour."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import normal
from tests.support.tree_attention_cases import SHAPES

OPS = torch.ops.htree
OPTIONS: dict[str, Any] = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}
NAMES = (
    "batch",
    "fused_projection",
    "copied_last_stride",
    "stride4_suffix",
    "empty_sequence",
    "empty_batch",
    "no_query",
    "one_layer_full",
)
CASES = {case.name: case for case in SHAPES if case.name in NAMES}


def qkv(device: str, T: int = 40, B: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    shapes = ((B, T, 4, 8), (B, T, 2, 8), (B, T, 2, 6))
    return tuple(normal(shape, dtype, device, seed).requires_grad_() for seed, shape in enumerate(shapes))


def gradients(model: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = model(*leaves)
    weight = torch.linspace(0.5, 1.5, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    return (out, *torch.autograd.grad((out * weight).sum(), leaves))


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], **tolerance: float) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
