"""The choice of kernels for gated_mlp and fp8_gemm: pure functions, printed without a GPU."""

from __future__ import annotations

import pytest

from htree_ops.testing.fp8_gemm_cases import KERNEL_CASES

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
        (
            1,
            {},
            "stream: 16 rows x 64 columns, fp32 sums every 128, groups of 0, 8 stages, clusters of 1, k in 2 parts",
        ),
        (
            1,
            {"n": 1024},
            "stream: 16 rows x 64 columns, fp32 sums every 128, groups of 0, 8 stages, clusters of 1, k in 4",
        ),
        (
            1,
            {"n": 8192, "k": 8192},
            "stream: 16 rows x 64 columns, fp32 sums every 128, groups of 0, 12 stages",
        ),
        (33, {}, "stream: 64 rows"),
        (80, {}, "stream: 80 rows"),
        (96, {}, "stream: 96 rows"),
        (
            128,
            {},
            "tile: 128 rows x 64 columns, fp32 sums every 128, groups of 16, 8 stages, clusters of 1, k in 2 parts",
        ),
        (144, {}, "stream: 144 rows"),
        (192, {}, "stream: 96 rows"),
        (256, {}, "tile: 128 rows x 64 columns"),
        (384, {}, "tile: 128 rows x 96 columns"),
        (512, {}, "tile: 128 rows x 128 columns"),
        (768, {}, "tile: 192 rows x 128 columns"),
        (896, {}, "tile: 128 rows x 112 columns"),
        (
            384,
            {"n": 2112, "k": 7168},
            "tile: 128 rows x 96 columns, fp32 sums every 128, groups of 16, 6 stages, clusters of 1, k in 2 parts",
        ),
        (
            4096,
            {},
            "tile: 128 rows x 128 columns, fp32 sums every 128, groups of 16, 5 stages, clusters of 1, k in 1 parts",
        ),
        (1024, {"n": 2112, "k": 7168}, "library"),
        (1024, {"n": 2112, "k": 7168, "library": False}, "tile"),
        (192, {"n": 8192, "k": 8192}, "library"),
        (200, {"n": 11264}, "library"),
        (4096, {"n": 2112, "k": 7168}, "tile: 192 rows x 128 columns"),
        (8192, {"n": 8192, "k": 8192}, "tile: 192 rows x 128 columns"),
        (4096, {"hopper": False}, "library"),
        (4096, {"hopper": False, "library": False}, "half"),
    ],
)
def test_fp8_gemm(m: int, options: dict[str, bool], words: str) -> None:
    assert _host.fp8_gemm_config(m, **{"n": 4096, **options}).startswith(words)


def test_the_cases_reach_every_kernel_of_hopper() -> None:
    reached = {
        _host.fp8_gemm_config(case.m, case.n, case.k, library=False).split(",")[0]
        + _host.fp8_gemm_config(case.m, case.n, case.k, library=False).rsplit(",", 1)[1]
        for case in KERNEL_CASES
    }
    assert reached == {
        *(
            f"stream: {rows} rows x 64 columns k in {parts} parts"
            for rows in (16, 32, 64, 80, 96)
            for parts in (1, 2, 4)
        ),
        "stream: 128 rows x 64 columns k in 4 parts",
        "stream: 144 rows x 64 columns k in 2 parts",
        *(
            f"tile: {tile} columns k in 1 parts"
            for tile in (
                "64 rows x 64",
                "128 rows x 64",
                "128 rows x 96",
                "128 rows x 112",
                "128 rows x 128",
                "192 rows x 128",
            )
        ),
        *(
            f"tile: {tile} columns k in 2 parts"
            for tile in ("128 rows x 64", "128 rows x 96", "128 rows x 128")
        ),
    }
