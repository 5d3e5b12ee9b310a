"""Rules for the nodes that are opened, written out: they equal tree attention where it has them; learned scores."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from quality_study import loaded_study, session_of, small_text

from htree_ops import tree_attention

study = pytest.fixture(scope="module")(loaded_study)
text = pytest.fixture(scope="module")(small_text)


def attention_and_inputs(study, span, stride, tokens=512, top_k=3, max_top_nodes=32):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, tokens, heads, 16) for heads in (4, 2, 2))
    return study.settings.tree(top_k, max_top_nodes, span, stride), (q, k, v)


@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("span", [None, 4, 2, 1])
@pytest.mark.parametrize(("tokens", "max_top_nodes"), [(512, 32), (1024, 48), (1024, 4)])
def test_a_choice_written_out_is_tree_attention(study, span, stride, tokens, max_top_nodes):
    """Two and three layers, full lists and lists that are not full yet."""
    attention, inputs = attention_and_inputs(study, span, stride, tokens, 3, max_top_nodes)
    expected = study.model.attend(*inputs, attention)
    choice = study.choices.Choice("", span, stride)
    assert torch.allclose(study.choices.attend_chosen(*inputs, attention, choice), expected, atol=1e-5)


@pytest.mark.parametrize(("stride", "max_top_nodes"), [(1, 32), (16, 32), (1, 4)])
def test_neighbours_are_those_of_the_op(study, stride, max_top_nodes):
    """Two and three layers: what stands behind a candidate in the list, also over a gap."""
    attention, (q, k, v) = attention_and_inputs(study, 2, stride, 1024, 5, max_top_nodes)
    options = {"top_k": 5, "max_top_nodes": max_top_nodes, "selection_stride": stride, "selection_span": 2}
    expected = tree_attention(q, k, v, rope_base=None, **options, open_next=True)
    choice = study.choices.Choice("", 2, stride, open_next=True)
    assert torch.allclose(study.choices.attend_chosen(q, k, v, attention, choice), expected, atol=1e-5)


def test_choices_that_are_other_ones_in_disguise(study):
    """All of the text near, an indexer that was not trained, all nodes of the upper layer opened."""
    attention, inputs = attention_and_inputs(study, 2, 1)
    choice, attend = study.choices.Choice, study.choices.attend_chosen
    expected = attend(*inputs, attention, choice("", 2))
    assert torch.equal(attend(*inputs, attention, choice("", 4, near=512, near_span=2)), expected)
    assert not torch.equal(attend(*inputs, attention, choice("", 4, near=128, near_span=2)), expected)
    assert not torch.equal(attend(*inputs, attention, choice("", 2, open_next=True)), expected)
    size = replace(study.settings.TINY.conversion, width=64, heads=4, kv_heads=2)
    for hidden in (0, 8):
        indexers = study.choices.make_indexers(size, 16, 2, hidden)
        with torch.no_grad():
            same = attend(*inputs, attention, choice("", indexers=indexers), layer=1)
        assert torch.allclose(same, expected, atol=1e-5)
    three = study.settings.tree(3, 2, 2)
    assert three.layers(512) == 3
    opened = attend(*inputs, three, choice("", 2, upper=2))
    assert torch.allclose(opened, attend(*inputs, study.settings.tree(3, 32, 2), choice("", 2)), atol=1e-5)
    assert not torch.allclose(opened, attend(*inputs, three, choice("", 2, upper=1)), atol=1e-5)
    longer = study.settings.tree(3, 48, 2)
    with pytest.raises(ValueError, match="whole nodes of 16 tokens, got 520"):
        attend(*(torch.cat((x, x[:, :8]), 1) for x in inputs), longer, choice("", 2))


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_half_of_the_nodes_and_their_neighbours(study, count):
    """Against the rule in words, row by row."""
    torch.manual_seed(count)
    rightmost = torch.arange(16)
    nodes = torch.arange(16)
    candidates = (nodes <= rightmost[:, None]) & (
        (torch.rand(2, 16, 16) < 0.8) | (nodes == rightmost[:, None])
    )
    importance = torch.randint(0, 5, (2, 16, 16)) / 4.0
    found = study.choices.opened(importance, candidates, rightmost, count, open_next=True)
    for row in range(2):
        for query in range(16):
            inside = candidates[row, query].nonzero().flatten().tolist()
            inside.sort(key=lambda node: (node != query, -float(importance[row, query, node]), node))
            first = inside[: -(-count // 2)]
            in_order = sorted(inside)
            following = [b for a, b in itertools.pairwise(in_order) if a in first and b not in first]
            rest = [node for node in inside if node not in first + following]
            wanted = (first + sorted(following) + rest)[:count]
            assert sorted(wanted) == found[row, query].nonzero().flatten().tolist()


def test_products_of_a_choice(study):
    choice = study.choices.Choice
    assert choice("").products(4096, 64) == 1 / 16
    assert choice("", 2, stride=4).products(4096, 64) == 1 / 8
    assert choice("", 2, near=1024, near_span=1).products(4096, 64) == 0.75 / 2 + 0.25
    narrow = study.choices.make_indexers(study.settings.FULL.conversion, 16, 1)
    assert choice("", indexers=narrow).products(4096, 64) == 1 / 4


def test_indexers_learn_the_masses_and_leave_the_model(study, text, tmp_path):
    session = session_of(study, tmp_path, text)
    size = session.scale.conversion
    model = session.make_model(size)
    weights = [parameter.clone() for parameter in model.parameters()]
    apart = []
    for steps in (1, 60):
        indexers = study.choices.make_indexers(size, 4, 1)
        tokens = torch.randint(0, 256, (2, size.context), generator=torch.Generator().manual_seed(1))
        found = study.choices.fit_indexers(session, model, indexers, lambda step, t=tokens: t, steps, 32)
        apart.append(found)
    assert 0 < apart[1] < 0.5 * apart[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
