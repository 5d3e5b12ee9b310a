"""What the tests of sparse_attention share: calls with gradients, and their comparison with the reference."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from htree_ops.reference import sparse_attention as reference
from tests.support.cases import normal
from tests.support.documents import with_gradients
from tests.support.sparse_attention_cases import SparseCase

OPS = torch.ops.htree
GRADIENTS = ("out", "lse", "dq", "dk", "dv", "dsinks")
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def op(case: SparseCase) -> Callable[..., tuple[Tensor, Tensor]]:
    """The op with the options of the case."""
    return lambda *inputs: OPS.sparse_attention(*inputs, **case.options())


def reference_of(case: SparseCase) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, sinks: Tensor | None) -> Any:
        return reference.sparse_attention(query, key, value, blocks, sinks=sinks, **case.options())

    return call


def widened(inputs: Sequence[Any]) -> list[Any]:
    """The inputs in float64 on the CPU."""
    return [
        x.detach().double().cpu() if isinstance(x, Tensor) and x.is_floating_point() else
        x.cpu() if isinstance(x, Tensor) else x
        for x in inputs
    ]  # fmt: skip


def assert_equal_to_reference(case: SparseCase, device: str, seed: int = 0, of: str = "both") -> None:
    """Values and gradients beside those of the reference in float64 for the same rounded inputs.

    The gradients of out and lse are drawn in the dtype of the results, so they are the same numbers too.
    """
    inputs = case.make_inputs(device, seed)
    found = with_gradients(op(case), inputs, of=of)
    leaves = widened(inputs)
    wanted = reference_gradients(case, leaves, found, of)
    tolerance = TOLERANCES[case.dtype]
    for name, ours, theirs in zip(GRADIENTS, found, wanted, strict=False):
        scale = theirs[theirs.isfinite()].abs().max().item() if theirs.isfinite().any() else 1.0
        atol = tolerance * max(1.0, scale)
        torch.testing.assert_close(
            ours.double().cpu(), theirs, rtol=tolerance, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def reference_gradients(
    case: SparseCase, inputs: Sequence[Any], found: tuple[Tensor, ...], of: str
) -> tuple[Tensor, ...]:
    """(out, lse) and the gradients that follow from the out that was found.

    The backward takes sum(dout out) from the out that the forward rounded. Where that sum cancels its other terms,
    the rounding is the larger: what it adds to the sum enters as a gradient of the lse that counts the sink.
    """
    leaves = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    out, lse = reference_of(case)(*leaves)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    dout, dlse = (
        normal(tuple(x.shape), like.dtype, like.device, 99 + i).double().cpu() * (of in ("both", name))
        for i, (x, like, name) in enumerate(zip((out, lse), found, ("out", "lse"), strict=False))
    )
    sinks = leaves[-1]
    whole = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype))
    rounded = (dout * (found[0].double().cpu() - out.detach())).sum(-1)
    gradients = torch.autograd.grad((out, lse, whole), wanted, (dout, dlse, -rounded), allow_unused=True)
    return (
        out.detach(),
        lse.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, gradients, strict=True)),
    )


def assert_same_bits(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], names: Sequence[str] = GRADIENTS
) -> None:
    for name, x, y in zip(names, ours, theirs, strict=False):
        assert torch.equal(x, y), name


def for_device(case: SparseCase, device: str) -> SparseCase:
    """The case, or one like it that CUDA takes."""
    if device == "cpu":
        return case
    size = 16 * case.block_size if case.block_size < 16 else case.block_size
    dtype = torch.float32 if case.dtype == torch.float64 else case.dtype
    return replace(
        case, block_size=size, dtype=dtype, T=case.T * size // case.block_size, T_q=case.T_q and case.T_q
    )
