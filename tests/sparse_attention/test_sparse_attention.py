"""Attention over lists of blocks: values, gradients and the properties of docs/semantics/sparse_attention.md §8."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from sparse_attention_helpers import (
    GRADIENTS,
    OPS,
    TOLERANCES,
    assert_equal_to_reference,
    assert_same_bits,
    for_device,
    op,
)
from torch import Tensor

import htree_ops
from htree_ops import sparse_attention
from tests.support.cases import case_id, normal
from tests.support.devices import poisoned_memory
from tests.support.documents import with_gradients
from tests.support.layouts import LAYOUTS
from tests.support.sparse_attention_cases import CASES, FAST_CASES, SparseCase

seeds = st.integers(0, 2**20)


def runs_on(case: SparseCase, device: str) -> bool:
    """§8: float64 and blocks below 16 are for the CPU."""
    return device == "cpu" or (case.dtype != torch.float64 and case.block_size >= 16)


@st.composite
def problems(draw: Any, device: str, lists: tuple[str, ...] = ("wild", "random", "all")) -> SparseCase:
    size = draw(st.integers(1, 12) if device == "cpu" else st.sampled_from((16, 24, 32, 64, 128)))
    stride = draw(st.sampled_from([s for s in (1, 2, 4, 8, 16) if size % s == 0]))
    T = draw(st.integers(1, 50 if device == "cpu" else 400))
    before = draw(st.integers(0, (T - 1) // stride)) * stride
    kv_heads = draw(st.integers(1, 3))
    fast = device == "cuda" and draw(st.booleans())
    width = draw(st.sampled_from((64, 128)) if fast else st.integers(1, 20))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, *((torch.float64,) if device == "cpu" else ()))
    return SparseCase(
        name="drawn",
        dtype=draw(st.sampled_from(dtypes[1:3] if fast else dtypes)),
        B=draw(st.integers(1, 3)),
        T=T,
        T_q=T - before,
        H=kv_heads * draw(st.integers(1, 5)),
        H_kv=kv_heads,
        H_i=draw(st.sampled_from((1, kv_heads))),
        K=width,
        V=width if fast else draw(st.integers(1, 20)),
        n=draw(st.integers(0, 8)),
        block_size=size,
        selection_stride=stride,
        scale=draw(st.one_of(st.none(), st.floats(-1.5, 1.5))),
        has_sinks=draw(st.booleans()),
        lists=draw(st.sampled_from(lists)),
    )


# ---- values and gradients


@pytest.mark.parametrize("case", [*CASES, *FAST_CASES], ids=lambda case: f"{case.id}-{case.K}")
def test_equal_to_the_reference(case, device):
    if runs_on(case, device):
        assert_equal_to_reference(case, device)
    elif case.block_size < 16:
        with pytest.raises(NotImplementedError, match="block_size must be at least 16"):
            op(case)(*case.make_inputs(device))
    else:
        with pytest.raises(TypeError, match=r"query must have dtype .* on CUDA, got torch.float64"):
            op(case)(*case.make_inputs(device))


@given(data=st.data(), seed=seeds)
def test_any_problem_equals_the_reference(data, seed, device):
    case = data.draw(problems(device))
    with poisoned_memory():
        assert_equal_to_reference(case, device, seed, of=data.draw(st.sampled_from(("both", "out", "lse"))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_whose_terms_cancel(dtype, device):
    """One token beside a sink: the gradient of its score is a difference of two sums that are nearly equal."""
    case = replace(FAST_CASES[0], dtype=dtype, B=1, T=1, H=2, n=1, scale=1.0, has_sinks=True)
    for seed in range(50):
        assert_equal_to_reference(case, device, seed, of="out")


@pytest.mark.parametrize("case", [case for case in CASES if case.n], ids=case_id)
def test_gradcheck(case):
    case = replace(
        case,
        dtype=torch.float64,
        T=min(case.T, 21),
        T_q=min(case.T_q, 5) if case.selection_stride == 1 else 0,
    )
    query, key, value, blocks, sinks = case.make_inputs("cpu")
    leaves = [x.requires_grad_() for x in (query, key, value, sinks) if x is not None]

    def call(*given):
        out, lse = op(case)(*given[:3], blocks, given[3] if case.has_sinks else None)
        return out, lse.masked_fill(lse.isneginf(), 0)  # dead rows: a difference of infinities is NaN

    assert torch.autograd.gradcheck(call, leaves)


def test_all_blocks_are_dense_attention(device):
    case = for_device(replace(CASES[0], lists="all", n=10, B=2, T=40), device)
    query, key, value, blocks, _ = case.make_inputs(device)
    out = sparse_attention(query, key, value, blocks, block_size=case.block_size)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)


def test_the_tokens_of_a_tree(device):
    """The list of layer 0 that tree attention selects is read as its last layer reads it, without rotation."""
    r = 16
    query, key, value = (normal((2, 500, h, 16), torch.float32, device, h) for h in (4, 2, 3))
    value = value[:, :, :2].contiguous()
    options = {"compression_rate": r, "max_top_nodes": 32, "top_k_per_layer": 4, "rope_base": None}
    _, _, _, parents = OPS.attention_forward(query, key, value, **options)
    lists = parents[0]
    layer = OPS.bottom_accumulate(query, key, value, lists, *no_rotation(4 * r, 16, device), r)
    out, lse = OPS.sparse_attention(query, key, value, lists, block_size=r)
    torch.testing.assert_close(out, layer[2] / layer[1][..., None], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, layer[0] + layer[1].log(), rtol=1e-5, atol=1e-5)
    assert (lists.amax(-1) == torch.arange(500, device=device).view(1, -1, 1) // r).all()


def no_rotation(size: int, K: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.ones(size, K // 2, device=device), torch.zeros(size, K // 2, device=device)


# ---- a list is a set


@given(data=st.data(), seed=seeds)
def test_neither_order_nor_repetition_nor_padding_changes_a_bit(data, seed, device):
    case = data.draw(problems(device))
    query, key, value, blocks, sinks = case.make_inputs(device, seed)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    count = -(-case.T // case.block_size)
    ignored = torch.tensor([-1, -7, count, count + 5, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    extra = ignored[torch.randint(6, (*blocks.shape[:3], 3), generator=generator).to(device)]
    again = torch.cat([blocks, blocks, extra], -1)
    order = torch.rand(again.shape, generator=generator).argsort(-1).to(device)
    shuffled = again.gather(-1, order)
    ours = with_gradients(op(case), (query, key, value, shuffled, sinks))
    assert_same_bits(ours, with_gradients(op(case), (query, key, value, blocks, sinks)))


@given(data=st.data(), seed=seeds)
def test_a_block_behind_the_diagonal_one_counts_as_absent(data, seed, device):
    case = data.draw(problems(device))
    query, key, value, blocks, sinks = case.make_inputs(device, seed)
    places = torch.arange(blocks.shape[1], device=device) * case.selection_stride + case.T - case.num_queries
    diagonal = (places // case.block_size).view(1, -1, 1, 1)
    kept = blocks.masked_fill(blocks > diagonal, -1)
    ours = with_gradients(op(case), (query, key, value, blocks, sinks))
    assert_same_bits(ours, with_gradients(op(case), (query, key, value, kept, sinks)))


@pytest.mark.parametrize("lists", ["nothing", "ignored"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_dead_rows(lists, has_sinks, device):
    case = for_device(replace(CASES[0], has_sinks=has_sinks, n=3), device)
    query, key, value, blocks, sinks = case.make_inputs(device)
    blocks = blocks[..., :0] if lists == "nothing" else torch.full_like(blocks, -1)
    found = dict(zip(GRADIENTS, with_gradients(op(case), (query, key, value, blocks, sinks)), strict=False))
    assert (found.pop("lse") == -torch.inf).all()
    assert all((x == 0).all() for x in found.values())


@pytest.mark.parametrize("upstream", [torch.nan, torch.inf])
def test_a_dead_row_gives_sinks_nothing_whatever_its_gradient(upstream, device):
    """Branches merged by their lse have such gradients: -inf less -inf."""
    case = for_device(replace(CASES[0], has_sinks=True), device)
    query, key, value, blocks, sinks = case.make_inputs(device)
    blocks[:, ::3] = -1
    leaves = [x.requires_grad_() for x in (query, key, value, sinks)]
    out, _ = op(case)(*leaves[:3], blocks, leaves[3])
    dout = normal(tuple(out.shape), out.dtype, device, 1)
    dout[:, ::3] = 0
    wanted = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    dout[:, ::3] = upstream
    assert_same_bits(torch.autograd.grad(out, leaves, dout), wanted, GRADIENTS[2:])


@pytest.mark.parametrize("width", [3, 8])
def test_memory_in_any_order_of_dimensions(width, device):
    """Also where the width is odd, so that rows are copied."""
    case = for_device(replace(CASES[0], H=1, H_kv=1, K=width), device)
    query, key, value, blocks, _ = case.make_inputs(device)
    wanted = with_gradients(op(case), (query, key, value, blocks, None))
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2), (3, 2, 1, 0)):
        back = [order.index(i) for i in range(4)]
        q, k, v = (x.permute(order).contiguous().permute(back) for x in (query, key, value))
        assert_same_bits(with_gradients(op(case), (q, k, v, blocks, None)), wanted)


def test_dead_rows_beside_living_ones(device):
    """A row that sees nothing changes no gradient of the others, whatever its own gradients are."""
    case = for_device(CASES[0], device)
    query, key, value, blocks, _ = case.make_inputs(device)
    blocks[:, ::3] = -1
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, lse = op(case)(*leaves, blocks, None)
    dout, dlse = (
        normal(tuple(out.shape), out.dtype, device, 1),
        normal(tuple(lse.shape), lse.dtype, device, 2),
    )
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    dout[:, ::3], dlse[:, ::3] = 0, 0
    assert_same_bits(found, torch.autograd.grad((out, lse), leaves, (dout, dlse)), GRADIENTS[2:])
    assert (found[0][:, ::3] == 0).all()


# ---- sinks


@pytest.mark.parametrize("sink", [-torch.inf, -200.0, 0.0, 5.0, 200.0, 3.4e38, torch.inf])
def test_extreme_sinks(sink, device):
    """Beside a huge sink out is 0 and lse keeps its gradient; a sink of -inf is none, to the bit."""
    case = for_device(replace(CASES[0], has_sinks=True), device)
    query, key, value, blocks, sinks = case.make_inputs(device)
    found = with_gradients(op(case), (query, key, value, blocks, torch.full_like(sinks, sink)))
    bare = with_gradients(op(case), (query, key, value, blocks, None))
    assert all(x.isfinite().all() for x in found)
    assert torch.equal(found[1], bare[1])
    if sink <= -200:
        assert_same_bits(found[:5], bare[:5])
        assert (found[5] == 0).all()
    if sink >= 200:
        assert (found[0] == 0).all()
        only_lse = with_gradients(op(case), (query, key, value, blocks, None), of="lse")
        torch.testing.assert_close(found[2], only_lse[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sinks_of_any_dtype(dtype, device):
    case = for_device(replace(CASES[0], has_sinks=True), device)
    query, key, value, blocks, sinks = case.make_inputs(device)
    rounded = sinks.to(dtype)
    found = with_gradients(op(case), (query, key, value, blocks, rounded))
    wanted = with_gradients(op(case), (query, key, value, blocks, rounded.float()))
    assert found[5].dtype == dtype
    assert_same_bits(found[:5], wanted[:5])
    torch.testing.assert_close(found[5], wanted[5].to(dtype))


# ---- what a row depends on


@given(data=st.data(), seed=seeds)
def test_a_row_has_its_bits_in_any_batch(data, seed, device):
    """Out, lse and dq of a row alone: of its sequence alone, of a shorter suffix, with later tokens cut off."""
    case = data.draw(problems(device))
    inputs = query, key, value, blocks, sinks = case.make_inputs(device, seed)
    whole = with_gradients(op(case), inputs)
    b = data.draw(st.integers(0, case.B - 1))
    stride = case.selection_stride
    first = data.draw(st.integers(0, (case.num_queries - 1) // stride)) * stride
    last = data.draw(st.integers(first + 1, case.num_queries))
    start = case.T - case.num_queries
    lists = slice(first // stride, -(-last // stride))
    part = (
        query[b : b + 1, first:last],
        key[b : b + 1, : start + last],
        value[b : b + 1, : start + last],
        blocks[b : b + 1, lists],
        sinks,
    )
    leaves = [x.detach().requires_grad_() for x in part[:3]]
    out, lse = op(case)(*leaves, *part[3:])
    dout = normal(tuple(whole[0].shape), whole[0].dtype, device, 99)[b : b + 1, first:last]
    dlse = normal(tuple(whole[1].shape), whole[1].dtype, device, 100)[b : b + 1, first:last]
    (dq,) = torch.autograd.grad((out, lse), leaves[:1], (dout, dlse))
    assert_same_bits((out, lse, dq), [x[b : b + 1, first:last] for x in whole[:3]])


@pytest.mark.parametrize("case", CASES + FAST_CASES, ids=lambda case: f"{case.id}-{case.K}")
def test_the_same_bits_in_every_run_and_for_any_threads(case, device):
    case = for_device(case, device)
    inputs = case.make_inputs(device)
    wanted = with_gradients(op(case), inputs)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with poisoned_memory():
                assert_same_bits(with_gradients(op(case), inputs), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout, device):
    case = for_device(replace(CASES[6], B=2), device)
    inputs = case.make_inputs(device)
    wanted = with_gradients(op(case), inputs)
    views = [LAYOUTS[layout](x) if isinstance(x, Tensor) and x.dim() > 1 else x for x in inputs]
    assert_same_bits(with_gradients(op(case), views), wanted)


# ---- special values


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_seen_may_be_anything(poison, device):
    """Tokens that no list holds, and those behind a query, reach neither values nor gradients."""
    case = for_device(replace(CASES[0], T=40, n=3), device)
    query, key, value, blocks, _ = case.make_inputs(device)
    unseen = 4  # a block
    blocks = blocks.masked_fill(blocks == unseen, -1)
    clean = with_gradients(op(case), (query, key, value, blocks, None))
    rows = slice(unseen * case.block_size, (unseen + 1) * case.block_size)
    key, value = key.clone(), value.clone()
    key[:, rows], value[:, rows] = poison, poison
    assert_same_bits(with_gradients(op(case), (query, key, value, blocks, None)), clean)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_seen_value_that_is_not_finite_stays_in_its_rows(poison, device):
    case = for_device(CASES[0], device)
    query, key, value, blocks, _ = case.make_inputs(device)
    clean = op(case)(query, key, value, blocks, None)[0]
    token = 2 * case.block_size
    value[:, token] = poison
    found = op(case)(query, key, value, blocks, None)[0]
    reads = (blocks == 2).any(-1).repeat_interleave(case.H // case.H_kv, -1)
    reads[:, :token] = False
    assert not found[reads].isfinite().any()
    assert torch.equal(found[~reads], clean[~reads])


# ---- sizes


@pytest.mark.parametrize("shape", [(0, 8, 8), (2, 0, 8), (2, 0, 0)])
def test_empty(shape, device):
    B, T_q, T = shape
    query = torch.randn(B, T_q, 4, 16, device=device).requires_grad_()
    key = torch.randn(B, T, 2, 16, device=device).requires_grad_()
    value = torch.randn(B, T, 2, 8, device=device).requires_grad_()
    sinks = torch.randn(4, device=device).requires_grad_()
    blocks = torch.zeros(B, T_q, 2, 3, dtype=torch.int32, device=device)
    with poisoned_memory():
        out, lse = sparse_attention(query, key, value, blocks, sinks=sinks, return_lse=True)
        (out.sum() + lse.sum()).backward()
    assert out.shape == (B, T_q, 4, 8)
    assert lse.shape == (B, T_q, 4)
    for x in (query, key, value, sinks):
        assert x.grad is not None
        assert (x.grad == 0).all()


def test_returns(device):
    case = for_device(CASES[0], device)
    query, key, value, blocks, _ = case.make_inputs(device)
    out = htree_ops.sparse_attention(query, key, value, blocks, block_size=case.block_size)
    both = htree_ops.sparse_attention(query, key, value, blocks, block_size=case.block_size, return_lse=True)
    assert isinstance(out, Tensor)
    assert_same_bits((out, both[1]), both)


@pytest.mark.parametrize("mask", [(True, False, False, False), (False, True, False, True), (False,) * 4])
def test_gradients_that_are_not_wanted(mask, device):
    case = for_device(replace(CASES[6]), device)
    query, key, value, blocks, sinks = case.make_inputs(device)
    out, lse = op(case)(query, key, value, blocks, sinks)
    args = (query, key, value, blocks, out, lse, sinks, torch.ones_like(out), torch.ones_like(lse))
    found = OPS._sparse_attention_backward(*args, **case.options(), output_mask=mask)
    whole = OPS._sparse_attention_backward(*args, **case.options())
    for wanted, ours, theirs in zip(mask, found, whole, strict=True):
        assert (ours is not None) == wanted
        assert ours is None or torch.equal(ours, theirs)


def test_merging_branches_by_their_lse(device):
    """Two lists that part one list, merged by lse, give its values and gradients: what NSA and a ring do."""
    case = for_device(replace(CASES[0], n=4), device)
    query, key, value, blocks, _ = case.make_inputs(device)
    even, odd = (blocks.masked_fill(blocks % 2 == parity, -1) for parity in (1, 0))

    def merged(q, k, v, *_):
        (a, x), (b, y) = op(case)(q, k, v, even, None), op(case)(q, k, v, odd, None)
        lse = torch.logaddexp(x, y)
        weights = [(z - lse).exp().unsqueeze(-1) for z in (x, y)]
        return weights[0] * a + weights[1] * b, lse

    found = with_gradients(merged, (query, key, value))
    wanted = with_gradients(op(case), (query, key, value, blocks, None))
    for name, ours, theirs in zip(GRADIENTS, found, wanted, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_tolerances_are_of_every_dtype():
    assert {case.dtype for case in CASES} == set(TOLERANCES)
