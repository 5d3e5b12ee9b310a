"""Properties H1-H13 of tree attention (docs/semantics/tree_attention.md §1.11) on drawn problems."""

import dataclasses

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tree_attention_strategies import CAUSAL, EVERY_IMPORTANCE, dtypes_of, problems, seeds

import htree_ops  # noqa: F401  registers torch.ops.htree
import htree_ops.reference.tree_attention as ref
from tests.support.compare import assert_close_spec
from tests.support.devices import poisoned_memory
from tests.support.tree_attention_checks import (
    STATE_TOLERANCE,
    TOLERANCE,
    assert_epsilon_optimal,
    assert_lists,
    assert_output,
    assert_state,
    forced,
)

ops = torch.ops.htree


def forward(q, k, v, case):
    """attention_forward in memory that starts as NaN: out, gmax, gsum, parents, all on the CPU."""
    with poisoned_memory():
        out, gmax, gsum, parents = ops.attention_forward(q, k, v, **case.reference_options())
    return out.cpu(), gmax.cpu(), gsum.cpu(), [lists.cpu() for lists in parents]


def on_cpu(*tensors):
    return [x.cpu() for x in tensors]


@given(data=st.data(), seed=seeds)
def test_h1_the_cut_tiles_the_past(data, seed, device):
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE))
    q, k, v = case.make_qkv(device, seed)
    parents = forward(q, k, v, case)[3]
    assert_lists(parents, case.T_q, case.T, case.reference_options())
    found = forced(*on_cpu(q, k, v), parents, case.reference_options())
    coverage = ref.cut_coverage(found, case.r)
    tokens = torch.arange(case.T)
    assert torch.equal(
        coverage, (tokens <= tokens[case.t0 :, None]).long()[None, :, None].expand_as(coverage)
    )


@given(data=st.data(), seed=seeds)
def test_h2_merging_is_one_softmax(data, seed, device):
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE))
    q, k, v = case.make_qkv(device, seed)
    out, gmax, gsum, parents = forward(q, k, v, case)
    q, k, v = on_cpu(q, k, v)
    found = forced(q, k, v, parents, case.reference_options())
    assert_output(out, ref.softmax_over_cut(found), v)
    a, b = STATE_TOLERANCE[case.dtype]
    lse = gmax.double() + gsum.double().log()
    assert_close_spec(lse, found.lse, rtol=b, atol=a + b, name="lse")
    assert_epsilon_optimal(q, k, v, parents, case.reference_options())


@given(data=st.data(), seed=seeds, one_layer=st.booleans())
def test_h3_exact_regimes_are_dense_attention(data, seed, one_layer, device):
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE))
    if one_layer:
        case = dataclasses.replace(case, M=case.T, top_k=max(case.top_k, -(-case.T // case.r)))
    else:
        case = dataclasses.replace(case, top_k=max(case.top_k, case.T))
    q, k, v = case.make_qkv(device, seed)
    with poisoned_memory():
        out = ops.attention(q, k, v, **case.reference_options()).cpu()
    q, k, v = on_cpu(q, k, v)
    dense = ref.dense_causal_attention(
        q, k, v, case.scale, case.rope_base, case.inv_freq, compute_dtype=torch.float64
    )
    assert_output(out, dense, v)


@given(
    data=st.data(),
    seed=seeds,
    poison=st.sampled_from((float("nan"), float("inf"), -3e4, 0.0)),
    part=st.floats(0, 1),
)
def test_h4_the_future_changes_no_bit(data, seed, poison, part, device):
    case = data.draw(problems(dtypes_of(device), importances=CAUSAL))
    q, k, v = case.make_qkv(device, seed)
    before = forward(q, k, v, case)
    row = int(part * (case.T_q - 1))  # the last row that must not change
    future = case.t0 + row + 1
    q, k, v = (x.clone() for x in (q, k, v))
    q[:, row + 1 :] = poison
    k[:, future:] = poison
    v[:, future:] = poison
    after = forward(q, k, v, case)
    for name, ours, theirs in zip(("out", "gmax", "gsum"), before, after, strict=False):
        assert torch.equal(ours[:, : row + 1], theirs[:, : row + 1]), name
    rows = -(-(row + 1) // case.selection_stride)
    for ours, theirs in zip(before[3], after[3], strict=True):
        assert torch.equal(ours[:, :rows], theirs[:, :rows])


@given(data=st.data(), seed=seeds)
def test_h5_the_rightmost_is_always_selected(data, seed, device):
    """The rightmost is selected also where all scores are equal (q = 0), overflow or are NaN."""
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE, layers=2))
    q, k, v = case.make_qkv(device, seed)
    q = q * data.draw(st.sampled_from((1.0, 0.0, 1e4, float("nan"))))
    parents = forward(q, k, v, case)[3]
    times = torch.arange(case.t0, case.T, case.selection_stride)
    for layer, lists in enumerate(parents):
        own = (times // case.r**layer // case.r).view(1, -1, 1, 1)
        assert (lists == own).any(-1).all(), f"layer {layer}"
    assert_lists(parents, case.T_q, case.T, case.reference_options())


@given(data=st.data(), seed=seeds)
def test_h6_a_layer_may_be_split_into_batches(data, seed, device):
    case = data.draw(problems(dtypes_of(device), layers=2))
    case = dataclasses.replace(case, selection_stride=1, layout="contiguous")
    q, k, v = case.make_qkv(device, seed)
    stage = case.make_stages(*on_cpu(q, k, v))[data.draw(st.integers(0, len(case.sizes) - 1))]
    layer_k, layer_v, parents = (x.to(device) for x in (stage.layer_k, stage.layer_v, stage.parents))
    cos, sin = case.make_table(device)
    scores, num = ops.compute_scores(q, layer_k, parents, cos, sin, stage.layer, case.r, case.scale, case.t0)
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, 3, scores.shape[:-1], generator=generator).to(device)
    rest = (layer_v, parents)
    whole = ops.accumulate_non_topk(*rest, scores, num, stage.layer, case.r, case.t0)
    total = [x.to(device) for x in ref.empty_state(case.B, case.T_q, case.H, case.V, scores.cpu())]
    for index in torch.randperm(3, generator=generator).tolist():
        part = scores.masked_fill((batch != index)[..., None], -torch.inf)
        ops.merge_to_global_(*total, *ops.accumulate_non_topk(*rest, part, num, stage.layer, case.r, case.t0))
    assert_state(tuple(on_cpu(*total)), tuple(on_cpu(*whole)), v.cpu())


@given(data=st.data(), seed=seeds)
def test_h7_and_h8_the_output_is_a_weighted_mean_of_values(data, seed, device):
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE))
    q, k, v = case.make_qkv(device, seed)
    out = forward(q, k, v, case)[0].double()
    values = v.cpu().double()
    a, b = TOLERANCE[case.dtype]
    slack = a * values.abs().max() + b * out.abs()
    past = [values.cummax(1).values, (-values).cummax(1).values]
    group = case.H // case.H_kv
    high, low = (x[:, case.t0 :].repeat_interleave(group, dim=2) for x in past)
    assert (out <= high + slack).all()
    assert (-out <= low + slack).all()
    constant = torch.randn(case.V, generator=torch.Generator().manual_seed(seed)).to(case.dtype)
    v = constant.to(device).expand_as(v).contiguous()
    out = forward(q, k, v, case)[0]
    assert_output(out, constant.double().expand(out.shape), v)


@given(data=st.data(), seed=seeds, shift=st.sampled_from((-60.0, -1.0, 0.5, 30.0)))
def test_h9_a_constant_added_to_all_scores_cancels(data, seed, shift, device):
    """Without rotation, two extra channels of q and k add one constant to every score at every layer."""
    case = data.draw(problems(dtypes_of(device), importances=CAUSAL))
    case = dataclasses.replace(case, rope_base=None, inv_freq=None, layout="contiguous", scale=0.5)
    q, k, v = case.make_qkv(device, seed)
    pair = torch.tensor([1.0, 0.0], dtype=case.dtype, device=device)
    moved_q = torch.cat([q, pair.expand(*q.shape[:3], 2)], dim=-1)
    moved_k = torch.cat([k, (2 * shift * pair).expand(*k.shape[:3], 2)], dim=-1)
    out, gmax, gsum, parents = forward(moved_q, moved_k, v, dataclasses.replace(case, K=case.K + 2))
    q, k, v = on_cpu(q, k, v)
    found = forced(q, k, v, parents, case.reference_options())
    assert_output(out, found.out, v)
    a, b = STATE_TOLERANCE[case.dtype]
    lse = gmax.double() + gsum.double().log() - shift
    assert_close_spec(lse, found.lse, rtol=b, atol=a + b + abs(shift) * b, name="lse")
    assert_epsilon_optimal(q, k, v, parents, case.reference_options())


def staged_pipeline(q, k, v, case):
    """The whole forward out of staged ops, s = 1: out and the lists of every layer."""
    layers = [(k, v)]
    while layers[-1][0].shape[1] > case.M:
        layers.append(ops.tree_build(*layers[-1], case.r))
    cos, sin = case.make_table(q.device)
    top = len(layers) - 1
    parents = ops.top_parents(
        case.B, case.T_q, case.H_kv, case.top_k, len(layers), case.r, case.t0, device=q.device
    )
    total = [x.to(q.device) for x in ref.empty_state(case.B, case.T_q, case.H, case.V, cos.cpu())]
    used = []
    for layer in range(top, -1, -1):
        layer_k, layer_v = layers[layer]
        used.insert(0, parents.cpu())
        scores, num = ops.compute_scores(q, layer_k, parents, cos, sin, layer, case.r, case.scale, case.t0)
        lists = parents
        if layer:
            positions = ops.select_topk(scores, num, case.top_k, case.importance, case.open_next)
            ops.mask_topk_scores_(scores, positions)
            parents = ops.compute_next_parents(parents, positions, case.r)
        state = ops.accumulate_non_topk(layer_v, lists, scores, num, layer, case.r, case.t0)
        ops.merge_to_global_(*total, *state)
    return ops.final_normalize(total[2], total[1], q.dtype).cpu(), used


def fused_pipeline(q, k, v, case):
    """The whole forward out of the fused stage ops: out and the lists of every layer."""
    layers = [(k, v)]
    while layers[-1][0].shape[1] > case.M:
        layers.append(ops.tree_build(*layers[-1], case.r))
    cos, sin = case.make_table(q.device)
    stride = case.selection_stride
    span_k = None if case.selection_span is None else ops.span_means(k, case.selection_span)
    parents = ops.top_parents(
        case.B, case.T_q, case.H_kv, case.top_k, len(layers), case.r, case.t0, stride, device=q.device
    )
    total = [x.to(q.device) for x in ref.empty_state(case.B, case.T_q, case.H, case.V, cos.cpu())]
    used = [parents.cpu()]
    for layer in range(len(layers) - 1, 0, -1):
        *state, parents = ops.select_accumulate(
            q, *layers[layer], parents, cos, sin, layer, case.r, case.top_k, case.scale, case.importance,
            case.t0, stride, span_k, case.selection_span, case.open_next,
        )  # fmt: skip
        ops.merge_to_global_(*total, *state)
        used.insert(0, parents.cpu())
    bottom = ops.bottom_accumulate(q, k, v, parents, cos, sin, case.r, case.scale, case.t0, stride)
    ops.merge_to_global_(*total, *bottom)
    return ops.final_normalize(total[2], total[1], q.dtype).cpu(), used


@given(data=st.data(), seed=seeds, staged=st.booleans())
def test_h10_stages_compose_to_the_whole(data, seed, staged, device):
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE))
    if staged:  # the staged ops know neither
        case = dataclasses.replace(case, selection_stride=1, selection_span=None)
    q, k, v = case.make_qkv(device, seed)
    whole, _, _, parents = forward(q, k, v, case)
    with poisoned_memory():
        out, used = (staged_pipeline if staged else fused_pipeline)(q, k, v, case)
    cpu = on_cpu(q, k, v)
    options = case.reference_options()
    assert_lists(used, case.T_q, case.T, options)
    assert_epsilon_optimal(*cpu, used, options)
    assert_output(out, forced(*cpu, used, options).out, cpu[2])
    same = [torch.equal(ours, theirs) for ours, theirs in zip(used, parents, strict=True)]
    if all(same):  # else a near tie fell differently, which the reference has just allowed
        a, b = TOLERANCE[case.dtype]
        atol = 2 * a * float(v.double().abs().max())
        assert_close_spec(out, whole.double(), rtol=2 * b, atol=atol, name="stages against the whole")


@given(data=st.data(), seed=seeds)
def test_h11_expanded_heads_select_per_query_head(data, seed, device):
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE))
    q, k, v = case.make_qkv(device, seed)
    group = case.H // case.H_kv
    wide_k, wide_v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    out, _, _, parents = forward(q, wide_k, wide_v, case)
    cpu = on_cpu(q, k, v)
    options = case.reference_options()
    own = ref.htree_forward_naive(
        *cpu, **options, scope="q_head", parents=parents, compute_dtype=torch.float64
    )
    assert_output(out, own.out, cpu[2])
    assert_epsilon_optimal(cpu[0], wide_k.cpu(), wide_v.cpu(), parents, options)
    if group == 1:
        shared, _, _, lists = forward(q, k, v, case)
        assert torch.equal(out, shared)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(parents, lists, strict=True))


@given(data=st.data(), seed=seeds)
def test_h12_subtraction_is_direct_accumulation_for_small_scores(data, seed, device):
    case = data.draw(problems(dtypes_of(device), layers=2, spreads=(1.0, 0.2)))
    case = dataclasses.replace(case, selection_stride=1, layout="contiguous")
    q, k, v = case.make_qkv(device, seed)
    group = case.H // case.H_kv
    layers = [(k, v)]
    while layers[-1][0].shape[1] > case.M:
        layers.append(ops.tree_build(*layers[-1], case.r))
    cos, sin = case.make_table(device)
    layer = len(layers) - 1
    parents = ops.top_parents(
        case.B, case.T_q, case.H, case.top_k, len(layers), case.r, case.t0, device=torch.device(device)
    )
    place = (layer, case.r, case.top_k, case.scale)
    *state, indices, scores = ops.compute_and_select(q, *layers[-1], parents, cos, sin, *place, case.t0)
    whole = state[1].cpu().double()
    left = ops.subtract_topk(layers[-1][1], indices, scores, *state)
    wide = [x.repeat_interleave(group, dim=2) for x in layers[-1]]
    *direct, lists = ops.select_accumulate(q, *wide, parents, cos, sin, *place, "lse_causal", case.t0)
    assume(torch.equal(left[3], lists))  # else two orders of summation fell on either side of a near tie
    unit = 64 * case.top_k * torch.finfo(case.state_dtype).eps
    top, total, out = (x.cpu().double() for x in left[:3])
    d_top, d_total, d_out = (x.cpu().double() for x in direct)
    factor = torch.exp(d_top - state[0].cpu().double())  # to the base of the subtracted state
    assert_close_spec(
        torch.where(top == -torch.inf, 0.0, total), d_total * factor, rtol=0.0, atol=unit * whole
    )
    atol = (unit * whole * float(v.double().abs().max()))[..., None].expand_as(out)
    assert_close_spec(out, d_out * factor[..., None], rtol=0.0, atol=atol, name="out")


@given(
    data=st.data(),
    rate=st.integers(2, 9),
    length=st.integers(1, 200),
    value=st.floats(-100, 100, width=16),
    seed=seeds,
)
def test_h13_means_of_constants_and_whole_trees(data, rate, length, value, seed, device):
    dtype = data.draw(st.sampled_from((*dtypes_of(device), torch.float64)))
    k = torch.full((1, length, 2, 4), value, dtype=dtype, device=device)
    v = torch.full((1, length, 2, 3), value, dtype=dtype, device=device)
    for x, pooled in zip((k, v), ops.tree_build(k, v, rate), strict=True):
        # c equal terms added and divided by c: rounding only
        expected = torch.full(pooled.shape, x.flatten()[0].double().item(), dtype=torch.float64)
        assert_close_spec(pooled, expected, rtol=torch.finfo(dtype).eps, atol=0.0, dtype=dtype)
    if dtype in (torch.float16, torch.bfloat16):
        return  # every level rounds, so the root is not the exact mean of the tokens
    height = data.draw(st.integers(1, 6).filter(lambda h: rate**h <= 600))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, rate**height, 1, 2, generator=generator, dtype=torch.float64).to(dtype).to(device)
    root = (tokens, tokens)
    for _ in range(height):
        root = ops.tree_build(*root, rate)
    assert root[0].shape[1] == 1
    mean = tokens.cpu().double().mean(dim=1, keepdim=True)
    atol = 4 * height * rate * torch.finfo(dtype).eps
    assert_close_spec(root[0], mean, rtol=0.0, atol=atol, name="root")


@given(data=st.data(), seed=seeds)
def test_repeats_and_grad_mode_give_the_same_bits(data, seed, device):
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE))
    q, k, v = case.make_qkv(device, seed)
    first = forward(q, k, v, case)
    again = forward(q, k, v, case)
    assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[3], again[3], strict=True))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for store in (True, False):
        out = ops.attention(*leaves, **case.reference_options(), store_parents=store)
        assert out.requires_grad
        assert torch.equal(out.detach().cpu(), first[0])
    with torch.no_grad():
        assert torch.equal(ops.attention(*leaves, **case.reference_options()).cpu(), first[0])
