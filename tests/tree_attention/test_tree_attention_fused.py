"""Per-head and fused ops, and the merging of states, against their references."""

import functools

import pytest
import torch
from tree_attention_helpers import (
    SELECTING,
    by_case,
    by_selecting_case,
    check_state,
    clear_rows,
    on,
    place,
    refused,
    score_bound,
    stages_of,
    stretch,
    wide,
)

import htree_ops  # noqa: F401  registers torch.ops.htree
import htree_ops.reference.tree_attention as ref
from htree_ops.reference.tree_attention.attention import listed_candidates
from htree_ops.reference.tree_attention.stages import score_candidates
from htree_ops.reference.tree_attention.state import accumulate, gather_nodes
from tests.support.cases import case_id
from tests.support.compare import assert_close_spec

ops = torch.ops.htree


# ---- staged, per query head


@functools.lru_cache(maxsize=2)
def head_stages_of(case):
    """q, [(layer, layer_k, layer_v, lists per query head)] bottom first, table; on the CPU."""
    q, k, v = case.make_qkv("cpu")
    found = ref.htree_forward_naive(
        q, k, v, **{**case.reference_options(), "selection_stride": 1}, scope="q_head",
        compute_dtype=torch.float64,
    )  # fmt: skip
    shared = ref.build_layers(k, v, case.r, case.M, torch.float64)
    stages = [
        (layer, layer_k.to(case.dtype), layer_v.to(case.dtype), lists)
        for layer, ((layer_k, layer_v), lists) in enumerate(zip(shared, found.parents, strict=True))
    ]
    return q, stages, case.make_table("cpu")


@by_case
def test_compute_and_select(case, device):
    q, stages, (cos, sin) = head_stages_of(case)
    for layer, layer_k, layer_v, parents in stages:
        inputs = (*place(case, device, layer_k, layer_v, layer), *on(device, parents, cos, sin))
        args = (layer, case.r, case.top_k, case.scale, case.t0)
        if refused(case, device, lambda: ops.compute_and_select(*inputs, *args)):  # noqa: B023
            return
        got = ops.compute_and_select(*inputs, *args)
        wanted = ref.compute_and_select(*wide(q, layer_k, layer_v), parents, *wide(cos, sin), *args)
        check_state(got, wanted[:3], layer_v, case)
        indices, scores = got[3].cpu(), got[4].cpu()
        assert indices.dtype == torch.int32
        assert scores.dtype == case.state_dtype
        assert indices.shape == wanted[3].shape == scores.shape
        assert indices.shape[-1] == (case.top_k if layer else 0)
        if not layer or not q.numel():
            continue
        assert torch.equal(indices == -1, wanted[3] == -1)
        assert torch.equal(scores == -torch.inf, wanted[4] == -torch.inf)
        assert torch.equal(indices[..., 0], wanted[3][..., 0])
        # scores in key order: equal to the reference's up to rounding, whatever near ties did
        atol = 2 * score_bound(q, layer_k, case.scale, case.state_dtype)
        assert_close_spec(scores, wanted[4], rtol=0.0, atol=atol, name="topk_scores")
        unique = indices.sort(dim=-1).values.diff(dim=-1)
        assert ((unique > 0) | (indices.sort(dim=-1).values[..., 1:] == -1)).all()


@pytest.mark.parametrize("case", [c for c in SELECTING if c.spread == 1], ids=case_id)
def test_subtract_topk(case, device):
    q, stages, (cos, sin) = head_stages_of(case)
    for layer, layer_k, layer_v, parents in stages[1:]:
        *state, indices, scores = ref.compute_and_select(
            q, layer_k, layer_v, parents, cos, sin, layer, case.r, case.top_k, case.scale, case.t0
        )
        inputs = on(device, layer_v, indices, scores, *state)
        if refused(case, device, lambda: ops.subtract_topk(*inputs)):  # noqa: B023
            return
        got = [x.cpu() for x in ops.subtract_topk(*inputs)]
        wanted = ref.subtract_topk(layer_v.double(), indices, *wide(scores, *state))
        assert torch.equal(got[3], wanted[3])
        # what is left has the rounding errors of the whole state, so errors are compared with that
        listed = (indices >= 0).sum(-1)
        full = listed == case.top_k
        assert (got[0][~full] == -torch.inf).all()
        assert (got[1][~full] == 0).all()
        assert (got[2][~full] == 0).all()
        unit = 8 * case.top_k * torch.finfo(case.state_dtype).eps
        mass = state[1].double()
        assert_close_spec(got[1][full], wanted[1][full], rtol=0.0, atol=unit * mass[full], name="sum")
        limit = (unit * mass * float(layer_v.abs().max()))[..., None].expand_as(got[2])
        assert_close_spec(got[2][full], wanted[2][full], rtol=0.0, atol=limit[full], name="out")


# ---- fused


def state_without(case, stage, q, table, chosen):
    """Float64 state of everything but the listed nodes, at one layer."""
    lists = stretch(case, stage.parents)
    found = ref.candidates(lists, stage.layer, stage.layer_k.shape[1], case.r, case.t0)
    scores = score_candidates(*wide(q, stage.layer_k), found, *wide(*table), case.scale)
    kept = found.present
    if chosen is not None:
        kept = kept & ~listed_candidates(found, stretch(case, chosen))
    return accumulate(scores, gather_nodes(stage.layer_v.double(), found.nodes), kept)


@by_selecting_case
def test_select_accumulate_and_recompute_selection(case, device):
    q, stages, table = stages_of(case)
    for stage in stages[1:]:
        options = (stage.layer, case.r, case.top_k, case.scale, case.importance, case.t0,
                   case.selection_stride)  # fmt: skip
        placed_q, layer_k, layer_v = place(case, device, stage.layer_k, stage.layer_v, stage.layer)
        parents, cos, sin = on(device, stage.parents, *table)
        if refused(
            case,
            device,
            lambda: ops.select_accumulate(placed_q, layer_k, layer_v, parents, cos, sin, *options),  # noqa: B023
        ):
            return
        got = ops.select_accumulate(placed_q, layer_k, layer_v, parents, cos, sin, *options)
        again = ops.recompute_selection(placed_q, layer_k, parents, cos, sin, *options)
        assert torch.equal(got[3], again)
        chosen = got[3].cpu()
        assert chosen.dtype == torch.int32
        assert chosen.shape == stage.parents.shape
        check_state(got, state_without(case, stage, q, table, chosen), stage.layer_v, case)
        check_selection(case, stage, q, table, chosen)


def check_selection(case, stage, q, table, chosen):
    """Checks that op and reference select the same nodes wherever no near tie decides."""
    leaders = slice(None, None, case.selection_stride)
    scores, num = ref.compute_scores(
        *wide(q, stage.layer_k), stretch(case, stage.parents), *wide(*table), stage.layer, case.r, case.scale,
        case.t0,
    )  # fmt: skip
    scores, num = scores[:, leaders], num[:, leaders]
    positions = ref.select_topk(scores, num, case.top_k, case.importance)
    wanted = ref.compute_next_parents(stage.parents, positions, case.r)
    clear = clear_rows(ref.importance_of(scores, num, case.importance), num, case.top_k)
    assert torch.equal(chosen[clear], wanted[clear])
    assert torch.equal(chosen == -1, wanted == -1)


@by_case
def test_bottom_accumulate(case, device):
    q, stages, table = stages_of(case)
    stage = stages[0]
    placed = place(case, device, stage.layer_k, stage.layer_v, 0)
    inputs = (*placed, *on(device, stage.parents, *table))
    args = (case.r, case.scale, case.t0, case.selection_stride)
    if refused(case, device, lambda: ops.bottom_accumulate(*inputs, *args)):
        return
    got = ops.bottom_accumulate(*inputs, *args)
    check_state(got, state_without(case, stage, q, table, None), stage.layer_v, case)


@pytest.mark.parametrize("case", [c for c in SELECTING if c.T_q > 1], ids=case_id)
def test_chunks_of_queries_give_the_rows_of_the_whole(case, device):
    if device == "cuda" and case.dtype == torch.float64:
        case = case.with_dtype(torch.float32)
    q, stages, table = stages_of(case)
    stride = case.selection_stride
    middle = max(stride, case.T_q // 2 // stride * stride)
    stage = stages[1]
    layer_k, layer_v, cos, sin = on(device, stage.layer_k, stage.layer_v, *table)
    parts = []
    for first, last in ((0, case.T_q), (0, middle), (middle, case.T_q)):
        rows = slice(first // stride, -(-last // stride))
        placed_q, parents = on(device, q[:, first:last], stage.parents[:, rows])
        parts.append(
            ops.select_accumulate(
                placed_q, layer_k, layer_v, parents, cos, sin, stage.layer, case.r, case.top_k, case.scale,
                case.importance, case.t0 + first, stride,
            )
        )  # fmt: skip
    whole, halves = parts[0], [torch.cat(pair, dim=1) for pair in zip(*parts[1:], strict=True)]
    assert torch.equal(whole[3], halves[3])
    check_state([x.cpu() for x in whole[:3]], [x.cpu() for x in halves[:3]], stage.layer_v, case)


# ---- states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_merge_and_normalize(dtype, device):
    if dtype == torch.float64 and device == "cuda":
        dtype = torch.float32
    generator = torch.Generator().manual_seed(2)
    states = []
    for empty_every in (3, 4):
        top = 20 * torch.randn(2, 12, 3, generator=generator, dtype=dtype)
        total = 1 + torch.rand(2, 12, 3, generator=generator, dtype=dtype)
        out = torch.randn(2, 12, 3, 5, generator=generator, dtype=dtype)
        top[:, ::empty_every] = -torch.inf
        total[:, ::empty_every] = 0
        out[:, ::empty_every] = 0
        states.append((top, total, out))
    ours = [x.to(device, copy=True) for x in states[0]]
    assert ops.merge_to_global_(*ours, *on(device, *states[1])) is None
    wanted = ref.merge_to_global(*wide(*states[0]), *wide(*states[1]))
    unit = 8 * torch.finfo(dtype).eps
    for name, got, theirs in zip(("gmax", "gsum", "gout"), ours, wanted, strict=True):
        assert_close_spec(got, theirs, rtol=unit, atol=unit * 4, dtype=dtype, name=name)
    empty = wanted[1] == 0
    assert empty.any()
    assert (ours[0].cpu()[empty] == -torch.inf).all()
    for out_dtype in (None, torch.float16, torch.bfloat16, dtype):
        got = ops.final_normalize(ours[2], ours[1], out_dtype)
        expected = ours[2].cpu().double() / ours[1].cpu().double()[..., None]
        kind = out_dtype or dtype
        assert_close_spec(got, expected, rtol=torch.finfo(kind).eps, atol=1e-7, dtype=kind)
        assert got.cpu()[empty].isnan().all()
