"""Lists that a caller gives to the ops and that break the rules of docs/semantics §1.3: defined, and in bounds."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_attention_helpers import on, wide, wild_lists
from tree_attention_strategies import seeds

import htree_ops  # noqa: F401  registers torch.ops.htree
import htree_ops.reference.tree_attention as ref
from tests.support import layouts
from tests.support.compare import assert_close_spec
from tests.support.tree_attention_cases import SHAPES, TreeAttentionCase
from tests.support.tree_attention_checks import assert_state

ops = torch.ops.htree


@given(seed=seeds, extreme=st.booleans(), layer=st.integers(0, 2), stride=st.sampled_from((1, 2, 4)))
def test_lists_that_break_the_invariant_stay_in_bounds(seed, extreme, layer, stride, device):
    """The tensors lie in memory full of NaN, so a read outside shows in the comparison with the reference."""
    case = TreeAttentionCase(
        name="wild", dtype=torch.float32, B=2, T=61, H=4, H_kv=2, K=6, V=5, r=4, top_k=3, M=9,
        selection_stride=stride,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    stage = case.make_stages(*case.make_qkv("cpu", seed))[layer]
    q = case.make_qkv("cpu", seed)[0]
    num_nodes = stage.layer_k.shape[1]
    rows = -(-case.T_q // stride)
    lists = wild_lists(generator, (2, rows, 2, 3), num_nodes, extreme)
    layer_k, layer_v = (layouts.in_larger(x.to(device)) for x in (stage.layer_k, stage.layer_v))
    placed_q, placed, cos, sin = on(device, q, lists, *case.make_table("cpu"))
    cache = wide(*case.make_table("cpu"))
    tail = (case.scale, case.t0)
    inputs = wide(q, stage.layer_k, stage.layer_v)
    if layer == 0:
        got = ops.bottom_accumulate(placed_q, layer_k, layer_v, placed, cos, sin, case.r, *tail, stride)
        wanted = ref.bottom_accumulate(*inputs, lists, *cache, case.r, *tail, stride)
        assert_state(tuple(x.cpu() for x in got), wanted, stage.layer_v)
    else:
        place = (layer, case.r, case.top_k, case.scale, "lse_causal", case.t0, stride)
        *state, chosen = ops.select_accumulate(placed_q, layer_k, layer_v, placed, cos, sin, *place)
        assert torch.equal(chosen, ops.recompute_selection(placed_q, layer_k, placed, cos, sin, *place))
        assert all(x.isfinite().all() for x in (state[1], state[2]))
        leaders = torch.arange(0, case.T, stride) // case.r**layer % case.r
        count = ref.num_parents(lists)
        num = torch.where(count > 0, (count - 1) * case.r + leaders.view(1, -1, 1) + 1, 0)
        if not extreme:
            assert torch.equal((chosen.cpu() != -1).sum(-1), num.clamp(max=case.top_k))
    if stride == 1:
        scores, num = ops.compute_scores(placed_q, layer_k, placed, cos, sin, layer, case.r, *tail)
        wanted, wanted_num = ref.compute_scores(*inputs[:2], lists, *cache, layer, case.r, *tail)
        assert torch.equal(num.cpu(), wanted_num)
        assert_close_spec(scores, wanted, rtol=1e-4, atol=1e-4, name="scores")
        got = ops.accumulate_non_topk(layer_v, placed, scores, num, layer, case.r, case.t0)
        wanted = ref.accumulate_non_topk(inputs[2], lists, wanted, wanted_num, layer, case.r, case.t0)
        assert_state(tuple(x.cpu() for x in got), wanted, stage.layer_v)
        heads = lists.repeat_interleave(2, dim=2)
        got = ops.compute_and_select(
            placed_q, layer_k, layer_v, heads.to(device), cos, sin, layer, case.r, case.top_k, *tail
        )
        wanted = ref.compute_and_select(*inputs, heads, *cache, layer, case.r, case.top_k, *tail)
        assert_state(tuple(x.cpu() for x in got[:3]), wanted[:3], stage.layer_v)


@given(seed=seeds)
def test_positions_and_counts_outside_their_range_stay_in_bounds(seed, device):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 5, 2)
    scores = torch.randn(*shape, 12, 2, generator=generator)
    ends = torch.tensor([2**31 - 1, -(2**31), 12, -1, 40, 0, 5])
    positions = ends[torch.randint(0, 7, (*shape, 3), generator=generator)].to(torch.int32)
    masked = scores.to(device)
    ops.mask_topk_scores_(masked, positions.to(device))
    assert torch.equal(masked.cpu(), ref.mask_topk_scores(scores, positions))
    parents = torch.tensor([1, 4, 6], dtype=torch.int32).expand(*shape, 3).contiguous()
    got = ops.compute_next_parents(parents.to(device), positions.to(device), 4)
    assert torch.equal(got.cpu(), ref.compute_next_parents(parents, positions, 4))
    num = ends[torch.randint(0, 7, shape, generator=generator)].to(torch.int32)
    got = ops.select_topk(*on(device, scores, num), 3)
    assert torch.equal(got.cpu(), ref.select_topk(scores, num.clamp(0, 12), 3))


def test_lists_without_any_parent_are_empty(device):
    q, k, v = torch.randn(3, 1, 9, 2, 4, device=device)
    lists = torch.full((1, 9, 2, 3), -1, dtype=torch.int32, device=device)
    cos, sin = on(device, *ref.rope_cache(12, 4))
    scores, num = ops.compute_scores(q, k, lists, cos, sin, 0, 4)
    assert not num.any()
    assert (scores == -math.inf).all()
    assert (ops.select_topk(scores, num, 3) == -1).all()
    for state in (
        ops.accumulate_non_topk(v, lists, scores, num, 0, 4),
        ops.bottom_accumulate(q, k, v, lists, cos, sin, 4),
        ops.select_accumulate(q, k, v, lists, cos, sin, 1, 4, 3)[:3],
        ops.compute_and_select(q, k, v, lists, cos, sin, 1, 4, 3)[:3],
    ):
        assert (state[0] == -math.inf).all()
        assert not state[1].any()
        assert not state[2].any()
    assert (ops.recompute_selection(q, k, lists, cos, sin, 1, 4, 3) == -1).all()


@pytest.mark.parametrize("extreme", [False, True])
def test_backward_under_wild_lists_stays_in_bounds(extreme, device):
    case = dataclasses.replace(next(x for x in SHAPES if x.name == "stride4"), selection_stride=1)
    q, k, v = case.make_qkv("cpu")
    out, gmax, gsum, parents = ops.attention_forward(*on(device, q, k, v), *case.op_options())
    generator = torch.Generator().manual_seed(4)
    lists = [
        wild_lists(generator, tuple(x.shape), size, extreme).to(device)
        for x, size in zip(parents, case.sizes, strict=True)
    ]
    k, v = (layouts.in_larger(x.to(device)) for x in (k, v))
    dout = torch.randn(out.shape, generator=generator).to(device)
    got = ops.attention_backward(dout, q.to(device), k, v, out, gmax, gsum, lists, *case.op_options())
    assert [x.shape for x in got] == [q.shape, k.shape, v.shape]
    # exp(s - gmax) of candidates that the forward did not merge may be large, but never NaN or infinite here
    assert all(x.isfinite().all() for x in got)
