"""rmsnorm_rope and head_rmsnorm_rope, forward and backward, against the float64 reference (docs/semantics.md §3.1)."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import htree_ops
from htree_ops.testing.cases import case_id, normal
from htree_ops.testing.compare import assert_close_spec
from htree_ops.testing.devices import poisoned_memory
from htree_ops.testing.layouts import LAYOUTS
from htree_ops.testing.rmsnorm_rope_cases import (
    BACKWARD_CASES,
    CASES,
    DTYPES,
    RMSNormRoPEBackwardCase,
    RMSNormRoPECase,
    assert_forward,
    assert_gradients,
    tables,
)

op = torch.ops.htree.rmsnorm_rope
op_backward = torch.ops.htree.rmsnorm_rope_backward
head_op = torch.ops.htree.head_rmsnorm_rope
head_op_backward = torch.ops.htree.head_rmsnorm_rope_backward


def forward_of(case: RMSNormRoPECase) -> Any:
    return head_op if case.per_head else op


def backward_of(case: RMSNormRoPECase) -> Any:
    return head_op_backward if case.per_head else op_backward


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_forward(case: RMSNormRoPECase, device: str, nan_memory: None) -> None:
    inputs = case.make_inputs(device)
    y = forward_of(case)(*inputs)
    assert y.is_contiguous()
    assert y.shape == inputs[0].shape
    assert_forward(y, inputs)
    assert torch.equal(y, forward_of(case)(*inputs)), "two runs must agree bit for bit"


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=case_id)
def test_backward(case: RMSNormRoPEBackwardCase, device: str, nan_memory: None) -> None:
    inputs = case.make_inputs(device)
    run = backward_of(case.forward)
    dx, dweight = run(*inputs)
    assert dx.is_contiguous()
    assert_gradients((dx, dweight), inputs)
    again = run(*inputs)
    assert torch.equal(again[0], dx)
    assert torch.equal(again[1], dweight)
    only_dx, nothing = run(*inputs, output_mask=[True, False])
    assert nothing is None
    assert torch.equal(only_dx, dx)
    nothing, only_dweight = run(*inputs, output_mask=[False, True])
    assert nothing is None
    assert torch.equal(only_dweight, dweight)


def test_unequal_halves_use_all_columns(device: str) -> None:
    """The lower half of a head takes the lower columns of the tables, the upper half the upper ones."""
    x = torch.ones(1, 1, 4, dtype=torch.float64, device=device)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, device=device)
    cos = torch.tensor([[5.0, 6.0, 7.0, 8.0]], dtype=torch.float64, device=device)
    sin = torch.tensor([[0.5, 0.25, 2.0, 4.0]], dtype=torch.float64, device=device)
    y = op(x, weight, cos, sin, 0.0)
    expected = [1 * 5 - 3 * 0.5, 2 * 6 - 4 * 0.25, 3 * 7 + 1 * 2.0, 4 * 8 + 2 * 4.0]
    assert y.flatten().tolist() == pytest.approx(expected, rel=1e-14)


def test_half_tables_equal_full_ones(device: str) -> None:
    x = normal((2, 6, 128), torch.float32, device, 0)
    weight = normal((128,), torch.float32, device, 1)
    cos, sin = tables(6, 32, torch.float32, device)
    full = op(x, weight, cos, sin, 1e-6, 4)
    assert torch.equal(op(x, weight, cos[:, :16], sin[:, :16], 1e-6, 4), full)
    assert torch.equal(op(x, weight, cos[None, :, None], sin[None, :, None]), full)
    heads = x.view(2, 6, 4, 32)
    assert torch.equal(
        head_op(heads, weight[:32], cos[:, :16], sin[:, :16]), head_op(heads, weight[:32], cos, sin)
    )


def test_without_num_heads_the_table_is_a_whole_head(device: str) -> None:
    """cos [S, 16] with Hd = 64 is four heads of 16, although two heads of 32 with half tables fit as well."""
    x = normal((1, 3, 64), torch.float64, device, 0)
    weight = torch.ones(64, dtype=torch.float64, device=device)
    cos, sin = tables(3, 16, torch.float64, device)
    assert_forward(op(x, weight, cos, sin), (x, weight, cos, sin, 1e-6, None))
    assert torch.equal(op(x, weight, cos, sin), op(x, weight, cos, sin, 1e-6, 4))
    assert not torch.equal(op(x, weight, cos, sin), op(x, weight, cos, sin, 1e-6, 2))


def special_rows(device: str, dtype: torch.dtype, width: int) -> Tensor:
    x = normal((1, 8, width), dtype, device, 2)
    x[0, 1, 3] = math.nan
    x[0, 3, 5] = math.inf
    x[0, 4, width - 1] = -math.inf
    x[0, 5] = 0
    x[0, 6] = torch.finfo(dtype).max if dtype in (torch.float16,) else 6e4
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "misaligned"])
@pytest.mark.parametrize("width", [64, 4096, 40000])
def test_special_values_stay_in_their_rows(dtype: torch.dtype, layout: str, width: int, device: str) -> None:
    head_dim = 32
    x = LAYOUTS[layout](special_rows(device, dtype, width))
    weight = 1 + normal((width,), dtype, device, 3, 0.1)
    cos, sin = tables(8, head_dim, dtype, device)
    y = op(x, weight, cos, sin)
    assert y[0, 1].isnan().all()
    for row, place in ((3, 5), (4, width - 1)):
        head, column = divmod(place, head_dim)
        partner = head * head_dim + (column + head_dim // 2) % head_dim
        bad = torch.zeros(width, dtype=torch.bool, device=device)
        bad[[place, partner]] = True
        assert y[0, row][bad].isnan().all()
        assert (y[0, row][~bad] == 0).all()
    assert (y[0, 5] == 0).all()
    assert op(x, weight, cos, sin, 0.0)[0, 5].isnan().all()
    clean = [0, 2, 6, 7]
    inputs = (x[:, clean], weight, cos[clean], sin[clean], 1e-6, None)
    assert_forward(y[:, clean].contiguous(), inputs)
    calm = LAYOUTS[layout](torch.where(x.isfinite(), x, 0.0))
    assert torch.equal(op(calm, weight, cos, sin)[:, clean], y[:, clean]), "other rows must not change a bit"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_of_the_gradient_stay_in_their_rows(dtype: torch.dtype, device: str) -> None:
    x = special_rows(device, dtype, 256)
    dy = normal(x.shape, dtype, device, 4)
    weight = torch.ones(256, dtype=dtype, device=device)
    cos, sin = tables(8, 64, dtype, device)
    dx, _ = op_backward(dy, x, weight, cos, sin)
    clean = [0, 2, 6, 7]
    assert dx[:, clean].isfinite().all()
    assert dx[0, 1].isnan().all()
    calm = torch.where(x.isfinite(), x, 0.0)
    assert torch.equal(op_backward(dy, calm, weight, cos, sin)[0][:, clean], dx[:, clean])


def test_fp32_squares_overflow_like_plain_torch(device: str) -> None:
    x = torch.full((1, 1, 64), 1e20, device=device)
    cos, sin = tables(1, 64, torch.float32, device)
    assert (op(x, torch.ones(64, device=device), cos, sin) == 0).all()


@pytest.mark.parametrize("requires", [(True, True), (True, False), (False, True)])
def test_gradcheck(requires: tuple[bool, bool], device: str) -> None:
    x = normal((2, 3, 24), torch.float64, device, 5).requires_grad_(requires[0])
    weight = normal((24,), torch.float64, device, 6).requires_grad_(requires[1])
    cos, sin = tables(3, 8, torch.float64, device, unequal=True)
    assert torch.autograd.gradcheck(lambda a, w: op(a, w, cos, sin, 1e-3), (x, weight), nondet_tol=0.0)
    half = (cos[:, :4], sin[:, :4])
    assert torch.autograd.gradcheck(lambda a, w: op(a, w, *half, 1e-3, 3), (x, weight), nondet_tol=0.0)

    def per_head(a: Tensor, w: Tensor) -> Tensor:
        return head_op(a.view(2, 3, 3, 8).transpose(1, 2), w[:8], cos, sin, 1e-3)

    assert torch.autograd.gradcheck(per_head, (x, weight), nondet_tol=0.0)


def test_double_backward_and_table_gradients_are_refused(device: str) -> None:
    x = torch.randn(1, 2, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    cos, sin = tables(2, 8, torch.float32, device)
    (dx,) = torch.autograd.grad(op(x, weight, cos, sin).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match="cos and sin are not differentiated"):
        op(x, weight, cos.requires_grad_(), sin)


ONES = {size: torch.ones(size) for size in (6, 8, 9)}
ERRORS = {
    "rank": (
        lambda: op(torch.zeros(2, 8), ONES[8], torch.zeros(2, 8), torch.zeros(2, 8)),
        ValueError,
        "x must be 3-D",
    ),
    "head rank": (
        lambda: head_op(torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 8), torch.zeros(2, 8)),
        ValueError,
        "head_rmsnorm_rope: x must be 4-D",
    ),
    "weight": (
        lambda: op(torch.zeros(1, 2, 8), ONES[6], torch.zeros(2, 8), torch.zeros(2, 8)),
        ValueError,
        r"size 0 of weight must be 8 \(Hd of x\), got 6",
    ),
    "odd head": (
        lambda: op(torch.zeros(1, 2, 9), ONES[9], torch.zeros(2, 9), torch.zeros(2, 9)),
        ValueError,
        "head dim must be even, got 9",
    ),
    "no multiple": (
        lambda: op(torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 6), torch.zeros(2, 6)),
        ValueError,
        "Hd = 8 must be a multiple of the head dim 6",
    ),
    "num_heads": (
        lambda: op(torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 4), torch.zeros(2, 4), 1e-6, 3),
        ValueError,
        "Hd = 8 must be num_heads = 3 times the head dim 4",
    ),
    "no head": (
        lambda: op(torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 4), torch.zeros(2, 4), 1e-6, 0),
        ValueError,
        "num_heads must be at least 1, got 0",
    ),
    "short table": (
        lambda: op(torch.zeros(1, 3, 8), ONES[8], torch.zeros(2, 4), torch.zeros(2, 4)),
        ValueError,
        "at least S = 3 positions, got 2",
    ),
    "sin": (
        lambda: op(torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 4), torch.zeros(2, 8)),
        ValueError,
        "sin must have shape",
    ),
    "table rank": (
        lambda: op(torch.zeros(1, 2, 8), ONES[8], torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)),
        ValueError,
        "cos must be 2-D",
    ),
    "batched table": (
        lambda: op(torch.zeros(2, 2, 8), ONES[8], torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)),
        ValueError,
        "size 0 of cos must be 1",
    ),
    "eps": (
        lambda: op(torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 4), torch.zeros(2, 4), -1.0),
        ValueError,
        "eps must be finite and not negative, got -1",
    ),
    "dtype": (
        lambda: op(torch.zeros(1, 2, 8).int(), ONES[8], torch.zeros(2, 4), torch.zeros(2, 4)),
        TypeError,
        "x must have one of the dtypes.*Int",
    ),
    "table dtype": (
        lambda: op(torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 4).int(), torch.zeros(2, 4)),
        TypeError,
        "cos must have one of the dtypes.*Int",
    ),
    "config length": (
        lambda: op(torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 4), torch.zeros(2, 4), 1e-6, None, [64, 2]),
        ValueError,
        r"config must be \(BLOCK_SIZE, num_warps, num_stages\), got 2 values",
    ),
    "config": (
        lambda: op(
            torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 4), torch.zeros(2, 4), 1e-6, None, [64, 4, 1]
        ),
        NotImplementedError,
        "no kernel is compiled for BLOCK_SIZE = 64, num_warps = 4, num_stages = 1",
    ),
    "dy shape": (
        lambda: op_backward(
            torch.zeros(1, 2, 4), torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 4), torch.zeros(2, 4)
        ),
        ValueError,
        "dy must have shape",
    ),
    "dy dtype": (
        lambda: op_backward(
            torch.zeros(1, 2, 8).half(), torch.zeros(1, 2, 8), ONES[8], torch.zeros(2, 4), torch.zeros(2, 4)
        ),
        TypeError,
        "dy must have the dtype of x",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_requirement_and_value(name: str) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("config", [(64, 2, 1), (128, 4, 2), (256, 8, 3)])
def test_the_result_does_not_depend_on_the_configuration(config: tuple[int, int, int], device: str) -> None:
    x = normal((2, 5, 1024), torch.float32, device, 7)
    weight = normal((1024,), torch.float32, device, 8)
    cos, sin = tables(5, 64, torch.float32, device)
    assert_forward(op(x, weight, cos, sin, 1e-6, None, list(config)), (x, weight, cos, sin, 1e-6, None))


# ---- properties 1 and 3 of §3.5

seeds = st.integers(0, 2**31 - 1)


@st.composite
def problems(draw: st.DrawFn) -> RMSNormRoPECase:
    """Any B, S, number of heads and even head dim, up to 2^17 elements."""
    head_dim = 2 * draw(st.integers(1, 80))
    num_heads = draw(st.integers(1, 40))
    batch = draw(st.integers(1, 64))
    per_head = draw(st.booleans())
    positions = draw(st.integers(1, max(1, 2**17 // (batch * num_heads * head_dim))))
    shape = (batch, positions, num_heads, head_dim) if per_head else (batch, positions, num_heads * head_dim)
    return RMSNormRoPECase(
        name="drawn",
        dtype=draw(st.sampled_from(DTYPES)),
        shape=shape,
        head_dim=head_dim,
        table=draw(st.sampled_from(["full", "half", "four_d", "unequal", "longer"])),
        weight_dtype=draw(st.sampled_from([None, *DTYPES])),
        table_dtype=draw(st.sampled_from([None, *DTYPES])),
        layout=draw(st.sampled_from(list(LAYOUTS))),
        scale=draw(st.sampled_from([1e-3, 1.0, 100.0])),
    )


@given(case=problems(), seed=seeds)
def test_property_1_equals_norm_then_rotation(device: str, case: RMSNormRoPECase, seed: int) -> None:
    """Feature: fused-ops, Property 1: rmsnorm_rope equals the sequential formula."""
    inputs = case.make_inputs(device, seed)
    with poisoned_memory():
        y = forward_of(case)(*inputs)
    assert_forward(y, inputs)


@given(
    batch=st.integers(1, 64),
    positions=st.integers(1, 8192),
    hidden=st.sampled_from([2048, 4096, 8192]),
    head_dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=seeds,
)
def test_property_3_any_batch_and_length(
    device: str, batch: int, positions: int, hidden: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    """Feature: fused-ops, Property 3: every B, S and Hd of the table; B S is held below 2^15 (2^8 on a CPU)."""
    positions = min(positions, (2**15 if device == "cuda" else 2**8) // batch)
    x = normal((batch, positions, hidden), dtype, device, seed)
    weight = normal((hidden,), dtype, device, seed + 1)
    cos, sin = tables(positions, head_dim, dtype, device)
    y = op(x, weight, cos, sin)
    rows = torch.randint(batch, (4,)).tolist() if batch > 4 else list(range(batch))
    assert_forward(y[rows], (x[rows], weight, cos, sin, 1e-6, None))


@given(case=problems(), seed=seeds)
def test_property_gradients(device: str, case: RMSNormRoPECase, seed: int) -> None:
    inputs = RMSNormRoPEBackwardCase(name="drawn", dtype=case.dtype, forward=case).make_inputs(device, seed)
    with poisoned_memory():
        gradients = backward_of(case)(*inputs)
    assert_gradients(gradients, inputs)


@pytest.mark.parametrize(
    ("batch", "positions"), [(1, 1), (64, 1), (1, 8192), (64, 8192)], ids=lambda size: str(size)
)
def test_corners(batch: int, positions: int, device: str) -> None:
    """(64, 8192) has 2^30 elements at Hd = 2048, 2^32 on a GPU at 8192: checked by slices."""
    hidden = 8192 if device == "cuda" or batch * positions == 1 else 2048
    if device == "cpu" and batch * positions > 2**15:
        hidden = 128  # the full width would take 4 GiB; its offsets are those of the GPU test
    weight = normal((hidden,), torch.bfloat16, device, 1)
    cos, sin = tables(positions, 128, torch.bfloat16, device)
    x = torch.empty(batch, positions, hidden, dtype=torch.bfloat16, device=device)
    for b in range(batch):
        x[b] = normal((positions, hidden), torch.bfloat16, device, b)
    y = op(x, weight, cos, sin)
    for b in {0, batch // 2, batch - 1}:
        for first in {0, max(0, positions - 64)}:
            part = slice(first, first + 64)
            inputs = (x[b : b + 1, part], weight, cos[part], sin[part], 1e-6, None)
            assert_forward(y[b : b + 1, part].contiguous(), inputs)


# ---- compile, export, devices

OPCHECK_CASES = [c for c in CASES if math.prod(c.shape) < 5_000][::5]


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=case_id)
def test_opcheck(case: RMSNormRoPECase, device: str) -> None:
    x, weight, *rest = case.make_inputs(device)
    dy = torch.randn_like(x)
    torch.library.opcheck(forward_of(case).default, (x, weight, *rest))
    torch.library.opcheck(
        forward_of(case).default, (x.clone().requires_grad_(), weight.clone().requires_grad_(), *rest)
    )
    torch.library.opcheck(backward_of(case).default, (dy, x, weight, *rest))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_with_views_and_backward(dynamic: bool, device: str) -> None:
    def model(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        whole = htree_ops.rmsnorm_rope(x[..., 8:40].sin(), weight, cos, sin)
        heads = x[..., :32].unflatten(-1, (4, 8)).transpose(1, 2).transpose(1, 2)
        return whole.cos() + htree_ops.head_rmsnorm_rope(heads, weight[:8], cos, sin).flatten(-2)

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for length in (6, 9):
        x = normal((2, length, 40), torch.float64, device, length)
        weight = normal((32,), torch.float64, device, 1)
        cos, sin = tables(length, 8, torch.float64, device)
        ours = [t.clone().requires_grad_() for t in (x, weight)]
        eager = [t.clone().requires_grad_() for t in (x, weight)]
        compiled(*ours, cos, sin).sum().backward()
        model(*eager, cos, sin).sum().backward()
        for a, b in zip(ours, eager, strict=True):
            assert_close_spec(a.grad, b.grad, 1e-12, 1e-12)


def test_frozen_weight_compiles(device: str) -> None:
    cos, sin = tables(4, 8, torch.float32, device)
    weight = torch.ones(16, device=device)
    x = torch.randn(2, 4, 16, device=device, requires_grad=True)
    compiled = torch.compile(lambda a: op(a, weight, cos, sin).square().sum(), fullgraph=True)
    (ours,) = torch.autograd.grad(compiled(x), x)
    (eager,) = torch.autograd.grad(op(x, weight, cos, sin).square().sum(), x)
    assert_close_spec(ours, eager, 1e-5, 1e-5)


def test_export_keeps_one_node(device: str) -> None:
    module = htree_ops.FusedRMSNormRoPE(64, 16).to(device)
    cos, sin = tables(64, 16, torch.float32, device)
    length = torch.export.Dim("length", min=2, max=60)
    x = torch.randn(2, 5, 64, device=device)
    with torch.no_grad():
        program = torch.export.export(module, (x, cos, sin), dynamic_shapes=({1: length}, None, None))
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert [c for c in calls if c == op.default] == [op.default]
    longer = torch.randn(2, 9, 64, device=device)
    assert torch.equal(program.module()(longer, cos, sin), module(longer, cos, sin))


@pytest.mark.gpu
def test_stream_graph_and_one_kernel() -> None:
    x = torch.randn(4, 33, 2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(2048, device="cuda")
    cos, sin = tables(33, 128, torch.float32, "cuda")
    expected = op(x, weight, cos, sin)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = op(x, weight, cos, sin)
    stream.synchronize()
    assert torch.equal(y, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(x, weight, cos, sin)
    x.neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, op(x, weight, cos, sin))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op(x, weight, cos, sin)
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [e.name for e in kernels]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_every_tuned_kernel(dtype: torch.dtype, block_size: int, num_stages: int) -> None:
    config = [block_size, block_size // 32, num_stages]
    for pairs in (1, 2, 4):
        width = block_size * pairs * 32 // dtype.itemsize
        x = normal((3, 7, width), dtype, "cuda", 9)
        weight = normal((width,), dtype, "cuda", 10)
        cos, sin = tables(7, 64, dtype, "cuda")
        inputs = (x, weight, cos, sin, 1e-6, None)
        if pairs > dtype.itemsize:
            with pytest.raises(NotImplementedError, match="holds rows of"):
                op(*inputs, config)
        else:
            assert_forward(op(*inputs, config), inputs)


@pytest.mark.gpu
def test_more_rows_than_blocks() -> None:
    """Every block runs through its rows, the pipeline wraps around, and the last blocks have one row less."""
    for shape, head_dim in (((3, 1000, 1024), 128), ((2, 501, 7, 128), 128), ((2, 700, 4096), 64)):
        case = RMSNormRoPECase(
            name="many", dtype=torch.bfloat16, shape=shape, head_dim=head_dim, table="unequal"
        )
        inputs = case.make_inputs("cuda")
        assert_forward(forward_of(case)(*inputs), inputs)
        backward = RMSNormRoPEBackwardCase(name="many", dtype=torch.bfloat16, forward=case)
        inputs = backward.make_inputs("cuda")
        assert_gradients(backward_of(case)(*inputs), inputs)
