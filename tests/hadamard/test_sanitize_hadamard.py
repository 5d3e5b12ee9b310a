"""Every CUDA kernel of the hadamard family once at a small size, for compute-sanitizer (`make sanitize`)."""

import pytest
import torch

from htree_ops.reference import hadamard as reference
from tests.support.cases import normal
from tests.support.compare import assert_close_spec
from tests.support.hadamard_cases import DTYPES, LENGTHS, grouped_tolerance, tolerance
from tests.support.layouts import LAYOUTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hadamard_transform(dtype, n):
    x = normal((3 if n > 512 else 131, n), dtype, "cuda", seed=n)
    rtol, atol = tolerance(x)
    expected = reference.hadamard_transform(x)
    for view in (x, LAYOUTS["misaligned"](x)):
        y = torch.ops.htree.hadamard_transform(view)
        assert_close_spec(y, expected, rtol, atol)
        torch.ops.htree.hadamard_transform_(view)
        assert torch.equal(view, y)


@pytest.mark.parametrize("width", [2, 64, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_hadamard(dtype, width):
    x = normal((2, 16, 3, width), dtype, "cuda", seed=width)
    for group in (2, 16):
        rtol, atol = grouped_tolerance(x, group)
        y = torch.ops.htree.grouped_hadamard(x, group)
        assert_close_spec(y, reference.grouped_hadamard(x, group), rtol, atol)


@pytest.mark.parametrize(("rows", "n"), [(540, 8192), (140, 32768)])
def test_more_rows_than_run_at_a_time(rows, n):
    x = normal((rows, n), torch.bfloat16, "cuda", seed=n)
    assert torch.equal(torch.ops.htree.hadamard_transform(x)[-1], torch.ops.htree.hadamard_transform(x[-1]))
    heads = normal((1, 16, rows, n // 16), torch.bfloat16, "cuda", seed=n)
    few = heads[:, :, -3:].clone()
    y = torch.ops.htree.grouped_hadamard(heads, 16)
    assert torch.equal(y[:, :, -3:], torch.ops.htree.grouped_hadamard(few, 16))
