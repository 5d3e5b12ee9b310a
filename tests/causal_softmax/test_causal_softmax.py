"""causal_softmax, its out=, in-place and backward forms, against the float64 reference (docs/semantics §5)."""

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import htree_ops
from htree_ops.reference.causal_softmax import causal_softmax as reference
from htree_ops.reference.causal_softmax import causal_softmax_backward as reference_backward
from tests.support.cases import case_id, normal
from tests.support.causal_softmax_cases import BACKWARD_CASES, CASES, DTYPES, LAYOUT_CASES, tolerance
from tests.support.compare import assert_close_spec
from tests.support.compilers import BACKENDS
from tests.support.devices import poisoned_memory
from tests.support.graphs import assert_stream_and_graph
from tests.support.layouts import LAYOUTS
from tests.support.opcheck import opcheck

op = torch.ops.htree.causal_softmax
op_ = torch.ops.htree.causal_softmax_
op_backward = torch.ops.htree.causal_softmax_backward


def check(y: torch.Tensor, x: torch.Tensor) -> None:
    rtol, atol = tolerance(x.dtype, x.shape[-1])
    assert_close_spec(y, reference(x), rtol, atol, dtype=x.dtype)


@pytest.mark.parametrize("case", [*CASES, *LAYOUT_CASES], ids=case_id)
def test_forward(case, device, nan_memory):
    x, block_size = case.make_inputs(device)
    y = op(x, block_size)
    assert y.is_contiguous()
    check(y, x)
    assert torch.equal(y, op(x, block_size)), "two runs must agree bit for bit"


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=case_id)
def test_backward(case, device, nan_memory):
    dy, y = case.make_inputs(device)
    dx = op_backward(dy, y)
    expected = reference_backward(dy, y)
    # dy - sum(dy y) cancels: the error is in proportion to the terms, not to the result.
    terms = dy.double().abs().nan_to_num() + (dy.double() * y.double()).nan_to_num().abs().sum(
        -1, keepdim=True
    )
    unit = 2.0**-49 if y.dtype == torch.float64 else 2.0**-20
    rtol, atol = tolerance(y.dtype, y.shape[-1])
    assert_close_spec(dx, expected, rtol, atol + y.double() * terms * unit, dtype=y.dtype)


@pytest.mark.parametrize("block_size", [0, 512, 1024])
@pytest.mark.parametrize(
    "w", [1, 31, 200, 500, 1000, 1024, 1025, 2048, 5000, 16384, 16392, 32768, 33000, 70001]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_kernel(dtype, w, block_size, device, nan_memory):
    x = normal((2, min(w, 3), w), dtype, device, seed=w)
    for view in (x, LAYOUTS["misaligned"](x)):
        y = op(view, block_size)
        check(y, x)
        dy = torch.randn_like(x)
        rtol = 2e-2 if dtype.itemsize == 2 else 1e-4
        for upstream in (dy, LAYOUTS["misaligned"](dy)):
            dx = op_backward(upstream, y)
            assert_close_spec(dx, reference_backward(dy, y), rtol, 1e-5, dtype=dtype)


#: Leading dims of x [2, 3, h, w] that one stride does not lead through.
HEAD_LAYOUTS = {
    "heads of more": lambda x: torch.full_like(x, math.nan).repeat(1, 2, 1, 1)[:, :3].copy_(x),
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "heads last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 9, 37), (2, 3, 9, 37)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_and_in_place_write_any_layout(dtype, shape, layout, device):
    check_writes(LAYOUTS[layout], normal(shape, dtype, device, seed=0))


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_and_in_place_write_any_leading_dims(dtype, layout, device):
    check_writes(HEAD_LAYOUTS[layout], normal((2, 3, 9, 37), dtype, device, seed=0))


def check_writes(layout: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """``out`` and x itself are written where ``layout`` puts them, and nothing beside them."""
    expected = op(x)
    for target, call in (
        (layout(torch.full_like(x, math.nan)), lambda out: op.out(x, out=out)),
        (layout(x.clone()), op_),
        (layout(x.clone()), lambda out: op.out(out, out=out)),
    ):
        storage = target.as_strided((target.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        beside = torch.ones_like(storage, dtype=torch.bool)
        beside.as_strided(target.shape, target.stride(), target.storage_offset()).fill_(False)
        before = storage.clone()
        assert call(target) is None
        assert torch.equal(target, expected)
        assert torch.equal(storage[beside].isnan(), before[beside].isnan())
        assert torch.equal(storage[beside].nan_to_num(), before[beside].nan_to_num())


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 3, 4, 33, 40), (1, 1, 1, 1, 1)], ids=str)
def test_leading_dims_are_one_batch(shape, device):
    x = normal(shape, torch.float32, device, seed=0)
    y = htree_ops.causal_softmax(x)
    assert torch.equal(y, op(x.flatten(0, -3)).view_as(x))
    assert torch.equal(op_backward(x, y), op_backward(x.flatten(0, -3), y.flatten(0, -3)).view_as(x))
    single = x[(0,) * (x.dim() - 2)]
    assert torch.equal(y[(0,) * (x.dim() - 2)], op(single))


@pytest.mark.parametrize(
    ("view", "copies"),
    [
        (lambda x: x, 0),
        (lambda x: x[..., :9, 1:], 0),
        (lambda x: x.mT.contiguous().mT, 0),
        (lambda x: x[0, 0].expand(4, 2, -1, -1), 0),
        (lambda x: x[:, 1:2], 0),
        (lambda x: x[:, 1:], 1),
        (lambda x: x[:, :1].expand(-1, 2, -1, -1), 1),
        (lambda x: x.transpose(0, 1), 1),
    ],
)
def test_scores_are_copied_only_where_leading_dims_have_no_common_stride(view, copies):
    x = view(normal((4, 3, 10, 12), torch.float32, "cpu", seed=0))
    y = torch.empty(x.shape)
    for tensors, call in ((1, lambda: op(x)), (1, lambda: op.out(x, out=y)), (2, lambda: op_backward(x, x))):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        assert sum(event.name == "aten::copy_" for event in profile.events()) == copies * tensors


def test_out_beside_its_input_touches_nothing_else(device):
    """x and out interleave in one buffer: legal, and no neighbour is overwritten."""
    buffer = normal((4, 16), torch.float32, device, seed=1)
    x, out = buffer[:, 0::2], buffer[:, 1::2]
    expected, kept = op(x), x.clone()
    op.out(x, out=out)
    assert torch.equal(out, expected)
    assert torch.equal(x, kept)


def test_partial_overlap_is_refused(device):
    flat = torch.zeros(100, device=device)
    with pytest.raises(RuntimeError, match="out must not share memory with x"):
        op.out(flat[:64].view(8, 8), out=flat[8:72].view(8, 8))
    with pytest.raises(RuntimeError, match="out must not share memory with x"):
        op.out(flat[:64].view(8, 8), out=flat[:64].view(8, 8).t())
    with pytest.raises(RuntimeError, match="causal_softmax_: elements of x must not share memory"):
        op_(flat[:1].expand(4, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w", [8, 40, 3000, 40000])
def test_special_values(dtype, w, device):
    inf, nan = math.inf, math.nan
    x = normal((8, w), dtype, device, seed=2)
    first = w - 8 + 1  # visible columns of row 0
    x[0, 0] = nan
    x[1, 0] = inf
    x[2, : first + 2] = -inf
    x[3, 0] = -inf
    x[4, first + 4 :] = nan  # behind the prefix: never read
    x[5] = 1e4 if dtype != torch.float16 else 6e4
    y = op(x)
    for row in (0, 1, 2):
        seen = first + row
        assert y[row, :seen].isnan().all()
        assert (y[row, seen:] == 0).all()
    assert y[3:].isfinite().all()
    assert y[3, 0] == 0 or first + 3 == 1
    check(y[3:], x[3:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ends_of_the_range(dtype, device):
    """The maximum times log2(e) has a large rounding error or overflows; rows of finfo.min are common."""
    limits = torch.finfo(dtype)
    x = torch.full((30, 40), limits.min, dtype=dtype, device=device)
    for row, exponent in enumerate(range(0, 120, 5)):
        x[6 + row] = torch.randn(40, device=device).clamp(-2, 2).to(dtype) * min(
            2.0**exponent, limits.max / 4
        )
    x[1] = limits.max
    x[2, ::3] = limits.max
    x[3, 1] = 0
    x[4, ::2] = -math.inf
    x[5, 0] = limits.max / 2
    check(op(x), x)


@pytest.mark.parametrize(("w", "block_size"), [(2000, 0), (20000, 512), (40000, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores(dtype, w, block_size, device):
    """The maximum times log2(e) has a large rounding error, and a new one each time the maximum grows."""
    top = 6e4 if dtype == torch.float16 else 1.5e7
    few = torch.zeros(w, dtype=torch.float64)
    few[:4] = top / 1.5
    rows = [
        few,
        torch.linspace(-top, top, w, dtype=torch.float64),
        normal((w,), torch.float64, "cpu", 5) * top / 4,
    ]
    rows += [row / 100 - top / 2 for row in rows]
    x = torch.stack(rows)[:, None].to(device, dtype)
    check(op(x, block_size), x)


def test_zeros_behind_the_prefix_are_positive(device):
    y = op(-torch.rand(5, 7, device=device))
    assert not torch.signbit(y).any()
    dx = op_backward(-torch.ones(5, 7, device=device), y)
    assert not torch.signbit(dx[~torch.ones(5, 7, dtype=torch.bool).tril(2)]).any()


def test_gradient(device):
    x = normal((2, 4, 6), torch.float64, device, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(op, (x,), nondet_tol=0.0)
    assert torch.autograd.gradcheck(lambda v: op(v.transpose(-1, -2)[..., :3, :]), (x,), nondet_tol=0.0)
    heads = normal((2, 3, 3, 4), torch.float64, device, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(op, (heads,), nondet_tol=0.0)
    assert torch.autograd.gradcheck(lambda v: op(v[:, 1:].transpose(0, 1)), (heads,), nondet_tol=0.0)


def test_masked_gradient_is_ignored(device):
    y = op(torch.randn(3, 5, device=device))
    dy = torch.randn(3, 5, device=device)
    poisoned = dy.masked_fill(~torch.ones(3, 5, dtype=torch.bool, device=device).tril(2), math.nan)
    assert torch.equal(op_backward(poisoned, y), op_backward(dy, y))


def test_double_backward_is_refused(device):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        dx.sum().backward()


def test_writing_ops_refuse_gradients_and_count_versions(device):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    for call in (lambda: op_(x), lambda: op_(x * 1), lambda: op.out(x, out=torch.empty(3, 5, device=device))):
        with pytest.raises(NotImplementedError, match="has no gradient"):
            call()
    out = torch.empty(3, 5, device=device)
    version = out._version
    with torch.no_grad():
        op.out(x, out=out)
    assert out._version == version + 1
    op_(out)
    assert out._version == version + 2
    square = (leaf := torch.randn(3, 5, device=device, requires_grad=True)).mul(2)
    saved = square.detach()
    loss = (square * square).sum()
    op_(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert leaf.grad is None


ERRORS = {
    "one dim": (
        lambda: op(torch.zeros(5)),
        ValueError,
        r"x must have at least 2 dims \[..., h, w\], got 1-D \[5\]",
    ),
    "no dims": (lambda: op(torch.zeros(())), ValueError, r"at least 2 dims \[..., h, w\], got 0-D \[\]"),
    "too few columns": (lambda: op(torch.zeros(5, 4)), ValueError, r"at least as many columns.*\[5, 4\]"),
    "too few columns of heads": (
        lambda: op(torch.zeros(2, 3, 5, 4)),
        ValueError,
        r"at least as many columns.*\[2, 3, 5, 4\]",
    ),
    "integer": (
        lambda: op(torch.zeros(3, 3, dtype=torch.int32)),
        TypeError,
        r"x must have dtype torch\.float32 or .*, got torch\.int32",
    ),
    "block size": (lambda: op(torch.zeros(3, 3), 256), NotImplementedError, "block_size must be 0.*got 256"),
    "out dtype": (
        lambda: op.out(torch.zeros(3, 3), out=torch.zeros(3, 3, dtype=torch.half)),
        TypeError,
        r"out must have the dtype of x \(torch\.float32\), got torch\.float16",
    ),
    "out shape": (
        lambda: op.out(torch.zeros(3, 3), out=torch.zeros(3, 4)),
        ValueError,
        r"out must have shape \[3, 3\].*got \[3, 4\]",
    ),
    "dy shape": (lambda: op_backward(torch.zeros(3, 4), torch.zeros(3, 3)), ValueError, "dy must have shape"),
    "dy dtype": (
        lambda: op_backward(torch.zeros(3, 3).half(), torch.zeros(3, 3)),
        TypeError,
        "dy must have the dtype",
    ),
    "out device": (
        lambda: op.out(torch.zeros(3, 3), out=torch.zeros(3, 3, device="meta")),
        (RuntimeError, NotImplementedError),
        "out must be on the device of x|devices?",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_requirement_and_value(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_wrong_rank_is_a_shape_mismatch():
    with pytest.raises(
        htree_ops.ShapeMismatchError, match=r"^causal_softmax: x must have at least 2"
    ) as caught:
        htree_ops.causal_softmax(torch.zeros(5))
    assert (caught.value.tensor_name, caught.value.actual) == ("x", (5,))


# ---- properties

rows_and_columns = st.integers(1, 40).flatmap(lambda h: st.tuples(st.just(h), st.integers(h, h + 80)))
seeds = st.integers(0, 2**31 - 1)


@given(
    size=rows_and_columns, seed=seeds, dtype=st.sampled_from(DTYPES), scale=st.sampled_from([0.1, 1.0, 30.0])
)
def test_property_matches_torch_and_sums_to_one(device, size, seed, dtype, scale):
    x = normal((2, *size), dtype, device, seed, scale)
    with poisoned_memory():
        y = op(x)
    check(y, x)
    mask = torch.ones(size, dtype=torch.bool, device=device).tril(size[1] - size[0])
    expected = torch.softmax(x.double().masked_fill(~mask, -math.inf), -1)
    rtol, atol = tolerance(dtype, size[1])
    assert_close_spec(y, expected, rtol, atol)
    # Each of the w terms is rounded once, and subnormals of the dtype may vanish. In float64, whose arithmetic has no
    # digits to spare, a sum errs as its terms may.
    arithmetic = rtol if dtype == torch.float64 else 1e-6
    slack = size[1] * torch.finfo(dtype).tiny + torch.finfo(dtype).eps * 2 + arithmetic
    assert (y.double().sum(-1) - 1).abs().max() <= slack


@given(
    leading=st.lists(st.integers(1, 3), max_size=4),
    size=rows_and_columns,
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_property_any_leading_dims(device, leading, size, seed, dtype, data):
    """In any order in memory and as a part of more, x gives what its matrices give in a contiguous batch."""
    batch = math.prod(leading)
    rows = normal((batch, *size), dtype, device, seed)
    order = data.draw(st.permutations(range(len(leading))))
    more = [n + data.draw(st.integers(0, 1)) for n in leading]
    stored = torch.full([*(more[d] for d in order), *size], math.nan, dtype=dtype, device=device)
    x = stored.permute(*(order.index(d) for d in range(len(leading))), -2, -1)
    x = x[tuple(slice(n) for n in leading)].copy_(rows.view(*leading, *size))
    expected = op(rows)
    assert torch.equal(op(x), expected.view_as(x))
    assert torch.equal(op_backward(x, x), op_backward(rows, rows).view_as(x))
    op_(x)
    assert torch.equal(x, expected.view_as(x))


@given(size=rows_and_columns, seed=seeds, shift=st.floats(-50, 50))
def test_property_shift_invariance(device, size, seed, shift):
    x = normal(size, torch.float64, device, seed)
    assert_close_spec(op(x + shift), op(x), 1e-12, 1e-15)


@given(size=rows_and_columns, seed=seeds, data=st.data())
def test_property_a_row_depends_on_its_prefix_alone(device, size, seed, data):
    h, w = size
    row = data.draw(st.integers(0, h - 1))
    visible = w - h + 1 + row
    x = normal((3, h, w), torch.float32, device, seed)
    changed = x.clone()
    changed[:, row, visible:] = math.nan
    changed[1:] += 1.0  # other batches
    assert torch.equal(op(changed)[0, row], op(x)[0, row])


@given(seed=seeds, n=st.integers(1, 300))
def test_property_square_starts_one_hot(device, seed, n):
    y = op(normal((n, n), torch.float32, device, seed))
    assert y[0, 0] == 1
    assert (y[0, 1:] == 0).all()


# ---- compile, export, devices

OPCHECK_CASES = [c for c in [*CASES, *LAYOUT_CASES] if math.prod(c.shape) < 20_000][::3]


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=case_id)
def test_opcheck(case, device):
    x = case.make_x(device)
    opcheck(op.default, (x.clone().requires_grad_(),))
    opcheck(op.default, (x, case.block_size))
    opcheck(op_.default, (x.clone(),))
    opcheck(op.out, (x,), {"out": torch.empty_like(x)})
    opcheck(op_backward.default, (torch.randn_like(x), op(x)))


@pytest.mark.parametrize(("dynamic", "backend"), BACKENDS)
def test_compile_with_views_and_backward(dynamic, backend, device):
    def model(x):
        return op(x.transpose(-1, -2)[..., 1:, :].sin()).cos()

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (6, 9):
        x = normal((2, 12, rows), torch.float64, device, rows).requires_grad_()
        again = x.detach().clone().requires_grad_()
        compiled(x).sum().backward()
        model(again).sum().backward()
        assert_close_spec(x.grad, again.grad, 1e-12, 1e-14)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_heads(dynamic, device):
    """Forward, backward, in place and ``out=``, of heads that are a part of more."""

    def model(x, out):
        changed = x.detach().clone()
        part = changed[:, :-1]
        htree_ops.causal_softmax(part, out=part)
        htree_ops.causal_softmax(x.detach()[:, 1:], out=out)
        return htree_ops.causal_softmax(x[:, 1:]), changed

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for shape in ((2, 3, 5, 7), (4, 4, 3, 9)):
        x = torch.randn(shape, device=device, requires_grad=True)
        out = torch.empty(x[:, 1:].shape, device=device)
        y, changed = compiled(x, out)
        assert torch.equal(y, op(x[:, 1:].contiguous()))
        assert torch.equal(out, y)
        assert torch.equal(changed[:, :-1], op(x[:, :-1].contiguous()))
        assert torch.equal(changed[:, -1], x[:, -1])
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        (expected,) = torch.autograd.grad(op(x[:, 1:].contiguous()).square().sum(), x)
        assert torch.equal(dx, expected)


def test_meta_tensors_of_heads():
    x = torch.empty(2, 3, 5, 7, device="meta").transpose(0, 1)
    for result in (op(x), op_backward(x, x)):
        assert result.shape == (3, 2, 5, 7)
        assert result.is_contiguous()


def test_export_keeps_one_node(device):
    class Model(torch.nn.Module):
        def forward(self, x):
            return op(x)

    length = torch.export.Dim("length", min=3, max=100)
    program = torch.export.export(
        Model(), (torch.randn(2, 4, 8, device=device),), dynamic_shapes={"x": {1: length, 2: 2 * length}}
    )
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert calls == [op.default]
    x = torch.randn(2, 5, 10, device=device)
    assert torch.equal(program.module()(x), op(x))


@pytest.mark.gpu
def test_more_than_2_31_elements():
    shape = (33, 8192, 8192)
    assert math.prod(shape) > 2**31
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    y = op(x)
    dx = op_backward(x, y)
    for b, row in ((0, 0), (16, 4000), (32, 0), (32, 8191)):
        visible = row + 1
        expected = torch.softmax(x[b, row, :visible].double(), -1)
        assert_close_spec(y[b, row, :visible], expected, 8e-3, 1e-8)
        assert (y[b, row, visible:] == 0).all()
        single = reference_backward(x[b, row][None], y[b, row][None]) if visible == shape[-1] else None
        if single is not None:
            assert_close_spec(dx[b, row][None], single, 8e-3, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(60, 250, 250), (50, 300, 500), (20, 1000, 1000), (8, 1500, 2000), (3, 1500, 5000)]
)
def test_more_rows_than_run_at_a_time(shape, dtype):
    """Each persistent block takes several rows and loads the next one while it computes."""
    x = normal(shape, dtype, "cuda", seed=5)
    y = op(x)
    check(y, x)
    dy = torch.randn_like(x)
    dx = op_backward(dy, y)
    rtol = 2e-2 if dtype.itemsize == 2 else 1e-4
    assert_close_spec(dx, reference_backward(dy, y), rtol, 1e-5, dtype=dtype)
    assert torch.equal(dx, op_backward(dy, y))


@pytest.mark.gpu
def test_stream_graph_and_many_batches():
    x = torch.randn(70_000, 2, 9, device="cuda")
    assert_stream_and_graph(lambda: op(x), x)


def forward(size: int, cols: int, block_size: int = 0) -> dict[str, Any]:
    return {"element_size": size, "cols": cols, "block_size": block_size}


def backward(size: int, cols: int) -> dict[str, Any]:
    return {"element_size": size, "cols": cols, "backward": True}


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (forward(2, 1), (32, 4, 8, 0)),
        (forward(2, 256), (32, 4, 8, 0)),
        (forward(2, 257), (32, 4, 16, 0)),
        (forward(2, 1024), (32, 4, 32, 0)),
        (forward(2, 1025), (64, 1, 32, 0)),
        (forward(2, 2049), (128, 1, 32, 0)),
        (forward(2, 4096), (128, 1, 32, 0)),
        (forward(2, 4097), (256, 1, 32, 2)),
        (forward(2, 16384), (512, 1, 32, 2)),
        (forward(2, 16385), (1024, 1, 32, 0)),
        (forward(2, 32769), (1024, 1, 0, 0)),
        (forward(4, 512), (32, 4, 16, 0)),
        (forward(4, 513), (64, 1, 16, 0)),
        (forward(4, 8193), (1024, 1, 16, 0)),
        (forward(4, 16385), (1024, 1, 32, 0)),
        (forward(8, 32769), (1024, 1, 0, 0)),
        (forward(2, 8, 512), (512, 1, 16, 0)),
        (forward(4, 8193, 512), (512, 1, 32, 0)),
        (forward(4, 16385, 512), (512, 1, 0, 0)),
        (forward(2, 2**33, 1024), (1024, 1, 0, 0)),
        (backward(2, 256), (32, 4, 8, 2)),
        (backward(2, 2048), (32, 4, 64, 2)),
        (backward(2, 2049), (128, 1, 32, 2)),
        (backward(2, 32768), (1024, 1, 32, 1)),
        (backward(2, 32769), (1024, 1, 0, 0)),
        (backward(4, 512), (32, 4, 16, 2)),
        (backward(4, 513), (64, 1, 16, 2)),
        (backward(4, 16385), (1024, 1, 32, 0)),
        (backward(8, 2048), (128, 1, 16, 0)),
        (backward(2, 2048) | {"vectorised": False}, (64, 1, 32, 0)),
        (backward(2, 32768) | {"shared_bytes": 99 << 10}, (1024, 1, 32, 0)),
    ],
    ids=repr,
)
def test_configuration_is_a_function_of_the_problem(problem, expected):
    host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")
    assert host.causal_softmax_config(**problem) == expected
