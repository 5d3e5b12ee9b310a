"""Every CUDA kernel of fp8 quantisation once at a small size, for compute-sanitizer (`make sanitize`)."""

import pytest
import torch

from htree_ops.reference import fp8 as reference
from tests.support.cases import normal
from tests.support.fp8_cases import DTYPES, codes_of
from tests.support.layouts import LAYOUTS

pytestmark = pytest.mark.gpu

# rows of every register shape, on and off the 16-byte grid, and beyond
COLS = (40, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 40000, 70, 301, 9001, 33001)


GROUPINGS = (("tensor", -1, 128), ("channel", -1, 128), ("channel", 0, 128), ("block", -1, 100))


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize(dtype, cols):
    x = normal((3 if cols > 512 else 33, cols), dtype, "cpu", seed=cols)
    x[1, cols // 2] = float("inf")
    views = [LAYOUTS[name](x.cuda()) for name in ("contiguous", "misaligned", "in_larger")]
    ones = torch.ones_like(x)
    for grouping in GROUPINGS:
        # On the CPU: the sanitizer need not watch the reference.
        codes, scale, count = reference.quantize(x, None, *grouping)
        values = reference.dequantize(codes, scale, *grouping, dtype)
        gradient = reference.fake_quant_backward(ones, x, scale, *grouping)
        for view in views:
            for given in (None, scale.cuda()):
                q, s, n = torch.ops.htree.fp8_quantize(view, given, *grouping)
                assert torch.equal(codes_of(q).cpu(), codes)
                assert torch.equal(s.cpu(), scale)
                assert int(n) == int(count)
            assert torch.equal(torch.ops.htree.fp8_compute_scale(view, *grouping).cpu(), scale)
            y = torch.ops.htree.fp8_dequantize(q, s, dtype, grouping[2])
            assert torch.equal(y.cpu(), values)
            assert torch.equal(torch.ops.htree.fp8_fake_quant(view, None, *grouping).cpu(), values)
            dx = torch.ops.htree._fp8_fake_quant_backward(ones.cuda(), view, s, *grouping)
            assert torch.equal(dx.cpu(), gradient)


@pytest.mark.parametrize("grouping", GROUPINGS, ids=lambda g: g[0] + str(g[1]))
def test_scales_beyond_the_quick_quotient(grouping):
    """Kernels divide by scales whose reciprocal is not a normal fp32 number."""
    x = normal((9, 520), torch.float32, "cpu", seed=1) * 1e-30
    for factor in (1.0, 1e-7):
        codes, scale, _ = reference.quantize(x * factor, None, *grouping)
        y = torch.ops.htree.fp8_fake_quant((x * factor).cuda(), None, *grouping)
        assert torch.equal(y.cpu(), reference.dequantize(codes, scale, *grouping, torch.float32))
