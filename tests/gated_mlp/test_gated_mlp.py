"""gated_mlp and its backward against the float64 reference (docs/semantics/gated_mlp.md §3.2, §3.5)."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from htree_ops.ops.gated_mlp import COMPILED_CONFIGS, FusedGatedMLP, gated_mlp
from htree_ops.reference import gated_mlp as reference
from tests.support.cases import case_id, normal
from tests.support.compare import assert_close_spec
from tests.support.devices import poisoned_memory
from tests.support.gated_mlp_cases import (
    ACTIVATIONS,
    CASES,
    DTYPES,
    LAYOUT_CASES,
    RTOL,
    SIDES,
    GatedMLPCase,
    assert_forward,
    assert_gradients,
)
from tests.support.layouts import LAYOUTS

op = torch.ops.htree.gated_mlp
op_forward = torch.ops.htree._gated_mlp_forward
op_backward = torch.ops.htree.gated_mlp_backward
op_saved_backward = torch.ops.htree._gated_mlp_saved_backward


def on_device(case: GatedMLPCase, device: str) -> GatedMLPCase:
    """The case itself, or in fp32 on a GPU, which has no kernels for fp64."""
    if device == "cuda" and case.dtype == torch.float64:
        return replace(case, dtype=torch.float32)
    return case


#: Gradients beyond the range of fp16 have no bound to test.
BACKWARD = [c for c in [*CASES, *LAYOUT_CASES] if c.dtype != torch.float16 or c.magnitude <= 10]


def dy_for(case: GatedMLPCase, device: str) -> Tensor:
    return LAYOUTS[case.layout](case.make_dy(device, seed=77))


# ---- the reference itself


def test_reference_against_torch():
    z = torch.linspace(-9, 9, 181, dtype=torch.float64)
    assert_close_spec(reference.activate(z, "silu"), torch.nn.functional.silu(z), 1e-14, 1e-300)
    assert_close_spec(reference.activate(z, "gelu"), torch.nn.functional.gelu(z), 1e-12, 1e-15)
    for activation in ACTIVATIONS:
        leaf = z.clone().requires_grad_()
        (slope,) = torch.autograd.grad(reference.activate(leaf, activation).sum(), leaf)
        assert_close_spec(reference.activation_slope(z, activation), slope, 1e-11, 1e-13)


# ---- values


@pytest.mark.parametrize("case", [*CASES, *LAYOUT_CASES], ids=case_id)
def test_forward(case, device, nan_memory):
    case = on_device(case, device)
    inputs = case.make_inputs(device)
    out = op(*inputs)
    assert out.is_contiguous()
    assert out.shape == (*case.rows, case.inner)
    assert_forward(out, inputs)
    assert torch.equal(op(*inputs), out), "two runs must agree bit for bit"


@pytest.mark.parametrize("case", BACKWARD, ids=case_id)
def test_backward(case, device, nan_memory):
    case = on_device(case, device)
    inputs = case.make_inputs(device)
    dy = dy_for(case, device)
    again = op_backward(dy, *inputs)
    assert_gradients(again, dy, inputs, saved=False)
    out, gate, up = op_forward(*inputs)
    assert_forward(out, inputs)
    gate, up = LAYOUTS[case.layout](gate), LAYOUTS[case.layout](up)
    saved = op_saved_backward(dy, gate, up, *inputs)
    assert_gradients(saved, dy, inputs)
    for first, second in zip(saved, op_saved_backward(dy, gate, up, *inputs), strict=True):
        assert first.is_contiguous()
        assert torch.equal(first, second), "two runs must agree bit for bit"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_kept_products_are_the_rounded_ones(dtype, device):
    x, gate_weight, up_weight, *_ = GatedMLPCase(
        name="kept", dtype=dtype, rows=(150,), inner=200, hidden=96
    ).make_inputs(device)
    for act_on in SIDES:
        _, gate, up = op_forward(x, gate_weight, up_weight, "gelu", act_on)
        g, u = reference.products(x, gate_weight, up_weight)
        unit = torch.finfo(dtype).eps / 2
        assert_close_spec(gate, g, unit * 1.01, 1e-5, dtype=dtype)
        assert_close_spec(up, u, unit * 1.01, 1e-5, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [3, 20, 50, 200])
def test_special_values_stay_in_their_row(rows, activation, dtype, device):
    case = on_device(
        GatedMLPCase(name="nan", dtype=dtype, rows=(rows,), inner=80, hidden=72, activation=activation),
        device,
    )
    x, *rest = case.make_inputs(device)
    clean = op(x, *rest)
    x[1, 5] = math.nan
    x[2, 7] = math.inf
    out = op(x, *rest)
    assert out[1].isnan().all()
    assert not out[2].isfinite().all()
    assert torch.equal(out[0], clean[0])
    assert torch.equal(out[3:], clean[3:])
    spoilt = rest[0].clone()
    spoilt[4, 0] = math.nan
    out = op(case.make_inputs(device)[0], spoilt, *rest[1:])
    assert out[:, 4].isnan().all()
    others = [i for i in range(80) if i != 4]
    assert torch.equal(out[:, others], clean[:, others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_falls_to_zero(dtype, device):
    """The far tail of the normal distribution is 0, so that gelu(-inf) is NaN and no large factor revives it."""
    dtype = torch.float32 if device == "cuda" and dtype == torch.float64 else dtype
    far = [-6e4] if dtype == torch.float16 else [-6e4, -1e20, -3e38]
    z = torch.tensor([*far, -300, -15, -10, -9, -8.5, -8.4, -3, 0, 9, 6e4, math.inf, -math.inf, math.nan])
    z = z.to(device, dtype)
    one = torch.ones(1, 1, dtype=dtype, device=device)
    leaf = z[:, None].clone().requires_grad_()
    y = op(one, torch.ones_like(leaf), leaf, "gelu")
    (slope,) = torch.autograd.grad(y.sum(), leaf)
    y, slope = y.detach()[0].double(), slope[:, 0].double()
    assert y[-3:].isnan().tolist() == [False, True, True]
    assert y[-3] == math.inf
    z, y, slope = z[:-3].double(), y[:-3], slope[:-3]
    # absolutely: the tail beyond z = -8.5, where nothing is above 1e-15
    assert_close_spec(y, reference.activate(z, "gelu"), RTOL[dtype], 2e-15)
    assert_close_spec(slope, reference.activation_slope(z, "gelu"), RTOL[dtype], 1e-13)
    assert bool((y[z < -15] == 0).all())
    tail = op(one, 1 / one * 6e4, leaf.detach()[len(far) - 1 :][:1], "gelu")
    assert bool((tail == 0).all())


def test_half_projections_beyond_the_range_are_kept_as_infinities(device):
    """The result and the gradients that recompute g are finite; the gradients from the kept g are not."""
    x = torch.full((1, 4), 100.0, dtype=torch.float16, device=device)
    gate = torch.full((1, 4), 300.0, dtype=torch.float16, device=device)
    up = torch.tensor([[1e-5, 0, 0, 0]], dtype=torch.float16, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, gate, up)]
    y = op(*leaves)
    assert bool(y.isfinite().all())
    dy = torch.full_like(y, 1e-3)
    assert not bool(torch.autograd.grad(y, leaves, dy)[0].isfinite().any())
    again = op_backward(dy, x, gate, up)
    assert all(bool(t.isfinite().all()) for t in again)
    assert_gradients(again, dy, (x, gate, up, "silu", "up"), saved=False)


def test_half_overflows_to_infinity(device):
    x = torch.full((3, 64), 65504.0, dtype=torch.float16, device=device)
    weight = torch.ones(8, 64, dtype=torch.float16, device=device)
    assert (op(x, weight, weight) == math.inf).all()
    assert (op(x, -weight, weight) == -math.inf).all()
    assert (op(x, weight, -weight) == 0).all()


def test_act_on_gate_is_the_exchange_of_the_weights(device):
    for dtype in (torch.float32, torch.bfloat16):
        case = GatedMLPCase(name="swap", dtype=dtype, rows=(140,), inner=136, hidden=64)
        x, gate, up, *_ = case.make_inputs(device)
        assert torch.equal(op(x, gate, up, "silu", "gate"), op(x, up, gate, "silu", "up"))


# ---- properties

sizes = st.tuples(st.integers(1, 150), st.integers(1, 200), st.integers(1, 300))
seeds = st.integers(0, 2**31 - 1)


@given(
    size=sizes,
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    act_on=st.sampled_from(SIDES),
)
def test_property_2_gated_mlp(device, size, seed, dtype, activation, act_on):
    """Feature: fused operators, Property 2: the gated MLP matches the formula."""
    rows, inner, hidden = size
    case = on_device(
        GatedMLPCase(
            name="p2",
            dtype=dtype,
            rows=(rows,),
            inner=inner,
            hidden=hidden,
            activation=activation,
            act_on=act_on,
        ),
        device,
    )
    inputs = case.make_inputs(device, seed)
    with poisoned_memory():
        assert_forward(op(*inputs), inputs)


@given(
    size=sizes,
    eights=st.booleans(),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
)
def test_property_gradients(device, size, eights, seed, dtype, activation):
    rows, inner, hidden = size
    if eights:  # rows of whole 16 bytes, which Hopper's kernels want
        inner, hidden = (inner + 7) // 8 * 8, (hidden + 7) // 8 * 8
    case = on_device(
        GatedMLPCase(
            name="grad", dtype=dtype, rows=(rows,), inner=inner, hidden=hidden, activation=activation
        ),
        device,
    )
    inputs = case.make_inputs(device, seed)
    dy = dy_for(case, device)
    leaves = [t.requires_grad_() for t in inputs[:3]]
    with poisoned_memory():
        out = op(*leaves, *inputs[3:])
        gradients = torch.autograd.grad(out, leaves, dy)
    assert_gradients(gradients, dy, [t.detach() if isinstance(t, Tensor) else t for t in inputs])


@given(rows=st.integers(2, 40), seed=seeds, dtype=st.sampled_from(DTYPES[:3]), data=st.data())
def test_property_rows_are_independent(device, rows, seed, dtype, data):
    """The bits of a row do not depend on the other rows of the same call."""
    row = data.draw(st.integers(0, rows - 1))
    case = GatedMLPCase(name="rows", dtype=dtype, rows=(rows,), inner=70, hidden=100)
    x, *rest = case.make_inputs(device, seed)
    whole = op(x, *rest)[row]
    x[:row] = math.nan
    x[row + 1 :] = math.inf
    assert torch.equal(op(x, *rest)[row], whole)


DIMS_3 = [(1, 1, 2048, 5632), (64, 1, 2048, 5632), (1, 40, 4096, 1408), (1, 8192, 2048, 704)]
#: B and S of the stated ranges with B·S <= 2^15.
BATCHES_3 = [(b, s) for b in (1, 2, 7, 64) for s in (1, 13, 128, 511)] + [(1, 8192), (3, 8192), (4, 8192)]


def assert_spread(out: Tensor, inputs: tuple, num_rows: int, num_columns: int) -> None:
    """Checks rows and columns spread over the result against the reference."""
    x, gate, up, *options = inputs
    x, out = x.flatten(0, -2), out.flatten(0, -2)
    rows, columns = (
        torch.linspace(0, size - 1, min(most, size), device=x.device).long()
        for size, most in ((len(x), num_rows), (len(gate), num_columns))
    )
    assert_forward(out[rows][:, columns], (x[rows], gate[columns], up[columns], *options))


@pytest.mark.parametrize("dims", DIMS_3, ids=str)
def test_property_3_corners(dims, device):
    """Feature: fused operators, Property 3: the stated ranges of B, S, Hd, I; the large ones on the GPU."""
    batch, length, hidden, inner = dims
    inputs = GatedMLPCase(
        name="p3", dtype=torch.bfloat16, rows=(batch, length), inner=inner, hidden=hidden
    ).make_inputs(device)
    assert_spread(op(*inputs), inputs, 64, inner)


@pytest.mark.gpu
@given(
    size=st.sampled_from(BATCHES_3),
    hidden=st.sampled_from([2048, 4096, 8192]),
    inner=st.sampled_from([5632, 11264, 22528]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    activation=st.sampled_from(ACTIVATIONS),
    seed=seeds,
)
def test_property_3_dimensions(size, hidden, inner, dtype, activation, seed):
    """Feature: fused operators, Property 3: checked on rows and columns spread over the result."""
    inputs = GatedMLPCase(
        name="p3", dtype=dtype, rows=size, inner=inner, hidden=hidden, activation=activation
    ).make_inputs("cuda", seed)
    assert_spread(op(*inputs), inputs, 24, 100)


# ---- configurations


@pytest.mark.parametrize("config", COMPILED_CONFIGS, ids=str)
@pytest.mark.parametrize("rows", [1, 70, 300])
def test_every_configuration_computes_the_same(rows, config, device):
    for dtype in (torch.bfloat16, torch.float16):
        case = GatedMLPCase(
            name="config", dtype=dtype, rows=(rows,), inner=330, hidden=264, activation="gelu"
        )
        inputs = case.make_inputs(device)
        assert_forward(op(*inputs, list(config)), inputs)
        keys = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"), config, strict=True))
        assert torch.equal(gated_mlp(*inputs, **keys), op(*inputs, list(config)))


@pytest.mark.gpu
def test_configurations_need_their_kernels():
    x = torch.ones(4, 8, device="cuda")
    with pytest.raises(NotImplementedError, match="fp16 and bf16 on sm_90"):
        op(x, x, x, "silu", "up", list(COMPILED_CONFIGS[0]))


# ---- module


def test_module(device):
    torch.manual_seed(3)
    layer = FusedGatedMLP(64, 96, "gelu", device=device)
    assert 0.019 < float(layer.gate_weight.detach().std()) < 0.021
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "gate_weight": (96, 64),
        "up_weight": (96, 64),
    }
    x = normal((2, 5, 64), torch.float32, device, seed=1)
    with torch.no_grad():
        assert torch.equal(layer(x), op(x, layer.gate_weight, layer.up_weight, "gelu"))
    other = FusedGatedMLP(64, 96, "gelu", device=device)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    layer(x).sum().backward()
    assert layer.gate_weight.grad is not None
    assert repr(layer) == "FusedGatedMLP(64, 96, activation=gelu, act_on=up)"
    assert FusedGatedMLP(64, 96, device="meta")(torch.empty(2, 3, 64, device="meta")).shape == (2, 3, 96)
