"""Every CUDA kernel of fp8_gemm once at a small size, for compute-sanitizer (`make sanitize`)."""

from __future__ import annotations

import pytest
import torch

from htree_ops.ops.fp8_gemm import COMPILED_CONFIGS
from htree_ops.testing.fp8_gemm_cases import EXACT_SUM, OUTPUTS, FP8GemmCase, assert_product, sum_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("m", [1, 30, 60, 140, 1100])
def test_fp8_gemm(m: int, dtype: torch.dtype) -> None:
    # ragged in every direction; columns that tensor copies can store, and some that they cannot
    for n, k, scales, layout in (
        (136, 272, "channel", "column"),
        (67, 65, "mixed", "row"),
        (264, 144, "tensor", "sliced"),
    ):
        inputs = FP8GemmCase(
            name="small", dtype=dtype, m=m, n=n, k=k, scales=scales, layout=layout
        ).make_inputs("cuda")
        assert_product(torch.ops.htree.fp8_gemm(*inputs), inputs, sum_error("cuda"))
        assert_product(torch.ops.htree.fp8_gemm_exact(*inputs), inputs, EXACT_SUM)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(60, 70, 7200), (60, 6000, 520), (120, 6200, 300), (1100, 1500, 160)]
)
def test_kernels_that_small_sizes_do_not_reach(m: int, n: int, k: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        inputs = FP8GemmCase(name="wide", dtype=dtype, m=m, n=n, k=k, scales="channel").make_inputs("cuda")
        assert_product(torch.ops.htree.fp8_gemm(*inputs), inputs, sum_error("cuda"))


@pytest.mark.parametrize("config", COMPILED_CONFIGS, ids=str)
def test_configurations(config: tuple[int, ...]) -> None:
    for m, dtype in ((20, torch.float32), (600, torch.bfloat16)):
        inputs = FP8GemmCase(name="small", dtype=dtype, m=m, n=392, k=656, scales="channel").make_inputs(
            "cuda"
        )
        assert_product(torch.ops.htree.fp8_gemm(*inputs, list(config)), inputs, sum_error("cuda"))
