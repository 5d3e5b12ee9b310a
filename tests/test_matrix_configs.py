"""The choice of kernels for gated_mlp and fp8_gemm: pure functions, printed without a GPU."""

from __future__ import annotations

import pytest

_host = pytest.importorskip("htree_ops._host", reason="no _host for this Python")


@pytest.mark.parametrize(
    ("rows", "inner", "options", "words"),
    [
        (1, 11264, {}, "vector: 1 rows, 3 stages per warp"),
        (3, 11264, {}, "vector: 4 rows"),
        (1, 11264, {"hidden": 4095}, "stream: 16 rows"),
        (4, 11264, {"hidden": 8192}, "stream: 16 rows"),
        (5, 11264, {}, "stream: 16 rows"),
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
        (64, {"library": False}, "stream: 64 rows"),
        (65, {}, "library"),
        (65, {"library": False}, "tile: 128 rows"),
        (4096, {"library": False}, "tile: 256 rows"),
        (4096, {}, "library"),
        (4096, {"hopper": False}, "library"),
        (4096, {"hopper": False, "library": False}, "exact"),
    ],
)
def test_fp8_gemm(m: int, options: dict[str, bool], words: str) -> None:
    assert _host.fp8_gemm_config(m, **{"n": 4096, **options}).startswith(words)
