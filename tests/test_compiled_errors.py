"""The message of a wrong argument under torch.compile names function and argument, as Python's layer does.

Dynamo wraps what an op raises while it traces, so the class is Dynamo's; the sentence is the op's.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import htree_ops
import htree_ops.compat
from htree_ops import parallel_io_only as io
from htree_ops.ops import tree_attention as family
from htree_ops.ops.tree_attention import stages
from tests.support.tree_attention_calls import stage_arguments

FP8 = torch.float8_e4m3fn


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def int32(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


Q, K, V = zeros(2, 12, 4, 6), zeros(2, 12, 2, 6), zeros(2, 12, 2, 5)
INDEX = zeros(2, 12, 2, 16)
COUNTS, LISTS = int32(2, 12, 2), int32(2, 12, 2, 2)
ROWS = zeros(2, 12, 4), zeros(2, 12, 4), zeros(2, 12, 4, 5)
TOKENS = htree_ops.kv_compress(torch.randn(2, 2, 5, 64), 20, 4)
HEADS = {"q": zeros(2, 4, 64), "k_win": zeros(2, 2, 3, 64), "v_win": zeros(2, 2, 3, 64)}
DECODE = HEADS | {
    f"{letter}_{name}": x for letter in "kv" for name, x in zip(TOKENS._fields, TOKENS, strict=True)
}
KEEP = {"k_keep": 20, "v_keep": 20, "k_bits": 4, "v_bits": 4}
#: Two pages of 16 tokens and their 4 parents, for one sequence.
PAGES = {
    "k_pool": zeros(2, 2, 20, 6),
    "v_pool": zeros(2, 2, 20, 5),
    "block_table": int32(1, 2),
    "lengths": int32(1),
    "page_size": 16,
    "compression_rate": 4,
    "max_top_nodes": 8,
}
PACKED = PAGES | {
    "k_pool": zeros(2, 2, 4, 64),
    "v_pool": zeros(2, 2, 4, 128),
    "k_codes": zeros(2, 2, 16, 64).byte(),
    "k_scales": zeros(2, 2, 16).half(),
    "v_codes": zeros(2, 2, 16, 128).byte(),
    "v_scales": zeros(2, 2, 16).half(),
    "k_tail": zeros(1, 2, 8, 64),
    "v_tail": zeros(1, 2, 8, 128),
}
ROTATED = {"cos": zeros(12, 32), "sin": zeros(12, 32), "position_ids": torch.arange(5)}

Entry = tuple[Callable[..., Any], dict[str, Any], list[dict[str, Any]]]


def of_stage(function: Callable[..., Any], *changes: dict[str, Any]) -> Entry:
    """The arguments of the op of that name."""
    return function, stage_arguments(function), list(changes)


#: A correct call, and changes that make it wrong; the message must name the first changed argument.
CALLS: list[Entry] = [
    (
        htree_ops.tree_attention,
        {"q": Q, "k": K, "v": V, "compression_rate": 4, "max_top_nodes": 8, "top_k": 2},
        [
            {"k": zeros(2, 12, 2, 8)},
            {"v": V.half()},
            {"q": zeros(2, 12, 3, 6)},
            {"top_k": 0},
            {"max_top_nodes": 0},
            {"compression_rate": 1},
            {"selection_stride": 3},
            {"scale": 1e39},
            {"importance": "most"},
            {"scope": "head"},
            {"k": zeros(2, 12, 6), "scope": "q_head"},
            {"q": zeros(2, 12, 6), "scope": "q_head"},
        ],
    ),
    (
        htree_ops.tree_attention_varlen,
        {"query": Q[0], "key": K[0], "value": V[0], "max_q": 12, "max_k": 12}
        | {"cu_seq_q": int32(1), "cu_seq_k": int32(1)},
        [{"key": zeros(12, 3, 6)}, {"cu_seq_k": int32(2)}, {"max_k": -1}, {"top_k": 0}],
    ),
    (
        htree_ops.select_blocks,
        {"index_query": INDEX, "index_key": INDEX, "count": 3, "block_size": 4},
        [
            {"index_query": INDEX[0]},
            {"index_key": INDEX.half()},
            {"index_query": zeros(2, 13, 2, 16)},
            {"count": 0},
            {"selection_stride": 3},
            {"local": 4},
            {"first": -1},
        ],
    ),
    (
        htree_ops.select_blocks_varlen,
        {"index_query": INDEX[0], "index_key": INDEX[0], "count": 3, "max_q": 12, "max_k": 12}
        | {"cu_seq_q": int32(1), "cu_seq_k": int32(1)},
        [{"index_key": zeros(12, 3, 16)}, {"cu_seq_k": int32(2)}, {"max_k": -1}, {"block_size": 0}],
    ),
    (
        htree_ops.sparse_attention,
        {"query": Q, "key": K, "value": V, "blocks": int32(2, 12, 2, 3), "block_size": 16},
        [
            {"key": zeros(2, 12, 2, 8)},
            {"value": V.half()},
            {"query": zeros(2, 12, 3, 6)},
            {"query": zeros(2, 13, 4, 6)},
            {"blocks": zeros(2, 12, 2, 3).long()},
            {"blocks": int32(2, 11, 2, 3)},
            {"selection_stride": 3},
            {"block_size": 0},
            {"scale": 1e39},
            {"sinks": zeros(3)},
        ],
    ),
    (
        htree_ops.sparse_attention_varlen,
        {"query": Q[0], "key": K[0], "value": V[0], "blocks": int32(12, 1, 3), "max_q": 12, "max_k": 12}
        | {"cu_seq_q": int32(1), "cu_seq_k": int32(1)},
        [
            {"key": zeros(12, 3, 6)},
            {"blocks": int32(11, 1, 3)},
            {"cu_seq_k": int32(2)},
            {"max_k": -1},
            {"block_size": 0},
        ],
    ),
    (
        htree_ops.index_loss,
        {"query": Q, "key": K, "index_query": INDEX, "index_key": INDEX, "block_size": 4},
        [
            {"key": zeros(2, 3, 2, 6)},
            {"key": zeros(2, 12, 3, 6)},
            {"index_key": INDEX.half()},
            {"index_query": zeros(2, 12, 2, 24)},
            {"positions": int32(4)},
            {"block_size": 0},
            {"scale": 1e39},
            {"rows": -1},
        ],
    ),
    (family.attention_forward, {"q": Q, "k": K, "v": V}, [{"q": zeros(12, 4, 6)}]),
    (
        family.attention_backward,
        {
            "dout": ROWS[2],
            "q": Q,
            "k": K,
            "v": V,
            "out": ROWS[2],
            "gmax": ROWS[0],
            "gsum": ROWS[1],
            "parents": [],
        },
        [{"dout": zeros(2, 12, 4, 6)}],
    ),
    of_stage(stages.tree_build, {"v": zeros(2, 11, 2, 5)}),
    of_stage(stages.span_means, {"span": 0}),
    of_stage(stages.tree_build_backward, {"n_child": 0}),
    of_stage(stages.rope_cache, {"dim": 7}, {"base": -1.0}, {"dtype": torch.float16}),
    of_stage(stages.rope, {"positions": Q}),
    of_stage(stages.top_parents, {"top_k": 0}),
    of_stage(stages.compute_scores, {"parents": LISTS.long()}),
    of_stage(stages.select_topk, {"top_k": 0}),
    of_stage(stages.mask_topk_scores_, {"topk_positions": COUNTS}),
    of_stage(stages.compute_next_parents, {"parents": COUNTS}),
    of_stage(stages.accumulate_non_topk, {"scores": zeros(2, 12, 2, 8, 2).half()}),
    of_stage(stages.compute_and_select, {"layer": -1}),
    of_stage(stages.subtract_topk, {"topk_scores": zeros(2, 12, 4, 1)}),
    of_stage(stages.select_accumulate, {"top_k": 0}),
    of_stage(stages.bottom_accumulate, {"layer_v": zeros(2, 11, 2, 5)}),
    of_stage(stages.recompute_selection, {"layer": 0}),
    of_stage(stages.merge_to_global_, {"lsum": zeros(2, 11, 4)}),
    of_stage(stages.final_normalize, {"dtype": torch.int32}),
    (io.htree_forward_io_only, {"q": Q, "k": K, "v": V}, [{"select": "best"}]),
    of_stage(io.io_compute_scores, {"cos": zeros(3, 3)}),
    of_stage(io.io_select_topk, {"top_k": 0}),
    of_stage(io.io_accumulate_non_topk, {"num_candidates": LISTS}),
    of_stage(io.io_compute_next_parents, {"topk_positions": COUNTS}),
    (
        htree_ops.causal_softmax,
        {"x": zeros(3, 4)},
        [{"x": zeros(4, 3)}, {"block_size": 3}, {"out": zeros(3, 5)}],
    ),
    (
        htree_ops.rmsnorm_rope,
        {"x": zeros(2, 3, 8), "weight": zeros(8), "cos": zeros(3, 4), "sin": zeros(3, 4)},
        [{"weight": zeros(7)}, {"cos": zeros(2, 4)}, {"eps": -1.0}, {"num_heads": 3}],
    ),
    (
        htree_ops.head_rmsnorm_rope,
        {"x": zeros(2, 3, 2, 4), "weight": zeros(4), "cos": zeros(3, 4), "sin": zeros(3, 4)},
        [{"x": zeros(2, 3, 4)}, {"sin": zeros(3, 2)}],
    ),
    (
        htree_ops.gated_mlp,
        {"x": zeros(2, 4), "gate_weight": zeros(3, 4), "up_weight": zeros(3, 4)},
        [
            {"up_weight": zeros(3, 5)},
            {"gate_weight": zeros(3, 4).half()},
            {"activation": "relu"},
            {"BLOCK_M": 1, "BLOCK_N": 1, "BLOCK_K": 1, "num_warps": 1, "num_stages": 1},
        ],
    ),
    (htree_ops.hadamard_transform, {"x": zeros(2, 8)}, [{"x": zeros(2, 6)}, {"scale": float("nan")}]),
    (htree_ops.ops.hadamard.hadamard_transform_, {"x": zeros(2, 8)}, [{"x": zeros(2, 8).int()}]),
    (htree_ops.grouped_hadamard, {"x": zeros(1, 4, 3, 8), "group": 2}, [{"group": 3}, {"x": zeros(4, 8)}]),
    (htree_ops.fp8_compute_scale, {"x": zeros(2, 8)}, [{"granularity": "row"}]),
    (htree_ops.fp8_quantize, {"x": zeros(2, 8)}, [{"x": zeros(2, 8).double()}, {"scale": zeros(3)}]),
    (htree_ops.fp8_dequantize, {"q": zeros(2, 8).to(FP8), "scale": zeros()}, [{"scale": zeros(3)}]),
    (htree_ops.fp8_fake_quant, {"x": zeros(2, 8)}, [{"block": 0}]),
    (
        htree_ops.fp8_gemm,
        {"a": zeros(2, 8).to(FP8), "b": zeros(8, 4).to(FP8), "a_scale": zeros(), "b_scale": zeros()},
        [
            {"b": zeros(7, 4).to(FP8)},
            {"a_scale": zeros(3, 1)},
            {"output_dtype": torch.int8},
            {"b_scale": None},
        ],
    ),
    (
        htree_ops.ops.fp8.fp8_gemm_exact,
        {"a": zeros(2, 8).to(FP8), "b": zeros(8, 4).to(FP8), "a_scale": zeros(), "b_scale": zeros()},
        [{"a": zeros(8).to(FP8)}],
    ),
    (htree_ops.ops.compressed_kv.kv_prune, {"x": zeros(2, 2, 5, 64), "keep": 20}, [{"keep": 65}]),
    (htree_ops.kv_compress, {"x": zeros(2, 2, 5, 64), "keep": 20}, [{"bits": 5}, {"x": zeros(2, 2, 5, 96)}]),
    (htree_ops.kv_decompress, TOKENS._asdict() | {"D": 64, "keep": 20, "bits": 4}, [{"keep": 0}]),
    (htree_ops.kv_decode_attention, DECODE | KEEP, [{"q": zeros(2, 3, 64)}, {"v_win": zeros(2, 2, 4, 64)}]),
    (
        htree_ops.ops.tree_cache.tree_cache_append_,
        PAGES | {"k": zeros(3, 2, 6), "v": zeros(3, 2, 5), "cu_new": int32(2)},
        [{"k": zeros(3, 2, 8)}, {"page_size": 6}, {"cu_new": int32(3)}],
    ),
    (
        htree_ops.ops.tree_cache.tree_cache_append_packed_,
        PACKED | {"k": zeros(3, 2, 64), "v": zeros(3, 2, 128), "cu_new": int32(2)},
        [{"k": zeros(3, 2, 8)}, {"k_codes": zeros(2, 2, 16, 64)}, {"v_tail": zeros(1, 2, 4, 128)}],
    ),
    (
        htree_ops.ops.tree_cache.tree_cache_attention,
        PAGES | {"q": zeros(1, 4, 6), "cu_q": int32(2), "top_k": 2},
        [{"q": zeros(1, 3, 6)}, {"top_k": 0}, {"lengths": zeros(1)}, {"list_pos": int32(1, 4)}],
    ),
    (htree_ops.compat.apply_rotary_pos_emb_q, {"q": zeros(2, 4, 5, 64), **ROTATED}, [{"q": zeros(4, 5, 64)}]),
    (htree_ops.compat.apply_rotary_pos_emb_k, {"k": zeros(2, 2, 5, 64), **ROTATED}, [{"k": zeros(2, 5, 64)}]),
]
#: Functions that wait for the device, change a model or only compute sizes: nobody compiles them.
EAGER = {
    *(
        "calibrate_activation_scales",
        "fit_index",
        "fp8_scale_inv",
        "handle_fp8_overflow",
        "index_losses",
        "quantize_model_",
    ),
    *("cache_layers", "key_weight_from_queries", "num_kept", "page_rows", "row_bytes"),
}
ROWS_OF_TABLE = [
    pytest.param(function, call, change, id=f"{function.__name__}-{next(iter(change))}-{i}")
    for function, call, changes in CALLS
    for i, change in enumerate(changes)
]


@pytest.mark.parametrize(("function", "call", "change"), ROWS_OF_TABLE)
def test_the_text_names_function_and_argument(function, call, change):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    with pytest.raises(Exception) as caught:
        compiled(**call | change)
    sentence = re.search(rf"\b{function.__name__}(?:\.out)?: (.*)", str(caught.value))
    assert sentence, str(caught.value)[:1000]
    assert re.search(rf"\b{next(iter(change))}\b", sentence[1]), sentence[0]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as eager:
        function(**call | change)
    assert re.match(rf"{function.__name__}: .*\b{next(iter(change))}\b", str(eager.value))


@pytest.mark.parametrize(
    ("function", "call"), [pytest.param(call[0], call[1], id=call[0].__name__) for call in CALLS]
)
def test_an_argument_of_a_wrong_kind_is_refused_in_the_same_words(function, call):
    """Eager and compiled calls give the same sentence: the name, what it must be, and what it was."""
    parameters = inspect.signature(function).parameters.values()
    kinds = {"Tensor": "a Tensor", "int": "an int", "float": "a number", "str": "a str", "bool": "a bool"}
    for annotation in ("Tensor", *kinds):  # what comes last: an option, if the function has one
        for parameter in parameters:
            if parameter.annotation == annotation:
                name, kind = parameter.name, kinds[annotation]
    sentence = f"{function.__name__}: {name} must be {kind}, got module"
    with pytest.raises(TypeError, match=re.escape(sentence)):
        function(**call | {name: torch})
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=re.escape(sentence)):
        compiled(**call | {name: torch})


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"top_k": "8"}, "top_k must be an int, got str"),
        ({"top_k": True}, "top_k must be an int, got bool"),
        ({"scale": "x"}, "scale must be a number, got str"),
        ({"importance": 3}, "importance must be a str, got int"),
        ({"store_parents": 1}, "store_parents must be a bool, got int"),
        ({"v": None}, "v must be a Tensor, got NoneType"),
    ],
    ids=str,
)
def test_kinds_of_tree_attention(change, rule):
    function, call, _ = CALLS[0]
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"tree_attention: {rule}"):
        torch.compile(function, fullgraph=True, backend="eager")(**call | change)


def test_kinds_of_arguments_without_keywords():
    torch._dynamo.reset()
    compiled = torch.compile(stages.tree_build, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="tree_build: compression_rate must be an int, got float"):
        compiled(K, V, 4.0)


def test_every_public_function_is_in_the_table():
    names = [module.name for module in pkgutil.iter_modules(htree_ops.ops.__path__) if module.ispkg]
    modules = [htree_ops.compat, io, *(importlib.import_module(f"htree_ops.ops.{name}") for name in names)]
    values = [getattr(module, name) for module in modules for name in module.__all__]
    public = {value.__name__ for value in values if inspect.isfunction(value)}
    public -= {name for name in public if name.startswith("validate_")} | EAGER
    assert public == {function.__name__ for function, _, _ in CALLS}
