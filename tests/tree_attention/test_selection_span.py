"""Selection by span means (docs/semantics/tree_attention.md §1.15).

Drawn problems with and without a span: test_tree_attention_properties.py and test_tree_attention_gradients.py.
"""

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_attention_fast import assert_fast_call, model
from tree_attention_helpers import forward, on, wide, wild_lists
from tree_attention_strategies import CPU_DTYPES, dtypes_of, seeds

import htree_ops.reference.tree_attention as ref
from tests.support import layouts
from tests.support.cases import case_id, normal
from tests.support.devices import poisoned_memory
from tests.support.instruction_sets import ISAS, run_with
from tests.support.tree_attention_calls import calls, calls_with
from tests.support.tree_attention_cases import SHAPES, SPAN_SHAPES, TreeAttentionCase
from tests.support.tree_attention_checks import assert_lists

ops = torch.ops.htree


def spanned(name):
    """The shape of SPAN_SHAPES that has this name before its span."""
    return next(shape for shape in SPAN_SHAPES if re.sub(r"_c\d+$", "", shape.name) == name)


def same_bits(ours, theirs):
    return all(
        torch.equal(x, y) for x, y in zip((*ours[:3], *ours[3]), (*theirs[:3], *theirs[3]), strict=True)
    )


# ---- span_means


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
@pytest.mark.parametrize("span", [1, 2, 3, 16, 100])
def test_span_means_are_those_of_the_reference(span, dtype, device):
    for length in (0, 1, 2, 47, 48):
        k = normal((2, length, 3, 6), dtype, device, length)
        wanted = ref.span_means(k.cpu(), span)
        for place in (lambda x: x, layouts.in_larger, layouts.misaligned, layouts.non_unit_last_stride):
            with poisoned_memory():
                got = ops.span_means(place(k), span)
            assert got.is_contiguous()
            assert torch.equal(got.cpu(), wanted), place
        if span > 1:
            assert torch.equal(got, ops.tree_build(k, k, span)[0])


def test_a_nan_stays_in_its_mean(device):
    k = torch.ones(1, 9, 1, 2, device=device)
    k[0, 5, 0, 1] = math.nan
    got = ops.span_means(k, 2).cpu()
    assert got.isnan().nonzero().tolist() == [[0, 2, 0, 1]]


def test_span_means_have_no_gradient(device):
    k = torch.ones(1, 9, 1, 2, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"(?i)not implemented|does not require grad"):
        ops.span_means(k, 2).sum().backward()


# ---- values and lists


def mass_by_loops(q, k, case, token):
    """Importances [H_kv][n - 1] at the layer above the tokens by the mass of every token, in float64 loops."""
    table = ref.rope_cache(case.r * case.top_k, case.K, case.rope_base, dtype=torch.float64)
    own = token // case.r
    found = []
    for kv_head in range(case.H_kv):
        total = torch.zeros(own, dtype=torch.float64)
        for head in range(kv_head * case.H // case.H_kv, (kv_head + 1) * case.H // case.H_kv):
            query = ref.rotate(q[0, token, head], table[0, own], table[1, own])
            scores = [
                [
                    float(query @ ref.rotate(k[0, j, kv_head], table[0, p], table[1, p])) * case.K**-0.5
                    for j in range(p * case.r, (p + 1) * case.r)
                ]
                for p in range(own)
            ]
            mass = torch.tensor(scores, dtype=torch.float64).exp().sum(-1)
            total += mass / mass.sum()
        found.append(total)
    return found


@pytest.mark.parametrize(("H", "H_kv"), [(1, 1), (4, 2)])
def test_a_span_of_1_selects_by_the_mass_of_the_tokens(H, H_kv, device):
    case = TreeAttentionCase(
        name="mass", dtype=torch.float64 if device == "cpu" else torch.float32, T=64, H=H, H_kv=H_kv,
        r=4, top_k=4, M=16, selection_span=1, spread=2.0,
    )  # fmt: skip
    q, k, v = case.make_qkv(device)
    bottom = forward(q, k, v, case)[3][0].cpu()
    q, k = q.cpu().double(), k.cpu().double()
    for token in (20, 43, 63):
        for kv_head, mass in enumerate(mass_by_loops(q, k, case, token)):
            best = {*mass.topk(case.top_k - 1).indices.tolist(), token // case.r}
            assert set(bottom[0, token, kv_head].tolist()) == best


def test_spans_find_the_key_that_the_mean_hides(device):
    """One key in sixteen points where the query does, among keys that cancel each other in the means of 16."""
    case = TreeAttentionCase(
        name="needle", dtype=torch.float32, T=1024, H=1, K=16, V=4, r=16, top_k=4, M=64, rope_base=None, scale=1.0,
    )  # fmt: skip
    q, k, v = case.make_qkv("cpu")
    # every pair of neighbours cancels to a little, the needle's whole node to nothing
    k[:, 1::2] = 0.1 * k[:, 1::2] - k[:, ::2]
    direction = torch.nn.functional.normalize(q[0, -1, 0], dim=0)
    k[0, 320:336, 0] = -4.0 / 15 * direction
    k[0, 327, 0] = 4.0 * direction
    q[0, -1, 0] = 3.0 * direction
    found = {}
    for span in (None, 2, 1):
        options = {**case.reference_options(), "selection_span": span}
        parents = ops.attention_forward(*on(device, q, k, v), **options)[3]
        found[span] = 320 // 16 in parents[0][0, -1, 0].tolist()
    assert found == {None: False, 2: True, 1: True}


SPAN_R = [
    dataclasses.replace(shape, name=f"{shape.name}_{importance}", importance=importance)
    for shape in SHAPES
    if shape.T and shape.B and len(shape.sizes) == 2 and shape.importance == "lse_causal"
    for importance in ("lse_causal", "exp_joint")
]


@pytest.mark.parametrize("case", SPAN_R, ids=case_id)
def test_a_span_of_r_is_no_span_on_two_layers(case, device):
    for dtype in dtypes_of(device):
        typed = case.with_dtype(dtype)
        inputs = typed.make_qkv(device)
        assert same_bits(
            forward(*inputs, dataclasses.replace(typed, selection_span=case.r)), forward(*inputs, typed)
        )


# ---- special values


def broken_problem(value, importance):
    """q, k, v without rotation and with one key of `value` alone: token 21, node 5 of layer 1, node 1 of layer 2."""
    case = TreeAttentionCase(
        name="broken", dtype=torch.float32, T=96, H=4, H_kv=2, K=4, r=4, top_k=3, M=12, rope_base=None,
        importance=importance, selection_span=2,
    )  # fmt: skip
    q, k, v = case.make_separated("cpu")
    q = q.abs() + 0.1  # one sign, so that a key of infinities has one score
    k[0, 21, 0] = value
    return case, q, k, v


@pytest.mark.parametrize("importance", ["lse_causal", "exp_joint"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_broken_key_selects_as_the_reference_says(value, importance, device):
    """NaN makes a selection by position, -inf weighs as little as a very small score."""
    case, q, k, v = broken_problem(value, importance)
    parents = [x.cpu() for x in forward(*on(device, q, k, v), case)[3]]
    k[0, 21, 0] = value if math.isnan(value) else -1e4  # the reference rotates by 0: 0 * inf
    wanted = ref.htree_forward_naive(q, k, v, **case.reference_options(), compute_dtype=torch.float64).parents
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parents, wanted, strict=True))
    assert_lists(parents, case.T_q, case.T, case.reference_options())


@pytest.mark.parametrize("importance", ["lse_causal", "exp_joint"])
def test_an_infinite_score_is_selected(importance, device):
    case, q, k, v = broken_problem(math.inf, importance)
    parents = [x.cpu() for x in forward(*on(device, q, k, v), case)[3]]
    assert (parents[1][0, 32:, 0] == 1).any(-1).all()
    assert (parents[0][0, 32:, 0] == 5).any(-1).all()
    assert_lists(parents, case.T_q, case.T, case.reference_options())


@pytest.mark.parametrize("scale", [0.0, 1e4, 3e4])
def test_equal_and_overflowing_scores(scale, device):
    case = dataclasses.replace(spanned("batch"), scale=scale, selection_span=2)
    q, k, v = case.make_qkv(device)
    out, _, _, parents = forward(q, k, v, case)
    assert out.isfinite().all()
    assert_lists([x.cpu() for x in parents], case.T_q, case.T, case.reference_options())
    if scale == 0.0:  # equal importances go by position
        wanted = ref.htree_forward_naive(*(x.cpu() for x in (q, k, v)), **case.reference_options()).parents
        assert all(torch.equal(x.cpu(), y) for x, y in zip(parents, wanted, strict=True))


# ---- the same bits


@pytest.mark.parametrize("name", ["three_layers_r16", "stride4", "group_of_3", "key_18", "head_64"])
def test_splits_layouts_and_batches_change_no_bit(name, device):
    case = spanned(name)
    case = dataclasses.replace(case, B=2, num_queries=None, layout="contiguous")
    q, k, v, options = case.make_call(device)
    whole = forward(q, k, v, case)
    assert same_bits(whole, forward(q, k, v, case))
    few = case.T % case.selection_stride + 3 * case.selection_stride
    out, gmax, gsum, parents = ops.attention_forward(q[:, -few:], k, v, **options)
    for ours, theirs in zip((out, gmax, gsum), whole[:3], strict=True):
        assert torch.equal(ours, theirs[:, -few:])
    for ours, theirs in zip(parents, whole[3], strict=True):
        assert torch.equal(ours, theirs[:, -ours.shape[1] :])
    assert torch.equal(ops.attention(q[1:], k[1:], v[1:], **options), whole[0][1:])
    for place in (layouts.in_larger, layouts.misaligned, layouts.transposed):
        assert same_bits(whole, ops.attention_forward(*(place(x) for x in (q, k, v)), **options)), place


@pytest.mark.parametrize("isa", ISAS[:-1])  # the other tests run the best one
def test_instruction_sets(isa):
    script = """
import dataclasses, re, torch, htree_ops
from tests.support.tree_attention_cases import SPAN_SHAPES
from tests.support.tree_attention_checks import assert_epsilon_optimal, assert_lists
NAMES = ("three_layers_r16", "group_of_3", "stride4", "key_18", "r5", "importance_joint", "wide_lists")
forward = torch.ops.htree.attention_forward
for shape in SPAN_SHAPES:
    if re.sub(r"_c[0-9]+$", "", shape.name) not in NAMES:
        continue
    q, k, v = shape.make_qkv("cpu")
    options = shape.reference_options()
    parents = forward(q, k, v, **options)[3]
    assert_lists(parents, shape.T_q, shape.T, options)
    assert_epsilon_optimal(q, k, v, parents, options)
    two_layers = {**options, "max_top_nodes": -(-shape.T // shape.r), "top_k_per_layer": -(-shape.T // shape.r) - 1}
    first, second = (forward(q, k, v, **{**two_layers, "selection_span": c}) for c in (None, shape.r))
    assert len(first[3]) == 2
    assert all(torch.equal(x, y) for x, y in zip((first[0], *first[3]), (second[0], *second[3])))
"""
    done = run_with(isa, script)
    assert done.returncode == 0, done.stderr


# ---- one layer at a time


@given(seed=seeds, extreme=st.booleans(), layer=st.integers(1, 2), stride=st.sampled_from((1, 2, 4)),
       span=st.sampled_from((1, 2, 4)))  # fmt: skip
def test_one_layer_under_wild_lists(seed, extreme, layer, stride, span, device):
    """NaN lies all around the means; an absent candidate or mean has the score -inf."""
    case = TreeAttentionCase(
        name="wild", dtype=torch.float32, B=2, T=61, H=4, H_kv=2, K=6, V=5, r=4, top_k=3, M=9,
        selection_stride=stride, selection_span=span,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    q, k, v = case.make_qkv("cpu", seed)
    stage = case.make_stages(q, k, v)[layer]
    lists = wild_lists(generator, (2, -(-case.T_q // stride), 2, 3), stage.layer_k.shape[1], extreme)
    span_k = ref.span_means(k, span)
    table = case.make_table("cpu")
    placed = [layouts.in_larger(x.to(device)) for x in (stage.layer_k, stage.layer_v, span_k)]
    rest = on(device, lists, *table)
    place = (layer, case.r, case.top_k, case.scale, case.importance, case.t0, stride)
    extra = {"span_k": placed[2], "selection_span": span}
    *_, chosen = ops.select_accumulate(q.to(device), *placed[:2], *rest, *place, **extra)
    again = ops.recompute_selection(q.to(device), placed[0], *rest, *place, **extra)
    assert torch.equal(chosen, again)
    inputs = wide(q, stage.layer_k, span_k)
    found = ref.candidates(lists, layer, stage.layer_k.shape[1], case.r, case.t0) if stride == 1 else None
    if found is None or extreme:
        return
    value = ref.span_importance(
        inputs[0], inputs[2], found, case.r**layer // span, *wide(*table), None, case.importance
    )
    wanted = ref.compute_next_parents(lists, ref.select_important(value, found.num, case.top_k), case.r)
    ranked = value.gather(-1, ref.order_by_key(value, found.num))
    last, first = ranked[..., case.top_k - 1], ranked[..., case.top_k]
    clear = ((last - first) > 1e-4 * last) | (found.num <= case.top_k)
    assert torch.equal(chosen.cpu()[clear], wanted[clear])


# ---- torch's machinery

OPCHECK = [
    "batch",
    "fused_projection",
    "stride4_suffix",
    "empty_sequence",
    "empty_batch",
    "no_query",
    "ragged_mean",
]


@pytest.mark.parametrize("name", OPCHECK)
def test_opcheck(name, device):
    case = spanned(name)
    found = calls_with(case, device, "selection_span")
    found += [x for x in calls(case, device) if x.op == "span_means"]
    assert len(found) >= 10
    for call in found:
        call.opcheck()


# ---- refusals


@pytest.mark.parametrize("op", ["attention", "attention_forward", "attention_backward"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection_span": 0}, r"selection_span must be None or a divisor of compression_rate = 4 .*got 0"),
        ({"selection_span": -2}, r"selection_span must be None or a divisor .*got -2"),
        ({"selection_span": 3}, r"selection_span must be None or a divisor .*got 3"),
        ({"selection_span": 8}, r"selection_span must be None or a divisor .*got 8"),
        (
            {"selection_span": 2, "importance": "lse"},
            r"selection_span must be None where importance is 'lse', got 2",
        ),
    ],
    ids=str,
)
def test_spans_that_attention_refuses(op, options, message, device):
    case = spanned("batch")
    call = next(call for call in calls(case, device) if call.op == op)
    names = [arg.name for arg in call.overload._schema.arguments]
    arguments = {**dict(zip(names, call.args, strict=False)), **options}
    with pytest.raises(ValueError, match=message):
        getattr(ops, op)(**arguments)


@pytest.mark.parametrize("op", ["select_accumulate", "recompute_selection"])
def test_what_the_ops_of_one_layer_refuse(op, device):
    case = dataclasses.replace(spanned("batch"), selection_span=2)
    call = next(call for call in calls(case, device) if call.op == op)
    good = call.kwargs["span_k"]
    wrong = {
        "together or not at all, got span_k alone": {"span_k": good, "selection_span": None},
        "together or not at all, got span_k None": {"span_k": None, "selection_span": 2},
        r"selection_span must be None or a divisor of compression_rate = 4": {"selection_span": 3},
        r"span_k must have the means of the tokens below layer_k": {"span_k": good[:, :-9]},
        r"span_k must have 4 dimensions|span_k .*\[B, ceil": {"span_k": good[0]},
        r"span_k .*H_kv": {"span_k": good[:, :, :1]},
        r"span_k .*K of layer_k": {"span_k": good[..., :4]},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            call.overload(*call.args, **{**call.kwargs, **change})
    with pytest.raises(TypeError, match="span_k"):
        call.overload(*call.args, **{**call.kwargs, "span_k": good.half()})


def test_span_means_refuses(device):
    k = torch.ones(1, 9, 1, 2, device=device)
    for span in (0, -1, 2**31):
        with pytest.raises(ValueError, match=f"span_means: span must be between 1 and .*got {span}"):
            ops.span_means(k, span)
    with pytest.raises(ValueError, match=r"span_means: k "):
        ops.span_means(k[0], 2)
    with pytest.raises(TypeError, match=r"span_means: k "):
        ops.span_means(k.int(), 2)


# ---- shapes of the tensor-core path

FAST = [
    model(f"d{width}_g{group}_s{stride}_c{span}", dtype, K=width, V=width, H=group * heads, H_kv=heads, T=length,
          top_k=top_k, M=nodes, selection_stride=stride, selection_span=span)
    for width, group, heads, stride, span, length, top_k, nodes, dtype in [
        (64, 1, 2, 1, 4, 1500, 8, 128, torch.bfloat16),
        (64, 4, 2, 1, 2, 1500, 8, 128, torch.bfloat16),
        (128, 8, 2, 4, 4, 2000, 8, 128, torch.bfloat16),
        (128, 8, 1, 16, 2, 2000, 8, 128, torch.float16),
        (32, 3, 2, 2, 8, 1500, 8, 128, torch.float16),
        (32, 16, 1, 8, 1, 1000, 8, 128, torch.bfloat16),
        (64, 2, 1, 16, 16, 1500, 8, 128, torch.bfloat16),
        (64, 4, 1, 4, 4, 9000, 4, 64, torch.bfloat16),
        (128, 3, 1, 1, 2, 3000, 4, 16, torch.float16),
        (64, 8, 1, 2, 1, 3000, 4, 16, torch.bfloat16),
        (32, 5, 1, 16, 4, 9000, 4, 64, torch.float16),
        (64, 8, 1, 4, 4, 1500, 8, 128, torch.float32),
    ]
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", FAST, ids=case_id)
def test_shapes_of_the_tensor_cores(case):
    (q, k, v), whole, dout, gradients = assert_fast_call(case)
    out, gmax, gsum, parents = whole
    options = case.reference_options()
    assert same_bits(whole, forward(q, k, v, case))
    assert torch.equal(ops.attention(q, k, v, **options), out)
    token = case.T // 2 // 16 * 16 + 5
    changed = [x.clone() for x in (k, v)]
    for x in changed:
        x[:, token + 1 :] = torch.nan
    after = forward(q, *changed, case)
    assert torch.equal(out[:, : token + 1], after[0][:, : token + 1])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for stored in (True, False):
        got = ops.attention(*leaves, **options, store_parents=stored)
        found = torch.autograd.grad(got, leaves, dout)
        assert all(torch.equal(x, y) for x, y in zip(found, gradients, strict=True))
    forced_options = {**options, "selection_span": None}
    plain = ops.attention_backward(dout, q, k, v, out, gmax, gsum, parents, **forced_options)
    same = all(torch.equal(x, y) for x, y in zip(gradients, plain, strict=True))
    assert same, "the lists are all that matters"


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("group", [3, 8])
def test_a_span_of_r_on_shapes_of_the_tensor_cores(group, stride):
    case = model("span_r", H=group, H_kv=1, T=1500, top_k=8, M=128, selection_stride=stride)
    inputs = case.make_qkv("cuda")
    assert same_bits(forward(*inputs, dataclasses.replace(case, selection_span=16)), forward(*inputs, case))
