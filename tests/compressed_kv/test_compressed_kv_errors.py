"""Bad input of the compressed K/V functions: class and message in Python, the builtin class from the op."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import htree_ops
import htree_ops.compat
from htree_ops.errors import DeviceError, ShapeMismatchError, UnsupportedDtypeError
from tests.support.compressed_kv_cases import DecodeCase

ops = torch.ops.htree
X = torch.randn(2, 2, 5, 64)
WEIGHT = torch.ones(2, 2, 64)
ROWS = htree_ops.kv_compress(X, 20, 4)
DENSE = htree_ops.kv_compress(X.half(), 20, 16)

Call = Callable[[Any], Any]
COMPRESS: dict[str, tuple[Call, type[Exception], str]] = {
    "rank": (lambda f: f(X[0], 20, 8), ShapeMismatchError, r"x must be 4-D \[B, H_kv, S, D\], got 3-D"),
    "width": (lambda f: f(torch.zeros(1, 1, 1, 96), 20, 8), ShapeMismatchError, r"D of x must be a multiple of 64.*96"),
    "no width": (lambda f: f(torch.zeros(1, 1, 1, 0), 1, 8), ShapeMismatchError, r"between 64 and 512, got 0"),
    "too wide": (lambda f: f(torch.zeros(1, 1, 1, 576), 20, 8), ShapeMismatchError, r"between 64 and 512, got 576"),
    "dtype": (lambda f: f(X.double(), 20, 8), UnsupportedDtypeError, r"dtype"),
    "integers": (lambda f: f(X.int(), 20, 8), UnsupportedDtypeError, r"dtype"),
    "keep 0": (lambda f: f(X, 0, 8), ValueError, r"keep must be between 1 and (D = )?64, got 0"),
    "keep negative": (lambda f: f(X, -3, 8), ValueError, r"keep must be between 1 and (D = )?64, got -3"),
    "keep above D": (lambda f: f(X, 65, 8), ValueError, r"keep must be between 1 and (D = )?64, got 65"),
    "bits": (lambda f: f(X, 20, 5), ValueError, r"bits must be (one of )?16, 8,? (or )?4, got 5"),
    "bits 0": (lambda f: f(X, 20, 0), ValueError, r"bits must be (one of )?16, 8,? (or )?4, got 0"),
    "float in 16": (lambda f: f(X, 20, 16), UnsupportedDtypeError, r"convert it first"),
    "weight shape": (lambda f: f(X, 20, 8, WEIGHT[:, :1]), ShapeMismatchError, r"weight"),
    "weight rank": (lambda f: f(X, 20, 8, WEIGHT[0]), ShapeMismatchError, r"weight must (be 3-D|have shape)"),
    "weight dtype": (lambda f: f(X, 20, 8, WEIGHT.int()), UnsupportedDtypeError, r"weight must have .*dtypes?"),
    "weight negative": (lambda f: f(X, 20, 8, -WEIGHT), ValueError, r"weight must not be negative, got -"),
    "weight device": (lambda f: f(X, 20, 8, WEIGHT.to("meta")), DeviceError, r"weight"),
}  # fmt: skip
DECOMPRESS: dict[str, tuple[Call, type[Exception], str]] = {
    "D": (lambda f: f(*ROWS, 128, 20, 4, torch.half), ShapeMismatchError, r"bitmap"),
    "D beyond 32 bits": (lambda f: f(*ROWS, 2**32 + 64, 20, 4, torch.half), ValueError, r"D must .*, got 4294967360"),
    "values": (lambda f: f(*ROWS, 64, 40, 4, torch.half), ShapeMismatchError, r"values"),
    "bits": (lambda f: f(*ROWS, 64, 20, 3, torch.half), ValueError, r"bits must be"),
    "keep": (lambda f: f(*ROWS, 64, 65, 4, torch.half), ValueError, r"keep must be between 1 and (D = )?64, got 65"),
    "scales": (lambda f: f(*ROWS[:2], ROWS[2][:, :, :3], 64, 20, 4, torch.half), ShapeMismatchError, r"scales"),
    "no scales": (lambda f: f(*ROWS[:2], DENSE[2], 64, 20, 4, torch.half), ShapeMismatchError, r"scales"),
    "scales of 16": (lambda f: f(*DENSE[:2], ROWS[2], 64, 20, 16, torch.half), ShapeMismatchError, r"scales"),
    "tokens": (lambda f: f(ROWS[0][:, :, :2], *ROWS[1:], 64, 20, 4, torch.half), ShapeMismatchError, r"values"),
    "bitmap dtype": (lambda f: f(ROWS[0].int(), *ROWS[1:], 64, 20, 4, torch.half), UnsupportedDtypeError, r"bitmap"),
    "values dtype": (lambda f: f(ROWS[0], ROWS[0], ROWS[2], 64, 20, 4, torch.half), UnsupportedDtypeError, r"values"),
    "scales dtype": (lambda f: f(*ROWS[:2], ROWS[2].float(), 64, 20, 4, torch.half), UnsupportedDtypeError, r"scales"),
    "dtype": (lambda f: f(*ROWS, 64, 20, 4, torch.float64), UnsupportedDtypeError, r"dtype"),
    "dtype of 16": (lambda f: f(*DENSE, 64, 20, 16, torch.float32), UnsupportedDtypeError, r"dtype"),
}  # fmt: skip


def builtin_of(kind: type[Exception]) -> type[Exception]:
    return next(b for b in (ValueError, TypeError, RuntimeError) if issubclass(kind, b))


def assert_refused(
    call: Call, kind: type[Exception], message: str, functions: tuple[Any, Any], layer: str
) -> None:
    function, op = functions
    with pytest.raises(kind if layer == "python" else builtin_of(kind), match=message):
        call(function if layer == "python" else op)


@pytest.mark.parametrize("layer", ["python", "op"])
@pytest.mark.parametrize("name", COMPRESS)
def test_compress(name, layer):
    assert_refused(*COMPRESS[name], (htree_ops.kv_compress, ops.kv_compress), layer)


@pytest.mark.parametrize("layer", ["python", "op"])
@pytest.mark.parametrize("name", [n for n in COMPRESS if "bits" not in n and "16" not in n])
def test_prune(name, layer):
    call, kind, message = COMPRESS[name]

    def without_bits(function):
        return lambda x, keep, bits, *weight: function(x, keep, *weight)

    functions = (without_bits(htree_ops.ops.compressed_kv.kv_prune), without_bits(ops.kv_prune))
    assert_refused(call, kind, message, functions, layer)


@pytest.mark.parametrize("layer", ["python", "op"])
@pytest.mark.parametrize("name", DECOMPRESS)
def test_decompress(name, layer):
    assert_refused(*DECOMPRESS[name], (htree_ops.kv_decompress, ops.kv_decompress), layer)


@pytest.mark.parametrize("wrong", [None, 8.0, "8", True], ids=repr)
@pytest.mark.parametrize("place", range(3))
def test_the_ints_of_decompress_have_one_class(place, wrong):
    numbers: list[Any] = [64, 20, 4]
    numbers[place] = wrong
    name = ("D", "keep", "bits")[place]
    with pytest.raises(TypeError, match=f"kv_decompress: {name} must be an int, got {type(wrong).__name__}"):
        htree_ops.kv_decompress(*ROWS, *numbers)


CASE = DecodeCase(name="bad", dtype=torch.float16, D=64, k_keep=20, v_keep=20, S=20, W=4)
NAMES = (
    "q", "k_bitmap", "k_values", "k_scales", "v_bitmap", "v_values", "v_scales", "k_win", "v_win", "comp_len",
    "win_len", "scale", "block_table",
)  # fmt: skip


def lengths(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


#: Changed arguments, class, message, and whether the op checks it too (it does not read lengths on the host).
DECODE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q rank": ({"q": torch.zeros(2, 64).half()}, ShapeMismatchError, r"q must be"),
    "q five dims": ({"q": torch.zeros(2, 4, 1, 2, 64).half()}, ShapeMismatchError, r"q must be"),
    "q width": ({"q": torch.zeros(2, 4, 128).half()}, ShapeMismatchError, r"128|64"),
    "q batch": ({"q": torch.zeros(3, 4, 64).half()}, ShapeMismatchError, r"2|3"),
    "q dtype": ({"q": torch.zeros(2, 4, 64).double()}, UnsupportedDtypeError, r"q must have (one of the )?dtypes?"),
    "heads": ({"q": torch.zeros(2, 3, 64).half()}, ShapeMismatchError, r"multiple of H_kv( =)? 2"),
    "window dtype": ({"k_win": torch.zeros(2, 2, 4, 64)}, UnsupportedDtypeError, r"k_win"),
    "window width": ({"v_win": torch.zeros(2, 2, 4, 128).half()}, ShapeMismatchError, r"v_win"),
    "window tokens": ({"v_win": torch.zeros(2, 2, 5, 64).half()}, ShapeMismatchError, r"v_win"),
    "window heads": ({"k_win": torch.zeros(2, 1, 4, 64).half()}, ShapeMismatchError, r"k_win"),
    "keep": ({"k_keep": 65}, ValueError, r"k_keep must be between 1 and (D = )?64, got 65"),
    "keep 0": ({"v_keep": 0}, ValueError, r"v_keep must be between 1 and (D = )?64, got 0"),
    "other keep": ({"v_keep": 30}, ShapeMismatchError, r"v_values"),
    "bits": ({"k_bits": 7}, ValueError, r"k_bits must be"),
    "other bits": ({"v_bits": 4}, ShapeMismatchError, r"v_values"),
    "scales": ({"k_scales": torch.zeros(2, 2, 19).half()}, ShapeMismatchError, r"k_scales"),
    "bitmap dtype": ({"v_bitmap": torch.zeros(2, 2, 20, 1)}, UnsupportedDtypeError, r"v_bitmap"),
    "lengths shape": ({"comp_len": lengths(1, 2, 3)}, ShapeMismatchError, r"comp_len"),
    "lengths dtype": ({"win_len": lengths(1, 2, dtype=torch.int64)}, UnsupportedDtypeError, r"win_len"),
    "table shape": ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, ShapeMismatchError, r"block_table"),
    "table dtype": ({"block_table": torch.zeros(2, 1)}, UnsupportedDtypeError, r"block_table"),
    "group": ({"hadamard_group": 3}, ValueError, r"hadamard_group must .*divide.* H_kv = 2, got 3"),
    "values of no width": (
        {"v_bitmap": torch.zeros(2, 2, 20, 9, dtype=torch.int64)}, ShapeMismatchError, r"D/64 of v_bitmap .*got 9",
    ),
    "group negative": ({"hadamard_group": -1}, ValueError, r"hadamard_group"),
    "split": ({"split_size": -1}, ValueError, r"split_size"),
    "split beyond 32 bits": ({"split_size": 2**63 - 1}, ValueError, r"split_size must .*, got 9223372036854775807"),
    "scale": ({"scale": math.inf}, ValueError, r"scale must be finite"),
    "device": ({"k_values": torch.zeros(2, 2, 20, 20, dtype=torch.uint8, device="meta")}, DeviceError, r"k_values"),
}  # fmt: skip


@pytest.mark.parametrize("layer", ["python", "op"])
@pytest.mark.parametrize("name", DECODE)
def test_decode(name, layer):
    changes, kind, message = DECODE[name]
    arguments = dict(zip(NAMES, CASE.make_inputs("cpu"), strict=True)) | CASE.options() | changes
    functions = (htree_ops.kv_decode_attention, ops.kv_decode_attention)
    assert_refused(lambda f: f(**arguments), kind, message, functions, layer)


def test_lengths_above_the_capacity_are_refused_where_they_are_known():
    arguments = dict(zip(NAMES, CASE.make_inputs("cpu"), strict=True)) | CASE.options()
    for changes, message in (
        ({"comp_len": lengths(3, 21)}, r"comp_len must lie between 0 and 20, got \[3, 21\]"),
        ({"win_len": lengths(-1, 2)}, r"win_len must lie between 0 and 4, got \[-1, 2\]"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            htree_ops.kv_decode_attention(**(arguments | changes))
        assert not isinstance(caught.value, ShapeMismatchError)


def test_kernels_clamp_lengths(device):
    inputs = list(CASE.make_inputs(device))
    full = ops.kv_decode_attention(*inputs, **CASE.options())
    inputs[9], inputs[10] = (torch.full((2,), n, dtype=torch.int32, device=device) for n in (2**31 - 1, 5))
    for a, e in zip(ops.kv_decode_attention(*inputs, **CASE.options()), full, strict=True):
        assert torch.equal(a, e)
    inputs[9], inputs[10] = (torch.full((2,), -n, dtype=torch.int32, device=device) for n in (1, 2**31))
    out, lse = ops.kv_decode_attention(*inputs, **CASE.options())
    assert not out.any()
    assert (lse == -math.inf).all()


def test_no_tensors_are_refused():
    with pytest.raises(TypeError, match="x must be a Tensor, got list"):
        htree_ops.kv_compress([1.0], 20)
    with pytest.raises(TypeError, match="keep must be an int, got float"):
        htree_ops.ops.compressed_kv.kv_prune(X, 20.0)
    with pytest.raises(TypeError, match="q must be a Tensor, got NoneType"):
        htree_ops.kv_decode_attention(None, *CASE.make_inputs("cpu")[1:], **CASE.options())
    table = torch.ops.htree.rope_cache(5, 64)
    with pytest.raises(ShapeMismatchError, match="apply_rotary_pos_emb_q: q must be 4-D"):
        htree_ops.compat.apply_rotary_pos_emb_q(X[0], *table, torch.arange(5))
    with pytest.raises(ShapeMismatchError, match="apply_rotary_pos_emb_k: k must be 4-D"):
        htree_ops.compat.apply_rotary_pos_emb_k(X[0], *table, torch.arange(5))
    x, row = torch.zeros(2, 3, 5, 64), torch.zeros(1, 5, 64)
    for name, given in {
        "cos": [(torch.zeros(wrong), row) for wrong in ((5, 64), (3, 5, 64), (2, 4, 64), (2, 5, 16))],
        "sin": [(row, row[0])],
    }.items():
        for tables in given:
            with pytest.raises(
                ShapeMismatchError,
                match=rf"^apply_rotary_pos_emb_q: {name} must be \[1 or 2, 5, 64 or 32\] where",
            ) as caught:
                htree_ops.compat.apply_rotary_pos_emb_q(x, *tables)
            assert caught.value.tensor_name == name
