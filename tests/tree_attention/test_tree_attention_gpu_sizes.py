"""Tree attention on the tensor cores at every short length and beyond 2^31 elements."""

import dataclasses
import itertools

import pytest
import torch
from tree_attention_fast import LARGE, assert_fast_output, assert_small_error, model

import htree_ops  # noqa: F401
from tests.support.compare import assert_close_spec
from tests.support.tree_attention_checks import assert_lists, forced, reference_gradients

pytestmark = pytest.mark.gpu

op = torch.ops.htree


@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 8, 16])
def test_every_length_up_to_64(group, stride, nan_memory):
    """The tree has one to four nodes of 16 tokens, in one layer and in two."""
    kinds = itertools.product((32, 64, 128), (torch.bfloat16, torch.float16), (16, 64))
    for length, (width, dtype, top_nodes) in zip(range(1, 65), itertools.cycle(kinds)):
        case = model(
            "short", dtype, T=length, H=group, H_kv=1, K=width, V=width, top_k=4, M=top_nodes,
            selection_stride=stride,
        )  # fmt: skip
        q, k, v, options = case.make_call("cuda")
        out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
        assert_lists(parents, length, length, options)
        assert_fast_output(out, forced(q, k, v, parents, options).out, v)
        dout = torch.randn_like(out)
        gradients = op.attention_backward(dout, q, k, v, out, gmax, gsum, parents, **options)
        wanted = reference_gradients(q, k, v, dout, parents, options)
        for name, gradient, expected in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
            # where each query sees one token alone, dq and dk are zero
            size = expected.norm().clamp(min=float(dout.norm()))
            error = (gradient.double() - expected).norm()
            assert error < 2e-2 * size, f"{name}, T = {length}: error {error:.2e} of {size:.2e}"


@pytest.mark.parametrize(("stride", "span"), [(1, None), (16, None), (16, 4)])
def test_more_than_2_31_elements(stride, span):
    """The last rows of a long call equal those of a call that has no other rows, forward and backward."""
    case = model("large", selection_stride=stride, selection_span=span, **LARGE)
    assert case.T * case.H * case.K > 2**31
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    tail = [x[:, -64:].contiguous() for x in (q, out, gmax, gsum)]
    small = dataclasses.replace(case, num_queries=64)
    short = op.attention_forward(tail[0], k, v, **small.reference_options())
    for ours, theirs in zip(tail[1:], short[:3], strict=True):
        assert torch.equal(ours, theirs)
    for lists, few in zip(parents, short[3], strict=True):
        assert torch.equal(lists[:, -few.shape[1] :], few)
    expected = forced(tail[0], k, v, short[3], small.reference_options())
    assert_fast_output(short[0], expected.out, v)
    del expected

    # Only the last rows have a gradient, so the others add zero to dk and dv.
    dout = torch.zeros_like(out)
    dout[:, -64:] = torch.randn_like(tail[1])
    gradients = op.attention_backward(dout, q, k, v, out, gmax, gsum, parents, **options)
    assert not gradients[0][:, :-64].any()
    few_dout = dout[:, -64:].contiguous()
    few = op.attention_backward(few_dout, tail[0], k, v, *short, **small.reference_options())
    ours = (gradients[0][:, -64:], *gradients[1:])
    del dout, q, out, gradients
    wanted = reference_gradients(tail[0], k, v, few_dout, short[3], small.reference_options())
    for name, gradient, alone, expected in zip(("dq", "dk", "dv"), ours, few, wanted, strict=True):
        assert_small_error(alone, expected, f"{name} of 64 queries")
        assert_small_error(gradient, expected, f"{name} of all")


def test_a_layer_of_more_than_2_31_elements():
    keys = torch.randn(1, 2**24 + 160, 1, 130, device="cuda", dtype=torch.bfloat16)
    assert keys.numel() > 2**31
    parent_keys, _ = op.tree_build(keys, keys, 16)
    assert_close_spec(parent_keys[0, -1], keys[0, -16:].double().mean(0), rtol=8e-3, atol=1e-8)
    del parent_keys
    means = op.span_means(keys, 2)
    assert means.shape == (1, 2**23 + 80, 1, 130)
    assert_close_spec(means[0, -1], keys[0, -2:].double().mean(0), rtol=8e-3, atol=1e-8)
