"""The choice of kernels for gated_mlp and fp8_gemm: pure functions, printed without a GPU."""

from __future__ import annotations

import pytest

from htree_ops.testing.fp8_gemm_cases import CASES

try:
    from htree_ops import _host
except ImportError:  # built for one Python version; the package works without it
    _host = None

pytestmark = pytest.mark.skipif(_host is None, reason="_host is not built for this Python")


@pytest.mark.parametrize(
    ("rows", "inner", "options", "words"),
    [
        (1, 11264, {}, "stream: 16 rows"),
        (17, 11264, {}, "stream: 32 rows"),
        (64, 11264, {}, "stream: 64 rows"),
        (65, 11264, {}, "tile: 128 rows x 64 columns"),
        (256, 11264, {}, "tile: 128 rows x 64 columns"),
        (4096, 11264, {}, "tile: 128 rows x 128 columns, 4 stages, clusters of 2"),
        (1, 11264, {"keeps_products": True}, "tile: 128 rows x 64 columns"),
        (4096, 11264, {"hopper_half": False}, "composed"),
    ],
)
def test_gated_mlp(rows: int, inner: int, options: dict[str, bool], words: str) -> None:
    assert _host.gated_mlp_config(rows, inner, **options).startswith(words)


@pytest.mark.parametrize(
    ("m", "options", "words"),
    [
        (1, {}, "stream: 16 rows x 64 columns, fp32 sums every 128, groups of 0, 8 stages, clusters of 2"),
        (
            1,
            {"n": 2112},
            "stream: 16 rows x 64 columns, fp32 sums every 128, groups of 0, 8 stages, clusters of 4",
        ),
        (
            1,
            {"k": 256},
            "stream: 16 rows x 64 columns, fp32 sums every 128, groups of 0, 8 stages, clusters of 1",
        ),
        (64, {}, "tile: 64 rows x 32 columns, fp32 sums every 128, groups of 16, 15 stages, clusters of 1"),
        (64, {"n": 2112, "k": 7168}, "stream: 64 rows x 64 columns"),
        (64, {"n": 8192, "k": 8192}, "tile: 64 rows x 64 columns"),
        (128, {}, "tile: 64 rows x 64 columns"),
        (256, {}, "tile: 128 rows x 64 columns"),
        (1024, {}, "tile: 128 rows x 128 columns"),
        (4096, {}, "library"),
        (
            4096,
            {"library": False},
            "tile: 128 rows x 128 columns, fp32 sums every 128, groups of 16, 5 stages, clusters of 1",
        ),
        (4096, {"n": 2112, "k": 7168}, "library"),
        (4096, {"n": 24576, "k": 1536}, "library"),
        (8192, {"n": 8192, "k": 8192}, "library"),
        (
            8192,
            {"n": 8192, "k": 8192, "library": False},
            "tile: 128 rows x 128 columns, fp32 sums every 128, groups of 16, 5 stages, clusters of 1",
        ),
        (4096, {"hopper": False}, "library"),
        (4096, {"hopper": False, "library": False}, "exact"),
    ],
)
def test_fp8_gemm(m: int, options: dict[str, bool], words: str) -> None:
    assert _host.fp8_gemm_config(m, **{"n": 4096, **options}).startswith(words)


def test_the_cases_of_fp8_gemm_reach_every_kernel_of_hopper() -> None:
    reached = {
        _host.fp8_gemm_config(case.m, case.n, case.k, library=False).split(",")[0]
        for case in CASES
        if min(case.m, case.n, case.k) > 0
    }
    assert reached == {
        *(f"stream: {rows} rows x 64 columns" for rows in (16, 32, 64)),
        *(
            f"tile: {tile} columns"
            for tile in ("64 rows x 32", "64 rows x 64", "128 rows x 64", "128 rows x 128")
        ),
    }
