"""The comparison helpers catch what they are for (docs/semantics/python.md §3.4, §3.5 P8)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from htree_ops import bench
from htree_ops.tuning import verification
from htree_ops.tuning.verification import compare, verify
from tests.support.compare import assert_close_spec, assert_no_worse_than_eager

INF, NAN = math.inf, math.nan


def random_rows(num_rows: int = 4096, w: int = 512, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Softmax rows: two million positive values around 1/512, far below any absolute tolerance in use."""
    x = torch.randn(num_rows, w, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.softmax(x, dim=-1).to(dtype)


@given(
    expected=st.floats(-1e6, 1e6),
    error=st.floats(0, 2),
    rtol=st.floats(0, 1e-2),
    atol=st.floats(0, 1.0),
    place=st.integers(0, 4),
)
def test_one_element_decides(expected, error, rtol, atol, place):
    """Feature: benchmark, Property 8: the bound itself, |a - e| <= atol + rtol |e|, for one of five elements."""
    reference = torch.full((5,), expected, dtype=torch.float64)
    actual = reference.clone()
    actual[place] += error
    made = abs(float(actual[place]) - expected)
    assert verify(actual, reference, rtol, atol) == (made <= atol + rtol * abs(expected))


@given(
    shape=st.lists(st.integers(1, 6), min_size=0, max_size=3),
    seed=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    rtol=st.sampled_from([0.0, 1e-3, 8e-3]),
    atol=st.sampled_from([0.0, 1e-5, 1e-2]),
    data=st.data(),
)
def test_property_8_equal_near_and_one_element_off(shape, seed, dtype, rtol, atol, data):
    """Feature: benchmark, Property 8: equal or within tolerance passes; one element outside or NaN fails."""
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    assert verify(expected, expected.clone(), 0.0, 0.0)
    slack = atol + rtol * expected.double().abs()
    near = (
        expected.double()
        + slack * (2 * torch.rand(shape, dtype=torch.float64, generator=generator) - 1) * 0.99
    )
    assert verify(near, expected, rtol, atol)
    place = data.draw(st.integers(0, expected.numel() - 1))
    sign = data.draw(st.sampled_from([-1.0, 1.0]))
    far = near.clone()
    far.view(-1)[place] = (expected.double() + sign * (1.01 * slack + 1e-6)).view(-1)[place]
    assert not verify(far, expected, rtol, atol)
    hole = near.clone()
    hole.view(-1)[place] = NAN
    assert not verify(hole, expected, rtol, atol)
    assert not verify(near, hole.to(dtype), rtol, atol)
    assert verify(hole, hole.clone(), rtol, atol)


@pytest.mark.parametrize(
    ("actual", "expected", "equal"),
    [
        ([NAN, 1.0], [NAN, 1.0], True),
        ([NAN, 1.0], [0.0, 1.0], False),
        ([0.0, 1.0], [NAN, 1.0], False),
        ([INF, 1.0], [INF, 1.0], True),
        ([INF, 1.0], [-INF, 1.0], False),
        ([INF, 1.0], [NAN, 1.0], False),
        ([1e300, 1.0], [INF, 1.0], False),
        ([INF, 1.0], [1.0, 1.0], False),
        ([-0.0, 1.0], [0.0, 1.0], True),
    ],
)
def test_nan_and_infinity_must_match(actual, expected, equal):
    a, e = torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    assert bench.verify(a, e, rtol=1.0, atol=1e9) is equal
    if equal:
        assert assert_no_worse_than_eager(a, e, e).num_nonfinite_mismatch == 0
    else:
        for check in (lambda: assert_close_spec(a, e, 1.0, 1e9), lambda: assert_no_worse_than_eager(a, e, e)):
            with pytest.raises(AssertionError, match="one side only"):
                check()


def test_verify_refuses_what_it_cannot_judge():
    ones = torch.ones(2)
    for wrong in ([1.0, 1.0], 1.0, ones.numpy()):
        with pytest.raises(TypeError, match=r"verify: actual must be a Tensor, got (list|float|ndarray)"):
            verify(wrong, ones, 0.0, 0.0)
        with pytest.raises(TypeError, match="verify: expected must be a Tensor"):
            verify(ones, wrong, 0.0, 0.0)
    for rtol, atol, name in (
        (-1.0, 0.0, "rtol"),
        (NAN, 0.0, "rtol"),
        (0.0, -1.0, "atol"),
        (0.0, NAN, "atol"),
    ):
        with pytest.raises(ValueError, match=f"verify: {name} must be at least 0"):
            verify(ones, ones, rtol, atol)


def test_shape_and_dtype_class_must_agree():
    ones = torch.ones(2, 3, dtype=torch.float64)
    for other in (ones.view(3, 2), ones.view(1, 2, 3), ones[:, :1], ones.int(), ones.bool()):
        assert not verify(other, ones, rtol=1.0, atol=1.0)
        with pytest.raises(AssertionError, match=r"shape|dtype"):
            assert_close_spec(other, ones, 1.0, 1.0)
        with pytest.raises(AssertionError, match=r"shape|dtype"):
            assert_no_worse_than_eager(other, ones, ones)
    # A narrower floating dtype is the usual case, the reference being float64; an exact one is asked for.
    assert verify(ones.half(), ones, 0.0, 0.0)
    with pytest.raises(AssertionError, match=r"torch\.float16, expected torch\.float32"):
        assert_close_spec(ones.half(), ones, 0.0, 0.0, dtype=torch.float32)
    with pytest.raises(AssertionError, match="eager result: dtype"):
        assert_no_worse_than_eager(ones.half(), ones, ones.float())
    with pytest.raises(AssertionError, match="must be float64"):
        assert_no_worse_than_eager(ones.half(), ones.float(), ones.half())
    with pytest.raises(AssertionError, match="complex"):
        assert_close_spec(ones.to(torch.complex64), ones.to(torch.complex64), 0.0, 0.0)


def test_a_wrong_tail_that_allclose_accepts_is_caught():
    reference = random_rows()
    eager = reference.bfloat16()
    wrong = eager.clone()
    wrong.view(-1)[-100:] = 0  # the last vector of the last row never written
    torch.testing.assert_close(wrong.double(), reference, rtol=1.6e-2, atol=2e-2)
    assert_no_worse_than_eager(eager, reference, eager)
    with pytest.raises(AssertionError, match="run of 1024"):
        assert_no_worse_than_eager(wrong, reference, eager)
    with pytest.raises(AssertionError, match=r"100 of 2097152 .* first at \[4095, 412\]"):
        assert_close_spec(wrong, reference, rtol=8e-3, atol=1e-8)


def test_one_wrong_element_among_two_million_is_caught():
    reference = random_rows()
    eager = reference.bfloat16()
    wrong = eager.clone()
    place = int(
        (reference.view(-1) - 1 / 512).abs().argmin()
    )  # an element of the usual size, a 100th of the largest
    wrong.view(-1)[place] *= 2
    torch.testing.assert_close(wrong.double(), reference, rtol=1.6e-2, atol=5e-3)
    with pytest.raises(AssertionError, match=r"max .error"):
        assert_no_worse_than_eager(wrong, reference, eager)
    # The smallest elements are below the largest rounding error: only the relative tolerance sees them.
    small = eager.clone()
    small.view(-1)[reference.argmin()] *= 2
    assert_no_worse_than_eager(small, reference, eager)
    with pytest.raises(AssertionError, match="1 of 2097152"):
        assert_close_spec(small, reference, rtol=8e-3, atol=1e-8)


def test_a_second_rounding_passes_and_a_third_of_the_digits_lost_does_not():
    reference = random_rows(64)
    eager = reference.half()
    once_more = (reference * 3).half().div(3).half()
    assert_no_worse_than_eager(once_more, reference, eager)
    with pytest.raises(AssertionError, match="relative norm"):
        assert_no_worse_than_eager(reference.bfloat16().half(), reference, eager)


def test_an_exact_eager_result_leaves_one_rounding():
    reference = torch.ones(100, dtype=torch.float64)
    exact = torch.ones(100)
    one_ulp_below = torch.full((100,), 1 - 2.0**-24)
    assert_no_worse_than_eager(one_ulp_below, reference, exact)
    with pytest.raises(AssertionError, match="eager"):
        assert_no_worse_than_eager(one_ulp_below, reference, exact, atol=0.0)
    with pytest.raises(AssertionError, match="eager"):
        assert_no_worse_than_eager(torch.full((100,), 1 - 2.0**-22), reference, exact)


def test_integers_are_compared_as_integers():
    large = torch.tensor([2**62, 2**53])
    assert verify(large, large.clone(), 0.0, 0.0)
    assert not verify(large + 1, large, 0.0, 0.0)  # both round to the same float64
    assert verify(torch.tensor([5, 7]), torch.tensor([6, 7]), 0.0, 1.0)
    assert not verify(torch.tensor([True, False]), torch.tensor([True, True]), 0.0, 0.0)


def test_atol_per_element():
    expected = torch.zeros(2, 3, dtype=torch.float64)
    actual = torch.tensor([[0.0, 0.1, 0.2]]).expand(2, 3)
    assert_close_spec(actual, expected, 0.0, torch.tensor([0.0, 0.15, 0.25]))
    with pytest.raises(AssertionError, match=r"2 of 6 .* first at \[0, 2\]"):
        assert_close_spec(actual, expected, 0.0, torch.tensor([0.0, 0.15, 0.15]))


def test_the_measurement_and_its_chunks(monkeypatch):
    expected = torch.arange(1, 5001, dtype=torch.float64)
    actual = expected.clone()
    actual[4500] += 3.0
    whole = compare(actual, expected)
    assert (whole.numel, whole.num_bad, whole.max_abs, whole.max_expected) == (5000, 1, 3.0, 5000.0)
    assert whole.first_bad == ((4500,), 4504.0, 4501.0)
    assert whole.norm == pytest.approx(3.0 / float(expected.norm()))
    assert whole.worst_segment == pytest.approx(3.0 / float(expected[4096:].norm()))
    monkeypatch.setattr(verification, "_CHUNK", 2048)
    assert str(compare(actual, expected)) == str(whole)


def test_empty_and_strided_and_narrow_tensors():
    assert verify(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64), 0.0, 0.0)
    assert not verify(torch.empty(0, 3), torch.empty(3, 0), 0.0, 0.0)
    x = torch.randn(6, 8)
    assert verify(x.t(), x.t().contiguous().double(), 0.0, 0.0)
    assert not verify(x.t(), x.t().contiguous().double().flip(0), 0.0, 0.0)
    quantised = torch.tensor([448.0, NAN, -0.5]).to(torch.float8_e4m3fn)
    assert verify(quantised, torch.tensor([448.0, NAN, -0.5], dtype=torch.float64), 0.0, 0.0)


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30),
    index=st.integers(0, 29),
    rtol=st.floats(0, 0.1),
    atol=st.floats(1e-3, 1.0),
    outside=st.booleans(),
)
def test_verify_on_any_values(values, index, rtol, atol, outside):
    """Feature: benchmark suite, Property 8: |a - e| <= atol + rtol |e| decides, element by element."""
    expected = torch.tensor(values, dtype=torch.float64)
    actual = expected.clone()
    at = index % len(values)
    actual[at] += (atol + rtol * abs(float(expected[at]))) * (1.01 if outside else 0.99)
    assert verify(actual, expected, rtol, atol) is not outside
