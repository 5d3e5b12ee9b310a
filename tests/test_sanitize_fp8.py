"""Every CUDA kernel of fp8 quantisation once at a small size, for compute-sanitizer (`make sanitize`)."""

from __future__ import annotations

import pytest
import torch

from htree_ops.reference import fp8 as reference
from htree_ops.testing.cases import normal
from htree_ops.testing.fp8_cases import DTYPES, codes_of
from htree_ops.testing.layouts import LAYOUTS

pytestmark = pytest.mark.gpu

# rows of every register shape, on and off the 16-byte grid, and beyond
COLS = (40, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 40000, 70, 301, 9001, 33001)


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize(dtype: torch.dtype, cols: int) -> None:
    x = normal((3 if cols > 512 else 33, cols), dtype, "cuda", seed=cols)
    x[1, cols // 2] = float("inf")
    for view in (x, LAYOUTS["misaligned"](x), LAYOUTS["in_larger"](x)):
        for grouping in (("tensor", -1, 128), ("channel", -1, 128), ("channel", 0, 128), ("block", -1, 100)):
            codes, scale, count = reference.quantize(x, None, *grouping)
            for given in (None, scale):
                q, s, n = torch.ops.htree.fp8_quantize(view, given, *grouping)
                assert torch.equal(codes_of(q), codes)
                assert torch.equal(s, scale)
                assert int(n) == int(count)
            assert torch.equal(torch.ops.htree.fp8_compute_scale(view, *grouping), scale)
            y = torch.ops.htree.fp8_dequantize(q, s, dtype, grouping[2])
            assert torch.equal(y, reference.dequantize(codes, scale, *grouping, dtype))
            assert torch.equal(torch.ops.htree.fp8_fake_quant(view, None, *grouping), y)
            dx = torch.ops.htree.fp8_fake_quant_backward(torch.ones_like(x), view, s, *grouping)
            assert torch.equal(dx, reference.fake_quant_backward(torch.ones_like(x), x, s, *grouping))
