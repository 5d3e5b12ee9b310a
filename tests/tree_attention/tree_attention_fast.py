"""Shapes and tolerances of the tensor-core path of tree attention, for the tests that run it on a GPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tree_attention_helpers import forward

from tests.support.cases import normal
from tests.support.compare import assert_close_spec
from tests.support.tree_attention_cases import TreeAttentionCase
from tests.support.tree_attention_checks import (
    assert_epsilon_optimal,
    assert_lists,
    assert_output,
    forced,
    reference_gradients,
)

# Scores from half-precision tensor cores (docs/semantics §1.11); bf16 storage has the wider figure anyway.
TENSOR_CORE_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 8e-3, torch.float32: 1e-4}
# For scores of standard deviation 1; for larger ones in proportion.
TENSOR_CORE_DELTA = {torch.float16: 2e-3, torch.bfloat16: 2e-3, torch.float32: 1e-4}

# q has more than 2^31 elements; four layers. `test_tree_attention_config.py` checks that Hopper's kernels take it.
LARGE = {"T": 2**19 + 4096, "H": 32, "H_kv": 2, "K": 128, "V": 128, "top_k": 32, "M": 512}


def model(name: str, dtype: torch.dtype = torch.bfloat16, **sizes: object) -> TreeAttentionCase:
    usual = {"T": 1500, "H": 8, "H_kv": 2, "K": 64, "V": 64, "r": 16, "top_k": 16, "M": 128}
    return TreeAttentionCase(name=name, dtype=dtype, **{**usual, **sizes})


def assert_fast_output(out: torch.Tensor, expected: torch.Tensor, v: torch.Tensor) -> None:
    """Assert out [B,T_q,H,V] against the float64 reference; fp32 runs general kernels and has the CPU's bound."""
    __tracebackhide__ = True
    if out.dtype == torch.float32:
        assert_output(out, expected, v)
        return
    a = TENSOR_CORE_TOLERANCE[out.dtype]
    assert_close_spec(out, expected, rtol=a, atol=a * float(v.abs().max()), dtype=out.dtype, name="out")


def assert_forward(case: TreeAttentionCase, spread: float) -> tuple[Any, ...]:
    """Output, log-sum-exps and lists, each under the op's own selection; stored or not, the same bits.

    Args:
        spread: what the error of scores grows by.

    Returns:
        q, k and v; out, gmax, gsum and the lists.
    """
    __tracebackhide__ = True
    op, options = torch.ops.htree, case.reference_options()
    q, k, v = case.make_qkv("cuda")
    results = out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    assert_lists(parents, case.T_q, case.T, options)
    expected = forced(q, k, v, parents, options)
    assert_fast_output(out, expected.out, v)
    a = TENSOR_CORE_TOLERANCE[case.dtype]
    lse = gmax.double() + gsum.double().log()
    assert_close_spec(lse, expected.lse, rtol=a, atol=a * max(1.0, spread), name="lse")
    assert torch.equal(out, op.attention(q, k, v, **options)), "stored or not, the same bits"
    return (q, k, v), results


def assert_small_error(got: torch.Tensor, expected: torch.Tensor, name: str, bound: float = 2e-2) -> None:
    """Assert that got is finite and the norm of its error at most `bound` of that of `expected`."""
    __tracebackhide__ = True
    assert got.isfinite().all(), name
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-300)
    assert error < bound, f"{name}: relative norm of the error {error:.2e}"


def gradients_of(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> list[Tensor]:
    """dq, dk and dv of a call and its backward."""
    op = torch.ops.htree
    saved = op.attention_forward(q, k, v, **options)
    return op.attention_backward(dout, q, k, v, *saved, **options)


def assert_small_errors(
    inputs: Sequence[Tensor],
    options: Mapping[str, Any],
    make_dout: Callable[[Tensor], Tensor] = torch.randn_like,
    kinds: Sequence[slice] = (slice(None),),
) -> None:
    """Gradients beside those of the reference under the same lists, those of each kind of rows by their own size."""
    __tracebackhide__ = True
    op = torch.ops.htree
    out, gmax, gsum, parents = op.attention_forward(*inputs, **options)
    dout = make_dout(out)
    gradients = op.attention_backward(dout, *inputs, out, gmax, gsum, parents, **options)
    wanted = reference_gradients(*inputs, dout, parents, dict(options))
    for name, gradient, expected in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        for kind in kinds:
            assert_small_error(gradient[:, kind], expected[:, kind], f"{name} of {kind}")


def assert_errors_of_sizes(q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> None:
    """Gradients where powers of two stand before single rows of q, k and dO, in several tiles."""
    k[:, 1::3] *= 2.0**-11
    k[:, 300] *= 2.0**-40
    q[:, 2::5] *= 2.0**-12

    def make_dout(out: Tensor) -> Tensor:
        dout = torch.randn_like(out)
        dout[:, 3::7] *= 2.0**-6
        return dout

    kinds = (slice(None), slice(1, None, 3), slice(2, None, 5), slice(3, None, 7))
    assert_small_errors((q, k, v), options, make_dout, kinds)


def assert_batch_like_alone(case: TreeAttentionCase, *parts: slice) -> None:
    """Sequences of a batch have the gradients that they have alone, bit for bit."""
    __tracebackhide__ = True
    op, options = torch.ops.htree, case.reference_options()
    inputs = case.make_qkv("cuda")
    *results, parents = op.attention_forward(*inputs, **options)
    saved = (torch.randn_like(results[0]), *inputs, *results)
    gradients = op.attention_backward(*saved, parents, **options)
    for part in parts:
        alone = op.attention_backward(*(x[part] for x in saved), [x[part] for x in parents], **options)
        for name, gradient, expected in zip(("dq", "dk", "dv"), gradients, alone, strict=True):
            assert torch.equal(gradient[part], expected), name


def assert_fast_call(case: TreeAttentionCase) -> tuple[Any, ...]:
    """Lists, output, the last rows alone, and gradients under lists that are stored and selected again.

    Returns:
        q, k and v; out, gmax, gsum and the lists; the gradient of out; dq, dk and dv.
    """
    __tracebackhide__ = True
    op, options = torch.ops.htree, case.reference_options()
    q, k, v = case.make_qkv("cuda")
    results = out, gmax, gsum, parents = forward(q, k, v, case)
    assert_lists(parents, case.T_q, case.T, options)
    assert_epsilon_optimal(q, k, v, parents, options, TENSOR_CORE_DELTA[case.dtype])
    assert_fast_output(out, forced(q, k, v, parents, options).out, v)
    few = case.T % 16 + 48
    assert torch.equal(op.attention(q[:, -few:], k, v, **options), out[:, -few:])
    dout = normal(tuple(out.shape), case.dtype, "cuda", 3)
    stored, again = (
        op.attention_backward(dout, q, k, v, out, gmax, gsum, lists, **options) for lists in (parents, [])
    )
    assert all(torch.equal(x, y) for x, y in zip(stored, again, strict=True))
    return (q, k, v), results, dout, stored
