"""The reference of tree attention against docs/semantics/tree_attention.md §1, written out as scalar loops."""

import math

import pytest
import torch

import htree_ops.reference.tree_attention as ref
from htree_ops.reference.selection import select_blocks
from tests.support.cases import case_id, normal
from tests.support.tree_attention_cases import FREE_SHAPES, SHAPES

FLOAT64_SHAPES = [shape.with_dtype(torch.float64) for shape in SHAPES]
FREE = [shape.with_dtype(torch.float64) for shape in FREE_SHAPES]
CAUSAL = [case for case in FREE if case.importance != "lse"]
SMALL = [case for case in FLOAT64_SHAPES if 0 < case.T * case.B <= 110 and case.K <= 18 and case.T_q]


def scalar_rope(x, position, base):
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        angle = 0.0 if base is None else position * base ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[i] * math.sin(angle) + x[half + i] * math.cos(angle)
    return out


def scalar_levels(x, rate, max_top_nodes):
    """[T][D] -> levels of means of children."""
    levels = [x]
    while len(levels[-1]) > max_top_nodes:
        below = levels[-1]
        families = [below[i : i + rate] for i in range(0, len(below), rate)]
        levels.append(
            [[sum(column) / len(family) for column in zip(*family, strict=True)] for family in families]
        )
    return levels


def scalar_importance(scores, kind):
    """scores[g][p] -> importance of p < n-1 by the rule `kind` of §1.6."""
    n = len(scores[0])
    counted = range(n) if kind == "lse" else range(n - 1)
    importance = []
    peak = max((s[p] for s in scores for p in counted), default=-math.inf)
    for p in range(n - 1):
        total = 0.0
        for row in scores:
            if kind == "exp_joint":
                weight = math.exp(row[p] - peak)
            else:
                top = max(row[i] for i in counted)
                weight = math.exp(row[p] - top - math.log(sum(math.exp(row[i] - top) for i in counted)))
            total += 0.0 if weight < 2.0**-126 else weight
        importance.append(total)
    return importance


def scalar_span_importance(query, nodes, means, per_node, base, scale, kind):
    """The importance of p < n-1 by the span means of its node, §1.15."""
    n = len(nodes)
    scores = []  # [g][p][j]
    for head in query:
        rotated = scalar_rope(head, n - 1, base)
        scores.append([])
        for p, node in enumerate(nodes[:-1]):
            keys = [scalar_rope(mean, p, base) for mean in means[node * per_node : (node + 1) * per_node]]
            scores[-1].append([scale * sum(a * b for a, b in zip(rotated, key, strict=True)) for key in keys])
    peaks = [max((x for means_of in row for x in means_of), default=-math.inf) for row in scores]
    importance = [0.0] * (n - 1)
    for row, peak in zip(scores, peaks, strict=True):
        reference = max(peaks)
        if kind == "lse_causal" and n > 1:
            reference = peak + math.log(sum(math.exp(x - peak) for means_of in row for x in means_of))
        for p, means_of in enumerate(row):
            weights = [math.exp(x - reference) for x in means_of]
            importance[p] += sum(w for w in weights if w >= 2.0**-126)
    return importance


def scalar_row(query, keys, values, t, rate, top_k, base, scale, kind, means=None, span=None, given=None):
    """The loop of §1.8 for one (b, t) and one selection head; query[g][K], keys and values by level.

    With a span the importances are those of the means. Lists that are given take the place of the selection. Returns
    out[g][V] and the list used at each level, bottom first.
    """
    depth = len(keys)
    parents = list(range(t // rate ** (depth - 1) // rate + 1))
    used = []
    cut = [[] for _ in query]
    for level in reversed(range(depth)):
        used.insert(0, parents)
        n = (len(parents) - 1) * rate + t // rate**level % rate + 1
        nodes = [parents[p // rate] * rate + p % rate for p in range(n)]
        rotated_keys = [scalar_rope(keys[level][c], p, base) for p, c in enumerate(nodes)]
        scores = []
        for g in range(len(query)):
            rotated = scalar_rope(query[g], n - 1, base)
            scores.append(
                [scale * sum(a * b for a, b in zip(rotated, key, strict=True)) for key in rotated_keys]
            )
        chosen = []
        if level and given is not None:
            chosen = [p for p in range(n) if nodes[p] in given[level - 1]]
        elif level:
            importance = (
                scalar_importance(scores, kind)
                if span is None
                else scalar_span_importance(query, nodes, means, rate**level // span, base, scale, kind)
            )
            ranked = sorted(range(n - 1), key=lambda p: (-importance[p], p))
            chosen = [n - 1, *ranked][: min(top_k, n)]
        for g in range(len(query)):
            cut[g] += [(scores[g][p], values[level][nodes[p]]) for p in range(n) if p not in chosen]
        parents = sorted(nodes[p] for p in chosen)
    outputs = []
    for pairs in cut:
        top = max(score for score, _ in pairs)
        weights = [math.exp(score - top) for score, _ in pairs]
        width = len(pairs[0][1])
        outputs.append(
            [
                sum(w * v[i] for w, (_, v) in zip(weights, pairs, strict=True)) / sum(weights)
                for i in range(width)
            ]
        )
    return outputs, used


def check_against_loop(q, k, v, options, scope="kv_head"):
    got = ref.htree_forward_naive(q, k, v, **options, scope=scope)
    rate, top_k = options["compression_rate"], options["top_k_per_layer"]
    stride, span = options["selection_stride"], options["selection_span"]
    assert stride == 1
    scale = q.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
    group = q.shape[2] // k.shape[2] if scope == "kv_head" else 1
    expand = 1 if scope == "kv_head" else q.shape[2] // k.shape[2]
    t0 = k.shape[1] - q.shape[1]
    for b in range(q.shape[0]):
        for s in range(q.shape[2] // group):
            keys = scalar_levels(k[b, :, s // expand].tolist(), rate, options["max_top_nodes"])
            values = scalar_levels(v[b, :, s // expand].tolist(), rate, options["max_top_nodes"])
            means = keys[0] if span in (None, 1) else scalar_levels(keys[0], span, len(keys[0]) - 1)[1]
            for row in range(0, q.shape[1], max(1, q.shape[1] // 9)):
                query = q[b, row, s * group : (s + 1) * group].tolist()
                out, used = scalar_row(
                    query, keys, values, t0 + row, rate, top_k, options["rope_base"], scale,
                    options["importance"], means, span,
                )  # fmt: skip
                expected = torch.tensor(out, dtype=torch.float64)
                torch.testing.assert_close(
                    got.out[b, row, s * group : (s + 1) * group], expected, rtol=1e-11, atol=1e-12
                )
                for level, nodes in enumerate(used):
                    listed = got.parents[level][b, row, s].tolist()
                    assert listed == nodes + [-1] * (top_k - len(nodes))


@pytest.mark.parametrize("case", [c for c in SMALL if c.selection_stride == 1], ids=case_id)
def test_forward_is_the_loop_of_the_definition(case):
    check_against_loop(*case.make_qkv("cpu"), case.reference_options())


@pytest.mark.parametrize(
    ("importance", "span"),
    [
        *(("lse_causal", span) for span in (None, 1, 2, 4)),
        *(("exp_joint", span) for span in (None, 1, 2, 4)),
        ("lse", None),
    ],
)
@pytest.mark.parametrize("scope", ["kv_head", "q_head"])
def test_every_option_is_the_loop_of_the_definition(importance, span, scope):
    case = next(c for c in SMALL if c.name == "group_of_3")
    options = {**case.reference_options(), "importance": importance, "selection_span": span}
    check_against_loop(*case.make_qkv("cpu", seed=5), options, scope)


@pytest.mark.parametrize(
    "name", ["two_layers_first", "three_layers_first", "ragged_everywhere", "r5", "decode"]
)
def test_spans_are_the_loop_of_the_definition(name):
    case = next(c for c in SMALL if c.name == name)
    for span in range(1, case.r + 1):
        if case.r % span == 0:
            options = {**case.reference_options(), "selection_span": span}
            check_against_loop(*case.make_qkv("cpu", seed=span), options)


@pytest.mark.parametrize("case", [c for c in SMALL if c.selection_stride > 1], ids=case_id)
def test_stride_takes_the_leaders_lists(case):
    q, k, v = case.make_qkv("cpu")
    got = ref.htree_forward_naive(q, k, v, **case.reference_options())
    one = ref.htree_forward_naive(q, k, v, **{**case.reference_options(), "selection_stride": 1})
    for ours, leaders in zip(got.parents, one.parents, strict=True):
        assert torch.equal(ours, leaders[:, :: case.selection_stride])
    stretched = [ref.rows_of_queries(lists, case.T_q, case.selection_stride) for lists in got.parents]
    forced = ref.htree_forward_naive(
        q, k, v, **{**case.reference_options(), "selection_stride": 1}, parents=stretched
    )
    torch.testing.assert_close(got.out, forced.out, rtol=0, atol=0)


def rows_to_check(case):
    """Places around the boundaries of layers, the ends, and some between."""
    edges = [case.M * case.r**i for i in range(4)]
    some = {edge + i for edge in edges for i in (-1, 0, 1, 3)} | set(range(case.t0, case.T, 13))
    return sorted(t for t in some | {case.t0, case.T - 1} if case.t0 <= t < case.T)


@pytest.mark.parametrize("case", [c for c in CAUSAL if not c.open_next and c.inv_freq is None], ids=case_id)
def test_with_a_free_top_a_row_walks_the_tree_of_its_own_prefix(case):
    """M > k*r: the loop over the tokens up to the row alone, with as many layers as the leader's prefix has."""
    q, k, v = case.make_qkv("cpu")
    got = ref.htree_forward_naive(q, k, v, **case.reference_options())
    scale = case.K**-0.5 if case.scale is None else case.scale
    group, span = case.H // case.H_kv, case.selection_span
    for t in rows_to_check(case):
        leader = t - t % case.selection_stride
        depth = len(ref.layer_sizes(leader + 1, case.r, case.M))
        for b, s in {(0, 0), (case.B - 1, case.H_kv - 1)}:
            heads = slice(s * group, (s + 1) * group)
            tokens = k[b, : t + 1, s].tolist(), v[b, : t + 1, s].tolist()
            levels = [scalar_levels(x, case.r, 1)[:depth] for x in tokens]
            means = tokens[0] if span in (None, 1) else scalar_levels(tokens[0], span, max(1, t))[-1]
            options = (case.r, case.top_k, case.rope_base, scale, case.importance, means, span)
            _, lists = scalar_row(q[b, leader - case.t0, heads].tolist(), *levels, leader, *options)
            out, _ = scalar_row(q[b, t - case.t0, heads].tolist(), *levels, t, *options, lists)
            wanted = torch.tensor(out, dtype=torch.float64)
            torch.testing.assert_close(got.out[b, t - case.t0, heads], wanted, rtol=1e-11, atol=1e-12)
            for level, own in enumerate(got.parents):
                listed = lists[level] if level < depth - 1 else []
                stored = own[b, (leader - case.t0) // case.selection_stride, s].tolist()
                assert stored == listed + [-1] * (case.top_k - len(listed)), (t, level)


@pytest.mark.parametrize("case", CAUSAL, ids=case_id)
def test_with_a_free_top_a_row_is_the_last_one_of_its_prefix(case):
    q, k, v = case.make_qkv("cpu")
    got = ref.htree_forward_naive(q, k, v, **case.reference_options())
    for t in rows_to_check(case):
        first = t - t % case.selection_stride
        part = q[:, first - case.t0 : t + 1 - case.t0], k[:, : t + 1], v[:, : t + 1]
        own = ref.htree_forward_naive(*part, **case.reference_options())
        torch.testing.assert_close(own.out[:, -1], got.out[:, t - case.t0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own.lse[:, -1], got.lse[:, t - case.t0], rtol=1e-12, atol=1e-12)
        row = (first - case.t0) // case.selection_stride
        for level, lists in enumerate(own.parents):
            assert torch.equal(lists[:, 0], got.parents[level][:, row])


@pytest.mark.parametrize("case", [c for c in FREE if c.T_q], ids=case_id)
def test_with_a_free_top_rows_of_one_depth_are_a_call_of_their_own(case):
    """Each depth ends with a token that follows from the options: what may stand behind it changes no row."""
    q, k, v = case.make_qkv("cpu")
    got = ref.htree_forward_naive(q, k, v, **case.reference_options())
    stride, begin, end = case.selection_stride, 0, -(-case.M // case.selection_stride) * case.selection_stride
    depth = 1
    while begin < case.T:
        first, last = max(begin, case.t0), min(end, case.T)
        if first < last:
            part = q[:, first - case.t0 : last - case.t0], k[:, :last], v[:, :last]
            own = ref.htree_forward_naive(*part, **case.reference_options())
            rows = slice(first - case.t0, last - case.t0)
            torch.testing.assert_close(own.out, got.out[:, rows], rtol=1e-12, atol=1e-12)
            leaders = slice(rows.start // stride, -(-rows.stop // stride))
            for level, lists in enumerate(got.parents):
                listed = lists[:, leaders] != -1
                assert bool(listed.any(-1).all()) if level < depth - 1 else not listed.any()
                assert level >= depth - 1 or torch.equal(own.parents[level], lists[:, leaders])
        begin, end, depth = end, case.M * case.r**depth, depth + 1


@pytest.mark.parametrize("case", [c for c in FREE if c.selection_span is None], ids=case_id)
def test_with_a_free_top_an_index_lists_what_a_flat_choice_lists(case):
    """The lists of the layers below a row's own top; those of the top and above are -1."""
    index = [
        normal((case.B, rows, case.H_kv, 16), torch.float64, "cpu", rows).round()
        for rows in (case.T_q, case.T)
    ]
    stride, rate = case.selection_stride, case.r
    lists = ref.index_parents(
        *index, case.H_kv, compression_rate=rate, max_top_nodes=case.M, top_k_per_layer=case.top_k,
        selection_stride=stride, open_next=case.open_next,
    )  # fmt: skip
    depths = [len(ref.layer_sizes(t + 1, rate, case.M)) for t in range(case.t0, case.T, stride)]
    assert len(lists) == len(case.sizes)
    for level, got in enumerate(lists):
        flat, _ = select_blocks(
            *index,
            case.top_k,
            block_size=rate ** (level + 1),
            selection_stride=stride,
            open_next=case.open_next,
        )
        below = torch.tensor([depth > level + 1 for depth in depths], dtype=torch.bool).view(1, -1, 1, 1)
        assert torch.equal(got, torch.where(below, flat, -1))


@pytest.mark.parametrize("case", FLOAT64_SHAPES + FREE, ids=case_id)
def test_cut_tiles_the_past_and_merging_is_one_softmax(case):
    q, k, v = case.make_qkv("cpu")
    got = ref.htree_forward_naive(q, k, v, **case.reference_options())
    times = torch.arange(case.t0, case.T)
    expected = (torch.arange(case.T) <= times[:, None]).long()
    coverage = ref.cut_coverage(got, case.r)
    assert torch.equal(coverage, expected[None, :, None].expand_as(coverage))
    torch.testing.assert_close(ref.softmax_over_cut(got), got.out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", FLOAT64_SHAPES + FREE, ids=case_id)
@pytest.mark.parametrize("regime", ["one layer", "everything selected"])
def test_exact_regimes_are_dense_attention(case, regime):
    q, k, v = case.make_qkv("cpu")
    width = max(case.T, case.M)
    options = {**case.reference_options(), "top_k_per_layer": width}
    if regime == "one layer":
        options["max_top_nodes"] = width
    got = ref.htree_forward_naive(q, k, v, **options)
    dense = ref.dense_causal_attention(q, k, v, case.scale, case.rope_base, case.inv_freq)
    torch.testing.assert_close(got.out, dense, rtol=1e-12, atol=1e-12)


def test_dense_oracle_is_torch_attention():
    q, k, v = next(c for c in FLOAT64_SHAPES if c.name == "batch").make_qkv("cpu")
    cos, sin = ref.rope_cache(50, 8, dtype=torch.float64)
    steps = torch.arange(50)
    expected = torch.nn.functional.scaled_dot_product_attention(
        ref.rope(q, cos, sin, steps).transpose(1, 2),
        ref.rope(k, cos, sin, steps).transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=True,
    ).transpose(1, 2)
    torch.testing.assert_close(ref.dense_causal_attention(q, k, v), expected, rtol=1e-12, atol=1e-12)


def changes_of_the_past(importance, seed, group):
    """Whether redrawing the keys and values after t = 20 changes a row up to 20."""
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(1, 64, group, 4, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, 64, 1, 4, generator=generator, dtype=torch.float64)
    options = {"compression_rate": 4, "max_top_nodes": 4, "top_k_per_layer": 2, "importance": importance}
    before = ref.htree_forward_naive(q, k, v, **options).out[:, :21]
    k[:, 21:], v[:, 21:] = 3 * torch.randn(2, 1, 43, 1, 4, generator=generator, dtype=torch.float64)
    after = ref.htree_forward_naive(q, k, v, **options).out[:, :21]
    return not torch.equal(before, after)


@pytest.mark.parametrize("importance", ["lse_causal", "exp_joint"])
def test_the_future_changes_nothing(importance):
    assert not any(changes_of_the_past(importance, seed, group=4) for seed in range(20))


def test_lse_is_causal_for_one_head_and_not_for_more():
    assert not any(changes_of_the_past("lse", seed, group=1) for seed in range(20))
    assert any(changes_of_the_past("lse", seed, group=4) for seed in range(20))


def test_options_coincide_for_one_head_per_group():
    case = next(c for c in FLOAT64_SHAPES if c.name == "multi_head")
    q, k, v = case.make_separated("cpu")
    base = ref.htree_forward_naive(q, k, v, **case.reference_options())
    for change in (
        {"importance": "lse"},
        {"importance": "exp_joint"},
        {"scope": "q_head"},
        {"accumulate": "subtract"},
    ):
        other = ref.htree_forward_naive(q, k, v, **{**case.reference_options(), **change})
        torch.testing.assert_close(other.out, base.out, rtol=1e-11, atol=1e-12)
        for ours, theirs in zip(other.parents, base.parents, strict=True):
            assert torch.equal(ours, theirs)


def test_scopes_differ_for_groups():
    case = next(c for c in FLOAT64_SHAPES if c.name == "group_of_8")
    q, k, v = case.make_qkv("cpu")
    shared = ref.htree_forward_naive(q, k, v, **case.reference_options())
    own = ref.htree_forward_naive(q, k, v, **case.reference_options(), scope="q_head")
    assert own.parents[0].shape[2] == case.H
    assert shared.parents[0].shape[2] == case.H_kv
    assert (own.out - shared.out).abs().max() > 1e-3
