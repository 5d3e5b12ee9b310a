"""Shapes and tolerances of the tensor-core path of tree attention, for the tests that run it on a GPU."""

from __future__ import annotations

import torch

from tests.support.compare import assert_close_spec
from tests.support.tree_attention_cases import TreeAttentionCase
from tests.support.tree_attention_checks import assert_output

# Scores from half-precision tensor cores (docs/semantics §1.11); bf16 storage has the wider figure anyway.
TENSOR_CORE_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 8e-3, torch.float32: 1e-4}
# For scores of standard deviation 1; for larger ones in proportion.
TENSOR_CORE_DELTA = {torch.float16: 2e-3, torch.bfloat16: 2e-3, torch.float32: 1e-4}

# q has more than 2^31 elements; four layers. `test_tree_attention_config.py` checks that Hopper's kernels take it.
LARGE = {"T": 2**19 + 4096, "H": 32, "H_kv": 2, "K": 128, "V": 128, "top_k": 32, "M": 512}


def model(name: str, dtype: torch.dtype = torch.bfloat16, **sizes: object) -> TreeAttentionCase:
    defaults: dict[str, object] = {
        "T": 1500,
        "H": 8,
        "H_kv": 2,
        "K": 64,
        "V": 64,
        "r": 16,
        "top_k": 16,
        "M": 128,
    }
    return TreeAttentionCase(name=name, dtype=dtype, **{**defaults, **sizes})  # type: ignore[arg-type]


def assert_fast_output(out: torch.Tensor, expected: torch.Tensor, v: torch.Tensor) -> None:
    """Assert out [B,T_q,H,V] against the float64 reference; fp32 runs general kernels and has the CPU's bound."""
    __tracebackhide__ = True
    if out.dtype == torch.float32:
        assert_output(out, expected, v)
        return
    a = TENSOR_CORE_TOLERANCE[out.dtype]
    assert_close_spec(out, expected, rtol=a, atol=a * float(v.abs().max()), dtype=out.dtype, name="out")


def assert_small_error(got: torch.Tensor, expected: torch.Tensor, name: str, bound: float = 2e-2) -> None:
    """Assert that got is finite and the norm of its error at most `bound` of that of `expected`."""
    __tracebackhide__ = True
    assert got.isfinite().all(), name
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-300)
    assert error < bound, f"{name}: relative norm of the error {error:.2e}"
