"""Scales, codes and back against a reference that searches the nearest code (docs/semantics/fp8.md §3.3, §3.5)."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from htree_ops.ops.fp8 import (
    FP8Format,
    fp8_compute_scale,
    fp8_dequantize,
    fp8_fake_quant,
    fp8_quantize,
    fp8_scale_inv,
)
from htree_ops.reference import fp8 as reference
from tests.support.cases import case_id, normal
from tests.support.devices import poisoned_memory
from tests.support.fp8_cases import (
    CASES,
    DTYPES,
    LAYOUT_CASES,
    codes_of,
    eager_quantize,
    every_pattern,
    round_trip_bound,
)
from tests.support.graphs import assert_stream_and_graph
from tests.support.layouts import LAYOUTS

compute_scale = torch.ops.htree.fp8_compute_scale
quantize = torch.ops.htree.fp8_quantize
dequantize = torch.ops.htree.fp8_dequantize
fake_quant = torch.ops.htree.fp8_fake_quant
fake_backward = torch.ops.htree._fp8_fake_quant_backward

HALF_TYPES = (torch.float16, torch.bfloat16)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, sign of zero included; NaN for NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    same = (actual == expected) & (actual.signbit() == expected.signbit())
    assert bool((same | (actual.isnan() & expected.isnan())).all())


def check(x: torch.Tensor, scale, granularity: str, dim: int, block: int) -> None:
    """Checks every op on one problem."""
    grouping = (granularity, dim, block)
    codes, used, num_overflow = reference.quantize(x, scale, *grouping)
    q, s, n = quantize(x, scale, *grouping)
    assert q.dtype == torch.float8_e4m3fn
    assert q.is_contiguous()
    assert s.is_contiguous()
    assert n.dtype == torch.int32
    assert torch.equal(s, used)
    assert scale is None or s.data_ptr() != scale.data_ptr() or not s.numel()
    assert torch.equal(codes_of(q), codes)
    assert int(n) == int(num_overflow)
    if scale is None:
        assert torch.equal(compute_scale(x, *grouping), used)
    for dtype in DTYPES:
        assert_same(dequantize(q, s, dtype, block), reference.dequantize(codes, used, *grouping, dtype))
    assert_same(fake_quant(x, scale, *grouping), reference.fake_quant(x, scale, *grouping))
    dy = torch.ones_like(x, memory_format=torch.contiguous_format)
    dx = fake_backward(dy, x, used, *grouping)
    assert_same(dx, reference.fake_quant_backward(dy, x, used, *grouping))


# ---- the reference itself


def test_the_reference_codes_are_those_of_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    finite = values.isfinite()
    assert torch.equal(reference.encode(values[finite]), codes[finite])
    assert torch.equal(reference.code_values(), values[:127])
    assert reference.dequantize(codes[~finite], torch.ones(())).isnan().all()
    fine = torch.linspace(-448, 448, 400001, dtype=torch.float64)
    assert torch.equal(reference.encode(fine.float()), codes_of(fine.float().to(torch.float8_e4m3fn)))


def test_ties_go_to_the_even_code():
    values = reference.code_values()
    middle = (values[1:] + values[:-1]) / 2
    even = torch.arange(126) + torch.arange(126) % 2
    assert torch.equal(reference.encode(middle).int(), even.int())
    assert torch.equal(codes_of(quantize(middle.float(), torch.ones(()))[0]).int(), even.int())


def test_the_format():
    info = torch.finfo(torch.float8_e4m3fn)
    assert FP8Format() == FP8Format(4, 3, info.max, info.smallest_normal, info.smallest_normal / 8)
    assert FP8Format.max_value == 448.0
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert tuple(values.isnan().nonzero().flatten().tolist()) == FP8Format.nan_codes
    assert bool(values.isinf().any()) == FP8Format.has_infinity


# ---- values


@pytest.mark.parametrize("case", [*CASES, *LAYOUT_CASES], ids=case_id)
def test_case(case, device, nan_memory):
    check(*case.make_inputs(device))


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, 300.0, 2.0**-126, 2.0**127, 3.0e-35, 1.7e34])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_every_half_value(granularity, scale, dtype, device):
    """All 2^16 values: as one tensor, as 2^8 rows of different magnitudes, and in blocks of 128."""
    x = every_pattern(dtype, device).view(256, 256)
    if scale is None:
        check(x, None, granularity, -1, 128)
        return
    shape = reference.scale_shape(x.shape, granularity, -1, 128)
    check(x, torch.full(shape, scale, device=device), granularity, -1, 128)


def test_fp32_on_and_beside_every_boundary(device):
    """Codes, midpoints and limits, each with its neighbours in fp32 and with both signs."""
    values = reference.code_values()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2, torch.tensor([464.0, 480.0, 1e38]))).float()
    near = torch.cat([torch.nextafter(points, torch.tensor(way)) for way in (-math.inf, math.inf)])
    tiny = torch.tensor([1e-45, 2.0**-126, 2.0**-10, 2.0**-149])
    x = torch.cat((points, near, tiny))
    x = torch.cat((x, -x)).to(device)
    check(x, torch.ones((), device=device), "tensor", -1, 128)
    check(x, None, "tensor", -1, 128)
    check(x, None, "channel", 0, 128)


def test_signed_zeros_and_special_values(device):
    x = torch.tensor(
        [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 464.0, 464.01, -449.0], device=device
    )
    q, _, n = quantize(x, torch.ones((), device=device))
    codes = codes_of(q)
    assert codes[2:4].bitwise_and(0x7F).eq(0x7F).all()
    assert codes.tolist()[:2] == [0x00, 0x80]
    assert codes.tolist()[4:] == [0x7E, 0xFE, 0x7E, 0x7E, 0xFE]
    assert int(n) == 3


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_keep_out_of_the_scale(dtype, granularity, device):
    for cols in (64, 8192, 40000):
        x = normal((4, cols), dtype, device, seed=1)
        clean = compute_scale(x, granularity)
        x[0, 3] = math.nan
        x[1, 0], x[2, cols - 1] = math.inf, -math.inf
        wanted = reference.compute_scale(x, granularity)
        assert torch.equal(compute_scale(x, granularity), wanted)
        q, s, n = quantize(x, None, granularity)
        assert torch.equal(s, wanted)
        assert int(n) == 2
        assert int(q.float().isnan().sum()) == 1
        assert granularity == "tensor" or torch.equal(clean[3], wanted[3])
    nothing = torch.full((4, 64), math.nan, dtype=dtype, device=device)
    assert bool((compute_scale(nothing, granularity) == 1).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_magnitudes(dtype, device):
    info = torch.finfo(dtype)
    for value in (info.max, info.smallest_normal, info.smallest_normal * info.eps):
        x = torch.full((2, 9), value, dtype=dtype, device=device)
        check(x, None, "tensor", -1, 128)
        check(x, None, "channel", -1, 128)
    assert torch.equal(
        quantize(torch.full((3,), 65504.0, dtype=torch.float16, device=device))[0].float(),
        torch.full((3,), 448.0, device=device),
    )


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_a_computed_scale_overflows_nothing(granularity, device):
    """fl(max · fl(448 / max)) is above 448 for one tensor in ten: that must not count."""
    x = normal((2000, 24), torch.float32, device, seed=3)
    n = quantize(x, None, granularity)[2]
    assert int(n) == 0
    rows = compute_scale(x, "channel")
    assert bool(((x.abs().amax(1, keepdim=True) * rows) > 448).any())


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_many_overflows_are_counted(granularity, device):
    for shape in ((300, 1024), (7, 333)):
        x = normal(shape, torch.bfloat16, device, seed=4)
        scale = torch.full(reference.scale_shape(x.shape, granularity, -1, 128), 464.0, device=device)
        count = int((x.float().abs() * 464.0 > 464.0).sum())
        assert int(quantize(x, scale, granularity)[2]) == count > 0


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("block", [2**63 - 1, 2**63 - 4, 2**62, 9])
def test_a_block_longer_than_the_dim_is_a_channel(block, dim, device):
    x = normal((2, 4, 8), torch.float32, device, seed=7)
    scale = fp8_compute_scale(x, "channel", dim)
    for number in (None, scale, 3.0):
        wanted = fp8_quantize(x, number, "channel", dim)
        result = fp8_quantize(x, number, "block", dim, block)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(result, wanted, strict=True))
        fake = fp8_fake_quant(x, result[1], "block", dim, block)
        assert torch.equal(fp8_dequantize(*result[:2], torch.float32, block), fake)
    assert torch.equal(fp8_compute_scale(x, "block", dim, block), scale)
    assert fp8_compute_scale(x.to("meta"), "block", dim, block).shape == scale.shape
    assert fp8_compute_scale(x[:, :, :0], "block", -1, block).shape == (2, 4, 0)


def test_eager_composition_agrees(device):
    for grouping in (("tensor", -1, 128), ("channel", -1, 128), ("channel", 0, 128), ("block", -1, 64)):
        x = normal((32, 256), torch.bfloat16, device, seed=5)
        for ours, eager in zip(quantize(x, None, *grouping), eager_quantize(x, None, *grouping), strict=True):
            assert torch.equal(ours.float(), eager.float())


def test_scale_inverse(device):
    scale = compute_scale(normal((4, 32), torch.float32, device, 6), "channel")
    assert torch.equal(fp8_scale_inv(scale), 1 / scale)


def test_results_are_the_same_bits_twice(device):
    x = normal((513, 1027), torch.bfloat16, device, seed=7)
    for grouping in (("tensor", -1, 128), ("channel", 0, 128), ("block", -1, 100)):
        first, second = quantize(x, None, *grouping), quantize(x, None, *grouping)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(first, second, strict=True))


# ---- properties

seeds = st.integers(0, 2**31 - 1)
dtypes = st.sampled_from(DTYPES)
groupings = st.tuples(
    st.sampled_from(("tensor", "channel", "block")), st.integers(-3, 2), st.integers(1, 300)
)
magnitudes = st.integers(-10, 10).map(lambda k: 2.0**k)


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 400)),
    grouping=groupings,
    seed=seeds,
    dtype=dtypes,
    magnitude=magnitudes,
    layout=st.sampled_from(sorted(LAYOUTS)),
    scale=st.none() | st.floats(2.0**-20, 2.0**20, width=32),
)
def test_property_equals_the_reference(device, shape, grouping, seed, dtype, magnitude, layout, scale):
    """Feature: fp8, codes, scales and counts of any shape, layout and grouping."""
    x = LAYOUTS[layout](normal(shape, dtype, device, seed, magnitude))
    used = None
    if scale is not None:
        used = torch.full(reference.scale_shape(x.shape, *grouping), scale, device=device)
    with poisoned_memory():
        check(x, used, *grouping)


@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 700),
    grouping=st.tuples(
        st.sampled_from(("tensor", "channel", "block")), st.integers(-2, 1), st.integers(1, 300)
    ),
    seed=seeds,
    dtype=dtypes,
    magnitude=magnitudes,
)
def test_property_5_round_trip(device, rows, cols, grouping, seed, dtype, magnitude):
    """Feature: fp8, Property 5: a value comes back within u8 of itself, or half a subnormal of its group."""
    x = normal((rows, cols), dtype, device, seed, magnitude)
    q, scale, n = quantize(x, None, *grouping)
    assert int(n) == 0
    largest = reference.expand_scale(448.0 / scale.double(), x.shape, *grouping)
    back = dequantize(q, scale, dtype, grouping[2])
    assert bool(((back.double() - x.double()).abs() <= round_trip_bound(x, largest)).all())


@given(seed=seeds, dtype=dtypes, magnitude=magnitudes, power=st.integers(-10, 10))
def test_property_quantising_twice_changes_nothing(device, seed, dtype, magnitude, power):
    """A dequantised code quantises to itself for scales that are powers of two."""
    s = torch.full((), 2.0**power, device=device)
    q = quantize(normal((5, 130), dtype, device, seed, magnitude), s)[0]
    again = quantize(dequantize(q, s, torch.float32), s)[0]
    assert torch.equal(codes_of(again), codes_of(q))


@given(seed=seeds, power=st.integers(-8, 8), dtype=dtypes)
def test_property_powers_of_two_leave_codes_alone(device, seed, power, dtype):
    """A factor 2^k on x divides the computed scale by it and changes no code."""
    x = normal((6, 200), dtype, device, seed).clamp(2.0**-3, 4.0)
    for grouping in (("tensor", -1, 128), ("channel", -1, 128)):
        q, s, _ = quantize(x, None, *grouping)
        scaled_q, scaled_s, _ = quantize(x * 2.0**power, None, *grouping)
        assert torch.equal(codes_of(q), codes_of(scaled_q))
        assert torch.equal(scaled_s, s * 2.0**-power)


@given(seed=seeds, dtype=dtypes)
def test_property_codes_are_monotone(device, seed, dtype):
    x = normal((500,), dtype, device, seed).sort().values
    q, _, _ = fp8_quantize(x)
    assert bool((q.float().diff() >= 0).all())


# ---- sizes and streams of a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "grouping"),
    [
        ((2**31 // 8192 + 3, 8192), ("tensor", -1, 128)),
        ((2**31 // 8192 + 3, 8192), ("channel", -1, 128)),
        ((2**31 // 1000 + 3, 1001), ("channel", -1, 128)),
        ((2, 2**30 + 8), ("channel", -1, 128)),
        ((2**31 // 4096 + 3, 4096), ("channel", 0, 128)),
    ],
)
def test_more_than_2_31_elements(shape, grouping):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x[-1, -1] = 5000.0
    q, s, n = quantize(x, None, *grouping)
    assert int(n) == 0
    assert torch.equal(s, compute_scale(x, *grouping))
    for part in (slice(0, 2), slice(shape[0] // 2, shape[0] // 2 + 1), slice(shape[0] - 2, shape[0])):
        used = reference.expand_scale(s, x.shape, *grouping)[part, -5000:]
        block = x[part, -5000:]
        assert torch.equal(codes_of(q[part, -5000:]), reference.encode(block.float() * used))
        back = dequantize(q, s, torch.bfloat16)[part, -5000:]
        assert torch.equal(back, (q[part, -5000:].float() / used).bfloat16())
    del back
    assert float(s.flatten()[-1]) == pytest.approx(448 / 4992)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [-1, 0])
def test_more_than_2_31_overflows(dim):
    """The count stops at the largest int32; a wrapped count of 2^32 would be 0."""
    x = torch.full((2**19, 2**13), 600.0, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones((2**19, 1) if dim == -1 else (1, 2**13), device="cuda")
    assert int(quantize(x, scale, "channel", dim, 128)[2]) == 2**31 - 1


@pytest.mark.gpu
def test_stream_and_graph():
    x = torch.randn(1000, 2048, device="cuda", dtype=torch.bfloat16)
    groupings = (("tensor", -1, 128), ("channel", -1, 128), ("block", -1, 128), ("channel", 0, 128))
    assert_stream_and_graph(lambda: [[y.float() for y in quantize(x, None, *g)] for g in groupings], x)
