"""The CUDA kernels of gated_mlp: which size takes which one, what a call launches, graphs and streams."""

import math

import pytest
import torch

from tests.support.cases import case_id, normal
from tests.support.gated_mlp_cases import (
    GRADIENT_CASES,
    SWAP_AB_CASES,
    TILE_CASES,
    WIDE_CASES,
    WIDE_CONFIG,
    GatedMLPCase,
    assert_forward,
    assert_gradients,
)
from tests.support.graphs import assert_stream_and_graph, kernels_of

pytestmark = pytest.mark.gpu

op = torch.ops.htree.gated_mlp
op_forward = torch.ops.htree._gated_mlp_forward
op_backward = torch.ops.htree.gated_mlp_backward
op_saved_backward = torch.ops.htree._gated_mlp_saved_backward


@pytest.mark.parametrize("case", [*WIDE_CASES, *TILE_CASES, *SWAP_AB_CASES], ids=case_id)
def test_tiles(case, nan_memory):
    config = list(WIDE_CONFIG) if case in WIDE_CASES else None
    inputs = case.make_inputs("cuda")
    out = op(*inputs, config)
    assert_forward(out, inputs)
    assert torch.equal(op(*inputs, config), out), "two runs must agree bit for bit"
    kept, gate, up = op_forward(*inputs)
    assert_forward(kept, inputs)
    assert torch.equal(op(*inputs), kept)
    x, gate_weight, up_weight = (
        one.float() for one in inputs[:3]
    )  # cuBLAS may add parts of 16-bit sums in 16 bits
    torch.testing.assert_close(gate, (x @ gate_weight.mT).to(gate.dtype))
    torch.testing.assert_close(up, (x @ up_weight.mT).to(up.dtype))


# ---- the products of the backward


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=case_id)
def test_gradient_kernels(case, nan_memory):
    inputs = case.make_inputs("cuda")
    dy = case.make_dy("cuda", seed=77)
    _, gate, up = op_forward(*inputs)
    every = op_saved_backward(dy, gate, up, *inputs)
    assert_gradients(every, dy, inputs)
    for first, second in zip(every, op_saved_backward(dy, gate, up, *inputs), strict=True):
        assert torch.equal(first, second), "two runs must agree bit for bit"
    for mask in ([True, False, False], [False, True, False], [False, False, True]):
        assert_gradients(op_saved_backward(dy, gate, up, *inputs, mask), dy, inputs)


def test_gradients_do_not_spread_special_values():
    """A row of NaN or a column of infinities in dy reaches the gradients of that row or column alone."""
    x, gate_weight, up_weight, *options = GatedMLPCase(
        name="nan", dtype=torch.bfloat16, rows=(200,), inner=328, hidden=264
    ).make_inputs("cuda")
    dy = normal((200, 328), torch.bfloat16, "cuda", seed=4)
    clean = op_backward(dy, x, gate_weight, up_weight, *options)
    dy[7, :] = math.nan
    dx, *_ = op_backward(dy, x, gate_weight, up_weight, *options)
    others = [i for i in range(200) if i != 7]
    assert dx[7].isnan().all()
    assert torch.equal(dx[others], clean[0][others])
    dy = torch.where(dy.isnan(), 1.0, dy)
    dy[:, 9] = math.inf
    _, dgate, dup = op_backward(dy, x, gate_weight, up_weight, *options)
    others = [i for i in range(328) if i != 9]
    for gradient in (dgate, dup):
        assert not gradient[9].isfinite().any()
        assert gradient[others].isfinite().all()


def test_kernels_of_a_backward():
    """A backward launches one elementwise kernel, one for dx and one for both weights."""
    case = GatedMLPCase(name="one", dtype=torch.bfloat16, rows=(600,), inner=1024, hidden=512)
    inputs, dy = case.make_inputs("cuda"), case.make_dy("cuda", seed=77)
    _, gate, up = op_forward(*inputs)
    op_saved_backward(dy, gate, up, *inputs)
    assert len(kernels_of(lambda: op_saved_backward(dy, gate, up, *inputs))) == 3


@pytest.mark.parametrize("rows", [1, 64, 128, 1000])
def test_one_kernel_per_forward_call(rows):
    inputs = GatedMLPCase(name="one", dtype=torch.bfloat16, rows=(rows,), inner=1024, hidden=512).make_inputs(
        "cuda"
    )
    op(*inputs)
    kernels = kernels_of(lambda: op(*inputs))
    assert len(kernels) == 1, kernels


def test_cuda_graph_and_other_stream():
    inputs = GatedMLPCase(name="graph", dtype=torch.float16, rows=(80,), inner=256, hidden=128).make_inputs(
        "cuda"
    )
    assert_stream_and_graph(lambda: op(*inputs), inputs[0])
