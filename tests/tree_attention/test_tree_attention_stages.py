"""Each staged and fused op of tree attention against its reference (docs/semantics §1.2-§1.8, §1.11)."""

import pytest
import torch
from tree_attention_helpers import (
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
from tests.support.cases import case_id
from tests.support.compare import assert_close_spec
from tests.support.tree_attention_cases import SHAPES

ops = torch.ops.htree


# ---- tree and tables


@by_case
def test_tree_build(case, device):
    _, k, v = place(case, device, None, None, 0)
    for got, source in zip(ops.tree_build(k, v, case.r), (k, v), strict=True):
        assert got.is_contiguous()
        assert got.device.type == device
        wanted = ref.mean_of_children(source.cpu().double(), case.r)
        unit = torch.finfo(case.state_dtype).eps
        atol = unit * case.r * float(source.abs().max())
        assert_close_spec(got, wanted, rtol=torch.finfo(case.dtype).eps, atol=atol, dtype=case.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("n_child", "rate"), [(1, 2), (7, 3), (16, 4), (33, 16), (5, 9), (0, 2)])
def test_tree_build_backward(n_child, rate, dtype, device):
    generator = torch.Generator().manual_seed(n_child)
    num_parents = -(-n_child // rate)
    dpk, dpv = (
        torch.randn(2, num_parents, 3, width, generator=generator).to(dtype).to(device) for width in (4, 5)
    )
    got = ops.tree_build_backward(dpk, dpv, n_child, rate)
    wanted = ref.tree_build_backward(*wide(dpk.cpu(), dpv.cpu()), n_child, rate)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape[1] == n_child
        assert_close_spec(ours, theirs, rtol=torch.finfo(dtype).eps, atol=0.0, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("size", "dim", "base"), [(1, 2, 1e4), (600, 8, 1e4), (9216, 128, 5e5), (0, 4, 1e4)])
def test_rope_cache(size, dim, base, dtype, device):
    table = ops.rope_cache(size, dim, base, dtype=dtype, device=device)
    assert table.shape == (2, size, dim // 2)
    # angles are rounded to float64 before cos: size * 2^-53
    atol = size * 2.0**-52 + torch.finfo(dtype).eps / 2
    wanted = ref.rope_cache(size, dim, base, dtype=torch.float64)
    assert_close_spec(table, wanted, rtol=0.0, atol=atol, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_rope(dtype, inverse, index, device):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 9, 3, 10, generator=generator).to(dtype)
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = ref.rope_cache(40, 10, dtype=table_dtype)
    shared = torch.randperm(40, generator=generator)[:9].to(index)
    own = torch.randint(0, 40, (2, 9), generator=generator).to(index)
    for positions in (shared, own):
        got = ops.rope(*on(device, x, cos, sin, positions), inverse)
        wanted = ref.rope(*wide(x, cos, sin), positions, inverse)
        unit = torch.finfo(dtype).eps
        # the two products cancel at most to the size of the row
        atol = 2 * torch.finfo(table_dtype).eps * float(x.abs().max())
        assert_close_spec(got, wanted, rtol=unit, atol=atol, dtype=dtype)
        back = ops.rope(*on(device, wide(got)[0].to(dtype), cos, sin, positions), not inverse)
        assert_close_spec(back, x.double(), rtol=2 * unit, atol=3 * unit * float(x.abs().max()))


def test_rope_refuses_positions_outside_the_table_on_the_cpu():
    x = torch.randn(1, 2, 1, 4)
    cos, sin = ref.rope_cache(5, 4)
    for wild in ([0, 5], [-1, 2]):
        with pytest.raises((ValueError, IndexError, RuntimeError), match="position"):
            ops.rope(x, cos, sin, torch.tensor(wild))


@pytest.mark.parametrize("case", SHAPES, ids=case_id)
def test_top_parents(case, device):
    args = (case.B, case.T_q, case.H_kv, case.top_k, len(case.sizes), case.r, case.t0, case.selection_stride)
    got = ops.top_parents(*args, device=device)
    assert got.dtype == torch.int32
    assert got.is_contiguous()
    assert torch.equal(got.cpu(), ref.top_parents(*args))


# ---- staged, per K/V head


@by_case
def test_compute_scores(case, device):
    q, stages, (cos, sin) = stages_of(case)
    for stage in stages:
        parents = stretch(case, stage.parents)
        placed_q, layer_k, _ = place(case, device, stage.layer_k, stage.layer_v, stage.layer)
        inputs = (placed_q, layer_k, *on(device, parents, cos, sin))
        args = (stage.layer, case.r, case.scale, case.t0)
        if refused(case, device, lambda: ops.compute_scores(*inputs, *args)):  # noqa: B023
            return
        scores, num = ops.compute_scores(*inputs, *args)
        wanted, wanted_num = ref.compute_scores(*wide(q, stage.layer_k), parents, *wide(cos, sin), *args)
        assert num.dtype == torch.int32
        assert torch.equal(num.cpu(), wanted_num)
        assert torch.equal((scores == -torch.inf).cpu(), wanted == -torch.inf)
        atol = score_bound(q, stage.layer_k, case.scale, case.state_dtype) if q.numel() else 0.0
        assert_close_spec(scores, wanted, rtol=0.0, atol=atol, dtype=case.state_dtype, name="scores")


@by_selecting_case
@pytest.mark.parametrize("importance", ["lse_causal", "lse", "exp_joint"])
def test_select_topk(case, importance, device):
    q, stages, (cos, sin) = stages_of(case)
    for stage in stages[1:]:
        scores, num = ref.compute_scores(
            q, stage.layer_k, stretch(case, stage.parents), cos, sin, stage.layer, case.r, case.scale, case.t0
        )
        inputs = on(device, scores, num)
        if refused(case, device, lambda: ops.select_topk(*inputs, case.top_k, importance)):  # noqa: B023
            return
        got = ops.select_topk(*inputs, case.top_k, importance)
        assert got.dtype == torch.int32
        got = got.cpu()
        wanted = ref.select_topk(scores, num, case.top_k, importance)
        value = ref.importance_of(scores.double(), num, importance)
        clear = clear_rows(value, num, case.top_k)
        assert torch.equal(got[clear], wanted[clear])
        # elsewhere: as many nodes, the rightmost first, importances in order up to rounding
        kept = got >= 0
        assert torch.equal(kept, wanted >= 0)
        assert torch.equal(got[..., 0], wanted[..., 0])
        assert (got < num[..., None]).all()
        ranked = value.gather(-1, got.clamp(min=0).long())[..., 1:]
        theirs = value.gather(-1, wanted.clamp(min=0).long())[..., 1:]
        torch.testing.assert_close(
            ranked[kept[..., 1:]], theirs[kept[..., 1:]], rtol=1e-4, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("importance", ["lse_causal", "lse", "exp_joint"])
def test_select_topk_with_many_ties(dtype, group, importance, device):
    """Scores are multiples of 1/2, so equal importances are common and must fall to the smaller position."""
    if dtype == torch.float64 and device == "cuda":
        dtype = torch.float32
    generator = torch.Generator().manual_seed(11)
    for num_positions in (5, 60, 700):
        scores = torch.randint(-4, 5, (2, 7, 3, num_positions, 1), generator=generator) / 2
        scores = scores.expand(-1, -1, -1, -1, group).to(dtype).contiguous()
        num = torch.randint(1, num_positions + 1, (2, 7, 3), generator=generator).int()
        outside = torch.arange(num_positions) >= num[..., None]
        scores = scores.masked_fill(outside[..., None], -torch.inf)
        for top_k in (1, 4, 64):
            got = ops.select_topk(*on(device, scores, num), top_k, importance)
            assert torch.equal(got.cpu(), ref.select_topk(scores, num, top_k, importance))


@by_selecting_case
def test_mask_and_next_parents(case, device):
    q, stages, (cos, sin) = stages_of(case)
    for stage in stages[1:]:
        parents = stretch(case, stage.parents)
        scores, num = ref.compute_scores(
            q, stage.layer_k, parents, cos, sin, stage.layer, case.r, case.scale, case.t0
        )
        positions = ref.select_topk(scores, num, case.top_k, case.importance)
        ours = scores.to(device, copy=True)
        placed = positions.to(device)
        if not refused(case, device, lambda: ops.mask_topk_scores_(ours, placed)):  # noqa: B023
            assert ops.mask_topk_scores_(ours, placed) is None
            assert torch.equal(ours.cpu(), ref.mask_topk_scores(scores, positions))
        got = ops.compute_next_parents(parents.to(device), placed, case.r)
        assert got.dtype == torch.int32
        assert torch.equal(got.cpu(), ref.compute_next_parents(parents, positions, case.r))


@by_case
def test_accumulate_non_topk(case, device):
    q, stages, (cos, sin) = stages_of(case)
    for stage in stages:
        parents = stretch(case, stage.parents)
        scores, num = ref.compute_scores(
            q, stage.layer_k, parents, cos, sin, stage.layer, case.r, case.scale, case.t0
        )
        if stage.layer:
            positions = ref.select_topk(scores, num, case.top_k, case.importance)
            scores = ref.mask_topk_scores(scores, positions)
        layer_v = place(case, device, stage.layer_k, stage.layer_v, stage.layer)[2]
        inputs = (layer_v, *on(device, parents, scores, num))
        args = (stage.layer, case.r, case.t0)
        if refused(case, device, lambda: ops.accumulate_non_topk(*inputs, *args)):  # noqa: B023
            return
        got = ops.accumulate_non_topk(*inputs, *args)
        wanted = ref.accumulate_non_topk(stage.layer_v.double(), parents, scores.double(), num, *args)
        check_state(got, wanted, stage.layer_v, case)
