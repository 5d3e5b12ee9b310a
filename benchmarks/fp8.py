"""fp8_quantize, its inverse and the rounding in place against torch.compile of the plain composition, and a copy.

Run: ``python -m benchmarks run fp8 --csv PATH``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from benchmarks.harness.baselines import compile_every_case, copy_compiled_eager
from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.reference import fp8 as reference
from tests.support.fp8_cases import (
    BENCHMARK_CASES,
    FP8Case,
    codes_of,
    eager_dequantize,
    eager_fake_quant,
    eager_quantize,
    round_trip_bound,
)

#: Rows that are compared with the reference, which searches every code in float64.
CHECKED_ROWS = 64


#: torch.compile divides 448 by the maximum with an instruction that is good to two units in the last place of fp32;
#: the ops' own tests demand the rounded quotient.
SCALE_TOLERANCE = 2.0**-22


def check(inputs: tuple[Any, ...], result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Checks all scales and the count, and that some rows have exactly the codes of the returned scales."""
    x, scale, granularity, dim, block = inputs
    q, used, num_overflow = result
    wanted = reference.compute_scale(x, granularity, dim, block) if scale is None else scale
    assert used.shape == wanted.shape, f"scales have shape {tuple(used.shape)}"
    error = float(((used - wanted).abs() / wanted).max())
    assert error <= SCALE_TOLERANCE, f"scales are off by {error:.1e}"
    assert int(num_overflow) == 0, f"{int(num_overflow)} overflows"
    full = reference.expand_scale(used, x.shape, granularity, dim, block)
    rows = slice(0, CHECKED_ROWS)
    codes = reference.encode(x[rows].float() * full[rows])
    wrong = int((codes_of(q[rows]) != codes).sum())
    assert wrong == 0, f"{wrong} codes differ"


def check_values(inputs: tuple[Any, ...], result: torch.Tensor) -> None:
    """Checks in some rows that each value has the nearest code, except at ties (a scale may be off by a unit)."""
    x, scale, granularity, dim, block = inputs
    used = reference.compute_scale(x, granularity, dim, block) if scale is None else scale
    full = reference.expand_scale(used, x.shape, granularity, dim, block)[:CHECKED_ROWS]
    part = x[:CHECKED_ROWS]
    wanted = reference.dequantize(reference.encode(part.float() * full), full)
    values = result[:CHECKED_ROWS].double()
    slack = torch.finfo(result.dtype).eps / 2 + 2 * SCALE_TOLERANCE
    others = (values - wanted).abs() > wanted.abs() * slack
    share = float(others.double().mean())
    assert share <= 1e-3, f"{share:.1%} of the values differ"
    bound = round_trip_bound(part, 448.0 / full.double()) * (1 + slack)
    assert bool(((values - part.double()).abs() <= bound)[others].all()), "a value is not the nearest one"


@dataclass(frozen=True, kw_only=True)
class DequantizeCase(FP8Case):
    """Codes and scales of an FP8Case, to be turned back into its dtype."""

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> Any:
        """(q, scale, dtype, block) of ``torch.ops.htree.fp8_dequantize``."""
        q, scale, _ = torch.ops.htree.fp8_quantize(*super().make_inputs(device, seed))
        return q, scale, self.dtype, self.block

    def bytes(self) -> int:
        """Codes read, values written."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * (1 + self.dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class FakeQuantCase(FP8Case):
    """An FP8Case whose values are written back in its dtype."""

    def bytes(self) -> int:
        """As for codes, but values of the dtype are written in their place."""
        numel = 1
        for size in self.shape:
            numel *= size
        return super().bytes() + numel * (self.dtype.itemsize - 1)


def check_dequantized(inputs: tuple[Any, ...], result: torch.Tensor) -> None:
    """Checks some rows against the plain composition, up to one rounding of the dtype and one of fp32."""
    q, scale, dtype, block = inputs
    full = scale.repeat_interleave(block, -1) if scale.shape[-1:] not in ((), (1,), q.shape[-1:]) else scale
    full = full.expand(q.shape)[:CHECKED_ROWS]
    wanted = q[:CHECKED_ROWS].double() / full.double()
    error = (result[:CHECKED_ROWS].double() - wanted).abs()
    assert bool((error <= wanted.abs() * (torch.finfo(dtype).eps / 2 + 2.0**-22)).all())


def as_kind(case: FP8Case, kind: type[FP8Case]) -> FP8Case:
    return kind(**{field.name: getattr(case, field.name) for field in fields(case)})


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of quantisation on ``device`` ("cpu" or "cuda")."""
    compile_every_case()
    cases = BENCHMARK_CASES[device]
    quantize = Candidate("htree_ops", torch.ops.htree.fp8_quantize)
    dequantize = Candidate("htree_ops", torch.ops.htree.fp8_dequantize)
    fake = Candidate("htree_ops", torch.ops.htree.fp8_fake_quant)
    some = [case for case in cases if case.granularity in ("tensor", "channel") and case.dim == -1]
    baselines = copy_compiled_eager(eager_quantize)
    backwards, rounded = copy_compiled_eager(eager_dequantize), copy_compiled_eager(eager_fake_quant)
    return [
        *(Benchmark("fp8_quantize", case, quantize, baselines, check) for case in cases),
        *(
            Benchmark(
                "fp8_dequantize", as_kind(case, DequantizeCase), dequantize, backwards, check_dequantized
            )
            for case in some
        ),
        *(
            Benchmark("fp8_fake_quant", as_kind(case, FakeQuantCase), fake, rounded, check_values)
            for case in some
        ),
    ]
