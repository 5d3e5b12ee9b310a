"""Clear refusals of forward-mode differentiation, wrong types and absurd options; meta tensors work."""

import copy
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import htree_ops
from htree_ops import compat
from htree_ops.ops.hadamard import hadamard_transform_
from htree_ops.ops.tree_attention import attention_backward, attention_forward

op = torch.ops.htree
OPTIONS: dict[str, Any] = {"compression_rate": 3, "max_top_nodes": 5, "top_k": 2}


def qkv(device: str = "cpu") -> list[Tensor]:
    return [torch.randn(1, 9, 2, 4, device=device) for _ in range(3)]


TABLE = torch.ones(9, 2)
JVP: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda x: op.attention(x, x, x, 3, 5, 2),
    "tree_attention": lambda x: op.tree_attention(x, x, x, 3, 5, 2),
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
def test_tangents_are_not_dropped(name, device):
    x = torch.randn(1, 9, 2, 4, device=device)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"forward-mode|jvp"):
        JVP[name](forward_ad.make_dual(x, torch.ones_like(x)))


def test_meta_tensors_pass_through_function_and_module():
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
def test_memory_follows_the_length_not_the_options(options, device):
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
    "none": ({"compression_rate": None}, TypeError, "compression_rate must be an int, got NoneType"),
    "bool": ({"top_k": True}, TypeError, "top_k must be an int, got bool"),
    "huge": ({"compression_rate": 2**63}, ValueError, "compression_rate must be an int of 64 bits"),
    "zero k": ({"top_k": 0}, ValueError, "top_k must be between 1 and .*, got 0"),
    "no top": ({"max_top_nodes": 0}, ValueError, r"max_top_nodes must be at least 1 and below 2\^31, got 0"),
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
def test_return_lse_is_a_bool(value):
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
    "device": ((8, 2), {"device": "foo"}, htree_ops.DeviceError, "device must be a device of .*, got 'foo'"),
    "device bool": ((8, 2), {"device": True}, TypeError, "device must be a torch.device, .*, got bool"),
    "group": (
        (8, 2),
        {"cp_group": "x"},
        TypeError,
        "cp_group must be a ProcessGroup or DeviceMesh, got str",
    ),
}


@pytest.mark.parametrize("name", MODULE)
def test_sizes_and_dtype_of_the_module_are_named(name):
    sizes, options, kind, message = MODULE[name]
    with pytest.raises(kind, match=f"HTreeAttention: {message}"):
        htree_ops.HTreeAttention(*sizes, **options)


@pytest.mark.parametrize("name", WRONG)
def test_options_are_named_by_function_and_constructor(name):
    options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        htree_ops.tree_attention(*qkv(), **{**OPTIONS, **options})
    with pytest.raises(kind, match=message):
        htree_ops.HTreeAttention(16, 4, 2, **{**OPTIONS, **options})


def test_the_module_names_a_wrong_input():
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


def test_an_output_that_overlaps_itself_is_refused(device):
    x = torch.randn(4, 6, device=device)
    with pytest.raises(RuntimeError, match="elements of out must not share memory"):
        op.causal_softmax.out(x, out=torch.zeros(20, device=device).as_strided((4, 6), (2, 1)))


WRONG_TYPES = {
    "group float": (lambda x: htree_ops.grouped_hadamard(x, 2.0), "group must be an int, got float"),
    "group text": (lambda x: htree_ops.grouped_hadamard(x, "2"), "group must be an int, got str"),
    "scale text": (lambda x: htree_ops.hadamard_transform(x, "1"), "scale must be a number, got str"),
    "scale complex": (lambda x: hadamard_transform_(x, 1j), "scale must be a number, got complex"),
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
def test_wrong_types_are_named(name):
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
def test_wrong_values_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
    assert htree_ops.hadamard_transform(torch.zeros(4, dtype=torch.float64), 1e39).eq(0).all()


@pytest.mark.parametrize("block_size", [-512, -1, 256, 2**40])
def test_block_sizes_without_a_kernel_have_one_class(block_size):
    x = torch.zeros(3, 4)
    with pytest.raises(
        htree_ops.ArchitectureNotSupportedError, match=f"block_size must be 0 .*, got {block_size}"
    ):
        htree_ops.causal_softmax(x, block_size)
    with pytest.raises(NotImplementedError, match=f"block_size must be 0 .*, got {block_size}"):
        op.causal_softmax(x, block_size)
    with pytest.raises(ValueError, match="block_size must be an int of 64 bits"):
        htree_ops.causal_softmax(x, 2**64)


class Word(str, enum.Enum):
    silu = "silu"
    gate = "gate"
    channel = "channel"


class LooksLikeSilu:
    def __str__(self) -> str:
        return "silu"


def test_words_may_be_members_of_an_enum_of_strings():
    x, w = torch.randn(3, 4), torch.randn(8, 4)
    expected = htree_ops.gated_mlp(x, w, w, "silu", "gate"), htree_ops.fp8_compute_scale(x, "channel")

    def calls(x):
        return htree_ops.gated_mlp(x, w, w, Word.silu, Word.gate), htree_ops.fp8_compute_scale(
            x, Word.channel
        )

    for function in (calls, torch.compile(calls, backend="eager", fullgraph=True)):
        for actual, wanted in zip(function(x), expected, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: htree_ops.gated_mlp(x, x, x, LooksLikeSilu()),
            "gated_mlp: activation must be a str, got Looks",
        ),
        (lambda x: htree_ops.gated_mlp(x, x, x, "silu", 1), "gated_mlp: act_on must be a str, got int"),
        (lambda x: htree_ops.fp8_quantize(x, None, 1), "fp8_quantize: granularity must be a str, got int"),
        (
            lambda x: htree_ops.fp8_fake_quant(x, None, 1),
            "fp8_fake_quant: granularity must be a str, got int",
        ),
    ],
)
def test_words_are_strings(call, message):
    with pytest.raises(TypeError, match=message):
        call(torch.randn(4, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: htree_ops.tree_attention(), "tree_attention() missing 3 required positional arguments: "),
        (
            lambda q: htree_ops.tree_attention(q, q),
            "tree_attention() missing 1 required positional argument: 'v'",
        ),
        (
            lambda q: htree_ops.tree_attention(q, q, q, foo=1),
            "tree_attention: keywords must be those of its signature or among compression_rate, max_top_nodes, ",
        ),
        (
            lambda q: htree_ops.gated_mlp(q, q, q, "silu", "up", "z"),
            "gated_mlp() takes from 3 to 5 positional arguments but 6 were given",
        ),
    ],
)
def test_wrong_numbers_of_arguments_have_the_message_of_python(call, message):
    with pytest.raises(TypeError) as caught:
        call(torch.randn(1, 9, 2, 4))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (None, "parents must be a list of Tensors, got NoneType"),
        (torch.zeros(1), "parents must be a list of Tensors, got Tensor"),
        (3, "parents must be a list of Tensors, got int"),
        ((1, 2), r"parents\[0\] must be a Tensor, got int"),
        ([torch.zeros(1), None], r"parents\[1\] must be a Tensor, got NoneType"),
    ],
    ids=str,
)
def test_parents_are_a_list_of_tensors(parents, message):
    q, k, v = qkv()
    results = attention_forward(q, k, v, **OPTIONS)[:3]
    with pytest.raises(TypeError, match=f"attention_backward: {message}"):
        attention_backward(q, q, k, v, *results, parents, **OPTIONS)


def test_parents_may_be_a_tuple():
    q, k, v = qkv()
    *results, parents = attention_forward(q, k, v, **OPTIONS)
    assert parents
    for a, b in zip(
        attention_backward(q, q, k, v, *results, tuple(parents), **OPTIONS),
        attention_backward(q, q, k, v, *results, parents, **OPTIONS),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scale", [2**200, -(2**2000), 2**2000], ids=["2**200", "-2**2000", "2**2000"])
def test_large_ints_for_numbers_are_not_finite(scale):
    for call in (
        lambda: htree_ops.tree_attention(*qkv(), scale=scale, **OPTIONS),
        lambda: htree_ops.hadamard_transform(torch.zeros(4), scale),
        lambda: htree_ops.fp8_quantize(torch.zeros(4), scale),
    ):
        with pytest.raises(ValueError, match=r"scale must be (positive and )?finite in float32, got"):
            call()


def test_a_count_keeps_its_word_where_an_argument_is_renamed():
    x, empty = torch.randn(1, 2, 9, 4), torch.ones(0, 2)
    with pytest.raises(htree_ops.ShapeMismatchError, match="cos must hold at least 1 positions, got"):
        compat.apply_rotary_pos_emb_q(x, empty, empty, torch.arange(9))
    table = torch.ones(9, 2)
    with pytest.raises(
        htree_ops.ShapeMismatchError, match=r"size 0 of position_ids must be 9 \(T of q\)"
    ) as caught:
        compat.apply_rotary_pos_emb_q(x, table, table, torch.arange(5))
    assert caught.value.tensor_name == "position_ids"


def test_a_name_for_messages_keeps_the_facts():
    with pytest.raises(htree_ops.UnsupportedDtypeError, match=r"^foo: thing must have dtype") as caught:
        compat.validate_fp8_quantize_inputs(torch.zeros(4).int(), op="foo", name="thing")
    assert (caught.value.dtype, caught.value.tensor_name) == (torch.int32, "thing")


@pytest.mark.parametrize("name", ["a", "b"])
def test_operands_of_fp8_gemm_are_checked_before_they_are_quantised(name):
    good = {"a": torch.randn(3, 4), "b": torch.randn(4, 5)}
    shape = r"\[M, K\]" if name == "a" else r"\[K, N\]"
    for wrong in (torch.randn(4), torch.randn(())):
        scale = {f"{name}_scale": torch.ones(4, 1)}
        with pytest.raises(
            htree_ops.ShapeMismatchError, match=f"fp8_gemm: {name} must be 2-D {shape}"
        ) as rank:
            htree_ops.fp8_gemm(**(good | {name: wrong}), **scale)
        assert (rank.value.expected, rank.value.tensor_name) == (2, name)
    with pytest.raises(htree_ops.UnsupportedDtypeError, match=f"fp8_gemm: {name} must have dtype") as dtype:
        htree_ops.fp8_gemm(**(good | {name: good[name].int()}))
    assert torch.float8_e4m3fn in dtype.value.supported_dtypes


@pytest.mark.parametrize("num_heads", [0, -1, 3, 16, 2**62])
def test_invalid_num_heads_never_reach_the_tuner(monkeypatch, num_heads):
    from htree_ops.ops.rmsnorm_rope import function

    asked = []
    monkeypatch.setattr(function, "configured", lambda *arguments: asked.append(arguments))
    x, weight, table = torch.randn(1, 2, 8), torch.ones(8), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"rmsnorm_rope: .*num_heads"):
        htree_ops.rmsnorm_rope(x, weight, table, table, num_heads=num_heads)
    assert not asked
    htree_ops.rmsnorm_rope(x, weight, table, table, num_heads=2)
    assert len(asked) == 1
