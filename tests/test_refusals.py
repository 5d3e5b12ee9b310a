"""What is refused must say so: forward-mode differentiation, wrong types, absurd options; meta tensors must work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import htree_ops

op = torch.ops.htree
OPTIONS: dict[str, Any] = {"compression_rate": 3, "max_top_nodes": 5, "top_k": 2}


def qkv(device: str = "cpu") -> list[Tensor]:
    return [torch.randn(1, 9, 2, 4, device=device) for _ in range(3)]


TABLE = torch.ones(9, 2)
JVP: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda x: op.attention(x, x, x, 3, 5, 2),
    "tree_build": lambda x: op.tree_build(x, x, 3),
    "rope": lambda x: op.rope(x, TABLE.to(x.device), TABLE.to(x.device), torch.arange(9, device=x.device)),
    "causal_softmax": lambda x: op.causal_softmax(x[0, :, 0, :].t()),
    "causal_softmax_": lambda x: op.causal_softmax_(x[0, :, 0, :].t().clone()),
    "merge_to_global_": lambda x: op.merge_to_global_(
        x[..., 0] * 1, x[..., 0] * 1, x * 1, x[..., 0], x[..., 0], x
    ),
    "hadamard_transform": lambda x: op.hadamard_transform(x),
    "fp8_fake_quant": lambda x: op.fp8_fake_quant(x),
    "rmsnorm_rope": lambda x: op.rmsnorm_rope(
        x.flatten(2),
        torch.ones(8, device=x.device),
        TABLE.repeat(1, 2).to(x.device),
        TABLE.repeat(1, 2).to(x.device),
    ),
}


@pytest.mark.parametrize("name", JVP)
def test_tangents_are_not_dropped(name: str, device: str) -> None:
    x = torch.randn(1, 9, 2, 4, device=device)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"forward-mode|jvp"):
        JVP[name](forward_ad.make_dual(x, torch.ones_like(x)))


def test_meta_tensors_pass_through_function_and_module() -> None:
    q, k, v = (x.to("meta") for x in qkv())
    assert htree_ops.tree_attention(q, k, v, **OPTIONS).shape == q.shape
    layer = htree_ops.HTreeAttention(16, 4, 2, device="meta", **OPTIONS)
    assert layer(torch.empty(2, 9, 16, device="meta")).device.type == "meta"


@pytest.mark.parametrize(
    "options",
    [
        {"compression_rate": 2**31 - 1, "top_k": 1},
        {"compression_rate": 10**9, "top_k": 2},
        {"compression_rate": 2, "top_k": 10**8},
        {"compression_rate": 16, "top_k": 10**6},
    ],
    ids=str,
)
def test_memory_follows_the_length_not_the_options(options: dict[str, int], device: str) -> None:
    """Every list is complete, so the result is dense attention whatever the options."""
    q, k, v = (torch.randn(1, 40, 2, 4, device=device, requires_grad=True) for _ in range(3))
    for max_top_nodes in (5, 64):
        out = htree_ops.tree_attention(q, k, v, max_top_nodes=max_top_nodes, store_parents=False, **options)
        exact = htree_ops.tree_attention(q, k, v, compression_rate=4, max_top_nodes=64, top_k=16)
        if max_top_nodes == 64 or (
            options["top_k"] * options["compression_rate"] >= 40 and options["top_k"] > 1
        ):
            torch.testing.assert_close(out, exact)
        out.sum().backward()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float rate": ({"compression_rate": 2.0}, TypeError, "compression_rate must be an int, got float"),
    "text": ({"top_k": "3"}, TypeError, "top_k must be an int, got str"),
    "none": ({"max_top_nodes": None}, TypeError, "max_top_nodes must be an int, got NoneType"),
    "bool": ({"top_k": True}, TypeError, "top_k must be an int, got bool"),
    "huge": ({"compression_rate": 2**63}, ValueError, "compression_rate must be an int of 64 bits"),
    "zero k": ({"top_k": 0}, ValueError, "top_k must be between 1 and .*, got 0"),
    "wide top": ({"max_top_nodes": 7}, ValueError, r"at most top_k \* compression_rate = 6, got 7"),
    "stride": ({"selection_stride": 2}, ValueError, "power of two that divides compression_rate = 3, got 2"),
    "scale text": ({"scale": "1"}, TypeError, "scale must be a number, got str"),
    "scale overflow": ({"scale": 1e308}, ValueError, "scale must be finite in float32"),
    "base": ({"rope_base": -1.0}, ValueError, "rope_base must be positive and finite"),
    "importance": ({"importance": None}, TypeError, "importance must be a str"),
    "importance value": ({"importance": "foo"}, ValueError, "one of lse_causal, lse, exp_joint, got 'foo'"),
    "scope": ({"scope": "head"}, ValueError, "scope must be one of kv_head, q_head, got 'head'"),
    "store": ({"store_parents": 1}, TypeError, "store_parents must be a bool"),
}


@pytest.mark.parametrize("value", ["a", 2, None])
def test_return_lse_is_a_bool(value: object) -> None:
    with pytest.raises(TypeError, match="tree_attention: return_lse must be a bool, got"):
        htree_ops.tree_attention(*qkv(), **OPTIONS, return_lse=value)


MODULE: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "heads float": ((8, 2.0), {}, TypeError, "num_heads must be an int, got float"),
    "heads text": ((8, "2"), {}, TypeError, "num_heads must be an int, got str"),
    "heads bool": ((8, True), {}, TypeError, "num_heads must be an int, got bool"),
    "width none": ((None, 2), {}, TypeError, "embed_dim must be an int, got NoneType"),
    "width 0": ((0, 2), {}, ValueError, "embed_dim must be between 1 and .*, got 0"),
    "width below 0": ((-4, 2), {}, ValueError, "embed_dim must be between 1 and .*, got -4"),
    "width huge": ((2**62, 2), {}, ValueError, "embed_dim must be between 1 and"),
    "key heads float": ((8, 4, 2.0), {}, TypeError, "num_kv_heads must be an int, got float"),
    "key heads 0": ((8, 4, 0), {}, ValueError, "num_kv_heads must be between 1 and .*, got 0"),
    "head width bool": ((8, 4, 4, True), {}, TypeError, "head_dim must be an int, got bool"),
    "head width float": ((8, 4, 4, 4.0), {}, TypeError, "head_dim must be an int, got float"),
    "bias": ((8, 2), {"bias": "x"}, TypeError, "bias must be a bool, got str"),
    "int8": (
        (8, 2),
        {"dtype": torch.int8},
        htree_ops.UnsupportedDtypeError,
        "dtype must be .*, got torch.int8",
    ),
    "fp8": (
        (8, 2),
        {"dtype": torch.float8_e4m3fn},
        htree_ops.UnsupportedDtypeError,
        "dtype must be torch.float32",
    ),
    "text": ((8, 2), {"dtype": "float"}, htree_ops.UnsupportedDtypeError, "dtype must be .*, got float"),
}


@pytest.mark.parametrize("name", MODULE)
def test_sizes_and_dtype_of_the_module_are_named(name: str) -> None:
    sizes, options, kind, message = MODULE[name]
    with pytest.raises(kind, match=f"HTreeAttention: {message}"):
        htree_ops.HTreeAttention(*sizes, **options)


@pytest.mark.parametrize("name", WRONG)
def test_options_are_named_by_function_and_constructor(name: str) -> None:
    options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        htree_ops.tree_attention(*qkv(), **{**OPTIONS, **options})
    with pytest.raises(kind, match=message):
        htree_ops.HTreeAttention(16, 4, 2, **{**OPTIONS, **options})


def test_the_module_names_a_wrong_input() -> None:
    layer = htree_ops.HTreeAttention(16, 4, 2, **OPTIONS)
    x = torch.randn(1, 9, 16)
    with pytest.raises(
        htree_ops.UnsupportedDtypeError, match=r"x must have the dtype of the parameters.*float64"
    ):
        layer(x.double())
    with pytest.raises(htree_ops.UnsupportedDtypeError, match="int64"):
        layer(x.long())
    with pytest.raises(TypeError, match="x must be a Tensor, got NoneType"):
        layer(None)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_an_output_that_overlaps_itself_is_refused(device: str) -> None:
    x = torch.randn(4, 6, device=device)
    with pytest.raises(RuntimeError, match="elements of out must not share memory"):
        op.causal_softmax.out(x, out=torch.zeros(20, device=device).as_strided((4, 6), (2, 1)))


WRONG_TYPES = {
    "group float": (lambda x: htree_ops.grouped_hadamard(x, 2.0), "group must be an int, got float"),
    "group text": (lambda x: htree_ops.grouped_hadamard(x, "2"), "group must be an int, got str"),
    "scale text": (lambda x: htree_ops.hadamard_transform(x, "1"), "scale must be a number, got str"),
    "scale complex": (lambda x: htree_ops.hadamard_transform_(x, 1j), "scale must be a number, got complex"),
    "block size float": (
        lambda x: htree_ops.causal_softmax(x[0], 512.0),
        "block_size must be an int, got float",
    ),
    "block size text": (
        lambda x: htree_ops.causal_softmax(x[0], "512"),
        "block_size must be an int, got str",
    ),
    "block size bool": (
        lambda x: htree_ops.causal_softmax(x[0], True),
        "block_size must be an int, got bool",
    ),
    "out list": (lambda x: htree_ops.causal_softmax(x[0], out=[1]), "out must be a Tensor, got list"),
    "out array": (
        lambda x: htree_ops.causal_softmax(x[0], out=x[0].numpy()),
        "out must be a Tensor, got ndarray",
    ),
    "group of the module": (lambda x: htree_ops.HadamardTransform(2.0), "group must be an int, got float"),
    "scale of the module": (
        lambda x: htree_ops.HadamardTransform(None, "a"),
        "scale must be a number, got str",
    ),
    "sizes of the module": (
        lambda x: htree_ops.FusedRMSNormRoPE(8.0, 4),
        "hidden_dim must be an int, got float",
    ),
    "head of the module": (
        lambda x: htree_ops.FusedRMSNormRoPE(8, None),
        "head_dim must be an int, got NoneType",
    ),
    "eps of the module": (lambda x: htree_ops.FusedRMSNormRoPE(8, 4, "a"), "eps must be a number, got str"),
    "dtype of the module": (
        lambda x: htree_ops.FusedRMSNormRoPE(8, 4, dtype=torch.complex64),
        "dtype must be .*, got torch.complex64",
    ),
    "nested": (
        lambda x: htree_ops.hadamard_transform(torch.nested.nested_tensor([x[0, 0]], layout=torch.jagged)),
        "x must be a dense tensor, got a nested one",
    ),
    "sparse": (lambda x: htree_ops.hadamard_transform(x[0, 0].to_sparse()), "x must be a dense tensor"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_are_named(name: str) -> None:
    call, message = WRONG_TYPES[name]
    with pytest.raises(TypeError, match=message):
        call(torch.randn(1, 4, 4, 4))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: htree_ops.FusedRMSNormRoPE(-8, 2), "hidden_dim must be between 1"),
        (lambda: htree_ops.FusedRMSNormRoPE(8, 2, -1.0), "eps must be finite and not negative, got -1"),
        (
            lambda: htree_ops.FusedRMSNormRoPE(8, 2, float("nan")),
            "eps must be finite and not negative, got nan",
        ),
        (lambda: htree_ops.HadamardTransform(None, float("nan")), "scale must be finite in float32, got nan"),
        (lambda: htree_ops.hadamard_transform(torch.zeros(4), 1e39), "scale must be finite in float32"),
        (lambda: torch.ops.htree.hadamard_transform(torch.zeros(4), 1e39), "scale must be finite in float32"),
    ],
)
def test_wrong_values_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
    assert htree_ops.hadamard_transform(torch.zeros(4, dtype=torch.float64), 1e39).eq(0).all()


@pytest.mark.parametrize("block_size", [-512, -1, 256, 2**40])
def test_block_sizes_without_a_kernel_have_one_class(block_size: int) -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(
        htree_ops.ArchitectureNotSupportedError, match=f"block_size must be 0 .*, got {block_size}"
    ):
        htree_ops.causal_softmax(x, block_size)
    with pytest.raises(NotImplementedError, match=f"block_size must be 0 .*, got {block_size}"):
        op.causal_softmax(x, block_size)
    with pytest.raises(ValueError, match="block_size must be an int of 64 bits"):
        htree_ops.causal_softmax(x, 2**64)
