"""TreeOptions, the one list of the options in Python, agrees with the schema in C++."""

from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from htree_ops import HTreeAttention, TreeOptions, tree_attention
from htree_ops.ops.tree_attention import attention_backward, attention_forward
from htree_ops.ops.tree_attention.attention import MOST_TOP_NODES
from htree_ops.ops.tree_attention.options import RECOMMENDED

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


def test_the_options_are_those_of_the_schema() -> None:
    declared = {
        arg.name: arg.default_value for arg in torch.ops.htree.attention.default._schema.arguments[3:]
    }
    declared["top_k"] = declared.pop("top_k_per_layer")
    ours = {field.name: field.default for field in fields(TreeOptions)}
    assert ours.pop("scope") == "kv_head"  # an option of Python alone
    assert ours.pop("max_top_nodes") is None  # what the op declares, where top_k allows it
    assert declared.pop("max_top_nodes") == MOST_TOP_NODES
    assert ours == declared
    assert set(OTHERS) == {field.name for field in fields(TreeOptions)}


def test_they_are_saved_and_loaded() -> None:
    options = TreeOptions(**OTHERS)
    assert TreeOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert TreeOptions.from_dict({"top_k": 600}) == replace(TreeOptions(), top_k=600)
    with pytest.raises(ValueError, match=r"among compression_rate, .*, got 'topk'"):
        TreeOptions.from_dict({"topk": 600})
    with pytest.raises(FrozenInstanceError):
        options.top_k = 5  # type: ignore[misc]


def test_ops_take_all_but_what_the_heads_and_a_backward_say() -> None:
    left_out = {"scope", "store_parents"}
    kept = {name: value for name, value in OTHERS.items() if name not in left_out}
    assert TreeOptions(**OTHERS).of_ops() == kept
    assert TreeOptions(top_k=3).of_ops()["max_top_nodes"] == 48  # a number where None was asked


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_k": 1.5}, TypeError, "top_k"),
        ({"selection_stride": 3}, ValueError, "selection_stride"),
        ({"max_top_nodes": 9000}, ValueError, "max_top_nodes"),
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
        (
            {"inv_freq": torch.nested.nested_tensor([torch.ones(2)])},
            TypeError,
            "inv_freq .* that is nested",
        ),
        ({"inv_freq": (1.0,), "rope_base": None}, ValueError, "rope_base"),
        ({"scope": "head"}, ValueError, "scope"),
        ({"scale": float("nan")}, ValueError, "scale"),
    ],
    ids=str,
)
def test_wrong_ones_are_named(wrong: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TreeOptions(**wrong)  # type: ignore[arg-type]


def test_a_layer_takes_them_and_lets_them_be_set() -> None:
    torch.manual_seed(1)
    layer = HTreeAttention(32, 4, 2, **OTHERS)
    assert layer.options == TreeOptions(**OTHERS)
    assert {name: getattr(layer, name) for name in OTHERS} == OTHERS
    layer.top_k = 4
    layer.selection_stride = 2
    assert layer.options == replace(TreeOptions(**OTHERS), top_k=4, selection_stride=2)
    with pytest.raises(ValueError, match=r"^HTreeAttention: .*selection_stride"):
        layer.selection_stride = 3
    for wrong, came in (((1.0, 0.5), "2"), ((), "0")):
        with pytest.raises(ValueError, match=rf"^HTreeAttention: inv_freq must have .*, got {came}$"):
            layer.inv_freq = wrong
    assert layer.options == replace(TreeOptions(**OTHERS), top_k=4, selection_stride=2)
    x = torch.randn(2, 50, 32)
    q = layer.q_proj(x).unflatten(-1, (4, 8))
    k, v = (projection(x).unflatten(-1, (2, 8)) for projection in (layer.k_proj, layer.v_proj))
    expected = layer.o_proj(tree_attention(q, k, v, **layer.options.to_dict()).flatten(2))
    assert torch.equal(layer(x), expected)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert "top_k=4, selection_stride=2, scale=0.5" in repr(layer)
    assert "options" not in layer.state_dict()


def test_a_recommended_layer_is_one_with_the_options_of_its_goal() -> None:
    quality, speed = (HTreeAttention.recommended(32, 4, 2, goal=goal) for goal in RECOMMENDED)
    assert quality.options == TreeOptions(selection_span=2)
    assert speed.options == TreeOptions(selection_span=2, selection_stride=4)
    assert HTreeAttention.recommended(32, 4).options == quality.options
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
        HTreeAttention.recommended(32, 4, goal="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="topk"):
        HTreeAttention.recommended(32, 4, topk=3)


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
def test_max_top_nodes_is_what_top_k_allows(options: dict[str, int], M: int) -> None:
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
    layer.max_top_nodes = M
    assert torch.equal(layer(x), before)
    if options:
        with pytest.raises(ValueError, match="max_top_nodes"):
            tree_attention(q, k, v, **options, max_top_nodes=M + 1)
