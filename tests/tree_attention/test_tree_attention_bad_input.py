"""Wrong arguments of the ops of tree attention: the right class, and a message with argument, rule and value."""

import math
import re

import pytest
import torch

import htree_ops
from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError
from tests.support.tree_attention_calls import NAMED_CASE, named_calls
from tests.support.tree_attention_problem import packed

ops = torch.ops.htree
OPTIONS = ("compression_rate", "max_top_nodes", "top_k_per_layer", "scale", "rope_base", "importance")
OPTIONS += ("selection_stride",)
nan, inf = math.nan, math.inf


def zeros(*shape, dtype=torch.float32):
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def int32(*shape):
    return zeros(*shape, dtype=torch.int32)


def half(*shape):
    return zeros(*shape, dtype=torch.float16)


def arguments_of(op, device):
    """Correct ones by their names, packed options too."""
    given = dict(named_calls(device)[op])
    if "option_ints" in given:
        del given["option_ints"], given["option_floats"]
        given |= zip(OPTIONS, NAMED_CASE.op_options(), strict=True)
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def make_call(op, device, **changes):
    """Call torch.ops.htree.<op> with the correct arguments, some of them replaced."""
    arguments = arguments_of(op, device) | changes
    if "option_ints" in named_calls(device)[op]:
        given = packed(**{name: arguments.pop(name) for name in OPTIONS})
        arguments |= zip(("option_ints", "option_floats"), given, strict=True)
    return getattr(ops, op)(**arguments)


CALLS = {op: arguments_of(op, "cpu") for op in named_calls("cpu")}


# changed arguments, exception, words of the message; B=2 T=20 T_q=12 H=4 H_kv=2 K=6 V=5 r=4 k=2 M=8
WHOLE = {
    "q rank": ({"q": zeros(12, 4, 6)}, ValueError, ["q", "4", "3"]),
    "k rank": ({"k": zeros(2, 20, 6)}, ValueError, ["k", "4", "3"]),
    "v rank": ({"v": zeros(2, 20, 2, 5, 1)}, ValueError, ["v", "4", "5"]),
    "batch of k": ({"k": zeros(3, 20, 2, 6)}, ValueError, ["k", "2", "3"]),
    "batch of v": ({"v": zeros(1, 20, 2, 5)}, ValueError, ["v", "2", "1"]),
    "lengths of k and v": ({"v": zeros(2, 19, 2, 5)}, ValueError, ["v", "20", "19"]),
    "heads of k and v": ({"v": zeros(2, 20, 4, 5)}, ValueError, ["v", "2", "4"]),
    "width of q and k": ({"k": zeros(2, 20, 2, 8)}, ValueError, ["k", "6", "8"]),
    "H no multiple of H_kv": ({"q": zeros(2, 12, 3, 6)}, ValueError, ["H", "H_kv", "3", "2"]),
    "odd K": ({"q": zeros(2, 12, 4, 5), "k": zeros(2, 20, 2, 5)}, ValueError, ["K", "even", "5"]),
    "more queries than keys": ({"q": zeros(2, 21, 4, 6)}, ValueError, ["q", "T_q", "21", "20"]),
    "dtype of k": ({"k": half(2, 20, 2, 6)}, TypeError, ["k", "dtype", "float32", "float16"]),
    "dtype of v": ({"v": half(2, 20, 2, 5)}, TypeError, ["v", "dtype", "float32", "float16"]),
    "integer q": ({"q": int32(2, 12, 4, 6)}, TypeError, ["q", "dtype", "float32", "int32"]),
    "complex": (
        {"q": zeros(2, 12, 4, 6, dtype=torch.complex64), "k": zeros(2, 20, 2, 6, dtype=torch.complex64)},
        TypeError,
        ["q", "dtype", "float32", "complex64"],
    ),
    "r = 1": ({"compression_rate": 1}, ValueError, ["compression_rate", "2", "1"]),
    "r = 0": ({"compression_rate": 0}, ValueError, ["compression_rate", "2", "0"]),
    "r < 0": ({"compression_rate": -4}, ValueError, ["compression_rate", "2", "-4"]),
    "k = 0": ({"top_k_per_layer": 0}, ValueError, ["top_k", "1", "0"]),
    "k huge": ({"top_k_per_layer": 2**62}, ValueError, ["top_k", str(2**62)]),
    "M = 0": ({"max_top_nodes": 0}, ValueError, ["max_top_nodes", "1", "0"]),
    "M < 0": ({"max_top_nodes": -9}, ValueError, ["max_top_nodes", "1", "-9"]),
    "scale nan": ({"scale": nan}, ValueError, ["scale", "finite", "nan"]),
    "scale inf": ({"scale": -inf}, ValueError, ["scale", "finite", "inf"]),
    "stride no power of two": (
        {"selection_stride": 3},
        ValueError,
        ["selection_stride", "power of two", "3"],
    ),
    "stride zero": ({"selection_stride": 0}, ValueError, ["selection_stride", "0"]),
    "stride negative": ({"selection_stride": -2}, ValueError, ["selection_stride", "-2"]),
    "stride beyond r": ({"selection_stride": 8}, ValueError, ["selection_stride", "4", "8"]),
    "stride off the suffix": (
        {"selection_stride": 4, "q": zeros(2, 13, 4, 6)},
        ValueError,
        ["selection_stride", "T - T_q", "20", "13"],
    ),
    "importance": ({"importance": "max"}, ValueError, ["importance", "lse_causal", "max"]),
    "rope_base zero": ({"rope_base": 0.0}, ValueError, ["rope_base", "positive", "0"]),
    "rope_base nan": ({"rope_base": nan}, ValueError, ["rope_base", "finite", "nan"]),
}

BACKWARD = {
    "dout shape": ({"dout": zeros(2, 12, 4, 6)}, ValueError, ["dout", "5", "6"]),
    "dout rank": ({"dout": zeros(2, 12, 20)}, ValueError, ["dout", "20"]),
    "dout dtype": ({"dout": half(2, 12, 4, 5)}, TypeError, ["dout", "float32", "float16"]),
    "out shape": ({"out": zeros(2, 11, 4, 5)}, ValueError, ["out", "12", "11"]),
    "gmax shape": ({"gmax": zeros(2, 12, 3)}, ValueError, ["gmax", "4", "3"]),
    "gsum shape": ({"gsum": zeros(2, 12, 4, 1)}, ValueError, ["gsum", "4", "1"]),
    "gsum dtype": ({"gsum": half(2, 12, 4)}, TypeError, ["gsum", "float32", "float16"]),
    "one list missing": (
        {"parents": lambda device: [int32(2, 12, 2, 2)(device)]},
        ValueError,
        ["parents", "2", "1"],
    ),
    "lists of another k": (
        {"parents": lambda device: [int32(2, 12, 2, 3)(device)] * 2},
        ValueError,
        ["parents", "2", "3"],
    ),
    "lists of int64": (
        {"parents": lambda device: [zeros(2, 12, 2, 2, dtype=torch.int64)(device)] * 2},
        TypeError,
        ["parents", "int32", "int64"],
    ),
}

#: Of _attention_rows, whose queries stand where `starts` says, and whose options have no words.
ROWS = {
    **{
        what: row
        for what, row in WHOLE.items()
        if not any("T_q" in word or word == "importance" for word in row[2])
    },
    "start below 0": ({"starts": [-1]}, ValueError, ["starts", "0", "-1"]),
    "start too large": ({"starts": [0, 15]}, ValueError, ["starts", "15", "6 rows", "20"]),
    "start inside a stride": (
        {"starts": [6], "selection_stride": 4},
        ValueError,
        ["starts", "selection_stride", "4", "6"],
    ),
    "no start": ({"starts": []}, ValueError, ["starts", "none"]),
    "uneven pieces": ({"starts": [0] * 5}, ValueError, ["5 pieces", "12"]),
    "pieces inside a stride": (
        {"starts": [0, 8], "selection_stride": 4},
        ValueError,
        ["2 pieces", "selection_stride = 4", "12"],
    ),
}
ROWS_BACKWARD = {
    **ROWS,
    **{what: row for what, row in BACKWARD.items() if "parents" not in row[0]},
    "no gradient": ({"dout": None, "dlse": None}, ValueError, ["dout", "dlse", "None"]),
    "dlse shape": ({"dlse": zeros(2, 12, 3)}, ValueError, ["dlse", "4", "3"]),
    "dlse dtype": ({"dlse": zeros(2, 12, 4, dtype=torch.float64)}, TypeError, ["dlse", "float32", "float64"]),
    "lists of one layer": ({"lists": int32(2, 12, 2, 2)}, ValueError, ["lists", "24", "12"]),
    "lists rank": ({"lists": int32(2, 2, 12, 2, 2)}, ValueError, ["lists", "24", "12"]),
    "lists dtype": ({"lists": zeros(2, 24, 2, 2)}, TypeError, ["lists", "int32", "float32"]),
}

LAYER = {
    "parents rank": ({"parents": int32(2, 12, 2)}, ValueError, ["parents", "4", "3"]),
    "parents rows": ({"parents": int32(2, 11, 2, 2)}, ValueError, ["parents", "12", "11"]),
    "parents heads": ({"parents": int32(2, 12, 3, 2)}, ValueError, ["parents", "3"]),
    "parents dtype": ({"parents": zeros(2, 12, 2, 2)}, TypeError, ["parents", "int32", "float32"]),
    "parents of int64": (
        {"parents": zeros(2, 12, 2, 2, dtype=torch.int64)},
        TypeError,
        ["parents", "int32", "int64"],
    ),
    "short table": ({"cos": zeros(7, 3), "sin": zeros(7, 3)}, ValueError, ["cos", "8", "7"]),
    "narrow table": ({"cos": zeros(8, 2), "sin": zeros(8, 2)}, ValueError, ["cos", "3", "2"]),
    "sin unlike cos": ({"sin": zeros(9, 3)}, ValueError, ["sin", "8", "9"]),
    "half table": ({"cos": half(8, 3), "sin": half(8, 3)}, TypeError, ["cos", "float32", "float16"]),
    "negative layer": ({"layer": -1}, ValueError, ["layer", "-1"]),
    "negative t0": ({"t0": -1}, ValueError, ["t0", "0", "-1"]),
    "r = 1": ({"compression_rate": 1}, ValueError, ["compression_rate", "2", "1"]),
    "k = 0": ({"top_k": 0}, ValueError, ["top_k", "1", "0"]),
    "scale": ({"scale": inf}, ValueError, ["scale", "finite", "inf"]),
    "H no multiple": ({"q": zeros(2, 12, 3, 6)}, ValueError, ["H", "3", "2"]),
    "q rank": ({"q": zeros(2, 12, 6)}, ValueError, ["q", "4", "3"]),
    "layer_k dtype": ({"layer_k": half(2, 5, 2, 6)}, TypeError, ["layer_k", "float32", "float16"]),
    "layer_k rank": ({"layer_k": zeros(5, 2, 6)}, ValueError, ["layer_k", "4", "3"]),
    "layer_k batch": ({"layer_k": zeros(3, 5, 2, 6)}, ValueError, ["layer_k", "2", "3"]),
    "layer_v length": ({"layer_v": zeros(2, 6, 2, 5)}, ValueError, ["layer_v", "5", "6"]),
    "layer_v heads": ({"layer_v": zeros(2, 5, 1, 5)}, ValueError, ["layer_v", "2", "1"]),
    "importance": ({"importance": "lse2"}, ValueError, ["importance", "lse_causal", "lse2"]),
    "stride": ({"selection_stride": 3}, ValueError, ["selection_stride", "3"]),
    "t0 off the stride": (
        {"selection_stride": 4, "t0": 6, "parents": int32(2, 3, 2, 2)},
        ValueError,
        ["t0", "selection_stride", "6"],
    ),
}

OTHERS = {
    "tree_build lengths": ("tree_build", {"v": zeros(2, 19, 2, 5)}, ValueError, ["v", "20", "19"]),
    "tree_build rank": ("tree_build", {"k": zeros(20, 2, 6)}, ValueError, ["k", "4", "3"]),
    "tree_build rate": ("tree_build", {"compression_rate": 1}, ValueError, ["compression_rate", "2", "1"]),
    "tree_build dtype": ("tree_build", {"v": half(2, 20, 2, 5)}, TypeError, ["v", "float32", "float16"]),
    "tree_build ints": ("tree_build", {"k": int32(2, 20, 2, 6)}, TypeError, ["k", "float32", "int32"]),
    "tree_build_backward size": ("tree_build_backward", {"n_child": 21}, ValueError, ["n_child", "21"]),
    "tree_build_backward dpv": (
        "tree_build_backward",
        {"dpv": zeros(2, 4, 2, 5)},
        ValueError,
        ["dpv", "5", "4"],
    ),
    "rope_cache odd": ("rope_cache", {"dim": 5}, ValueError, ["dim", "even", "5"]),
    "rope_cache size": ("rope_cache", {"size": -1}, ValueError, ["size", "-1"]),
    "rope_cache base": ("rope_cache", {"base": nan}, ValueError, ["base", "nan"]),
    "rope odd": ("rope", {"x": zeros(2, 12, 4, 5)}, ValueError, ["x", "even", "5"]),
    "rope rank": ("rope", {"x": zeros(12, 4, 6)}, ValueError, ["x", "4", "3"]),
    "rope positions": (
        "rope",
        {"positions": zeros(11, dtype=torch.int64)},
        ValueError,
        ["positions", "12", "11"],
    ),
    "rope positions dtype": ("rope", {"positions": zeros(12)}, TypeError, ["positions", "int32", "float32"]),
    "rope sin": ("rope", {"sin": zeros(20, 2)}, ValueError, ["sin", "3", "2"]),
    "top_parents k": ("top_parents", {"top_k": 0}, ValueError, ["top_k", "1", "0"]),
    "top_parents layers": ("top_parents", {"num_layers": 0}, ValueError, ["num_layers", "1", "0"]),
    "top_parents T": ("top_parents", {"T": -1}, ValueError, ["T", "-1"]),
    "top_parents r": ("top_parents", {"compression_rate": 0}, ValueError, ["compression_rate", "0"]),
    "top_parents t0": ("top_parents", {"selection_stride": 4, "t0": 3}, ValueError, ["t0", "3"]),
    "select_topk rank": ("select_topk", {"scores": zeros(2, 12, 2, 8)}, ValueError, ["scores", "5", "4"]),
    "select_topk dtype": (
        "select_topk",
        {"scores": half(2, 12, 2, 8, 2)},
        TypeError,
        ["scores", "float32", "float16"],
    ),
    "select_topk counts": (
        "select_topk",
        {"num_candidates": int32(2, 12, 3)},
        ValueError,
        ["num_candidates", "3"],
    ),
    "select_topk counts dtype": (
        "select_topk",
        {"num_candidates": zeros(2, 12, 2, dtype=torch.int64)},
        TypeError,
        ["num_candidates", "int32", "int64"],
    ),
    "select_topk k": ("select_topk", {"top_k": 0}, ValueError, ["top_k", "1", "0"]),
    "select_topk importance": ("select_topk", {"importance": ""}, ValueError, ["importance", "lse_causal"]),
    "mask positions": (
        "mask_topk_scores_",
        {"topk_positions": int32(2, 12, 1, 2)},
        ValueError,
        ["topk_positions", "2", "1"],
    ),
    "mask dtype": (
        "mask_topk_scores_",
        {"topk_positions": zeros(2, 12, 2, 2)},
        TypeError,
        ["topk_positions", "int32"],
    ),
    "next parents rows": (
        "compute_next_parents",
        {"topk_positions": int32(2, 11, 2, 2)},
        ValueError,
        ["topk_positions", "12", "11"],
    ),
    "next parents rate": (
        "compute_next_parents",
        {"compression_rate": 1},
        ValueError,
        ["compression_rate", "1"],
    ),
    "accumulate scores": (
        "accumulate_non_topk",
        {"scores": zeros(2, 12, 2, 9, 2)},
        ValueError,
        ["scores", "8", "9"],
    ),
    "accumulate counts": (
        "accumulate_non_topk",
        {"num_candidates": int32(2, 12)},
        ValueError,
        ["num_candidates"],
    ),
    "subtract indices": (
        "subtract_topk",
        {"topk_indices": int32(2, 12, 3, 2)},
        ValueError,
        ["topk_indices", "4", "3"],
    ),
    "subtract scores": (
        "subtract_topk",
        {"topk_scores": zeros(2, 12, 4, 3)},
        ValueError,
        ["topk_scores", "2", "3"],
    ),
    "subtract state": ("subtract_topk", {"lsum": zeros(2, 12, 3)}, ValueError, ["lsum", "4", "3"]),
    "subtract out": ("subtract_topk", {"lout": zeros(2, 12, 4, 4)}, ValueError, ["5", "4"]),
    "merge sizes": ("merge_to_global_", {"lsum": zeros(2, 11, 4)}, ValueError, ["lsum", "12", "11"]),
    "merge global": ("merge_to_global_", {"gmax": zeros(2, 12, 3)}, ValueError, ["gmax", "4", "3"]),
    "merge out": ("merge_to_global_", {"lout": zeros(2, 12, 4, 4)}, ValueError, ["lout", "5", "4"]),
    "merge rank": ("merge_to_global_", {"gout": zeros(2, 12, 4)}, ValueError, ["gout", "4", "3"]),
    "merge dtype": ("merge_to_global_", {"lmax": half(2, 12, 4)}, TypeError, ["lmax", "float32", "float16"]),
    "normalize sum": ("final_normalize", {"gsum": zeros(2, 12, 5)}, ValueError, ["gsum", "4", "5"]),
    "normalize dtype": ("final_normalize", {"dtype": torch.int32}, TypeError, ["dtype", "int32"]),
    "normalize half": (
        "final_normalize",
        {"gout": half(2, 12, 4, 5)},
        TypeError,
        ["gout", "float32", "float16"],
    ),
}

LAYER_OPS = (
    "compute_scores",
    "compute_and_select",
    "select_accumulate",
    "bottom_accumulate",
    "recompute_selection",
)
TABLE = [
    *(
        (op, what, *row)
        for op in ("attention", "tree_attention", "attention_forward")
        for what, row in WHOLE.items()
    ),
    *(("_attention_lse", what, *row) for what, row in WHOLE.items() if what != "importance"),
    *(("_attention_rows", what, *row) for what, row in ROWS.items()),
    *(("_attention_rows_backward", what, *row) for what, row in ROWS_BACKWARD.items()),
    *(("attention_backward", what, *row) for what, row in {**WHOLE, **BACKWARD}.items()),
    *((op, what, *row) for op in LAYER_OPS for what, row in LAYER.items() if set(row[0]) <= set(CALLS[op])),
    *((op, what, *row) for what, (op, *row) in OTHERS.items()),
]


@pytest.mark.parametrize(
    ("op", "what", "changes", "error", "words"), TABLE, ids=[f"{row[0]}: {row[1]}" for row in TABLE]
)
def test_a_wrong_argument_is_named(op, what, changes, error, words, device):
    changed = {name: value(device) if callable(value) else value for name, value in changes.items()}
    with pytest.raises(error) as caught:
        make_call(op, device, **changed)
    message = str(caught.value)
    assert type(caught.value) is error
    function = {"attention": "tree_attention", "_attention_lse": "tree_attention"}.get(
        op, op.removeprefix("_")
    )
    assert message.startswith(f"{function}: ")
    body = message.removeprefix(f"{function}: ")
    missing = [word for word in words if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", body)]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize("what", WHOLE)
def test_the_function_raises_the_classes_of_the_package(what):
    changes, error, words = WHOLE[what]
    arguments = arguments_of("attention", "cpu")
    arguments |= {name: value("cpu") if callable(value) else value for name, value in changes.items()}
    arguments["top_k"] = arguments.pop("top_k_per_layer")
    with pytest.raises(error, match=r"^tree_attention: ") as caught:
        htree_ops.tree_attention(**arguments)
    missing = [word for word in words if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(caught.value))]
    assert not missing, f"{missing} not in: {caught.value}"
    if changes.keys() <= {"q", "k", "v"}:
        assert type(caught.value) is {ValueError: ShapeMismatchError, TypeError: UnsupportedDtypeError}[error]
        assert caught.value.tensor_name in ("q", "k", "v")


@pytest.mark.parametrize("op", CALLS)
def test_every_op_accepts_the_call_that_the_table_mutates(op, device):
    make_call(op, device)


def tensors_of(value):
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, torch.Tensor)]


MIXED = [
    (op, name)
    for op, arguments in CALLS.items()
    for name, value in arguments.items()
    if tensors_of(value) and sum(bool(tensors_of(x)) for x in arguments.values()) > 1
]


@pytest.mark.parametrize(("op", "name"), MIXED, ids=[f"{op}: {name}" for op, name in MIXED])
def test_a_mix_of_devices_is_refused(op, name, device):
    """One argument on another device: meta beside the CPU, the CPU beside CUDA."""
    other = "meta" if device == "cpu" else "cpu"
    value = named_calls(device)[op][name]
    moved = [x.to(other) for x in tensors_of(value)]
    moved = moved if isinstance(value, list) else moved[0]
    with pytest.raises(RuntimeError, match="device"):
        make_call(op, device, **{name: moved})


@pytest.mark.parametrize("op", ["select_accumulate", "recompute_selection"])
def test_nothing_is_selected_at_the_bottom(op, device):
    with pytest.raises(ValueError, match=r"layer.*0"):
        make_call(op, device, layer=0)
