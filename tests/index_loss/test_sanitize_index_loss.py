"""Small calls of every CUDA kernel of index_loss, for compute-sanitizer (`make sanitize`), with their results."""

from dataclasses import replace

import pytest
import torch

from htree_ops.reference import index_loss as reference
from tests.support.cases import case_id
from tests.support.index_loss_cases import CASES, FAST_CASES

pytestmark = pytest.mark.gpu
SMALL = [case for case in CASES if case.dtype != torch.float64]
SMALL += [
    replace(case, T=min(case.T, 300), rows=min(case.rows, 20)) for case in FAST_CASES if case.block_size < 300
]


@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_index_loss(case):
    inputs = case.make_inputs("cuda")
    index = [x.requires_grad_() for x in inputs[2:4]]
    loss = torch.ops.htree.index_loss(*inputs[:2], *index, *inputs[4:], **case.options())
    wanted = reference.index_loss(*inputs, **case.options())
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-3, atol=1e-3)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, index))


@pytest.mark.parametrize(
    "offsets", [[0, 40, 10, 2**31 - 1], [-5, 3, 3, 20], [7, 7, 7, 7], [300, 0, 0, 0]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_offset_or_position_leads_outside_of_the_tensors(dtype, offsets):
    query, key = (torch.ones(300, heads, 16, dtype=dtype, device="cuda") for heads in (4, 2))
    index = [torch.ones(300, 2, 16, dtype=dtype, device="cuda", requires_grad=True) for _ in range(2)]
    positions = torch.tensor([-(2**62), -1, 0, 16, 39, 299, 300, 2**31, 2**62, 17, 17], device="cuda")
    cu = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    loss = torch.ops.htree.index_loss(query, key, *index, positions, cu)
    assert abs(loss.item()) < 1e-3  # all masses and scores are equal
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, index))
