"""Whole tree attention over the case list (docs/semantics §1.11) and the edge cases of §1.3, §1.7 and §1.9."""

import dataclasses
import math

import pytest
import torch
from tree_attention_helpers import on, refused

import htree_ops  # noqa: F401  registers torch.ops.htree
import htree_ops.reference.tree_attention as ref
from tests.support.cases import case_id
from tests.support.compare import assert_close_spec
from tests.support.devices import poisoned_memory
from tests.support.tree_attention_cases import EVERY_CASE, SHAPES
from tests.support.tree_attention_checks import (
    STATE_TOLERANCE,
    assert_epsilon_optimal,
    assert_lists,
    assert_output,
    forced,
)

ops = torch.ops.htree


def case_named(name, **changes):
    case = next(shape for shape in SHAPES if shape.name == name)
    return dataclasses.replace(case, **changes)


def lists_of(*args):
    return [lists.cpu() for lists in ops.attention_forward(*args)[3]]


@pytest.mark.parametrize("case", EVERY_CASE, ids=case_id)
def test_forward_by_epsilon_optimality_and_teacher_forcing(case, device):
    q, k, v, options = case.make_call(device)
    if refused(case, device, lambda: ops.attention_forward(q, k, v, **options)):
        return
    with poisoned_memory():
        out, gmax, gsum, parents = ops.attention_forward(q, k, v, **options)
        alone = ops.attention(q, k, v, **options)
        unstored = ops.attention_forward(q, k, v, **options, store_parents=False)
    rows = (case.B, case.T_q, case.H)
    assert out.shape == (*rows, case.V)
    assert gmax.shape == gsum.shape == rows
    assert (out.dtype, gmax.dtype, gsum.dtype) == (case.dtype, case.state_dtype, case.state_dtype)
    assert all(x.is_contiguous() and x.device.type == device for x in (out, gmax, gsum, *parents))
    assert torch.equal(alone, out)
    assert unstored[3] == []
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(unstored[:3], (out, gmax, gsum), strict=True)
    )
    cpu = [x.cpu() for x in (q, k, v)]
    lists = [x.cpu() for x in parents]
    assert_lists(lists, case.T_q, case.T, options)
    assert_epsilon_optimal(*cpu, lists, options)
    expected = forced(*cpu, lists, options)
    assert_output(out, expected.out, cpu[2])
    a, b = STATE_TOLERANCE[case.dtype]
    if device == "cuda" and case.dtype != torch.float32:
        a = b = 2e-3  # scores from half-precision tensor cores, §1.11
    lse = gmax.double() + gsum.double().log()
    assert_close_spec(lse, expected.lse, rtol=b, atol=a + b, name="lse")


# ---- lengths


@pytest.mark.parametrize(("top_nodes", "rate", "top_k"), [(8, 4, 2), (3, 2, 2), (20, 16, 2), (1, 2, 1)])
def test_depth_changes_at_the_boundaries(top_nodes, rate, top_k, device):
    for layers in (1, 2, 3):
        for length in (top_nodes * rate ** (layers - 1), top_nodes * rate ** (layers - 1) + 1):
            q = torch.randn(1, length, 1, 2, device=device)
            depth = len(ops.attention_forward(q, q, q, rate, top_nodes, top_k)[3])
            assert depth == layers + (length > top_nodes * rate ** (layers - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_token_gives_its_value(dtype, device):
    q = torch.randn(2, 1, 4, 8, device=device).to(dtype)
    k, v = torch.randn(2, 1, 2, 8, device=device).to(dtype), torch.randn(2, 1, 2, 5, device=device).to(dtype)
    assert torch.equal(ops.attention(q, k, v), v.repeat_interleave(2, dim=2))


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 0), (2, 5, 0)], ids=["B=0", "T=0", "T_q=0"])
def test_empty_problems(shape, device):
    batch, length, num_queries = shape
    q = torch.randn(batch, num_queries, 4, 6, device=device)
    k, v = torch.randn(batch, length, 2, 6, device=device), torch.randn(batch, length, 2, 3, device=device)
    out, gmax, gsum, parents = ops.attention_forward(q, k, v, 2, 4, 2)
    assert out.shape == (batch, num_queries, 4, 3)
    assert gmax.shape == gsum.shape == (batch, num_queries, 4)
    assert len(parents) == (2 if length else 1)
    assert all(lists.shape == (batch, num_queries, 2, 2) for lists in parents)
    lists = torch.zeros(batch, num_queries, 2, 2, dtype=torch.int32, device=device)
    cos, sin = on(device, *ref.rope_cache(4, 6))
    scores, num = ops.compute_scores(q, k, lists, cos, sin, 0, 2)
    assert scores.shape == (batch, num_queries, 2, 4, 2)
    assert num.shape == (batch, num_queries, 2)
    assert ops.select_topk(scores, num, 2).shape == (batch, num_queries, 2, 2)
    states = [
        ops.accumulate_non_topk(v, lists, scores, num, 0, 2),
        ops.bottom_accumulate(q, k, v, lists, cos, sin, 2),
        ops.select_accumulate(q, k, v, lists, cos, sin, 1, 2, 2)[:3],
    ]
    for state in states:
        assert [tuple(x.shape) for x in state] == [tuple(gmax.shape)] * 2 + [tuple(out.shape)]
    pooled = ops.tree_build(k, v, 2)
    assert [x.shape[1] for x in pooled] == [-(-length // 2)] * 2


# ---- ties


@pytest.mark.parametrize("importance", ["lse_causal", "lse", "exp_joint"])
@pytest.mark.parametrize("name", ["ragged_everywhere", "group_of_8", "r16", "uneven_k", "stride4", "chunk"])
def test_equal_scores_select_the_first_positions_and_the_rightmost(name, importance, device):
    """q = 0 makes every score exactly 0, so the lists are known and out is a mean over the nodes of the cut."""
    case = case_named(name, importance=importance)
    q, k, v = case.make_qkv(device)
    q = torch.zeros_like(q)
    out, _, _, parents = ops.attention_forward(q, k, v, *case.op_options())
    cpu = on("cpu", q, k, v)
    wanted = ref.htree_forward_naive(*cpu, **case.reference_options(), compute_dtype=torch.float64)
    for ours, theirs in zip(parents, wanted.parents, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert_output(out, wanted.out, cpu[2])


def test_repeated_keys_tie_and_the_smaller_position_wins(device):
    """Without rotation, tokens that repeat with period 4 give parents that are all equal."""
    case = case_named("uneven_k", rope_base=None)
    q, k, v = case.make_qkv("cpu")
    k = k[:, :4].repeat(1, 48, 1, 1)[:, : case.T].contiguous()
    q, k, v = on(device, q, k, v)
    parents = lists_of(q, k, v, *case.op_options())
    q = torch.zeros_like(q)  # ties again, now through the scores
    assert all(
        torch.equal(ours[:, 63], theirs[:, 63])
        for ours, theirs in zip(parents, lists_of(q, k, v, *case.op_options()), strict=True)
    )


# ---- special values


@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("name", ["batch", "ragged_everywhere", "group_of_8", "decode", "stride4_suffix"])
def test_nan_stays_in_its_rows(name, place, device):
    case = case_named(name)
    tensors = list(case.make_qkv(device))
    before = ops.attention(*tensors, *case.op_options())
    token = case.t0 + case.T_q // 2
    index = "qkv".index(place)
    tensors[index] = tensors[index].clone()
    tensors[index][0, token - case.t0 if place == "q" else token, 0, 0] = math.nan
    after, gmax, gsum, parents = ops.attention_forward(*tensors, *case.op_options())
    row = token - case.t0
    assert torch.equal(before[:, :row], after[:, :row])
    assert torch.equal(before[1:], after[1:])
    group = case.H // case.H_kv
    if place == "q":
        assert after[0, row, 0].isnan().all()
        assert not after[0, row, 1:].isnan().any()
        if case.selection_stride == 1:
            assert torch.equal(before[:, row + 1 :], after[:, row + 1 :])
        assert_lists([x.cpu() for x in parents], case.T_q, case.T, case.reference_options())
    else:
        heads = after[0, row, :group]
        assert heads.isnan().all() if place == "k" else heads[:, 0].isnan().all()
        assert not after[0, row, group:].isnan().any()
        lse = gmax + gsum.log()
        assert lse[0, row, :group].isnan().all() == (place == "k")
        assert lse[0, row, group:].isfinite().all()


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("place", ["q", "k"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ragged_everywhere", torch.float32),
        ("group_of_8", torch.float32),
        ("stride4_suffix", torch.float32),
        ("head_128", torch.bfloat16),  # on tensor cores, where there are any
    ],
)
def test_an_infinite_query_or_key_reaches_no_earlier_row(name, dtype, place, value, device):
    """A score of +inf gives NaN and one of -inf has no weight; §1.9 says which rows an infinite key reaches."""
    case = case_named(name, dtype=dtype)
    tensors = list(case.make_qkv(device))
    before = ops.attention(*tensors, *case.op_options())
    row = case.T_q // 2
    index = "qk".index(place)
    tensors[index] = tensors[index].clone()
    tensors[index][0, row if place == "q" else case.t0 + row, 0, 0] = value
    after, _, _, parents = ops.attention_forward(*tensors, *case.op_options())
    assert torch.equal(before[:, :row], after[:, :row])
    assert torch.equal(before[1:], after[1:])
    group = case.H // case.H_kv
    assert torch.equal(before[:, :, group:], after[:, :, group:]), "other kv heads"
    if place == "q":
        assert after[0, row, 0].isnan().all()
        assert after[0, row, 1:].isfinite().all()
        if case.selection_stride == 1:
            assert torch.equal(before[:, row + 1 :], after[:, row + 1 :])
    lists = [x.cpu() for x in parents]
    assert_lists(lists, case.T_q, case.T, case.reference_options())
    expected = forced(*(x.cpu() for x in tensors), lists, case.reference_options()).out
    finite = after.isfinite().all(-1).cpu() & expected.isfinite().all(-1)
    assert finite[:, :row].all()
    assert_output(after.cpu()[finite], expected[finite], tensors[2].cpu())


def test_nan_query_selects_by_position(device):
    case = case_named("group_of_8", selection_stride=1)
    q, k, v = case.make_qkv("cpu")
    row = 60
    q[0, row, 3] = math.nan
    parents = lists_of(*on(device, q, k, v), *case.op_options())
    lists = ref.top_parents(1, 1, 1, case.top_k, 3, case.r, row)
    for layer in (2, 1):
        n = ref.candidates(lists, layer, case.sizes[layer], case.r, row).num
        positions = torch.tensor([[[[int(n) - 1, *range(case.top_k - 1)]]]])
        lists = ref.compute_next_parents(lists, positions, case.r)
        assert torch.equal(parents[layer - 1][:, row : row + 1], lists)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_scores_do_not_overflow(dtype, device):
    case = case_named("ragged_everywhere", dtype=dtype, H=4, H_kv=2, K=4)
    q, k, v = case.make_qkv("cpu")
    q, k = 150 * q, 150 * k  # scores of about 1e4 * sqrt(2), both signs
    out, gmax, gsum, parents = (
        x.cpu() if isinstance(x, torch.Tensor) else [y.cpu() for y in x]
        for x in ops.attention_forward(*on(device, q, k, v), *case.op_options())
    )
    assert gmax.abs().max() > 1e4
    assert out.isfinite().all()
    assert gsum.isfinite().all()
    expected = forced(q, k, v, parents, case.reference_options())
    # the rounding of a score of size s is a relative error of the weight: eps * s * (8 + sqrt K)
    slack = torch.finfo(torch.float32).eps * float(gmax.abs().max()) * (8 + case.K**0.5)
    unit = torch.finfo(dtype).eps
    atol = 4 * slack * float(v.abs().max())
    assert_close_spec(out, expected.out, rtol=unit, atol=atol, name="out")


def test_infinite_scores_in_the_stages(device):
    """-inf has no weight and its value is not read; +inf gives NaN, as softmax does (§1.7, §1.9)."""
    lists = torch.tensor([0, 1], dtype=torch.int32).view(1, 1, 1, 2)
    values = torch.tensor([[1.0, math.nan], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]).view(1, 4, 1, 2)
    num = torch.tensor([[[4]]], dtype=torch.int32)

    def state(*scores):
        rows = torch.tensor(scores).view(1, 1, 1, 4, 1)
        got = ops.accumulate_non_topk(*on(device, values, lists, rows, num), 0, 2, 3)
        return [x.cpu().flatten().tolist() for x in got]

    top, total, out = state(-math.inf, 5.0, 5.0, -math.inf)
    assert (top, total, out) == ([5.0], [2.0], [5.0, 5.0])
    top, total, out = state(*[-math.inf] * 4)
    assert (top, total, out) == ([-math.inf], [0.0], [0.0, 0.0])
    top, total, out = state(-math.inf, -1e30, math.inf, 0.0)
    assert top == [math.inf]
    assert math.isnan(total[0])
    top, total, out = state(math.nan, 1.0, 1.0, 1.0)
    assert math.isnan(total[0])
    assert math.isnan(out[1])
    scores = torch.tensor([-math.inf, 2.0, math.inf, math.nan, 1.0]).view(1, 1, 1, 5, 1)
    five = torch.tensor([[[5]]], dtype=torch.int32)
    assert ops.select_topk(*on(device, scores, five), 3).flatten().tolist() == [4, 0, 1]
    scores[..., 3, :] = 0.0
    assert ops.select_topk(*on(device, scores, five), 3).flatten().tolist() == [4, 2, 0]


def test_every_score_minus_infinity_is_nan_as_in_softmax(device):
    out = ops.final_normalize(torch.zeros(1, 1, 1, 2, device=device), torch.zeros(1, 1, 1, device=device))
    assert out.isnan().all()


def test_merge_keeps_scores_below_any_sentinel(device):
    low = [torch.full((1, 1, 1), -5e10), torch.ones(1, 1, 1), torch.full((1, 1, 1, 2), 3.0)]
    total = on(device, torch.full((1, 1, 1), -math.inf), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 2))
    ops.merge_to_global_(*total, *on(device, *low))
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(total, low, strict=True))
