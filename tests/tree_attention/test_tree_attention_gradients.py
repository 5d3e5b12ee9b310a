"""Gradients of tree attention (docs/semantics §1.10): gradcheck, the reference, masks and refusals."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_attention_helpers import refused
from tree_attention_strategies import EVERY_IMPORTANCE, dtypes_of, problems, seeds

import htree_ops  # noqa: F401  registers torch.ops.htree
import htree_ops.reference.tree_attention as ref
from tests.support.cases import case_id, normal
from tests.support.devices import poisoned_memory
from tests.support.tree_attention_cases import EVERY_CASE, FREE_SHAPES, GRADIENT_SHAPES, NEXT_SHAPES
from tests.support.tree_attention_checks import assert_gradients, reference_gradients

ops = torch.ops.htree
MASKS = list(itertools.product([False, True], repeat=3))
by_small_case = pytest.mark.parametrize("case", GRADIENT_SHAPES, ids=case_id)


def leaves_of(tensors, mask=(True, True, True)):
    return [x.detach().requires_grad_(wanted) for x, wanted in zip(tensors, mask, strict=True)]


def dout_of(case, device, seed=0):
    return normal((case.B, case.T_q, case.H, case.V), case.dtype, device, seed + 17)


def gradients(q, k, v, case, dout, store_parents=True):
    leaves = leaves_of((q, k, v))
    with poisoned_memory():
        out = ops.attention(*leaves, **case.reference_options(), store_parents=store_parents)
        return torch.autograd.grad(out, leaves, dout)


def check_against_reference(got, q, k, v, case, dout):
    parents = [lists.cpu() for lists in ops.attention_forward(q, k, v, **case.reference_options())[3]]
    cpu = [x.detach().cpu() for x in (q, k, v, dout)]
    wanted = reference_gradients(*cpu, parents, case.reference_options())
    assert_gradients([None if x is None else x.cpu() for x in got], wanted, cpu[3], *cpu[:3])


def small(case, device):
    """The case in float64 on the CPU, and in float32 on a GPU."""
    return case if device == "cpu" else case.with_dtype(torch.float32)


#: Those of open_next and of M above k*r, made small.
OPTION_SHAPES = [
    dataclasses.replace(shape, dtype=torch.float64, B=1, H=2, H_kv=1, K=2, V=2, selection_stride=2, **sizes)
    for shapes, name, sizes in (
        (NEXT_SHAPES, "k3_next", {"T": 40, "top_k": 3, "M": 12}),
        (FREE_SHAPES, "stride4_free", {"T": 34, "M": 9}),
    )
    for shape in shapes
    if shape.name == name
]


@pytest.mark.parametrize("case", [*GRADIENT_SHAPES, *OPTION_SHAPES], ids=case_id)
@pytest.mark.parametrize("store_parents", [True, False])
def test_gradcheck(case, store_parents):
    inputs = leaves_of(case.make_separated("cpu"))
    options = case.reference_options()
    assert torch.autograd.gradcheck(
        lambda q, k, v: ops.attention(q, k, v, **options, store_parents=store_parents), inputs
    )


@given(data=st.data(), seed=seeds)
def test_h14_gradcheck_on_drawn_problems(data, seed):
    case = data.draw(
        problems((torch.float64,), importances=EVERY_IMPORTANCE, max_length=30, spreads=(1.0, 0.5))
    )
    inputs = leaves_of(case.make_separated("cpu", seed))
    assert torch.autograd.gradcheck(
        lambda q, k, v: ops.attention(q, k, v, **case.reference_options()), inputs, fast_mode=True
    )


@pytest.mark.parametrize("case", EVERY_CASE, ids=case_id)
def test_gradients_are_the_reference_under_the_same_lists(case, device):
    q, k, v = case.make_qkv(device)
    if refused(case, device, lambda: ops.attention(q, k, v, **case.reference_options())):
        return
    dout = dout_of(case, device)
    got = gradients(q, k, v, case, dout)
    assert [x.shape for x in got] == [q.shape, k.shape, v.shape]
    assert all(x.dtype == case.dtype for x in got)
    check_against_reference(got, q, k, v, case, dout)
    again = gradients(q, k, v, case, dout, store_parents=False)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True)), "selected again, the same bits"


@given(data=st.data(), seed=seeds)
def test_gradients_of_drawn_problems(data, seed, device):
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE, max_length=60))
    q, k, v = case.make_qkv(device, seed)
    dout = dout_of(case, device, seed % 1000)
    stored = gradients(q, k, v, case, dout)
    check_against_reference(stored, q, k, v, case, dout)
    for again in (gradients(q, k, v, case, dout), gradients(q, k, v, case, dout, store_parents=False)):
        for ours, theirs in zip(again, stored, strict=True):
            assert torch.equal(ours, theirs)


@by_small_case
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_output_mask_of_the_op(case, mask, device):
    case = small(case, device)
    q, k, v = case.make_qkv(device)
    dout = dout_of(case, device)
    out, gmax, gsum, parents = ops.attention_forward(q, k, v, *case.op_options())
    for lists in (parents, []):
        with poisoned_memory():
            got = ops.attention_backward(
                dout, q, k, v, out, gmax, gsum, lists, *case.op_options(), output_mask=list(mask)
            )
        assert [x is not None for x in got] == list(mask)
        check_against_reference(got, q, k, v, case, dout)


@by_small_case
@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_frozen_inputs_get_no_gradient(case, mask, device):
    case = small(case, device)
    tensors = case.make_qkv(device)
    leaves = leaves_of(tensors, mask)
    dout = dout_of(case, device)
    ops.attention(*leaves, *case.op_options()).backward(dout)
    assert [x.grad is not None for x in leaves] == list(mask)
    check_against_reference([x.grad for x in leaves], *tensors, case, dout)


def test_nothing_is_recorded_without_an_input_that_requires_grad(device):
    case = small(GRADIENT_SHAPES[1], device)
    assert ops.attention(*case.make_qkv(device), *case.op_options()).grad_fn is None


@by_small_case
@pytest.mark.parametrize("layout", ["expanded", "transposed", "every second"])
def test_gradient_of_the_output_in_any_layout(case, layout, device):
    case = small(case, device)
    q, k, v = case.make_qkv(device)
    dout = dout_of(case, device)
    if layout == "expanded":
        laid = dout[:1, :1, :1, :1].expand_as(dout)
    elif layout == "transposed":
        laid = dout.transpose(1, 3).contiguous().transpose(1, 3)
    else:
        laid = torch.stack([dout, torch.full_like(dout, torch.nan)], dim=-1)[..., 0]
    strided = gradients(q, k, v, case, laid)
    for ours, theirs in zip(strided, gradients(q, k, v, case, laid.contiguous()), strict=True):
        assert torch.equal(ours, theirs)


class Drop(torch.autograd.Function):
    """Identity that passes no gradient at all."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_an_undefined_gradient_gives_no_gradient(device):
    case = small(GRADIENT_SHAPES[1], device)
    leaves = leaves_of(case.make_qkv(device))
    out = ops.attention(*leaves, *case.op_options())
    got = torch.autograd.grad(Drop.apply(out).sum(), leaves, allow_unused=True)
    assert all(x is None or not x.any() for x in got)
    out = ops.attention(*leaves, *case.op_options())
    got = torch.autograd.grad(Drop.apply(out).sum() + 2 * out.sum(), leaves)
    wanted = gradients(*leaves, case, torch.full_like(out, 2.0))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, wanted, strict=True))


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_inputs_changed_in_place_are_noticed(changed, device):
    case = small(GRADIENT_SHAPES[1], device)
    tensors = [x.clone() for x in leaves_of(case.make_qkv(device))]
    out = ops.attention(*tensors, *case.op_options())
    with torch.no_grad():
        tensors[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(("length", "num_queries"), [(0, 0), (20, 0), (20, 3)])
def test_keys_without_queries_have_zero_gradients(length, num_queries, device):
    q = torch.randn(2, num_queries, 2, 4, device=device)
    k, v = torch.randn(2, 2, length, 1, 4, device=device)
    leaves = leaves_of((q, k, v))
    out = ops.attention(*leaves, 4, 8, 2)
    got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert [x.shape for x in got] == [q.shape, k.shape, v.shape]
    if not num_queries:
        assert not any(x.any() for x in got)


# ---- the differentiable parts


@pytest.mark.parametrize(("length", "rate"), [(1, 2), (7, 3), (16, 4), (13, 5)])
def test_gradcheck_of_tree_build(length, rate):
    k = torch.randn(2, length, 2, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, length, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ops.tree_build(a, b, rate), (k, v))


@pytest.mark.parametrize("used", ["k", "v"])
def test_tree_build_with_one_output_used(used, device):
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(1, 7, 2, width, generator=generator).to(device).requires_grad_() for width in (3, 2))
    pk, pv = ops.tree_build(k, v, 3)
    (pk if used == "k" else pv).sum().backward()
    leaf, other = (k, v) if used == "k" else (v, k)
    share = 1 / ref.child_counts(7, 3)[torch.arange(7) // 3].view(1, 7, 1, 1).expand(leaf.shape)
    torch.testing.assert_close(leaf.grad.cpu(), share)
    assert other.grad is None or not other.grad.any()


@pytest.mark.parametrize("inverse", [False, True])
def test_gradcheck_of_rope(inverse):
    x = torch.randn(2, 5, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = ref.rope_cache(9, 6, dtype=torch.float64)
    for positions in (torch.tensor([0, 8, 3, 3, 1]), torch.randint(0, 9, (2, 5), dtype=torch.int32)):
        assert torch.autograd.gradcheck(
            lambda y: ops.rope(y, cos, sin, positions, inverse),  # noqa: B023
            (x,),
        )


def test_second_derivative_of_rope_is_a_rotation(device):
    x = torch.randn(1, 6, 1, 4, device=device, requires_grad=True)
    weight = torch.randn(1, 6, 1, 4, device=device, requires_grad=True)
    cos, sin = ref.rope_cache(6, 4)
    steps = torch.arange(6)
    out = ops.rope(x, cos.to(device), sin.to(device), steps.to(device))
    (first,) = torch.autograd.grad((out * weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    torch.testing.assert_close(second.cpu(), ref.rope(torch.ones(1, 6, 1, 4), cos, sin, steps))
