"""Scores of span means in int8 (docs/semantics/tree_attention.md §1.15).

What they share with other spans is tested in test_selection_span.py.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tree_attention_helpers import on

import htree_ops
import htree_ops.reference.tree_attention as ref
from htree_ops.reference.tree_attention.stages import round_rows
from htree_ops.testing.cases import case_id
from htree_ops.testing.devices import poisoned_memory
from htree_ops.testing.tree_attention_cases import TreeAttentionCase
from htree_ops.testing.tree_attention_checks import assert_lists

ops = torch.ops.htree
pytestmark = pytest.mark.usefixtures("one_thread")


def small(**sizes):
    defaults = {"T": 96, "H": 4, "H_kv": 2, "K": 8, "V": 4, "r": 4, "top_k": 3, "M": 12, "selection_span": 2}
    return TreeAttentionCase(
        name="small", dtype=torch.float32, selection_dtype="int8", **{**defaults, **sizes}
    )


def forward(inputs, case):
    with poisoned_memory():
        return ops.attention_forward(*inputs, **case.reference_options())


def lists_of(inputs, case, device):
    return [x.cpu() for x in forward(on(device, *inputs), case)[3]]


# ---- the definition


def test_rows_are_rounded_as_the_page_says():
    x = torch.tensor(
        [[127.0, -63.5, 62.5, 0.49], [0.0, -2.0, 1.0, 0.5], [0.0] * 4, [2.0**-101] * 4, [1.0, math.inf, 0.0, 0.0],
         [math.nan, 3.0, 0.0, 0.0], [3e38, -3e38, 1e38, 0.0]],
        dtype=torch.float64,
    )  # fmt: skip
    integers, steps = round_rows(x)
    assert integers.tolist()[:4] == [[127, -64, 62, 0], [0, -127, 64, 32], [0] * 4, [0] * 4]
    assert steps[:4, 0].tolist() == [1.0, 2 / 127, 0.0, 0.0]
    assert integers[4:6].abs().sum() == 0
    assert steps[4:6].isnan().all()
    assert integers[6].tolist() == [127, -127, 42, 0]
    assert torch.equal(steps[6], x[6, :1] / 127)


def scores_by_loops(q, k, case, token, kv_head):
    """Scores [G][n - 1][means] of a query at the first layer above the tokens, in whole numbers."""
    table = ref.rope_cache(case.r * case.top_k, case.K, case.rope_base, dtype=torch.float64)
    own, span = token // case.r, case.selection_span

    def rounded(row, position):
        row = ref.rotate(row.double(), table[0, position], table[1, position])
        largest = max(abs(float(x)) for x in row)
        return [round(float(x) * 127 / largest) for x in row], largest / 127

    found = []
    for head in range(kv_head * case.H // case.H_kv, (kv_head + 1) * case.H // case.H_kv):
        numbers, step = rounded(q[0, token, head], own)
        rows = []
        for p in range(own):
            means = []
            for first in range(p * case.r, (p + 1) * case.r, span):
                mean, mean_step = rounded(k[0, first : first + span, kv_head].double().mean(0), p)
                means.append(
                    sum(a * b for a, b in zip(numbers, mean, strict=True)) * step * mean_step * case.K**-0.5
                )
            rows.append(means)
        found.append(rows)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(("H", "H_kv"), [(1, 1), (4, 2)])
def test_two_layers_select_by_whole_numbers(H, H_kv, device):
    dtype = torch.float64 if device == "cpu" else torch.float32
    case = dataclasses.replace(small(T=64, H=H, H_kv=H_kv, top_k=4, M=16, spread=2.0), dtype=dtype)
    q, k, v = case.make_qkv("cpu")
    bottom = lists_of((q, k, v), case, device)[0]
    for token in (20, 43, 63):
        for kv_head in range(H_kv):
            scores = scores_by_loops(q, k, case, token, kv_head)
            weights = torch.softmax(scores.flatten(1), 1).view_as(scores).sum((0, 2))
            best = {*weights.topk(case.top_k - 1).indices.tolist(), token // case.r}
            assert set(bottom[0, token, kv_head].tolist()) == best


def test_it_changes_lists_but_not_much(device):
    """Some lists differ from those without int8, which hold hardly more importance."""
    case = small(T=700, K=32, r=16, top_k=8, M=64)
    inputs = case.make_qkv("cpu")
    rounded = lists_of(inputs, case, device)
    plain = lists_of(inputs, dataclasses.replace(case, selection_dtype=None), device)
    assert not torch.equal(rounded[0], plain[0])
    traces = [
        ref.htree_forward_naive(
            *inputs,
            **{**case.reference_options(), "selection_dtype": None},
            parents=lists,
            with_importance=True,
            compute_dtype=torch.float64,
        ).trace[0]
        for lists in (rounded, plain)
    ]
    ours, best = ((trace.importance * trace.selected).sum() for trace in traces)
    assert ours > 0.998 * best


# ---- which scores are rounded


DEPTHS = [(3, 12), (2, 8), (4, 5), (1, 4)]  # k, M


@pytest.mark.parametrize(("top_k", "top_nodes"), DEPTHS)
@pytest.mark.parametrize("stride", [1, 4])
def test_a_longer_text_changes_no_row(top_k, top_nodes, stride):
    """Whatever layers it adds: on the CPU all kernels are the same. Longer lists stay those of the shorter text."""
    case = small(T=400, top_k=top_k, M=top_nodes, selection_stride=stride)
    q, k, v = case.make_qkv("cpu")
    whole = forward((q, k, v), case)
    for length in (40, 60, 100, 200):
        part = forward([x[:, :length] for x in (q, k, v)], case)
        for ours, theirs in zip(part[:3], whole[:3], strict=True):
            assert torch.equal(ours, theirs[:, :length])
        for ours, theirs in zip(part[3], whole[3], strict=False):
            assert torch.equal(ours, theirs[:, : ours.shape[1]])


def test_lists_that_are_not_full_are_scored_as_without(device):
    """One layer at a time: the same bits as without int8 where a list leaves a parent out, others may change."""
    case = small(T=1000, top_k=32, M=128)
    q, k, v = case.make_qkv("cpu")
    stage = case.make_stages(q, k, v)[1]
    span_k = ref.span_means(k, 2)
    table = case.make_table("cpu")
    full = ref.candidates(stage.parents, 1, stage.layer_k.shape[1], case.r).full
    assert full.any()
    assert not full.all()
    placed = on(device, q, stage.layer_k, stage.parents, *table)
    found = [
        ops.recompute_selection(
            *placed, 1, case.r, case.top_k, span_k=span_k.to(device), selection_span=2, selection_dtype=dtype
        ).cpu()
        for dtype in (None, "int8")
    ]
    assert torch.equal(found[0][~full], found[1][~full])
    assert not torch.equal(found[0][full], found[1][full])


@pytest.mark.parametrize(
    "case", [small(T=96), small(T=400, top_k=2, M=8), small(T=90, r=3, M=9)], ids=case_id
)
def test_means_of_whole_nodes_are_rounded_too(case, device):
    """c = r is not None here."""
    case = dataclasses.replace(case, selection_span=case.r)
    inputs = case.make_qkv("cpu")
    lists = lists_of(inputs, case, device)
    assert_lists(lists, case.T_q, case.T, case.reference_options())
    wanted = ref.htree_forward_naive(*inputs, **case.reference_options(), compute_dtype=torch.float64).parents
    same = sum(int((x == y).sum()) for x, y in zip(lists, wanted, strict=True))
    assert same >= 0.99 * sum(x.numel() for x in lists)


# ---- special values


@pytest.mark.parametrize("importance", ["lse_causal", "exp_joint"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_key_that_is_not_finite_selects_by_position(value, importance, device):
    """All of its scores are NaN, so that every importance of its K/V head is NaN from there on."""
    case = small(rope_base=None, importance=importance)
    q, k, v = case.make_qkv("cpu")
    clean = lists_of((q, k, v), case, device)
    k[0, 21, 0] = value
    lists = lists_of((q, k, v), case, device)
    for found, before in zip(lists, clean, strict=True):
        assert torch.equal(found[:, :, 1], before[:, :, 1]), "the other K/V head"
        assert torch.equal(found[:, :24, 0], before[:, :24, 0]), "the open node has no influence"
    for token in (60, 95):
        assert lists[1][0, token, 0].tolist() == [0, 1, token // 16]


@pytest.mark.parametrize("part", ["q", "k"])
def test_zeros_and_small_rows_select_by_position(part, device):
    case = small()
    for value in (0.0, 2.0**-110):
        q, k, v = case.make_qkv("cpu")
        (q if part == "q" else k).fill_(value)
        lists = lists_of((q, k, v), case, device)
        assert lists[0][0, 40, 0].tolist() == [0, 1, 10]
        assert lists[1][0, 95, 0].tolist() == [0, 1, 5]
        assert_lists(lists, case.T_q, case.T, case.reference_options())


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e12, 1e25])
def test_the_size_of_keys_and_queries_does_not_matter(size, device):
    """Powers of two beside those sizes change no integer; steps carry them."""
    size = 2.0 ** round(math.log2(size))
    case = small(K=16)
    q, k, v = case.make_qkv("cpu")
    plain = lists_of((q, k, v), case, device)
    scaled = lists_of((q * size, k / size, v), case, device)
    assert all(torch.equal(x, y) for x, y in zip(plain, scaled, strict=True))


# ---- the ways to it


def test_modules_and_options(device):
    layer = htree_ops.HTreeAttention(
        32, 4, 2, compression_rate=4, max_top_nodes=8, top_k=2, selection_span=2, selection_dtype="int8", device=device
    )  # fmt: skip
    assert layer.selection_dtype == "int8"
    assert layer.options.of_ops()["selection_dtype"] == "int8"
    x = torch.randn(2, 60, 32, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    q, k, v = layer._project(x)
    options = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2, "selection_span": 2}
    expected = htree_ops.tree_attention(q, k, v, **options, selection_dtype="int8")
    assert torch.equal(layer(x), layer.o_proj(expected.flatten(2)))
    layer.selection_dtype = None
    assert layer.options.selection_dtype is None


def test_a_cache_refuses_it_by_name(device):
    options = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2, "selection_span": 2}
    with pytest.raises(ValueError, match=r"TreeKVCache: selection_dtype must be None, got 'int8'"):
        htree_ops.TreeKVCache(1, 1, 8, 64, **options, selection_dtype="int8", device=device)
    layer = htree_ops.HTreeAttention(16, 2, **options, selection_dtype="int8", device=device)
    with pytest.raises(ValueError, match=r"selection_dtype must be None, got 'int8'"):
        layer.make_cache(1, 64)
    plain = htree_ops.HTreeAttention(16, 2, **options, device=device).make_cache(1, 64)
    with pytest.raises(
        ValueError, match=r"cache must have the options of the layer \(selection_dtype = 'int8'\)"
    ):
        layer(torch.randn(1, 3, 16, device=device), cache=plain)


def test_wide_keys_are_refused_by_name(device):
    for width, fits in ((1024, True), (1026, False)):
        q = torch.randn(1, 9, 1, width, device=device)
        call = lambda x=q: htree_ops.tree_attention(  # noqa: E731
            x, x, x, compression_rate=2, max_top_nodes=2, top_k=2, selection_span=1, selection_dtype="int8"
        )
        if fits:
            assert call().isfinite().all()
        else:
            with pytest.raises(
                ValueError, match=r"selection_dtype must be None for keys of more than 1024 dims"
            ):
                call()
