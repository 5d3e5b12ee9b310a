"""Case lists and layouts: what they promise to the tests and benchmarks built on them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from htree_ops.testing import causal_softmax_cases as softmax
from htree_ops.testing.cases import Case
from htree_ops.testing.layouts import LAYOUTS, misaligned, storage_span, with_strides
from htree_ops.testing.tree_attention_problem import TreeAttentionCase

LISTS: dict[str, list[Case]] = {
    "cases": [*softmax.CASES, *softmax.LAYOUT_CASES],
    "backward": [*softmax.BACKWARD_CASES],
    "benchmark": [*softmax.BENCHMARK_CASES["cuda"]],
    "benchmark_backward": [*softmax.BENCHMARK_BACKWARD_CASES["cuda"]],
}
COPY_BYTES_PER_SECOND = (
    4.28e12  # measured device copy, read + write, of the GPU that the floors below belong to
)


@pytest.mark.parametrize("cases", LISTS.values(), ids=LISTS)
def test_ids_are_unique(cases):
    assert len({case.id for case in cases}) == len(cases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_a_layout_keeps_the_values_and_poisons_the_rest(layout, dtype):
    x = torch.arange(2 * 3 * 5).view(2, 3, 5).to(dtype)
    laid = LAYOUTS[layout](x)
    assert torch.equal(laid, x)
    assert laid.dtype == dtype
    storage = torch.empty(0, dtype=dtype).set_(laid.untyped_storage())
    poisoned = storage.isnan() if dtype.is_floating_point else storage == torch.iinfo(dtype).max
    assert int(poisoned.sum()) == storage.numel() - x.numel()
    contiguous = layout in ("contiguous", "misaligned")
    assert laid.is_contiguous() == contiguous
    assert (laid.data_ptr() % 16 != 0) == (layout in ("misaligned", "in_larger"))


def test_with_strides():
    x = torch.randn(4, 3, 5)
    for strides in ((15, 5, 1), (1, 20, 4), (1000, 7, 51), (60, 20, 4)):
        view = with_strides(x, strides, offset=3)
        assert view.stride() == strides
        assert view.storage_offset() == 3
        assert torch.equal(view, x)
    repeated = with_strides(x[:1].expand(4, 3, 5), (0, 5, 1))
    assert repeated.stride() == (0, 5, 1)
    assert torch.equal(repeated, x[:1].expand(4, 3, 5))
    for wrong in ((5, 5, 1), (15, 4, 1), (15, 5, -1), (15, 5)):
        with pytest.raises(ValueError):
            with_strides(x, wrong)
    assert with_strides(torch.empty(0, 4), (9, 2)).shape == (0, 4)
    assert storage_span((4, 3, 5), (1000, 7, 51)) == 3 * 1000 + 2 * 7 + 4 * 51 + 1
    assert misaligned(x.half()).data_ptr() % 4 == 2


@pytest.mark.parametrize("case", softmax.CASES[:: len(softmax.DTYPES)], ids=lambda case: case.name)
def test_causal_softmax_inputs_are_as_described(case):
    x, block_size = case.make_inputs("cpu", seed=3)
    assert (tuple(x.shape), x.dtype, block_size) == (case.shape, case.dtype, 0)
    if case.strides:
        assert x.stride() == case.strides
    assert torch.equal(x, case.make_x("cpu", seed=3))
    assert x.numel() == 0 or not torch.equal(x, case.make_x("cpu", seed=4))
    assert softmax.num_visible(case.shape) == int(
        softmax.visible_mask(*case.shape[-2:]).expand(case.shape).sum()
    )


def test_mask_is_aligned_at_the_bottom_right():
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert softmax.visible_mask(3, 5).int().tolist() == expected
    assert softmax.visible_mask(1, 4).all()


def test_backward_inputs_belong_together():
    case = softmax.BACKWARD_CASES[5 * len(softmax.DTYPES)]
    dy, y = case.make_inputs("cpu", seed=3)
    assert torch.equal(y, softmax.masked_softmax(case.make_x("cpu", seed=3)))
    assert not torch.equal(dy, case.make_x("cpu", seed=3))


def test_bytes_of_the_bar_give_the_known_floors():
    forward, backward = (LISTS[name][0] for name in ("benchmark", "benchmark_backward"))
    assert forward.bytes() / COPY_BYTES_PER_SECOND * 1e6 == pytest.approx(94, abs=0.5)
    assert backward.bytes() / COPY_BYTES_PER_SECOND * 1e6 == pytest.approx(125, abs=0.6)
    assert forward.flops() == 5 * 32 * 2048 * 2049 // 2


def test_correlated_tokens_are_an_autoregression():
    """Lag-one correlation ρ and variance 1, against the recursion itself on the same noise."""
    rho = 0.95
    alike = TreeAttentionCase(name="alike", dtype=torch.float64, T=3000, K=16, V=16, correlation=rho)
    noise = dataclasses.replace(alike, correlation=0.0).make_qkv("cpu", seed=3)[0]
    expected = noise.clone()
    for t in range(1, alike.T):
        expected[:, t] = rho * expected[:, t - 1] + (1 - rho**2) ** 0.5 * noise[:, t]
    torch.testing.assert_close(alike.make_qkv("cpu", seed=3)[0], expected, rtol=0, atol=1e-4)
