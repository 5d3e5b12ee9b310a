"""hadamard_transform, its in-place form and grouped_hadamard against the float64 reference (docs/semantics §4.1)."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.hadamard import (
    HadamardTransform,
    grouped_hadamard,
    hadamard_transform,
    hadamard_transform_,
)
from htree_ops.reference import hadamard as reference
from tests.support.cases import case_id, normal
from tests.support.compare import assert_close_spec
from tests.support.compilers import BACKENDS
from tests.support.devices import poisoned_memory
from tests.support.graphs import assert_stream_and_graph
from tests.support.hadamard_cases import (
    CASES,
    DTYPES,
    GROUPED_CASES,
    LAYOUT_CASES,
    LENGTHS,
    butterflies,
    grouped_tolerance,
    tolerance,
)
from tests.support.layouts import LAYOUTS
from tests.support.opcheck import opcheck

op = torch.ops.htree.hadamard_transform
op_ = torch.ops.htree.hadamard_transform_
op_grouped = torch.ops.htree.grouped_hadamard


def check(y: torch.Tensor, x: torch.Tensor, scale: float | None = None) -> None:
    rtol, atol = tolerance(x, scale)
    assert_close_spec(y, reference.hadamard_transform(x, scale), rtol, atol, dtype=x.dtype)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 32])
def test_the_reference_matrix_is_sylvesters(n):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    assert torch.equal(reference.hadamard_matrix(n), matrix)
    assert torch.equal(matrix, matrix.T)


def test_the_reference_beyond_one_matrix():
    x = normal((2, 2048), torch.float64, "cpu", seed=1)
    expected = x @ reference.hadamard_matrix(2048)
    assert_close_spec(reference.hadamard_transform(x, 1.0), expected, 0.0, 1e-10)


@pytest.mark.parametrize("case", [*CASES, *LAYOUT_CASES], ids=case_id)
def test_forward_and_in_place(case, device, nan_memory):
    x, scale = case.make_inputs(device)
    y = op(x, scale)
    assert y.is_contiguous()
    check(y, x, scale)
    assert op_(x, scale) is None
    assert torch.equal(x, y), "in place and two runs must agree bit for bit"


@pytest.mark.parametrize("case", GROUPED_CASES, ids=case_id)
def test_grouped(case, device, nan_memory):
    x, group, scale = case.make_inputs(device)
    y = op_grouped(x, group, scale)
    assert y.is_contiguous()
    rtol, atol = grouped_tolerance(x, group, scale)
    assert_close_spec(y, reference.grouped_hadamard(x, group, scale), rtol, atol, dtype=x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [4, 128, 4096])
def test_one_rounding_like_eager_butterflies(dtype, n, device):
    x = normal((50, n), dtype, device, seed=n)
    check(butterflies(x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", LENGTHS)
def test_unit_vectors_give_rows_of_the_matrix(n, dtype, device):
    rows = torch.tensor(sorted({0, 1 % n, n // 3, n // 2, n - 1}), device=device)
    x = torch.zeros(len(rows), n, dtype=dtype, device=device)
    x[torch.arange(len(rows), device=device), rows] = 1
    shared = rows[:, None] & torch.arange(n, device=device)
    bits = sum((shared >> b) & 1 for b in range(16))
    assert torch.equal(op(x, 1.0), (1.0 - 2.0 * (bits % 2)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [8, 16, 128, 1024, 16384])
def test_special_values_stay_in_their_row(n, dtype, device):
    x = normal((40, n), dtype, device, seed=2)
    clean = op(x)
    x[3, n // 2] = math.nan
    x[7, 0] = math.inf
    x[9, n - 1] = -math.inf
    x[11, 0], x[11, 1] = math.inf, -math.inf
    y = op(x)
    assert y[3].isnan().all()
    assert (y[7] == math.inf).all()
    assert y[9].isinf().all()
    assert (y[11].isnan() | y[11].isinf()).all()
    assert y[11].isnan().any()
    others = [i for i in range(40) if i not in (3, 7, 9, 11)]
    assert torch.equal(y[others], clean[others])


def test_half_sums_overflow_only_where_their_result_does(device):
    x = torch.full((2, 16384), 100.0, dtype=torch.float16, device=device)
    assert op(x)[0, 0] == 12800  # the unscaled sum is 1.6e6
    assert not op(x)[:, 1:].any()
    y = op(torch.full((3, 64), 65504.0, dtype=torch.float16, device=device))
    assert (y[:, 0] == math.inf).all()  # the result itself leaves the range
    assert not y[:, 1:].any()
    assert not op(torch.zeros_like(y)).any()


# ---- gradients, versions


@pytest.mark.parametrize("scale", [None, 0.5])
def test_gradient(scale, device):
    x = normal((2, 4, 2, 8), torch.float64, device, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: op(v, scale), (x,), nondet_tol=0.0)
    assert torch.autograd.gradcheck(lambda v: op(v.transpose(-1, -3), scale), (x,), nondet_tol=0.0)
    assert torch.autograd.gradcheck(lambda v: op_grouped(v, 2, scale), (x,), nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(lambda v: op(v, scale).square(), (x,), nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(lambda v: op_grouped(v, 4, scale).square(), (x,), nondet_tol=0.0)


def test_gradient_is_the_op_itself(device):
    x = normal((5, 64), torch.float32, device, seed=4).requires_grad_()
    dy = normal((5, 64), torch.float32, device, seed=5)
    assert torch.equal(torch.autograd.grad(op(x, 0.3), x, dy)[0], op(dy, 0.3))


def test_in_place_refuses_gradients_and_counts_versions(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    for target in (x, x * 1):
        with pytest.raises(NotImplementedError, match="has no gradient"):
            op_(target)
    plain = torch.randn(3, 8, device=device)
    version = plain._version
    op_(plain)
    assert plain._version == version + 1
    leaf = torch.randn(3, 8, device=device, requires_grad=True)
    doubled = leaf.mul(2)
    loss = (doubled * doubled).sum()
    op_(doubled.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_on_shared_memory_is_refused(device):
    with pytest.raises(RuntimeError, match="elements of x must not share memory"):
        op_(torch.zeros(1, 8, device=device).expand(4, 8))


# ---- refusals

ERRORS = {
    "not a power": (lambda f, _: f(torch.zeros(3, 12)), ShapeMismatchError, r"power of two.*12"),
    "zero": (lambda f, _: f(torch.zeros(3, 0)), ShapeMismatchError, r"power of two"),
    "too long": (lambda f, _: f(torch.zeros(1, 65536)), ShapeMismatchError, r"between 1 and 32768.*65536"),
    "scalar": (lambda f, _: f(torch.zeros(())), ShapeMismatchError, r"at least one dim, got 0-D"),
    "integer": (lambda f, _: f(torch.zeros(8, dtype=torch.int32)), UnsupportedDtypeError, r"dtype"),
    "scale": (
        lambda f, _: f(torch.zeros(8), math.nan),
        ValueError,
        r"scale must be finite in float32, got nan",
    ),
    "rank": (
        lambda _, g: g(torch.zeros(2, 4, 8), 2),
        ShapeMismatchError,
        r"x must be 4-D \[B, H, S, D\], got 3-D",
    ),
    "group": (
        lambda _, g: g(torch.zeros(1, 6, 2, 8), 4),
        ShapeMismatchError,
        r"H of x must be a multiple of group = 4, got 6 in \[1, 6, 2, 8\]",
    ),
    "no group": (
        lambda _, g: g(torch.zeros(1, 6, 2, 8), 0),
        ValueError,
        r"group must be (at least 1|between 1 and .*), got 0",
    ),
    "product": (
        lambda _, g: g(torch.zeros(1, 6, 2, 8), 3),
        ShapeMismatchError,
        r"D of x times group = 3 must be a power of two .*, got D = 8",
    ),
    "wide": (
        lambda _, g: g(torch.zeros(1, 64, 1, 1024), 64),
        ShapeMismatchError,
        r"D of x times group = 64 must be",
    ),
    "grouped dtype": (lambda _, g: g(torch.zeros(1, 2, 1, 8).int(), 2), UnsupportedDtypeError, r"dtype"),
    "grouped scale": (
        lambda _, g: g(torch.zeros(1, 2, 1, 8), 2, math.inf),
        ValueError,
        r"scale must be finite in float32, got inf",
    ),
}


@pytest.mark.parametrize("layer", ["python", "op"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_requirement_and_value(name, layer):
    call, kind, message = ERRORS[name]
    functions = (hadamard_transform, grouped_hadamard) if layer == "python" else (op, op_grouped)
    wanted = kind if layer == "python" else next(b for b in (ValueError, TypeError) if issubclass(kind, b))
    with pytest.raises(wanted, match=message):
        call(*functions)


def test_no_tensor_is_refused():
    with pytest.raises(TypeError, match="x must be a Tensor, got list"):
        hadamard_transform([1.0, 2.0])
    with pytest.raises(ValueError, match="group must be between 1 and"):
        HadamardTransform(group=0)


def test_python_layer(device):
    x = normal((2, 4, 3, 8), torch.float32, device, seed=6)
    assert torch.equal(hadamard_transform(x), op(x))
    assert torch.equal(HadamardTransform()(x), op(x))
    assert torch.equal(HadamardTransform(scale=1.0)(x), op(x, 1.0))
    assert torch.equal(grouped_hadamard(x, 4, 0.5), op_grouped(x, 4, 0.5))
    assert torch.equal(HadamardTransform(group=2)(x), op_grouped(x, 2))
    expected = op(x)
    assert hadamard_transform_(x) is x
    assert torch.equal(x, expected)
    assert repr(HadamardTransform(group=2)) == "HadamardTransform(group=2, scale=None)"


# ---- properties

seeds = st.integers(0, 2**31 - 1)
lengths = st.integers(0, 11).map(lambda k: 1 << k)
dtypes = st.sampled_from(DTYPES)
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}


@given(n=lengths, rows=st.integers(1, 70), seed=seeds, dtype=dtypes, layout=st.sampled_from(sorted(LAYOUTS)))
def test_property_matches_the_matrix(device, n, rows, seed, dtype, layout):
    x = normal((rows, n), dtype, device, seed)
    with poisoned_memory():
        y = op(LAYOUTS[layout](x))
    check(y, x)


@given(n=lengths, rows=st.integers(1, 20), seed=seeds, dtype=dtypes)
def test_property_self_inverse_and_norm(device, n, rows, seed, dtype):
    x = normal((rows, n), dtype, device, seed)
    y = op(x)
    norm = x.double().norm(dim=-1, keepdim=True)
    arithmetic = (
        (torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps)
        * 2
        * (n.bit_length() + 1)
    )
    # y errs by its rounding, u |y| in norm, and by the stages; the second transform keeps that error's norm.
    slack = (2.1 * UNIT[dtype] + 2 * arithmetic) * norm + 2 * math.sqrt(n) * torch.finfo(
        dtype
    ).smallest_normal
    assert ((op(y).double() - x.double()).norm(dim=-1, keepdim=True) <= slack).all()
    assert ((y.double().norm(dim=-1, keepdim=True) - norm).abs() <= slack).all()


@given(n=lengths, seed=seeds, a=st.floats(-4, 4), b=st.floats(-4, 4))
def test_property_linear(device, n, seed, a, b):
    x, z = normal((2, 5, n), torch.float64, device, seed)
    assert_close_spec(op(a * x + b * z), a * op(x) + b * op(z), 0.0, 1e-12)


@given(n=lengths, seed=seeds, dtype=dtypes, power=st.integers(-3, 3))
def test_property_scale_is_a_factor(device, n, seed, dtype, power):
    """A scale that is a power of two commutes with every rounding."""
    x = normal((3, n), dtype, device, seed)
    assert (
        torch.equal(op(x, 2.0**power), (op(x.double(), 1.0) * 2.0**power).to(dtype)) or dtype != torch.float64
    )
    assert_close_spec(op(x, 2.0**power), op(x, 1.0).double() * 2.0**power, UNIT[dtype] * 4, 1e-6)


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9)),
    log2_group=st.integers(0, 4),
    log2_width=st.integers(0, 7),
    seed=seeds,
    dtype=dtypes,
)
def test_property_grouped_is_a_kronecker_product(device, sizes, log2_group, log2_width, seed, dtype):
    """H_GD = H_G (x) H_D: a transform per head, then one of G points across heads. It is its own inverse."""
    batch, num_groups, length = sizes
    group, width = 1 << log2_group, 1 << log2_width
    x = normal((batch, num_groups * group, length, width), dtype, device, seed)
    y = op_grouped(x, group)
    heads = reference.hadamard_transform(x).unflatten(1, (num_groups, group))
    across = reference.hadamard_matrix(group, x.device) * group**-0.5
    expected = torch.einsum("gh,bnhsd->bngsd", across, heads).flatten(1, 2)
    rtol, atol = grouped_tolerance(x, group)
    assert_close_spec(y, expected, rtol, atol, dtype=dtype)
    if group == 1:
        assert torch.equal(y, op(x))
    rtol, atol = grouped_tolerance(y, group)
    assert_close_spec(op_grouped(y, group), reference.grouped_hadamard(y, group), rtol, atol, dtype=dtype)


@given(rows=st.integers(2, 60), n=lengths, seed=seeds, dtype=dtypes, data=st.data())
def test_property_rows_are_independent(device, rows, n, seed, dtype, data):
    row = data.draw(st.integers(0, rows - 1))
    x = normal((rows, n), dtype, device, seed)
    alone = op(x[row : row + 1])
    x[:row] = math.nan
    x[row + 1 :] = math.inf
    assert torch.equal(op(x)[row : row + 1], alone)


# ---- compile, export

OPCHECK_CASES = [c for c in [*CASES, *LAYOUT_CASES] if math.prod(c.shape) < 5000][::17]


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=case_id)
def test_opcheck(case, device):
    x, scale = case.make_inputs(device)
    opcheck(op.default, (x.clone().requires_grad_(), scale))
    opcheck(op.default, (x, scale))
    opcheck(op_.default, (x.clone(), scale))


@pytest.mark.parametrize("case", GROUPED_CASES[::41], ids=case_id)
def test_opcheck_grouped(case, device):
    x, group, scale = case.make_inputs(device)
    opcheck(op_grouped.default, (x.clone().requires_grad_(), group, scale))
    opcheck(op_grouped.default, (x, group, scale))


@pytest.mark.parametrize(("dynamic", "backend"), BACKENDS)
def test_compile_with_views_and_backward(dynamic, backend, device):
    def model(x):
        heads = op(x.transpose(1, 2)[:, :, 1:].sin())
        return op_grouped(heads, 2).cos()

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (6, 9):
        x = normal((2, length, 4, 8), torch.float64, device, length).requires_grad_()
        other = x.detach().clone().requires_grad_()
        compiled(x).sum().backward()
        model(other).sum().backward()
        assert_close_spec(x.grad, other.grad, 1e-12, 1e-14)


def test_compile_in_place(device):
    def model(x):
        y = x + 1
        op_(y)
        return y * 2

    x = normal((3, 16), torch.float32, device, seed=8)
    assert_close_spec(torch.compile(model, fullgraph=True)(x), model(x), 1e-6, 1e-6)


@pytest.mark.parametrize("group", [None, 2])
def test_export_keeps_one_node(group, device):
    length = torch.export.Dim("length", min=3, max=100)
    program = torch.export.export(
        HadamardTransform(group), (torch.randn(2, 4, 6, 8, device=device),), dynamic_shapes={"x": {2: length}}
    )
    calls = [n.target for n in program.graph.nodes if n.op == "call_function" and "htree" in str(n.target)]
    assert calls == [op.default if group is None else op_grouped.default]
    x = torch.randn(2, 4, 11, 8, device=device)
    assert torch.equal(program.module()(x), HadamardTransform(group)(x))


# ---- sizes and streams of a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2, 128, 8192])
def test_more_than_2_31_elements(n):
    rows = (2**31 + 2**14) // n
    x = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
    y = op(x)
    for row in (0, rows // 2, 2**30 // n, min(2**30 + 1, rows - 2), 2**31 // n - 1, rows - 2):
        check(y[row : row + 2], x[row : row + 2])
    assert op_(x) is None
    assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1700, 8192), (900, 16384), (500, 32768)])
def test_more_rows_than_run_at_a_time(rows, n, dtype):
    """Each persistent block transforms several rows and loads the next one while it computes."""
    x = normal((rows, n), dtype, "cuda", seed=n)
    rtol, atol = tolerance(x)
    y = op(x)
    assert_close_spec(y, reference.hadamard_transform(x), rtol, atol)
    heads = normal((1, 16, rows, n // 16), dtype, "cuda", seed=rows)
    rtol, atol = grouped_tolerance(heads, 16)
    grouped = torch.ops.htree.grouped_hadamard(heads, 16)
    assert_close_spec(grouped, reference.grouped_hadamard(heads, 16), rtol, atol)


@pytest.mark.gpu
def test_stream_and_graph():
    x = torch.randn(1000, 2048, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(3, 32768, device="cuda")
    assert_stream_and_graph(lambda: (op(x), op(wide)), x, wide)


@pytest.mark.parametrize(
    ("element_size", "n", "expected"),
    [
        (2, 8, (32, 4, 128)),
        (2, 128, (32, 4, 128)),
        (2, 256, (64, 4, 128)),
        (2, 2048, (64, 32, 128)),
        (2, 4096, (64, 64, 64)),
        (2, 32768, (64, 512, 512)),
        (4, 32768, (64, 512, 512)),
        (8, 64, (16, 4, 128)),
        (8, 16384, (32, 512, 512)),
    ],
)
def test_configuration_is_a_function_of_the_problem(element_size, n, expected):
    host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")
    assert host.hadamard_config(element_size, n.bit_length() - 1) == expected
