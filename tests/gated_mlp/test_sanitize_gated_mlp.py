"""Every CUDA kernel of the gated_mlp family once at a small size, for compute-sanitizer."""

import pytest
import torch

import htree_ops  # noqa: F401
from htree_ops.ops.gated_mlp import COMPILED_CONFIGS
from tests.support.cases import case_id
from tests.support.gated_mlp_cases import (
    ACTIVATIONS,
    GRADIENT_CASES,
    SWAP_AB_CASES,
    TILE_CASES,
    WIDE_CASES,
    WIDE_CONFIG,
    GatedMLPCase,
    assert_forward,
    assert_gradients,
)

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 30, 60, 140])
def test_gated_mlp(rows, activation, dtype):
    # sizes that no tile divides; an inner size that tensor copies can store, and one that they cannot
    for inner, hidden in ((136, 200), (67, 65)):
        case = GatedMLPCase(
            name="small", dtype=dtype, rows=(rows,), inner=inner, hidden=hidden, activation=activation
        )
        inputs = case.make_inputs("cuda")
        assert_forward(torch.ops.htree.gated_mlp(*inputs), inputs)
        out, gate, up = torch.ops.htree._gated_mlp_forward(*inputs)
        assert_forward(out, inputs)
        dy = case.make_dy("cuda", seed=9)
        assert_gradients(torch.ops.htree._gated_mlp_saved_backward(dy, gate, up, *inputs), dy, inputs)
        assert_gradients(torch.ops.htree.gated_mlp_backward(dy, *inputs), dy, inputs, saved=False)


@pytest.mark.parametrize("config", COMPILED_CONFIGS, ids=str)
def test_configurations(config):
    for rows in (20, 300):
        case = GatedMLPCase(name="small", dtype=torch.bfloat16, rows=(rows,), inner=264, hidden=136)
        inputs = case.make_inputs("cuda")
        assert_forward(torch.ops.htree.gated_mlp(*inputs, list(config)), inputs)


@pytest.mark.parametrize("case", [*WIDE_CASES, *TILE_CASES, *SWAP_AB_CASES[:4]], ids=case_id)
def test_tiles(case):
    config = list(WIDE_CONFIG) if case in WIDE_CASES else None
    inputs = case.make_inputs("cuda")
    # the reference is slow under a tool; test_gated_mlp_kernels.py compares all rows
    first = (inputs[0][:16], *inputs[1:])
    assert_forward(torch.ops.htree.gated_mlp(*inputs, config)[:16], first)
    assert_forward(torch.ops.htree._gated_mlp_forward(*inputs)[0][:16], first)


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=case_id)
def test_gradient_kernels(case):
    inputs = case.make_inputs("cuda")
    _, gate, up = torch.ops.htree._gated_mlp_forward(*inputs)
    dy = case.make_dy("cuda", seed=9)
    gradients = torch.ops.htree._gated_mlp_saved_backward(dy, gate, up, *inputs)
    assert all(bool(g.isfinite().all()) for g in gradients)  # test_gated_mlp_kernels.py compares them
    one = torch.ops.htree._gated_mlp_saved_backward(dy, gate, up, *inputs, [False, False, True])[2]
    torch.testing.assert_close(one, gradients[2], rtol=0.02, atol=0.01)  # another kernel may compute it
