"""Every CUDA kernel of the causal_softmax family at a small size, for compute-sanitizer; results are checked as well.

The full suite takes hours under the sanitizer. These calls cover each kernel and its tail paths in a minute or two.
"""

import pytest
import torch

import htree_ops  # noqa: F401
from htree_ops.reference.causal_softmax import causal_softmax as reference_softmax
from htree_ops.reference.causal_softmax import causal_softmax_backward as reference_softmax_backward
from tests.support.cases import normal
from tests.support.compare import assert_close_spec
from tests.support.layouts import LAYOUTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("w", [1, 200, 300, 1000, 1031, 2048, 4096, 8192, 16384, 17000, 33000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_causal_softmax(dtype, w):
    x = normal((2, min(w, 3), w), dtype, "cuda", seed=w)
    for view in (x, LAYOUTS["misaligned"](x)):
        for block_size in (0, 512, 1024):
            y = torch.ops.htree.causal_softmax(view, block_size)
            assert_close_spec(y, reference_softmax(x), 8e-3, 1e-6)
        dx = torch.ops.htree.causal_softmax_backward(view, y)
        assert_close_spec(dx, reference_softmax_backward(x, y), 2e-2, 1e-5)
