"""rmsnorm_rope and head_rmsnorm_rope, forward and backward, against the float64 reference (docs/semantics §3.1)."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import htree_ops
from tests.support.cases import case_id, normal
from tests.support.devices import poisoned_memory
from tests.support.layouts import LAYOUTS
from tests.support.rmsnorm_rope_cases import (
    BACKWARD_CASES,
    CASES,
    DTYPES,
    TABLES,
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
def test_forward(case, device, nan_memory):
    inputs = case.make_inputs(device)
    y = forward_of(case)(*inputs)
    assert y.is_contiguous()
    assert y.shape == inputs[0].shape
    assert_forward(y, inputs)
    assert torch.equal(y, forward_of(case)(*inputs)), "two runs must agree bit for bit"


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=case_id)
def test_backward(case, device, nan_memory):
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


def test_unequal_halves_use_all_columns(device):
    """The lower half of a head uses the lower columns of the tables, the upper half the upper ones."""
    x = torch.ones(1, 1, 4, dtype=torch.float64, device=device)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, device=device)
    cos = torch.tensor([[5.0, 6.0, 7.0, 8.0]], dtype=torch.float64, device=device)
    sin = torch.tensor([[0.5, 0.25, 2.0, 4.0]], dtype=torch.float64, device=device)
    y = op(x, weight, cos, sin, 0.0)
    expected = [1 * 5 - 3 * 0.5, 2 * 6 - 4 * 0.25, 3 * 7 + 1 * 2.0, 4 * 8 + 2 * 4.0]
    assert y.flatten().tolist() == pytest.approx(expected, rel=1e-14)


def test_half_tables_equal_full_ones(device):
    x = normal((2, 6, 128), torch.float32, device, 0)
    weight = normal((128,), torch.float32, device, 1)
    cos, sin = tables(6, 32, torch.float32, device)
    full = op(x, weight, cos, sin, 1e-6, 4)
    assert torch.equal(op(x, weight, cos[:, :16], sin[:, :16], 1e-6, 4), full)
    for view in (
        lambda t: t[None, :, None],
        lambda t: t[None],
        lambda t: t[None].expand(2, -1, -1),
        lambda t: t[None, :, None].repeat(2, 1, 1, 1),
        lambda t: t[None, :, :16].repeat(2, 1, 1),
    ):
        assert torch.equal(op(x, weight, view(cos), view(sin), 1e-6, 4), full)
    heads = x.view(2, 6, 4, 32)
    assert torch.equal(
        head_op(heads, weight[:32], cos[:, :16], sin[:, :16]), head_op(heads, weight[:32], cos, sin)
    )


@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "in_larger"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_sequence_has_its_own_table(dtype, layout, device):
    """Row b of the batch is computed with table b, to the last bit as it would be alone."""
    batch, positions, hidden = 5, 6, 512
    x, dy = (normal((batch, positions, hidden), dtype, device, seed) for seed in (0, 1))
    weight = normal((hidden,), dtype, device, 2)
    cos, sin = (
        LAYOUTS[layout](t.view(batch, positions, 64)) for t in tables(batch * positions, 64, dtype, device)
    )
    y = op(x, weight, cos, sin)
    dx, _ = op_backward(dy, x, weight, cos, sin)
    heads, weight_of_head = x.unflatten(-1, (8, 64)), weight[:64]
    of_heads = head_op(heads, weight_of_head, cos, sin)
    d_heads, _ = head_op_backward(dy.view_as(heads), heads, weight_of_head, cos, sin)
    for b in range(batch):
        own, table = slice(b, b + 1), (cos[b], sin[b])
        assert torch.equal(op(x[own], weight, *table), y[own])
        assert torch.equal(op_backward(dy[own], x[own], weight, *table)[0], dx[own])
        assert torch.equal(head_op(heads[own], weight_of_head, *table), of_heads[own])
        alone = head_op_backward(dy.view_as(heads)[own], heads[own], weight_of_head, *table)
        assert torch.equal(alone[0], d_heads[own])
    assert not torch.equal(y, op(x, weight, cos[0], sin[0]))


def test_the_tables_of_a_model_of_transformers(device):
    """Norm and rotation as the model computes them, of sequences that are padded on the left."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    x = normal((3, 7, 64), torch.float32, device, 0)
    norm = llama.LlamaRMSNorm(64, eps=1e-6).to(device)
    with torch.no_grad():
        norm.weight.copy_(1 + normal((64,), torch.float32, device, 1, 0.3))
    padding = torch.tensor([0, 2, 5], device=device)
    positions = (torch.arange(7, device=device) - padding[:, None]).clamp(min=0)
    tables_of = llama.LlamaRotaryEmbedding(config).to(device)
    for position_ids in (positions, positions[:1]):
        cos, sin = tables_of(x, position_ids)  # [3, 7, 16] and [1, 7, 16]
        heads = norm(x).unflatten(-1, (4, 16)).transpose(1, 2)
        expected = llama.apply_rotary_pos_emb(heads, heads, cos, sin)[0].transpose(1, 2).flatten(-2)
        with torch.no_grad():
            module = htree_ops.FusedRMSNormRoPE(64, 16, device=device)
            module.weight.copy_(norm.weight)
            torch.testing.assert_close(module(x, cos, sin), expected)
        torch.testing.assert_close(htree_ops.rmsnorm_rope(x, norm.weight, cos, sin), expected)


def test_without_num_heads_the_table_is_a_whole_head(device):
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
def test_special_values_stay_in_their_rows(dtype, layout, width, device):
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
def test_special_values_of_the_gradient_stay_in_their_rows(dtype, device):
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


def test_fp32_squares_overflow_like_plain_torch(device):
    x = torch.full((1, 1, 64), 1e20, device=device)
    cos, sin = tables(1, 64, torch.float32, device)
    assert (op(x, torch.ones(64, device=device), cos, sin) == 0).all()


@pytest.mark.parametrize("requires", [(True, True), (True, False), (False, True)])
def test_gradcheck(requires, device):
    x = normal((2, 3, 24), torch.float64, device, 5).requires_grad_(requires[0])
    weight = normal((24,), torch.float64, device, 6).requires_grad_(requires[1])
    cos, sin = tables(3, 8, torch.float64, device, unequal=True)
    assert torch.autograd.gradcheck(lambda a, w: op(a, w, cos, sin, 1e-3), (x, weight), nondet_tol=0.0)
    half = (cos[:, :4], sin[:, :4])
    assert torch.autograd.gradcheck(lambda a, w: op(a, w, *half, 1e-3, 3), (x, weight), nondet_tol=0.0)
    of_each = [t.view(2, 3, 8) for t in tables(6, 8, torch.float64, device, unequal=True)]
    assert torch.autograd.gradcheck(lambda a, w: op(a, w, *of_each, 1e-3), (x, weight), nondet_tol=0.0)

    def per_head(a, w):
        return head_op(a.view(2, 3, 3, 8).transpose(1, 2), w[:8], cos, sin, 1e-3)

    assert torch.autograd.gradcheck(per_head, (x, weight), nondet_tol=0.0)


def test_double_backward_and_table_gradients_are_refused(device):
    x = torch.randn(1, 2, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    cos, sin = tables(2, 8, torch.float32, device)
    (dx,) = torch.autograd.grad(op(x, weight, cos, sin).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match="cos and sin are not differentiated"):
        op(x, weight, cos.requires_grad_(), sin)


@pytest.mark.parametrize("config", [(64, 2, 1), (128, 4, 2), (256, 8, 3)])
def test_the_result_does_not_depend_on_the_configuration(config, device):
    x = normal((2, 5, 1024), torch.float32, device, 7)
    weight = normal((1024,), torch.float32, device, 8)
    cos, sin = tables(5, 64, torch.float32, device)
    assert_forward(op(x, weight, cos, sin, 1e-6, None, list(config)), (x, weight, cos, sin, 1e-6, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1024, 2048, 4096, 8192])
def test_a_row_has_the_same_bits_in_every_configuration_and_batch(hidden, dtype, device):
    """Serving depends on it: a row must not change with the requests beside it."""
    rows = 850 if device == "cuda" else 40
    x = normal((rows, 1, hidden), dtype, device, 7)
    weight = normal((hidden,), dtype, device, 8)
    cos, sin = tables(1, 128, dtype, device)
    full = op(x, weight, cos, sin)
    for part in (1, 20, 140, 800):
        assert torch.equal(op(x[:part], weight, cos, sin), full[:part])
    pairs = hidden * dtype.itemsize // 32  # of a row; the automatic choice gives a thread two at most
    for threads in (64, 128, 256) if pairs <= 2 * 256 else ():
        if pairs <= threads * min(dtype.itemsize, 4):  # as many as a thread holds
            for stages in (1, 2, 3):
                forced = op(x, weight, cos, sin, 1e-6, None, [threads, threads // 32, stages])
                assert torch.equal(forced, full)


# ---- properties 1 and 3 of §3.5

seeds = st.integers(0, 2**31 - 1)


@st.composite
def problems(draw: st.DrawFn) -> RMSNormRoPECase:
    """Problems of any B, S, number of heads and even head dim, up to 2^17 elements."""
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
        table=draw(st.sampled_from(TABLES)),
        weight_dtype=draw(st.sampled_from([None, *DTYPES])),
        table_dtype=draw(st.sampled_from([None, *DTYPES])),
        layout=draw(st.sampled_from(list(LAYOUTS))),
        scale=draw(st.sampled_from([1e-3, 1.0, 100.0])),
    )


@given(case=problems(), seed=seeds)
def test_property_1_equals_norm_then_rotation(device, case, seed):
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
def test_property_3_any_batch_and_length(device, batch, positions, hidden, head_dim, dtype, seed):
    """Feature: fused-ops, Property 3: every B, S and Hd of the table; B S is held below 2^15 (2^8 on a CPU)."""
    positions = min(positions, (2**15 if device == "cuda" else 2**8) // batch)
    x = normal((batch, positions, hidden), dtype, device, seed)
    weight = normal((hidden,), dtype, device, seed + 1)
    cos, sin = tables(positions, head_dim, dtype, device)
    y = op(x, weight, cos, sin)
    rows = torch.randint(batch, (4,)).tolist() if batch > 4 else list(range(batch))
    assert_forward(y[rows], (x[rows], weight, cos, sin, 1e-6, None))


@given(case=problems(), seed=seeds)
def test_property_gradients(device, case, seed):
    inputs = RMSNormRoPEBackwardCase(name="drawn", dtype=case.dtype, forward=case).make_inputs(device, seed)
    with poisoned_memory():
        gradients = backward_of(case)(*inputs)
    assert_gradients(gradients, inputs)


@pytest.mark.parametrize(
    ("batch", "positions"), [(1, 1), (64, 1), (1, 8192), (64, 8192)], ids=lambda size: str(size)
)
def test_corners(batch, positions, device):
    """Slices of the corners of §3.5: Hd = 2048 on a CPU, 8192 on a GPU, where x and y have 2^32 elements.

    On a CPU row (b, s) of x is row b + s of one buffer, which saves memory.
    """
    hidden = 8192 if device == "cuda" else 2048
    weight = normal((hidden,), torch.bfloat16, device, 1)
    cos, sin = tables(positions, 128, torch.bfloat16, device)
    if device == "cuda":
        x = torch.empty(batch, positions, hidden, dtype=torch.bfloat16, device=device)
        for b in range(batch):
            x[b] = normal((positions, hidden), torch.bfloat16, device, b)
    else:
        rows = normal((batch + positions, hidden), torch.bfloat16, device, 2)
        x = rows.as_strided((batch, positions, hidden), (hidden, hidden, 1))
    y = op(x, weight, cos, sin)
    for b in {0, batch // 2, batch - 1}:
        for first in {0, max(0, positions - 64)}:
            part = slice(first, first + 64)
            inputs = (x[b : b + 1, part], weight, cos[part], sin[part], 1e-6, None)
            assert_forward(y[b : b + 1, part].contiguous(), inputs)
