"""What the sums of FP8 products cost and lose: ``fp8_gemm``, ``fp8_gemm_exact`` and both accumulations of cuBLASLt.

Run: ``python -m benchmarks.fp8_gemm_error --csv PATH`` on a GPU with FP8 tensor cores. The reference is the float64
product of the codes. ``gamma`` is the largest error of an fp32 result beyond its own rounding, relative to the sum of
magnitudes Σ|a·b| of its element: property 4 (docs/semantics §3.5) allows 2^-20. Times are of a bf16 result. Figures
are reported, never asserted.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import htree_ops  # noqa: F401 - registers the ops
from benchmarks.harness import timing
from benchmarks.harness.calls import medians_ms, replayed_us
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu

FP8 = torch.float8_e4m3fn
Product = Callable[[Tensor, Tensor, torch.dtype], Tensor]
#: Rows and columns of the products whose errors are measured.
SIZE = 512


@functools.cache
def one() -> Tensor:
    """The scale 1, made once."""
    return torch.ones((), device="cuda")


def forced(config: list[int]) -> Product:
    """Our product with a tuple of the tuning space; its third value is the number of terms between promotions."""
    return lambda a, b, dtype: torch.ops.htree.fp8_gemm(a, b, one(), one(), dtype, config)


def library(fast: bool) -> Product:
    return lambda a, b, dtype: torch._scaled_mm(a, b, one(), one(), out_dtype=dtype, use_fast_accum=fast)


METHODS: dict[str, Product] = {
    "fp8_gemm": lambda a, b, dtype: torch.ops.htree.fp8_gemm(a, b, one(), one(), dtype),
    "fp8_gemm, promotion every 64": forced([128, 128, 64, 8, 8, 5]),
    "fp8_gemm_exact": lambda a, b, dtype: torch.ops.htree.fp8_gemm_exact(a, b, one(), one(), dtype),
    "torch._scaled_mm": library(fast=False),
    "torch._scaled_mm, no promotion (fast accumulation)": library(fast=True),
}


def make_codes(kind: str, rows: int, k: int, seed: int) -> Tensor:
    """Codes [rows, k] of standard normal values times 16, or of values of one sign, uniform in [0, 448]."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "normal":
        values = torch.randn(rows, k, device="cuda", generator=generator) * 16
    else:
        values = torch.rand(rows, k, device="cuda", generator=generator) * 448
    return values.clamp(-448, 448).to(FP8)


def log2(x: float) -> float:
    """The logarithm of an error; -inf for 0."""
    return math.log2(x) if x > 0 else -math.inf


def measure(kind: str, k: int, method: str, times: dict[str, tuple[float, float]]) -> Row:
    """Measures the errors of one product [SIZE, k] by [k, SIZE].

    ``gamma_log2`` is the logarithm of the largest error relative to the sum of magnitudes, ``mean_log2`` that of the
    mean error, ``bias`` the mean of the signed errors times the sign of the result, both relative to the same sum.
    ``relative_norm`` is the error of the whole matrix in the Frobenius norm. Times in microseconds are of m = n = k,
    0 for other k.
    """
    a, b = make_codes(kind, SIZE, k, 1), make_codes(kind, SIZE, k, 2).t()
    result = METHODS[method](a, b, torch.float32).double()
    exact = a.double() @ b.double()
    magnitudes = a.double().abs() @ b.double().abs()
    error = result - exact
    excess = (error.abs() - 2.0**-24 * exact.abs()).clamp_min(0) / magnitudes
    event_us, graph_us = times.get(method, (0.0, 0.0))
    return {
        "codes": kind,
        "k": k,
        "method": method,
        "gamma_log2": log2(float(excess.max())),
        "mean_log2": log2(float((error.abs() / magnitudes).mean())),
        "bias": float((error * exact.sign() / magnitudes).mean()),
        "relative_norm": float(error.norm() / exact.norm()),
        "event_us": event_us,
        "graph_us": graph_us,
    }


def time_methods(size: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each method at m = n = k = ``size``, by events and by graph replay; methods alternate."""
    sets = timing.num_input_sets(4 * size * size)
    operands = [
        (make_codes("normal", size, size, 2 * i), make_codes("normal", size, size, 2 * i + 1).t())
        for i in range(sets)
    ]
    calls: dict[str, list[timing.Call]] = {
        name: [functools.partial(f, a, b, torch.bfloat16) for a, b in operands] for name, f in METHODS.items()
    }
    events = medians_ms(calls, "cuda", timing.Effort(rounds=6))
    graphs = replayed_us(calls, timing.Effort(rounds=6, burst=2))
    return {name: (1e3 * events[name], graphs[name]) for name in METHODS}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser("errors and times of FP8 products by how they are summed")
    parser.add_argument("--size", type=int, default=4096, help="m, n and k of the products that are timed")
    arguments = parse_for_gpu(parser, argv)
    times = time_methods(arguments.size)
    problems = [
        (kind, k, method)
        for kind in ("normal", "one sign")
        for k in (32, 128, 1024, 4096, 16384)
        for method in METHODS
    ]
    return measure_each(
        problems,
        lambda x: f"{x[2]}, k = {x[1]}",
        lambda x: [measure(*x, times if x[:2] == ("normal", arguments.size) else {})],
        arguments.csv,
    )


if __name__ == "__main__":
    sys.exit(main())
