"""Half of the selected stand behind the others: open_next (docs/semantics/tree_attention.md §1.6).

Drawn problems with and without it: test_tree_attention_properties.py, test_tree_attention_fast_properties.py.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_attention_fast import assert_fast_call, model
from tree_attention_helpers import forward
from tree_attention_strategies import seeds

import htree_ops
import htree_ops.reference.tree_attention as ref
from tests.support.cases import case_id
from tests.support.devices import poisoned_memory
from tests.support.tree_attention_calls import calls_with
from tests.support.tree_attention_cases import NEXT_SHAPES
from tests.support.tree_attention_checks import assert_epsilon_optimal

ops = torch.ops.htree


def case_named(name):
    return next(shape for shape in NEXT_SHAPES if shape.name == f"{name}_next")


# ---- the rule


def by_words(importance, n, top_k, open_next):
    """The selected of one row in their order, by the words of the page."""

    def key(p):
        broken = math.isnan(importance[p])
        return p != n - 1, not broken, 0.0 if broken else -importance[p], p

    by_key = sorted(range(n), key=key)
    if n <= top_k or top_k <= 2 or not open_next:
        return by_key[:top_k]
    best = by_key[: -(-top_k // 2)]
    behind = [p for p in range(n) if p - 1 in best and p not in best]
    rest = [p for p in by_key if p not in best and p not in behind]
    return [n - 1, *sorted(best[1:]), *behind, *rest][:top_k]


def scores_of(importance):
    """Scores [1, 1, 1, C, 1] whose importances order as the given ones do: NaN for NaN."""
    return importance.log().view(1, 1, 1, -1, 1)


@given(
    data=st.data(),
    seed=seeds,
    candidates=st.one_of(st.integers(1, 40), st.sampled_from((255, 256, 257, 700))),
    top_k=st.integers(1, 24),
    ties=st.booleans(),
    broken=st.booleans(),
)
def test_the_set_and_its_order_by_words(data, seed, candidates, top_k, ties, broken, device):
    generator = torch.Generator().manual_seed(seed)
    importance = torch.rand(candidates, generator=generator)
    if ties:
        importance = (importance * 4).ceil() / 4
    if broken:
        importance[data.draw(st.integers(0, candidates - 1))] = math.nan
        importance[data.draw(st.integers(0, candidates - 1))] = 0.0  # a score of -inf
    n = data.draw(st.integers(max(1, candidates - 3), candidates))
    scores = scores_of(importance).to(device)
    num = torch.full((1, 1, 1), n, dtype=torch.int32, device=device)
    for importance_name in ("lse_causal", "exp_joint"):
        value = ref.importance_of(scores.cpu(), num.cpu(), importance_name).flatten().tolist()
        for open_next in (False, True):
            wanted = by_words(value, n, top_k, open_next)
            arguments = (num, top_k, importance_name, open_next)
            theirs = ref.select_topk(scores.cpu(), num.cpu(), *arguments[1:]).flatten().tolist()
            assert theirs == wanted + [-1] * (top_k - len(wanted))
            with poisoned_memory():
                ours = ops.select_topk(scores, *arguments).flatten().tolist()
            if ties or device == "cpu":
                assert ours == theirs
            else:  # importances of neighbours may round to one number
                assert sorted(ours) == sorted(theirs)


def test_more_candidates_than_a_block_has_threads(device):
    """The best at the ends of words of 32 and of tiles of 256, and the list of the layer below."""
    for spot in (31, 255, 256, 511, 1022):
        importance = torch.full((1025,), 0.01)
        importance[spot] = 0.9
        scores = scores_of(importance).to(device)
        num = torch.full((1, 1, 1), 1025, dtype=torch.int32, device=device)
        got = ops.select_topk(scores, num, 4, "lse_causal", True).flatten().tolist()
        assert got == [1024, spot, *([spot + 1, 0] if spot + 1 < 1024 else [0, 1])]


@pytest.mark.parametrize("top_k", [1, 2])
def test_two_and_fewer_change_nothing(top_k, device):
    case = dataclasses.replace(case_named("pairs"), top_k=top_k, M=4)
    inputs = case.make_qkv(device)
    plain = forward(*inputs, dataclasses.replace(case, open_next=False))
    ours = forward(*inputs, case)
    assert all(torch.equal(x, y) for x, y in zip((*ours[:3], *ours[3]), (*plain[:3], *plain[3]), strict=True))


def test_a_reader_finds_the_next_node(device):
    """Sixteen queries share what the first one looked for. The tokens that they come to stand behind it."""
    r, T, K = 16, 1024, 32
    q, k, v = (torch.zeros(1, T, 1, K, device=device) for _ in range(3))
    k[0, 320:336, 0, 0] = 6.0  # what the leader of the last sixteen looks for: node 20
    k[0, 100:148:16, 0, 0] = 1.0  # nodes 6, 7 and 8 look a little like it
    q[0, 1008:, 0, 0] = 6.0
    v[0, 336:352] = 1.0  # node 21, which the others come to
    k[0, 336:352, 0, 1] = 6.0
    q[0, 1009:, 0, 1] = 60.0
    options = {
        "compression_rate": r,
        "max_top_nodes": 64,
        "top_k": 4,
        "selection_stride": 16,
        "rope_base": None,
    }
    plain = htree_ops.tree_attention(q, k, v, **options)[0, 1009:]
    ours = htree_ops.tree_attention(q, k, v, **options, open_next=True)
    lists = ops.attention_forward(q, k, v, r, 64, 4, None, None, "lse_causal", 16, open_next=True)[3]
    assert lists[0][0, -1, 0].tolist() == [6, 20, 21, 63]
    assert ours[0, 1009:].min() > 0.99
    assert plain.max() < ours[0, 1009:].min() + 1e-3


# ---- values, lists, gradients


def test_the_judge_of_lists_sees_a_neighbour_that_is_lacking():
    """And an entry that is neither of the best, nor behind them, nor next: the tests above rest on it."""
    case = dataclasses.replace(case_named("three_layers"), T=48, dtype=torch.float32)
    q, k, v, options = case.make_call("cpu")
    plain = forward(q, k, v, dataclasses.replace(case, open_next=False))[3]
    with pytest.raises(AssertionError):
        assert_epsilon_optimal(q, k, v, plain, options)
    with pytest.raises(AssertionError):
        assert_epsilon_optimal(q, k, v, forward(q, k, v, case)[3], {**options, "open_next": False})


# ---- the ways to it


def test_modules_options_and_states(device):
    options = {"compression_rate": 4, "max_top_nodes": 12, "top_k": 4, "selection_stride": 4}
    layer = htree_ops.HTreeAttention.from_documents(32, 4, 2, **options, open_next=True, device=device)
    assert layer.options.open_next is True
    x = torch.randn(2, 96, 32, device=device)
    q, k, v = layer._project(x)
    expected = layer.o_proj(htree_ops.tree_attention(q, k, v, **options, open_next=True).flatten(2))
    out = layer(x)
    assert torch.equal(out, expected)
    layer.options = dataclasses.replace(layer.options, open_next=False)
    assert not torch.equal(layer(x), out)
    layer.options = dataclasses.replace(layer.options, open_next=True)
    cache = layer.make_cache(2, 96)
    assert "open_next=True" in repr(cache)
    steps = [layer(part, cache=cache) for part in x.split([64, 20, 1, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), out, rtol=1e-4, atol=1e-5)
    other = htree_ops.TreeKVCache(2, 2, 8, 96, **options, dtype=torch.float32, device=device)
    with pytest.raises(
        ValueError, match=r"load_state_dict: options must be .*open_next=False.*, got .*open_next=True"
    ):
        other.load_state_dict(cache.state_dict())
    with pytest.raises(ValueError, match=r"cache must have the options of the layer \(open_next = True\)"):
        layer(x[:, :1], cache=other)
    with pytest.raises(TypeError, match="open_next"):
        htree_ops.tree_attention(q, k, v, open_next="yes")
    with pytest.raises(TypeError, match="open_next"):
        htree_ops.HTreeAttention(32, 4, open_next=2)


@pytest.mark.parametrize("name", ["three_layers", "stride4_suffix", "stride16_c2", "misaligned"])
def test_opcheck(name, device):
    found = calls_with(case_named(name), device, "open_next")
    assert len(found) >= 10
    for call in found:
        call.opcheck()


# ---- the kernels of the tensor cores

FAST = [
    model(f"d{width}_g{group}_s{stride}_c{span}_k{top_k}", dtype, K=width, V=width, H=group * heads, H_kv=heads,
          T=length, top_k=top_k, M=nodes, selection_stride=stride, selection_span=span, open_next=True)
    for width, group, heads, stride, span, length, top_k, nodes, dtype in [
        (64, 1, 2, 1, None, 1500, 8, 128, torch.bfloat16),
        (64, 4, 2, 1, 2, 1500, 7, 112, torch.bfloat16),
        (128, 8, 1, 16, 2, 2000, 8, 128, torch.float16),
        (32, 3, 2, 2, 8, 1500, 8, 128, torch.float16),
        (128, 8, 1, 4, None, 9000, 4, 64, torch.bfloat16),
        (64, 8, 1, 1, None, 9000, 3, 16, torch.float16),
        (64, 2, 1, 16, 4, 5000, 33, 528, torch.bfloat16),
        (32, 4, 1, 4, 4, 20000, 64, 1024, torch.bfloat16),
        (64, 8, 1, 4, 4, 1500, 8, 128, torch.float32),
    ]
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", FAST, ids=case_id)
def test_shapes_of_the_tensor_cores(case):
    qkv, (*_, parents), _, _ = assert_fast_call(case)
    assert not torch.equal(parents[0], forward(*qkv, dataclasses.replace(case, open_next=False))[3][0])


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [5, 64, 512, 1024])
def test_exact_selection_of_the_tensor_cores_from_equal_scores(top_k):
    """With all importances equal the best are the first ones, and what stands behind them is among them."""
    T, nodes = 40_000, 2500
    q, k, v = (torch.zeros(1, T, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (2, 1, 1))
    M = min(16 * top_k, nodes)
    lists = ops.attention_forward(q, k, v, 16, M, top_k, None, None, "lse_causal", 16, open_next=True)[3]
    if len(lists) == 2:
        last = lists[0][0, -1, 0].tolist()
        assert last == [*range(top_k - 1), nodes - 1]
    plain = ops.attention_forward(q, k, v, 16, M, top_k, None, None, "lse_causal", 16)[3]
    assert all(torch.equal(x, y) for x, y in zip(lists, plain, strict=True))
