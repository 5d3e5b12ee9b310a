"""Gradients of tree attention through torch's autograd: masks, refusals (docs/semantics §0.5, §1.10)."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint
from tree_attention_models import CASES, OPS, OPTIONS, assert_same, gradients, qkv

import htree_ops
from tests.support.cases import normal
from tests.support.tree_attention_calls import calls


def test_undefined_and_unused_gradients(device):
    q, k, v = qkv(device)
    pk, pv = OPS.tree_build(k, v, 4)
    (dk,) = torch.autograd.grad(pk.sum(), k)  # the gradient of pv is undefined
    assert torch.equal(
        dk, OPS.tree_build_backward(torch.ones_like(pk), torch.zeros_like(pv), k.shape[1], 4)[0]
    )
    out = htree_ops.tree_attention(q, k, v, **OPTIONS)
    unrelated = (q * 2).sum()
    assert torch.autograd.grad(unrelated, (k,), allow_unused=True) == (None,)
    assert torch.autograd.grad((out * 0).sum() + unrelated, q)[0].eq(2).all()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_frozen_inputs_cost_no_gradient(wanted, device):
    full = gradients(lambda *x: htree_ops.tree_attention(*x, **OPTIONS), qkv(device))
    inputs = [x.requires_grad_(i in wanted) for i, x in enumerate(qkv(device))]
    leaves = tuple(inputs[i] for i in wanted)
    masks = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is OPS._attention_rows_backward.default:
                masks.append(tuple(args[10]))
            return func(*args, **(kwargs or {}))

    with Record():
        found = gradients(lambda *_: htree_ops.tree_attention(*inputs, **OPTIONS), leaves)
    assert masks == [tuple(i in wanted for i in range(3))]
    assert_same(found[1:], tuple(full[1 + i] for i in wanted), rtol=0, atol=0)


def test_store_parents_changes_no_bit(device):
    models = [
        lambda *x, stored=stored: htree_ops.tree_attention(*x, **OPTIONS, store_parents=stored)
        for stored in (True, False)
    ]
    stored, recomputed = (gradients(model, qkv(device)) for model in models)
    assert_same(stored, recomputed, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["tree_build", "attention"])
def test_double_backward_is_refused(name, device):
    q, k, v = qkv(device)
    out = OPS.tree_build(k, v, 4)[0] if name == "tree_build" else OPS.attention(q, k, v, 4, 8, 2)
    (dk,) = torch.autograd.grad((out * out).sum(), k, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dk.sum().backward()


def test_rope_differentiates_twice_and_refuses_tables_with_gradient(device):
    x = normal((2, 5, 3, 4), torch.float64, device, 0).requires_grad_()
    cos, sin = OPS.rope_cache(7, 4, dtype=torch.float64, device=device)
    positions = torch.tensor([0, 3, 6, 1, 1], device=device)
    assert torch.autograd.gradgradcheck(lambda x: OPS.rope(x, cos, sin, positions), (x,))
    with pytest.raises(NotImplementedError, match="cos and sin"):
        OPS.rope(x, cos.clone().requires_grad_(), sin, positions)


NO_GRADIENT = (
    "compute_scores",
    "accumulate_non_topk",
    "compute_and_select",
    "subtract_topk",
    "select_accumulate",
    "bottom_accumulate",
    "final_normalize",
    "attention_forward",
    "_attention_rows",
)


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_a_backward_without_formula_raises(name, device):
    call = next(c for c in calls(CASES["batch"], device) if c.op == name)
    args = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in call.args]
    result = call.overload(*args)
    first = next(x for x in ([result] if isinstance(result, Tensor) else result) if x.is_floating_point())
    with pytest.raises(RuntimeError, match="derivative"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["mask_topk_scores_", "merge_to_global_"])
def test_writing_ops_refuse_gradients_and_count_versions(name, device):
    call = next(c for c in calls(CASES["batch"], device) if c.op == name)
    written = call.args[:1] if name == "mask_topk_scores_" else call.args[:3]
    versions = [x._version for x in written]
    assert call() is None
    assert [x._version for x in written] == [version + 1 for version in versions]
    floating = [i for i, x in enumerate(call.args) if x.is_floating_point()]
    for position in floating:
        args = [x.clone() for x in call.args]
        args[position].requires_grad_()
        with pytest.raises(NotImplementedError, match="no gradient"):
            call.overload(*args)
        with torch.no_grad():
            call.overload(*args)
    with torch.inference_mode():
        call.overload(*[x.clone() for x in call.args])
    leaf = torch.ones_like(written[0], requires_grad=True)
    saved = leaf * written[0]  # the product saves what the op then overwrites
    call()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_written_arguments_must_not_overlap(device):
    call = next(c for c in calls(CASES["batch"], device) if c.op == "merge_to_global_")
    gmax, _, gout, *local = call.args
    with pytest.raises(RuntimeError):
        call.overload(gmax, gmax, gout, *local)
    with pytest.raises(RuntimeError):
        call.overload(*call.args[:2], gout[:1].expand_as(gout), *local)


@pytest.mark.parametrize("name", ["mask_topk_scores_", "merge_to_global_"])
def test_written_arguments_may_have_any_strides(name, device):
    call = next(c for c in calls(CASES["batch"], device) if c.op == name)
    plain = [x.clone() for x in call.args]
    strided = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in plain]
    call.overload(*plain)
    call.overload(*strided)
    assert_same(tuple(strided), tuple(plain), rtol=0, atol=0)


def test_activation_checkpointing(device):
    def model(*x):
        return htree_ops.tree_attention(*x, **OPTIONS)

    def again(*x):
        return checkpoint(model, *x, use_reentrant=False)

    assert_same(gradients(again, qkv(device)), gradients(model, qkv(device)), rtol=0, atol=0)


def test_torch_func_grad_is_refused(device):
    q, k, v = (x.detach() for x in qkv(device))
    with pytest.raises(RuntimeError, match=r"functorch transforms|setup_context"):
        torch.func.grad(lambda q: htree_ops.tree_attention(q, k, v, **OPTIONS).sum())(q)


def test_compiled_autograd(device):
    """Compiled autograd can trace the backward of the C++ functions."""
    inputs = [x.requires_grad_() for x in qkv(device)]

    def found(traced):
        out = htree_ops.tree_attention(*inputs, **OPTIONS)
        weights = OPS.causal_softmax(OPS.hadamard_transform(out.flatten(2)[..., :16]).mT)
        loss = weights.square().sum() + out.sum()
        with compiled_autograd._enable(torch.compile(backend="eager")) if traced else nullcontext():
            loss.backward()
        gradients = tuple(x.grad for x in inputs)
        for x in inputs:
            x.grad = None
        return gradients

    for one, other in zip(found(False), found(True), strict=True):
        assert torch.equal(one, other)
