"""The choice of kernels for gated_mlp and fp8_gemm, which are pure functions and need no GPU."""

import pytest

from tests.support.fp8_gemm_cases import KERNEL_CASES
from tests.support.gated_mlp_cases import GRADIENT_CASES, SWAP_AB_CASES, TILE_CASES, WIDE_CASES

_host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")


@pytest.mark.parametrize(
    ("rows", "inner", "options", "words"),
    [
        (1, 11264, {}, "stream: 16 rows"),
        (17, 11264, {}, "stream: 32 rows"),
        (64, 11264, {}, "stream: 64 rows"),
        (65, 11264, {}, "tile: 128 rows x 88 columns"),
        (65, 5632, {"hidden": 2048}, "tile: 128 rows x 64 columns"),
        (65, 14336, {}, "tile: 128 rows x 112 columns"),
        (192, 11264, {}, "tile: 192 rows x 88 columns"),
        (192, 5632, {"hidden": 2048}, "tile: 192 rows x 64 columns"),
        (256, 11264, {}, "tile: 128 rows x 88 columns"),
        (384, 11264, {}, "tile: 128 rows x 128 columns, 4 stages, clusters of 1"),
        (400, 11264, {}, "swap AB: 144 rows x 128 columns"),
        (480, 11264, {}, "swap AB: 160 rows x 128 columns"),
        (576, 11264, {}, "tile: 192 rows x 64 columns"),
        (1024, 2816, {"hidden": 1024}, "tile: 192 rows x 64 columns"),
        (4096, 11264, {}, "tile: 128 rows x 128 columns, 4 stages, clusters of 2"),
        (1, 11264, {"keeps_products": True}, "tile: 128 rows x 88 columns"),
        (4096, 11264, {"hopper_half": False}, "composed"),
    ],
)
def test_gated_mlp(rows, inner, options, words):
    assert _host.gated_mlp_config(rows, inner, **options).startswith(words)


@pytest.mark.parametrize(
    ("rows", "inner", "options", "fused"),
    [
        (4096, 11264, {}, (True, True)),
        (512, 11264, {}, (True, True)),
        (256, 11264, {}, (False, True)),
        (1, 11264, {}, (False, True)),
        (1, 8, {"hidden": 8}, (True, True)),
        (4096, 11263, {}, (False, False)),
        (4096, 11264, {"hidden": 4092}, (False, False)),
        (4096, 11264, {"hopper_half": False}, (False, False)),
    ],
)
def test_gated_mlp_gradients(rows, inner, options, fused):
    words = _host.gated_mlp_gradient_config(rows, inner, **options)
    assert tuple(word.startswith("tile: 128 rows x 256 columns") for word in words) == fused


def test_gated_mlp_takes_wide_tiles_for_the_first_cases():
    for case in WIDE_CASES[:4]:
        words = _host.gated_mlp_config(case.num_rows, case.inner, case.hidden, keeps_products=True)
        assert words == "tile: 128 rows x 128 columns, 4 stages, clusters of 2"


def test_the_cases_reach_every_tile_of_gated_mlp():
    taken = [
        _host.gated_mlp_config(case.num_rows, case.inner, case.hidden, keeps_products=keeps)
        for case in TILE_CASES
        for keeps in (False, True)
    ]
    assert set(taken) == {
        "tile: 192 rows x 64 columns, 5 stages, clusters of 1",
        "tile: 128 rows x 88 columns, 5 stages, clusters of 1",
        "tile: 192 rows x 88 columns, 4 stages, clusters of 1",
        "tile: 128 rows x 112 columns, 5 stages, clusters of 1",
        "tile: 128 rows x 128 columns, 4 stages, clusters of 1",
    }
    swapped = [
        {
            _host.gated_mlp_config(case.num_rows, case.inner, case.hidden, keeps_products=k)
            for k in (False, True)
        }
        for case in SWAP_AB_CASES
    ]
    rows = (144, 144, 144, 144, 160, 160)
    expected = [{f"swap AB: {n} rows x 128 columns, 4 stages, clusters of 2"} for n in rows for _ in range(2)]
    assert swapped == expected
    for case in GRADIENT_CASES:
        words = _host.gated_mlp_gradient_config(case.num_rows, case.inner, case.hidden)
        assert all(word.startswith("tile: ") for word in words)


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
        (1, {"n": 14336}, "stream: 16 rows x 64 columns, fp32 sums every 128, groups of 0, 6 stages"),
        (64, {"n": 14336}, "tile: 128 rows x 112 columns"),
        (33, {}, "stream: 64 rows"),
        (80, {}, "stream: 80 rows"),
        (96, {}, "stream: 96 rows"),
        (
            128,
            {},
            "tile: 128 rows x 64 columns, fp32 sums every 128, groups of 16, 8 stages, clusters of 1, k in 2 parts",
        ),
        (144, {}, "stream: 144 rows"),
        (192, {}, "tile: 128 rows x 64 columns"),
        (256, {}, "tile: 128 rows x 64 columns"),
        (384, {}, "tile: 128 rows x 96 columns"),
        (512, {}, "tile: 128 rows x 128 columns"),
        (640, {}, "tile: 160 rows x 128 columns"),
        (160, {"k": 14336}, "stream: 160 rows"),
        (600, {"n": 10240, "k": 8192}, "tile: 200 rows x 128 columns"),
        (768, {}, "tile: 192 rows x 128 columns"),
        (896, {}, "tile: 128 rows x 112 columns"),
        (
            384,
            {"n": 2112, "k": 7168},
            "tile: 128 rows x 96 columns, fp32 sums every 128, groups of 16, 6 stages, clusters of 1, k in 2 parts",
        ),
        (
            600,
            {},
            "tile: 152 rows x 128 columns, fp32 sums every 128, groups of 16, 5 stages, clusters of 1, k in 1 parts, "
            "swap AB",
        ),
        (
            4096,
            {},
            "tile: 128 rows x 128 columns, fp32 sums every 128, groups of 16, 5 stages, clusters of 1, k in 1 parts",
        ),
        (64, {"n": 5120, "k": 5120}, "tile: 64 rows x 48 columns"),
        (64, {"n": 18944, "k": 3584}, "tile: 64 rows x 80 columns"),
        (1024, {"n": 2112, "k": 7168}, "tile: 128 rows x 144 columns"),
        (
            192,
            {"n": 8192, "k": 8192},
            "tile: 96 rows x 128 columns, fp32 sums every 128, groups of 16, 7 stages, clusters of 2",
        ),
        (512, {"n": 512, "k": 32768}, "stream: 64 rows"),
        (64, {"n": 512, "k": 32768}, "cublas"),
        (16, {"n": 128, "k": 65536}, "cublas"),
        (16, {"n": 128, "k": 65536, "cublas": False}, "stream: 16 rows"),
        (4096, {"n": 2112, "k": 7168}, "tile: 120 rows x 192 columns"),
        (8192, {"n": 8192, "k": 8192}, "tile: 128 rows x 192 columns"),
        (4096, {"hopper": False}, "cublas"),
        (4096, {"hopper": False, "cublas": False}, "half"),
    ],
)
def test_fp8_gemm(m, options, words):
    assert _host.fp8_gemm_config(m, **{"n": 4096, **options}).startswith(words)


def kernel_of(m: int, n: int, k: int) -> str:
    """The kernel of a product by its shape, stages, clusters, parts of k and orientation."""
    words = _host.fp8_gemm_config(m, n, k, cublas=False).split(", ")
    return " ".join([words[0], *words[3:]])


def test_the_cases_reach_every_kernel_of_hopper():
    assert {kernel_of(case.m, case.n, case.k) for case in KERNEL_CASES} == {
        *(
            f"stream: {rows} rows x 64 columns {stages} stages clusters of 1 k in {parts} parts"
            for rows in (16, 32, 64, 80, 96)
            for parts, stages in ((1, 12 if rows <= 64 else 10), (2, 8), (4, 8))
        ),
        *(
            f"stream: {rows} rows x 64 columns {stages} stages clusters of 1 k in 1 parts"
            for rows, stages in ((16, 6), (32, 5), (80, 5), (96, 5))
        ),
        "stream: 128 rows x 64 columns 7 stages clusters of 1 k in 4 parts",
        "stream: 144 rows x 64 columns 7 stages clusters of 1 k in 2 parts",
        "stream: 160 rows x 64 columns 7 stages clusters of 1 k in 2 parts",
        *(
            f"tile: {rows} rows x {columns} columns {stages} stages clusters of 1 k in 1 parts"
            for rows, columns, stages in (
                (64, 48, 14),
                (64, 64, 12),
                (64, 80, 11),
                (128, 64, 8),
                (128, 80, 7),
                (128, 96, 7),
                (128, 112, 6),
                (128, 128, 5),
                (128, 128, 6),
                (128, 144, 5),
                (128, 160, 5),
                (192, 96, 5),
                (192, 128, 4),
            )
        ),
        *(
            f"tile: {rows} rows x {columns} columns {stages} stages clusters of 1 k in 1 parts swap AB"
            for rows, columns, stages in (
                (104, 128, 6),
                (120, 128, 5),
                (144, 128, 5),
                (152, 128, 5),
                (160, 128, 5),
                (200, 128, 4),
                (104, 192, 4),
                (120, 192, 4),
                (128, 192, 4),
            )
        ),
        *(
            f"tile: {rows} rows x 128 columns {stages} stages clusters of 2 k in 1 parts swap AB"
            for rows, stages in ((72, 8), (80, 7), (96, 7), (104, 6), (112, 6))
        ),
        *(
            f"tile: {rows} rows x {columns} columns {stages} stages clusters of 1 k in 2 parts"
            for rows, columns, stages in (
                (128, 64, 8),
                (128, 96, 6),
                (128, 128, 5),
                (192, 96, 5),
                (192, 128, 4),
            )
        ),
    }
