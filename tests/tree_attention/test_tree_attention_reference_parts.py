"""Selection, states, tree and gradients of the reference, by hand-computed examples."""

import math

import pytest
import torch

import htree_ops.reference.tree_attention as ref
from htree_ops import reference
from htree_ops.reference.tree_attention.selection import positions_mask
from htree_ops.reference.tree_attention.state import accumulate
from tests.support.cases import case_id
from tests.support.tree_attention_cases import GRADIENT_SHAPES, SHAPES


def test_the_package_of_references_has_the_documented_names():
    for name in ref.__all__:
        assert getattr(reference, name) is getattr(ref, name)
    for family in (
        "causal_softmax",
        "compressed_kv",
        "fp8",
        "gated_mlp",
        "hadamard",
        "rmsnorm_rope",
        "tree_attention",
    ):
        assert getattr(reference, family).__name__ == f"htree_ops.reference.{family}"
    assert {"htree_forward_naive", "hadamard"} <= set(dir(reference))
    with pytest.raises(AttributeError, match=r"'htree_ops\.reference' has no attribute 'absent'"):
        _ = reference.absent


def test_subtraction_loses_what_the_formula_says():
    """Relative error about eps * total / remaining mass: fine for spread 1, lost for spread 8 (§1.7)."""
    generator = torch.Generator().manual_seed(0)
    errors = {}
    for spread in (1.0, 8.0):
        scores = spread * torch.randn(1, 1, 1, 2048, 1, generator=generator, dtype=torch.float64)
        values = torch.randn(1, 2048, 1, 4, generator=generator, dtype=torch.float64)
        everything = torch.ones(1, 1, 1, 2048, dtype=torch.bool)
        chosen = ref.select_topk(scores, torch.tensor([[[2048]]]), 128)
        nodes = torch.arange(2048).view(1, 1, 1, 2048)
        gathered = values[:, nodes.flatten()].permute(0, 2, 1, 3)[:, None]
        mask = positions_mask(chosen, 2048)
        wanted_max, wanted, _ = accumulate(scores, gathered, everything & ~mask)
        whole = tuple(x.float() for x in accumulate(scores, gathered, everything))
        picked = scores[..., 0].gather(-1, chosen.long()).float()
        lmax, lsum, _, _ = ref.subtract_topk(values.float(), chosen, picked, *whole)
        mass = lsum.double() * torch.exp(lmax.double() - wanted_max)
        errors[spread] = float(((mass - wanted) / wanted).abs())
    assert errors[1.0] < 1e-5
    assert errors[8.0] > 1e-2


# ---- selection, §1.6


def scores_of(*rows):
    """One selection head with len(rows) query heads: [1,1,1,n,G], and n."""
    scores = torch.tensor(rows, dtype=torch.float64).T.contiguous()[None, None, None]
    return scores, torch.tensor([[[scores.shape[3]]]], dtype=torch.int32)


def test_rightmost_is_first_and_ties_go_to_the_smaller_position():
    scores, n = scores_of([0.0, 0.0, 0.0, 0.0, 0.0])
    assert ref.select_topk(scores, n, 3).flatten().tolist() == [4, 0, 1]
    scores, n = scores_of([1.0, 3.0, 2.0, 3.0, -9.0])
    assert ref.select_topk(scores, n, 4).flatten().tolist() == [4, 1, 3, 2]
    assert ref.select_topk(scores, n, 1).flatten().tolist() == [4]
    assert ref.select_topk(scores, n, 7).flatten().tolist() == [4, 1, 3, 2, 0, -1, -1]


def test_nan_comes_right_after_the_rightmost():
    scores, n = scores_of([5.0, math.nan, 7.0, 1.0], [1.0, 0.0, 0.0, 0.0])
    # the NaN makes the LSE of the first head NaN and hence every importance, so positions decide
    assert ref.select_topk(scores, n, 3).flatten().tolist() == [3, 0, 1]
    scores, n = scores_of([5.0, math.inf, 7.0, 1.0])
    assert ref.select_topk(scores, n, 3).flatten().tolist() == [3, 1, 0]


def test_a_head_without_any_score_has_no_vote():
    scores, n = scores_of([-math.inf] * 3 + [4.0], [0.0, 1.0, 2.0, 3.0])
    importance = ref.importance_of(scores, n)[0, 0, 0]
    expected = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(importance[:3], expected)
    scores, n = scores_of([-math.inf] * 4)
    for kind in ("lse_causal", "lse", "exp_joint"):
        assert ref.select_topk(scores, n, 3, kind).flatten().tolist() == [3, 0, 1]


def test_weights_below_the_smallest_normal_count_as_zero():
    step = math.log(2.0)
    scores, n = scores_of([0.0, -125.5 * step, -126.5 * step, -130 * step, 0.0])
    importance = ref.importance_of(scores, n).flatten()
    assert importance[1] > 0
    assert importance[2] == importance[3] == 0
    assert ref.select_topk(scores, n, 4).flatten().tolist() == [4, 0, 1, 2]


def test_the_sum_of_heads_decides_and_exp_joint_ignores_far_heads():
    # head 0 prefers position 0, head 1 prefers position 1 twice as clearly; head 1's logits lie 200 lower
    rows = ([1.0, 0.5, 0.0, 0.0], [-204.0, -200.0, -204.0, 0.0])
    scores, n = scores_of(*rows)
    assert ref.select_topk(scores, n, 2).flatten().tolist() == [3, 1]
    assert ref.select_topk(scores, n, 2, "exp_joint").flatten().tolist() == [3, 0]


def test_tie_bits_merge_close_importances():
    scores, n = scores_of([0.0, 1e-4, 0.0, 0.0])
    assert ref.select_topk(scores, n, 2).flatten().tolist() == [3, 1]
    assert ref.select_topk(scores, n, 2, tie_bits=13).flatten().tolist() == [3, 0]


def test_next_parents_map_positions_to_nodes():
    parents = torch.tensor([2, 5, -1], dtype=torch.int32).view(1, 1, 1, 3)
    positions = torch.tensor([5, 0, 3, -1], dtype=torch.int32).view(1, 1, 1, 4)
    assert ref.compute_next_parents(parents, positions, 4).flatten().tolist() == [8, 11, 21, -1]
    wild = torch.tensor([7, -3, 99, 8], dtype=torch.int32).view(1, 1, 1, 4)
    assert ref.compute_next_parents(parents, wild, 4).flatten().tolist() == [23, -1, -1, -1]


# ---- states, §1.7


def test_merge_of_empty_states_is_empty():
    empty = ref.empty_state(1, 2, 3, 4, torch.zeros((), dtype=torch.float64))
    top, total, out = ref.merge_to_global(*empty, *empty)
    assert (top == -math.inf).all()
    assert (total == 0).all()
    assert (out == 0).all()
    assert ref.final_normalize(out, total).isnan().all()


def test_merge_far_below_any_sentinel():
    low = (torch.full((1, 1, 1), -5e10), torch.ones(1, 1, 1), torch.full((1, 1, 1, 2), 3.0))
    empty = ref.empty_state(1, 1, 1, 2, torch.zeros(()))
    for merged in (ref.merge_to_global(*empty, *low), ref.merge_to_global(*low, *empty)):
        for got, wanted in zip(merged, low, strict=True):
            assert torch.equal(got, wanted)


def test_subtraction_of_everything_is_exactly_empty():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1, 6, 1, 2, generator=generator)
    picked = torch.randn(1, 1, 1, 4, generator=generator)
    indices = torch.tensor([5, 1, 3, 0], dtype=torch.int32).view(1, 1, 1, 4)
    nodes = indices.flatten().long()
    state = accumulate(picked[..., None], values[:, nodes][:, None].transpose(2, 3), picked.isfinite())
    top, total, out, ordered = ref.subtract_topk(values, indices, picked, *state)
    assert top.item() == -math.inf
    assert total.item() == 0
    assert not out.any()
    assert ordered.flatten().tolist() == [0, 1, 3, 5]


def test_tree_means_count_the_existing_children_and_round_every_level():
    k = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]).view(1, 5, 1, 1).expand(1, 5, 1, 2)
    pooled, _ = ref.tree_build(k, k, 2)
    assert pooled[0, :, 0, 0].tolist() == [1.5, 6.0, 16.0]
    above, _ = ref.tree_build(pooled, pooled, 2)
    assert above[0, :, 0, 0].tolist() == [3.75, 16.0]
    x = torch.tensor([1.0, 1.0, 1.0 + 2**-7]).view(1, 3, 1, 1).bfloat16()
    assert ref.tree_build(x, x, 3)[0].item() == 1.0
    levels = ref.build_layers(x, x, 3, 1, torch.float64)
    assert levels[1][0].dtype == torch.float64
    assert levels[1][0].item() == 1.0


def test_caller_supplied_lists_stay_harmless():
    parents = torch.tensor([3, 1, 900, -7, -1, 2], dtype=torch.int32).view(1, 1, 1, 6)
    found = ref.candidates(parents, 0, 8, 2, t0=6)
    assert found.num.item() == 7
    assert found.present.flatten().tolist() == [True, False, True, True] + [False] * 8
    assert found.nodes[found.present].tolist() == [6, 2, 3]
    nothing = torch.full((1, 1, 1, 3), -1, dtype=torch.int32)
    assert ref.candidates(nothing, 0, 8, 2, t0=6).num.item() == 0


# ---- gradients, §1.10


@pytest.mark.parametrize("case", GRADIENT_SHAPES, ids=case_id)
def test_explicit_backward_is_autograd_and_central_differences(case):
    q, k, v = case.make_separated("cpu")
    options = case.reference_options()
    found = ref.htree_forward_naive(q, k, v, **options)
    dout = torch.randn(found.out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    explicit = ref.htree_backward_naive(
        dout,
        q,
        found,
        compression_rate=case.r,
        scale=case.scale,
        rope_base=case.rope_base,
        inv_freq=case.inv_freq,
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    taped = ref.htree_forward_naive(*leaves, **options, parents=found.parents)
    assert torch.equal(taped.out.detach(), found.out)
    automatic = torch.autograd.grad(taped.out, leaves, dout)
    for ours, theirs in zip(explicit, automatic, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    # the lists are selected anew each time; without near ties small differences never change them
    for index, gradient in enumerate(explicit):
        step = 1e-6 * torch.randn(
            gradient.shape, generator=torch.Generator().manual_seed(index), dtype=q.dtype
        )
        inputs = [q, k, v]
        values = []
        for sign in (1, -1):
            moved = [x + sign * step if i == index else x for i, x in enumerate(inputs)]
            values.append((ref.htree_forward_naive(*moved, **options).out * dout).sum())
        torch.testing.assert_close(
            (values[0] - values[1]) / 2, (gradient * step).sum(), rtol=1e-6, atol=1e-14
        )


def test_half_precision_rounds_the_tree_but_not_the_gradient():
    case = next(c for c in SHAPES if c.name == "ragged_everywhere").with_dtype(torch.bfloat16)
    q, k, v = case.make_qkv("cpu")
    options = {**case.reference_options(), "compute_dtype": torch.float64}
    plain = ref.htree_forward_naive(q, k, v, **options)
    assert plain.out.dtype == torch.float64
    for (layer_k, layer_v), (stored_k, stored_v) in zip(
        plain.layers[1:], ref.build_layers(k, v, case.r, case.M)[1:], strict=True
    ):
        assert torch.equal(layer_k, layer_k.bfloat16().double())
        torch.testing.assert_close(layer_k, stored_k.double(), rtol=2**-7, atol=0)
        torch.testing.assert_close(layer_v, stored_v.double(), rtol=2**-7, atol=0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    taped = ref.htree_forward_naive(*leaves, **options, parents=plain.parents)
    assert torch.equal(taped.out.detach(), plain.out)
    assert all(x.dtype == torch.bfloat16 for x in torch.autograd.grad(taped.out.sum(), leaves))


@pytest.mark.parametrize(
    "change",
    [
        {"compression_rate": 1},
        {"max_top_nodes": 0},
        {"top_k_per_layer": 0},
        {"importance": "max"},
        {"scope": "head"},
        {"accumulate": "both"},
        {"selection_stride": 3},
    ],
)
def test_bad_options_are_refused(change):
    q, k, v = torch.randn(3, 1, 20, 2, 4)
    options = {"compression_rate": 4, "max_top_nodes": 8, "top_k_per_layer": 2, **change}
    with pytest.raises(ValueError):
        ref.htree_forward_naive(q, k, v, **options)
