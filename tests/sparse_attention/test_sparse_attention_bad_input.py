"""Wrong arguments of sparse_attention: the right class, and a message with function, argument, rule and value."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import htree_ops
from htree_ops import ShapeMismatchError, UnsupportedDtypeError


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def int32(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int32)


def half(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.float16)


GOOD: dict[str, Any] = {
    "query": zeros(2, 12, 4, 6),
    "key": zeros(2, 20, 2, 6),
    "value": zeros(2, 20, 2, 5),
    "blocks": int32(2, 12, 2, 3),
    "sinks": zeros(4),
}
#: changed arguments, exception, words of the message
BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "query rank": ({"query": zeros(12, 4, 6)}, ShapeMismatchError, ["query", "4-D", "3-D"]),
    "key rank": ({"key": zeros(20, 2, 6)}, ShapeMismatchError, ["key", "4-D", "3-D"]),
    "value rank": ({"value": zeros(2, 20, 2, 5, 1)}, ShapeMismatchError, ["value", "4-D", "5-D"]),
    "blocks rank": ({"blocks": int32(2, 12, 3)}, ShapeMismatchError, ["blocks", "4-D", "3-D"]),
    "sinks rank": ({"sinks": zeros(4, 1)}, ShapeMismatchError, ["sinks", "1-D", "2-D"]),
    "batch of key": ({"key": zeros(3, 20, 2, 6)}, ShapeMismatchError, ["key", "B of query", "2", "3"]),
    "batch of value": ({"value": zeros(1, 20, 2, 5)}, ShapeMismatchError, ["value", "B of query"]),
    "batch of blocks": ({"blocks": int32(1, 12, 2, 3)}, ShapeMismatchError, ["blocks", "B of query"]),
    "length of value": ({"value": zeros(2, 19, 2, 5)}, ShapeMismatchError, ["value", "T of key", "20", "19"]),
    "heads of value": ({"value": zeros(2, 20, 4, 5)}, ShapeMismatchError, ["value", "H_kv of key"]),
    "width of key": ({"key": zeros(2, 20, 2, 8)}, ShapeMismatchError, ["key", "K of query", "6", "8"]),
    "no width": (
        {"query": zeros(2, 12, 4, 0), "key": zeros(2, 20, 2, 0)},
        ShapeMismatchError,
        ["K", "at least 1"],
    ),
    "no value width": ({"value": zeros(2, 20, 2, 0)}, ShapeMismatchError, ["V", "at least 1"]),
    "no heads": ({"query": zeros(2, 12, 0, 6)}, ShapeMismatchError, ["H of query", "H_kv"]),
    "heads that do not divide": ({"query": zeros(2, 12, 3, 6)}, ShapeMismatchError, ["H = 3", "H_kv = 2"]),
    "heads of blocks": (
        {"blocks": int32(2, 12, 4, 3)},
        ShapeMismatchError,
        ["blocks", "1 or 2", "H_kv of key", "4"],
    ),
    "rows of blocks": ({"blocks": int32(2, 11, 2, 3)}, ShapeMismatchError, ["blocks", "12", "11"]),
    "rows of blocks with a stride": ({"selection_stride": 4}, ShapeMismatchError, ["blocks", "3", "12"]),
    "sinks of other heads": ({"sinks": zeros(2)}, ShapeMismatchError, ["sinks", "H of query", "4", "2"]),
    "more queries than keys": (
        {"query": zeros(2, 21, 4, 6), "blocks": int32(2, 21, 2, 3)},
        ShapeMismatchError,
        ["query", "T_q = 21", "T = 20"],
    ),
    "a suffix off the stride": (
        {"selection_stride": 16, "blocks": int32(2, 1, 2, 3)},
        ValueError,
        ["T - T_q", "selection_stride = 16"],
    ),
    "blocks of 64 bits": (
        {"blocks": zeros(2, 12, 2, 3, dtype=torch.int64)},
        UnsupportedDtypeError,
        ["blocks", "int32", "int64"],
    ),
    "blocks of floats": (
        {"blocks": zeros(2, 12, 2, 3)},
        UnsupportedDtypeError,
        ["blocks", "int32", "float32"],
    ),
    "integer query": ({"query": int32(2, 12, 4, 6)}, UnsupportedDtypeError, ["query", "float32", "int32"]),
    "dtype of key": ({"key": half(2, 20, 2, 6)}, UnsupportedDtypeError, ["key", "dtype of query", "float16"]),
    "dtype of value": ({"value": half(2, 20, 2, 5)}, UnsupportedDtypeError, ["value", "dtype of query"]),
    "integer sinks": ({"sinks": int32(4)}, UnsupportedDtypeError, ["sinks", "float32", "int32"]),
    "block_size 0": ({"block_size": 0}, ValueError, ["block_size", "between 1", "got 0"]),
    "block_size huge": ({"block_size": 2**31}, ValueError, ["block_size", str(2**31)]),
    "stride no power of two": (
        {"selection_stride": 3, "block_size": 12},
        ValueError,
        ["selection_stride", "power of two", "3"],
    ),
    "stride no divisor": (
        {"selection_stride": 8, "block_size": 12},
        ValueError,
        ["selection_stride", "block_size = 12", "8"],
    ),
    "stride 0": ({"selection_stride": 0}, ValueError, ["selection_stride", "0"]),
    "scale nan": ({"scale": math.nan}, ValueError, ["scale", "finite", "nan"]),
    "scale inf": ({"scale": math.inf}, ValueError, ["scale", "finite", "inf"]),
    "meta blocks": (
        {"blocks": int32(2, 12, 2, 3).to("meta")},
        htree_ops.DeviceError,
        ["blocks", "device of query", "meta"],
    ),
    "blocks no tensor": ({"blocks": [[0]]}, TypeError, ["blocks", "Tensor", "list"]),
    "sinks a number": ({"sinks": 1.0}, TypeError, ["sinks", "Tensor", "float"]),
    "block_size a float": ({"block_size": 16.0}, TypeError, ["block_size", "int", "float"]),
    "return_lse an int": ({"return_lse": 1}, TypeError, ["return_lse", "bool", "int"]),
    "sparse blocks": ({"blocks": int32(2, 12, 2, 3).to_sparse()}, TypeError, ["blocks", "dense"]),
}
VARLEN_GOOD: dict[str, Any] = {
    "query": zeros(12, 4, 6),
    "key": zeros(12, 2, 6),
    "value": zeros(12, 2, 5),
    "blocks": int32(12, 2, 3),
    "cu_seq_q": torch.tensor([0, 5, 12], dtype=torch.int32),
    "cu_seq_k": torch.tensor([0, 5, 12], dtype=torch.int32),
    "max_q": 7,
    "max_k": 7,
}


def offsets(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


VARLEN_BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "query rank": ({"query": zeros(1, 12, 4, 6)}, ShapeMismatchError, ["query", "3-D", "4-D"]),
    "rows of blocks": (
        {"blocks": int32(11, 2, 3)},
        ShapeMismatchError,
        ["blocks", "N_q of query", "12", "11"],
    ),
    "offsets of 64 bits": (
        {"cu_seq_q": offsets(0, 5, 12).long()},
        UnsupportedDtypeError,
        ["cu_seq_q", "int32", "int64"],
    ),
    "no offsets": ({"cu_seq_q": offsets()}, ShapeMismatchError, ["cu_seq_q", "at least one"]),
    "other counts of documents": (
        {"cu_seq_k": offsets(0, 12)},
        ShapeMismatchError,
        ["cu_seq_k", "documents"],
    ),
    "not from 0": ({"cu_seq_q": offsets(1, 5, 12)}, ValueError, ["cu_seq_q", "begin with 0", "1"]),
    "descending": ({"cu_seq_q": offsets(0, 13, 12)}, ValueError, ["cu_seq_q", "13"]),
    "too far": ({"cu_seq_k": offsets(0, 5, 13)}, ValueError, ["cu_seq_k", "13", "12"]),
    "more queries than keys": (
        {"cu_seq_k": offsets(0, 4, 12), "max_k": 9},
        ValueError,
        ["cu_seq_q", "5", "4", "document 0"],
    ),
    "max_q too small": ({"max_q": 6}, ValueError, ["max_q", "6", "7", "document 1"]),
    "max_k negative": ({"max_k": -1}, ValueError, ["max_k", "at least 0", "-1"]),
    "off the stride": (
        {"cu_seq_q": offsets(0, 4, 11), "selection_stride": 4},
        ValueError,
        ["selection_stride = 4", "document 0"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name):
    changed, kind, words = BAD[name]
    with pytest.raises(kind) as caught:
        htree_ops.sparse_attention(**{**GOOD, **changed})
    check_message(str(caught.value), "sparse_attention", words)


@pytest.mark.parametrize("name", VARLEN_BAD)
def test_bad_argument_of_documents(name):
    changed, kind, words = VARLEN_BAD[name]
    with pytest.raises(kind) as caught:
        htree_ops.sparse_attention_varlen(**{**VARLEN_GOOD, **changed})
    check_message(str(caught.value), "sparse_attention_varlen", words)


def check_message(message: str, function: str, words: list[str]) -> None:
    assert message.startswith(f"{function}: "), message
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}", message), f"{word!r} is not in {message!r}"
    assert "got" in message, message


def test_good_arguments():
    htree_ops.sparse_attention(**GOOD)
    htree_ops.sparse_attention_varlen(**VARLEN_GOOD)


def test_the_backward_refuses_what_a_forward_did_not_give():
    out, lse = torch.ops.htree.sparse_attention(
        *(GOOD[x] for x in ("query", "key", "value", "blocks", "sinks"))
    )
    backward = torch.ops.htree._sparse_attention_backward
    args = (GOOD["query"], GOOD["key"], GOOD["value"], GOOD["blocks"], out, lse, GOOD["sinks"])
    with pytest.raises(TypeError, match=r"lse must have dtype torch\.float32, got torch\.float64"):
        backward(*args[:5], lse.double(), GOOD["sinks"], out, None)
    with pytest.raises(ValueError, match=r"dout must have shape \[2, 12, 4, 5\].* got \[2, 12, 4\]"):
        backward(*args, lse, None)
    with pytest.raises(ValueError, match=r"dlse must have shape \[2, 12, 4\].* got \[2, 12, 4, 5\]"):
        backward(*args, out, out)


def test_double_backward_is_refused():
    query = GOOD["query"].clone().requires_grad_()
    out = htree_ops.sparse_attention(query, GOOD["key"], GOOD["value"], GOOD["blocks"])
    (first,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="sparse_attention: double backward is not supported"):
        first.sum().backward()


@pytest.mark.gpu
def test_short_blocks_are_refused_on_cuda():
    arguments = {name: x.cuda() for name, x in GOOD.items()}
    with pytest.raises(htree_ops.ArchitectureNotSupportedError, match="block_size must be at least 16"):
        htree_ops.sparse_attention(**arguments, block_size=8)
