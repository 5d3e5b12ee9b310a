"""Properties of docs/semantics §1.11 on shapes of the tensor-core path, which the small drawn problems never take.

r = 16, half types, K = V in {32, 64, 128}, up to 16 query heads per kv head and every stride: plan/ sends them to the
dense top and to the shared-gather, per-list and per-query kernels.
"""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_attention_fast import TENSOR_CORE_DELTA, TENSOR_CORE_TOLERANCE, assert_fast_output
from tree_attention_helpers import wild_lists
from tree_attention_strategies import seeds, spans_of, switches

import htree_ops  # noqa: F401  registers torch.ops.htree
import htree_ops.reference.tree_attention as ref
from tests.support.compare import assert_close_spec
from tests.support.devices import poisoned_memory
from tests.support.tree_attention_cases import TreeAttentionCase, frequencies
from tests.support.tree_attention_checks import assert_epsilon_optimal, assert_lists, forced

ops = torch.ops.htree
pytestmark = pytest.mark.gpu
LAYOUTS = ("contiguous", "fused_projection", "head_major", "in_larger", "misaligned")


@st.composite
def problems(draw, layers=None):
    """Problems with lengths around M and 16 M, where a layer is added; some queries begin inside a node."""
    top_k = draw(st.integers(1, 6))
    top_nodes = draw(st.integers(1, min(16 * top_k, 40)))
    edges = [top_nodes, top_nodes + 1, 16 * top_nodes, 16 * top_nodes + 1]
    shortest = 1 if layers is None else top_nodes * 16 ** (layers - 2) + 1
    lengths = [n for n in edges if shortest <= n <= 700]
    length = draw(st.one_of(st.integers(shortest, max(shortest, 300)), *map(st.just, lengths)))
    stride = draw(st.sampled_from((1, 2, 4, 8, 16)))
    num_queries = None
    if draw(st.booleans()):
        num_queries = length - draw(st.integers(0, (length - 1) // stride)) * stride
    heads_kv = draw(st.integers(1, 2))
    width = draw(st.sampled_from((32, 64, 128)))
    return TreeAttentionCase(
        name="drawn", dtype=draw(st.sampled_from((torch.bfloat16, torch.float16))), B=draw(st.integers(1, 2)),
        T=length, num_queries=num_queries, H=heads_kv * draw(st.sampled_from((1, 2, 3, 4, 8, 16))),
        H_kv=heads_kv, K=width, V=width, r=16, top_k=top_k, M=top_nodes, selection_stride=stride,
        importance=draw(st.sampled_from(("lse_causal", "exp_joint"))), selection_span=draw(spans_of(16)),
        **draw(switches),
        inv_freq=draw(st.sampled_from((None, frequencies(width)))),
        spread=draw(st.sampled_from((1.0, 0.2))), layout=draw(st.sampled_from(LAYOUTS)),
    )  # fmt: skip


def forward(q, k, v, case):
    with poisoned_memory():
        return ops.attention_forward(q, k, v, **case.reference_options())


@given(case=problems(), seed=seeds)
def test_h1_h2_h5_lists_cut_and_softmax(case, seed):
    q, k, v = case.make_qkv("cuda", seed)
    out, gmax, gsum, parents = forward(q, k, v, case)
    options = case.reference_options()
    assert_lists(parents, case.T_q, case.T, options)
    found = forced(q, k, v, parents, options)
    tokens = torch.arange(case.T, device=out.device)
    wanted = (tokens <= tokens[case.t0 :, None]).long()[None, :, None]
    coverage = ref.cut_coverage(found, case.r)
    assert torch.equal(coverage, wanted.expand_as(coverage))
    assert_fast_output(out, ref.softmax_over_cut(found), v)
    a = TENSOR_CORE_TOLERANCE[case.dtype]
    assert_close_spec(gmax.double() + gsum.double().log(), found.lse, rtol=a, atol=a, name="lse")
    assert_epsilon_optimal(q, k, v, parents, options, TENSOR_CORE_DELTA[case.dtype])


@given(case=problems(), seed=seeds)
def test_a_query_has_the_same_bits_again_and_in_a_shorter_call(case, seed):
    q, k, v = case.make_qkv("cuda", seed)
    *states, parents = forward(q, k, v, case)
    *again, lists = forward(q, k, v, case)
    assert all(torch.equal(x, y) for x, y in zip((*states, *parents), (*again, *lists), strict=True))
    few = min(case.T_q, 16)
    if (case.T - few) % case.selection_stride == 0:
        assert torch.equal(states[0][:, -few:], ops.attention(q[:, -few:], k, v, **case.reference_options()))


@given(case=problems(layers=2), seed=seeds)
def test_h3_exact_regimes_are_dense_attention(case, seed):
    case = dataclasses.replace(case, top_k=-(-case.T // 16))  # every node of every upper layer is opened
    q, k, v = case.make_qkv("cuda", seed)
    out = forward(q, k, v, case)[0]
    dense = ref.dense_causal_attention(
        q, k, v, case.scale, case.rope_base, case.inv_freq, compute_dtype=torch.float64
    )
    assert_fast_output(out, dense, v)


@given(
    case=problems(),
    seed=seeds,
    poison=st.sampled_from((float("nan"), float("inf"), -3e4, 0.0)),
    part=st.floats(0, 1),
)
def test_h4_the_future_changes_no_bit(case, seed, poison, part):
    q, k, v = case.make_qkv("cuda", seed)
    before = forward(q, k, v, case)
    row = int(part * (case.T_q - 1))
    q, k, v = (x.clone() for x in (q, k, v))
    q[:, row + 1 :] = poison
    k[:, case.t0 + row + 1 :] = poison
    v[:, case.t0 + row + 1 :] = poison
    after = forward(q, k, v, case)
    for ours, theirs in zip(before[:3], after[:3], strict=True):
        assert torch.equal(ours[:, : row + 1], theirs[:, : row + 1])
    rows = -(-(row + 1) // case.selection_stride)
    for ours, theirs in zip(before[3], after[3], strict=True):
        assert torch.equal(ours[:, :rows], theirs[:, :rows])


@given(case=problems(), seed=seeds)
def test_h7_h8_the_output_is_a_weighted_mean_of_values(case, seed):
    q, k, v = case.make_qkv("cuda", seed)
    out = forward(q, k, v, case)[0].double()
    a = TENSOR_CORE_TOLERANCE[case.dtype]
    slack = a * v.double().abs().max() + a * out.abs()
    group = case.H // case.H_kv
    for sign in (1, -1):
        bound = (sign * v.double()).cummax(1).values[:, case.t0 :].repeat_interleave(group, dim=2)
        assert (sign * out <= bound + slack).all()
    constant = torch.randn(case.V, generator=torch.Generator().manual_seed(seed)).to(case.dtype).to(v.device)
    flat = constant.expand_as(v).contiguous()
    out = forward(q, k, flat, case)[0]
    assert_fast_output(out, constant.double().expand(out.shape), flat)


@given(case=problems(layers=2), seed=seeds)
def test_h11_expanded_heads_select_per_query_head(case, seed):
    q, k, v, options = case.make_call("cuda", seed)
    group = case.H // case.H_kv
    wide = [x.repeat_interleave(group, dim=2).contiguous() for x in (k, v)]
    out, _, _, lists = forward(q, *wide, case)
    own = ref.htree_forward_naive(
        q, k, v, **options, scope="q_head", parents=lists, compute_dtype=torch.float64
    )
    assert_fast_output(out, own.out, v)
    assert_epsilon_optimal(q, *wide, lists, options, TENSOR_CORE_DELTA[case.dtype])
    if group == 1:
        assert torch.equal(out, forward(q, k, v, case)[0])


@given(
    seed=seeds,
    stride=st.sampled_from((1, 4, 16)),
    group=st.sampled_from((2, 4, 8, 16)),
    extreme=st.booleans(),
    rope_base=st.sampled_from((10000.0, None)),
)
def test_backward_under_lists_that_break_the_rules_stays_in_bounds(seed, stride, group, extreme, rope_base):
    """attention_backward keeps to §1.3 for any lists; memcheck watches two of these calls."""
    case = TreeAttentionCase(
        name="wild", dtype=torch.bfloat16, T=300, H=group, H_kv=1, K=64, V=64, r=16, top_k=4, M=32,
        selection_stride=stride, rope_base=rope_base,
    )  # fmt: skip
    q, k, v = case.make_qkv("cuda", seed)
    out, gmax, gsum, parents = forward(q, k, v, case)
    generator = torch.Generator().manual_seed(seed)
    wild = [
        wild_lists(generator, tuple(x.shape), size, extreme).to(x.device)
        for x, size in zip(parents, case.sizes, strict=True)
    ]
    inputs = [x.clone() for x in (q, k, v, out, gmax, gsum, *wild)]
    got = ops.attention_backward(
        torch.randn_like(out), q, k, v, out, gmax, gsum, wild, **case.reference_options()
    )
    assert [x.shape for x in got] == [q.shape, k.shape, v.shape]
    for before, after in zip(inputs, (q, k, v, out, gmax, gsum, *wild), strict=True):
        assert torch.equal(before, after), "an input was written"
    assert torch.equal(ops.attention(q, k, v, **case.reference_options()), out)
