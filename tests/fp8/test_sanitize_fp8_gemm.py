"""Every CUDA kernel of fp8_gemm once at a small size, for compute-sanitizer (`make sanitize`)."""

import dataclasses

import pytest
import torch

from htree_ops.ops.fp8.gemm import COMPILED_CONFIGS
from tests.support.cases import case_id
from tests.support.fp8_gemm_cases import (
    EXACT_SUM,
    KERNEL_CASES,
    OUTPUTS,
    FP8GemmCase,
    assert_product,
    sum_error,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("m", [1, 30, 140])
def test_fp8_gemm(m, dtype):
    # sizes that no tile divides; columns that tensor copies can store, and some that they cannot
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", KERNEL_CASES, ids=case_id)
def test_every_kernel_of_hopper(case, dtype):
    inputs = dataclasses.replace(case, dtype=dtype).make_inputs("cuda")
    result = torch.ops.htree.fp8_gemm(*inputs)
    assert_product(
        result[:64], (inputs[0][:64], inputs[1], first_scales(inputs[2]), *inputs[3:]), sum_error("cuda")
    )


def first_scales(scale: torch.Tensor) -> torch.Tensor:
    """The scales of the first 64 rows."""
    return scale if scale.dim() == 0 else scale[:64]


@pytest.mark.parametrize("config", COMPILED_CONFIGS, ids=str)
def test_configurations(config):
    for m, dtype in ((20, torch.float32), (600, torch.bfloat16)):
        inputs = FP8GemmCase(name="small", dtype=dtype, m=m, n=392, k=656, scales="channel").make_inputs(
            "cuda"
        )
        assert_product(torch.ops.htree.fp8_gemm(*inputs, list(config)), inputs, sum_error("cuda"))
