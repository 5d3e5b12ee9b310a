"""TreeOptions, the one list of the options in Python, agrees with the schema in C++."""

import copy
import inspect
import json
import re
import warnings
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from htree_ops import HTreeAttention, TreeKVCache, TreeOptions, tree_attention, tree_attention_varlen
from htree_ops.ops.tree_attention import attention_backward, attention_forward
from htree_ops.ops.tree_attention.options import (
    MOST_TOP_NODES,
    OP_KWARGS,
    RECOMMENDED,
    Importance,
    Scope,
    TreeKeywords,
    tree_options,
)

OTHERS = {
    "compression_rate": 8,
    "max_top_nodes": 24,
    "top_k": 3,
    "selection_stride": 4,
    "scale": 0.5,
    "rope_base": 10000.0,
    "importance": "exp_joint",
    "scope": "q_head",
    "store_parents": False,
    "selection_span": 2,
    "inv_freq": (1.0, 0.5, -0.25, 0.0),
    "open_next": True,
}


def test_the_options_are_those_of_the_schema():
    declared = {
        arg.name: arg.default_value for arg in torch.ops.htree.attention.default._schema.arguments[3:]
    }
    declared["top_k"] = declared.pop("top_k_per_layer")
    ours = {field.name: field.default for field in fields(TreeOptions)}
    assert ours.pop("scope") == "kv_head"  # an option of Python alone
    assert ours.pop("max_top_nodes") is None  # what the op declares, where top_k allows it
    assert declared.pop("max_top_nodes") == MOST_TOP_NODES
    assert ours == declared
    assert set(OTHERS) == {field.name for field in fields(TreeOptions)} == set(TreeKeywords.__annotations__)
    assert {name for name, _, _ in OP_KWARGS} == set(OTHERS) - {"scope", "store_parents"}


@pytest.mark.parametrize(
    "function", [tree_attention, tree_attention_varlen, HTreeAttention.__init__, TreeKVCache.__init__]
)
def test_every_keyword_is_explained(function):
    assert inspect.get_annotations(function)["keywords"] == "Unpack[TreeKeywords]"
    for name in TreeKeywords.__annotations__:
        assert re.search(rf"^        {name}: ", tree_attention.__doc__ or "", re.M)


# ---- the packed form


def drawn_options() -> st.SearchStrategy[TreeOptions]:
    """Any options, each of them as often as not with its default."""
    rates = st.sampled_from((2, 4, 6, 16))
    some: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.integers(1, 9),
        "scale": st.floats(-4, 4),
        "importance": st.sampled_from(get_args(Importance)[::2]),
        "selection_stride": st.sampled_from((1, 2)),
        "selection_span": st.sampled_from((1, 2)),
        "open_next": st.booleans(),
        "scope": st.sampled_from(get_args(Scope)),
        "store_parents": st.booleans(),
    }
    frequencies = st.lists(st.floats(-4, 4), min_size=1, max_size=5).map(tuple)
    rotation = st.one_of(
        st.fixed_dictionaries({}, optional={"rope_base": st.one_of(st.none(), st.floats(1, 1e6))}),
        st.fixed_dictionaries({"inv_freq": frequencies}),
    )
    both = st.tuples(rates, st.fixed_dictionaries({}, optional=some), rotation)
    return both.map(lambda x: TreeOptions(compression_rate=x[0], **x[1], **x[2]))


class Packed(TorchDispatchMode):
    """The options that the packed op gets."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.htree._attention.default:
            self.options = args[-2:]
        return func(*args, **(kwargs or {}))


@given(options=drawn_options())
def test_python_packs_as_the_library_does(options):
    names = {"top_k": "top_k_per_layer"}
    by_name = {
        names.get(name, name): getattr(options, name) for name, _, _ in OP_KWARGS if name != "max_top_nodes"
    }
    q = torch.empty(1, 2, 1, 2 * len(options.inv_freq or (0,)), device="meta")
    with Packed() as found:
        torch.ops.htree.attention(q, q, q, **by_name, max_top_nodes=options.top_nodes)
    assert tuple(map(list, found.options)) == options.packed()
    left_out = {"max_top_nodes": options.top_nodes, "scope": "kv_head", "store_parents": True}
    assert TreeOptions.from_packed(*options.packed()) == replace(options, **left_out)


def with_number(ints: list[int], number: int, **option: object) -> list[int]:
    """The packed integers with ``number`` in the place of an option, found by another value of it."""
    other = TreeOptions(**({"inv_freq": (1.0, 0.5)} | option)).packed()[0]
    place = next(i for i, (a, b) in enumerate(zip(ints, other, strict=True)) if a != b)
    return [*ints[:place], number, *ints[place + 1 :]]


@pytest.mark.parametrize(
    "change",
    [
        lambda ints, floats: (ints[:-1], floats),
        lambda ints, floats: ([*ints, 0], floats),
        lambda ints, floats: (ints, floats[:-1]),
        lambda ints, floats: (ints, [*floats, 0.0]),
        lambda ints, floats: (with_number(ints, 2, open_next=True), floats),
        lambda ints, floats: (with_number(ints, 3, importance="lse"), floats),
        lambda ints, floats: (with_number(ints, -1, inv_freq=(1.0,)), floats),
        lambda ints, floats: ([], []),
    ],
)
def test_numbers_that_are_no_packed_options_are_refused(change):
    packed = TreeOptions(inv_freq=(1.0, 0.5)).packed()
    x = torch.zeros(1, 4, 2, 4)
    assert torch.ops.htree._attention(x, x, x, True, *packed).shape == x.shape
    with pytest.raises(ValueError, match=r"must be what TreeOptions.packed\(\) gives, got \["):
        torch.ops.htree._attention(x, x, x, True, *change(*packed))


def test_options_beside_keywords():
    q, k, v = torch.randn(3, 1, 50, 2, 8)
    options = TreeOptions(top_k=2, max_top_nodes=8, compression_rate=4)
    wanted = tree_attention(q, k, v, top_k=3, max_top_nodes=8, compression_rate=4)
    assert torch.equal(tree_attention(q, k, v, options=options, top_k=3), wanted)
    assert tree_options("f", None, {}) == TreeOptions()
    assert tree_options("f", options, {}) is options
    with pytest.raises(TypeError, match=r"^tree_attention: options must be TreeOptions or None, got dict$"):
        tree_attention(q, k, v, options=options.to_dict())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrong_keyword_is_named_with_those_that_there_are(compiled):
    torch._dynamo.reset()
    x = torch.zeros(1, 4, 2, 4)
    function = torch.compile(tree_attention, backend="eager", fullgraph=True) if compiled else tree_attention
    with pytest.raises(Exception, match=r"tree_attention: keywords must be .* among .*top_k.*, got 'topk'"):
        function(x, x, x, topk=3)
    for make in (lambda **o: HTreeAttention(8, 2, **o), lambda **o: TreeKVCache(1, 2, 8, 40, **o)):
        with pytest.raises(
            TypeError, match=r"(HTreeAttention|TreeKVCache): keywords must be .* among .* 'topk'"
        ):
            make(topk=3)


def test_numbers_that_change_are_not_remembered():
    q, k, v = torch.randn(3, 1, 30, 2, 4)
    numbers = torch.tensor([1.0, 0.5])
    before = tree_attention(q, k, v, inv_freq=numbers)
    numbers[0] = 0.25
    assert torch.equal(
        tree_attention(q, k, v, inv_freq=numbers), tree_attention(q, k, v, inv_freq=(0.25, 0.5))
    )
    assert not torch.equal(tree_attention(q, k, v, inv_freq=numbers), before)


def test_they_are_saved_and_loaded():
    options = TreeOptions(**OTHERS)
    assert TreeOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert TreeOptions.from_dict({"top_k": 600}) == replace(TreeOptions(), top_k=600)
    with pytest.raises(ValueError, match=r"among compression_rate, .*, got 'topk'"):
        TreeOptions.from_dict({"topk": 600})
    for saved in (None, []):
        with pytest.raises(
            TypeError, match=f"TreeOptions: saved must be a dict of options, got {type(saved).__name__}"
        ):
            TreeOptions.from_dict(saved)
    with pytest.raises(FrozenInstanceError):
        options.top_k = 5


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_k": 1.5}, TypeError, "top_k"),
        ({"selection_stride": 3}, ValueError, "selection_stride"),
        ({"max_top_nodes": 0}, ValueError, r"max_top_nodes must be at least 1 and below 2\^31, got 0"),
        ({"importance": "mean"}, ValueError, "importance"),
        (
            {"selection_span": 3},
            ValueError,
            "selection_span must be None or a divisor of compression_rate = 16",
        ),
        ({"selection_span": 2.0}, TypeError, "selection_span"),
        ({"selection_span": 4, "importance": "lse"}, ValueError, "selection_span .*'lse'"),
        ({"inv_freq": (1.0, float("nan"))}, ValueError, "inv_freq"),
        ({"inv_freq": 1.0}, TypeError, "inv_freq"),
        ({"inv_freq": (10**400, 1)}, ValueError, "inv_freq must be finite"),
        ({"inv_freq": []}, ValueError, r"inv_freq must have K/2 numbers, got 0$"),
        ({"inv_freq": torch.empty(0)}, ValueError, r"inv_freq must have K/2 numbers, got 0$"),
        ({"inv_freq": torch.ones(4).to_sparse()}, TypeError, "inv_freq must be a strided tensor"),
        ({"inv_freq": torch.nested.nested_tensor([torch.ones(2)])}, TypeError, "inv_freq .* that is nested"),
        ({"inv_freq": (1.0,), "rope_base": None}, ValueError, "rope_base"),
        ({"scope": "head"}, ValueError, "scope"),
        ({"scale": float("nan")}, ValueError, "scale"),
    ],
    ids=str,
)
def test_wrong_ones_are_named(wrong, error, message):
    with pytest.raises(error, match=message):
        TreeOptions(**wrong)


def test_a_layer_keeps_them():
    torch.manual_seed(1)
    layer = HTreeAttention.from_documents(32, 4, 2, **OTHERS)
    assert layer.options == TreeOptions(**OTHERS)
    layer.options = replace(layer.options, top_k=4, selection_stride=2)
    for wrong, came in (((1.0, 0.5), "2"), ((), "0")):
        with pytest.raises(ValueError, match=rf"^HTreeAttention: inv_freq must have .*, got {came}$"):
            HTreeAttention(32, 4, 2, inv_freq=wrong)
    x = torch.randn(2, 50, 32)
    q = layer.q_proj(x).unflatten(-1, (4, 8))
    k, v = (projection(x).unflatten(-1, (2, 8)) for projection in (layer.k_proj, layer.v_proj))
    expected = layer.o_proj(tree_attention(q, k, v, options=layer.options).flatten(2))
    assert torch.equal(layer(x), expected)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert "top_k=4, selection_stride=2, scale=0.5" in repr(layer)
    assert "options" not in layer.state_dict()


def test_a_recommended_layer_is_one_with_the_options_of_its_goal():
    quality, speed = (HTreeAttention.recommended(128, 4, 2, goal=goal) for goal in RECOMMENDED)
    assert quality.options == TreeOptions(top_k=128, max_top_nodes=8192)
    assert speed.options == TreeOptions(top_k=128, max_top_nodes=8192, selection_stride=4)
    assert quality.index_dim == speed.index_dim == 32
    assert HTreeAttention.recommended(128, 4).options == quality.options == HTreeAttention(128, 4).options
    without = HTreeAttention.recommended(128, 4, goal="speed", index_dim=0)
    assert (without.index_dim, without.options) == (0, TreeOptions(selection_span=2, selection_stride=4))
    chosen = HTreeAttention.recommended(
        32, 4, 2, 6, True, goal="speed", top_k=3, selection_stride=2, dtype=torch.float64
    )
    assert chosen.options == TreeOptions(selection_span=2, selection_stride=2, top_k=3)
    assert chosen.k_proj.weight.shape == (12, 32)
    assert chosen.o_proj.bias.dtype == torch.float64

    class Other(HTreeAttention):
        pass

    assert type(Other.recommended(32, 4)) is Other
    with pytest.raises(ValueError, match=r"goal must be one of quality, speed, got 'fast'"):
        HTreeAttention.recommended(32, 4, goal="fast")
    with pytest.raises(TypeError, match="topk"):
        HTreeAttention.recommended(32, 4, topk=3)
    with pytest.raises(TypeError, match="options must be given one by one, as keywords, got options"):
        HTreeAttention.recommended(32, 4, options=TreeOptions())


@pytest.mark.parametrize(
    ("options", "M"),
    [
        ({}, 8192),
        ({"top_k": 16}, 256),
        ({"compression_rate": 2}, 1024),
        ({"top_k": 2, "compression_rate": 4}, 8),
    ],
    ids=str,
)
def test_max_top_nodes_is_what_top_k_allows(options, M):
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 1, 300, 2, 8)
    wanted = tree_attention(q, k, v, **options, max_top_nodes=M)
    assert torch.equal(tree_attention(q, k, v, **options), wanted)
    assert torch.equal(tree_attention(q, k, v, **replace(TreeOptions(), **options).to_dict()), wanted)
    stage = {("top_k_per_layer" if name == "top_k" else name): value for name, value in options.items()}
    forward = attention_forward(q, k, v, **stage)
    assert torch.equal(forward[0], wanted)
    assert attention_backward(wanted, q, k, v, *forward, **stage)[0].shape == q.shape
    layer = HTreeAttention(16, 2, **options)
    x = torch.randn(1, 300, 16)
    before = layer(x)
    layer.options = replace(layer.options, max_top_nodes=M)
    assert torch.equal(layer(x), before)


def test_max_top_nodes_beside_an_index_is_8192():
    """Whatever top_k is: of the function, of packed documents, of a layer and of a cache."""
    torch.manual_seed(2)
    options = {"top_k": 2, "compression_rate": 4}
    assert TreeOptions(**options).beside_index() == TreeOptions(**options, max_top_nodes=MOST_TOP_NODES)
    given = TreeOptions(**options, max_top_nodes=7)
    assert given.beside_index() is given
    (q, k, v), index = torch.randn(3, 1, 90, 2, 8), torch.randn(2, 1, 90, 2, 16).unbind()
    wanted = tree_attention(q, k, v, index=index, **options, max_top_nodes=MOST_TOP_NODES)
    assert torch.equal(tree_attention(q, k, v, index=index, **options), wanted)
    assert not torch.equal(tree_attention(q, k, v, index=index, **options, max_top_nodes=8), wanted)
    rows = [x[0] for x in (q, k, v)]
    ends = torch.tensor([0, 90], dtype=torch.int32)
    packed = tree_attention_varlen(*rows, ends, ends, 90, 90, index=(index[0][0], index[1][0]), **options)
    assert torch.equal(packed, wanted[0])
    layer = HTreeAttention(32, 2, index_dim=16, options=TreeOptions(**options))
    assert layer.options.max_top_nodes is None
    cache = layer.make_cache(1, 90)
    assert cache.options.max_top_nodes == layer._of_attention().max_top_nodes == MOST_TOP_NODES
    x, cu_seqlens = torch.randn(1, 90, 32), ends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the index is not fitted
        whole = layer(x)
        torch.testing.assert_close(layer(x, cu_seqlens=cu_seqlens), whole)
        torch.testing.assert_close(layer(x, cache=cache), whole)
        layer.options = replace(layer.options, max_top_nodes=MOST_TOP_NODES)
        assert torch.equal(layer(x), whole)
