"""Kernels that do not rotate have the bits of those that rotate by nothing, but where they sum in another order."""

import pytest
import torch

from htree_ops import tree_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stride", [1, 2, 4, 16])
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 32)], ids=str
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"top_k": 4, "max_top_nodes": 64},
        {"top_k": 2, "max_top_nodes": 16},
        {"top_k": 24, "max_top_nodes": 384},
    ],
    ids=["two layers", "three layers", "rows that are dense"],
)
def test_no_rotation_has_the_bits_of_a_rotation_by_nothing(sizes, dtype, dim, group, stride, monkeypatch):
    """Output, lse and the three gradients.

    With 4 heads per K/V head, sums of dK and dV go over pairs of queries, but for the per-list kernels.
    """
    monkeypatch.setenv("HTREE_TREE_GATHER", "gathered")  # tiles under masks exist without rotations alone
    generator = torch.Generator("cuda").manual_seed(group * 100 + stride)
    q, k, v = (
        torch.randn(2, 1031, heads, dim, device="cuda", dtype=dtype, generator=generator).requires_grad_()
        for heads in (2 * group, 2, 2)
    )
    found = []
    for rotation in ({"rope_base": None}, {"inv_freq": (0.0,) * (dim // 2)}):
        out, lse = tree_attention(q, k, v, selection_stride=stride, return_lse=True, **sizes, **rotation)
        torch.manual_seed(7)
        gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
        found.append((out, lse, *gradients))
    paired = group == 4 and stride < 16
    for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
        if paired and i >= 3:
            step = torch.finfo(dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=2 * step, atol=step * 1e-2)
        else:
            assert torch.equal(ours, theirs)
