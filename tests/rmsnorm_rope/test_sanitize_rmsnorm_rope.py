"""Every CUDA kernel of the rmsnorm_rope family once at a small size, for compute-sanitizer."""

import pytest
import torch

import htree_ops  # noqa: F401
from tests.support.rmsnorm_rope_cases import (
    RMSNormRoPEBackwardCase,
    RMSNormRoPECase,
    assert_forward,
    assert_gradients,
)

pytestmark = pytest.mark.gpu

# Widths that reach every number of threads per row and the looping kernels. Rows of two pairs per thread must be many,
# or they get twice the threads.
SHAPES = (
    ((2, 3, 5, 32), 32),
    ((2, 3, 5, 64), 64),
    ((2, 3, 5, 128), 128),
    ((2, 3, 5, 256), 256),
    ((2, 3, 576), 96),
    ((2, 3, 1024), 128),
    ((2, 3, 2048), 128),
    ((2, 3, 4096), 128),
    ((1, 800, 4096), 128),
    ((2, 3, 8192), 128),
    ((1, 3, 16384), 128),
    ((1, 3, 40000), 200),
    ((2, 3, 60), 6),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "head_dim"), SHAPES, ids=lambda value: str(value))
def test_rmsnorm_rope(shape, head_dim, dtype):
    ops = torch.ops.htree
    for layout in ("contiguous", "misaligned"):
        case = RMSNormRoPECase(name="small", dtype=dtype, shape=shape, head_dim=head_dim, layout=layout)
        inputs = case.make_inputs("cuda")
        assert_forward((ops.head_rmsnorm_rope if case.per_head else ops.rmsnorm_rope)(*inputs), inputs)
        inputs = RMSNormRoPEBackwardCase(name="small", dtype=dtype, forward=case).make_inputs("cuda")
        backward = ops.head_rmsnorm_rope_backward if case.per_head else ops.rmsnorm_rope_backward
        assert_gradients(backward(*inputs), inputs)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_configurations(block_size, num_stages):
    case = RMSNormRoPECase(name="small", dtype=torch.bfloat16, shape=(2, 3, 1024), head_dim=128)
    inputs = case.make_inputs("cuda")
    y = torch.ops.htree.rmsnorm_rope(*inputs, [block_size, block_size // 32, num_stages])
    assert_forward(y, inputs)
