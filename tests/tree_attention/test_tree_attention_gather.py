"""The gathers of tree attention's tensor-core path: those that queries share (Hopper), and one for each query."""

import functools
import math

import pytest
import torch
from tree_attention_fast import assert_fast_output, assert_forward
from tree_attention_fast import model as fast_model

import htree_ops  # noqa: F401
from tests.support.cases import case_id
from tests.support.compare import assert_close_spec
from tests.support.tree_attention_cases import frequencies
from tests.support.tree_attention_checks import forced

pytestmark = pytest.mark.gpu

op = torch.ops.htree
# One kv head, so that groups are as large as possible.
model = functools.partial(fast_model, H_kv=1)

SHAPES = [
    model("d32", K=32, V=32),
    model("d64", H=16, H_kv=2),
    model("d128", K=128, V=128),
    *(model(f"group{g}", H=2 * g, H_kv=2, K=128, V=128) for g in (1, 3, 4, 9, 16)),
    model("batch", B=3, T=523),
    model("three_layers", T=3000, top_k=4, M=32, K=128, V=128),
    model("three_layers_group16", T=3000, top_k=4, M=32, H=16),
    model("long_lists", T=5000, top_k=128, M=512, K=128, V=128),
    model("one_layer", T=900, M=1024, top_k=64),
    model("stride2", selection_stride=2, K=128, V=128),
    *(model(f"stride{s}", selection_stride=s, T=2999) for s in (4, 8, 16)),
    model("suffix", num_queries=77),
    model("decode", num_queries=1),
    model("no_rotation", rope_base=None, K=128, V=128),
    model("inv_freq", inv_freq=frequencies(128), K=128, V=128),
    model("peaked", spread=4.0, K=128, V=128),
    *(model(f"short{t}", T=t, K=128, V=128) for t in (1, 15, 16, 17, 33)),
]
CASES = [s.with_dtype(dtype) for s in SHAPES for dtype in (torch.bfloat16, torch.float16)]


@pytest.fixture(params=["auto", "gathered", "private"])
def gather(request, monkeypatch):
    monkeypatch.setenv("HTREE_TREE_GATHER", request.param)
    return str(request.param)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_forward_under_its_own_selection(case, gather, nan_memory):
    assert_forward(case, case.spread**2)


@pytest.mark.parametrize("length", [65_537, 140_000])
def test_lists_over_several_windows(length, gather):
    """Lists go over several windows of parents; the last queries agree with the reference, a repeat with all."""
    case = model("windows", T=length, H=4, K=32, V=32, top_k=32, M=512)
    q, k, v, options = case.make_call("cuda")
    out, _, _, parents = op.attention_forward(q, k, v, **options)
    tail = [x[:, -64:].contiguous() for x in parents]
    expected = forced(q[:, -64:].contiguous(), k, v, tail, options)
    assert_fast_output(out[:, -64:], expected.out, v)
    assert torch.equal(out, op.attention(q, k, v, **options))
    suffix = op.attention(q[:, -64:], k, v, **options)
    assert torch.equal(out[:, -64:], suffix), "a query alone computes what it does among others"


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("top_k", "top_nodes"), [(64, 1024), (16, 128)], ids=["two_layers", "three_layers"])
def test_the_gathers_agree(stride, top_k, top_nodes, monkeypatch):
    case = model(
        "agree", T=16_000, H=16, H_kv=2, K=128, V=128, top_k=top_k, M=top_nodes, selection_stride=stride
    )
    q, k, v = case.make_qkv("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **case.reference_options())
    monkeypatch.setenv("HTREE_TREE_GATHER", "private")
    private, private_max, private_sum, private_parents = op.attention_forward(
        q, k, v, **case.reference_options()
    )
    assert all(torch.equal(x, y) for x, y in zip(parents, private_parents, strict=True)), "one selection"
    assert_close_spec(out, private.double(), rtol=8e-3, atol=4e-3 * float(v.abs().max()))
    lse = private_max.double() + private_sum.double().log()
    assert_close_spec(gmax.double() + gsum.double().log(), lse, rtol=2e-3, atol=2e-3, name="lse")


@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_the_future_changes_nothing(stride, group, gather):
    case = model("causal", H=group, K=128, V=128, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    out = op.attention(q, k, v, **options)
    for t in (0, 7, 15, 16, 100, 1023, 1400):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, t + 1 :] = math.nan
        assert torch.equal(op.attention(*changed, **options)[:, : t + 1], out[:, : t + 1])


def test_an_unknown_gather_is_refused(monkeypatch):
    case = model("unknown", T=64)
    q, k, v = case.make_qkv("cuda")
    monkeypatch.setenv("HTREE_TREE_GATHER", "shared")
    with pytest.raises(ValueError, match="HTREE_TREE_GATHER"):
        op.attention(q, k, v, **case.reference_options())
    monkeypatch.setenv("HTREE_TREE_GATHER", "")
    unset = op.attention(q, k, v, **case.reference_options())
    monkeypatch.delenv("HTREE_TREE_GATHER")
    assert torch.equal(unset, op.attention(q, k, v, **case.reference_options()))
